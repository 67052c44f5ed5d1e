// Products by the matrix tiles of a processor (AMX): a row of a tile has 64 bytes, and one instruction multiplies 16 rows
// of weights, in place, with 16 tokens.
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__linux__)
#define ATMM_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

namespace atmm {
namespace {

// Linux lends tiles to a process that asks for them.
inline bool has_tiles() {
  static const bool has = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return has;
}

constexpr int64_t kTileRows = 16, kTileBytes = 1024, kRowBytes = 64;
constexpr int64_t kStripe = 2 * kTileRows;          // rows of weights that are multiplied together
constexpr int64_t kTokenBytes = 1024 * 1024;        // of tokens: they stay in the second-level cache beside a stripe

// The calling thread's tiles: eight of 16 rows.
struct Tiles {
  Tiles() {
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } form;
    asm volatile("ldtilecfg %0" : : "m"(form));
  }
  ~Tiles() { _tile_release(); }
};

using Bytes = std::unique_ptr<uint8_t, decltype(&std::free)>;

inline Bytes allocate_bytes(int64_t count) {
  Bytes made(static_cast<uint8_t*>(std::aligned_alloc(kRowBytes, count)), &std::free);
  if (!made) throw std::bad_alloc();
  return made;
}

// Tokens as right-hand sides: panels of 16 tokens, of which each tile has 64 bytes, four of a token after the other.
struct Panels {
  Panels(int64_t num_tokens, int64_t num_bytes)
      : num_tokens(num_tokens),
        num_bytes(num_bytes),
        size((num_bytes + kRowBytes - 1) / kRowBytes * kTileBytes),
        values(allocate_bytes((num_tokens + kTileRows - 1) / kTileRows * size)) {}

  // The panel of the tokens from t on, which is a multiple of 16; absent values are zero before bits are flipped.
  void fill(int64_t t, const void* x, int64_t stride, int flipped = 0) {
    Floats square[kWidth];
    for (int64_t i = 0; i < num_bytes; i += kRowBytes) {
      const __mmask64 present = ~__mmask64(0) >> (kRowBytes - std::min(kRowBytes, num_bytes - i));
      for (int64_t j = 0; j < kTileRows; ++j) {
        const auto* from = static_cast<const uint8_t*>(x) + (t + j) * stride + i;
        const __m512i row = t + j < num_tokens ? _mm512_maskz_loadu_epi8(present, from) : _mm512_setzero_si512();
        square[j] = Floats(_mm512_castsi512_ps(_mm512_xor_si512(row, _mm512_set1_epi8(char(flipped)))));
      }
      transpose(square);
      for (int64_t j = 0; j < kTileRows; ++j)
        store(reinterpret_cast<float*>(values.get() + t / kTileRows * size + i * kTileRows + j * kRowBytes), square[j]);
    }
  }

  int64_t num_tokens, num_bytes, size;
  Bytes values;
};

// The outputs of 16 tokens for a stripe: y[t * y_token + r], for `tokens` tokens and `rows` rows.
template <typename T>
struct Outputs {
  T* y;
  int64_t y_token, tokens, rows;

  void fetch(int64_t t) const {
    if (t < tokens) __builtin_prefetch(y + t * y_token, 1, 3);
  }

  // even, odd: the values of every second row, for all tokens.
  void write(Floats* even, Floats* odd) const {
    using Places = std::make_integer_sequence<int, kWidth>;
    if constexpr (sizeof(T) == 2) {  // pairs of rows, as one value
      for (int64_t j = 0; j < kTileRows; ++j) even[j] = pairs(even[j], odd[j]);
      transpose(even);
      for (int64_t t = 0; t < std::min(kTileRows, tokens); ++t)
        _mm512_mask_storeu_epi16(y + t * y_token, uint32_t((uint64_t(1) << rows) - 1), _mm512_castps_si512(__m512(even[t])));
    } else {
      transpose(even);
      transpose(odd);
      for (int64_t t = 0; t < std::min(kTileRows, tokens); ++t) {
        store(y + t * y_token, interleave<0>(even[t], odd[t], Places()), std::min(kWidth, rows));
        if (rows > kWidth)
          store(y + t * y_token + kWidth, interleave<8>(even[t], odd[t], Places()), rows - kWidth);
      }
    }
  }

  static Floats pairs(Floats even, Floats odd) {
    const auto bits = [](Floats values) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(__m512(values))); };
    return Floats(_mm512_castsi512_ps(_mm512_or_si512(bits(even), _mm512_slli_epi32(bits(odd), 16))));
  }

  template <int kFirst, int... J>
  static Floats interleave(Floats even, Floats odd, std::integer_sequence<int, J...>) {
    return pick<(kFirst + J / 2 + J % 2 * kWidth)...>(even, odd);
  }
};

