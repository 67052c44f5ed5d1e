"""Train the embedded model from scratch: `python -m tools.embedded_model.train --out DIR --minutes N`.

A run has three stages:

1. Only the vision tower trains. A linear probe on every image token predicts kind, colour and centre of the object
   there.
2. The whole model learns to answer questions, with the probes as auxiliary losses. More probes predict each image
   token's row and column from the input of the language model, and an object's direction of motion from its states. If
   a question names an object, a probe on the state of the name predicts whether the object exists, its place, kind and
   colour; answers alone teach the model to find objects very late.
3. The vision tower is frozen, since it is trained by then, and the language model continues with cheaper steps.

Probes are used in training only and are not saved. A scene's questions share its image but do not attend to each other,
so each is learned as it will be asked: alone.

A run that is started again with the same arguments resumes. Random draws depend on the seed and the step number alone.
With `--steps` the whole schedule does so as well; `--minutes` adapts it to the speed of the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional
from transformers import LlavaForConditionalGeneration

from fusion.embedded import world
from fusion.embedded.exam import accuracy_by_skill
from fusion.training.steps import mixed_precision
from tools.embedded_model.conversations import IGNORED, Conversations, TokenRows
from tools.embedded_model.model import IMAGE_TOKENS, build_model
from tools.embedded_model.probes import Probes, as_pixels, gist, normed, patch_spectra
from tools.embedded_model.processor import build_processor
from tools.embedded_model.unlearned_words import learned_tokens, separate_unlearned

VISION_SHARE = 0.15
"""Share of the run in which only the vision tower trains."""
FIXED_AFTER = 0.6
"""Share of the run after which the vision tower is frozen."""
STILL_LENGTH, CLIP_LENGTH = 160, 208
"""Tokens per row: a picture or a clip and as many of its questions as fit. Fixed, so that compiled code is reused."""
STILLS, CLIPS = 24, 3
"""Pictures and clips per step of the second stage; the first stage takes 64 pictures."""
VISION_BATCH = 64
LEARNING_RATE = 1e-3
MUON_RATE = 5e-3
PROBE_WEIGHT = 0.4
SAVE_EVERY_S = 60.0
_STATE = "training.pt"
# The vision tower and its probes: they train from the first step until the tower is frozen.
_VISION_PART = ("model.vision_tower.", "kind.", "color.", "center.", "texture.")


@dataclasses.dataclass(frozen=True)
class Budget:
    """Length of training: a number of steps, or minutes (processor time on the CPU, wall time on a GPU)."""

    steps: int | None
    minutes: float | None

    def done(self, step: int, seconds: float) -> float:
        """Finished share of the run, 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.minutes is not None
        return min(1.0, seconds / (60 * self.minutes))


