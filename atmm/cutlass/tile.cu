// The two grouped products of one tile, in bfloat16 and float16, for compute capability 8.0 and later.
//
// -DTILE: its name. -DTM, -DTN, -DTK: block sizes. -DWM, -DWN: warp sizes. -DSTAGES: pipeline stages.
#include <algorithm>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/device/gemm_grouped.h"
#include "cutlass/gemm/kernel/default_gemm_grouped.h"

#include "problems.h"

namespace {

using Rows = cutlass::layout::RowMajor;
using Columns = cutlass::layout::ColumnMajor;
constexpr int kWide = 8;  // elements of a 128-bit access

// Right: the layout of the right operand. The device schedules the problems, so the host does not need their sizes.
template <typename Element, typename Right>
using Gemm = cutlass::gemm::device::GemmGrouped<typename cutlass::gemm::kernel::DefaultGemmGrouped<
    Element, Rows, cutlass::ComplexTransform::kNone, kWide, Element, Right, cutlass::ComplexTransform::kNone, kWide,
    Element, Rows, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, cutlass::gemm::GemmShape<TM, TN, TK>,
    cutlass::gemm::GemmShape<WM, WN, TK>, cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<Element, kWide, float, float>,
    cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, STAGES,
    cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly>::GemmKernel>;

template <typename Element>
using Shrink = Gemm<Element, Columns>;  // A is stored [rank, d_in]
template <typename Element>
using Expand = Gemm<Element, Rows>;  // Bt is stored [rank, d_out]

// Number of resident blocks of the GPU; 0 if it cannot run the kernel.
template <typename Gemm>
int resident_blocks() {
  static const int blocks = Gemm::sufficient();
  return blocks;
}

// out = alpha * left * right + beta * out for problems [first, first + num). tiles: number of blocks of their outputs.
template <typename Gemm>
int run(const atmm::Arguments& given, int64_t first, int64_t num, int64_t tiles, float alpha, float beta,
        cudaStream_t stream) {
  using Element = typename Gemm::ElementA;
  const auto matrices = [first](char** addresses) { return reinterpret_cast<Element**>(addresses + first); };
  const int64_t blocks = std::min<int64_t>(tiles, resident_blocks<Gemm>());
  if (blocks <= 0) return 1;
  const typename Gemm::Arguments arguments(
      reinterpret_cast<cutlass::gemm::GemmCoord*>(given.sizes + 3 * first), static_cast<int>(num),
      static_cast<int>(blocks), {alpha, beta}, matrices(given.left), matrices(given.right), matrices(given.out),
      matrices(given.out), given.left_stride + first, given.right_stride + first, given.out_stride + first,
      given.out_stride + first);
  Gemm gemm;
  return gemm(arguments, nullptr, stream) == cutlass::Status::kSuccess ? 0 : 1;
}

template <typename Gemm>
constexpr int kSharedBytes = static_cast<int>(sizeof(typename Gemm::GemmKernel::SharedStorage));

}  // namespace

#define JOINED(product, type, tile) atmm_grouped_##product##_##type##_##tile
#define NAMED(product, type, tile) JOINED(product, type, tile)

// Both return 0, or 1 if the launch failed.
#define DEFINE(type, Element)                                                                                         \
  extern "C" int NAMED(shrink, type, TILE)(char* buffer, int64_t count, int64_t tiles, cudaStream_t stream) {         \
    return run<Shrink<Element>>(atmm::arguments(buffer, count, atmm::kShrink), 0, count, tiles, 1.0f, 0.0f, stream);  \
  }                                                                                                                   \
  extern "C" int NAMED(expand, type, TILE)(char* buffer, int64_t count, int64_t first, int64_t num, int64_t tiles,    \
                                           float sign, cudaStream_t stream) {                                         \
    return run<Expand<Element>>(atmm::arguments(buffer, count, atmm::kExpand), first, num, tiles, sign, 1.0f,         \
                                stream);                                                                              \
  }                                                                                                                   \
  extern "C" int NAMED(blocks, type, TILE)() {                                                                        \
    return std::min(resident_blocks<Shrink<Element>>(), resident_blocks<Expand<Element>>());                          \
  }                                                                                                                   \
  extern "C" int NAMED(shared, type, TILE)() {                                                                        \
    return std::max(kSharedBytes<Shrink<Element>>, kSharedBytes<Expand<Element>>);                                    \
  }

DEFINE(bfloat16, cutlass::bfloat16_t)
DEFINE(float16, cutlass::half_t)
