"""`vlora bench paper`: the figures of V-LoRA, S-LoRA, Punica, BD-LoRA and Symbiosis, each drawn beside the paper's
numbers.

Reading order: `figure.py` (what a figure is), `measuring.py` (the setting, and stored measurements), `measured`
(measurements that figures share), `figures` (the figures by paper and subject), `runner.py`.
"""

from vlora.bench.paper.runner import measurements_folder, run

__all__ = ["measurements_folder", "run"]
