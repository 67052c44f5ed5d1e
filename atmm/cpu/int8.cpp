// y[t, o] = x_scale[t] * w_scale[o] * sum_i q[t, i] * w[o, i] + bias[o] for weights w in eight-bit integers, where
// q[t] = round(x[t] / x_scale[t]) and x_scale[t] maps the largest value of a token to 127. Sums are exact.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "vectors.h"

namespace atmm {
namespace {

#if defined(__AVX512VNNI__)

constexpr int64_t kGroup = 64;  // bytes of a register
constexpr float kLargest = 127.0f, kSmallest = 1e-12f;
constexpr int kStreams = 4, kTokens = 5;  // of a tile: with the sums of weights, 29 of 32 registers
constexpr int64_t kAhead = 1024;  // prefetch distance in bytes

// A token in unsigned integers: q + 128. The instruction multiplies unsigned with signed integers.
template <typename T>
float encode(uint8_t* to, const T* x, int64_t d_in) {
  Floats largest = {};
  int64_t i = 0;
  for (; i + kWidth <= d_in; i += kWidth)
    largest = Floats(_mm512_max_ps(__m512(largest), _mm512_abs_ps(__m512(load(x + i)))));
  if (i < d_in) largest = Floats(_mm512_max_ps(__m512(largest), _mm512_abs_ps(__m512(load(x + i, d_in - i)))));
  const float scale = std::max(_mm512_reduce_max_ps(__m512(largest)), kSmallest) / kLargest;
  for (i = 0; i < d_in; i += kWidth) {
    const Floats values = (i + kWidth <= d_in ? load(x + i) : load(x + i, d_in - i)) / splat(scale);
    const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(__m512(values)), _mm512_set1_epi32(128));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(rounded));
  }
  return scale;
}

template <typename T>
struct Product {
  T* y;
  int64_t y_token;
  const uint8_t* x;
  const float* x_scale;
  int64_t x_stride;
  const int8_t* w;
  int64_t w_stride;
  const float* w_scale;
  const T* bias;  // may be null
  int64_t d_in;
};

