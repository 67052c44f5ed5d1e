"""Train the small model from nothing: first the vision tower on cell labels, then everything on questions and answers.

    python -m fusion.embedded.train --out DIR [--vision-steps N] [--language-steps N] [--device cuda]

Resumable: run the same command again. Deterministic for a seed, device and number of threads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from fusion.embedded import world
from fusion.embedded.build import BOS, EOS, IMAGE, TOKENS_PER_IMAGE, build_model, build_tokenizer, save_processor

_LEARNING_RATE = 1e-3
_CLIP_EVERY = 4  # every fourth language step shows clips
_SAVE_EVERY = 500
_IGNORE = -100


class _Cells(nn.Module):
    """Two linear readouts of the vision tower's tokens: what is in a cell, in which colour. Thrown away after training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kind = nn.Linear(width, len(world.KINDS))
        self.color = nn.Linear(width, 1 + len(world.COLOR_NAMES))

    def loss(self, tokens: torch.Tensor, scenes: Sequence[world.Scene]) -> torch.Tensor:
        """tokens [batch, 36, width]. Empty cells are common, so they weigh less."""
        total = tokens.new_zeros(())
        for readout, labels in ((self.kind, [s.kinds for s in scenes]), (self.color, [s.colors for s in scenes])):
            logits = readout(tokens).float().flatten(0, 1)
            weight = torch.ones(logits.shape[1], device=logits.device)
            weight[0] = 0.3
            wanted = torch.from_numpy(np.stack(labels)).flatten().to(logits.device)
            total = total + F.cross_entropy(logits, wanted, weight)
        return total


