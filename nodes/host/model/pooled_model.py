"""One file in one pool: what all MODELs on the same weights stand for.

Owns the weights' identity and size, and when they enter and leave the workers. Whether they are there is the pool's to
say; the plan and the weight deltas are a run's (run_context.py). Knows nothing of ComfyUI's model classes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from ....parallel_runtime.checkpoint import ModelSpec
from ....parallel_runtime.devices import Device
from ....parallel_runtime.errors import PoolError
from ....parallel_runtime.models.specs.found import Found, to_text
from ....parallel_runtime.plan import WEIGHTS, Layout, ParallelPlan
from ....parallel_runtime.planner.automatic import ANY_GPU
from ....parallel_runtime.planner.choose import GRAPHS_LEAVE
from ....parallel_runtime.planner.counted import CountedModel
from ....parallel_runtime.planner.known import known_calibration
from ....parallel_runtime.planner.machine import whole_bytes
from ....parallel_runtime.planner.memory import PlannedMemory, bytes_by_rank, memory_of
from ....parallel_runtime.planner.work import Work
from ....parallel_runtime.pool.pool import Pool
from ....parallel_runtime.pool.status import first_line
from ....parallel_runtime.weight_delta import WeightDeltas
from ....parallel_runtime.wire.replies import MeasureReply
from ..contract.comfyui import comfy
from ..contract.like_host import unlike_host
from ..contract.version import off
from ..panel.progress import prompt_id
from .measures import held_by_host
from .pools import POOLS, Devices, Weights

CROWDED, FULL = 2 / 3, 0.95  # of a GPU's memory: weights of two sets of workers that leave a run its room, or just fit
WEIGHTS_TAKE = 1.1  # times their bytes, as ComfyUI's manager counts
UNCOUNTED = "; what a step computes is not in this figure"


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes that each device gives, of those that the smallest of them has, and of host memory for all together.

    `weights_alone`: what a step takes besides the weights is not known. `fullest`: the device that all of this is of,
    where shares give another one less; "" where all give the same.
    """

    device_bytes: int
    total_bytes: int
    host_bytes: int = 0
    weights_alone: bool = False
    fullest: str = ""

    @property
    def text(self) -> str:
        """The line on a node."""
        host = f", and {self.host_bytes / 1e9:.1f} GB of host memory" if self.host_bytes else ""
        more = UNCOUNTED if self.weights_alone else ""
        digits = ".1f" if self.device_bytes >= 5e7 else ".2g"  # a tiny file is not 0.0 GB
        needed, there = f"{self.device_bytes / 1e9:{digits}}", f"{self.total_bytes / 1e9:.1f}"
        if self.fullest:
            share = f"{needed} of {there} GB on {self.fullest}, the fullest device{host}{more}"
        else:
            share = f"{needed} of {there} GB on each device{host}{more}"
        return f"weights: about {share}" if self.weights_alone else f"memory: about {share}"


