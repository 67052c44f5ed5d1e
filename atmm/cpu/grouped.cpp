// y[t, o] = sum_i x[t, i] * (w[o, i] * scale[o, i / group] + offset[o, i / group]) + bias[o] for unsigned weights w in
// four or eight bits. Inputs are rounded to eight bits with a scale per token and 32 inputs: a large input takes
// precision from its neighbours only. Products of 32 inputs are exact, and their sums are in float32.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "vectors.h"

namespace atmm {
namespace {

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && defined(__FMA__))

constexpr int64_t kInputs = 32;  // with one scale
constexpr float kLargest = 127.0f, kSmallest = 1e-12f;
#if defined(__AVX512VNNI__)
constexpr int64_t kBytes = 64;            // of a register
constexpr int kStreams = 4, kTokens = 5;  // of a tile: with weights and scales, 25 of 32 registers
#else
constexpr int64_t kBytes = 32;
constexpr int kStreams = 2, kTokens = 3;
#endif
// Prefetch distances of weights, in bytes, and of their scales. Without the latter a product of weights that are not in
// a cache takes twice as long: a processor recognizes fewer streams than rows and their scales.
constexpr int64_t kAhead = 2048, kScalesAhead = 64;

// A register of weights has the weights of `kBlock` inputs. Four bits: byte j has input 2 j in its lower and input 2 j + 1 in its
// upper half, so that the even inputs of a token are multiplied with the lower halves, the odd ones with the upper.
template <int kBits>
constexpr int64_t kBlock = 8 * kBytes / kBits;

// The inputs of the tokens in integers.
template <int kBits>
struct Inputs {
  static constexpr int64_t kPieces = 8 / kBits;  // registers of a block

  Inputs(int64_t num_tokens, int64_t d_in, int64_t group)
      : num_blocks((d_in + kBlock<kBits> - 1) / kBlock<kBits>),
        num_groups((d_in + group - 1) / group),
        // One more line a row: rows with a stride of a power of two evict each other from the first-level cache.
        stride(num_blocks * kBlock<kBits> + 64),
        scale_stride(num_blocks * kWidth + kWidth),
        sum_stride((num_groups + kWidth - 1) / kWidth * kWidth),
        values(allocate<int8_t>(num_tokens * stride)),
        scales(allocate<float>(num_tokens * scale_stride)),
        sums(allocate<float>(num_tokens * sum_stride)) {}

  template <typename T>
  static std::unique_ptr<T, decltype(&std::free)> allocate(int64_t count) {
    std::unique_ptr<T, decltype(&std::free)> memory(
        static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)), &std::free);
    if (!memory) throw std::bad_alloc();
    return memory;
  }

  template <typename T>
  void fill(int64_t token, const T* x, int64_t d_in, int64_t group) {
    int8_t* to = values.get() + token * stride;
    float* scale_to = scales.get() + token * scale_stride;
    float* sum_to = sums.get() + token * sum_stride;
    std::fill_n(sum_to, sum_stride, 0.0f);
    constexpr int64_t kScales = kBlock<kBits> / kInputs, kLanes = kWidth / kScales;
    for (int64_t b = 0; b < num_blocks; ++b) {
      alignas(64) int8_t block[kBlock<kBits>] = {};
      for (int64_t s = 0; s < kScales; ++s) {
        const int64_t i = b * kBlock<kBits> + s * kInputs;
        float scale = 0.0f;
        if (i < d_in) {
          int64_t sum;
          scale = encode(block + s * kInputs, x + i, &sum);
          sum_to[i / group] += scale * float(sum);
        }
        std::fill_n(scale_to + b * kWidth + s * kLanes, kLanes, scale);
      }
      store_block(to + b * kBlock<kBits>, block);
    }
  }

  // 32 inputs. Returns their scale.
  template <typename T>
  static float encode(int8_t* to, const T* x, int64_t* sum) {
#if defined(__AVX512VNNI__)
    const __m512 low = __m512(load(x)), high = __m512(load(x + kWidth));
    const __m512 largest = _mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high));
    const float scale = std::max(_mm512_reduce_max_ps(largest), kSmallest) / kLargest;
    const __m512i first = _mm512_cvtps_epi32(_mm512_div_ps(low, __m512(splat(scale))));
    const __m512i second = _mm512_cvtps_epi32(_mm512_div_ps(high, __m512(splat(scale))));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kWidth), _mm512_cvtepi32_epi8(second));
    *sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
