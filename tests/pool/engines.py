"""Engines that real ranks run in these tests: real collectives, and every way to fail, on demand.

A worker finds this module through `python_path`. What a step does is said in its options.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.wire.protocol import Op


class Echo:
    """Adds `value` to every tensor and writes their sum to "out"; fails, waits or dies where the options say so.

    `fault`: what to do, before the collective, on the rank `on` (all when absent).
    """

    def __init__(self, *, rank, device, segments):
        self.rank = rank
        self.segments = segments
        self.models = {}
        self.meshes = {}

    def handle(self, message, *, progress, cancelled, beat):
        beat()
        return getattr(self, f"on_{message.op.name.lower()}")(message, progress, cancelled, beat)

    def on_load(self, message, progress, cancelled, beat):
        path = message.body["path"]
        total = 100
        for loaded in range(0, total + 1, 10):
            beat()
            if "slow" in path:
                time.sleep(0.05 * (1 + self.rank))
            if "die" in path and loaded == 50 and self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if "refuse" in path and self.rank == 1:
                raise ValueError("this is no model")
            if cancelled():
                raise RequestCancelledError("cancelled")
            progress({"loaded_bytes": loaded, "total_bytes": total})
        self.models[message.body["model"]] = path
        return {"parameter_bytes": total, "dtype": message.body["dtype"], "held": len(self.models)}

    def on_unload(self, message, progress, cancelled, beat):
        self.models.pop(message.body["model"], None)
        return {"held": len(self.models)}

    def on_mesh(self, message, progress, cancelled, beat):
        self.meshes[message.body["mesh"]] = dist.new_group(list(range(dist.get_world_size())))
        return {}

    def on_check(self, message, progress, cancelled, beat):
        return {"wrong_bytes": self.rank * 7}

    def on_step(self, message, progress, cancelled, beat):
        began = time.perf_counter()
        options = message.body["options"]
        *inputs, out = (self.segments.tensor(spec) for spec in message.tensors)
        if options.get("on", self.rank) == self.rank and "fault" in options:
            self.fail(options, beat)
        if options.get("sync", True):
            dist.barrier(self.meshes[message.body["mesh"]])
        parts = dist.get_world_size()
        if inputs:
            mine = out.reshape(-1).tensor_split(parts)[self.rank]
            total = sum(tensor.reshape(-1).tensor_split(parts)[self.rank] for tensor in inputs)
            mine.copy_(total + options.get("add", 0))
        return {
            "step_s": time.perf_counter() - began,
            "memory": {"rank": self.rank},
            "held": len(self.models),
            "modules": options.get("modules")
            and [name for name in options["modules"] if name in __import__("sys").modules],
        }

    def fail(self, options, beat):
        fault, seconds = options["fault"], options.get("seconds", 0.0)
        if fault == "raise":
            raise ValueError(f"rank {self.rank} says no\nand why")
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if fault == "sleep":
            time.sleep(seconds)
        if fault == "work":
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                beat()
                time.sleep(0.01)
        if fault == "signal":
            time.sleep(seconds)
            os.kill(os.getpid(), getattr(signal, options["signal"]))
        if fault == "exit":
            print("leaving now", flush=True)  # noqa: T201
            os._exit(options["code"])
        if fault == "exchange":
            exchange(options["num_bytes"], seconds)
        if fault == "print":
            print("x" * options["num_bytes"] + "END", flush=True)  # noqa: T201
        if fault == "garbage":
            send_garbage(self.rank)


def exchange(num_bytes, seconds):
    """All-to-all again and again."""
    given = torch.zeros(num_bytes, dtype=torch.uint8)
    taken = torch.empty_like(given)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        dist.all_to_all_single(taken, given)
