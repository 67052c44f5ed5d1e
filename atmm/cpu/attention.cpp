// Attention of single tokens over a paged KV cache, read in place without a gathered copy and without padding.
//
// A task is one request, one KV head and one piece of the context; all query heads of the KV head's group share its
// reads. Pieces have a fixed length, so results do not depend on the number of threads. Scores, softmax and sums are in
// float; a final pass joins the pieces by their maxima and sums.
#include <algorithm>
#include <limits>
#include <memory>

#include "vectors.h"

namespace atmm {
namespace {

constexpr int64_t kPiece = 256;  // tokens of a context per task
constexpr int64_t kTile = 32;    // tokens of which keys or values are converted to float at a time, in the L1 cache
constexpr int64_t kAhead = 16;   // prefetch distance in tokens
constexpr int64_t kSide = 4;     // tokens, or query heads, computed side by side

typedef float Quarter __attribute__((vector_size(16)));

inline Quarter fold(Floats values) {
  Quarter parts[kWidth / 4];
  std::memcpy(parts, &values, sizeof parts);
  Quarter total = parts[0];
  for (int64_t i = 1; i < kWidth / 4; ++i) total += parts[i];
  return total;
}

inline float sum(Floats values) {
  const Quarter total = fold(values);
  return (total[0] + total[1]) + (total[2] + total[3]);
}

#if defined(__clang__) || __GNUC__ >= 12
#define ATMM_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define ATMM_PICK(a, b, ...) __builtin_shuffle(a, b, Places{__VA_ARGS__})
#endif

// The sums of four vectors, with a third of the instructions of four separate sums.
inline Quarter sums_of(const Floats* values) {
  const Quarter a = fold(values[0]), b = fold(values[1]), c = fold(values[2]), d = fold(values[3]);
  const Quarter ab = ATMM_PICK(a, b, 0, 4, 1, 5) + ATMM_PICK(a, b, 2, 6, 3, 7);
  const Quarter cd = ATMM_PICK(c, d, 0, 4, 1, 5) + ATMM_PICK(c, d, 2, 6, 3, 7);
  return ATMM_PICK(ab, cd, 0, 1, 4, 5) + ATMM_PICK(ab, cd, 2, 3, 6, 7);
}

inline float largest(Floats values) {
  float most = values[0];
  for (int64_t i = 1; i < kWidth; ++i) most = std::max(most, values[i]);
  return most;
}

// Rows of the cache as floats, [tokens, pitch]; values past `dim` are zero. The blocks of a context are scattered in
// memory, so the processor cannot predict the next row: it is prefetched. left: rows from here to the context's end.
template <typename T>
void read_tile(float* tile, const T* cache, int64_t stride, const int64_t* rows, int64_t tokens, int64_t left,
               int64_t dim, int64_t pitch) {
  for (int64_t t = 0; t < tokens; ++t) {
    const T* from = cache + rows[t] * stride;
    const char* later = reinterpret_cast<const char*>(cache + rows[std::min(t + kAhead, left - 1)] * stride);
    for (int64_t i = 0; i < dim * int64_t(sizeof(T)); i += 64) __builtin_prefetch(later + i);
    float* to = tile + t * pitch;
    int64_t i = 0;
    for (; i + kWidth <= dim; i += kWidth) store(to + i, load(from + i));
    for (; i < dim; ++i) to[i] = load_one(from + i);
  }
}

// scores[g][t + j] = q[g] . tile[t + j], for G heads and N tokens.
template <int64_t G, int64_t N>
inline void score(float* scores, const float* q, const float* tile, int64_t pitch) {
  Floats sums[G][N] = {};
  for (int64_t i = 0; i < pitch; i += kWidth)
    for (int64_t j = 0; j < N; ++j) {
      const Floats values = load(tile + j * pitch + i);
      for (int64_t g = 0; g < G; ++g) sums[g][j] += load(q + g * pitch + i) * values;
    }
  for (int64_t g = 0; g < G; ++g)
    if constexpr (N == 4) {
      const Quarter four = sums_of(sums[g]);
      std::memcpy(scores + g * kPiece, &four, sizeof four);
    } else {
      for (int64_t j = 0; j < N; ++j) scores[g * kPiece + j] = sum(sums[g][j]);
    }
}

template <int64_t G>
void score_tile(float* scores, const float* q, const float* tile, int64_t tokens, int64_t pitch) {
  int64_t t = 0;
  for (; t + kSide <= tokens; t += kSide) score<G, kSide>(scores + t, q, tile + t * pitch, pitch);
  for (; t < tokens; ++t) score<G, 1>(scores + t, q, tile + t * pitch, pitch);
}

// sums[g] += sum over tokens of weights[g][t] * tile[t], for G heads.
template <int64_t G>
void weigh_tile(float* sums, const float* weights, const float* tile, int64_t tokens, int64_t pitch) {
  constexpr int64_t kWide = 2;  // a pitch is a multiple of that many vectors, or of one
  int64_t i = 0;
  for (; i + kWide * kWidth <= pitch; i += kWide * kWidth) {
    Floats totals[G][kWide];
    for (int64_t g = 0; g < G; ++g)
      for (int64_t w = 0; w < kWide; ++w) totals[g][w] = load(sums + g * pitch + i + w * kWidth);
    for (int64_t t = 0; t < tokens; ++t) {
      Floats values[kWide];
      for (int64_t w = 0; w < kWide; ++w) values[w] = load(tile + t * pitch + i + w * kWidth);
      for (int64_t g = 0; g < G; ++g)
        for (int64_t w = 0; w < kWide; ++w) totals[g][w] += values[w] * weights[g * kPiece + t];
    }
    for (int64_t g = 0; g < G; ++g)
      for (int64_t w = 0; w < kWide; ++w) store(sums + g * pitch + i + w * kWidth, totals[g][w]);
  }
  for (; i < pitch; i += kWidth)
    for (int64_t g = 0; g < G; ++g) {
      Floats total = load(sums + g * pitch + i);
      for (int64_t t = 0; t < tokens; ++t) total += load(tile + t * pitch + i) * weights[g * kPiece + t];
      store(sums + g * pitch + i, total);
    }
}

// Scratch memory of a thread: allocated once, used for all its tasks.
struct Scratch {
  Scratch(int64_t group, int64_t pitch)
      : q(new float[group * pitch]()), tile(new float[kTile * pitch]()), scores(new float[group * kPiece]) {}
  std::unique_ptr<float[]> q, tile, scores;
};

// One piece for one group of heads: sums [group, pitch], not divided by the weights' totals; and per head the largest
// score, to the base 2, and the total.
template <typename T>
void attend_piece(float* sums, float* most, float* totals, Scratch& scratch, const T* q, int64_t q_head, int64_t q_feature,
                  const T* k, const T* v, int64_t stride, const int64_t* rows, int64_t tokens, int64_t group,
                  int64_t dim, int64_t pitch, float scale) {
  float* scores = scratch.scores.get();
  float* tile = scratch.tile.get();
  for (int64_t g = 0; g < group; ++g)
    for (int64_t i = 0; i < dim; ++i) scratch.q[g * pitch + i] = kLog2E * scale * load_one(q + g * q_head + i * q_feature);
  for (int64_t t = 0; t < tokens; t += kTile) {
    const int64_t count = std::min(kTile, tokens - t);
    read_tile(tile, k, stride, rows + t, count, tokens - t, dim, pitch);
    int64_t g = 0;
    for (; g + 2 <= group; g += 2)
      score_tile<2>(scores + g * kPiece + t, scratch.q.get() + g * pitch, tile, count, pitch);
    if (g < group) score_tile<1>(scores + g * kPiece + t, scratch.q.get() + g * pitch, tile, count, pitch);
  }
  for (int64_t g = 0; g < group; ++g) {
    float* own = scores + g * kPiece;
    const int64_t padded = whole<kWidth>(tokens);
    std::fill(own + tokens, own + padded, -std::numeric_limits<float>::infinity());
    Floats highest = load(own);
    for (int64_t t = kWidth; t < padded; t += kWidth) {
      const Floats values = load(own + t);
      highest = values > highest ? values : highest;
    }
    most[g] = largest(highest);
    Floats total = {};
    for (int64_t t = 0; t < padded; t += kWidth) {
      Floats weights = exp2(load(own + t) - most[g]);
      for (int64_t j = tokens - t; j < kWidth; ++j) weights[j] = 0;  // padding, in the last vector
      store(own + t, weights);
      total += weights;
    }
    totals[g] = sum(total);
  }
  std::fill(sums, sums + group * pitch, 0.0f);
  for (int64_t t = 0; t < tokens; t += kTile) {
    const int64_t count = std::min(kTile, tokens - t);
    read_tile(tile, v, stride, rows + t, count, tokens - t, dim, pitch);
    const float* weights = scores + t;
    int64_t g = 0;
    for (; g + kSide <= group; g += kSide) weigh_tile<kSide>(sums + g * pitch, weights + g * kPiece, tile, count, pitch);
    switch (group - g) {
      case 3: weigh_tile<3>(sums + g * pitch, weights + g * kPiece, tile, count, pitch); break;
      case 2: weigh_tile<2>(sums + g * pitch, weights + g * kPiece, tile, count, pitch); break;
      case 1: weigh_tile<1>(sums + g * pitch, weights + g * kPiece, tile, count, pitch); break;
    }
  }
}

// out: [num_tokens, heads, dim], contiguous. Query n is row places[n] of q and out. The cache rows of its context are
// rows[starts[n]] to rows[starts[n + 1] - 1], at least one.
template <typename T>
void attend(T* out, const T* q, int64_t q_token, int64_t q_head, int64_t q_feature, const T* k, const T* v,
            int64_t stride, const int64_t* places, const int64_t* rows, const int64_t* starts, int64_t num_queries,
            int64_t heads, int64_t kv_heads, int64_t dim, float scale) {
  const int64_t group = heads / kv_heads, pitch = whole<kWidth>(dim);
  // Pieces of query n are first[n] to first[n + 1] - 1.
  const std::unique_ptr<int64_t[]> first(new int64_t[num_queries + 1]);
  first[0] = 0;
  for (int64_t n = 0; n < num_queries; ++n) first[n + 1] = first[n] + (starts[n + 1] - starts[n] + kPiece - 1) / kPiece;
  const int64_t num_tasks = first[num_queries] * kv_heads;
  const int64_t room = group * (pitch + 2);  // of a task's sums, largest scores and totals
  const std::unique_ptr<float[]> partial(new float[num_tasks * room]);
#pragma omp parallel
  {
    Scratch scratch(group, pitch);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < num_tasks; ++task) {
      const int64_t piece = task / kv_heads, head = task % kv_heads;
      const int64_t n = std::upper_bound(first.get(), first.get() + num_queries, piece) - first.get() - 1;
      const int64_t from = starts[n] + (piece - first[n]) * kPiece;
      float* sums = partial.get() + task * room;
      attend_piece(sums, sums + group * pitch, sums + group * (pitch + 1), scratch,
                   q + places[n] * q_token + head * group * q_head, q_head, q_feature, k + head * dim, v + head * dim,
                   stride, rows + from, std::min(kPiece, starts[n + 1] - from), group, dim, pitch, scale);
    }
#pragma omp for schedule(static)
    for (int64_t index = 0; index < num_queries * heads; ++index) {
      const int64_t n = index / heads, head = index % heads, g = head % group;
      const float* begin = partial.get() + (first[n] * kv_heads + head / group) * room;
      const int64_t step = kv_heads * room, pieces = first[n + 1] - first[n];
      float most = begin[group * pitch + g];
      for (int64_t p = 1; p < pieces; ++p) most = std::max(most, begin[p * step + group * pitch + g]);
      float* joined = scratch.tile.get();
      std::fill(joined, joined + pitch, 0.0f);
      float total = 0;
      for (int64_t p = 0; p < pieces; ++p) {
        const float* own = begin + p * step;
        const float weight = exp2(splat(own[group * pitch + g] - most))[0];
        total += weight * own[group * (pitch + 1) + g];
        for (int64_t i = 0; i < pitch; i += kWidth)
          store(joined + i, load(joined + i) + load(own + g * pitch + i) * weight);
      }
      T* to = out + (places[n] * heads + head) * dim;
      int64_t i = 0;
      for (; i + kWidth <= dim; i += kWidth) store(to + i, load(joined + i) / total);
      if (i < dim) store(to + i, load(joined + i) / total, dim - i);
    }
  }
}

}  // namespace
}  // namespace atmm

#define ATMM_ATTEND(TYPE, T)                                                                                           \
  extern "C" void atmm_attend_##TYPE(T* out, const T* q, int64_t q_token, int64_t q_head, int64_t q_feature,          \
                                     const T* k, const T* v, int64_t stride, const int64_t* places,                   \
                                     const int64_t* rows, const int64_t* starts, int64_t num_queries, int64_t heads,  \
                                     int64_t kv_heads, int64_t dim, float scale) {                                    \
    atmm::attend(out, q, q_token, q_head, q_feature, k, v, stride, places, rows, starts, num_queries, heads, kv_heads, \
                 dim, scale);                                                                                          \
  }

ATMM_ATTEND(bfloat16, atmm::BFloat16)
ATMM_ATTEND(float32, float)
