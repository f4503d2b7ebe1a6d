"""What a rank leaves out of most steps: collections of all Python objects, questions for its memory, timers' events."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel_runtime.timing import RegionTimer, is_timed
from parallel_runtime.worker import engine

from .pretend_device import Event, pretended_cuda
from .test_a_ranks_calls import table

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own, whose collections are nobody else's, and one that is forked from it. A line each: how many
# collections of all a run of many steps had, and whether a model in a cycle, which was there when the next one was
# loaded, is gone once it was dropped, or once its load was cancelled.
COLLECTIONS = """
import gc, json, os, types, weakref
import torch
from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.worker import loading
from parallel_runtime.worker.loading import LoadedModels, keep_from_collections

full, kept = [], os.fork() == 0
if not kept:
    os.wait()
gc.callbacks.append(lambda phase, info: full.append(1) if phase == "stop" and info["generation"] == 2 else None)

class Model:
    def __init__(self):
        self.hook = lambda: self

models = LoadedModels(rank=0, device=torch.device("cpu"), memory=lambda: None)
models[1] = Model()
if kept:
    keep_from_collections()
full.clear()
run = [[step] for step in range(600_000)]
collections = len(full)
gone = weakref.ref(models.pop(1))
gc.collect()
before = gone() is None
models._let_go()

class Cancelled(Model):
    needed_bytes = 0

    def load(self, **told):
        keep_from_collections()  # as another model that was loaded meanwhile
        raise RequestCancelledError

def opened(*given, **named):
    model = Cancelled()
    seen.append(weakref.ref(model))
    model.weights = model
    return model

seen, loading.open_model = [], opened
request = types.SimpleNamespace(first_rank=0, layout=types.SimpleNamespace(ranks=1), spec=None)
request.eviction_order, request.budget_bytes = (), None
models.load(request, group=None, progress=None, cancelled=None, beat=None)
print(json.dumps([collections, before, gone() is None, seen[0]() is None]))
"""


@pytest.mark.slow
def test_no_collection_of_all_falls_into_a_run_and_dropped_models_are_freed() -> None:
    """The second line, as Python does without, is the negative control."""
    command, environment = [sys.executable, "-c", COLLECTIONS], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=True)
    for kept, line in zip((True, False), done.stdout.splitlines(), strict=True):
        collections, freed_by_collecting, freed, freed_when_cancelled = json.loads(line)
        assert (collections == 0) == kept
        assert freed_by_collecting == (not kept), "what is kept from collections is not freed by one"
        assert freed
        assert freed_when_cancelled, "the memory of a load that was cancelled is kept"


def test_a_run_asks_for_its_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = engine.Engine(rank=0, device=torch.device("cpu"), segments=table())
    asked: list[None] = []
    ask, now_s = rank._memory, [100.0]

    def asking() -> engine.Memory:
        asked.append(None)
        return ask()

    monkeypatch.setattr(rank, "_memory", asking)
    monkeypatch.setattr(engine.time, "perf_counter", lambda: now_s[0])
    for _ in range(40):  # a run of 0.4 s
        now_s[0] += 0.01
        assert rank._memory_of_step().resident_bytes > 0
    assert len(asked) == 1
    now_s[0] += 2 * engine.MEMORY_S
    rank._memory_of_step()
    assert len(asked) == 2, "a long run is asked again"


@pytest.mark.parametrize(("every", "share"), [(10, 0.1), (1, 1.0)])
def test_with_timers_on_a_gpu_has_events_in_one_step_of_so_many(
    every: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`every` 1 is what costs too much. A block of 9 regions, 18 events, as a step of Flux.1 has for each."""
    recorded: list[None] = []
    record = Event.record

    def counting(event: Event, stream: object) -> None:
        recorded.append(None)
        record(event, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(Event, "record", counting)
    with pretended_cuda() as stream:
        timer = RegionTimer(torch.device("cuda"), every=every)
        laps = []
        for step in range(40):
            timer.enter_step(step, of=40)
            for name in "abcdefghi":
                with timer.region(name):
                    stream.run(0.001)
            timer.lap()
        laps = timer.laps()
    assert len(recorded) == 40 * 18 * share
    assert [step for step, lap in enumerate(laps) if lap] == [step for step in range(40) if step % every == 1 % every]


@pytest.mark.parametrize(("steps", "timed"), [(1, [0]), (2, [1]), (4, [1]), (12, [1, 11])])
def test_each_run_has_a_step_that_is_timed(steps: int, timed: list[int]) -> None:
    assert [step for step in range(steps) if is_timed(step, of=steps, every=10)] == timed
