// Fills in the addresses of one layer's tensors in a plan's problems, on the device: a launch costs less than a copy,
// and a captured graph replays it.
#include <cuda_runtime.h>

#include "problems.h"

namespace {

constexpr int kThreads = 128;

__global__ void point_all(const atmm::Problem* problems, int64_t count, atmm::Layer layer, char* buffer) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index < count) atmm::point(problems, count, index, layer, buffer);
}

}  // namespace

// Returns 0, or the CUDA error code.
extern "C" int atmm_grouped_point(const atmm::Problem* problems, int64_t count, char* buffer, char* x, int64_t x_stride,
                                  int64_t d_in, char* pool, char* hidden, char* y, int64_t y_stride, int64_t column,
                                  cudaStream_t stream) {
  const atmm::Layer layer{x, pool, hidden, y, d_in, x_stride, y_stride, column};
  point_all<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(problems, count, layer,
                                                                                               buffer);
  return cudaGetLastError();
}