class Trainer:
    """Model, readouts, optimizer and random state of one run; everything that `save` and `resume` carry."""

    def __init__(self, out: Path, vision_steps: int, language_steps: int, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.out = out
        self.vision_steps, self.language_steps = vision_steps, language_steps
        self.device = torch.device(device)
        self.rng = np.random.default_rng(seed)
        self.model = build_model().to(self.device)
        self.tokenizer = build_tokenizer()
        self.cells = _Cells(self.model.config.vision_config.hidden_size).to(self.device)
        parameters = [*self.model.parameters(), *self.cells.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, _LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.02, fused=True)
        self.step = 0

    @property
    def total_steps(self) -> int:
        return self.vision_steps + self.language_steps

    def train(self) -> None:
        """Run to the end, saving on the way."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task("embedded model", total=self.total_steps, completed=self.step)
            smooth = 0.0
            while self.step < self.total_steps:
                loss = self._one_step()
                smooth = loss if smooth == 0 else 0.99 * smooth + 0.01 * loss
                self.step += 1
                stage = "vision" if self.step <= self.vision_steps else "language"
                progress.update(task, completed=self.step, description=f"{stage} loss {smooth:.3f}")
                if self.step % _SAVE_EVERY == 0 or self.step == self.total_steps:
                    self.save()
                    progress.console.print(f"step {self.step}: {stage} loss {smooth:.4f}")

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "cells": self.cells.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": json.dumps(self.rng.bit_generator.state),
            "torch": torch.get_rng_state(),
        }
        # Renaming is atomic: a kill in the middle of writing leaves the checkpoint before it.
        torch.save(state, self.out / "train.tmp")
        (self.out / "train.tmp").rename(self.out / "train.pt")

    def resume(self) -> bool:
        """Go on from `out`, if a run was saved there."""
        file = self.out / "train.pt"
        if not file.exists():
            return False
        state = torch.load(file, weights_only=True, map_location=self.device)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.cells.load_state_dict(state["cells"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = json.loads(state["rng"])
        torch.set_rng_state(state["torch"].cpu())
        return True

    def export(self, folder: Path) -> None:
        """Write the model as float16 with tokenizer and processor: what `vlora serve` loads."""
        self.model.cpu().half().save_pretrained(str(folder))
        save_processor(folder)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _one_step(self) -> float:
        vision_stage = self.step < self.vision_steps
        self._set_learning_rate(vision_stage)
        with torch.autocast(self.device.type, torch.bfloat16):
            if vision_stage:
                scenes = [world.scene(self.rng) for _ in range(16)]
                loss = self.cells.loss(self._vision_tokens(scenes), scenes)
            elif self.step % _CLIP_EVERY == 0:
                scenes = [world.clip(self.rng) for _ in range(5)]
                loss = self._answer_loss(scenes, self._vision_tokens(scenes), max_pairs=3)
            else:
                scenes = [world.scene(self.rng) for _ in range(12)]
                tokens = self._vision_tokens(scenes)
                loss = self._answer_loss(scenes, tokens, max_pairs=5) + 0.2 * self.cells.loss(tokens, scenes)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _set_learning_rate(self, vision_stage: bool) -> None:
        if vision_stage:
            done, warm = 0.5 * self.step / max(1, self.vision_steps), self.step / 50
        else:
            own = self.step - self.vision_steps
            done, warm = own / max(1, self.language_steps), own / 100
        rate = _LEARNING_RATE * min(1.0, warm) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _vision_tokens(self, scenes: Sequence[world.Scene]) -> torch.Tensor:
        """[images, 36, width] of the vision tower, class token dropped, as the served model reads it."""
        frames = np.concatenate([scene.frames for scene in scenes])
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).to(self.device).float().div_(127.5).sub_(1)
        return self.model.model.vision_tower(pixels).last_hidden_state[:, 1:]

    def _answer_loss(self, scenes: Sequence[world.Scene], tokens: torch.Tensor, max_pairs: int) -> torch.Tensor:
        """Cross entropy of the answers, several questions about a scene one after the other."""
        rows, wanted = [], []
        for scene in scenes:
            ids = [BOS] + [IMAGE] * (TOKENS_PER_IMAGE * len(scene.frames))
            labels = [_IGNORE] * len(ids)
            for index in self.rng.permutation(len(scene.pairs))[:max_pairs]:
                question, answer = (self.tokenizer(text)["input_ids"] for text in scene.pairs[index])
                ids += [*question, *answer, EOS]
                labels += [_IGNORE] * len(question) + [*answer, EOS]
            rows.append(torch.tensor(ids))
            wanted.append(torch.tensor(labels))
        ids_BL = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)
        labels_BL = nn.utils.rnn.pad_sequence(wanted, batch_first=True, padding_value=_IGNORE).to(self.device)
        inner = self.model.model
        features = inner.multi_modal_projector(tokens)
        embeddings = inner.language_model.embed_tokens(ids_BL).to(features.dtype)
        embeddings = embeddings.masked_scatter((ids_BL == IMAGE)[..., None], features.reshape(-1, features.shape[-1]))
        # Padding stands behind every answer, so causal attention alone keeps it out.
        hidden = inner.language_model(inputs_embeds=embeddings).last_hidden_state[:, :-1]
        answers = labels_BL[:, 1:] != _IGNORE
        return F.cross_entropy(self.model.lm_head(hidden[answers]).float(), labels_BL[:, 1:][answers])


@torch.no_grad()
def exact_match(trainer: Trainer, num_scenes: int, seed: int) -> dict[str, float]:
    """Share of first questions answered word for word, greedily, by the first words of the question; synthetic scenes."""
    rng = np.random.default_rng(seed)
    trainer.model.eval()
    hits: dict[str, list[bool]] = {}
    for number in range(num_scenes):
        scene = world.clip(rng) if number % 4 == 3 else world.scene(rng)
        tokens = trainer._vision_tokens([scene])
        features = trainer.model.model.multi_modal_projector(tokens).reshape(1, -1, 256)
        for question, answer in scene.pairs:
            want = [*trainer.tokenizer(answer)["input_ids"], EOS]
            ids = [BOS, *trainer.tokenizer(question)["input_ids"], *want]
            embed = trainer.model.model.language_model.embed_tokens
            row = embed(torch.tensor([ids], device=trainer.device))
            row = torch.cat([row[:, :1], features, row[:, 1:]], 1)
            hidden = trainer.model.model.language_model(inputs_embeds=row).last_hidden_state
            chosen = trainer.model.lm_head(hidden[0, -len(want) - 1 : -1]).argmax(-1).tolist()
            hits.setdefault(" ".join(question.split()[:3]), []).append(chosen == want)
    trainer.model.train()
    every = [hit for values in hits.values() for hit in values]
    return {"all": float(np.mean(every)), **{name: float(np.mean(values)) for name, values in sorted(hits.items())}}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for checkpoints and the result.")
@click.option("--vision-steps", default=4000, show_default=True)
@click.option("--language-steps", default=6000, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="torch threads on a CPU.")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, vision_steps: int, language_steps: int, device: str, threads: int, seed: int) -> None:
    """Train the embedded model and write it to OUT/checkpoint; OUT/train.pt lets a killed run go on."""
    torch.set_num_threads(threads)
    trainer = Trainer(out, vision_steps, language_steps, device, seed)
    if trainer.resume():
        click.echo(f"going on at step {trainer.step} of {trainer.total_steps}")
    trainer.train()
    accuracy = exact_match(trainer, 400, seed=seed + 1_000_000)
    click.echo(json.dumps({"exact_match_on_synthetic_scenes": accuracy}, indent=1))
    trainer.export(out / "checkpoint")


if __name__ == "__main__":
    main()
