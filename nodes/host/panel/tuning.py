"""The button Tune: plans of the model that is loaded are tried while no prompt runs, and the quickest is kept.

Owns which model that is, and what ends it: Stop, a prompt, who frees weights, the workers' end. The tries are
proof/tuning.py's.
"""

import threading
from collections.abc import Callable

from ....parallel_runtime.errors import PoolError
from ....parallel_runtime.pool.pool import Pool
from ..contract.comfyui import PromptServer, comfy
from ..model.pools import POOLS
from ..proof.begin_tries import LastRun
from ..proof.tuning import TuningEndedError, TuningRequest, tune
from ..sampling.run_context import is_sampled_on

NOTHING_LOADED = "no model is in the workers; queue a prompt with a parallel MODEL first"


def last_run() -> LastRun | None:
    """That of the weights that were loaded last, while the workers have them."""
    root = POOLS.last_loaded
    run: LastRun | None = None if root is None else root.model.last_run
    return run if run is not None and run.of.pooled.holds(run.of.decision.plan) else None


class TuneButton:
    """The panel's button that tunes: what it does, and what it did last, for the panel's state.

    `told`: `state` (never, running, done or failed) with `doing`, or `line` and `plans`, or `message`.
    """

    def __init__(self) -> None:
        self.told: dict[str, object] = {"state": "never"}
        self._stop = threading.Event()

    def state(self) -> dict[str, object]:
        """`told`, with what may be tuned: None where nothing is loaded."""
        run = last_run()
        return self.told | {"of": None if run is None else run.described}

    def stop(self) -> None:
        """End it, at the next look; nothing is kept."""
        self._stop.set()

    def work(self, asked: TuningRequest) -> Callable[[], None]:
        """What tunes, in a thread of its own."""
        self._stop.clear()
        self.told = {"state": "running", "doing": ""}
        return lambda: self._run(asked)

    def _run(self, asked: TuningRequest) -> None:
        run = last_run()
        try:
            if run is None:
                raise ValueError(NOTHING_LOADED)
            pool = run.of.pooled.pool
            found = tune(run.of, asked, say=self._say, check=lambda: self._check(pool))
            shown = ("line", "kept", "plans", "work", "took_s", "copies")
            self.told = {"state": "done", "model": run.described["model"], **{name: found[name] for name in shown}}
        except (ValueError, PoolError, TuningEndedError) as error:
            self.told = {"state": "failed", "message": str(error).partition("\n")[0]}
        finally:
            if self.told["state"] == "running":  # by an error that is none of these
                self.told = {"state": "failed", "message": "it failed; ComfyUI's log says why"}
            if run is not None and not is_sampled_on(run.of.pooled.devices):  # else the prompt's run gives back itself
                run.of.pooled.give_back(comfy.model_management.get_torch_device())

    def _say(self, text: str) -> None:
        self.told = {"state": "running", "doing": text}

    def _check(self, pool: Pool) -> None:
        if self._stop.is_set():
            raise TuningEndedError("stopped; nothing is kept")
        if PromptServer.instance.prompt_queue.currently_running:
            raise TuningEndedError("ended, as a prompt began; nothing is kept")
        if pool.is_waited_for:  # as by Release, or where ComfyUI frees memory, before which it begins no prompt
            raise TuningEndedError("ended, as the workers were asked for something else; nothing is kept")
