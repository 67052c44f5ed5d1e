// Evicts a memory range from all caches, as a pass over more memory than the caches hold would.
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Returns whether this processor supports it.
extern "C" int32_t atmm_evict(const char* start, int64_t bytes) {
  constexpr int64_t kLine = 64;
#if defined(__x86_64__)
  for (int64_t i = 0; i < bytes; i += kLine) {
#if defined(__CLFLUSHOPT__)
    _mm_clflushopt(const_cast<char*>(start + i));
#else
    _mm_clflush(start + i);
#endif
  }
  if (bytes > 0) _mm_clflush(start + bytes - 1);
  _mm_mfence();
  return 1;
#else
  (void)start, (void)bytes, (void)kLine;
  return 0;
#endif
}
