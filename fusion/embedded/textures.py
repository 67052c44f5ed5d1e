"""Random unnamed textures, similar to close-ups of surfaces. Canvases as in `drawing`.

Two families resemble most local structure of photographs: noise with a random power spectrum (clouds to gravel, with or
without a direction), and leaves, overlapping shapes of many sizes. A canvas has one texture, or two side by side.
"""

from __future__ import annotations

import math

import cv2
import numpy as np

from fusion.embedded.drawing import SIZE, add_noise, chance

_FY: np.ndarray = np.fft.fftfreq(SIZE)[:, None].astype(np.float32)
_FX: np.ndarray = np.fft.rfftfreq(SIZE)[None].astype(np.float32)


def texture(rng: np.random.Generator, level: float, contrast: float) -> np.ndarray:
    """A canvas of about `level` grey levels on average and `contrast` around it, grey or slightly coloured."""
    field = _field(rng)
    if chance(rng, 0.5):
        side = int(rng.integers(2, 5))
        parts = cv2.resize(rng.standard_normal((side, side), np.float32), (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
        field = np.where(parts > 0, field, _field(rng) + rng.normal(0, 1))
    field = (field - field.mean()) / (field.std() + 1e-6)
    if chance(rng, 0.3):
        field = np.tanh(field * rng.uniform(1, 4))
    canvas = np.repeat((level + contrast * field)[..., None], 3, axis=2)
    if chance(rng, 0.5):
        canvas *= rng.uniform(0.75, 1.25, 3)
    return add_noise(rng, canvas, rng.uniform(0, 8))


def _field(rng: np.random.Generator) -> np.ndarray:
    """One texture, float32 [96, 96], of deviation 1 around 0; sometimes out of focus."""
    field = _noise(rng, rng.uniform(0.3, 2.2)) if chance(rng, 0.5) else _leaves(rng)
    if chance(rng, 0.3):
        field = cv2.GaussianBlur(field, (0, 0), rng.uniform(0.6, 2.5))
    return (field - field.mean()) / (field.std() + 1e-6)


def _noise(rng: np.random.Generator, slope: float) -> np.ndarray:
    """Noise with amplitude proportional to frequency ** -slope, stretched along a random direction."""
    lean, squeeze = rng.uniform(0, math.pi), rng.uniform(1, 4) if chance(rng, 0.6) else 1.0
    along = _FX * math.cos(lean) + _FY * math.sin(lean)
    across = (_FY * math.cos(lean) - _FX * math.sin(lean)) * squeeze
    amplitude = (along**2 + across**2 + 1 / SIZE**2) ** (-slope / 2)
    white = rng.standard_normal((SIZE, SIZE), np.float32)
    field = np.fft.irfft2(np.fft.rfft2(white) * amplitude, (SIZE, SIZE)).astype(np.float32)
    return (field - field.mean()) / (field.std() + 1e-6)


def _leaves(rng: np.random.Generator) -> np.ndarray:
    """Overlapping ellipses or boxes with sizes from a power law."""
    field: np.ndarray = np.zeros((SIZE, SIZE), np.float32)
    count = int(rng.integers(60, 200))
    smallest = rng.uniform(1.5, 6)
    sizes = np.minimum(smallest * rng.uniform(1e-3, 1, count) ** -0.5, 40)
    places = rng.uniform(0, SIZE, (count, 2))
    tones, stretch = rng.normal(0, 1, count), rng.uniform(1, 3)
    lean, spread = rng.uniform(0, 180), rng.uniform(5, 90)
    turns = lean + spread * rng.uniform(-1, 1, count)
    boxes = chance(rng, 0.4)
    for (x, y), size, tone, turn in zip(places, sizes, tones, turns, strict=True):
        if boxes:
            corners = cv2.boxPoints(((x, y), (2 * size * stretch, 2 * size), turn))
            cv2.fillConvexPoly(field, np.round(corners).astype(np.int32), float(tone), cv2.LINE_AA)
        else:
            axes = (max(1, round(size * stretch)), max(1, round(size)))
            cv2.ellipse(field, (round(x), round(y)), axes, turn, 0, 360, float(tone), -1, cv2.LINE_AA)
    return field
