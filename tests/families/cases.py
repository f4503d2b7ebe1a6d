"""Which variant is compared with stock ComfyUI under which plan: data, for `make parity-models` and the tests."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from host.client import Workflow

from .variant import Variant

FOUR = {"devices": "cpu:4"}  # for every plan, which takes the first ranks of them: other devices are other workers
PLANS: dict[str, dict[str, Any]] = {
    "ulysses 2": {**FOUR, "ulysses": 2},
    "ring 2": {**FOUR, "ring": 2},
    "ulysses 3": {**FOUR, "ulysses": 3},
    "ulysses 2 x ring 2": {**FOUR, "ulysses": 2, "ring": 2},
    "cfg 2": {**FOUR, "cfg": 2},
    "cfg 2 x ulysses 2": {**FOUR, "cfg": 2, "ulysses": 2},
    "ulysses 2, sharded": {**FOUR, "ulysses": 2, "weights": "sharded"},
    "cfg 2 x ulysses 2, sharded": {**FOUR, "cfg": 2, "ulysses": 2, "weights": "sharded"},
}
# Of those whose blocks can be in stages, by name alone (`--plan`); both steps are warm-up.
STAGES: dict[str, dict[str, Any]] = {
    "pipefusion 2": {**FOUR, "pipefusion": 2, "warmup_steps": 2},
    "pipefusion 2 x ulysses 2": {**FOUR, "pipefusion": 2, "warmup_steps": 2, "ulysses": 2},
    "pipefusion 2 x ring 2": {**FOUR, "pipefusion": 2, "warmup_steps": 2, "ring": 2},
    "cfg 2 x pipefusion 2": {**FOUR, "cfg": 2, "pipefusion": 2, "warmup_steps": 2},
    "cfg 2 x pipefusion 2, sharded": {**FOUR, "cfg": 2, "pipefusion": 2, "warmup_steps": 2, "weights": "sharded"},
}
CONTROL_PLAN = "ulysses 2"
CFG = 3.0


@dataclass(frozen=True)
class Case:
    """A variant at a cfg scale, as the runner takes it: above 1, each step asks the model for both prompts."""

    variant: Variant
    cfg: float = 1.0
    steps: int = 2

    @property
    def kind(self) -> str:
        return self.variant.family

    @property
    def name(self) -> str:
        return f"{self.variant.name}, cfg {self.cfg:g}"

    @property
    def saves(self) -> tuple[str, ...]:
        return self.variant.latents

    @property
    def previews(self) -> bool:
        """Whether stock ComfyUI shows previews of it."""
        return self.variant.shown

    def workflow(self) -> Workflow:
        return self.variant.graph(cfg=self.cfg, steps=self.steps)

    def plans(self) -> list[str]:
        """The plans that make a difference: batch groups for the two sides of cfg need two sides."""
        return [name for name, degrees in (PLANS | STAGES).items() if self.cfg > 1 or "cfg" not in degrees]


def cases(variants: Iterable[Variant]) -> list[Case]:
    """Each variant at cfg 1 and above it."""
    return [Case(variant, cfg) for variant in variants for cfg in (1.0, CFG)]
