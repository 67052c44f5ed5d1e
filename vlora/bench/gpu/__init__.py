"""`vlora gpu-check`: the checks and measurements of a GPU, in stages that each run in a process of their own.

`runner` orders the stages and limits their time, `process` runs one of them, and `stages` has a module for each. The
package itself and `runner` import no torch, so that a broken installation is a result and not an error.
"""
