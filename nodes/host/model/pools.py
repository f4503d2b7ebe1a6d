"""The workers this process has: one pool per set of devices, and which weights they hold for which MODEL.

ComfyUI keeps and drops MODELs as it likes, so neither a pool nor the weights in it belong to one MODEL. All MODELs on
the same weights are clones of one root, so ComfyUI's memory manager sees one model. The root of weights that were
loaded is kept alive here, also without a MODEL: an edited graph finds the weights still there, and the manager can
evict them. It looks at one card alone, and its cache may keep MODELs of earlier prompts: where a set of workers loads,
weights that another set holds on its devices leave if both crowd a device. What the workers hold is asked of the
pool each time, which may have evicted it. Starts nothing by itself.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ....parallel_runtime.checkpoint import ModelSpec
from ....parallel_runtime.devices import Device
from ....parallel_runtime.errors import PoolError
from ....parallel_runtime.machines.machine import Machine
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.machine import overlap
from ....parallel_runtime.pool.pool import Pool
from ....parallel_runtime.pool.ranks import deadline_from
from ....parallel_runtime.pool.status import first_line
from ....parallel_runtime.wire.replies import MeasureReply

if TYPE_CHECKING:
    from .patcher import RemotePatcher

log = logging.getLogger(__name__)
Devices: TypeAlias = tuple[Device, ...]
Weights: TypeAlias = tuple[Devices, ModelSpec, tuple[int, bool, int, int]]  # the last is the `kind` of a plan's layout
ALIVE = ("starting", "idle", "loading", "compiling", "busy")


def _machines_of(devices: Devices) -> Sequence[Machine]:
    """The further machines that have these devices."""
    from ..panel.machines import MACHINES  # here: it needs ComfyUI, and tells on nodes what runs with pools

    return MACHINES.named(devices)


class PoolRegistry:
    """Pools by their devices; by weights, the root of their MODELs and the plan they were last loaded for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[Devices, Pool] = {}
        self._roots: weakref.WeakValueDictionary[Weights, RemotePatcher] = weakref.WeakValueDictionary()
        self._loaded: dict[Weights, ParallelPlan] = {}
        self._kept: dict[Weights, RemotePatcher | None] = {}  # those of `_loaded`, and of what left since the last load
        self._cut_by: dict[Weights, tuple[int, ...] | None] = {}  # the shares that SP Config had then
        self._used_by: dict[Weights, str] = {}  # ComfyUI's id of the prompt that used them last
        self._changed: set[ModelSpec] = set()  # files as they were read, and are not now
        self._changes = 0
        self._last_loaded: Weights | None = None
        self._measured: dict[Devices, tuple[int, list[MeasureReply]]] = {}
        self._unlike: dict[Devices, tuple[int, list[str]]] = {}

    def pool(self, devices: Devices) -> Pool:
        """The pool of these devices, in this order. Created on first use, started by its first request."""
        with self._lock:
            return self._pool(devices)

    def all(self) -> list[Pool]:
        """Every pool there is, with or without workers. Never waits."""
        return list(self._pools.values())

    def is_alive(self, devices: Devices) -> bool:
        """Whether the pool of these devices has workers."""
        return devices in self._pools and self._pools[devices].state in ALIVE

    def asked_here(self, devices: Devices) -> bool:
        """Whether this thread is in a callback of a request to the pool of these devices. Takes no lock: a MODEL may be
        collected, which asks this, while one is held."""
        pool = self._pools.get(devices)
        return pool is not None and pool.asked_here

    def has_something_to_release(self) -> bool:
        """Whether any pool has workers, or remembers failures that may keep it from starting."""
        return any(pool.state != "stopped" for pool in self.all())

    def lost_generations(self) -> int:
        """How many sets of workers ended by failing, since the process began; a released one is not lost."""
        pools = self.all()
        return sum(pool.generation - pool.released - (pool.state in ALIVE) for pool in pools)

    def root(self, weights: Weights, make: "Callable[[], RemotePatcher]") -> "RemotePatcher":
        """The one MODEL that all MODELs on these weights are clones of; made when there is none."""
        _, spec, _ = weights
        self._changed.discard(spec)  # read anew
        root = self._roots.get(weights)
        if root is None:
            root = self._roots[weights] = make()
        return root

    def is_wanted(self, weights: Weights) -> bool:
        """Whether a MODEL on these weights is left; the root alone is none."""
        root = self._roots.get(weights)
        return root is not None and bool(root.clones)

    @property
    def last_loaded(self) -> "RemotePatcher | None":
        """The root of the MODELs on the weights that were loaded last; None where nothing was, or it was released."""
        return None if self._last_loaded is None else self._roots.get(self._last_loaded)

    def note_use(self, weights: Weights, prompt: str) -> None:
        """A run of the prompt with this id uses the weights, whether they must be loaded or not."""
        self._used_by[weights] = prompt

    def load(
        self,
        weights: Weights,
        plan: ParallelPlan,
        load: Callable[[Pool], None],
        *,
        crowds: "Callable[[RemotePatcher, ParallelPlan, bool], bool]" = lambda root, plan, now: False,
    ) -> None:
        """Run `load` on the pool. First, to make room, weights that no MODEL wants any more leave the workers, and
        those in another set of workers that crowd a device with these: `crowds` says so of their root, the plan that
        they were loaded for, and whether this prompt used them.

        Nothing is locked while it loads, nor while another pool is waited for.
        """
        devices, *_ = weights
        with self._lock:
            leaving = [
                (other, its_plan)
                for other, its_plan in self._loaded.items()
                if not self.is_wanted(other)
                or self._share_devices(other, weights)
                and crowds(self._roots[other], its_plan, self._used_by.get(other) == self._used_by.get(weights))
            ]
            for other, _ in leaving:
                del self._loaded[other]
        for other, its_plan in leaving:
            self._free(other, its_plan)
        with self._lock:
            idle = [] if self.is_alive(devices) else self._idle()
        self._close(idle)
        with self._lock:
            pool, self._last_loaded = self._pool(devices), weights
            self._loaded[weights], self._kept[weights] = plan, self._roots.get(weights)
            self._forget_left()
        load(pool)

    def file_changes(self) -> int:
        """How often the file of a MODEL was found written to, or gone, since it was read; never less than before, so
        that what runs again for it does so once."""
        for weights in list(self._roots):
            _, spec, _ = weights
            try:
                spec.refuse_changed()
            except ValueError:
                if spec not in self._changed and self.is_wanted(weights):
                    self._changed.add(spec)
                    self._changes += 1
            else:
                self._changed.discard(spec)
        return self._changes

    def unload(self, weights: Weights, plan: ParallelPlan) -> None:
        """Free these weights in the workers, on however many ranks they lie; nothing when they are not there, or of
        another layout than `plan` needs."""
        with self._lock:
            self._loaded.pop(weights, None)
        self._free(weights, plan)

    def plan_of_load(self, weights: Weights, plan: ParallelPlan) -> ParallelPlan:
        """The plan that these weights were last loaded for; `plan` where they were not."""
        return self._loaded.get(weights, plan)

    def rename(self, weights: Weights, to: Weights) -> None:
        """The MODELs on these weights have others of the same file from now on. Those must not be in the workers."""
        left = None
        with self._lock:
            root = self._roots.pop(weights, None)
            if root is not None and not self.is_wanted(to):
                self._roots[to] = root
                left = self._loaded.pop(to, None)  # for MODELs that are gone
            self._loaded.pop(weights, None)
            if weights in self._cut_by:
                self._cut_by[to] = self._cut_by.pop(weights)
        if left is not None:
            self._free(to, left)

    def is_cut_by(self, weights: Weights, shares: tuple[int, ...] | None) -> bool:
        """Whether SP Config had these shares when the weights were loaded, or `note_cut` was told so since."""
        return self._cut_by.get(weights, shares) == shares

    def note_cut(self, weights: Weights, shares: tuple[int, ...] | None) -> None:
        """The weights lie as these shares of SP Config cut them."""
        self._cut_by[weights] = shares

    def measured(
        self, devices: Devices, measure: Callable[[Pool], list[MeasureReply]] | None = None
    ) -> list[MeasureReply]:
        """What was measured of these devices, once a set of workers: by `measure` if need be, without it maybe []."""
        pool = self.pool(devices)
        generation, found = self._measured.get(devices, (0, []))
        if self.is_alive(devices) and generation == pool.generation:
            return found
        if measure is None:
            return []
        found = measure(pool)  # which starts the workers of the generation that is noted here
        self._measured[devices] = pool.generation, found
        return found

    def note_unlike(self, devices: Devices, warnings: list[str]) -> None:
        """Note how the present set of workers differs from this process."""
        self._unlike[devices] = self.pool(devices).generation, warnings

    def unlike(self, devices: Devices) -> list[str]:
        """What was noted of the present set of workers."""
        generation, warnings = self._unlike.get(devices, (0, []))
        return warnings if generation == self.pool(devices).generation else []

    def close_all(self) -> None:
        """End the workers of every pool; one that failed too often may start again. The next request starts others."""
        with self._lock:
            self._last_loaded = None
            self._loaded.clear()
            pools = list(self._pools)
        self._close(pools)

    def forget_left(self) -> None:
        """Keep no root of weights that have left. To be asked for by what runs in a prompt, in whose thread ComfyUI's
        manager goes through its models: a root that dies takes itself from that list."""
        with self._lock:
            self._forget_left()

    def close_without(self, machines: Collection[str]) -> None:
        """End the workers of pools that have devices of further machines other than these."""
        with self._lock:
            pools = list(self._pools)
        self._close([each for each in pools if {device.machine for device in each}.difference(machines, {""})])

    def _forget_left(self) -> None:
        """Keep no root of weights that have left, and the file that it has mapped. Not done as they leave: ComfyUI's
        manager still reads the root that it unloads."""
        for gone in self._kept.keys() - self._loaded:
            del self._kept[gone]
            self._used_by.pop(gone, None)

    def _pool(self, devices: Devices) -> Pool:
        if devices not in self._pools:
            further = any(device.machine for device in devices)
            self._pools[devices] = Pool(
                devices,
                deadline_s=deadline_from(os.environ),
                machines=(lambda _: _machines_of(devices)) if further else None,
                overlap=partial(overlap, devices),
            )
        return self._pools[devices]

    @staticmethod
    def _share_devices(one: Weights, other: Weights) -> bool:
        """Whether they are for two sets of workers that have devices in common."""
        (devices, *_), (others, *_) = one, other
        return devices != others and not set(devices).isdisjoint(others)

    def _free(self, weights: Weights, plan: ParallelPlan) -> None:
        """Have the workers free these weights, once they take the request: nothing is to be locked meanwhile.

        Never raises PoolError: workers that failed have freed everything, and where ComfyUI's manager asks, an error
        would end the thread that runs its prompts.
        """
        devices, spec, _ = weights
        try:
            # on however many ranks: ComfyUI's manager may know them by a MODEL that has more
            if self.is_alive(devices) and self._pools[devices].layout_of(spec, plan) is not None:
                self._pools[devices].unload(spec, plan)
        except PoolError as error:
            log.warning("parallel workers failed as they were to free weights: %s", first_line(error))

    def _idle(self) -> list[Devices]:
        """Workers that hold no weights and make room for those of another set of devices, which may be the same."""
        used = {devices for (devices, spec, _), plan in self._loaded.items() if self._pools[devices].holds(spec, plan)}
        # closing a failed pool would forget its failures
        return [devices for devices in self._pools if devices not in used and self.is_alive(devices)]

    def _close(self, pools: Collection[Devices]) -> None:
        """End their workers, once each has come to its end: nothing is to be locked meanwhile."""
        for devices in pools:
            self._pools[devices].close()


POOLS = PoolRegistry()  # the one of this process; never rebound
