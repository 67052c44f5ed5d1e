// Attention of the tokens of a prompt's chunk over a paged KV cache, read in place, without a mask.
//
// A task is one KV head and a few tokens: all query heads of the KV head's group are rows of one matrix. It goes through
// the context in tiles of kTile tokens: scores, weights relative to the largest score so far, and sums, all in float.
// Where the processor multiplies pairs of bfloat16, the weights are rounded to it.
// Tiles begin at multiples of kTile, so a token's result depends neither on the chunk nor on the number of threads.
#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#include "vectors.h"

namespace atmm {
namespace {

constexpr int64_t kTile = 64;  // tokens of a context
constexpr int64_t kRows = 96;  // about that many rows of queries in a task
constexpr int kHeight = 6, kPanel = kWidth == 16 ? 4 : 2;  // registers of sums: rows, and vectors in a row

// How matrices are multiplied: from units of kUnit values that are adjacent in the inner dimension. In a matrix of
// columns, unit i of a column is in row i.
struct Floated {
  using Value = float;
  using Unit = float;
  static constexpr int64_t kUnit = 1;

  static inline Floats add(Floats sum, Unit a, Floats b) { return sum + splat(a) * b; }
  template <typename T>
  static inline Floats load_units(const T* from, int64_t count) {
    return count < kWidth ? load(from, count) : load(from);
  }
  // Units of columns that are rows of the cache.
  template <typename T>
  static inline Floats join(const T* row, const T*, int64_t count) {
    return load_units(row, count);
  }
};

#if defined(__AVX512BF16__)

// Pairs of bfloat16, in one instruction.
struct Paired {
  using Value = BFloat16;
  using Unit = uint32_t;
  static constexpr int64_t kUnit = 2;

  static inline Floats add(Floats sum, Unit a, Floats b) {
    return Floats(_mm512_dpbf16_ps(__m512(sum), (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b));
  }
  static inline Floats load_units(const BFloat16* from, int64_t count) {
    return Floats(_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << count) - 1), from)));
  }
  static inline Floats join(const BFloat16* row, const BFloat16* next, int64_t count) {
    const Bits low = bits(load(row, count)), high = next ? bits(load(next, count)) : Bits{};
    const Bits both = low >> 16 | high;
    Floats values;
    std::memcpy(&values, &both, sizeof values);
    return values;
  }
  static inline Bits bits(Floats values) {
    Bits all;
    std::memcpy(&all, &values, sizeof all);
    return all;
  }
};

#endif

// sums[m][c] += sum over units i of a[m][i] * b[i][c], where `inner` is the number of units, for M rows and W vectors of columns.
template <typename Kind, int M, int W>
inline void multiply_block(float* sums, int64_t sums_row, const typename Kind::Value* a, int64_t a_row, const float* b,
                           int64_t b_row, int64_t inner) {
  Floats own[M][W];
  UNROLLED for (int m = 0; m < M; ++m)
    UNROLLED for (int w = 0; w < W; ++w) own[m][w] = load(sums + m * sums_row + w * kWidth);
  for (int64_t i = 0; i < inner; ++i) {
    Floats values[W];
    UNROLLED for (int w = 0; w < W; ++w) values[w] = load(b + i * b_row + w * kWidth);
    UNROLLED for (int m = 0; m < M; ++m) {
      typename Kind::Unit unit;
      std::memcpy(&unit, a + m * a_row + i * Kind::kUnit, sizeof unit);
      UNROLLED for (int w = 0; w < W; ++w) own[m][w] = Kind::add(own[m][w], unit, values[w]);
    }
  }
  UNROLLED for (int m = 0; m < M; ++m)
    UNROLLED for (int w = 0; w < W; ++w) store(sums + m * sums_row + w * kWidth, own[m][w]);
}

// As multiply_block for any number of rows, and columns in whole vectors. inner: in values.
template <typename Kind>
inline void multiply(float* sums, int64_t sums_row, const typename Kind::Value* a, int64_t a_row, const float* b,
                     int64_t b_row, int64_t rows, int64_t inner, int64_t columns) {
  inner = (inner + Kind::kUnit - 1) / Kind::kUnit;
  const auto panel = [&](auto width, int64_t c) {
    constexpr int W = decltype(width)::value;
    int64_t m = 0;
    for (; m + kHeight <= rows; m += kHeight)
      multiply_block<Kind, kHeight, W>(sums + m * sums_row + c, sums_row, a + m * a_row, a_row, b + c, b_row, inner);
    for (; m < rows; ++m)
      multiply_block<Kind, 1, W>(sums + m * sums_row + c, sums_row, a + m * a_row, a_row, b + c, b_row, inner);
  };
  int64_t c = 0;
  for (; c + kPanel * kWidth <= columns; c += kPanel * kWidth) panel(std::integral_constant<int, kPanel>(), c);
  for (; c < columns; c += kWidth) panel(std::integral_constant<int, 1>(), c);
}

