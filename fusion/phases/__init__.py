"""The phases of `vlora fuse`, one module each: every phase takes the frozen results of earlier ones, returns its own.

PlanChecked -> DataReady -> BaseScored -> Thresholds -> Packing -> FusionReport. `fusion.commands.fuse` composes them.
"""
