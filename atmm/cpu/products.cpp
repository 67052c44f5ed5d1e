// y[t, o] = bias[o] + sum_i x[t, i] * w[o, i] for a thin batch: the weights are read once, row by row, in place.
//
// Decoding multiplies a few tokens with every weight of the model, so the product is bound by memory bandwidth. Sums
// are kept in float32 registers, one tile of R weight rows by M tokens at a time. The R rows are from R distant
// streams, each read sequentially: a processor prefetches several streams, but not several rows of one page at once
// (docs/decisions/0040).
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "tiles.h"
#include "vectors.h"

namespace atmm {
namespace {

// sum + a * b, rounded once where the processor supports it. If the compiler chose, some tiles would round twice, and a
// token's values would depend on its tile.
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

// Keeps a value used by several products in a register; compilers would load it again for each product.
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

// Kinds of products of a row of weights with a row of x. `Weight` is the type in memory, `Input` the type of x that the
// kernel reads, in groups of kGroup values. kTokens is the maximum number of tokens in a tile. kLongestSpread: see
// `fetch_of`; widened bfloat16 was measured with all rows spread, on other processors (docs/decisions/0040).
#if defined(__AVX512F__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

struct Float32 {
  using Weight = float;
  using Input = float;
  static constexpr int64_t kGroup = kWidth, kTokens = kManyRegisters ? 6 : 4, kLongestSpread = 4096;

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
struct Pairs {
  using Weight = BFloat16;
  using Input = BFloat16;
  static constexpr int64_t kGroup = 2 * kWidth, kTokens = 6, kLongestSpread = 4096;

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

#endif

// A register of bfloat16 holds two values per 32-bit lane: a shift makes the even ones float32, a mask the odd ones. x
// is stored accordingly, the even values of a group before its odd ones.
struct Widened {
  using Weight = BFloat16;
  using Input = float;
  static constexpr int64_t kGroup = 2 * kWidth, kTokens = kManyRegisters ? 8 : 4, kLongestSpread = INT64_MAX;

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

// A layer that reads x and writes its d_out features to y[t * y_token + o]. bias may be null.
template <typename T>
struct Layer {
  const T* w;
  int64_t w_stride;
  const T* bias;
  T* y;
  int64_t y_token, d_out;
};

constexpr int64_t kLine = 64;  // bytes of a cache line

// x in the order in which weights are read. Every row is padded with zeros to whole groups and by one more cache line:
// rows with a stride of a power of two evict each other from the L1 cache. Rows start at a cache line, because a load
// across two lines costs two loads.
template <typename Kind>
struct Prepared {
  using T = typename Kind::Weight;
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

constexpr int64_t kBlock = 32;  // features of a stream with sums stored together

// Number of weight streams read at a time, by the tokens of a tile: as many as leave registers for the inputs beside
// the sums. A thread's share is a multiple of kCut, so that all its streams have equal length.
constexpr int streams_of(int64_t tokens) {
  return kManyRegisters ? tokens <= 2 ? 8 : tokens <= 6 ? 4 : 3 : tokens <= 2 ? 4 : 2;
}
constexpr int64_t kCut = kManyRegisters ? 24 : 4;
constexpr int64_t kMostStreams = streams_of(1);
constexpr int64_t kAhead = 1024;  // prefetch distance in bytes of a single tile

// The lines that a tile prefetches: `distance` bytes ahead in the streams of the bits of `streams`.
struct Fetch {
  unsigned streams;
  int64_t distance;
};

// What tile k of `num_tiles` that read the same weights prefetches. Each has a part of the next rows, so that memory is
// read while all of them compute. Rows longer than `longest` would evict those in use from the L1 cache: the first tile
// prefetches these rows, and the others read them from the cache.
inline Fetch fetch_of(int64_t k, int64_t num_tiles, int64_t row, int64_t longest) {
  if (row > longest) return {k ? 0u : ~0u, kAhead};
  unsigned streams = 0;
  for (int64_t r = k; r < kMostStreams; r += num_tiles) streams |= 1u << r;
  return {streams, num_tiles == 1 ? kAhead : row};
}

// to[m * pitch + r * kBlock]: the products of R rows of weights, `stream` elements apart, with M rows of x.
template <typename Kind, int R, int M>
inline void tile(float* to, int64_t pitch, const typename Kind::Weight* w, int64_t stream,
                 const typename Kind::Input* values, int64_t x_stride, int64_t d_in, Fetch fetch) {
  using T = typename Kind::Weight;
  constexpr int64_t kPerLine = kLine / sizeof(T);
  Floats sums[R][M] = {};
  const int64_t whole = d_in / Kind::kGroup * Kind::kGroup;
  for (int64_t i = 0; i < whole; i += Kind::kGroup) {
    if (i % kPerLine == 0)
      for (int r = 0; r < R; ++r)
        if (fetch.streams >> r & 1)
          __builtin_prefetch(reinterpret_cast<const char*>(w + r * stream + i) + fetch.distance, 0, 3);
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

// Stores features [first, first + width) of all tokens. pitch: stride of the sums of a token.
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

// Features first + r * per + [0, per) for r < R; the weights of each r form one stream. M: tokens of the largest tile.
template <typename Kind, int R, int M>
void streams(const Layer<typename Kind::Weight>& layer, const Prepared<Kind>& x, int64_t first, int64_t per,
             int64_t num_tokens, int64_t d_in, float* sums) {
  const int64_t num_tiles = (num_tokens + M - 1) / M, stream = per * layer.w_stride, pitch = R * kBlock;
  const int64_t row = layer.w_stride * sizeof(typename Kind::Weight);
  for (int64_t block = 0; block < per; block += kBlock) {
    const int64_t width = std::min(kBlock, per - block);
    for (int64_t o = 0; o < width; ++o) {
      const auto* w = layer.w + (first + block + o) * layer.w_stride;
      for (int64_t k = 0, t = 0; k < num_tiles; ++k) {
        const int64_t size = (num_tokens - t + num_tiles - k - 1) / (num_tiles - k);
        const Fetch fetch = fetch_of(k, num_tiles, row, Kind::kLongestSpread);
        float* to = sums + t * pitch + o;
        const auto* values = x.values.get() + t * x.stride;
        if (size == M)
          tile<Kind, R, M>(to, pitch, w, stream, values, x.stride, d_in, fetch);
        else if constexpr (M > 1)
          tile<Kind, R, M - 1>(to, pitch, w, stream, values, x.stride, d_in, fetch);
        t += size;
      }
    }
    for (int r = 0; r < R; ++r) write(layer, first + r * per + block, width, sums + r * kBlock, pitch, num_tokens);
  }
}

// Features [first, stop).
template <typename Kind, int M>
void range(const Layer<typename Kind::Weight>& layer, const Prepared<Kind>& x, int64_t first, int64_t stop,
           int64_t num_tokens, int64_t d_in, float* sums) {
  constexpr int R = streams_of(M);
  const int64_t per = (stop - first) / R;
  streams<Kind, R, M>(layer, x, first, per, num_tokens, d_in, sums);
  streams<Kind, 1, M>(layer, x, first + R * per, stop - first - R * per, num_tokens, d_in, sums);
}

template <typename Kind, int M = Kind::kTokens>
auto range_of(int64_t tokens_of_largest_tile) {
  if constexpr (M > 1)
    if (tokens_of_largest_tile < M) return range_of<Kind, M - 1>(tokens_of_largest_tile);
  return range<Kind, M>;
}

template <typename Kind, typename T = typename Kind::Weight>
void linear(const Layer<T>* layers, int64_t num_layers, const T* x, int64_t x_token, int64_t num_tokens, int64_t d_in) {
  const Prepared<Kind> prepared(x, x_token, num_tokens, d_in);
  // Tiles of nearly equal size: nine tokens are 5 and 4, because with 8 and 1 the second tile wastes registers.
  const int64_t num_tiles = (num_tokens + Kind::kTokens - 1) / Kind::kTokens;
  const auto share_of_layer = range_of<Kind>((num_tokens + num_tiles - 1) / num_tiles);
  int64_t total = 0;
  for (int64_t k = 0; k < num_layers; ++k) total += layers[k].d_out;
#pragma omp parallel
  {
    const std::unique_ptr<float[]> sums(new float[num_tokens * kMostStreams * kBlock]);
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t share = (total + num_threads * kCut - 1) / (num_threads * kCut) * kCut;
    int64_t first = std::min(total, thread * share), stop = std::min(total, first + share), before = 0;
    for (int64_t k = 0; k < num_layers && before < stop; before += layers[k++].d_out)
      if (first < before + layers[k].d_out)
        share_of_layer(layers[k], prepared, std::max<int64_t>(0, first - before),
                       std::min(layers[k].d_out, stop - before), num_tokens, d_in, sums.get());
  }
}

#if defined(ATMM_TILES)

void linear_by_tiles(const Layer<BFloat16>* layers, int64_t num_layers, const BFloat16* x, int64_t x_token,
                     int64_t num_tokens, int64_t d_in) {
  Panels panels(num_tokens, d_in * sizeof *x);
  int64_t total = 0;
  for (int64_t k = 0; k < num_layers; ++k) total += layers[k].d_out;
#pragma omp parallel
  {
#pragma omp for
    for (int64_t t = 0; t < num_tokens; t += kTileRows) panels.fill(t, x, x_token * sizeof *x);
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t share = (total + num_threads * kStripe - 1) / (num_threads * kStripe) * kStripe;
    const int64_t first = std::min(total, thread * share), stop = std::min(total, first + share);
    for (int64_t k = 0, before = 0; k < num_layers && before < stop; before += layers[k++].d_out) {
      const Layer<BFloat16>& layer = layers[k];
      const auto finish = [&](int64_t o, int64_t, Floats sums) {
        return layer.bias ? sums + load_one(layer.bias + o) : sums;
      };
      multiply_tiles<false>(layer.y, layer.y_token, layer.w, layer.w_stride * sizeof *layer.w,
                            std::max<int64_t>(0, first - before), std::min(layer.d_out, stop - before), panels, finish);
    }
  }
}

#endif

}  // namespace
}  // namespace atmm

extern "C" int32_t atmm_has_tiles() {
#if defined(ATMM_TILES)
  return atmm::has_tiles();
#else
  return 0;
#endif
}

extern "C" void atmm_linear_bfloat16(const atmm::Layer<atmm::BFloat16>* layers, int64_t num_layers,
                                     const atmm::BFloat16* x, int64_t x_token, int64_t num_tokens, int64_t d_in) {
#if defined(ATMM_TILES)
  if (atmm::has_tiles()) return atmm::linear_by_tiles(layers, num_layers, x, x_token, num_tokens, d_in);
#endif
#if defined(__AVX512BF16__)
  static const bool pairs = atmm::multiplies_pairs_fast();
  if (pairs) return atmm::linear<atmm::Pairs>(layers, num_layers, x, x_token, num_tokens, d_in);
#endif
  atmm::linear<atmm::Widened>(layers, num_layers, x, x_token, num_tokens, d_in);
}

extern "C" void atmm_linear_float32(const atmm::Layer<float>* layers, int64_t num_layers, const float* x,
                                    int64_t x_token, int64_t num_tokens, int64_t d_in) {
  atmm::linear<atmm::Float32>(layers, num_layers, x, x_token, num_tokens, d_in);
}
