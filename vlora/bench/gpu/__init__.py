"""`vlora gpu-check`: the checks and measurements of a GPU, in stages that each run in a process of their own.

`runner` orders the stages, limits their time and runs them, and `stages` has a module for each. The package itself and
`runner` import torch in the process of a stage only, so that a broken installation is a result and not an error.
"""
