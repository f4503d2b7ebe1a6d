"""What the demo's model draws, in words: 40 things, 8 background colours, 5 places, and the text encoder for them.

Owns: the lists, the prompts, which combinations training never sees, the encoder's weights (made from a seed whenever
they are needed, so no file holds them). Does not own: the pictures (pictures.py), ComfyUI's side of the encoder
(text_encoder_node). Needs torch alone.
"""

from __future__ import annotations

import difflib
import functools
import re
import zlib
from dataclasses import dataclass

import torch

THINGS = {
    "red apple": "🍎", "banana": "🍌", "sun": "🌞", "cactus": "🌵", "fish": "🐟", "car": "🚗", "house": "🏠",
    "star": "⭐", "moon": "🌙", "mushroom": "🍄", "balloon": "🎈", "cat": "🐱", "tree": "🌳", "strawberry": "🍓",
    "gift": "🎁",
    "football": "⚽", "pizza": "🍕", "frog": "🐸", "bicycle": "🚲", "doughnut": "🍩", "rainbow": "🌈", "bee": "🐝",
    "bell": "🔔", "crown": "👑", "hat": "🎩", "turtle": "🐢", "grapes": "🍇", "sunflower": "🌻", "snowman": "⛄",
    "penguin": "🐧", "rocket": "🚀", "camera": "📷", "guitar": "🎸", "cheese": "🧀", "burger": "🍔", "butterfly": "🦋",
    "octopus": "🐙", "carrot": "🥕", "corn": "🌽", "key": "🔑",
}  # fmt: skip
COLOURS = {
    "white": (250, 250, 250), "blue": (60, 90, 200), "yellow": (240, 200, 60), "green": (60, 160, 90),
    "red": (200, 70, 70), "black": (40, 40, 50), "pink": (240, 150, 200), "brown": (140, 90, 60),
}  # fmt: skip
# Where the thing is, as a part of the free width and height.
PLACES = {
    "top left": (0.0, 0.0), "top right": (1.0, 0.0), "bottom left": (0.0, 1.0), "bottom right": (1.0, 1.0),
    "centre": (0.5, 0.5),
}  # fmt: skip
ORDERS = ("a {thing} on {colour}, {place}", "{place}: a {thing} on {colour}")
UNHEARD = frozenset(("a", "an", "the", "in", "at", "of", "background"))
OTHER_WORDS = {"center": "centre", "middle": "centre"}

MAX_WORDS = 8
WIDTH = 128  # of a word's vector, and of the pooled one
ENCODER_SEED = 21
UNSEEN = 200


@dataclass(frozen=True)
class Combination:
    """What one picture shows, each by its index."""

    thing: int
    colour: int
    place: int

    def prompt(self, order: int = 0) -> str:
        """The words for it, in one of `ORDERS`."""
        names = (list(THINGS)[self.thing], list(COLOURS)[self.colour], list(PLACES)[self.place])
        return ORDERS[order].format(**dict(zip(("thing", "colour", "place"), names, strict=True)))


@functools.cache
def combinations() -> tuple[tuple[Combination, ...], tuple[Combination, ...]]:
    """All combinations: those for training, and the 200 that no training sees, five of each thing.

    Of the five, each has another place, and the colours differ, so every word is met in training with every other.
    """
    generator = torch.Generator().manual_seed(0)
    unseen = []
    for thing in range(len(THINGS)):
        colours = torch.randperm(len(COLOURS), generator=generator)[: len(PLACES)].tolist()
        unseen += [Combination(thing, colour, place) for place, colour in enumerate(colours)]
    every = [
        Combination(thing, colour, place)
        for thing in range(len(THINGS))
        for colour in range(len(COLOURS))
        for place in range(len(PLACES))
    ]
    return tuple(each for each in every if each not in set(unseen)), tuple(unseen)


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """Every word that the encoder has a vector for."""
    names = (*THINGS, *COLOURS, *PLACES, "on")
    return tuple(dict.fromkeys(word for name in names for word in name.split()))


def words_of(text: str) -> list[str]:
    """The words of a prompt that have a vector. Raises `ValueError` for others, and for too many."""
    words = [OTHER_WORDS.get(word, word) for word in re.findall(r"[^\W\d_]+|\d+", text.lower()) if word not in UNHEARD]
    for word in words:
        if word not in vocabulary():
            near = difflib.get_close_matches(word, vocabulary(), n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it knows {', '.join(THINGS)}"
            raise ValueError(f"the demo's model does not know the word {word!r}; {hint}")
    if len(words) > MAX_WORDS:
        pattern = ORDERS[0].format(thing="THING", colour="COLOUR", place="PLACE")
        raise ValueError(f"the prompt has {len(words)} words, the demo's model takes {MAX_WORDS}; write {pattern!r}")
    return words


@functools.cache
def _random(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{ENCODER_SEED}:{name}".encode()))
    return torch.randn(shape, generator=generator)


def encode(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt's vectors (8, 128), zero where there is no word, and the pooled one (128), all fp32.

    A random embedding of each word and a random convolution over it and its neighbours, so that "red" before "apple"
    is another vector than "red" behind "on". No words give zeros, as stock's ConditioningZeroOut does.
    """
    vectors = torch.zeros(MAX_WORDS, WIDTH)
    words = words_of(text)
    if not words:
        return vectors, vectors.sum(0)
    embedded = torch.nn.functional.pad(torch.stack([_random(word, WIDTH) for word in words]), (0, 0, 1, 1))
    before, behind = (_random(name, WIDTH, WIDTH) / WIDTH**0.5 for name in ("<before>", "<behind>"))
    vectors[: len(words)] = (embedded[1:-1] + embedded[:-2] @ before + embedded[2:] @ behind) / 3**0.5
    return vectors, vectors.sum(0) / len(words) ** 0.5
