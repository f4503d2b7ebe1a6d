"""The demo's one PNG: stock ComfyUI's picture and ours side by side with their difference, then what breaks and mends.

Owns: the layout. Pictures are (height, width, 3) arrays in 0..255.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SHOWN = 320  # pixels of a picture's side on the sheet
GAP, CAPTION, TITLE = 20, 62, 60
GAIN = 32  # of differences, which are else invisible


@dataclass(frozen=True)
class Panel:
    """One picture, its caption, and whether it is wrong (a red frame)."""

    picture: np.ndarray
    caption: str
    detail: str
    bad: bool = False


def difference(picture: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Absolute differences, `GAIN` times."""
    return np.clip(np.abs(picture - reference) * GAIN, 0, 255)


def draw_sheet(title: str, panels: Sequence[Panel], *, columns: int = 3) -> Image.Image:
    """All panels, row by row, below a title."""
    rows = -(-len(panels) // columns)
    width, height = GAP + columns * (SHOWN + GAP), TITLE + rows * (SHOWN + CAPTION) + GAP
    sheet = Image.new("RGB", (width, height), "white")
    drawing = ImageDraw.Draw(sheet)
    large, middle, small = (ImageFont.load_default(size) for size in (26, 18, 14))
    drawing.text((GAP, 16), title, fill="black", font=large)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        left, top = GAP + column * (SHOWN + GAP), TITLE + row * (SHOWN + CAPTION)
        frame = (left - 3, top - 3, left + SHOWN + 2, top + SHOWN + 2)
        drawing.rectangle(frame, outline="red" if panel.bad else "#cccccc", width=3)
        image = Image.fromarray(panel.picture.astype(np.uint8))
        sheet.paste(image.resize((SHOWN, SHOWN), Image.Resampling.LANCZOS), (left, top))
        drawing.text((left, top + SHOWN + 6), panel.caption, fill="black", font=middle)
        drawing.text((left, top + SHOWN + 30), panel.detail, fill="#b00000" if panel.bad else "#555555", font=small)
    return sheet
