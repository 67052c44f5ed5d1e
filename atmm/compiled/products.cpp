// y[t, o] = bias[o] + sum_i x[t, i] * w[o, i] for a thin batch: the weights are read once, row by row, as they lie.
//
// Decoding multiplies a handful of tokens with every weight of the model, so the product takes as long as memory needs
// to hand the weights over. Sums are kept in float32 registers: a tile of R weight rows by M tokens at a time.
#include <omp.h>

#include <algorithm>
#include <memory>

#include "vectors.h"

namespace atmm {
namespace {

// sum + a * b, rounded once where the processor can: a compiler that may choose rounds some tiles' sums twice, and a
// token's values would depend on the tile it is in.
inline Floats fused(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(sum)));
#elif defined(__FMA__)
  return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(sum)));
#else
  return a * b + sum;
#endif
}

inline float sum_of(Floats values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(__m512(values));
#elif defined(__AVX__)
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(__m256(values)), _mm256_extractf128_ps(__m256(values), 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
  float parts[kWidth];
  std::memcpy(parts, &values, sizeof values);
  for (int64_t width = kWidth / 2; width; width /= 2)
    for (int64_t i = 0; i < width; ++i) parts[i] += parts[i + width];
  return parts[0];
#endif
}

template <typename Register, typename T>
inline Register load_register(const T* from) {
  Register values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

// How a row of weights meets a row of x: `Input` is x as the kernel reads it, in groups of kGroup values.
template <typename T>
struct Arithmetic;

template <>
struct Arithmetic<float> {
  using Input = float;
  static constexpr int64_t kGroup = kWidth;

  static void prepare(float* to, const float* from) { std::memcpy(to, from, kGroup * sizeof(float)); }

  template <int R, int M>
  static inline void multiply(Floats (&sums)[R][M], const float* w, int64_t w_stride, const float* x, int64_t x_stride) {
    Floats rows[R];
    for (int r = 0; r < R; ++r) rows[r] = load_register<Floats>(w + r * w_stride);
    for (int m = 0; m < M; ++m) {
      const Floats values = load_register<Floats>(x + m * x_stride);
      for (int r = 0; r < R; ++r) sums[r][m] = fused(rows[r], values, sums[r][m]);
    }
  }
};

#if defined(__AVX512BF16__)

// The processor multiplies pairs of bfloat16 into float32.
template <>
struct Arithmetic<BFloat16> {
  using Input = BFloat16;
  static constexpr int64_t kGroup = 2 * kWidth;

  static void prepare(BFloat16* to, const BFloat16* from) { std::memcpy(to, from, kGroup * sizeof(BFloat16)); }

  template <int R, int M>
  static inline void multiply(Floats (&sums)[R][M], const BFloat16* w, int64_t w_stride, const BFloat16* x,
                              int64_t x_stride) {
    __m512bh rows[R];
    for (int r = 0; r < R; ++r) rows[r] = load_register<__m512bh>(w + r * w_stride);
    for (int m = 0; m < M; ++m) {
      const __m512bh values = load_register<__m512bh>(x + m * x_stride);
      for (int r = 0; r < R; ++r) sums[r][m] = Floats(_mm512_dpbf16_ps(__m512(sums[r][m]), rows[r], values));
    }
  }
};

#else

// A register of bfloat16 holds two per 32-bit lane: shifted up, the even ones are float32, and masked, the odd ones.
// x lies accordingly, the even values of a group before its odd ones.
template <>
struct Arithmetic<BFloat16> {
  using Input = float;
  static constexpr int64_t kGroup = 2 * kWidth;

  static void prepare(float* to, const BFloat16* from) {
    const Bits pairs = load_register<Bits>(from), even = pairs << 16, odd = pairs & 0xffff0000u;
    std::memcpy(to, &even, sizeof even);
    std::memcpy(to + kWidth, &odd, sizeof odd);
  }

  template <int R, int M>
  static inline void multiply(Floats (&sums)[R][M], const BFloat16* w, int64_t w_stride, const float* x,
                              int64_t x_stride) {
    Floats rows[R];
    for (int r = 0; r < R; ++r) rows[r] = Floats(load_register<Bits>(w + r * w_stride) << 16);
    for (int m = 0; m < M; ++m) {
      const Floats values = load_register<Floats>(x + m * x_stride);
      for (int r = 0; r < R; ++r) sums[r][m] = fused(rows[r], values, sums[r][m]);
    }
    for (int r = 0; r < R; ++r) rows[r] = Floats(load_register<Bits>(w + r * w_stride) & 0xffff0000u);
    for (int m = 0; m < M; ++m) {
      const Floats values = load_register<Floats>(x + m * x_stride + kWidth);
      for (int r = 0; r < R; ++r) sums[r][m] = fused(rows[r], values, sums[r][m]);
    }
  }
};

#endif

// A layer that reads x: its d_out features go to y[t * y_token + o]. bias may be null.
template <typename T>
struct Layer {
  const T* w;
  int64_t w_stride;
  const T* bias;
  T* y;
  int64_t y_token, d_out;
};

// x in the order in which weights are read, every row padded with zeros to whole groups, and by one group more: rows a
// power of two apart evict each other from the first cache.
template <typename T>
struct Prepared {
  using Kind = Arithmetic<T>;
  using Input = typename Kind::Input;

  Prepared(const T* x, int64_t x_token, int64_t num_tokens, int64_t d_in)
      : stride((d_in + Kind::kGroup - 1) / Kind::kGroup * Kind::kGroup + Kind::kGroup),
        values(new Input[num_tokens * stride]) {
    const int64_t whole = d_in / Kind::kGroup * Kind::kGroup;
    for (int64_t t = 0; t < num_tokens; ++t) {
      const T* from = x + t * x_token;
      Input* to = values.get() + t * stride;
      for (int64_t i = 0; i < whole; i += Kind::kGroup) Kind::prepare(to + i, from + i);
      if (whole < d_in) {
        T rest[Kind::kGroup] = {};
        std::memcpy(rest, from + whole, (d_in - whole) * sizeof(T));
        Kind::prepare(to + whole, rest);
      }
    }
  }

  int64_t stride;
  std::unique_ptr<Input[]> values;
};

// to[m * pitch + r]: the products of R rows of weights with M rows of x. The next R rows are prefetched meanwhile, into
// the second cache: few lines can be on their way to the first at a time.
template <typename T, int R, int M>
inline void tile(float* to, int64_t pitch, const T* w, int64_t w_stride, const typename Arithmetic<T>::Input* values,
                 int64_t x_stride, int64_t d_in) {
  using Kind = Arithmetic<T>;
  Floats sums[R][M] = {};
  const int64_t whole = d_in / Kind::kGroup * Kind::kGroup;
  for (int64_t i = 0; i < whole; i += Kind::kGroup) {
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + (r + R) * w_stride + i, 0, 2);
    Kind::template multiply<R, M>(sums, w + i, w_stride, values + i, x_stride);
  }
  if (whole < d_in) {
    T rest[R][Kind::kGroup] = {};
    for (int r = 0; r < R; ++r) std::memcpy(rest[r], w + r * w_stride + whole, (d_in - whole) * sizeof(T));
    Kind::template multiply<R, M>(sums, rest[0], Kind::kGroup, values + whole, x_stride);
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) to[m * pitch + r] = sum_of(sums[r][m]);
}

// Rows of weights of a tile with M tokens: as many sums as there are registers for.
template <int M>
constexpr int rows_beside() {
#if defined(__AVX512F__)
  return M <= 2 ? 8 : 4;
#else
  return M <= 2 ? 4 : 3;
#endif
}

constexpr int64_t kTokens = 4;     // of a tile, at most
constexpr int64_t kFeatures = 96;  // of a block: its sums are kept until they are stored together

// Sums of features [first, stop) and M tokens.
template <typename T, int M>
void strip(float* to, const Layer<T>& layer, int64_t first, int64_t stop, const typename Arithmetic<T>::Input* values,
           int64_t x_stride, int64_t d_in) {
  constexpr int R = rows_beside<M>();
  const T* w = layer.w + first * layer.w_stride;
  int64_t o = first;
  for (; o + R <= stop; o += R, w += R * layer.w_stride)
    tile<T, R, M>(to + o - first, kFeatures, w, layer.w_stride, values, x_stride, d_in);
  for (; o < stop; ++o, w += layer.w_stride)
    tile<T, 1, M>(to + o - first, kFeatures, w, layer.w_stride, values, x_stride, d_in);
}

template <typename T>
void write(const Layer<T>& layer, int64_t first, int64_t width, const float* sums, int64_t num_tokens) {
  for (int64_t t = 0; t < num_tokens; ++t, sums += kFeatures) {
    T* y = layer.y + t * layer.y_token + first;
    const T* bias = layer.bias ? layer.bias + first : nullptr;
    int64_t o = 0;
    for (; o + kWidth <= width; o += kWidth) store(y + o, load(sums + o) + (bias ? load(bias + o) : Floats{}));
    for (; o < width; ++o) store_one(y + o, sums[o] + (bias ? load_one(bias + o) : 0.0f));
  }
}

template <typename T>
void range(const Layer<T>& layer, const Prepared<T>& x, int64_t first, int64_t stop, int64_t num_tokens, int64_t d_in,
           float* sums) {
  // Tiles of nearly equal numbers of tokens: five are 3 and 2, because 4 and 1 read the weights with idle sums.
  const int64_t num_tiles = (num_tokens + kTokens - 1) / kTokens;
  const int64_t step = num_tiles == 1 ? kFeatures : rows_beside<kTokens>();
  for (int64_t block = first; block < stop; block += kFeatures) {
    const int64_t end = std::min(block + kFeatures, stop);
    for (int64_t o = block; o < end; o += step) {
      const int64_t to = std::min(o + step, end);
      for (int64_t k = 0, t = 0; k < num_tiles; ++k) {
        const int64_t size = (num_tokens - t + num_tiles - k - 1) / (num_tiles - k);
        float* at = sums + t * kFeatures + o - block;
        const auto* values = x.values.get() + t * x.stride;
        switch (size) {
          case 1: strip<T, 1>(at, layer, o, to, values, x.stride, d_in); break;
          case 2: strip<T, 2>(at, layer, o, to, values, x.stride, d_in); break;
          case 3: strip<T, 3>(at, layer, o, to, values, x.stride, d_in); break;
          default: strip<T, 4>(at, layer, o, to, values, x.stride, d_in);
        }
        t += size;
      }
    }
    write(layer, block, end - block, sums, num_tokens);
  }
}

template <typename T>
void linear(const Layer<T>* layers, int64_t num_layers, const T* x, int64_t x_token, int64_t num_tokens, int64_t d_in) {
  const Prepared<T> prepared(x, x_token, num_tokens, d_in);
  int64_t total = 0;
  for (int64_t k = 0; k < num_layers; ++k) total += layers[k].d_out;
#pragma omp parallel
  {
    const std::unique_ptr<float[]> sums(new float[num_tokens * kFeatures]);
    // A contiguous share of all features for each thread, cut where tiles end.
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    constexpr int64_t cut = 12;  // a multiple of every tile's rows but the widest
    const int64_t share = (total + num_threads * cut - 1) / (num_threads * cut) * cut;
    int64_t first = std::min(total, thread * share), stop = std::min(total, first + share), before = 0;
    for (int64_t k = 0; k < num_layers && before < stop; before += layers[k++].d_out)
      if (first < before + layers[k].d_out)
        range(layers[k], prepared, std::max<int64_t>(0, first - before), std::min(layers[k].d_out, stop - before),
              num_tokens, d_in, sums.get());
  }
}

}  // namespace
}  // namespace atmm

#define ATMM_LINEAR(TYPE, T)                                                                                        \
  extern "C" void atmm_linear_##TYPE(const atmm::Layer<T>* layers, int64_t num_layers, const T* x, int64_t x_token, \
                                     int64_t num_tokens, int64_t d_in) {                                            \
    atmm::linear(layers, num_layers, x, x_token, num_tokens, d_in);                                                 \
  }

ATMM_LINEAR(bfloat16, atmm::BFloat16)
ATMM_LINEAR(float32, float)
