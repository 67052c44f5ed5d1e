// The arguments of the grouped products, computed from the problems of a plan and the addresses of one layer's tensors.
// Plain C++, so that a test can compile it without CUDA.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define ATMM_HOST_DEVICE __host__ __device__
#else
#define ATMM_HOST_DEVICE
#endif

namespace atmm {

constexpr int64_t kItemBytes = 2;          // bfloat16 and float16
constexpr int64_t kArgumentBytes = 2 * 64; // per problem, of both products

// One lane at one site, in the order of `Problem` in plan.py. Rows of factors are not padded, because their sizes are
// multiples of 128 bits.
struct Problem {
  int64_t token, num_tokens;  // relative to the survey's start
  int64_t rank, d_out;
  int64_t a, bt;   // offsets of its rows from the start of the packed A, in elements
  int64_t column;  // first column in the group's outputs side by side
  int64_t hidden;  // offset of its hidden values [num_tokens, rank], in elements
};

// One layer's tensors: addresses, and row strides in elements. pool: the packed A, followed by the Bts. column: the
// column of the group's outputs at which y starts.
struct Layer {
  char *x, *pool, *hidden, *y;
  int64_t d_in, x_stride, y_stride, column;
};

// The arguments of one product for every problem: out [m, n] = left [m, k] * right, with row strides in elements.
struct Arguments {
  char **left, **right, **out;
  int64_t *left_stride, *right_stride, *out_stride;
  int32_t* sizes;  // [count, 3]: m, n, k
};

enum Product { kShrink = 0, kExpand = 1 };

// The location of a product's arguments in a buffer of count * kArgumentBytes.
ATMM_HOST_DEVICE inline Arguments arguments(char* buffer, int64_t count, Product product) {
  char* start = buffer + product * count * (kArgumentBytes / 2);
  char** addresses = reinterpret_cast<char**>(start);
  int64_t* strides = reinterpret_cast<int64_t*>(start) + 3 * count;
  return {addresses, addresses + count, addresses + 2 * count,
          strides, strides + count, strides + 2 * count,
          reinterpret_cast<int32_t*>(strides + 3 * count)};
}

ATMM_HOST_DEVICE inline void set(const Arguments& to, int64_t index, int64_t m, int64_t n, int64_t k, char* left,
                                 int64_t left_stride, char* right, int64_t right_stride, char* out,
                                 int64_t out_stride) {
  to.left[index] = left, to.right[index] = right, to.out[index] = out;
  to.left_stride[index] = left_stride, to.right_stride[index] = right_stride, to.out_stride[index] = out_stride;
  int32_t* sizes = to.sizes + 3 * index;
  sizes[0] = static_cast<int32_t>(m), sizes[1] = static_cast<int32_t>(n), sizes[2] = static_cast<int32_t>(k);
}

// Sets the arguments of both products of one problem. For sites outside of y the output address is invalid; no launch
// uses it.
ATMM_HOST_DEVICE inline void point(const Problem* problems, int64_t count, int64_t index, const Layer& layer,
                                   char* buffer) {
  const Problem& p = problems[index];
  char* hidden = layer.hidden + p.hidden * kItemBytes;
  char* x = layer.x + p.token * layer.x_stride * kItemBytes;
  char* y = layer.y + (p.token * layer.y_stride + p.column - layer.column) * kItemBytes;
  set(arguments(buffer, count, kShrink), index, p.num_tokens, p.rank, layer.d_in, x, layer.x_stride,
      layer.pool + p.a * kItemBytes, layer.d_in, hidden, p.rank);
  set(arguments(buffer, count, kExpand), index, p.num_tokens, p.d_out, p.rank, hidden, p.rank,
      layer.pool + p.bt * kItemBytes, p.d_out, y, layer.y_stride);
}

}  // namespace atmm
