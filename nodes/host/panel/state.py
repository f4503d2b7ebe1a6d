"""What the panel shows, in one JSON: the pools, the step that runs, which reports there are, what the doctor found.

Owns gathering it and telling every browser tab when it has changed. It is asked of the pools, which never wait, a few
times a second: so code that changes a pool needs not know that there is a panel. Holds no path and no process id.
"""

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import Mapping

from ....parallel_runtime import VERSION
from ....parallel_runtime.devices import parse_devices
from ....parallel_runtime.planner.machine import calibration_identity
from ....parallel_runtime.pool.pool import Pool
from ....parallel_runtime.redact_paths import redact_paths_in
from ....parallel_runtime.report.environment import describe_devices
from ..contract.comfyui import NodeState, PromptServer, get_progress_state
from ..contract.queued_prompt import prompt_runs
from ..contract.version import off, told_of_comfyui
from ..model.pools import POOLS, Devices
from .live_times import LIVE
from .machines import MACHINES
from .report_history import HISTORY, origin_of
from .tuning import TuneButton

EVENT = "parallel_dit.state"
log = logging.getLogger(__name__)
INTERVAL_S = 0.25
SHOWN = ("state", "generation", "models", "plans", "peer_access", "last_failure", "failed_rank")
WORKING = ("busy", "compiling")


class PanelState:
    """The state, its revision, and what runs in the background. `told` are the tabs: `send(event, state)`."""

    def __init__(self) -> None:
        self.session = uuid.uuid4().hex
        self.action: str | None = None
        self.doctor: dict = {"state": "never"}
        self.tune = TuneButton()
        self._revision = 0
        self._last: dict = {}
        self._sampling: dict[Devices, tuple[str, str]] = {}
        self._pace = StepEta()
        self._calibration: tuple | None = None
        self._calibrations = 0

    def state(self) -> dict:
        """Everything as of now. The revision grows with each change, so that an old answer never hides a newer one."""
        run = _running_node()
        if run is not None:
            run |= self._pace.of(run)
        state = {
            "version": VERSION,
            "comfyui": told_of_comfyui(),
            "devices": _available(),
            "pools": [self._pool(pool, run) for pool in POOLS.all()],
            "machines": MACHINES.described(),
            "offered": MACHINES.offered(),
            "run": run,
            "reports": HISTORY.entries(),
            "action": self.action,
            "doctor": self.doctor,
            "tune": self.tune.state(),
            "calibrations": self._calibrated(),
        }
        state = redact_paths_in(state)  # what a page is told goes into screenshots
        if state != self._last:
            self._last = state
            self._revision += 1
        return state | {"session": self.session, "revision": self._revision}

    def _calibrated(self) -> int:
        """How often the devices' calibrations were seen to change: plans that were told before may be others now."""
        now = calibration_identity()
        if now != self._calibration:
            self._calibration = now
            self._calibrations += 1
        return self._calibrations

    async def watch(self) -> None:
        """Tell all tabs of each change, for ever: a look that fails, as something ends under it, is not the last."""
        told, failed = 0, ""
        while True:
            try:
                state = self.state()
            except Exception as error:  # whatever it was: tabs that hear nothing any more show what was
                if repr(error) != failed:
                    log.warning("the panel's state could not be told: %r", error, exc_info=True)
                failed = repr(error)
            else:
                if state["revision"] != told:
                    told = state["revision"]
                    PromptServer.instance.send_sync(EVENT, state)
            await asyncio.sleep(INTERVAL_S)

    def _pool(self, pool: Pool, run: dict | None) -> dict:
        status = pool.status()
        if status["state"] in WORKING and not prompt_runs():
            status["state"] = "idle"  # a cancelled request is settled by the next one, and until then not forgotten
        shown = {key: status[key] for key in SHOWN}
        devices = _described(pool.devices)
        shown["ranks"] = [
            {"rank": rank, "device": str(device)} | {key: value for key, value in about.items() if key != "name"}
            for rank, (device, about) in enumerate(zip(pool.devices, devices, strict=True))
        ]
        for rank, memory in zip(shown["ranks"], status["memory"], strict=False):
            rank["memory"] = memory
        shown["sampling"] = self._is_sampling(pool, status["state"], run)
        if shown["sampling"]:
            fractions = LIVE.fractions(pool.devices, status["spent"])
            for rank, known in zip(shown["ranks"], fractions, strict=True):
                rank |= {} if known is None else {"shares": known}
        return shown

    def _is_sampling(self, pool: Pool, state: str, run: dict | None) -> bool:
        """Whether the step that runs is this pool's: it has been busy in that run, and may rest between two steps."""
        if run is None or "steps" not in run:
            return False
        key = (run["prompt"], run["node"])
        if state in WORKING:
            self._sampling[pool.devices] = key
        return state in (*WORKING, "idle") and self._sampling.get(pool.devices) == key


def _running_node() -> dict | None:
    """The node that executes: its prompt, graph and class; of several steps, the one ComfyUI's progress bar is at."""
    if off("texts") or not prompt_runs():
        return None  # a cancelled node stays marked as running
    registry = get_progress_state()
    running = [each for each in list(registry.nodes.items()) if each[1]["state"] is NodeState.Running]
    if not running:
        return None
    node, progress = max(running, key=lambda each: each[1]["max"] > 1)
    run = {"prompt": registry.prompt_id, "node": str(node), **origin_of(registry.prompt_id)}
    if registry.dynprompt.has_node(node):
        run["class"] = registry.dynprompt.get_node(node)["class_type"]
    if progress["max"] > 1:
        run |= {"step": int(progress["value"]), "steps": int(progress["max"])}
    return run


class StepEta:
    """How long a step of the run takes, as seen from here: seconds from its first to its last step until now."""

    def __init__(self) -> None:
        self._key: tuple = ()
        self._first = self._last = 0
        self._first_s = self._last_s = 0.0

    def of(self, run: Mapping) -> dict[str, float]:
        """`step_s` and `left_s`, once two steps have ended. They change with a step, not with the time."""
        if "step" not in run:
            return {}
        key, now_s = (run["prompt"], run["node"], run["steps"]), time.monotonic()
        if key != self._key or run["step"] < self._last or self._first == 0:
            self._key, self._first, self._first_s = key, run["step"], now_s
            self._last, self._last_s = run["step"], now_s
        elif run["step"] != self._last:
            self._last, self._last_s = run["step"], now_s
        if self._first == 0 or self._last == self._first:
            return {}
        step_s = (self._last_s - self._first_s) / (self._last - self._first)
        return {"step_s": round(step_s, 4), "left_s": round(step_s * (run["steps"] - run["step"]), 2)}


@functools.cache
def _described(devices: Devices) -> list[dict]:
    return describe_devices(devices)


@functools.cache
def _available() -> list[str]:
    """What `all` means on this machine."""
    return [str(device) for device in parse_devices("all").devices]
