"""What the panel's buttons do: release, restart, the doctor, tune, no more machines. One at a time, in the background.

Owns the order of things. Cancelling the running prompt is ComfyUI's own, ending and starting workers the pools'.
"""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .... import parallel_runtime
from ....parallel_runtime.daemon_futures import in_daemons
from ....parallel_runtime.devices import STOCK_NODES, missing_system
from ....parallel_runtime.errors import PoolError
from ....parallel_runtime.pool.status import first_line
from ..contract.comfyui import PromptServer, comfy_nodes
from ..model.pools import ALIVE, POOLS
from ..model.source import this_comfyui
from ..proof.tuning import TuningRequest
from .machines import MACHINES
from .state import PanelState

PACK = Path(parallel_runtime.__file__).resolve().parents[1]
DOCTOR = ("parallel_runtime", "doctor", "--json")
TIED = "parallel_runtime.process.lifeline"  # runs a module that ends with ComfyUI
DOCTOR_LIMIT_S = 300.0
CANCEL_LIMIT_S = 30.0  # a step may take that long; what hangs longer is ended with its workers
POLL_S = 0.05

log = logging.getLogger(__name__)


class BusyError(RuntimeError):
    """Another action is under way; the message names it."""


class Actions:
    """The five, by name. Each returns as soon as it is under way; the board tells how it goes."""

    def __init__(self, panel_state: PanelState) -> None:
        self._panel_state = panel_state
        self._task: asyncio.Task | None = None

    def begin(self, name: str) -> None:
        """Start one of routes.py's `ACTIONS`. Raises `BusyError` while one is under way."""
        threads = {"release": _release, "restart": _restart, "stop_listening": _stop_listening}
        self._begin(name, self._doctor if name == "doctor" else lambda: _in_a_daemon(threads[name]))

    def tune(self, asked: TuningRequest) -> None:
        """Try plans of the loaded model. Raises `BusyError` while an action is under way, or a prompt."""
        if PromptServer.instance.prompt_queue.currently_running:
            raise BusyError("a prompt is under way; wait until it has ended")
        tune = self._panel_state.tune
        self._begin("tune", lambda: _in_a_daemon(tune.work(asked)))

    def _begin(self, name: str, work: Callable) -> None:
        if self._panel_state.action is not None:
            raise BusyError(f"{self._panel_state.action} is under way; wait until it has ended")
        self._panel_state.action = name
        self._task = asyncio.get_running_loop().create_task(self._run(work))

    async def _run(self, work: Callable) -> None:
        try:
            await work()
        finally:
            self._panel_state.action = None

    async def _doctor(self) -> None:
        self._panel_state.doctor = {"state": "running"}
        began_s = time.monotonic()
        found = await _examine()
        self._panel_state.doctor = found | {"ended": round(time.time()), "took_s": round(time.monotonic() - began_s, 1)}


def _in_a_daemon(work: Callable[[], None]) -> asyncio.Future[None]:
    """In a thread that Ctrl-C does not wait for, as asyncio's are: a tune takes minutes."""
    (future,) = in_daemons([work], at_once=1)
    return asyncio.wrap_future(future)


def _release() -> None:
    _cancel_prompt()
    POOLS.close_all()


def _restart() -> None:
    """Fresh workers for every pool that had some, or had failed."""
    pools = [pool for pool in POOLS.all() if pool.state in (*ALIVE, "failed")]
    _release()
    for pool in pools:
        try:
            pool.start()
        except PoolError as error:  # the pool remembers it, and the board shows it
            log.warning("restart: %s", first_line(error))


def _stop_listening() -> None:
    """Let further machines go, with their workers, and close the addresses where they join."""
    _cancel_prompt()
    MACHINES.keep(())


def _cancel_prompt() -> None:
    """What Cancel does, and wait for its end: not for that of the next one in the queue, which begins at once."""
    queue = PromptServer.instance.prompt_queue
    cancelled = set(queue.currently_running)
    if not cancelled:
        return
    comfy_nodes.interrupt_processing()
    end_s = time.monotonic() + CANCEL_LIMIT_S
    while not cancelled.isdisjoint(queue.currently_running) and time.monotonic() < end_s:
        time.sleep(POLL_S)


def _devices() -> tuple[str, ...]:
    """The doctor's devices: those that pools have workers on, or had; by default all of the machine."""
    pools = [pool for pool in POOLS.all() if pool.state != "stopped"] or POOLS.all()
    named = {device for pool in pools for device in pool.devices if not device.machine}
    cuda = sorted(device for device in named if device.kind == "cuda")
    if not named:
        return ()
    return ("--devices", ",".join(map(str, cuda)) if cuda else f"cpu:{len(named)}")


def _failed(message: str) -> dict:
    return {"state": "failed", "message": message}


async def _examine() -> dict:
    """What the doctor finds on the devices of the pools; of all where they cannot be named, as one that was lost."""
    devices = _devices()
    found, refused = await _examined(devices)
    return (await _examined(()))[0] if devices and refused else found


async def _examined(devices: tuple[str, ...]) -> tuple[dict, bool]:
    """The doctor in a process of its own, as from the command line: it may start ranks and may fail to, and it ends
    with this process. Also returns whether it refused what it was asked."""
    command = (*DOCTOR, "--comfyui", this_comfyui().path, *devices)
    missing = missing_system()
    if missing is not None and sys.platform != "linux":
        # a Python that is embedded in ComfyUI for Windows finds no module in the folder that it is started in
        return _failed(f"{missing}; {STOCK_NODES}"), False
    try:
        if missing is not None:  # it says so, and starts nothing
            return await _said_by(await _started("-m", *command))
        lifeline, ours = os.pipe2(os.O_CLOEXEC)
        try:
            tied = ("-m", TIED, str(lifeline), str(os.getpid()), *command)
            return await _said_by(await _started(*tied, pass_fds=(lifeline,), start_new_session=True))
        finally:
            os.close(lifeline)
            os.close(ours)
    except OSError as error:  # no memory for a process, or the pack's folder was moved
        return _failed(f"the doctor could not be started: {error.strerror}; restart ComfyUI"), False


async def _started(*arguments: str, **more: Any) -> asyncio.subprocess.Process:  # noqa: ANN401  of Popen
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=PACK,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        **more,
    )


async def _said_by(process: asyncio.subprocess.Process) -> tuple[dict, bool]:
    try:
        out, _ = await asyncio.wait_for(process.communicate(), DOCTOR_LIMIT_S)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        return _failed(f"the doctor took longer than {DOCTOR_LIMIT_S:.0f} s and was ended"), False
    try:
        found = json.loads(out)
    except ValueError:
        return _failed(f"the doctor ended with status {process.returncode} and said nothing"), False
    if "checks" not in found:
        return _failed(str(found.get("error", "the doctor gave no checks"))), "error" in found
    kept = ("can_run", "checks", "warnings", "peer_access", "versions")
    return {"state": "done", **{name: found[name] for name in kept if name in found}}, False
