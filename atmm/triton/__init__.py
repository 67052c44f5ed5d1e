"""The GPU kernels in Triton: tiles of tokens against each adapter's own rows, without padding to a common rank.

`kernels` is the device code, `plan` splits lanes into tiles once per step, `lanes` is the strategy, `lint` compiles
without a GPU. The package is only imported when a CUDA tensor (or Triton's interpreter) needs it.
"""