def needed_memory(
    plan: ParallelPlan,
    devices: Sequence[Device],
    sizes: WeightSizes,
    model: CountedModel | None,
    work: Work | None,
    *,
    held: ParallelPlan,
) -> DeviceMemory:
    """What `plan` takes of the device that it fills most, for `work`; `model` and `work` None: of weights alone. `held`
    is the plan with the shares by which weights are loaded."""
    used, layout, alone = devices[: plan.ranks], held.layout, model is None or work is None
    if model is None or work is None:
        part = -(-sizes.total // (layout.shards * layout.stages))
        visiting = 2 * sizes.biggest_block if layout.shards > 1 or layout.offloaded else 0
        here, host = (visiting, part) if layout.offloaded else (part + visiting, 0)
        shared = 0 if layout.offloaded else part
        memory = PlannedMemory(weights=here, activations=0, buffers=0, runtime=0, host_bytes=host, shared=shared)
    else:
        rates = known_calibration("cpu" if used[0].kind == "cpu" else ANY_GPU).rates
        memory = memory_of(model, work, plan, rates, num_ranks=len(devices))
    needs, totals = bytes_by_rank(memory, plan, held=held), whole_bytes(used)
    if len(set(needs)) == 1:
        here, total, fullest = needs[0], min(totals), ""
    else:
        here, total, device = max(zip(needs, totals, used, strict=True), key=lambda row: row[0] / row[1])
        fullest = str(device)
    host = memory.host_bytes * (layout.shards * layout.stages if alone else plan.ranks)
    return DeviceMemory(
        device_bytes=round(here), total_bytes=total, host_bytes=round(host), weights_alone=alone, fullest=fullest
    )


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WeightSizes:
    """Bytes of all weights as a rank keeps them, and of the biggest block."""

    total: int
    biggest_block: int


@dataclass(kw_only=True, eq=False)
class PooledModel:
    """A handle on weights in a pool. Cheap: starts and loads nothing. Nothing of it changes but by `take_plan`.

    `plan` is one that the weights serve as they lie; `shares_tokens`, whether ranks can share an image of the model;
    `rounding_attention` names the inexact attention kernel by which ComfyUI computes it here, "" for an exact one;
    `widened_formats` are those of the file that its device does not multiply in; `keeps_state`, whether its class keeps
    something from call to call of a run; `found_by`, what the plan of its class was proven by when it was found, "" for
    one that people wrote.
    """

    devices: Devices
    spec: ModelSpec
    plan: ParallelPlan
    sizes: WeightSizes
    num_heads: int
    shares_tokens: bool = True
    rounding_attention: str = ""
    widened_formats: tuple[str, ...] = ()
    keeps_state: bool = False
    found_by: str = ""

    @cached_property
    def pool(self) -> Pool:
        """The pool of our devices; the same object for every model on them, for as long as the process lives."""
        return POOLS.pool(self.devices)

    @property
    def in_callback(self) -> bool:
        """Whether a callback of a request to our workers runs in this thread: they take no other until it is done."""
        return POOLS.asked_here(self.devices)

    @property
    def started(self) -> bool:
        """Whether our devices have workers now."""
        return POOLS.is_alive(self.devices)

    @property
    def measured(self) -> list[MeasureReply]:
        """What the present set of workers measured of its devices, by rank; [] when it has not."""
        return POOLS.measured(self.devices)

    @property
    def unlike_host(self) -> list[str]:
        """Warnings about what the present set of workers imported otherwise than this process."""
        return POOLS.unlike(self.devices)

    @property
    def weights(self) -> Weights:
        """What the registry knows our weights by. Plans that differ in the number of ranks alone share them."""
        return self.devices, self.spec, self.plan.layout.kind

    def holds(self, plan: ParallelPlan) -> bool:
        """Whether the workers that live now hold our weights as `plan` needs them."""
        return self.started and self.pool.holds(self.spec, plan)

    def holds_cut(self, plan: ParallelPlan) -> bool:
        """Whether the weights that the workers hold are cut as by the shares of `plan`."""
        held = self.pool.layout_of(self.spec, plan)
        return held is not None and all(held.part_of(rank) == plan.layout.part_of(rank) for rank in range(plan.ranks))

    def held_layout(self, plan: ParallelPlan) -> Layout | None:
        """How the workers that live now hold our weights, on however many ranks; None where not, or only as
        plans of another kind need them."""
        return self.pool.layout_of(self.spec, plan) if self.started else None

    def bytes_on(self, device: torch.device, layout: Layout) -> int:
        """Bytes of weights that the ranks of a layout keep on `device`; every rank on the CPU counts for the CPU."""
        if layout.offloaded and device.type != "cpu":
            return 0  # they lie in host memory; the blocks that visit are `visiting_bytes`
        there = (rank for rank, each in enumerate(self.devices[: layout.ranks]) if is_on(each, device))
        return sum(math.ceil(self.sizes.total * layout.part_of(rank)) for rank in there)

    def ranks_on(self, device: torch.device, plan: ParallelPlan) -> int:
        """How many of the plan's ranks compute on `device`."""
        return sum(is_on(rank, device) for rank in self.devices[: plan.ranks])

    def visiting_bytes(self, plan: ParallelPlan) -> int:
        """Bytes of the blocks that a rank has whole only while it computes them: the present one and the next."""
        layout = plan.layout
        return 2 * self.sizes.biggest_block if layout.shards > 1 or layout.offloaded else 0

    def ensure(
        self,
        plan: ParallelPlan,
        deltas: WeightDeltas,
        *,
        progress: Callable[[int, int], None],
        check_cancelled: Callable[[], None],
    ) -> dict[int, float]:
        """Have the weights in the workers as `plan` needs them, changed by just these deltas.

        Starts the workers where there are none. Returns seconds by rank that had to load. Raises `ValueError` when the
        file was changed, `PoolError` when a worker fails, and whatever `check_cancelled` raises.
        """
        rank_load_s: dict[int, float] = {}

        def load(pool: Pool) -> None:
            self._make_room(plan)
            if len(self.devices) > 1:
                POOLS.measured(self.devices, partial(Pool.measure_devices, check_cancelled=check_cancelled))
            result = pool.load(self.spec, plan, progress=progress, check_cancelled=check_cancelled)
            rank_load_s.update(result.rank_load_s)
            if warnings := unlike_host(self.devices, result.ranks):
                POOLS.note_unlike(self.devices, warnings)

        POOLS.note_use(self.weights, prompt_id())
        if not self.holds(plan):
            self.spec.refuse_changed()
            POOLS.load(self.weights, plan, load, crowds=partial(self._is_crowded_by, plan))
        else:
            self._make_room(plan)
        self.pool.load(self.spec, plan, deltas=deltas, check_cancelled=check_cancelled)
        return rank_load_s

    def take_plan(
        self,
        found: Found,
        plan: ParallelPlan,
        deltas: WeightDeltas,
        *,
        progress: Callable[[int, int], None],
        check_cancelled: Callable[[], None],
    ) -> None:
        """Have all MODELs on these weights share their tokens by another plan that was found for their class, and the
        weights in the workers for it, as a run under `plan` needs them. Raises as `ensure`."""
        before, plan = self.weights, POOLS.plan_of_load(self.weights, plan)
        self.unload(plan)
        self.spec, self.found_by = replace(self.spec, found=to_text(found.spec)), found.told
        POOLS.rename(before, self.weights)
        self.ensure(plan, deltas, progress=progress, check_cancelled=check_cancelled)

    def give_back(self, device: torch.device, *, graphs: bool = False) -> None:
        """A sampling run has ended: ComfyUI gets what ranks on its GPU, `device`, only keep there for later, but
        `graphs` of blocks, for the next run, where enough is free or no rank is on that GPU; and what a class kept
        between calls, and blocks of spread weights that are whole, is freed on every rank.

        Never raises PoolError: a run that failed has an error of its own to tell, and of one that did not the result is
        there. Workers that fail in this are logged; the next run starts others.
        """
        shared = [rank for rank in self.devices if device.type != "cpu" and is_on(rank, device)]
        on_gpus = any(rank.kind != "cpu" for rank in self.devices)
        graphs, keeps = graphs and on_gpus, self.keeps_state or (on_gpus and self.plan.weights != WEIGHTS[0])
        if not (shared or keeps or graphs) or not self.started:
            return
        try:
            graphs = graphs and (not shared or self._has_room_for_graphs(device))
            self.pool.give_back(shared, of_run=keeps, graphs=graphs)
        except PoolError as error:
            log.warning("parallel workers failed after a sampling run: %s", first_line(error))

    def cached_on(self, device: torch.device) -> int:
        """Bytes that the ranks on a GPU only keep there for later, as they last said; what else a call takes there is
        among them, as blocks that stay whole go for it."""
        if device.type == "cpu" or not self.started:
            return 0
        of_ranks = zip(self.devices, self.pool.memory(), strict=False)
        return sum(
            said.get("reserved_bytes", 0) - said.get("allocated_bytes", 0) + said.get("staying_bytes", 0)
            for rank, said in of_ranks
            if is_on(rank, device)
        )

    def _is_crowded_by(self, plan: ParallelPlan, root: Any, its_plan: ParallelPlan, now: bool) -> bool:  # noqa: ANN401
        """Whether a GPU has no room for our weights with those of another set of workers; `now`: of this prompt, too,
        whose weights may leave less of it to what is computed."""
        if self.devices[0].kind == "cpu":  # of one memory, where ranks map files
            return False
        other, part = root.model.pooled, FULL if now else CROWDED
        for device, whole in zip(self.devices, whole_bytes(self.devices), strict=True):
            if device in other.devices:
                held = self._kept_by(device, plan.layout) + other._kept_by(device, its_plan.layout)
                if WEIGHTS_TAKE * held + self.visiting_bytes(plan) > part * whole:
                    return True
        return False

    def _kept_by(self, device: Device, layout: Layout) -> int:
        """Bytes of weights that the rank on one of our devices keeps there."""
        rank = self.devices.index(device)
        kept = 0.0 if layout.offloaded or rank >= layout.ranks else layout.part_of(rank)
        return math.ceil(self.sizes.total * kept)

    def _make_room(self, plan: ParallelPlan) -> None:
        """Have ComfyUI give up what its process holds on the ranks' GPUs where that leaves no room for a run of `plan`,
        and host memory that it has pinned where ranks want it for weights.

        Its manager has made room on the GPU that it loads MODELs to, and takes what torch keeps there for ComfyUI
        itself for free. On others it may hold a text encoder or a VAE, as where a node chose the GPU.
        """
        gpus = sorted({rank.index for rank in self.devices[: plan.ranks] if rank.kind == "cuda" and not rank.machine})
        if not gpus or off("room"):
            return
        management, held = comfy.model_management, self.held_layout(plan)
        if plan.layout.offloaded and held is None and hasattr(management, "ensure_pin_budget"):
            management.ensure_pin_budget(held_by_host(plan, self.devices, self.sizes.total))
        main = management.get_torch_device()
        for gpu in (torch.device("cuda", index) for index in gpus if index != (main.index or 0)):
            listed = [each.model for each in management.current_loaded_models if each.device == gpu]
            if any(model is not None and model.offload_device.type == "cpu" for model in listed):
                missing = self.bytes_on(gpu, plan.layout) - (0 if held is None else self.bytes_on(gpu, held))
                blocks = self.visiting_bytes(plan) * self.ranks_on(gpu, plan) if held is None else 0
                needed = WEIGHTS_TAKE * (max(0, missing) + blocks) + management.minimum_inference_memory()
                management.free_memory(needed - self.cached_on(gpu), gpu)
        if held is None:
            management.soft_empty_cache()

    def _has_room_for_graphs(self, device: torch.device) -> bool:
        """Whether so much of ComfyUI's GPU is free, or will be without what the ranks there only cache, that what
        follows a run, a VAE above all, does without the memory of graphs."""
        try:
            free = comfy.model_management.get_free_memory(device) + self.cached_on(device)
            return bool(free >= GRAPHS_LEAVE)
        except RuntimeError:  # of a driver that a failed run has left so: its error is the one to be seen
            return False

    def unload(self, plan: ParallelPlan) -> None:
        """Free the weights in the workers; nothing when they are not there."""
        POOLS.unload(self.weights, plan)


def is_on(rank: Device, device: torch.device) -> bool:
    """Whether a rank computes on this process's `device`; of CPUs there is one."""
    if rank.machine or rank.kind != device.type:
        return False
    return rank.kind == "cpu" or rank.index == (device.index or 0)
