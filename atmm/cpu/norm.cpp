// Root-mean-square normalization of rows: y = weight * round(x / sqrt(mean(x^2) + epsilon)), where `added` was first
// added to x in place, if it is given. And gates, silu(gate) * up.
//
// Sums are in float. A normalized row is rounded to its type before the weight is applied, and silu before its product,
// as the models' published code does.
#include <cmath>

#include "vectors.h"

namespace atmm {
namespace {

constexpr int64_t kSums = 4;  // registers of partial sums

inline float sum(Floats values) {
  float total = 0;
  for (int64_t i = 0; i < kWidth; ++i) total += values[i];
  return total;
}

template <typename T>
void normalize_row(T* out, const T* x, const T* weight, int64_t width, float epsilon) {
  Floats sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= width; i += kSums * kWidth)
    for (int64_t s = 0; s < kSums; ++s) {
      const Floats values = load(x + i + s * kWidth);
      sums[s] += values * values;
    }
  for (; i < width; i += kWidth) {
    const Floats values = width - i < kWidth ? load(x + i, width - i) : load(x + i);
    sums[0] += values * values;
  }
  const float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const Floats factor = splat(1.0f / std::sqrt(total / float(width) + epsilon));
  for (i = 0; i + kWidth <= width; i += kWidth) store(out + i, rounded(load(x + i) * factor, x) * load(weight + i));
  if (i < width) {
    const int64_t left = width - i;
    store(out + i, rounded(load(x + i, left) * factor, x) * load(weight + i, left), left);
  }
}

// Calls body(i, count) for the registers of a row. The count of whole ones is a constant.
template <typename Body>
inline void registers(int64_t width, const Body& body) {
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) body(i, std::integral_constant<int64_t, kWidth>());
  if (i < width) body(i, width - i);
}

// out: [rows, width], contiguous; x, added: row strides in elements.
template <typename T>
void normalize(T* out, T* x, int64_t stride, const T* added, int64_t added_stride, const T* weight, int64_t rows,
               int64_t width, float epsilon) {
#pragma omp parallel for schedule(static) if (rows * width > kSerial)
  for (int64_t row = 0; row < rows; ++row) {
    T* own = x + row * stride;
    const T* more = added + row * added_stride;
    if (added)
      registers(width, [&](int64_t i, auto count) {
        store(own + i, load(own + i, count) + load(more + i, count), count);
      });
    normalize_row(out + row * width, own, weight, width, epsilon);
  }
}

template <typename T>
inline Floats gated(Floats gate, Floats up, const T* type) {
  const Floats below = exp2((gate < 0 ? gate : -gate) * kLog2E);  // e^-|gate|
  const Floats part = gate < 0 ? gate * below : gate;
  return rounded(part / (below + 1.0f), type) * up;
}

// out: [rows, width], contiguous; gate, up: row strides in elements.
template <typename T>
void gate_product(T* out, const T* gate, int64_t gate_stride, const T* up, int64_t up_stride, int64_t rows,
                  int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > kSerial)
  for (int64_t row = 0; row < rows; ++row) {
    const T *gates = gate + row * gate_stride, *ups = up + row * up_stride;
    T* to = out + row * width;
    registers(width, [&](int64_t i, auto count) {
      store(to + i, gated(load(gates + i, count), load(ups + i, count), to), count);
    });
  }
}

inline Floats sigmoid(Floats x) {
  const Floats below = exp2((x < 0 ? x : -x) * kLog2E);  // e^-|x|
  return (x < 0 ? below : splat(1.0f)) / (below + 1.0f);
}

// quick: x sigmoid(1.702 x), each operation rounded to T as the eager ones are. Otherwise x (1 + tanh(u)) / 2 with
// u = sqrt(2 / pi) (x + 0.044715 x^3), which is x sigmoid(2 u), rounded once.
template <typename T>
void gelu(T* out, const T* x, int64_t count, bool quick) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for schedule(static) if (count > kSerial)
  for (int64_t first = 0; first < count; first += kBlock)
    registers(std::min(kBlock, count - first), [&](int64_t i, auto size) {
      const Floats values = load(x + first + i, size);
      const Floats weight = quick ? rounded(sigmoid(rounded(values * 1.702f, x)), x)
                                  : sigmoid(1.59576912f * values * (1.0f + 0.044715f * values * values));
      store(out + first + i, values * weight, size);
    });
}

}  // namespace
}  // namespace atmm

#define ATMM_NORM(TYPE, T)                                                                                       \
  extern "C" void atmm_normalize_##TYPE(T* out, T* x, int64_t stride, const T* added, int64_t added_stride,      \
                                        const T* weight, int64_t rows, int64_t width, float epsilon) {           \
    atmm::normalize(out, x, stride, added, added_stride, weight, rows, width, epsilon);                          \
  }                                                                                                              \
  extern "C" void atmm_gate_product_##TYPE(T* out, const T* gate, int64_t gate_stride, const T* up,              \
                                           int64_t up_stride, int64_t rows, int64_t width) {                     \
    atmm::gate_product(out, gate, gate_stride, up, up_stride, rows, width);                                      \
  }                                                                                                              \
  extern "C" void atmm_gelu_##TYPE(T* out, const T* x, int64_t count, int64_t quick) {                           \
    atmm::gelu(out, x, count, quick);                                                                            \
  }

ATMM_NORM(bfloat16, atmm::BFloat16)
ATMM_NORM(float32, float)