// The sums of up to four registers, together: one after the other they take half the time of a layer with few inputs.
template <int R>
inline __m128i totals(const __m512i (&sums)[R]) {
  static_assert(R <= 4);
  __m512i four[4] = {};
  UNROLLED for (int r = 0; r < R; ++r) four[r] = sums[r];
  const auto added = [](__m512i low, __m512i high) { return _mm512_add_epi32(low, high); };
  const __m512i first = added(_mm512_unpacklo_epi32(four[0], four[1]), _mm512_unpackhi_epi32(four[0], four[1]));
  const __m512i second = added(_mm512_unpacklo_epi32(four[2], four[3]), _mm512_unpackhi_epi32(four[2], four[3]));
  const __m512i both = added(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Features o + r * per for r < R, of M tokens from `t`. The first tile of these features also prefetches, and sums
// their weights: 128 times the sums in `offsets`.
template <typename T, int R, int M, bool kFirst>
inline void tile(const Product<T>& product, int64_t o, int64_t per, int64_t t, __m128i* offsets) {
  const int8_t* w = product.w + o * product.w_stride;
  const int64_t stream = per * product.w_stride;
  const uint8_t* x = product.x + t * product.x_stride;
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums[M][R] = {}, weights[R] = {};
  for (int64_t i = 0; i < product.d_in; i += kGroup) {
    const __mmask64 present = ~__mmask64(0) >> (kGroup - std::min(kGroup, product.d_in - i));
    __m512i rows[R];
    UNROLLED for (int r = 0; r < R; ++r) {
      rows[r] = _mm512_maskz_loadu_epi8(present, w + r * stream + i);
      if constexpr (kFirst) {
        __builtin_prefetch(w + r * stream + i + kAhead, 0, 3);
        weights[r] = _mm512_dpbusd_epi32(weights[r], ones, rows[r]);
      }
    }
    UNROLLED for (int m = 0; m < M; ++m) {
      const __m512i values = _mm512_loadu_si512(x + m * product.x_stride + i);
      UNROLLED for (int r = 0; r < R; ++r) sums[m][r] = _mm512_dpbusd_epi32(sums[m][r], values, rows[r]);
    }
  }
  float scales[kStreams] = {}, bias[kStreams] = {};
  UNROLLED for (int r = 0; r < R; ++r) {
    scales[r] = product.w_scale[o + r * per];
    if (product.bias) bias[r] = load_one(product.bias + o + r * per);
  }
  if constexpr (kFirst) *offsets = _mm_slli_epi32(totals(weights), 7);
  UNROLLED for (int m = 0; m < M; ++m) {
    __m512i own[R];
    UNROLLED for (int r = 0; r < R; ++r) own[r] = sums[m][r];
    const __m128 sum = _mm_cvtepi32_ps(_mm_sub_epi32(totals(own), *offsets));
    const __m128 scale = _mm_mul_ps(_mm_set1_ps(product.x_scale[t + m]), _mm_loadu_ps(scales));
    T values[kWidth];
    store(values, Floats(_mm512_castps128_ps512(_mm_fmadd_ps(sum, scale, _mm_loadu_ps(bias)))));
    UNROLLED for (int r = 0; r < R; ++r) product.y[(t + m) * product.y_token + o + r * per] = values[r];
  }
}

template <typename T, int R, bool kFirst, int M>
inline void tile_of(int64_t size, const Product<T>& product, int64_t o, int64_t per, int64_t t, __m128i* offsets) {
  if (size == M) return tile<T, R, M, kFirst>(product, o, per, t, offsets);
  if constexpr (M > 1) tile_of<T, R, kFirst, M - 1>(size, product, o, per, t, offsets);
}

// Features [first, first + R * per) of a few tokens, in tiles of nearly equal size.
template <typename T, int R>
void streams(const Product<T>& product, int64_t first, int64_t per, int64_t num_tokens) {
  const int64_t num_tiles = (num_tokens + kTokens - 1) / kTokens, largest = (num_tokens + num_tiles - 1) / num_tiles;
  for (int64_t o = first; o < first + per; ++o) {
    __m128i offsets;
    tile_of<T, R, true, kTokens>(largest, product, o, per, 0, &offsets);
    for (int64_t k = 1, t = largest; k < num_tiles; ++k) {
      const int64_t size = (num_tokens - t + num_tiles - k - 1) / (num_tiles - k);
      tile_of<T, R, false, kTokens>(size, product, o, per, t, &offsets);
      t += size;
    }
  }
}

// Weights of kRows features with four inputs of each side by side: one register has 16 features, and a product with
// four inputs of a token, repeated, adds to 16 sums at once.
constexpr int kRegisters = 2, kRows = 16 * kRegisters, kWideTokens = 10;
constexpr int64_t kManyTokens = 48;  // from which packing costs less than it saves

struct Packed {
  explicit Packed(int64_t d_in)
      : groups((d_in + 3) / 4), values(static_cast<int32_t*>(std::aligned_alloc(64, groups * kRows * 4)), &std::free) {
    if (!values) throw std::bad_alloc();
  }

  void fill(const int8_t* w, int64_t w_stride, int64_t d_in, int64_t num_rows) {
    Floats square[kWidth];
    for (int64_t i = 0; i < d_in; i += kGroup) {
      const __mmask64 present = ~__mmask64(0) >> (kGroup - std::min(kGroup, d_in - i));
      const int64_t count = std::min(kWidth, groups - i / 4);
      for (int v = 0; v < kRegisters; ++v) {
        for (int64_t r = 0; r < kWidth; ++r) {
          const int8_t* from = w + (16 * v + r) * w_stride + i;
          __builtin_prefetch(from + kRows * w_stride, 0, 3);
          const __m512i row =
              16 * v + r < num_rows ? _mm512_maskz_loadu_epi8(present, from) : _mm512_setzero_si512();
          square[r] = Floats(_mm512_castsi512_ps(row));
        }
        transpose(square);
        for (int64_t j = 0; j < count; ++j)
          _mm512_store_ps(values.get() + (i / 4 + j) * kRows + 16 * v, __m512(square[j]));
      }
    }
    for (int v = 0; v < kRegisters; ++v) {
      __m512i sums = {};
      for (int64_t g = 0; g < groups; ++g) sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), load(g, v));
      offsets[v] = _mm512_slli_epi32(sums, 7);  // 128 times
    }
  }

  __m512i load(int64_t group, int v) const { return _mm512_load_si512(values.get() + group * kRows + 16 * v); }

  int64_t groups;
  std::unique_ptr<int32_t, decltype(&std::free)> values;
  __m512i offsets[kRegisters];
};

// Features [o, o + num_rows) of M tokens from `t`.
template <typename T, int M>
inline void packed_tile(const Product<T>& product, const Packed& packed, int64_t o, int64_t num_rows, int64_t t) {
  const uint8_t* x = product.x + t * product.x_stride;
  __m512i sums[M][kRegisters] = {};
  for (int64_t g = 0; g < packed.groups; ++g) {
    __m512i rows[kRegisters];
    UNROLLED for (int v = 0; v < kRegisters; ++v) rows[v] = packed.load(g, v);
    UNROLLED for (int m = 0; m < M; ++m) {
      int32_t four;
      std::memcpy(&four, x + m * product.x_stride + 4 * g, 4);
      const __m512i values = _mm512_set1_epi32(four);
      UNROLLED for (int v = 0; v < kRegisters; ++v) sums[m][v] = _mm512_dpbusd_epi32(sums[m][v], values, rows[v]);
    }
  }
  UNROLLED for (int v = 0; v < kRegisters; ++v) {
    if (16 * v >= num_rows) continue;
    const int64_t first = o + 16 * v, count = std::min<int64_t>(16, num_rows - 16 * v);
    const Floats scale = load(product.w_scale + first, count);
    const Floats bias = product.bias ? load(product.bias + first, count) : Floats{};
    UNROLLED for (int m = 0; m < M; ++m) {
      const Floats sum = Floats(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[m][v], packed.offsets[v])));
      store(product.y + (t + m) * product.y_token + first, sum * (splat(product.x_scale[t + m]) * scale) + bias, count);
    }
  }
}

