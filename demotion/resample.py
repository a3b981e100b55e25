"""Pixels: one crop box per picture, Lanczos with antialiasing, 8 bits in and 8 bits out.

Pictures are uint8 arrays [H, W, C]. Every arm of a picture is cut with the native crop box and
scaled per axis.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

Box = tuple[float, float, float, float]


def cover_box(picture_hw: tuple[int, int], target_hw: tuple[int, int]) -> Box:
    """Largest centred box (left, top, right, bottom; pixels) with the target's aspect."""
    height, width = picture_hw
    scale = min(height / target_hw[0], width / target_hw[1])
    box_height, box_width = scale * target_hw[0], scale * target_hw[1]
    left, top = (width - box_width) / 2, (height - box_height) / 2
    return left, top, left + box_width, top + box_height


def lanczos(picture: np.ndarray, size_hw: tuple[int, int], box: Box | None = None) -> np.ndarray:
    """Cut a box and scale it to size_hw: Lanczos, antialiased, rounded to 8 bits."""
    return _resize(picture, size_hw, box, Image.Resampling.LANCZOS)


def mask_weights(mask: np.ndarray, grid: tuple[int, int], box: Box) -> np.ndarray:
    """Mask [H, W] uint8 as loss weights [h, w] in [0, 1] on a grid of latent cells, by area
    average."""
    return _resize(mask, grid, box, Image.Resampling.BOX).astype(np.float32) / 255


def _resize(
    array: np.ndarray, size_hw: tuple[int, int], box: Box | None, method: Image.Resampling
) -> np.ndarray:
    height, width = size_hw
    return np.asarray(Image.fromarray(array).resize((width, height), method, box=box))
