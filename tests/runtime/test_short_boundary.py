"""What a rank leaves out between two steps: collections of all Python objects, and questions for its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel_runtime.wire.channel import Segment, SegmentTable
from parallel_runtime.worker import engine

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own, whose collections are nobody else's. Says how many collections of all a run of many steps
# had, and whether a model in a cycle, which was there when the next one was loaded, is gone once it was dropped.
COLLECTIONS = """
import gc, json, sys, weakref
import torch
from parallel_runtime.worker.loading import LoadedModels, keep_from_collections

full, kept = [], sys.argv[1] == "kept"
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
print(json.dumps([collections, before, gone() is None]))
"""


@pytest.mark.parametrize("way", ["kept", "as Python does"])
def test_no_collection_of_all_falls_into_a_run_and_dropped_models_are_freed(way: str) -> None:
    """`as Python does`: the negative control."""
    command = [sys.executable, "-c", COLLECTIONS, way.split()[0]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    collections, freed_by_collecting, freed = json.loads(done.stdout)
    assert (collections == 0) == (way == "kept")
    assert freed_by_collecting == (way != "kept"), "what is kept from collections is not freed by one"
    assert freed


def test_a_run_asks_for_its_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    segment, fd = Segment.create(1 << 20)
    os.close(fd)
    rank = engine.Engine(rank=0, device=torch.device("cpu"), segments=SegmentTable(segment))
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
