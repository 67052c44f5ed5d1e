// Operations on one vector register, in the vector extensions common to GCC and Clang: one source for every target CPU.
// Vectors are never wider than a register, because compilers pass wider vectors through memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace atmm {

#if defined(__AVX512F__)
constexpr int64_t kWidth = 16;
#else
constexpr int64_t kWidth = 8;
#endif

// Before a loop over registers: GCC keeps an array in registers only if every loop over it is unrolled, and its own
// heuristics leave some loops as they are; the array then passes through memory in each iteration.
#define UNROLLED _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Bits __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

struct BFloat16 {
  uint16_t bits;
};

constexpr int64_t kSerial = 32 * 1024;  // values; smaller inputs are faster on one thread than waking threads

inline Floats splat(float value) { return Floats{} + value; }

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

// GCC 12 divides a conversion of all halves of a register with AVX-512 into two.
inline Floats widened(Halves halves) {
#if defined(__AVX512F__)
  return Floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(__m256i(halves)), 16));
#else
  return Floats(__builtin_convertvector(halves, Bits) << 16);
#endif
}

inline Floats load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return widened(halves);
}

inline float load_one(const float* from) { return *from; }

inline float load_one(const BFloat16* from) {
  const uint32_t bits = uint32_t(from->bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The first `count` values of a register; nothing past them is read.
inline Floats load(const float* from, int64_t count) {
#if defined(__AVX512F__)
  return Floats(_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from));
#else
  Floats values = {};
  std::memcpy(&values, from, count * sizeof *from);
  return values;
#endif
}

inline Floats load(const BFloat16* from, int64_t count) {
  Halves halves = {};
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m256i bits = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), from);
  std::memcpy(&halves, &bits, sizeof halves);
#else
  std::memcpy(&halves, from, count * sizeof *from);
#endif
  return widened(halves);
}

// To the nearest bfloat16, ties to even; NaN stays NaN. Some processors flush subnormal numbers (below 1e-38) to zero.
inline Halves round_to_bfloat16(Floats values) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh(__m512(values));
  Halves halves;
  std::memcpy(&halves, &rounded, sizeof halves);
  return halves;
#else
  Bits bits;
  std::memcpy(&bits, &values, sizeof bits);
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits nan = Bits((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40) & nan), Halves);
#endif
}

// Values that the type of the second argument can hold, for several operations that each round.
inline Floats rounded(Floats values, const float*) { return values; }

// Ties to even. NaN stays NaN: NaNs converted from bfloat16 have no low bits that could overflow.
inline Floats rounded(Floats values, const BFloat16*) {
#if defined(__AVX512BF16__)
  return widened(round_to_bfloat16(values));
#endif
  Bits bits;
  std::memcpy(&bits, &values, sizeof bits);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  std::memcpy(&values, &bits, sizeof bits);
  return values;
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline void store(BFloat16* to, Floats values) {
  const Halves halves = round_to_bfloat16(values);
  std::memcpy(to, &halves, sizeof halves);
}

// The first `count` values of a register; nothing past them is written.
inline void store(float* to, Floats values, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), __m512(values));
#else
  std::memcpy(to, &values, count * sizeof *to);
#endif
}

inline void store(BFloat16* to, Floats values, int64_t count) {
  const Halves halves = round_to_bfloat16(values);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  __m256i bits;
  std::memcpy(&bits, &halves, sizeof bits);
  _mm256_mask_storeu_epi16(to, __mmask16((1u << count) - 1), bits);
#else
  std::memcpy(to, &halves, count * sizeof *to);
#endif
}

inline void store_one(float* to, float value) { *to = value; }

inline void store_one(BFloat16* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#if defined(__AVX512BF16__)
// Intel cores issue one product of pairs, or four float32 products, in two cycles: 88 and 176 GFLOP/s on an Emerald
// Rapids (docs/decisions/0040). AMD cores issue two products of pairs per cycle.
inline bool multiplies_pairs_fast() {
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel");
}
#endif

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0, to a few units in the last place. Results below 2^-125 are clamped to about 2^-125. NaN stays NaN.
inline Floats exp2(Floats x) {
  const Floats low = splat(-125.0f);
  const Floats clamped = x < low ? low : x;
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits
  const Floats shifted = clamped + magic;
  const Floats part = clamped - (shifted - magic);
  Floats value = splat(1.5252734e-5f);
  for (const float factor :
       {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    value = value * part + factor;
  Bits bits, power;
  std::memcpy(&bits, &value, sizeof bits);
  std::memcpy(&power, &shifted, sizeof power);
  bits += power << 23;
  std::memcpy(&value, &bits, sizeof value);
  return value + (x - x);
}

// The smallest multiple of N that is not below `value`.
template <int64_t N>
constexpr int64_t whole(int64_t value) {
  return (value + N - 1) / N * N;
}

// Elements J of the concatenation of two vectors.
template <int... J>
inline Floats pick(Floats a, Floats b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, J...);
#else
  return __builtin_shuffle(a, b, Bits{J...});
#endif
}

// Exchanges, in each square of 2 S values, the upper right quarter with the lower left quarter.
template <int S, int... J>
inline void exchange(Floats* square, std::integer_sequence<int, J...>) {
  for (int64_t i = 0; i < kWidth; ++i) {
    if (i & S) continue;
    const Floats upper = square[i], lower = square[i + S];
    square[i] = pick<(J & S ? kWidth + J - S : J)...>(upper, lower);
    square[i + S] = pick<(J & S ? kWidth + J : J + S)...>(upper, lower);
  }
}

// Transposes a square matrix of kWidth row vectors.
inline void transpose(Floats* square) {
  using Places = std::make_integer_sequence<int, kWidth>;
  exchange<1>(square, Places());
  exchange<2>(square, Places());
  exchange<4>(square, Places());
  if constexpr (kWidth == 16) exchange<8>(square, Places());
}

// Non-temporal store, for memory that is not read again soon: avoids reading the line before it is overwritten. `to`
// must be aligned to the bytes written.
inline void stream(float* to, Floats values) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, __m512(values));
#else
  store(to, values);
#endif
}

inline void stream(BFloat16* to, Floats values) {
#if defined(__AVX512F__)
  const Halves halves = round_to_bfloat16(values);
  __m256i bits;
  std::memcpy(&bits, &halves, sizeof bits);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits);
#else
  store(to, values);
#endif
}

// Makes streamed values visible to other threads.
inline void fence() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

}  // namespace atmm
