// out = base + scale * bt^T a for n layers in one pass: every weight is read and written once.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "vectors.h"

namespace atmm {
namespace {

// Rows, and registers per row, computed side by side: a value of A is read once for all rows, and the sums hide the
// latency of a multiply-add (docs/decisions/0092).
#if defined(__AVX512F__)
constexpr int64_t kRows = 4;
#else
constexpr int64_t kRows = 6;
#endif
constexpr int64_t kColumns = 2;
constexpr int64_t kPanel = kColumns * kWidth;
// Values of A that are read again for every block of rows, 128 KiB: they stay in the second-level cache.
constexpr int64_t kCached = 32 * 1024;
// Prefetch distance in elements of base: without prefetching, each block stalls on memory.
constexpr int64_t kAhead = 256;

// How many of `left` values one register holds.
inline int64_t in_register(int64_t left) { return std::clamp<int64_t>(left, 0, kWidth); }

template <typename T>
struct Matrices {  // n matrices with contiguous rows; strides in elements
  T* data;
  int64_t stride, row_stride;

  T* row(int64_t matrix, int64_t row) const { return data + matrix * stride + row * row_stride; }
};

// R rows of one layer, `count` of their columns. a: a panel of kPanel columns after the other, [rank, kPanel] each,
// zeros behind the last column. b: [rank, R], scale included. Behind the last column the next R rows are prefetched.
template <int64_t R, bool Streamed, typename T>
void merge_rows(T* out, int64_t out_stride, const T* base, int64_t base_stride, const float* a, const float* b,
                int64_t rank, int64_t count) {
  const auto panel = [&](auto whole, int64_t i) {
    const int64_t left = count - i;
    const T* const next = base + i + kAhead + (i + kAhead < count ? 0 : R * base_stride - count);
    Floats sums[R][kColumns];
    UNROLLED for (int64_t r = 0; r < R; ++r) UNROLLED for (int64_t c = 0; c < kColumns; ++c) {
      const T* from = base + r * base_stride + i + c * kWidth;
      __builtin_prefetch(next + r * base_stride + c * kWidth);
      sums[r][c] = whole ? load(from) : load(from, in_register(left - c * kWidth));
    }
    for (int64_t k = 0; k < rank; ++k) {
      Floats values[kColumns];
      UNROLLED for (int64_t c = 0; c < kColumns; ++c) values[c] = load(a + k * kPanel + c * kWidth);
      UNROLLED for (int64_t r = 0; r < R; ++r) {
        const float factor = b[k * R + r];
        UNROLLED for (int64_t c = 0; c < kColumns; ++c) sums[r][c] += values[c] * factor;
      }
    }
    UNROLLED for (int64_t r = 0; r < R; ++r) UNROLLED for (int64_t c = 0; c < kColumns; ++c) {
      T* to = out + r * out_stride + i + c * kWidth;
      if (!whole)
        store(to, sums[r][c], in_register(left - c * kWidth));
      else if (Streamed)
        stream(to, sums[r][c]);
      else
        store(to, sums[r][c]);
    }
    a += rank * kPanel;
  };
  int64_t i = 0;
  for (; i + kPanel <= count; i += kPanel) panel(std::true_type(), i);
  if (i < count) panel(std::false_type(), i);
}

template <typename T>
void merge(Matrices<T> out, Matrices<const T> base, Matrices<const T> a, Matrices<const T> bt, float scale, int64_t n,
           int64_t rank, int64_t d_out, int64_t d_in) {
  const auto whole_lines = [](int64_t elements) { return elements * sizeof(T) % 64 == 0; };
  const bool streamed =
      reinterpret_cast<uintptr_t>(out.data) % 64 == 0 && whole_lines(out.stride) && whole_lines(out.row_stride);
  const int64_t width = std::max<int64_t>(1, kCached / (kPanel * std::max<int64_t>(1, rank))) * kPanel;
  const std::unique_ptr<float[]> panels(new float[rank * std::min(width, (d_in + kPanel - 1) / kPanel * kPanel)]);
#pragma omp parallel
  {
    const std::unique_ptr<float[]> b(new float[kRows * rank]);
    for (int64_t layer = 0; layer < n; ++layer)
      for (int64_t left = 0; left < d_in; left += width) {
        const int64_t count = std::min(width, d_in - left);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < count; first += kPanel)
          for (int64_t k = 0; k < rank; ++k) {
            const T* from = a.row(layer, k) + left + first;
            float* to = panels.get() + first * rank + k * kPanel;
            for (int64_t i = 0; i < kPanel; ++i) to[i] = first + i < count ? load_one(from + i) : 0.0f;
          }
#pragma omp for schedule(static)
        for (int64_t first = 0; first < d_out; first += kRows) {
          const int64_t rows = std::min(kRows, d_out - first);
          const auto merge_block = [&](auto kernel, int64_t r, int64_t together) {
            for (int64_t k = 0; k < rank; ++k)
              for (int64_t j = 0; j < together; ++j)
                b[k * together + j] = scale * load_one(bt.row(layer, k) + first + r + j);
            kernel(out.row(layer, first + r) + left, out.row_stride, base.row(layer, first + r) + left, base.row_stride,
                   panels.get(), b.get(), rank, count);
          };
          int64_t r = 0;
          if (rows == kRows) {
            merge_block(streamed ? merge_rows<kRows, true, T> : merge_rows<kRows, false, T>, r, kRows);
            r = kRows;
          }
          for (; r + 2 <= rows; r += 2) merge_block(merge_rows<2, false, T>, r, 2);
          if (r < rows) merge_block(merge_rows<1, false, T>, r, 1);
        }
      }
    fence();
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
