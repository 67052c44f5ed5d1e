"""Texture features of a picture, the targets of probes that train the vision tower (see `train.py`)."""

from __future__ import annotations

import math

import torch

from fusion.embedded.processor import PATCH

DIRECTIONS, SCALES = 4, 4
PATCH_FEATURES = DIRECTIONS * SCALES + 1
GIST_FEATURES = 4 * PATCH_FEATURES


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
