"""A graph of the matrix: a name, its kind, settings of the stock graph, and the edits that make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from host.client import Workflow

from .edits import HERE, Edit, add, on, on_positive, plain, prompt


@dataclass(frozen=True)
class Graph:
    """One graph; `workflow()` is fresh each time, `without_edits()` is what its edits have to change."""

    kind: str
    name: str
    edits: tuple[Edit, ...]
    settings: tuple[tuple[str, Any], ...]
    saves: ClassVar[tuple[str, ...]] = ("save",)
    previews: ClassVar[bool] = True

    def workflow(self) -> Workflow:
        """The stock graph, saving its latent."""
        graph = plain(**dict(self.settings))
        for edit in self.edits:
            edit(graph)
        return graph

    def without_edits(self) -> Graph:
        """The same settings and nothing else."""
        return Graph("", f"settings {self.settings}", (), self.settings)


def of(kind: str, name: str, *edits: Edit, **settings: Any) -> Graph:
    return Graph(kind, name, edits, tuple(settings.items()))


CANNY = "canny/lineart/anime_lineart/mlsd"
CACHE = {"reuse_threshold": 0.8, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}


def in_halves(class_type: str, *, left: dict[str, Any], right: dict[str, Any]) -> tuple[Edit, ...]:
    """The prompt on the left and another on the right, combined."""
    return (
        prompt("region", "a market in the sun"),
        add("right half", class_type, conditioning=["region", 0], **right),
        on_positive(class_type, **left),
        on("positive", "ConditioningCombine", conditioning_1=HERE, conditioning_2=["right half", 0]),
    )


def area(x: float) -> dict[str, Any]:
    """Half of a picture of 128 x 96, from `x`."""
    return {"width": 64, "height": 96, "x": x, "y": 0, "strength": 1.0}
