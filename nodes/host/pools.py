"""The workers this process has: one pool per set of devices, and which MODELs still want which weights in it.

ComfyUI keeps and drops MODELs as it likes, so neither a pool nor the weights in it belong to one MODEL. A MODEL claims
its weights when it loads them; weights without a claim leave the workers. Starts nothing by itself.
"""

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TypeAlias

from ...parallel_runtime.checkpoint import ModelSpec
from ...parallel_runtime.devices import Device
from ...parallel_runtime.errors import PoolError
from ...parallel_runtime.pool.pool import LoadResult, Pool

log = logging.getLogger(__name__)
Devices: TypeAlias = tuple[Device, ...]
Weights: TypeAlias = tuple[Devices, ModelSpec]
ALIVE = ("starting", "idle", "busy")


class PoolRegistry:
    """Pools by their devices, claims on weights by pool and file."""

    def __init__(self) -> None:
        self._pools: dict[Devices, Pool] = {}
        self._claims: dict[Weights, weakref.WeakSet[object]] = {}
        self._lock = threading.Lock()
        self._closed_alive = 0
        self._orphans: queue.SimpleQueue[Weights] = queue.SimpleQueue()
        self._sweeper: threading.Thread | None = None

    def pool(self, devices: Devices) -> Pool:
        """The pool of these devices, in this order. Created on first use, started by its first request."""
        with self._lock:
            if devices not in self._pools:
                self._pools[devices] = Pool(devices)
            return self._pools[devices]

    def is_alive(self, devices: Devices) -> bool:
        """Whether the pool of these devices has workers."""
        return devices in self._pools and self._pools[devices].state in ALIVE

    def any_alive(self) -> bool:
        """Whether this process has workers at all."""
        return any(pool.state in ALIVE for pool in self._pools.values())

    def lost_generations(self) -> int:
        """How many sets of workers ended by failing, since the process began; a released one is not lost."""
        ended = sum(pool.generation - (pool.state in ALIVE) for pool in self._pools.values())
        return ended - self._closed_alive

    def load(self, claimant: object, weights: Weights, load: Callable[[Pool], LoadResult]) -> LoadResult:
        """Run `load` on the pool and note that `claimant` wants these weights until it lets go or dies."""
        pool = self.pool(weights[0])
        with self._lock:
            if pool.state not in ALIVE:
                self._close_unclaimed()
            result = load(pool)
            claimants = self._claims.setdefault(weights, weakref.WeakSet())
            if claimant not in claimants:
                claimants.add(claimant)
                weakref.finalize(claimant, self._orphans.put, weights).atexit = False
                self._start_sweeper()
        return result

    def let_go(self, claimant: object, weights: Weights) -> None:
        """`claimant` no longer wants these weights; the last one to say so frees them in the workers."""
        with self._lock:
            self._claims.get(weights, weakref.WeakSet()).discard(claimant)
            self._unload_unclaimed(weights)

    def close_all(self) -> int:
        """End the workers of every pool. Returns how many pools had any. The next request starts fresh ones."""
        with self._lock:
            self._claims.clear()
            return sum(self._close(pool) for pool in self._pools.values())

    def _close_unclaimed(self) -> None:
        """Workers without weights make room for those of another set of devices: they may sit on the same ones."""
        claimed = {devices for (devices, _), claimants in self._claims.items() if len(claimants)}
        for devices, pool in self._pools.items():
            if devices not in claimed and pool.state in ALIVE:  # closing a failed one would forget its failures
                self._close(pool)

    def _close(self, pool: Pool) -> bool:
        alive = pool.state in ALIVE
        self._closed_alive += alive
        pool.close()
        return alive

    def _unload_unclaimed(self, weights: Weights) -> None:
        devices, spec = weights
        if len(self._claims.get(weights, ())) == 0 and self.is_alive(devices):
            self._pools[devices].unload(spec)

    def _start_sweeper(self) -> None:
        """A finalizer may run anywhere, even inside a request to the pool: it only queues, this thread unloads."""
        if self._sweeper is None:
            self._sweeper = threading.Thread(target=self._sweep, name="parallel-dit-sweeper", daemon=True)
            self._sweeper.start()

    def _sweep(self) -> None:
        while True:
            weights = self._orphans.get()
            try:
                with self._lock:
                    self._unload_unclaimed(weights)
            except PoolError as error:
                log.warning("could not unload %s: %s", weights[1].path, error)


POOLS = PoolRegistry()  # the one of this process; never rebound
