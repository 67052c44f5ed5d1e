// y[t, o] = bias[o] + sum_i x[t, i] * w[o, i] for a thin batch: the weights are read once, row by row, as they lie.
//
// Decoding multiplies a handful of tokens with every weight of the model, so the product takes as long as memory needs
// to hand the weights over. Sums are kept in float32 registers: a tile of R weight rows by M tokens at a time. The R
// rows come from R places far apart, each of which is read in order: a processor prefetches several streams, but not
// several rows of one page at once (docs/decisions.md, 2026-11-23).
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

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

// Keeps a value that several products read in its register: compilers load it again for each of them.
inline Floats kept(Floats value) {
#if defined(__AVX__)
  asm("" : "+v"(value));
#endif
  return value;
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
      const Floats values = kept(load_register<Floats>(x + m * x_stride));
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
      const Floats values = kept(load_register<Floats>(x + m * x_stride));
      for (int r = 0; r < R; ++r) sums[r][m] = fused(rows[r], values, sums[r][m]);
    }
    for (int r = 0; r < R; ++r) rows[r] = Floats(load_register<Bits>(w + r * w_stride) & 0xffff0000u);
    for (int m = 0; m < M; ++m) {
      const Floats values = kept(load_register<Floats>(x + m * x_stride + kWidth));
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

constexpr int64_t kLine = 64;  // bytes of a cache line

// x in the order in which weights are read, every row padded with zeros to whole groups, and by a line more: rows a
// power of two apart evict each other from the first cache. Rows begin with a line: a load over two costs two.
template <typename T>
struct Prepared {
  using Kind = Arithmetic<T>;
  using Input = typename Kind::Input;

  Prepared(const T* x, int64_t x_token, int64_t num_tokens, int64_t d_in)
      : stride(whole_lines((d_in + Kind::kGroup - 1) / Kind::kGroup * Kind::kGroup) + kPerLine),
        values(static_cast<Input*>(std::aligned_alloc(kLine, num_tokens * stride * sizeof(Input))), &std::free) {
    if (!values) throw std::bad_alloc();
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

  static constexpr int64_t kPerLine = kLine / sizeof(Input);
  static int64_t whole_lines(int64_t count) { return (count + kPerLine - 1) / kPerLine * kPerLine; }

  int64_t stride;
  std::unique_ptr<Input, decltype(&std::free)> values;
};

constexpr int64_t kTokens = 4;  // of a tile, at most
constexpr int64_t kBlock = 32;  // features of a stream whose sums are kept until they are stored together

// Streams of weights that are read at a time: as many as there are registers for beside one or two tokens, and beside
// more. With 16 registers, three rows by four tokens leave none for the inputs.
#if defined(__AVX512F__)
constexpr int kStreamsOfFew = 8, kStreams = 4;
#else
constexpr int kStreamsOfFew = 4, kStreams = 2;
#endif
constexpr int64_t kAhead = 1024;  // bytes: how far before its use a line of weights is asked for

// to[m * pitch + r * kBlock]: the products of R rows of weights, `stream` apart, with M rows of x. ahead: whether the
// weights are read for the first time.
template <typename T, int R, int M>
inline void tile(float* to, int64_t pitch, const T* w, int64_t stream, const typename Arithmetic<T>::Input* values,
                 int64_t x_stride, int64_t d_in, bool ahead) {
  using Kind = Arithmetic<T>;
  constexpr int64_t kPerLine = kLine / sizeof(T);
  Floats sums[R][M] = {};
  const int64_t whole = d_in / Kind::kGroup * Kind::kGroup;
  for (int64_t i = 0; i < whole; i += Kind::kGroup) {
    if (ahead && i % kPerLine == 0)
      for (int r = 0; r < R; ++r) __builtin_prefetch(reinterpret_cast<const char*>(w + r * stream + i) + kAhead, 0, 3);
    Kind::template multiply<R, M>(sums, w + i, stream, values + i, x_stride);
  }
  if (whole < d_in) {
    T rest[R][Kind::kGroup] = {};
    for (int r = 0; r < R; ++r) std::memcpy(rest[r], w + r * stream + whole, (d_in - whole) * sizeof(T));
    Kind::template multiply<R, M>(sums, rest[0], Kind::kGroup, values + whole, x_stride);
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) to[m * pitch + r * kBlock] = sum_of(sums[r][m]);
}

// Stores features [first, first + width) of all tokens. pitch: sums of a token.
template <typename T>
void write(const Layer<T>& layer, int64_t first, int64_t width, const float* sums, int64_t pitch, int64_t num_tokens) {
  for (int64_t t = 0; t < num_tokens; ++t, sums += pitch) {
    T* y = layer.y + t * layer.y_token + first;
    const T* bias = layer.bias ? layer.bias + first : nullptr;
    int64_t o = 0;
    for (; o + kWidth <= width; o += kWidth) store(y + o, load(sums + o) + (bias ? load(bias + o) : Floats{}));
    for (; o < width; ++o) store_one(y + o, sums[o] + (bias ? load_one(bias + o) : 0.0f));
  }
}

// Features first + r * per + [0, per) for r < R, the weights of each r a stream of their own.
template <typename T, int R>
void streams(const Layer<T>& layer, const Prepared<T>& x, int64_t first, int64_t per, int64_t num_tokens, int64_t d_in,
             float* sums) {
  // Tiles of nearly equal numbers of tokens: five are 3 and 2, because 4 and 1 read the weights with idle sums.
  const int64_t num_tiles = (num_tokens + kTokens - 1) / kTokens, stream = per * layer.w_stride, pitch = R * kBlock;
  for (int64_t block = 0; block < per; block += kBlock) {
    const int64_t width = std::min(kBlock, per - block);
    for (int64_t o = 0; o < width; ++o) {
      const T* w = layer.w + (first + block + o) * layer.w_stride;
      for (int64_t k = 0, t = 0; k < num_tiles; ++k) {
        const int64_t size = (num_tokens - t + num_tiles - k - 1) / (num_tiles - k);
        float* to = sums + t * pitch + o;
        const auto* values = x.values.get() + t * x.stride;
        switch (size) {
          case 1: tile<T, R, 1>(to, pitch, w, stream, values, x.stride, d_in, k == 0); break;
          case 2: tile<T, R, 2>(to, pitch, w, stream, values, x.stride, d_in, k == 0); break;
          case 3: tile<T, R, 3>(to, pitch, w, stream, values, x.stride, d_in, k == 0); break;
          default: tile<T, R, 4>(to, pitch, w, stream, values, x.stride, d_in, k == 0);
        }
        t += size;
      }
    }
    for (int r = 0; r < R; ++r) write(layer, first + r * per + block, width, sums + r * kBlock, pitch, num_tokens);
  }
}

// Features [first, stop).
template <typename T, int R>
void range(const Layer<T>& layer, const Prepared<T>& x, int64_t first, int64_t stop, int64_t num_tokens, int64_t d_in,
           float* sums) {
  const int64_t per = (stop - first) / R;
  streams<T, R>(layer, x, first, per, num_tokens, d_in, sums);
  streams<T, 1>(layer, x, first + R * per, stop - first - R * per, num_tokens, d_in, sums);
}

template <typename T>
void linear(const Layer<T>* layers, int64_t num_layers, const T* x, int64_t x_token, int64_t num_tokens, int64_t d_in) {
  const Prepared<T> prepared(x, x_token, num_tokens, d_in);
  int64_t total = 0;
  for (int64_t k = 0; k < num_layers; ++k) total += layers[k].d_out;
#pragma omp parallel
  {
    const std::unique_ptr<float[]> sums(new float[num_tokens * kStreamsOfFew * kBlock]);
    // A contiguous share of all features for each thread, cut where all its streams are equally long.
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    constexpr int64_t cut = kStreamsOfFew;
    const auto share_of_layer = num_tokens <= 2 ? range<T, kStreamsOfFew> : range<T, kStreams>;
    const int64_t share = (total + num_threads * cut - 1) / (num_threads * cut) * cut;
    int64_t first = std::min(total, thread * share), stop = std::min(total, first + share), before = 0;
    for (int64_t k = 0; k < num_layers && before < stop; before += layers[k++].d_out)
      if (first < before + layers[k].d_out)
        share_of_layer(layers[k], prepared, std::max<int64_t>(0, first - before),
                       std::min(layers[k].d_out, stop - before), num_tokens, d_in, sums.get());
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
