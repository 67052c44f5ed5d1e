"""The GPU kernels in Triton: tiles of tokens against each adapter's own rows, nothing padded to a common rank.

`kernels` holds the device code, `plan` cuts lanes into tiles once per step, `lanes` is the strategy, `lint` compiles
for GPUs that need not be there. Nothing here is imported before a CUDA tensor (or Triton's interpreter) asks for it.
"""