#else
    float largest = kSmallest;
    for (int64_t i = 0; i < kInputs; ++i) largest = std::max(largest, std::fabs(load_one(x + i)));
    const float scale = largest / kLargest;
    *sum = 0;
    for (int64_t i = 0; i < kInputs; i += kWidth) {
      const __m256i rounded = _mm256_cvtps_epi32(__m256(load(x + i) / splat(scale)));
      int32_t values[kWidth];
      std::memcpy(values, &rounded, sizeof values);
      for (int64_t j = 0; j < kWidth; ++j) {
        to[i + j] = int8_t(values[j]);
        *sum += values[j];
      }
    }
#endif
    return scale;
  }

  static void store_block(int8_t* to, const int8_t* block) {
    if constexpr (kBits == 8) {
      std::memcpy(to, block, kBlock<kBits>);
    } else {
#if defined(__AVX512VNNI__)
      const __m512i first = _mm512_load_si512(block), second = _mm512_load_si512(block + 64);
      const auto halves = [](__m512i a, __m512i b) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
      };
      _mm512_store_si512(to, halves(first, second));
      _mm512_store_si512(to + 64, halves(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8)));
#else
      for (int64_t j = 0; j < kBytes; ++j) {
        to[j] = block[2 * j];
        to[kBytes + j] = block[2 * j + 1];
      }
#endif
    }
  }

  int64_t num_blocks, num_groups, stride, scale_stride, sum_stride;
  std::unique_ptr<int8_t, decltype(&std::free)> values;
  std::unique_ptr<float, decltype(&std::free)> scales;  // [tokens, blocks, kWidth]: one per 32-bit sum
  std::unique_ptr<float, decltype(&std::free)> sums;    // [tokens, groups]: the sum of the rounded inputs
};

template <typename T, int kBits>
struct Product {
  T* y;
  int64_t y_token;
  const Inputs<kBits>& x;
  const uint8_t* w;
  int64_t w_stride;
  const float* scales;
  const float* offsets;
  int64_t scale_stride;  // of both
  float offset_factor;
  const T* bias;  // may be null
  int64_t d_in, group;
  int64_t groups_per_block;  // with scales of their own, at least one
  int64_t blocks_per_group;  // at least one
#if defined(__AVX512VNNI__)
  __m512i repeat;  // the group, within a block, of each 32-bit sum
#endif

  Product(T* y, int64_t y_token, const Inputs<kBits>& x, const uint8_t* w, int64_t w_stride, const float* scales,
          const float* offsets, int64_t scale_stride, float offset_factor, const T* bias, int64_t d_in, int64_t group)
      : y(y), y_token(y_token), x(x), w(w), w_stride(w_stride), scales(scales), offsets(offsets),
        scale_stride(scale_stride), offset_factor(offset_factor), bias(bias), d_in(d_in), group(group),
        groups_per_block(std::max<int64_t>(1, kBlock<kBits> / group)),
        blocks_per_group((group + kBlock<kBits> - 1) / kBlock<kBits>) {
#if defined(__AVX512VNNI__)
    constexpr int64_t kScales = kBlock<kBits> / kInputs;
    alignas(64) int32_t places[kWidth];
    for (int64_t k = 0; k < kWidth; ++k) places[k] = int32_t(k * kScales / kWidth * groups_per_block / kScales);
    repeat = _mm512_load_si512(places);
#endif
  }
};

