// out = base + scale * bt^T a for n layers in one pass: every weight is read and written once.
#include <memory>
#include <type_traits>

#include "vectors.h"

namespace atmm {
namespace {

// Rows, and vectors per row, computed side by side: a value of A is read once for all rows, and eight sums hide the
// latency of a multiply-add.
constexpr int64_t kRows = 4;
constexpr int64_t kColumns = 2;
// Prefetch distance in elements of base: without prefetching, each block stalls on memory.
constexpr int64_t kAhead = 256;

template <typename T>
struct Matrices {  // n matrices with contiguous rows; strides in elements
  T* data;
  int64_t stride, row_stride;

  T* row(int64_t matrix, int64_t row) const { return data + matrix * stride + row * row_stride; }
};

// R rows of one layer. a: [rank, d_in], b: [R, rank], scale included.
template <int64_t R, bool Streamed, typename T>
void merge_rows(T* out, int64_t out_stride, const T* base, int64_t base_stride, const float* a, const float* b,
                int64_t rank, int64_t d_in) {
  int64_t i = 0;
  const auto block = [&](auto columns) {
    constexpr int64_t C = decltype(columns)::value;
    Floats sums[R][C];
    for (int64_t r = 0; r < R; ++r)
      for (int64_t c = 0; c < C; ++c) {
        const T* from = base + r * base_stride + i + c * kWidth;
        __builtin_prefetch(from + kAhead);
        sums[r][c] = load(from);
      }
    for (int64_t k = 0; k < rank; ++k)
      for (int64_t c = 0; c < C; ++c) {
        const Floats values = load(a + k * d_in + i + c * kWidth);
        for (int64_t r = 0; r < R; ++r) sums[r][c] += values * b[r * rank + k];
      }
    for (int64_t r = 0; r < R; ++r)
      for (int64_t c = 0; c < C; ++c) {
        T* to = out + r * out_stride + i + c * kWidth;
        Streamed ? stream(to, sums[r][c]) : store(to, sums[r][c]);
      }
    i += C * kWidth;
  };
  while (i + kColumns * kWidth <= d_in) block(std::integral_constant<int64_t, kColumns>());
  while (i + kWidth <= d_in) block(std::integral_constant<int64_t, 1>());
  for (; i < d_in; ++i)
    for (int64_t r = 0; r < R; ++r) {
      float sum = load_one(base + r * base_stride + i);
      for (int64_t k = 0; k < rank; ++k) sum += b[r * rank + k] * a[k * d_in + i];
      store_one(out + r * out_stride + i, sum);
    }
}

template <typename T>
void merge(Matrices<T> out, Matrices<const T> base, Matrices<const T> a, Matrices<const T> bt, float scale, int64_t n,
           int64_t rank, int64_t d_out, int64_t d_in) {
  const auto whole_lines = [](int64_t elements) { return elements * sizeof(T) % 64 == 0; };
  const bool streamed =
      reinterpret_cast<uintptr_t>(out.data) % 64 == 0 && whole_lines(out.stride) && whole_lines(out.row_stride);
  const std::unique_ptr<float[]> a_floats(new float[rank * d_in]);
  for (int64_t layer = 0; layer < n; ++layer) {
    for (int64_t k = 0; k < rank; ++k)
      for (int64_t i = 0; i < d_in; ++i) a_floats[k * d_in + i] = load_one(a.row(layer, k) + i);
#pragma omp parallel
    {
      const std::unique_ptr<float[]> b(new float[kRows * rank]);
#pragma omp for schedule(static)
      for (int64_t first = 0; first < d_out; first += kRows) {
        const int64_t rows = d_out - first < kRows ? d_out - first : kRows;
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t k = 0; k < rank; ++k) b[r * rank + k] = scale * load_one(bt.row(layer, k) + first + r);
        const auto merge_block = [&](auto kernel, int64_t r) {
          kernel(out.row(layer, first + r), out.row_stride, base.row(layer, first + r), base.row_stride, a_floats.get(),
                 b.get() + r * rank, rank, d_in);
        };
        if (rows == kRows)
          merge_block(streamed ? merge_rows<kRows, true, T> : merge_rows<kRows, false, T>, 0);
        else
          for (int64_t r = 0; r < rows; ++r) merge_block(merge_rows<1, false, T>, r);
      }
      fence();
    }
  }
}

}  // namespace
}  // namespace atmm

#define ATMM_MERGE(NAME, T)                                                                                            \
  extern "C" void NAME(T* out, int64_t out_stride, int64_t out_row, const T* base, int64_t base_stride,                \
                       int64_t base_row, const T* a, int64_t a_stride, int64_t a_row, const T* bt, int64_t bt_stride,  \
                       int64_t bt_row, float scale, int64_t n, int64_t rank, int64_t d_out, int64_t d_in) {            \
    atmm::merge<T>({out, out_stride, out_row}, {base, base_stride, base_row}, {a, a_stride, a_row},                    \
                   {bt, bt_stride, bt_row}, scale, n, rank, d_out, d_in);                                              \
  }

ATMM_MERGE(atmm_merge_bfloat16, atmm::BFloat16)
ATMM_MERGE(atmm_merge_float32, float)