// Rows of the cache as units of columns, [kTile / kUnit, pitch]. Values past `dim` are zero.
template <typename Kind, typename T>
void read_values(float* to, const T* cache, int64_t stride, const int64_t* rows, int64_t count, int64_t dim,
                 int64_t pitch) {
  for (int64_t t = 0; t < count; t += Kind::kUnit, to += pitch) {
    const T* row = cache + rows[t] * stride;
    const T* next = Kind::kUnit == 2 && t + 1 < count ? cache + rows[t + 1] * stride : nullptr;
    for (int64_t i = 0; i < dim; i += kWidth)
      store(to + i, Kind::join(row + i, next ? next + i : nullptr, std::min(kWidth, dim - i)));
  }
}

// The same transposed: [pitch / kUnit, kTile]. Rows past `count` are zero, too.
template <typename Kind, typename T>
void read_keys(float* to, const T* cache, int64_t stride, const int64_t* rows, int64_t count, int64_t dim,
               int64_t pitch) {
  constexpr int64_t kValues = kWidth * Kind::kUnit;  // of a register
  for (int64_t t = 0; t < kTile; t += kWidth)
    for (int64_t i = 0; i < pitch; i += kValues) {
      Floats square[kWidth] = {};
      for (int64_t j = 0; j < std::min(kWidth, count - t); ++j)
        square[j] = Kind::load_units(cache + rows[t + j] * stride + i, std::min(kValues, dim - i));
      transpose(square);
      for (int64_t j = 0; j < kWidth; ++j) store(to + (i / Kind::kUnit + j) * kTile + t, square[j]);
    }
}

inline float largest(Floats values) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(__m512(values));
#else
  float most = values[0];
  for (int64_t i = 1; i < kWidth; ++i) most = std::max(most, values[i]);
  return most;
#endif
}

// Scratch memory of a thread. q: in the type that is multiplied, as the weights are, which replace the scores.
template <typename Value>
struct Scratch {
  Scratch(int64_t rows, int64_t pitch)
      : q(new Value[rows * pitch]),
        tile(new float[kTile * pitch]),
        scores(new float[rows * kTile]),
        sums(new float[rows * pitch]),
        most(new float[rows]),
        totals(new Floats[rows]) {}
  std::unique_ptr<Value[]> q;
  std::unique_ptr<float[]> tile, scores, sums, most;
  std::unique_ptr<Floats[]> totals;
};

// Turns the scores of one row, in place, into weights relative to its largest score so far, and lets its sums and total
// follow. The total is that of the rounded weights, so that their rounding errors do not change the sum of the weights.
// count: tokens that the row's token sees from the tile on, at least one.
template <typename Value>
inline void weigh(float* scores, float scale, int64_t count, float& most, Floats& total, float* sums,
                  int64_t pitch) {
  for (int64_t t = 0; t < kTile; t += kWidth) store(scores + t, load(scores + t) * scale);
  std::fill(scores + std::min(count, kTile), scores + kTile, std::numeric_limits<float>::lowest());
  Floats highest = load(scores);
  for (int64_t t = kWidth; t < kTile; t += kWidth) {
    const Floats values = load(scores + t);
    highest = values > highest ? values : highest;
  }
  const float now = std::max(most, largest(highest)), change = exp2(splat(most - now))[0];
  if (now != most) {
    total *= change;
    for (int64_t i = 0; i < pitch; i += kWidth) store(sums + i, load(sums + i) * change);
  }
  most = now;
  Value* weights = reinterpret_cast<Value*>(scores);
  for (int64_t t = 0; t < kTile; t += kWidth) store(weights + t, exp2(load(scores + t) - now));
  std::fill(weights + std::min(count, kTile), weights + kTile, Value{});
  for (int64_t t = 0; t < kTile; t += kWidth) total += load(weights + t);
}

