// Deltas of a thin batch: each lane's tokens read their own adapter's rows and nothing else, once.
//
// A lane at one site is (first token, tokens, where its rows start, how far they are apart, rank, place of its hidden
// values), places counted in elements from a common base. Hidden values stay in float, [tokens, rank] per lane: nothing
// is rounded between the two products.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "vectors.h"

namespace atmm {
namespace {

struct Lane {
  int64_t first_token, tokens, start, stride, rank, hidden;

  // The base may be zero: then `start` is an address.
  template <typename T>
  const T* rows(const T* base) const {
    return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(base) + start * sizeof(T));
  }
};

// Rows that will be read next. They are fetched while others are multiplied: each is too short, and each adapter's too
// far from the last one's, for the machine to guess where they lie.
template <typename T>
struct Rows {
  const T* start;
  int64_t stride;

  // Elements i to i + kWidth of the first N; a line of the cache is asked for once.
  template <int64_t N>
  void fetch(int64_t i) const {
    if (i * sizeof(T) % 64 != 0) return;
    for (int64_t n = 0; n < N; ++n) __builtin_prefetch(start + n * stride + i);
  }
};

// Rows from `row` on of a lane, or the first ones of the lane behind it.
template <typename T>
Rows<T> rows_after(const Lane* lanes, int64_t index, int64_t num_lanes, int64_t row, const T* base) {
  const bool inside = row < lanes[index].rank || index + 1 == num_lanes;
  const Lane& lane = lanes[inside ? index : index + 1];
  return {lane.rows(base) + (inside ? row * lane.stride : 0), lane.stride};
}

constexpr int64_t kRows = 4;    // rows of A, and tokens, whose dot products are taken side by side
constexpr int64_t kDeep = 8;
constexpr int64_t kBlock = 1024;  // features of y computed at a time: their sums stay in the first cache
constexpr int64_t kPitch = kBlock + kWidth;  // apart from one another in the cache

// hidden[c * rank + r] = sign * a[r] . x[c], for R rows and C tokens.
template <int64_t R, int64_t C, typename T>
void dots(float* hidden, int64_t rank, float sign, const T* a, int64_t a_stride, const float* x, int64_t d_in,
          Rows<T> next) {
  Floats sums[R][C] = {};
  int64_t i = 0;
  for (; i + kWidth <= d_in; i += kWidth) {
    next.template fetch<R>(i);
    Floats values[C];
    for (int64_t c = 0; c < C; ++c) values[c] = load(x + c * d_in + i);
    for (int64_t r = 0; r < R; ++r) {
      const Floats row = load(a + r * a_stride + i);
      for (int64_t c = 0; c < C; ++c) sums[r][c] += row * values[c];
    }
  }
  for (int64_t r = 0; r < R; ++r)
    for (int64_t c = 0; c < C; ++c) {
      float sum = 0;
      for (int64_t j = 0; j < kWidth; ++j) sum += sums[r][c][j];
      for (int64_t j = i; j < d_in; ++j) sum += load_one(a + r * a_stride + j) * x[c * d_in + j];
      hidden[c * rank + r] = sign * sum;
    }
}

template <int64_t R, typename T>
void dot_rows(float* hidden, int64_t tokens, int64_t rank, float sign, const T* a, int64_t a_stride, const float* x,
              int64_t d_in, Rows<T> next) {
  int64_t c = 0;
  for (; c + kRows <= tokens; c += kRows)
    dots<R, kRows>(hidden + c * rank, rank, sign, a, a_stride, x + c * d_in, d_in, next);
  for (; c < tokens; ++c) dots<R, 1>(hidden + c * rank, rank, sign, a, a_stride, x + c * d_in, d_in, next);
}

template <typename T>
void shrink(float* hidden, const T* x, int64_t x_token, int64_t x_feature, const T* base,
            const Lane* lanes, const float* signs, int64_t num_lanes, int64_t num_tokens, int64_t d_in) {
  const std::unique_ptr<float[]> floats(new float[num_tokens * d_in]);
  if (x_feature == 1) {
    for (int64_t t = 0; t < num_tokens; ++t)
      for (int64_t i = 0; i < d_in; ++i) floats[t * d_in + i] = load_one(x + t * x_token + i);
  } else {
    for (int64_t i = 0; i < d_in; ++i)
      for (int64_t t = 0; t < num_tokens; ++t) floats[t * d_in + i] = load_one(x + t * x_token + i * x_feature);
  }
#pragma omp parallel for schedule(static)
  for (int64_t index = 0; index < num_lanes; ++index) {
    const Lane& lane = lanes[index];
    const float* tokens = floats.get() + lane.first_token * d_in;
    const T* a = lane.rows(base);
    const auto next = [&](int64_t r) { return rows_after(lanes, index, num_lanes, r, base); };
    int64_t r = 0;
    for (; r + kRows <= lane.rank; r += kRows)
      dot_rows<kRows>(hidden + lane.hidden + r, lane.tokens, lane.rank, signs[index], a + r * lane.stride, lane.stride,
                      tokens, d_in, next(r + kRows));
    for (; r < lane.rank; ++r)
      dot_rows<1>(hidden + lane.hidden + r, lane.tokens, lane.rank, signs[index], a + r * lane.stride, lane.stride,
                  tokens, d_in, next(r + 1));
  }
}

// sums[o] += sum over K rows of hidden[k] * bt[k][o], for `width` features.
template <int64_t K, typename T>
void weigh_rows(float* sums, const float* hidden, const T* bt, int64_t bt_stride, int64_t width, Rows<T> next) {
  int64_t o = 0;
  for (; o + kWidth <= width; o += kWidth) {
    next.template fetch<K>(o);
    Floats sum = load(sums + o);
    for (int64_t k = 0; k < K; ++k) sum += load(bt + k * bt_stride + o) * hidden[k];
    store(sums + o, sum);
  }
  for (; o < width; ++o)
    for (int64_t k = 0; k < K; ++k) sums[o] += hidden[k] * load_one(bt + k * bt_stride + o);
}

// y += sums for `count` values that lie side by side.
template <typename T>
void add(T* y, const float* sums, int64_t count) {
  int64_t o = 0;
  for (; o + kWidth <= count; o += kWidth) store(y + o, load(y + o) + load(sums + o));
  for (; o < count; ++o) store_one(y + o, load_one(y + o) + sums[o]);
}

// to[o * tokens + t] = sums[t * kPitch + o]. A store of sixteen tokens may reach into the values behind, which are
// written later: `to` has room for kWidth more than it holds.
inline void turn(float* to, const float* sums, int64_t tokens, int64_t width) {
  for (int64_t t = (tokens - 1) / kWidth * kWidth; t >= 0; t -= kWidth)
    for (int64_t o = 0; o < width; o += kWidth) {
      Floats square[kWidth] = {};
      for (int64_t i = 0; i < std::min(kWidth, tokens - t); ++i) square[i] = load(sums + (t + i) * kPitch + o);
      transpose(square);
      for (int64_t i = 0; i < std::min(kWidth, width - o); ++i) store(to + (o + i) * tokens + t, square[i]);
    }
}

template <typename T>
void expand(T* y, int64_t y_token, int64_t y_feature, const float* hidden, const T* base,
            const Lane* lanes, int64_t num_lanes, int64_t num_tokens, int64_t d_out) {
#pragma omp parallel
  {
    const std::unique_ptr<float[]> sums(new float[num_tokens * kPitch]), turned(new float[num_tokens * kBlock + kWidth]);
#pragma omp for schedule(static)
    for (int64_t first = 0; first < d_out; first += kBlock) {
      const int64_t width = std::min(kBlock, d_out - first);
      std::fill(sums.get(), sums.get() + num_tokens * kPitch, 0.0f);
      for (int64_t index = 0; index < num_lanes; ++index) {
        const Lane& lane = lanes[index];
        const T* rows = lane.rows(base) + first;
        const auto next = [&](int64_t k) { return rows_after(lanes, index, num_lanes, k, base + first); };
        for (int64_t t = 0; t < lane.tokens; ++t) {
          float* to = sums.get() + (lane.first_token + t) * kPitch;
          const float* weights = hidden + lane.hidden + t * lane.rank;
          int64_t k = 0;
          for (; k + kDeep <= lane.rank; k += kDeep)
            weigh_rows<kDeep>(to, weights + k, rows + k * lane.stride, lane.stride, width, next(k + kDeep));
          for (; k < lane.rank; ++k)
            weigh_rows<1>(to, weights + k, rows + k * lane.stride, lane.stride, width, next(k + 1));
        }
      }
      T* block = y + first * y_feature;
      if (y_feature == 1) {
        for (int64_t t = 0; t < num_tokens; ++t) add(block + t * y_token, sums.get() + t * kPitch, width);
      } else {
        turn(turned.get(), sums.get(), num_tokens, width);
        if (y_token == 1 && y_feature == num_tokens)
          add(block, turned.get(), width * num_tokens);
        else
          for (int64_t o = 0; o < width; ++o)
            for (int64_t t = 0; t < num_tokens; ++t) {
              T* to = block + t * y_token + o * y_feature;
              store_one(to, load_one(to) + turned[o * num_tokens + t]);
            }
      }
    }
  }
}

}  // namespace
}  // namespace atmm

#define ATMM_LANES(TYPE, T)                                                                                            \
  extern "C" void atmm_shrink_##TYPE(float* hidden, const T* x, int64_t x_token, int64_t x_feature, const T* base,     \
                                     const atmm::Lane* lanes, const float* signs, int64_t num_lanes,                   \
                                     int64_t num_tokens, int64_t d_in) {                                               \
    atmm::shrink(hidden, x, x_token, x_feature, base, lanes, signs, num_lanes, num_tokens, d_in);                      \
  }                                                                                                                    \
  extern "C" void atmm_expand_##TYPE(T* y, int64_t y_token, int64_t y_feature, const float* hidden, const T* base,     \
                                     const atmm::Lane* lanes, int64_t num_lanes, int64_t num_tokens, int64_t d_out) {  \
    atmm::expand(y, y_token, y_feature, hidden, base, lanes, num_lanes, num_tokens, d_out);                            \
  }

ATMM_LANES(bfloat16, atmm::BFloat16)
ATMM_LANES(float32, float)
