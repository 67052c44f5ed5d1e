"""Draw samples of the rendered world on one page: `python -m tools.embedded_model.contact_sheet FILE.jpg`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fusion.data.samples import Sample, Splits
from fusion.embedded import world
from fusion.report.examples import contact_sheet


def _asked(scene: world.Scene, rng: np.random.Generator) -> list[Sample]:
    """Each frame with one of the scene's questions."""
    question = scene.questions[int(rng.integers(len(scene.questions)))]
    return [Sample((frame,), question.answer, question.text) for frame in scene.frames]


def _page(samples: Sequence[Sample]) -> Splits:
    return Splits("vqa", (), samples[:6], samples[6:9], samples[9:12], real=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.embedded_model.contact_sheet", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    stills = [sample for _ in range(24) for sample in _asked(world.still_scene(rng), rng)]
    clips = [sample for _ in range(3) for sample in _asked(world.clip_scene(rng), rng)]
    pages = {"pictures": _page(stills[:12]), "more pictures": _page(stills[12:]), "clips by frames": _page(clips)}
    try:
        contact_sheet(pages).save(arguments.file)
    except (OSError, ValueError) as error:
        parser.error(f"cannot write {arguments.file}: {error}")


if __name__ == "__main__":
    main()
