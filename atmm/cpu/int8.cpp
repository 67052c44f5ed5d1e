// y[t, o] = x_scale[t] * w_scale[o] * sum_i q[t, i] * w[o, i] + bias[o] for weights w in eight-bit integers, where
// q[t] = round(x[t] / x_scale[t]) and x_scale[t] maps the largest value of a token to 127. Sums are exact.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "tiles.h"
#include "vectors.h"

namespace atmm {
namespace {

#if defined(__AVX512VNNI__)

constexpr int64_t kGroup = 64;  // bytes of a register
constexpr float kLargest = 127.0f, kSmallest = 1e-12f;
constexpr int kStreams = 4, kTokens = 5;  // of a tile: with the sums of weights, 29 of 32 registers
constexpr int64_t kAhead = 1024;  // prefetch distance in bytes
constexpr int64_t kManyTokens = 9;  // the smallest batch for which wide tiles are faster

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

// Many tokens: a register has eight inputs of eight tokens, and a product with eight weights of a row, repeated, adds to
// the row's sums of all of them, two a token. Weights are read as they are, and sums are not spread over a register.
// With four inputs of sixteen tokens, repeating the weights would take as many loads as there are products.
constexpr int64_t kPanel = 8, kPanels = 2, kWide = kPanel * kPanels;  // tokens of a register, registers, tokens
constexpr int64_t kWideRows = 8;                                      // of a tile
constexpr int64_t kBlockBytes = 512 * 1024;                           // of tokens: they stay in the second-level cache

// Inputs of kWide tokens, of which `present` exist, from rows of unsigned integers. The others keep any values.
inline void fill_wide(uint8_t* to, const uint8_t* x, int64_t x_stride, int64_t present) {
  for (int64_t m = 0; m < present; ++m)
    for (int64_t i = 0; i < x_stride - kGroup; i += kPanel)
      std::memcpy(to + i * kWide + m * kPanel, x + m * x_stride + i, kPanel);
}

// The sums of R rows from `w` with kWide tokens. The first tile of these rows also prefetches the rows behind them and
// counts `offsets`: 128 times the sums of weights.
template <int R, bool kFirst>
inline void wide_sums(Floats* sums, const int8_t* w, int64_t w_stride, const uint8_t* x, int64_t d_in,
                      int32_t* offsets) {
  __m512i parts[kPanels][R] = {}, weights[R] = {};
  const auto add = [&](int64_t i, int64_t width) __attribute__((always_inline)) {
    __m512i values[kPanels];
    UNROLLED for (int p = 0; p < kPanels; ++p) values[p] = _mm512_load_si512(x + i * kWide + p * kGroup);
    UNROLLED for (int r = 0; r < R; ++r) {
      int64_t eight = 0;
      std::memcpy(&eight, w + r * w_stride + i, width);
      const __m512i row = _mm512_set1_epi64(eight);
      UNROLLED for (int p = 0; p < kPanels; ++p) parts[p][r] = _mm512_dpbusd_epi32(parts[p][r], values[p], row);
    }
  };
  for (int64_t start = 0; start < d_in; start += kGroup) {
    if constexpr (kFirst) {
      const __mmask64 present = ~__mmask64(0) >> (kGroup - std::min(kGroup, d_in - start));
      UNROLLED for (int r = 0; r < R; ++r) {
        __builtin_prefetch(w + (R + r) * w_stride + start, 0, 3);
        const __m512i row = _mm512_maskz_loadu_epi8(present, w + r * w_stride + start);
        weights[r] = _mm512_dpbusd_epi32(weights[r], _mm512_set1_epi8(1), row);
      }
    }
    const int64_t stop = std::min(start + kGroup, d_in);
    int64_t i = start;
    for (; i + kPanel <= stop; i += kPanel) add(i, kPanel);
    if (i < stop) add(i, stop - i);
  }
  if constexpr (kFirst)
    UNROLLED for (int r = 0; r < R; ++r) offsets[r] = _mm512_reduce_add_epi32(weights[r]) << 7;
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  UNROLLED for (int r = 0; r < R; ++r) {
    const __m512i total = _mm512_add_epi32(_mm512_permutex2var_epi32(parts[0][r], even, parts[1][r]),
                                           _mm512_permutex2var_epi32(parts[0][r], odd, parts[1][r]));
    sums[r] = Floats(_mm512_cvtepi32_ps(_mm512_sub_epi32(total, _mm512_set1_epi32(offsets[r]))));
  }
}

// Features [o, o + num_rows), at most kWidth, of the `present` tokens from t, which are at `x`.
template <typename T, bool kFirst>
inline void wide_tile(const Product<T>& product, const uint8_t* x, int64_t o, int64_t num_rows, int64_t t,
                      int64_t present, int32_t* offsets) {
  static_assert(kWide == kWidth);
  Floats square[kWidth] = {};
  const int8_t* w = product.w + o * product.w_stride;
  int64_t r = 0;
  for (; r + kWideRows <= num_rows; r += kWideRows)
    wide_sums<kWideRows, kFirst>(square + r, w + r * product.w_stride, product.w_stride, x, product.d_in, offsets + r);
  for (; r < num_rows; ++r)
    wide_sums<1, kFirst>(square + r, w + r * product.w_stride, product.w_stride, x, product.d_in, offsets + r);
  transpose(square);
  const Floats scale = load(product.w_scale + o, num_rows);
  const Floats bias = product.bias ? load(product.bias + o, num_rows) : Floats{};
  for (int64_t m = 0; m < present; ++m)
    store(product.y + (t + m) * product.y_token + o, square[m] * (splat(product.x_scale[t + m]) * scale) + bias,
          num_rows);
}

// Features [first, stop) of many tokens, which are at `x`, kWide after kWide.
template <typename T>
void wide_rows(const Product<T>& product, const uint8_t* x, int64_t first, int64_t stop, int64_t num_tokens) {
  const int64_t size = (product.x_stride - kGroup) * kWide, block = std::max<int64_t>(1, kBlockBytes / size) * kWide;
  int32_t offsets[kWidth];
  for (int64_t start = 0; start < num_tokens; start += block) {
    const int64_t end = std::min(num_tokens, start + block);
    for (int64_t o = first; o < stop; o += kWidth) {
      const int64_t num_rows = std::min(kWidth, stop - o);
      const auto tile = [&](auto is_first, int64_t t) {
        wide_tile<T, decltype(is_first)::value>(product, x + t / kWide * size, o, num_rows, t,
                                                std::min(kWide, num_tokens - t), offsets);
      };
      tile(std::true_type(), start);
      for (int64_t t = start + kWide; t < end; t += kWide) tile(std::false_type(), t);
    }
  }
}

#if defined(ATMM_TILES)

template <typename T>
void linear_by_tiles(T* y, int64_t y_token, const T* x, int64_t x_token, const int8_t* w, int64_t w_stride,
                     const float* w_scale, const T* bias, int64_t num_tokens, int64_t d_in, int64_t d_out) {
  const int64_t stride = whole<kGroup>(d_in);
  const Bytes values = allocate_bytes(num_tokens * stride);
  const std::unique_ptr<float[]> scales(new float[whole<kTileRows>(num_tokens)]());
  Panels panels(num_tokens, d_in);
#pragma omp parallel
  {
#pragma omp for
    for (int64_t t = 0; t < num_tokens; ++t) scales[t] = encode(values.get() + t * stride, x + t * x_token, d_in);
#pragma omp for
    for (int64_t t = 0; t < num_tokens; t += kTileRows) panels.fill(t, values.get(), stride, 0x80);
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t share = whole<kStripe>((d_out + num_threads - 1) / num_threads);
    const auto finish = [&](int64_t o, int64_t t, Floats sums) {
      const Floats scale = load(scales.get() + t) * splat(w_scale[o]);
      return Floats(_mm512_fmadd_ps(__m512(sums), __m512(scale), _mm512_set1_ps(bias ? load_one(bias + o) : 0.0f)));
    };
    multiply_tiles<true>(y, y_token, w, w_stride, std::min(d_out, thread * share),
                         std::min(d_out, (thread + 1) * share), panels, finish);
  }
}

#endif

template <typename T>
void linear(T* y, int64_t y_token, const T* x, int64_t x_token, const int8_t* w, int64_t w_stride, const float* w_scale,
            const T* bias, int64_t num_tokens, int64_t d_in, int64_t d_out) {
#if defined(ATMM_TILES)
  if (num_tokens >= kManyTokens && has_tiles())
    return linear_by_tiles(y, y_token, x, x_token, w, w_stride, w_scale, bias, num_tokens, d_in, d_out);
#endif
  // One more line a row: rows with a stride of a power of two evict each other from the first-level cache.
  const int64_t stride = (d_in + kGroup - 1) / kGroup * kGroup + kGroup;
  const std::unique_ptr<uint8_t, decltype(&std::free)> values(
      static_cast<uint8_t*>(std::aligned_alloc(kGroup, num_tokens * stride)), &std::free);
  const std::unique_ptr<float[]> scales(new float[num_tokens]);
  if (!values) throw std::bad_alloc();
  const Product<T> product{y, y_token, values.get(), scales.get(), stride, w, w_stride, w_scale, bias, d_in};
  const bool many = num_tokens >= kManyTokens;
  const int64_t num_wide = many ? (num_tokens + kWide - 1) / kWide : 0, wide_size = (stride - kGroup) * kWide;
  const std::unique_ptr<uint8_t, decltype(&std::free)> wide(
      static_cast<uint8_t*>(std::aligned_alloc(kGroup, std::max<int64_t>(kGroup, num_wide * wide_size))), &std::free);
  if (!wide) throw std::bad_alloc();
#pragma omp parallel
  {
#pragma omp for
    for (int64_t t = 0; t < num_tokens; ++t) scales[t] = encode(values.get() + t * stride, x + t * x_token, d_in);
#pragma omp for
    for (int64_t k = 0; k < num_wide; ++k)
      fill_wide(wide.get() + k * wide_size, values.get() + k * kWide * stride, stride,
                std::min(kWide, num_tokens - k * kWide));
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t share = (d_out + num_threads * kWidth - 1) / (num_threads * kWidth) * kWidth;
    const int64_t first = std::min(d_out, thread * share), stop = std::min(d_out, first + share);
    const int64_t per = (stop - first) / kStreams, rest = first + kStreams * per;
    if (many) {
      wide_rows(product, wide.get(), first, stop, num_tokens);
    } else {
      streams<T, kStreams>(product, first, per, num_tokens);
      streams<T, 1>(product, rest, stop - rest, num_tokens);
    }
  }
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int64_t kGroup = 32;  // bytes of a register
constexpr float kLargest = 127.0f, kSmallest = 1e-12f;
constexpr int kStreams = 4, kRows = 2, kTokens = 4;  // features of a tile with one token and with several; tokens
constexpr int64_t kAhead = 1024;                     // prefetch distance in bytes
constexpr int64_t kBlockBytes = 256 * 1024;          // of tokens: they stay in the second-level cache

// A token in signed integers.
template <typename T>
float encode(int8_t* to, const T* x, int64_t d_in) {
  const auto at = [&](int64_t i) { return __m256(i + kWidth <= d_in ? load(x + i) : load(x + i, d_in - i)); };
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  Floats largest = {};
  for (int64_t i = 0; i < d_in; i += kWidth)
    largest = Floats(_mm256_max_ps(__m256(largest), _mm256_and_ps(at(i), magnitude)));
  float most = kSmallest;
  for (int64_t j = 0; j < kWidth; ++j) most = std::max(most, largest[j]);
  const float scale = most / kLargest;
  for (int64_t i = 0; i < d_in; i += kWidth) {
    const __m256i rounded = _mm256_cvtps_epi32(_mm256_div_ps(at(i), _mm256_set1_ps(scale)));
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + i), _mm_packs_epi16(halves, halves));
  }
  return scale;
}

template <typename T>
struct Product {
  T* y;
  int64_t y_token;
  const int8_t* x;
  const float* x_scale;
  int64_t x_stride;
  const int8_t* w;
  int64_t w_stride;
  const float* w_scale;
  const T* bias;  // may be null
  int64_t d_in;
};

inline int32_t total(__m256i sums) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// sums + the products of |w| and of x with the sign of w. No pair exceeds 16 bits: 2 * 128 * 127.
inline __m256i add_products(__m256i sums, __m256i magnitudes, __m256i x, __m256i w) {
  const __m256i signed_x = _mm256_sign_epi8(x, w);
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sums, magnitudes, signed_x);
#else
  const __m256i pairs = _mm256_maddubs_epi16(magnitudes, signed_x);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// Features o + r * per for r < R, of M tokens from `t`.
template <typename T, int R, int M>
inline void tile(const Product<T>& product, int64_t o, int64_t per, int64_t t) {
  const int8_t* w = product.w + o * product.w_stride;
  const int64_t stream = per * product.w_stride;
  const int8_t* x = product.x + t * product.x_stride;
  __m256i sums[R][M] = {};
  const auto add = [&](int64_t i, auto whole) __attribute__((always_inline)) {
    __m256i rows[R], magnitudes[R];
    UNROLLED for (int r = 0; r < R; ++r) {
      rows[r] = _mm256_setzero_si256();
      std::memcpy(&rows[r], w + r * stream + i, decltype(whole)::value ? kGroup : product.d_in - i);
      magnitudes[r] = _mm256_abs_epi8(rows[r]);
      __builtin_prefetch(w + r * stream + i + kAhead, 0, 3);
    }
    UNROLLED for (int m = 0; m < M; ++m) {
      const __m256i values = _mm256_load_si256(reinterpret_cast<const __m256i*>(x + m * product.x_stride + i));
      UNROLLED for (int r = 0; r < R; ++r) sums[r][m] = add_products(sums[r][m], magnitudes[r], values, rows[r]);
    }
  };
  int64_t i = 0;
  for (; i + kGroup <= product.d_in; i += kGroup) add(i, std::true_type());
  if (i < product.d_in) add(i, std::false_type());
  UNROLLED for (int r = 0; r < R; ++r) {
    const float scale = product.w_scale[o + r * per];
    const float bias = product.bias ? load_one(product.bias + o + r * per) : 0.0f;
    UNROLLED for (int m = 0; m < M; ++m)
      store_one(product.y + (t + m) * product.y_token + o + r * per,
                std::fma(float(total(sums[r][m])), product.x_scale[t + m] * scale, bias));
  }
}

template <typename T, int R, int M>
inline void tile_of(int64_t size, const Product<T>& product, int64_t o, int64_t per, int64_t t) {
  if (size == M) return tile<T, R, M>(product, o, per, t);
  if constexpr (M > 1) tile_of<T, R, M - 1>(size, product, o, per, t);
}

// Features [first, first + R * per) of tokens [start, end), in tiles of nearly equal size.
template <typename T, int R, int M>
void streams(const Product<T>& product, int64_t first, int64_t per, int64_t start, int64_t end) {
  const int64_t num_tiles = (end - start + M - 1) / M;
  for (int64_t o = first; o < first + per; ++o)
    for (int64_t k = 0, t = start; k < num_tiles; ++k) {
      const int64_t size = (end - t + num_tiles - k - 1) / (num_tiles - k);
      tile_of<T, R, M>(size, product, o, per, t);
      t += size;
    }
}

template <typename T>
void linear(T* y, int64_t y_token, const T* x, int64_t x_token, const int8_t* w, int64_t w_stride, const float* w_scale,
            const T* bias, int64_t num_tokens, int64_t d_in, int64_t d_out) {
  // One more line a row: rows with a stride of a power of two evict each other from the first-level cache.
  const int64_t stride = whole<64>(d_in) + 64;
  const std::unique_ptr<int8_t, decltype(&std::free)> values(
      static_cast<int8_t*>(std::aligned_alloc(64, num_tokens * stride)), &std::free);
  const std::unique_ptr<float[]> scales(new float[num_tokens]);
  if (!values) throw std::bad_alloc();
  const Product<T> product{y, y_token, values.get(), scales.get(), stride, w, w_stride, w_scale, bias, d_in};
  const int64_t block = std::max<int64_t>(kTokens, kBlockBytes / stride);
#pragma omp parallel
  {
#pragma omp for
    for (int64_t t = 0; t < num_tokens; ++t) scales[t] = encode(values.get() + t * stride, x + t * x_token, d_in);
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t share = (d_out + num_threads * kWidth - 1) / (num_threads * kWidth) * kWidth;
    const int64_t first = std::min(d_out, thread * share), stop = std::min(d_out, first + share);
    const auto products = [&](auto rows, auto tokens, int64_t start, int64_t end) {
      constexpr int R = decltype(rows)::value, M = decltype(tokens)::value;
      const int64_t per = (stop - first) / R, rest = first + R * per;
      streams<T, R, M>(product, first, per, start, end);
      streams<T, 1, M>(product, rest, stop - rest, start, end);
    };
    if (num_tokens == 1)
      products(std::integral_constant<int, kStreams>(), std::integral_constant<int, 1>(), 0, 1);
    else
      for (int64_t start = 0; start < num_tokens; start += block)
        products(std::integral_constant<int, kRows>(), std::integral_constant<int, kTokens>(), start,
                 std::min(num_tokens, start + block));
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
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && defined(__FMA__))
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