inline float total(Floats values) {
#if defined(__AVX512VNNI__)
  return _mm512_reduce_add_ps(__m512(values));
#else
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(__m256(values)), _mm256_extractf128_ps(__m256(values), 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#endif
}

// Features o + r * per for r < R, of M tokens from `t`.
template <typename T, int kBits, int R, int M>
inline void tile(const Product<T, kBits>& product, int64_t o, int64_t per, int64_t t) {
  constexpr int64_t kPieces = Inputs<kBits>::kPieces;
  const Inputs<kBits>& inputs = product.x;
  const uint8_t* w[R];
  const float* scales[R];
  UNROLLED for (int r = 0; r < R; ++r) {
    w[r] = product.w + (o + r * per) * product.w_stride;
    scales[r] = product.scales + (o + r * per) * product.scale_stride;
  }
  const int8_t* x = inputs.values.get() + t * inputs.stride;
  const float* x_scales = inputs.scales.get() + t * inputs.scale_stride;
  const int64_t stride = inputs.stride, scale_stride = inputs.scale_stride, blocks_per_group = product.blocks_per_group;
#if defined(__AVX512VNNI__)
  const __m512i repeat = product.repeat, low = _mm512_set1_epi8(15);
#endif
  Floats sums[R][M] = {};
  // The block's first group, and the blocks of this group before it: divisions would take most of the time.
  int64_t group = 0, blocks = 0;
  const int64_t num_bytes = product.d_in * kBits / 8;
  const auto block = [&](int64_t first, auto whole) __attribute__((always_inline)) {
#if defined(__AVX512VNNI__)
    const __mmask64 bytes = ~__mmask64(0) >> (64 - std::min<int64_t>(64, num_bytes - first));
    const int64_t count = std::min(product.groups_per_block, inputs.num_groups - group);
    const __mmask8 present = __mmask8((1u << count) - 1);
    UNROLLED for (int r = 0; r < R; ++r) {
      __builtin_prefetch(w[r] + first + kAhead, 0, 3);
      __builtin_prefetch(scales[r] + group + kScalesAhead, 0, 3);
      const __m512i values = whole ? _mm512_loadu_si512(w[r] + first) : _mm512_maskz_loadu_epi8(bytes, w[r] + first);
      // At most four scales: a wider load would cross lines of the cache.
      const __m512 own = _mm512_castps128_ps512(_mm_maskz_loadu_ps(present, scales[r] + group));
      const __m512 scale = _mm512_permutexvar_ps(repeat, own);
      __m512i pieces[kPieces];
      if constexpr (kBits == 8) {
        pieces[0] = values;
      } else {
        pieces[0] = _mm512_and_si512(values, low);
        pieces[1] = _mm512_and_si512(_mm512_srli_epi16(values, 4), low);
      }
      UNROLLED for (int m = 0; m < M; ++m) {
        const int8_t* token = x + m * stride + first * kPieces;
        __m512i sum = _mm512_setzero_si512();
        UNROLLED for (int p = 0; p < kPieces; ++p)
          sum = _mm512_dpbusd_epi32(sum, pieces[p], _mm512_load_si512(token + 64 * p));
        const __m512 both = _mm512_mul_ps(scale, _mm512_load_ps(x_scales + m * scale_stride + first / 64 * kWidth));
        sums[r][m] = Floats(_mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, __m512(sums[r][m])));
      }
    }
#else
    UNROLLED for (int r = 0; r < R; ++r) {
      __builtin_prefetch(w[r] + first + kAhead, 0, 3);
      __builtin_prefetch(scales[r] + group + kScalesAhead, 0, 3);
      __m256i values = _mm256_setzero_si256();
      std::memcpy(&values, w[r] + first, decltype(whole)::value ? kBytes : num_bytes - first);
      // The lower half of the sums has the block's first group.
      const float *own = scales[r] + group, upper = own[group + 1 < inputs.num_groups && product.groups_per_block > 1];
      const __m256 scale = _mm256_set_m128(_mm_set1_ps(upper), _mm_set1_ps(*own));
      // Products with weights in eight bits, in two parts: a pair of them would exceed 16 bits.
      const __m256i low = _mm256_set1_epi8(kBits == 8 ? 127 : 15);
      const __m256i pieces[2] = {_mm256_and_si256(values, low),
                                 kBits == 8 ? _mm256_andnot_si256(low, values)
                                            : _mm256_and_si256(_mm256_srli_epi16(values, 4), low)};
      UNROLLED for (int m = 0; m < M; ++m) {
        const auto* token = reinterpret_cast<const __m256i*>(x + m * stride + first * kPieces);
        const __m256i ones = _mm256_set1_epi16(1), even = _mm256_maddubs_epi16(pieces[0], _mm256_load_si256(token));
        const __m256i odd = _mm256_maddubs_epi16(pieces[1], _mm256_load_si256(token + kPieces - 1));
        const __m256i sum = kBits == 4 ? _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones)
                                       : _mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones));
        const __m256 both = _mm256_mul_ps(scale, _mm256_load_ps(x_scales + m * scale_stride + first / kBytes * kWidth));
        sums[r][m] = Floats(_mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), both, __m256(sums[r][m])));
      }
    }
