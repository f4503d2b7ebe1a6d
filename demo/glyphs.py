"""Draws the things of words.py from Debian's colour emoji font into one small file, which training reads.

`python -m demo.glyphs [FILE]`. The font is fonts-noto-color-emoji, under the SIL Open Font License 1.1. Needs Pillow
with raqm or FreeType's colour bitmaps; nothing but training needs the font.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file

from .words import THINGS

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
FONT_SIZE = 109  # the one size whose bitmaps the font has
GLYPH = 80  # pixels on a side
DEFAULT = Path("build/demo_glyphs.safetensors")


def glyph(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """One character as a square RGBA picture of `GLYPH` pixels, its longer side filling it."""
    drawn = Image.new("RGBA", (2 * FONT_SIZE, 2 * FONT_SIZE))
    ImageDraw.Draw(drawn).text((FONT_SIZE // 4, FONT_SIZE // 4), character, font=font, embedded_color=True)
    drawn = drawn.crop(drawn.getbbox())
    square = Image.new("RGBA", (max(drawn.size),) * 2)
    square.paste(drawn, ((square.width - drawn.width) // 2, (square.height - drawn.height) // 2))
    return square.resize((GLYPH, GLYPH), Image.Resampling.LANCZOS)


def write_glyphs(path: Path, font: Path = FONT) -> None:
    """Writes `glyphs` (things, 4, 80, 80) uint8. Raises `FileNotFoundError` when the font is not installed."""
    if not font.exists():
        raise FileNotFoundError(f"{font} is missing; apt install fonts-noto-color-emoji")
    face = ImageFont.truetype(str(font), FONT_SIZE)
    pictures = np.stack([np.asarray(glyph(face, character)) for character in THINGS.values()])
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"things": ", ".join(THINGS), "source": "Noto Color Emoji, SIL Open Font License 1.1"}
    save_file({"glyphs": torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()}, path, metadata)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=DEFAULT)
    path = parser.parse_args().file
    write_glyphs(path)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {len(THINGS)} things")  # noqa: T201


if __name__ == "__main__":
    main()
