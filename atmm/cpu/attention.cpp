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
constexpr float kLog2E = 1.44269504f;

// Vectors of the size of a register: GCC keeps several sums of longer vectors in memory.
#if defined(__AVX512F__)
constexpr int64_t kNative = 16;
#else
constexpr int64_t kNative = 8;
#endif
typedef float Values __attribute__((vector_size(4 * kNative)));
typedef uint32_t Words __attribute__((vector_size(4 * kNative)));

inline Values read(const float* from) {
  Values values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Values read(const BFloat16* from) {
  uint16_t halves __attribute__((vector_size(2 * kNative)));
  std::memcpy(&halves, from, sizeof halves);
  const Words bits = __builtin_convertvector(halves, Words) << 16;
  Values values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}

inline void write(float* to, Values values) { std::memcpy(to, &values, sizeof values); }

inline Values all(float value) { return Values{} + value; }

template <int64_t N>
constexpr int64_t whole(int64_t value) {
  return (value + N - 1) / N * N;
}

// 2^x for x <= 0, to a few units in the last place. Results below 2^-125 are clamped to about 2^-125. NaN stays NaN.
inline Values exp2(Values x) {
  const Values low = all(-125.0f);
  const Values clamped = x < low ? low : x;
  const Values magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits
  const Values shifted = clamped + magic;
  const Values part = clamped - (shifted - magic);
  Values value = all(1.5252734e-5f);
  for (const float factor :
       {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    value = value * part + factor;
  Words bits, power;
  std::memcpy(&bits, &value, sizeof bits);
  std::memcpy(&power, &shifted, sizeof power);
  bits += power << 23;
  std::memcpy(&value, &bits, sizeof value);
  return value + (x - x);
}

typedef float Quarter __attribute__((vector_size(16)));

inline Quarter fold(Values values) {
  Quarter parts[kNative / 4];
  std::memcpy(parts, &values, sizeof parts);
  Quarter total = parts[0];
  for (int64_t i = 1; i < kNative / 4; ++i) total += parts[i];
  return total;
}

inline float sum(Values values) {
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
inline Quarter sums_of(const Values* values) {
  const Quarter a = fold(values[0]), b = fold(values[1]), c = fold(values[2]), d = fold(values[3]);
  const Quarter ab = ATMM_PICK(a, b, 0, 4, 1, 5) + ATMM_PICK(a, b, 2, 6, 3, 7);
  const Quarter cd = ATMM_PICK(c, d, 0, 4, 1, 5) + ATMM_PICK(c, d, 2, 6, 3, 7);
  return ATMM_PICK(ab, cd, 0, 1, 4, 5) + ATMM_PICK(ab, cd, 2, 3, 6, 7);
}

inline float largest(Values values) {
  float most = values[0];
  for (int64_t i = 1; i < kNative; ++i) most = std::max(most, values[i]);
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
    for (; i + kNative <= dim; i += kNative) write(to + i, read(from + i));
    for (; i < dim; ++i) to[i] = load_one(from + i);
  }
}

// scores[g][t + j] = q[g] . tile[t + j], for G heads and N tokens.
template <int64_t G, int64_t N>
inline void score(float* scores, const float* q, const float* tile, int64_t pitch) {
  Values sums[G][N] = {};
  for (int64_t i = 0; i < pitch; i += kNative)
    for (int64_t j = 0; j < N; ++j) {
      const Values values = read(tile + j * pitch + i);
      for (int64_t g = 0; g < G; ++g) sums[g][j] += read(q + g * pitch + i) * values;
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
  for (; i + kWide * kNative <= pitch; i += kWide * kNative) {
    Values totals[G][kWide];
    for (int64_t g = 0; g < G; ++g)
      for (int64_t w = 0; w < kWide; ++w) totals[g][w] = read(sums + g * pitch + i + w * kNative);
    for (int64_t t = 0; t < tokens; ++t) {
      Values values[kWide];
      for (int64_t w = 0; w < kWide; ++w) values[w] = read(tile + t * pitch + i + w * kNative);
      for (int64_t g = 0; g < G; ++g)
        for (int64_t w = 0; w < kWide; ++w) totals[g][w] += values[w] * weights[g * kPiece + t];
    }
    for (int64_t g = 0; g < G; ++g)
      for (int64_t w = 0; w < kWide; ++w) write(sums + g * pitch + i + w * kNative, totals[g][w]);
  }
  for (; i < pitch; i += kNative)
    for (int64_t g = 0; g < G; ++g) {
      Values total = read(sums + g * pitch + i);
      for (int64_t t = 0; t < tokens; ++t) total += read(tile + t * pitch + i) * weights[g * kPiece + t];
      write(sums + g * pitch + i, total);
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
    const int64_t padded = whole<kNative>(tokens);
    std::fill(own + tokens, own + padded, -std::numeric_limits<float>::infinity());
    Values highest = read(own);
    for (int64_t t = kNative; t < padded; t += kNative) {
      const Values values = read(own + t);
      highest = values > highest ? values : highest;
    }
    most[g] = largest(highest);
    Values total = {};
    for (int64_t t = 0; t < padded; t += kNative) {
      Values weights = exp2(read(own + t) - most[g]);
      for (int64_t j = tokens - t; j < kNative; ++j) weights[j] = 0;  // padding, in the last vector
      write(own + t, weights);
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
        const float weight = exp2(all(own[group * pitch + g] - most))[0];
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
