// Root-mean-square normalization of rows, in one pass over each: y = weight * round(x / sqrt(mean(x^2) + epsilon)).
//
// Sums are in float. The normalized row is rounded to its type before the weight is applied, and again after, as the
// models' published code does.
#include <cmath>

#include "vectors.h"

namespace atmm {
namespace {

constexpr int64_t kSums = 4;            // registers of partial sums
constexpr int64_t kSerial = 32 * 1024;  // values; smaller inputs are faster on one thread than waking threads

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

// out: [rows, width], contiguous; x: row stride `stride` in elements.
template <typename T>
void normalize(T* out, const T* x, int64_t stride, const T* weight, int64_t rows, int64_t width, float epsilon) {
#pragma omp parallel for schedule(static) if (rows * width > kSerial)
  for (int64_t row = 0; row < rows; ++row)
    normalize_row(out + row * width, x + row * stride, weight, width, epsilon);
}

}  // namespace
}  // namespace atmm

#define ATMM_NORMALIZE(TYPE, T)                                                                              \
  extern "C" void atmm_normalize_##TYPE(T* out, const T* x, int64_t stride, const T* weight, int64_t rows,   \
                                        int64_t width, float epsilon) {                                      \
    atmm::normalize(out, x, stride, weight, rows, width, epsilon);                                           \
  }

ATMM_NORMALIZE(bfloat16, atmm::BFloat16)
ATMM_NORMALIZE(float32, float)
