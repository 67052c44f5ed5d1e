"""Texture features of patches against plain Fourier sums in float64; random textures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fusion.embedded.drawing import SIZE
from fusion.embedded.evaluate import as_pixels
from fusion.embedded.probes import DIRECTIONS, GIST_FEATURES, PATCH_FEATURES, SCALES, gist, patch_spectra
from fusion.embedded.world import texture

PATCH = 16


def grating(direction: float, period: float) -> np.ndarray:
    """A sine wave across the whole picture, uint8 [1, 96, 96, 3]."""
    y, x = np.mgrid[0:SIZE, 0:SIZE]
    wave = np.sin(2 * math.pi * (x * math.cos(direction) + y * math.sin(direction)) / period)
    return np.repeat((128 + 80 * wave)[None, ..., None], 3, axis=-1).astype(np.uint8)


def plain_spectra(frame: np.ndarray) -> np.ndarray:
    """Patch by patch and frequency by frequency, as documented. float64 [36, PATCH_FEATURES]."""
    grey = (frame.astype(np.float64).mean(-1) / 127.5 - 1) / 2
    edges = np.geomspace(0.05, 0.75, SCALES + 1)
    window = np.array([0.5 - 0.5 * math.cos(2 * math.pi * (i + 1) / (PATCH + 1)) for i in range(PATCH)])
    rows = []
    for top in range(0, SIZE, PATCH):
        for left in range(0, SIZE, PATCH):
            patch = grey[top : top + PATCH, left : left + PATCH]
            seen = (patch - patch.mean()) * np.outer(window, window)
            energies = np.zeros((SCALES, DIRECTIONS))
            for v in range(-PATCH // 2, PATCH // 2):
                for u in range(PATCH // 2 + 1):
                    radius, angle = math.hypot(u, v) / PATCH, math.atan2(v, u)
                    scale = np.searchsorted(edges, radius, side="right") - 1
                    if not 0 <= scale < SCALES:
                        continue
                    waves = np.exp(-2j * math.pi * (np.arange(PATCH)[:, None] * v + np.arange(PATCH) * u) / PATCH)
                    energy = abs((seen * waves).sum()) ** 2
                    for direction in range(DIRECTIONS):
                        angle_difference = (angle - math.pi * direction / DIRECTIONS) % math.pi
                        angle_difference = min(angle_difference, math.pi - angle_difference)
                        energies[scale, direction] += energy * max(0.0, 1 - angle_difference * DIRECTIONS / math.pi)
            rows.append([*(np.log(energies.flatten() + 1e-3) / 2), 4 * patch.mean()])
    return np.array(rows)


def test_spectra_are_the_sums_they_claim_to_be() -> None:
    frame = texture(np.random.default_rng(3), 120, 40)
    np.testing.assert_allclose(patch_spectra(as_pixels(frame[None]))[0], plain_spectra(frame), atol=2e-4)


@pytest.mark.parametrize("direction", range(DIRECTIONS))
def test_a_grating_is_described_by_direction_and_scale(direction: int) -> None:
    for scale, period in enumerate((16, 7, 3.8, 2.4)):
        spectra = patch_spectra(as_pixels(grating(math.pi * direction / DIRECTIONS, period)))[0, :, :-1]
        assert (spectra.argmax(-1) == scale * DIRECTIONS + direction).float().mean() > 0.8, (direction, period)


def test_gist_is_the_whole_picture() -> None:
    rng = np.random.default_rng(0)
    spectra = patch_spectra(as_pixels(np.stack([texture(rng, 60, 30), texture(rng, 180, 30)])))
    assert spectra.shape == (2, 36, PATCH_FEATURES)
    whole = gist(spectra).view(2, 4, PATCH_FEATURES)
    assert whole.numel() == 2 * GIST_FEATURES
    assert whole[0, 0, -1] < 0 < whole[1, 0, -1], "brightness"
    assert torch.all(whole[:, 3] <= whole[:, 0]) and torch.all(whole[:, 0] <= whole[:, 2])


@pytest.mark.slow
def test_textures_are_seeded_and_keep_their_level() -> None:
    one, again = (texture(np.random.default_rng(5), 100, 20) for _ in range(2))
    assert one.dtype == np.uint8 and one.shape == (SIZE, SIZE, 3) and np.array_equal(one, again)
    rng = np.random.default_rng(1)
    levels = np.array([texture(rng, 100, 20).mean() for _ in range(100)])
    assert abs(levels.mean() - 100) < 5