#endif
    if (++blocks == blocks_per_group) {
      blocks = 0;
      group += product.groups_per_block;
    }
  };
  int64_t first = 0;
  for (; first + kBytes <= num_bytes; first += kBytes) block(first, std::true_type{});
  if (first < num_bytes) block(first, std::false_type{});
  UNROLLED for (int r = 0; r < R; ++r) {
    const int64_t feature = o + r * per;
    const float* offsets = product.offsets + feature * product.scale_stride;
    const float bias = product.bias ? load_one(product.bias + feature) : 0.0f;
    Floats offset[M] = {};
    for (int64_t g = 0; g < inputs.num_groups; g += kWidth) {
      const int64_t count = inputs.num_groups - g;
      const Floats own = count >= kWidth ? load(offsets + g) : load(offsets + g, count);
      UNROLLED for (int m = 0; m < M; ++m) offset[m] += own * load(inputs.sums.get() + (t + m) * inputs.sum_stride + g);
    }
    UNROLLED for (int m = 0; m < M; ++m)
      store_one(product.y + (t + m) * product.y_token + feature,
                total(sums[r][m] + offset[m] * splat(product.offset_factor)) + bias);
  }
}

template <typename T, int kBits, int R, int M>
inline void tile_of(int64_t size, const Product<T, kBits>& product, int64_t o, int64_t per, int64_t t) {
  if (size == M) return tile<T, kBits, R, M>(product, o, per, t);
  if constexpr (M > 1) tile_of<T, kBits, R, M - 1>(size, product, o, per, t);
}

// Features [first, first + R * per), in tiles of a nearly equal number of tokens.
template <int R, typename T, int kBits>
void streams(const Product<T, kBits>& product, int64_t first, int64_t per, int64_t num_tokens) {
  const int64_t num_tiles = (num_tokens + kTokens - 1) / kTokens;
  for (int64_t o = first; o < first + per; ++o)
    for (int64_t k = 0, t = 0; k < num_tiles; ++k) {
      const int64_t size = (num_tokens - t + num_tiles - k - 1) / (num_tiles - k);
      tile_of<T, kBits, R, kTokens>(size, product, o, per, t);
      t += size;
    }
}

#if defined(__AVX512VNNI__)

// Weights of kRows features, with four inputs of each side by side: one register has 16 features, and a product with
// four inputs of a token, repeated, adds to 16 sums at once.
constexpr int kRegisters = 2, kRows = 16 * kRegisters, kWideTokens = 6;
constexpr int64_t kManyTokens = 5;  // from which packing costs less than it saves

template <int kBits>
struct Packed {
  static constexpr int64_t kSteps = kInputs / 4;  // products of 32 inputs

  explicit Packed(const Inputs<kBits>& inputs)
      : values(inputs.template allocate<uint8_t>(inputs.num_blocks * kBlock<kBits> * kRows)),
        scales(inputs.template allocate<float>(inputs.sum_stride * kRows)),
        offsets(inputs.template allocate<float>(inputs.sum_stride * kRows)) {}

  // The place in a block of a token's inputs for product `step` of 32 inputs.
  static constexpr int64_t input(int64_t scale, int64_t step) {
    return kBits == 8 ? 4 * (scale * kSteps + step) : step % 2 * 64 + 4 * (scale * kSteps / 2 + step / 2);
  }

  // The registers of four inputs are ordered as the products that use them.
  void fill(const uint8_t* w, int64_t w_stride, int64_t num_bytes, int64_t num_rows) {
    uint8_t* to = values.get();
    Floats square[kWidth];
    for (int64_t first = 0; first < num_bytes; first += 64) {
      for (int v = 0; v < kRegisters; ++v) {
        const __mmask64 bytes = ~__mmask64(0) >> (64 - std::min<int64_t>(64, num_bytes - first));
        for (int64_t r = 0; r < kWidth; ++r) {
          const uint8_t* row = w + (16 * v + r) * w_stride + first;
          __builtin_prefetch(row + kRows * w_stride, 0, 3);
          const __m512i values = 16 * v + r < num_rows ? _mm512_maskz_loadu_epi8(bytes, row) : _mm512_setzero_si512();
          square[r] = Floats(_mm512_castsi512_ps(values));
        }
        transpose(square);
        for (int64_t j = 0; j < kWidth; ++j) {
          const __m512i four = _mm512_castps_si512(__m512(square[j]));
          if constexpr (kBits == 8) {
            _mm512_store_si512(to + (j * kRegisters + v) * 64, four);
          } else {
            const __m512i low = _mm512_set1_epi8(15), upper = _mm512_srli_epi16(four, 4);
            _mm512_store_si512(to + (2 * j * kRegisters + v) * 64, _mm512_and_si512(four, low));
            _mm512_store_si512(to + ((2 * j + 1) * kRegisters + v) * 64, _mm512_and_si512(upper, low));
          }
        }
      }
      to += kBlock<kBits> * kRows;
    }
  }