// The sums of a stripe of rows with N panels: in sums[n] those of every second row with the tokens of panel n, followed by
// the others. Rows [coming, stop), counted from `w`, are fetched meanwhile, and so are the lines of the outputs.
template <bool kIntegers, int N, typename T>
inline void multiply_stripe(float (*sums)[kStripe * kTileRows], const uint8_t* w, int64_t stride, const uint8_t* x,
                            int64_t panel, int64_t coming, int64_t stop, const Outputs<T>& outputs) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < panel; i += kTileBytes, w += kRowBytes) {
    for (int64_t r = coming; r < stop; ++r) __builtin_prefetch(w + r * stride, 0, 2);
    outputs.fetch(i / kTileBytes);
    _tile_loadd(4, w, 2 * stride);
    _tile_loadd(5, w + stride, 2 * stride);
    _tile_loadd(6, x + i, kRowBytes);
    if constexpr (N == 2) _tile_loadd(7, x + panel + i, kRowBytes);
    if constexpr (kIntegers) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
      if constexpr (N == 2) _tile_dpbssd(2, 4, 7);
      if constexpr (N == 2) _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(2, 4, 7);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], kRowBytes);
  _tile_stored(1, sums[0] + kTileRows * kTileRows, kRowBytes);
  if constexpr (N == 2) {
    _tile_stored(2, sums[1], kRowBytes);
    _tile_stored(3, sums[1] + kTileRows * kTileRows, kRowBytes);
  }
}

// y[t * y_token + o] for rows o in [first, stop) of the weights. finish(o, t, sums): what is stored for row o and the 16
// tokens from t on.
template <bool kIntegers, typename T, typename Finish>
void multiply_tiles(T* y, int64_t y_token, const void* weights, int64_t stride, int64_t first, int64_t stop,
                    const Panels& x, Finish finish) {
  const Tiles tiles;
  alignas(64) float sums[2][kStripe * kTileRows];
  const int64_t width = x.size / kTileRows;  // of a row in whole tiles
  const int64_t block = std::max<int64_t>(2, kTokenBytes / x.size / 2 * 2) * kTileRows;
  Bytes copy(nullptr, &std::free);
  for (int64_t start = 0; start < x.num_tokens; start += block) {
    const int64_t end = std::min(x.num_tokens, start + block), num_pairs = (end - start + kStripe - 1) / kStripe;
    const int64_t per = (kStripe + num_pairs - 1) / num_pairs;  // rows of the next stripe that a pair of panels fetches
    for (int64_t o = first; o < stop; o += kStripe) {
      const int64_t rows = std::min(kStripe, stop - o);
      const auto* w = static_cast<const uint8_t*>(weights) + o * stride;
      int64_t own_stride = stride;
      if (rows < kStripe || width > x.num_bytes) {  // what follows in memory is not part of these rows
        if (!copy) copy = allocate_bytes(kStripe * width);
        std::fill(copy.get(), copy.get() + kStripe * width, 0);
        for (int64_t r = 0; r < rows; ++r) std::memcpy(copy.get() + r * width, w + r * stride, x.num_bytes);
        asm volatile("" : : : "memory");  // which the instructions for tiles read
        w = copy.get();
        own_stride = width;
      }
      for (int64_t t = start; t < end; t += 2 * kTileRows) {
        const uint8_t* panel = x.values.get() + t / kTileRows * x.size;
        const int64_t coming = kStripe + (t - start) / kStripe * per;
        Outputs<T> outputs{y + t * y_token + o, y_token, end - t, rows};
        const auto multiply = outputs.tokens > kTileRows ? multiply_stripe<kIntegers, 2, T> : multiply_stripe<kIntegers, 1, T>;
        multiply(sums, w, own_stride, panel, x.size, coming, coming + per, outputs);
        for (int64_t n = 0; outputs.tokens > 0; ++n) {
          Floats values[2][kTileRows];
          for (int64_t r = 0; r < kStripe; ++r) {
            Floats own = load(sums[n] + (r % 2 * kTileRows + r / 2) * kTileRows);
            if constexpr (kIntegers) own = Floats(_mm512_cvtepi32_ps(_mm512_castps_si512(__m512(own))));
            values[r % 2][r / 2] = r < rows ? finish(o + r, t + n * kTileRows, own) : Floats{};
          }
          outputs.write(values[0], values[1]);
          outputs.y += kTileRows * y_token;
          outputs.tokens -= n ? outputs.tokens : kTileRows;
        }
      }
    }
  }
}

}  // namespace
}  // namespace atmm

#endif
