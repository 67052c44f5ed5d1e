"""Linear probes on single tokens, which train the embedded model as auxiliary losses (see `train.py`)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fusion.embedded import drawing, world
from tools.embedded_model.conversations import IGNORED
from tools.embedded_model.model import IMAGE_TOKENS
from tools.embedded_model.processor import PATCH

DIRECTIONS, SCALES = 4, 4
PATCH_FEATURES = DIRECTIONS * SCALES + 1
GIST_FEATURES = 4 * PATCH_FEATURES


def as_pixels(frames: np.ndarray) -> torch.Tensor:
    """Convert uint8 [n, 96, 96, 3] as the image processor does for this size: float [n, 3, 96, 96], -1 to 1."""
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def patch_spectra(pixels: torch.Tensor) -> torch.Tensor:
    """Texture of each patch: the log energy for every direction and scale, then the brightness.

    pixels: float [n, 3, 16 * rows, 16 * columns], -1 to 1. The result is float [n, rows * columns, PATCH_FEATURES]; all
    features have a deviation of about 1 over this world's pictures.
    """
    grey = pixels.float().mean(1) / 2
    patches = grey.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(1, 2)
    brightness = patches.mean((-1, -2), keepdim=True)
    window = torch.hann_window(PATCH + 2, periodic=False, device=pixels.device)[1:-1]
    seen = torch.fft.rfft2((patches - brightness) * window * window[:, None])
    energy = seen.abs().square().flatten(2) @ _bins(pixels.device).T
    # The floor is the energy of one grey level of noise in a bin.
    return torch.cat([(energy + 1e-3).log() / 2, 4 * brightness.flatten(2)], -1)


def gist(spectra: torch.Tensor) -> torch.Tensor:
    """Texture of a whole picture: mean, deviation, maximum and minimum of each feature over its patches.

    spectra [n, patches, features]; the result is [n, 4 * features].
    """
    return torch.cat([spectra.mean(1), spectra.std(1), spectra.amax(1), spectra.amin(1)], -1)


def _bins(device: torch.device) -> torch.Tensor:
    """Share of each frequency of a patch in each direction and scale, [DIRECTIONS * SCALES, frequencies]."""
    fy, fx = torch.fft.fftfreq(PATCH, device=device)[:, None], torch.fft.rfftfreq(PATCH, device=device)[None]
    radius, angle = torch.hypot(fx, fy), torch.atan2(fy, fx)
    edges = torch.logspace(math.log10(0.05), math.log10(0.75), SCALES + 1)
    shares = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        for direction in range(DIRECTIONS):
            deviation = (angle - math.pi * direction / DIRECTIONS + math.pi / 2) % math.pi - math.pi / 2
            share = (1 - deviation.abs() * DIRECTIONS / math.pi).clamp(min=0)
            shares.append((share * ((radius >= low) & (radius < high))).flatten())
    return torch.stack(shares)


class Probes(nn.Module):
    def __init__(self, vision_size: int, text_size: int) -> None:
        super().__init__()
        self.kind = nn.Linear(vision_size, len(world.CELL_KINDS))
        self.color = nn.Linear(vision_size, len(world.CELL_COLORS))
        self.center = nn.Linear(vision_size, 2)
        self.texture = nn.Linear(vision_size, PATCH_FEATURES)
        self.gist = nn.Linear(text_size, GIST_FEATURES)
        self.move = nn.Linear(text_size, len(world.CELL_MOVES))
        self.kept = nn.Linear(text_size, vision_size)
        self.row = nn.Linear(text_size, world.GRID)
        self.column = nn.Linear(text_size, world.GRID)
        self.present = nn.Linear(text_size, 2)
        self.meant = nn.Linear(text_size, len(drawing.ATTRIBUTES))

    def cell_loss(self, states: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """states [n, 36, vision], cells [n, 4, 6, 6]."""
        labels = cells.flatten(2)
        return (
            _probe_loss(self.kind(states), labels[:, world.KIND])
            + _probe_loss(self.color(states), labels[:, world.COLOR])
            + _probe_loss(self.center(states), labels[:, world.CENTER])
        )

    def texture_loss(self, states: torch.Tensor, spectra: torch.Tensor) -> torch.Tensor:
        """states [n, 36, vision], spectra [n, 36, PATCH_FEATURES]."""
        return functional.mse_loss(self.texture(states).float(), spectra)

    def gist_loss(self, states: torch.Tensor, gists: torch.Tensor) -> torch.Tensor:
        """states: [questions, text], where an answer begins. gists: [questions, GIST_FEATURES].

        Keeps the whole picture's texture in these states for any question, since heads of domains read them.
        """
        return functional.mse_loss(self.gist(states).float(), gists)

    def place_loss(self, features: torch.Tensor) -> torch.Tensor:
        """Position of each image token from the language model's input. features: [n, 36, text]."""
        place = torch.arange(world.GRID, device=features.device)
        rows, columns = place.repeat_interleave(world.GRID), place.repeat(world.GRID)
        of_row, of_column = self.row(features).float().flatten(0, 1), self.column(features).float().flatten(0, 1)
        return functional.cross_entropy(of_row, rows.repeat(len(features))) + functional.cross_entropy(
            of_column, columns.repeat(len(features))
        )

    def kept_loss(self, features: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Reconstruction of the vision tower's states from the language model's input, so that the input also keeps
        information that no question of this world needs. features: [n, 36, text]. states: [n, 36, vision]."""
        return functional.mse_loss(self.kept(normed(features)).float(), normed(states).detach())

    def move_loss(self, states: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """states: [clips, frames * 36, text]. cells: [clips, frames, 4, 6, 6]. The first frame shows no motion."""
        frames = cells.shape[1]
        states = states.unflatten(1, (frames, IMAGE_TOKENS))[:, 1:]
        return _probe_loss(self.move(states), cells[:, 1:, world.MOVE].flatten(2))

    def presence_loss(self, states: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """states: [n, length, text]. present: [n, length], 1 or 0 at the last token of a name, else ignored."""
        named = present != IGNORED
        return functional.cross_entropy(self.present(states[named]).float(), present[named])

    def meaning_loss(self, states: torch.Tensor, meant: torch.Tensor) -> torch.Tensor:
        """states: [n, length, text]. meant: [n, length, attributes], 1 or 0 at the last token of a name, else ignored.

        Summed over attributes, since most are absent and easy.
        """
        named = meant[..., 0] != IGNORED
        loss = functional.binary_cross_entropy_with_logits(
            self.meant(states[named]).float(), meant[named].float(), reduction="sum"
        )
        return loss / max(1, int(named.sum()))


def normed(states: torch.Tensor) -> torch.Tensor:
    """States normalised as in the next layer, without its weights."""
    return functional.rms_norm(states.float(), states.shape[-1:])


def _probe_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy with a weight of a third for background cells, which are the majority."""
    weight = torch.ones(logits.shape[-1], device=logits.device)
    weight[0] = 0.3
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), weight)