  // [features, groups] to [groups, kRows].
  static void fill_scales(float* to, const float* from, int64_t stride, int64_t num_groups, int64_t num_rows) {
    Floats square[kWidth];
    for (int64_t g = 0; g < num_groups; g += kWidth)
      for (int v = 0; v < kRegisters; ++v) {
        const int64_t count = std::min<int64_t>(kWidth, num_groups - g);
        for (int64_t r = 0; r < kWidth; ++r) {
          const float* row = from + (16 * v + r) * stride + g;
          __builtin_prefetch(row + kRows * stride, 0, 3);
          square[r] = 16 * v + r < num_rows ? load(row, count) : Floats{};
        }
        transpose(square);
        for (int64_t j = 0; j < kWidth; ++j) store(to + (g + j) * kRows + 16 * v, square[j]);
      }
  }

  std::unique_ptr<uint8_t, decltype(&std::free)> values;
  std::unique_ptr<float, decltype(&std::free)> scales, offsets;
};

// Features [o, o + num_rows) of M tokens from `t`.
template <typename T, int kBits, int M>
inline void packed_tile(const Product<T, kBits>& product, const Packed<kBits>& packed, int64_t o, int64_t num_rows,
                        int64_t t) {
  constexpr int64_t kScales = kBlock<kBits> / kInputs, kLanes = kWidth / kScales, kSteps = Packed<kBits>::kSteps;
  const Inputs<kBits>& inputs = product.x;
  const int8_t* x = inputs.values.get() + t * inputs.stride;
  const float* x_scales = inputs.scales.get() + t * inputs.scale_stride;
  const float* x_sums = inputs.sums.get() + t * inputs.sum_stride;
  const uint8_t* w = packed.values.get();
  Floats sums[M][kRegisters] = {};
  for (int64_t i = 0; i < product.d_in; i += kInputs) {
    const int64_t block = i / kBlock<kBits>, scale = i % kBlock<kBits> / kInputs;
    __m512i own[M][kRegisters] = {};
    for (int64_t step = 0; step < kSteps; ++step, w += 64 * kRegisters) {
      __m512i rows[kRegisters];
      UNROLLED for (int v = 0; v < kRegisters; ++v) rows[v] = _mm512_load_si512(w + 64 * v);
      UNROLLED for (int m = 0; m < M; ++m) {
        int32_t four;
        std::memcpy(&four, x + m * inputs.stride + block * kBlock<kBits> + Packed<kBits>::input(scale, step), 4);
        const __m512i values = _mm512_set1_epi32(four);
        UNROLLED for (int v = 0; v < kRegisters; ++v) own[m][v] = _mm512_dpbusd_epi32(own[m][v], rows[v], values);
      }
    }
    const float* scales = packed.scales.get() + i / product.group * kRows;
    UNROLLED for (int m = 0; m < M; ++m) {
      const Floats x_scale = splat(x_scales[m * inputs.scale_stride + block * kWidth + scale * kLanes]);
      UNROLLED for (int v = 0; v < kRegisters; ++v)
        sums[m][v] += Floats(_mm512_cvtepi32_ps(own[m][v])) * (load(scales + 16 * v) * x_scale);
    }
  }
  for (int64_t g = 0; g < inputs.num_groups; ++g)
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int v = 0; v < kRegisters; ++v)
        sums[m][v] += load(packed.offsets.get() + g * kRows + 16 * v) *
                      splat(product.offset_factor * x_sums[m * inputs.sum_stride + g]);
  UNROLLED for (int v = 0; v < kRegisters; ++v) {
    if (16 * v >= num_rows) continue;
    const int64_t first = o + 16 * v, count = std::min<int64_t>(16, num_rows - 16 * v);
    const Floats bias = product.bias ? load(product.bias + first, count) : Floats{};
    UNROLLED for (int m = 0; m < M; ++m) store(product.y + (t + m) * product.y_token + first, sums[m][v] + bias, count);
  }
}

