"""What pictures of charts show, from their pixels alone: how much of each colour a row has, how long bars are."""

import base64
import io
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from PIL import Image
from playwright.sync_api import Locator

TIME_LEFT, TIME_RIGHT, AXIS = 86, 8, 20  # pixels beside the time, and below the rows
LINES_OF_AN_AXIS = 20  # at most, each a pixel wide
PARTS = {"compute": (0x4E, 0x79, 0xA7), "communication": (0xF2, 0x8E, 0x2B)}
BARS = {"base": PARTS["compute"], "good": (0x59, 0xA1, 0x4F), "bad": (0xE1, 0x57, 0x59)}
IDLE, IDLE_ALPHA = (0x9A, 0xA0, 0xA6), 0.35
DRAWN = """async (canvas) => {
  const { width, height } = canvas
  const drawn = () => canvas.getContext('2d').getImageData(0, 0, width, height).data.some((value) => value)
  for (let frame = 0; frame < 600 && !drawn(); frame++) await new Promise(requestAnimationFrame)
  return canvas.toDataURL('image/png') }"""
NEAR = 12  # of 255, in each of red, green and blue


def picture_of(canvas: Locator) -> Image.Image:
    """A canvas as it is drawn, once it is, on black where it is not."""
    encoded = canvas.evaluate(DRAWN).partition(",")[2]
    drawn = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA")
    ground = Image.new("RGBA", drawn.size, "black")
    ground.alpha_composite(drawn)
    return ground.convert("RGB")


def areas_by_row(picture: Image.Image) -> list[dict[str, int]]:
    """Of each rank's row from the top, how many pixels have which colour."""
    pixels = np.asarray(picture, dtype=int)[: picture.height - AXIS, TIME_LEFT : picture.width - TIME_RIGHT]
    idle = IDLE_ALPHA * np.array(IDLE) + (1 - IDLE_ALPHA) * np.asarray(picture, dtype=int)[0, 0]
    coloured = {name: is_near(pixels, colour) for name, colour in PARTS.items()}
    coloured["idle"] = is_near(pixels, idle, off=NEAR // 3)  # or it would have the edges that a row has a part of
    drawn = np.logical_or.reduce(list(coloured.values())).sum(1) > LINES_OF_AN_AXIS
    drawn[:-1] |= drawn[1:]  # between two colours that lie one over the other is a line of neither
    return [{name: int(there[slice(*run)].sum()) for name, there in coloured.items()} for run in runs(drawn)]


def shares_by_row(picture: Image.Image) -> list[dict[str, float]]:
    """As `areas_by_row`, as parts of the row."""
    return [{name: area / sum(row.values()) for name, area in row.items()} for row in areas_by_row(picture)]


def bars_of(picture: Image.Image) -> list[tuple[str, int]]:
    """The bars from the top, each with its colour's name and how many pixels it is long in its middle."""
    pixels = np.asarray(picture, dtype=int)
    coloured = {name: is_near(pixels, colour) for name, colour in BARS.items()}
    bars = []
    for start, stop in runs(np.logical_or.reduce(list(coloured.values())).any(1)):
        lengths = {name: int(there[(start + stop) // 2].sum()) for name, there in coloured.items()}
        bars += [(name, length) for name, length in lengths.items() if length]
    return bars


def is_near(pixels: np.ndarray, colour: Sequence[float] | np.ndarray, *, off: int = NEAR) -> np.ndarray:
    """Which of the pixels (..., 3) are as good as of a colour."""
    return (np.abs(pixels - np.array(colour)) < off).all(-1)


def runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Where the flags are set: each run's first place, and the place after it."""
    edges = [at + 1 for at, (here, there) in enumerate(pairwise([False, *flags, False])) if here != there]
    return [(start - 1, stop - 1) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
