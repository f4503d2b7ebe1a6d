"""Pictures of combinations, composed on the device: a thing at its place, a little larger or smaller, on its colour.

Owns: sizes and jitter. Does not own: the glyphs' drawing (glyphs.py), which combinations there are (words.py).
Pictures are (B, 3, 128, 128) fp32 in 0..1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from .words import COLOURS, PLACES, Combination

SIZE = 128
SMALLEST, LARGEST = 64.0, 74.0  # pixels of a thing's side
MARGIN = 3.0  # pixels between thing and border, at least


def as_indices(combinations: Sequence[Combination], device: torch.device) -> torch.Tensor:
    """(N, 3) of thing, colour and place."""
    return torch.tensor([(each.thing, each.colour, each.place) for each in combinations], device=device)


class Painter:
    """Composes pictures from the glyphs' file on one device."""

    def __init__(self, glyphs: Path, device: torch.device) -> None:
        """Raises `FileNotFoundError` when nobody has drawn the glyphs."""
        if not glyphs.exists():
            raise FileNotFoundError(
                f"{glyphs} is missing; apt install fonts-noto-color-emoji, then python -m demo.glyphs {glyphs}"
            )
        drawn = load_file(glyphs)["glyphs"].to(device).float() / 255
        self.glyphs = torch.cat((drawn[:, :3] * drawn[:, 3:], drawn[:, 3:]), 1)  # premultiplied
        self.colours = torch.tensor(list(COLOURS.values()), device=device) / 255
        self.places = torch.tensor(list(PLACES.values()), device=device)
        self.pixels = torch.arange(SIZE, device=device) + 0.5

    def paint(self, chosen: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Pictures of `chosen` (B, 3), with random sizes and shifts."""
        thing, colour, place = chosen.unbind(1)
        side, *shift = torch.rand(3, len(chosen), device=chosen.device, generator=generator)
        side = SMALLEST + (LARGEST - SMALLEST) * side
        room = SIZE - LARGEST - 2 * MARGIN  # shifts move a thing inside the square that the largest would fill
        axes = []
        for dim in (0, 1):
            start = MARGIN + self.places[place, dim] * room + shift[dim] * (LARGEST - side)
            axes.append((self.pixels - start[:, None]) / side[:, None] * 2 - 1)  # (B, 128), -1..1 over the glyph
        across, down = axes
        grid = torch.stack(
            (across[:, None, :].expand(-1, SIZE, -1), down[:, :, None].expand(-1, -1, SIZE)), -1
        )  # (B, 128, 128, 2)
        drawn = F.grid_sample(self.glyphs[thing], grid, align_corners=False)
        ground = self.colours[colour][:, :, None, None]
        return drawn[:, :3] + ground * (1 - drawn[:, 3:])
