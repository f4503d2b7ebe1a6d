"""The two models that are compared: one bound by arithmetic, one by the overhead of its many small operations.

Both are Flux.1 in every respect but size, with random weights and O(1) gates, so that an error of attention shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel_runtime.cli.workload import Workload
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.sample import sample_config


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model and one call of it."""

    name: str
    config: FluxConfig
    workload: Workload

    @property
    def text(self) -> str:
        """The sizes, for people."""
        c, w = self.config, self.workload
        return (
            f"{c.depth} double + {c.depth_single} single blocks, {c.hidden_size} wide, {c.num_heads} heads, "
            f"{w.image_tokens} image + {w.text_tokens} text tokens"
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="compute",
            config=sample_config(heads=8, head_dim=64, depth=2, depth_single=4),
            workload=Workload(width=1024, height=512, text_tokens=128),
        ),
        Shape(
            name="overhead",
            config=sample_config(heads=4, head_dim=32, depth=19, depth_single=38),
            workload=Workload(width=128, height=128, text_tokens=16),
        ),
    )
}