template <typename T, int M>
inline void packed_tile_of(int64_t size, const Product<T>& product, const Packed& packed, int64_t o, int64_t num_rows,
                           int64_t t) {
  if (size == M) return packed_tile<T, M>(product, packed, o, num_rows, t);
  if constexpr (M > 1) packed_tile_of<T, M - 1>(size, product, packed, o, num_rows, t);
}

// Features [first, stop) of many tokens.
template <typename T>
void packed_rows(const Product<T>& product, int64_t first, int64_t stop, int64_t num_tokens) {
  Packed packed(product.d_in);
  const int64_t num_tiles = (num_tokens + kWideTokens - 1) / kWideTokens;
  for (int64_t o = first; o < stop; o += kRows) {
    const int64_t num_rows = std::min<int64_t>(kRows, stop - o);
    packed.fill(product.w + o * product.w_stride, product.w_stride, product.d_in, num_rows);
    for (int64_t k = 0, t = 0; k < num_tiles; ++k) {
      const int64_t size = (num_tokens - t + num_tiles - k - 1) / (num_tiles - k);
      packed_tile_of<T, kWideTokens>(size, product, packed, o, num_rows, t);
      t += size;
    }
  }
}

template <typename T>
void linear(T* y, int64_t y_token, const T* x, int64_t x_token, const int8_t* w, int64_t w_stride, const float* w_scale,
            const T* bias, int64_t num_tokens, int64_t d_in, int64_t d_out) {
  // One more line a row: rows with a stride of a power of two evict each other from the first-level cache.
  const int64_t stride = (d_in + kGroup - 1) / kGroup * kGroup + kGroup;
  const std::unique_ptr<uint8_t, decltype(&std::free)> values(
      static_cast<uint8_t*>(std::aligned_alloc(kGroup, num_tokens * stride)), &std::free);
  const std::unique_ptr<float[]> scales(new float[num_tokens]);
  if (!values) throw std::bad_alloc();
  const Product<T> product{y, y_token, values.get(), scales.get(), stride, w, w_stride, w_scale, bias, d_in};
#pragma omp parallel
  {
#pragma omp for
    for (int64_t t = 0; t < num_tokens; ++t) scales[t] = encode(values.get() + t * stride, x + t * x_token, d_in);
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t share = (d_out + num_threads * kStreams - 1) / (num_threads * kStreams) * kStreams;
    const int64_t first = std::min(d_out, thread * share), stop = std::min(d_out, first + share);
    const int64_t per = (stop - first) / kStreams, rest = first + kStreams * per;
    if (num_tokens >= kManyTokens) {
      packed_rows(product, first, stop, num_tokens);
    } else {
      streams<T, kStreams>(product, first, per, num_tokens);
      streams<T, 1>(product, rest, stop - rest, num_tokens);
    }
  }
}

#else

template <typename T>
void linear(T*, int64_t, const T*, int64_t, const int8_t*, int64_t, const float*, const T*, int64_t, int64_t, int64_t) {
  std::abort();  // atmm_has_int8 returns 0
}

#endif

}  // namespace
}  // namespace atmm

extern "C" int32_t atmm_has_int8() {
#if defined(__AVX512VNNI__)
  return 1;
#else
  return 0;
#endif
}

extern "C" void atmm_int8_bfloat16(atmm::BFloat16* y, int64_t y_token, const atmm::BFloat16* x, int64_t x_token,
                                          const int8_t* w, int64_t w_stride, const float* w_scale,
                                          const atmm::BFloat16* bias, int64_t num_tokens, int64_t d_in, int64_t d_out) {
  atmm::linear(y, y_token, x, x_token, w, w_stride, w_scale, bias, num_tokens, d_in, d_out);
}

extern "C" void atmm_int8_float32(float* y, int64_t y_token, const float* x, int64_t x_token, const int8_t* w,
                                         int64_t w_stride, const float* w_scale, const float* bias, int64_t num_tokens,
                                         int64_t d_in, int64_t d_out) {
  atmm::linear(y, y_token, x, x_token, w, w_stride, w_scale, bias, num_tokens, d_in, d_out);
}