// Tokens [first, stop) of the chunk and the heads of one group. See `attend_chunk`.
template <typename Kind, typename T>
void attend_tokens(T* out, const T* q, int64_t q_token, int64_t q_head, int64_t q_feature, const T* k, const T* v,
                   int64_t stride, const int64_t* places, const int64_t* seen, const int64_t* rows, int64_t first,
                   int64_t stop, int64_t group, int64_t out_token, int64_t dim, int64_t pitch, float scale,
                   Scratch<typename Kind::Value>& scratch) {
  const int64_t height = (stop - first) * group;
  using Value = typename Kind::Value;
  constexpr int64_t kWeights = kTile * sizeof(float) / sizeof(Value);  // from one row to the next
  Value* queries = scratch.q.get();
  float *tile = scratch.tile.get(), *scores = scratch.scores.get(), *sums = scratch.sums.get();
  for (int64_t m = 0; m < height; ++m) {
    const T* from = q + places[first + m / group] * q_token + m % group * q_head;
    for (int64_t i = 0; i < pitch; ++i)
      store_one(queries + m * pitch + i, i < dim ? load_one(from + i * q_feature) : 0.0f);
  }
  std::fill(sums, sums + height * pitch, 0.0f);
  std::fill(scratch.most.get(), scratch.most.get() + height, std::numeric_limits<float>::lowest());
  std::fill(scratch.totals.get(), scratch.totals.get() + height, Floats{});
  for (int64_t t = 0; t < seen[stop - 1]; t += kTile) {
    const int64_t count = std::min(kTile, seen[stop - 1] - t);
    // Rows of tokens that see none of the tile are left out: a NaN in it would pass weights of zero.
    const int64_t before = (std::upper_bound(seen + first, seen + stop, t) - seen - first) * group;
    read_keys<Kind>(tile, k, stride, rows + t, count, dim, pitch);
    std::fill(scores + before * kTile, scores + height * kTile, 0.0f);
    multiply<Kind>(scores + before * kTile, kTile, queries + before * pitch, pitch, tile, kTile, height - before, dim,
                   kTile);
    for (int64_t m = before; m < height; ++m)
      weigh<Value>(scores + m * kTile, kLog2E * scale, seen[first + m / group] - t, scratch.most[m],
            scratch.totals[m], sums + m * pitch, pitch);
    read_values<Kind>(tile, v, stride, rows + t, count, dim, pitch);
    multiply<Kind>(sums + before * pitch, pitch, reinterpret_cast<Value*>(scores) + before * kWeights, kWeights, tile,
                   pitch, height - before, count, whole<kWidth>(dim));
  }
  for (int64_t m = 0; m < height; ++m) {
    float total = 0;
    for (int64_t i = 0; i < kWidth; ++i) total += scratch.totals[m][i];
    T* to = out + places[first + m / group] * out_token + m % group * dim;
    for (int64_t i = 0; i < dim; i += kWidth)
      store(to + i, load(sums + m * pitch + i) / total, std::min(kWidth, dim - i));
  }
}

// out: [num_tokens, heads, dim], contiguous. Token n of the chunk is row places[n] of q and out, and sees the first
// seen[n] >= 1 tokens of the context, in cache rows `rows`; `seen` ascends.
template <typename Kind, typename T>
void attend_chunk(T* out, const T* q, int64_t q_token, int64_t q_head, int64_t q_feature, const T* k, const T* v,
                  int64_t stride, const int64_t* places, const int64_t* rows, const int64_t* seen, int64_t num_queries,
                  int64_t heads, int64_t kv_heads, int64_t dim, float scale) {
  const int64_t group = heads / kv_heads, pitch = whole<kWidth * Kind::kUnit>(dim);
  const int64_t per = std::max<int64_t>(1, kRows / group), num_parts = (num_queries + per - 1) / per;
#pragma omp parallel
  {
    Scratch<typename Kind::Value> scratch(per * group, pitch);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < num_parts * kv_heads; ++task) {  // the last tokens see most: they come first
      const int64_t first = (num_parts - 1 - task / kv_heads) * per, head = task % kv_heads;
      attend_tokens<Kind>(out + head * group * dim, q + head * group * q_head, q_token, q_head, q_feature,
                          k + head * dim, v + head * dim, stride, places, seen, rows, first,
                          std::min(first + per, num_queries), group, heads * dim, dim, pitch, scale, scratch);
    }
  }
}

template <typename T, typename... Rest>
void attend_fast(T* out, Rest... rest) {
#if defined(__AVX512BF16__)
  static const bool paired = multiplies_pairs_fast();
  if constexpr (std::is_same_v<T, BFloat16>)
    if (paired) return attend_chunk<Paired>(out, rest...);
#endif
  attend_chunk<Floated>(out, rest...);
}

}  // namespace
}  // namespace atmm

#define ATMM_ATTEND_CHUNK(TYPE, T)                                                                                     \
  extern "C" void atmm_attend_chunk_##TYPE(T* out, const T* q, int64_t q_token, int64_t q_head, int64_t q_feature,    \
                                           const T* k, const T* v, int64_t stride, const int64_t* places,             \
                                           const int64_t* rows, const int64_t* seen, int64_t num_queries,             \
                                           int64_t heads, int64_t kv_heads, int64_t dim, float scale) {               \
    atmm::attend_fast(out, q, q_token, q_head, q_feature, k, v, stride, places, rows, seen, num_queries, heads,       \
                      kv_heads, dim, scale);                                                                           \
  }

ATMM_ATTEND_CHUNK(bfloat16, atmm::BFloat16)
ATMM_ATTEND_CHUNK(float32, float)