template <typename T, int kBits, int M>
inline void packed_tile_of(int64_t size, const Product<T, kBits>& product, const Packed<kBits>& packed, int64_t o,
                           int64_t num_rows, int64_t t) {
  if (size == M) return packed_tile<T, kBits, M>(product, packed, o, num_rows, t);
  if constexpr (M > 1) packed_tile_of<T, kBits, M - 1>(size, product, packed, o, num_rows, t);
}

// Features [first, stop) of many tokens.
template <typename T, int kBits>
void packed_rows(const Product<T, kBits>& product, int64_t first, int64_t stop, int64_t num_tokens) {
  Packed<kBits> packed(product.x);
  const int64_t num_groups = product.x.num_groups, num_tiles = (num_tokens + kWideTokens - 1) / kWideTokens;
  for (int64_t o = first; o < stop; o += kRows) {
    const int64_t num_rows = std::min<int64_t>(kRows, stop - o), stride = product.scale_stride;
    packed.fill(product.w + o * product.w_stride, product.w_stride, product.d_in * kBits / 8, num_rows);
    packed.fill_scales(packed.scales.get(), product.scales + o * stride, stride, num_groups, num_rows);
    packed.fill_scales(packed.offsets.get(), product.offsets + o * stride, stride, num_groups, num_rows);
    for (int64_t k = 0, t = 0; k < num_tiles; ++k) {
      const int64_t size = (num_tokens - t + num_tiles - k - 1) / (num_tiles - k);
      packed_tile_of<T, kBits, kWideTokens>(size, product, packed, o, num_rows, t);
      t += size;
    }
  }
}

#else

constexpr int64_t kRows = kStreams, kManyTokens = INT64_MAX;  // half as many registers do not hold packed tiles

template <typename T, int kBits>
void packed_rows(const Product<T, kBits>&, int64_t, int64_t, int64_t) {}

#endif

template <int kBits, typename T>
void linear(T* y, int64_t y_token, const T* x, int64_t x_token, const uint8_t* w, int64_t w_stride, const float* scales,
            const float* offsets, int64_t scale_stride, float offset_factor, const T* bias, int64_t num_tokens,
            int64_t d_in, int64_t d_out, int64_t group) {
  Inputs<kBits> inputs(num_tokens, d_in, group);
  const Product<T, kBits> product(y, y_token, inputs, w, w_stride, scales, offsets, scale_stride, offset_factor, bias,
                                  d_in, group);
#pragma omp parallel
  {
#pragma omp for
    for (int64_t t = 0; t < num_tokens; ++t) inputs.fill(t, x + t * x_token, d_in, group);
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const bool many = num_tokens >= kManyTokens;
    const int64_t unit = many ? kRows : kStreams;
    const int64_t share = (d_out + num_threads * unit - 1) / (num_threads * unit) * unit;
    const int64_t first = std::min(d_out, thread * share), stop = std::min(d_out, first + share);
    const int64_t per = (stop - first) / kStreams, rest = first + kStreams * per;
    if (many) {
      packed_rows(product, first, stop, num_tokens);
    } else {
      streams<kStreams>(product, first, per, num_tokens);
      streams<1>(product, rest, stop - rest, num_tokens);
    }
  }
}

#else

template <int kBits, typename T>
void linear(T*, int64_t, const T*, int64_t, const uint8_t*, int64_t, const float*, const float*, int64_t, float,
            const T*, int64_t, int64_t, int64_t, int64_t) {
  std::abort();  // atmm_has_int8 returns 0
}

#endif

}  // namespace
}  // namespace atmm

#define ATMM_GROUPED(BITS, NAME, T)                                                                                  \
  extern "C" void atmm_int##BITS##_groups_##NAME(T* y, int64_t y_token, const T* x, int64_t x_token,                  \
                                                 const uint8_t* w, int64_t w_stride, const float* scales,            \
                                                 const float* offsets, int64_t scale_stride, float offset_factor,    \
                                                 const T* bias, int64_t num_tokens, int64_t d_in, int64_t d_out,     \
                                                 int64_t group) {                                                    \
    atmm::linear<BITS>(y, y_token, x, x_token, w, w_stride, scales, offsets, scale_stride, offset_factor, bias,      \
                       num_tokens, d_in, d_out, group);                                                              \
  }

ATMM_GROUPED(4, bfloat16, atmm::BFloat16)
ATMM_GROUPED(4, float32, float)
ATMM_GROUPED(8, bfloat16, atmm::BFloat16)
ATMM_GROUPED(8, float32, float)
