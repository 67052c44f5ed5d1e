// Rotary position embedding of rows, in place: x * cos + rotate_half(x) * sin, where rotate_half gives (-second half,
// first half). Rotated keys and their values may be written to a cache at once.
//
// Compiled without fused multiply-add: products and sums are rounded as the eager operations round them, so results are
// equal bit for bit.
#include "vectors.h"

namespace atmm {
namespace {

// Queries or keys: row (head, token) starts at data + head * by_head + token * by_token.
template <typename T>
struct Rows {
  T* data;
  int64_t by_head, by_token, heads;
};

// A: the type of the arithmetic, in which cosines and sines are.
template <typename T, typename A>
void rotate_part(T* x, const A* cos, const A* sin, int64_t half, int64_t i, int64_t count) {
  const Floats first = load(x + i, count), second = load(x + half + i, count);
  const Floats turned_first = rounded(first * load(cos + i, count), cos) - rounded(second * load(sin + i, count), cos);
  const Floats turned_second =
      rounded(second * load(cos + half + i, count), cos) + rounded(first * load(sin + half + i, count), cos);
  store(x + i, turned_first, count);
  store(x + half + i, turned_second, count);
}

template <typename T, typename A>
void rotate(const Rows<T>& rows, const A* cos, const A* sin, int64_t token, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t head = 0; head < rows.heads; ++head) {
    T* x = rows.data + head * rows.by_head + token * rows.by_token;
    for (int64_t i = 0; i < half; i += kWidth)
      rotate_part(x, cos + token * width, sin + token * width, half, i, half - i < kWidth ? half - i : kWidth);
  }
}

// The cache of keys and values: token t's are in row rows[t] of both, head by head. v: [tokens, heads * width].
template <typename T>
struct Cache {
  T *k, *v;
  int64_t stride;
  const int64_t* rows;  // null: none is written
  const T* values;
  int64_t by_token;

  void write(const Rows<T>& keys, int64_t token, int64_t width) const {
    const int64_t row = rows[token] * stride;
    for (int64_t head = 0; head < keys.heads; ++head)
      std::memcpy(k + row + head * width, keys.data + head * keys.by_head + token * keys.by_token, width * sizeof(T));
    std::memcpy(v + row, values + token * by_token, keys.heads * width * sizeof(T));
  }
};

// cos, sin: [tokens, width], contiguous.
template <typename T, typename A>
void rotate_all(const Rows<T>& q, const Rows<T>& k, const A* cos, const A* sin, int64_t tokens, int64_t width,
                const Cache<T>& cache) {
#pragma omp parallel for schedule(static) if (tokens * (q.heads + k.heads) * width > kSerial)
  for (int64_t token = 0; token < tokens; ++token) {
    rotate(q, cos, sin, token, width);
    rotate(k, cos, sin, token, width);
    if (cache.rows) cache.write(k, token, width);
  }
}

}  // namespace
}  // namespace atmm

// wide: cos and sin are float, and so is the arithmetic; otherwise they are T.
#define ATMM_ROTATE(TYPE, T)                                                                                          \
  extern "C" void atmm_rotate_##TYPE(T* q, int64_t q_head, int64_t q_token, int64_t q_heads, T* k, int64_t k_head,    \
                                     int64_t k_token, int64_t k_heads, const void* cos, const void* sin, int64_t wide, \
                                     int64_t tokens, int64_t width, T* k_cache, T* v_cache, int64_t stride,           \
                                     const int64_t* rows, const T* v, int64_t v_token) {                              \
    const atmm::Rows<T> queries{q, q_head, q_token, q_heads}, keys{k, k_head, k_token, k_heads};                      \
    const atmm::Cache<T> cache{k_cache, v_cache, stride, rows, v, v_token};                                           \
    if (wide)                                                                                                         \
      atmm::rotate_all(queries, keys, static_cast<const float*>(cos), static_cast<const float*>(sin), tokens, width,  \
                       cache);                                                                                        \
    else                                                                                                              \
      atmm::rotate_all(queries, keys, static_cast<const T*>(cos), static_cast<const T*>(sin), tokens, width, cache);  \
  }

ATMM_ROTATE(bfloat16, atmm::BFloat16)
ATMM_ROTATE(float32, float)
