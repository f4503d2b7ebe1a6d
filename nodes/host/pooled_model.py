"""One file, in one pool, under one plan: what a MODEL of ours stands for.

Owns whether the weights are in the present set of workers, and the record of the calls made while someone listens.
Knows nothing of ComfyUI's model classes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...parallel_runtime.checkpoint import ModelSpec
from ...parallel_runtime.devices import Device
from ...parallel_runtime.patch import PRISTINE, PatchSet
from ...parallel_runtime.plan import ParallelPlan
from ...parallel_runtime.pool.pool import Pool, StepResult
from .pools import POOLS, Devices


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the model, as it was measured. Seconds; `ranks` are the workers' own reports, by rank."""

    batch: int
    image_tokens: int
    text_tokens: int
    wall_s: float
    ranks: list[dict]


class PooledModel:
    """A handle on weights in a pool, and the plan and patches of the run that uses them now.

    Cheap: starts and loads nothing.
    """

    def __init__(self, devices: Devices, spec: ModelSpec, plan: ParallelPlan, parameter_bytes: int) -> None:
        self.devices = devices
        self.spec = spec
        self.plan = plan
        self.parameter_bytes = parameter_bytes
        self.patches = PRISTINE
        self._calls: list[Call] | None = None

    @property
    def pool(self) -> Pool:
        """The pool of our devices; the same object for every model on them."""
        return POOLS.pool(self.devices)

    @property
    def started(self) -> bool:
        """Whether our devices have workers now."""
        return POOLS.is_alive(self.devices)

    @property
    def loaded(self) -> bool:
        """Whether the workers that live now hold our weights."""
        return POOLS.is_loaded((self.devices, self.spec))

    def bytes_on(self, device: torch.device) -> int:
        """Bytes of weights that our ranks keep on `device`; every rank on the CPU counts for the CPU."""
        return self.parameter_bytes * sum(_is_on(rank, device) for rank in self.devices)

    def load(self, *, progress: Callable[[int, int], None], check_cancelled: Callable[[], None]) -> None:
        """Have the weights in the workers, starting them first where there are none.

        Raises `ValueError` when the file was changed, `PoolError` when a worker fails, and whatever `check_cancelled`
        raises.
        """
        self.spec.refuse_changed()
        POOLS.load(
            (self.devices, self.spec),
            lambda pool: pool.load(self.spec, progress=progress, check_cancelled=check_cancelled),
        )

    def patch(self, patches: PatchSet, check_cancelled: Callable[[], None]) -> None:
        """Have the weights changed by just these patches, before the first step asks for it. Raises as `load`."""
        self.patches = patches
        self.pool.patch(self.spec, patches, check_cancelled=check_cancelled)

    def unload(self) -> None:
        """Free the weights in the workers; nothing when they are not there."""
        POOLS.unload((self.devices, self.spec))

    def step(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        out_channels: int,
        options: Mapping[str, object],
        check_cancelled: Callable[[], None],
    ) -> torch.Tensor:
        """One call of the transformer; `tensors` as `conditioning.step_tensors` makes them.

        Returns (B, S_img, out_channels) on the CPU, in the dtype of `tensors["img"]`. Raises `PoolError` when a
        worker fails, `ValueError` for shapes the model cannot take, and whatever `check_cancelled` raises.
        """
        img = tensors["img"]
        batch, image_tokens, _ = img.shape
        result = self.pool.step(
            self.spec,
            self.plan,
            tensors,
            out_shape=(batch, image_tokens, out_channels),
            out_dtype=img.dtype,
            options=options,
            patches=self.patches,
            check_cancelled=check_cancelled,
        )
        self._record(result, batch, image_tokens, tensors["txt"].shape[1])
        return result.out

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Collect the calls made in the block, in order."""
        self._calls = calls = []
        try:
            yield calls
        finally:
            self._calls = None

    def _record(self, result: StepResult, batch: int, image_tokens: int, text_tokens: int) -> None:
        if self._calls is not None:
            self._calls.append(
                Call(
                    batch=batch,
                    image_tokens=image_tokens,
                    text_tokens=text_tokens,
                    wall_s=result.wall_s,
                    ranks=result.ranks,
                )
            )


def _is_on(rank: Device, device: torch.device) -> bool:
    if rank.kind != device.type:
        return False
    return rank.kind == "cpu" or rank.index == (device.index or 0)