class Trainer:
    """Model, probes, optimisers and the number of the next step."""

    def __init__(self, out: Path, budget: Budget, device: torch.device, seed: int, compiled: bool = False) -> None:
        self.out, self.budget, self.device, self.seed = out, budget, device, seed
        self.processor = build_processor()
        self.conversations = Conversations(self.processor.tokenizer)
        self.model: LlavaForConditionalGeneration = build_model(seed)
        self.model.to(device)  # type: ignore[arg-type]  # mypy misreads the wrapper in transformers
        # On the CPU the backward pass of the fused attention is slower than plain matrix products in bfloat16.
        self.model.set_attn_implementation("eager")
        inner = self.model.model
        self.vision, self.language = inner.vision_tower, inner.language_model
        if compiled:
            self.vision, self.language = (torch.compile(part, dynamic=False) for part in (self.vision, self.language))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config: Any = self.model.config
            self.probes = Probes(config.vision_config.hidden_size, config.text_config.hidden_size).to(device)
        self.optimizers = _optimizers(self.model, self.probes)
        self.step, self.seconds = 0, 0.0
        # Processor time excludes other programs on a busy machine.
        self._clock = time.process_time if device.type == "cpu" else time.monotonic

    @property
    def done(self) -> float:
        return self.budget.done(self.step, self.seconds)

    def resume(self) -> bool:
        """Resume a stopped run; returns False if there is none in `out`."""
        file = self.out / _STATE
        if not file.exists():
            return False
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.probes.load_state_dict(state["probes"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.seconds = state["step"], state["seconds"]
        return True

    def save(self) -> None:
        """Save the run's state atomically; a kill while writing keeps the previous one."""
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "probes": self.probes.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, self.out / f"{_STATE}.new")
        os.replace(self.out / f"{_STATE}.new", self.out / _STATE)

    def export(self) -> None:
        """Write the checkpoint for users: configuration, tokenizer, image processor and float16 weights."""
        self.processor.save_pretrained(self.out)
        half = build_model(self.seed).half()
        half.load_state_dict(self.model.state_dict())
        separate_unlearned(half.get_input_embeddings().weight, learned_tokens(self.processor.tokenizer))
        half.save_pretrained(self.out)
        # Stored as float16, but `dtype="auto"` then means float32, for computing on a CPU.
        half.config.dtype = torch.float32
        half.config.save_pretrained(self.out)

    def advance(self) -> dict[str, float]:
        """One optimiser step; returns the losses."""
        started = self._clock()
        rng = np.random.default_rng((self.seed, self.step, 0))
        self.set_rates()
        vision_only = self.done < VISION_SHARE
        with mixed_precision(self.device):
            losses = self._vision_losses(rng) if vision_only else self._joint_losses(rng)
            total = torch.stack(
                [loss * (1.0 if name == "answer" else PROBE_WEIGHT) for name, loss in losses.items()]
            ).sum()
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seconds += self._clock() - started
        return {name: loss.item() for name, loss in losses.items()}

    def set_rates(self) -> None:
        """Set the rate of each part: a short warm-up, then half a cosine to zero at the end of its own training."""
        rates = {
            "vision": min(1.0, (self.step + 1) / 50) * _falling(self.done / FIXED_AFTER),
            "rest": min(1.0, max(0.0, self.done - VISION_SHARE) / 0.02)
            * _falling((self.done - VISION_SHARE) / (1 - VISION_SHARE)),
        }
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * rates[group["part"]]

    def _vision_losses(self, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        scenes = [world.still_scene(rng) for _ in range(VISION_BATCH)]
        pixels, cells = self._tensors(scenes)
        states = self.vision(pixels).last_hidden_state[:, 1:]
        return self._sight_losses(states, cells.flatten(0, 1), patch_spectra(pixels))

    def _sight_losses(
        self, states: torch.Tensor, cells: torch.Tensor, spectra: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"cells": self.probes.cell_loss(states, cells), "texture": self.probes.texture_loss(states, spectra)}

    def _joint_losses(self, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        stills = [world.still_scene(rng) for _ in range(STILLS)]
        clips = [world.clip_scene(rng) for _ in range(CLIPS)]
        pixels, still_cells = self._tensors(stills)
        clip_pixels, clip_cells = self._tensors(clips)
        fixed = self.done >= FIXED_AFTER
        every = torch.cat([pixels, clip_pixels])
        with torch.set_grad_enabled(not fixed):
            states = self.vision(every).last_hidden_state[:, 1:]
        spectra = patch_spectra(every)
        cells = torch.cat([still_cells.flatten(0, 1), clip_cells.flatten(0, 1)])
        features = self.model.model.multi_modal_projector(states)
        still_rows = self.conversations.batch(rng, stills, STILL_LENGTH).to(self.device)
        clip_rows = self.conversations.batch(rng, clips, CLIP_LENGTH).to(self.device)
        still_answer, stills_named, stills_read = self._answer_loss(still_rows, features[:STILLS])
        clip_answer, clips_named, clips_read = self._answer_loss(clip_rows, features[STILLS:])
        rows, _ = ends = (still_rows.ids == self.conversations.assistant).nonzero(as_tuple=True)
        images = clips_read[:, 2 : 2 + world.CLIP_FRAMES * IMAGE_TOKENS]
        return {
            "answer": 0.65 * still_answer + 0.35 * clip_answer,
            **({} if fixed else self._sight_losses(states, cells, spectra)),
            "gist": self.probes.gist_loss(stills_read[ends], gist(spectra[:STILLS])[rows]),
            "places": self.probes.place_loss(features),
            "kept": self.probes.kept_loss(features, states),
            "present": 0.65 * self.probes.presence_loss(stills_named, still_rows.present)
            + 0.35 * self.probes.presence_loss(clips_named, clip_rows.present),
            "meant": self.probes.meaning_loss(stills_named, still_rows.meant),
            "moves": self.probes.move_loss(images, clip_cells),
        }

    def _answer_loss(self, rows: TokenRows, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss, and states [n, length, text] before and after the last layer. The last layer can still pass
        information from a name to the answer, so name probes read the states before it."""
        embedded = self.model.get_input_embeddings()(rows.ids).to(features.dtype)
        embedded = embedded.masked_scatter((rows.ids == self.conversations.image)[..., None], features)
        outputs = self.language(
            inputs_embeds=embedded,
            attention_mask=rows.mask(embedded.dtype),
            position_ids=rows.positions,
            use_cache=False,
            output_hidden_states=True,
        )
        hidden = outputs.last_hidden_state
        answered = rows.labels[:, 1:] != IGNORED
        logits = self.model.lm_head(hidden[:, :-1][answered])
        return (
            functional.cross_entropy(logits.float(), rows.labels[:, 1:][answered]),
            normed(outputs.hidden_states[-2]),
            hidden,
        )

    def _tensors(self, scenes: Sequence[world.Scene]) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = as_pixels(np.concatenate([scene.frames for scene in scenes])).to(self.device)
        return pixels, torch.from_numpy(np.stack([scene.cells for scene in scenes])).to(self.device)


def _falling(share: float) -> float:
    """Half a cosine from 1 at share 0 to 0 at share 1."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, share))))


def _optimizers(model: nn.Module, probes: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices inside the layers, AdamW for everything else."""
    groups: dict[tuple[str, str], list[nn.Parameter]] = {}
    for name, parameter in [*model.named_parameters(), *probes.named_parameters()]:
        part = "vision" if name.startswith(_VISION_PART) else "rest"
        inner = parameter.ndim == 2 and ".layers." in name
        groups.setdefault(("muon" if inner else "adam", part), []).append(parameter)

    def of(kind: str, rate: float) -> list[dict[str, object]]:
        return [
            {"params": parameters, "part": part, "base": rate, "lr": rate}
            for (which, part), parameters in groups.items()
            if which == kind
        ]

    return (
        torch.optim.AdamW(of("adam", LEARNING_RATE), betas=(0.9, 0.98), weight_decay=0.01),
        torch.optim.Muon(of("muon", MUON_RATE), weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    )


def train(out: Path, budget: Budget, *, device: str = "cpu", seed: int = 0, compiled: bool = False) -> None:
    """Train or resume training, and write a loadable checkpoint to `out`."""
    trainer = Trainer(out, budget, torch.device(device), seed, compiled)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>5.1f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("starting", total=1.0)
        if trainer.resume():
            progress.console.print(f"resuming at step {trainer.step}, after {trainer.seconds / 60:.1f} minutes")
        saved = time.monotonic()
        means: dict[str, float] = {}
        while trainer.done < 1:
            for name, value in trainer.advance().items():
                means[name] = 0.98 * means.get(name, value) + 0.02 * value
            losses = " ".join(f"{name} {value:.3f}" for name, value in means.items())
            progress.update(task, completed=trainer.done, description=f"step {trainer.step} {losses}")
            if trainer.step % 200 == 0:
                progress.console.print(f"step {trainer.step} after {trainer.seconds:.0f} s: {losses}")
            if time.monotonic() - saved > SAVE_EVERY_S:
                trainer.save()
                saved = time.monotonic()
    trainer.save()
    trainer.export()


def _positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """An argparse type for numbers above 0."""

    def parse(text: str) -> int | float:
        number = kind(text)
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"{text} was given; it must be finite and above 0")
        return number

    parse.__name__ = kind.__name__  # argparse uses it in errors for text that is not a number
    return parse


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.embedded_model.train", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and the run's state")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes",
        type=_positive(float),
        default=20.0,
        help="training time in minutes; processor time on the CPU (default 20)",
    )
    length.add_argument("--steps", type=_positive(int), help="number of steps; gives the same result on every run")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile", action="store_true", help="compile the model first; 1.4 times as fast on a CPU; needs g++"
    )
    parser.add_argument("--threads", type=_positive(int), default=1, help="torch threads on the CPU")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"argument --device: {arguments.device!r} was requested, but torch finds no such CUDA device")
    budget = Budget(arguments.steps, None if arguments.steps is not None else arguments.minutes)
    torch.set_num_threads(arguments.threads)
    train(arguments.out, budget, device=arguments.device, seed=arguments.seed, compiled=arguments.compile)
    for skill, value in accuracy_by_skill(arguments.out, num_scenes=500, seed=1_000_001).items():
        print(f"{skill:<18} {100 * value.share:5.1f} %  of {value.num_questions}")


if __name__ == "__main__":
    main()
