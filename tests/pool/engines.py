"""Engines that real ranks run in these tests: real collectives, and every way to fail, on demand.

A rank finds this module through `python_path`. A step's options say what happens in it: `faults` by rank, each a list
of actions, functions of this file, with their arguments, done in order before the collective.
"""

import importlib
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.wire.channel import Channel
from parallel_runtime.wire.protocol import Message, Op
from parallel_runtime.wire.replies import (
    CheckReply,
    Compiling,
    EmptyReply,
    LoadReply,
    Memory,
    MemoryReply,
    Progress,
    RankStep,
    StepReply,
)

mapped = []  # held until the process ends


class Echo:
    """A call's "out" is the sum of its inputs plus `add`, each rank writing its part of the elements.

    The batch groups play no part: a batch group's pieces are only said again. Of its replies' figures, resident bytes
    are the rank's number, allocated bytes the models that it holds and reserved bytes the changes of weights that it
    has done; the regions of a step are the inputs that it got before, each with the number of its content.
    """

    def __init__(self, *, rank, device, segments):
        self.rank = rank
        self.segments = segments
        self.models = set()
        self.groups = {}
        self.changes = 0  # of weights, done
        self.ended = 0  # runs
        self.let_go = set()  # names of loads that were held

    def handle(self, request, specs, *, progress, cancelled, beat):
        beat()
        if request.op is Op.LOAD:
            if request.first_rank <= self.rank < request.layout.ranks:
                self.load(request, progress, cancelled)
            return LoadReply(parameter_bytes=100, dtype=request.spec.dtype, memory=self.memory())
        if request.op is Op.UNLOAD:
            self.models.discard(request.model)  # of a cancelled load, a rank may hold nothing
            return MemoryReply(memory=self.memory())
        if request.op is Op.MESH:
            self.groups[request.plan] = dist.new_group(list(range(dist.get_world_size())))
            return EmptyReply()
        if request.op is Op.CHANGE:
            return self.patch(request.records, cancelled, beat)
        if request.op is Op.TRIM:
            self.ended += 1
            return MemoryReply(memory=self.memory())
        if request.op is Op.CHECK:
            return CheckReply(wrong_bytes=7 * self.rank)
        return self.step(request, specs, progress, beat)

    def memory(self):
        return Memory(resident_bytes=self.rank, allocated_bytes=len(self.models), reserved_bytes=self.changes)

    def patch(self, records, cancelled, beat):
        """Each change takes 0.1 s; one that has begun is finished. One of "held" beats and stays
        until it is cancelled."""
        for record in records:
            if record["key"] == "held":
                beat()
                wait_until(cancelled)
            if cancelled():
                raise RequestCancelledError("cancelled")
            time.sleep(0.1)
            self.changes += 1
        return MemoryReply(memory=self.memory())

    def load(self, request, progress, cancelled):
        """The path says how: `slow1` on rank 1 only; `die1` likewise.

        `held1` stays half-way until it is cancelled, once; `gate`, on any rank, until the gate of that path is open.
        """
        name = Path(request.spec.path).name
        for loaded in range(0, 101, 10):
            if cancelled():
                raise RequestCancelledError("cancelled")
            progress(Progress(done=loaded, total=100))
            if name == f"slow{self.rank}":
                time.sleep(0.2)
            if name == "gate" and loaded == 50:
                wait_at(None, None, request.spec.path)
            if name == f"held{self.rank}" and loaded == 50 and name not in self.let_go:
                self.let_go.add(name)
                wait_until(cancelled)
            if name == f"die{self.rank}" and loaded == 50:
                os.kill(os.getpid(), signal.SIGKILL)
        self.models.add(request.model)

    def step(self, request, specs, progress, beat):
        began = time.perf_counter()
        every_call = request.calls
        options = every_call[0]
        for action, *arguments in options.get("faults", {}).get(str(self.rank), ()):
            if action == "write_inputs":
                Path(arguments[0]).write_text(str(self.segments.tensor(specs[0]).tolist()), encoding="utf-8")
            else:
                globals()[action](progress, beat, *arguments)
        if options.get("sync", True):
            dist.barrier(self.groups[request.plan])
        for number, own in enumerate(every_call):
            self.add_up([spec for spec in specs if spec.name.startswith(f"{number}.")], own.get("add", 0))
        batch_groups = request.batch_groups
        batch_group = self.rank * len(batch_groups) // dist.get_world_size()
        ran = RankStep(
            batch_group=batch_group,
            pieces=batch_groups[batch_group],
            regions={name: float(content) for name, content in request.repeated.items()},
            began_s=began,
            step_s=time.perf_counter() - began,
            tokens=self.ended,
            **dict.fromkeys(("collectives", "sent_bytes", "weight_collectives", "weight_bytes"), 0),
        )
        return StepReply(memory=self.memory(), ran=ran)

    def add_up(self, specs, more):
        *inputs, out = (self.segments.tensor(spec) for spec in specs)
        ranks = dist.get_world_size()
        parts = [tensor.reshape(-1).tensor_split(ranks)[self.rank] for tensor in (*inputs, out)]
        if inputs:
            parts[-1].copy_(sum(parts[:-1]) + more)


class Unmakeable:
    """An engine that fails to start."""

    def __init__(self, **_):
        raise RuntimeError("this engine does not start")


def write_about(_progress, _beat, path, *modules):
    """Write to a file what the process is like."""
    about = {
        "loaded": [name for name in modules if name in sys.modules],
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "grad": torch.is_grad_enabled(),
        "session": os.getsid(0),
    }
    Path(path).write_text(json.dumps(about), encoding="utf-8")


def import_module(_progress, _beat, name):
    importlib.import_module(name)


def fail(_progress, _beat, kind, text, times=1):
    kinds = {"ValueError": ValueError, "RuntimeError": RuntimeError, "memory": torch.OutOfMemoryError}
    raise kinds[kind](text * times)


def sleep(_progress, _beat, seconds):
    time.sleep(seconds)


def wait_until(holds):
    """Wait for it, which is to come."""
    while not holds():
        time.sleep(0.01)


def wait_at(_progress, _beat, path):
    """Say that this rank is at a gate, and wait until it is open: a file that says so."""
    Path(f"{path}.reached").touch()
    wait_until(Path(path).exists)


def work(_progress, beat, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        beat()
        time.sleep(0.01)


def send_signal(_progress, _beat, name):
    os.kill(os.getpid(), getattr(signal, name))


def leave(_progress, _beat, code):
    os._exit(code)


def start_child(_progress, _beat, path):
    """Leave a process behind that ends with nobody, and note its number."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    Path(path).write_text(str(child.pid), encoding="utf-8")


def allocate(_progress, _beat, num_bytes):
    """Ask for memory that is not there."""
    torch.ones(num_bytes, dtype=torch.uint8)


def map_file(_progress, _beat, path, num_bytes):
    """Make a file and map it, as NCCL makes a segment."""
    with open(path, "wb+") as file:
        file.truncate(num_bytes)
        mapped.append(mmap.mmap(file.fileno(), num_bytes))


def say(_progress, _beat, text, times=1):
    sys.stdout.write(text * times + "\n")
    sys.stdout.flush()


def exchange(_progress, _beat, num_bytes, seconds, noted=None):
    """All-to-all again and again; makes a file once the first is done."""
    given = torch.zeros(num_bytes, dtype=torch.uint8)
    taken = torch.empty_like(given)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        dist.all_to_all_single(taken, given)
        if noted is not None:
            Path(noted).touch()


def receive(_progress, _beat):
    """Wait for what the next rank never sends."""
    dist.recv(torch.empty(1), (dist.get_rank() + 1) % dist.get_world_size())


def hold_the_interpreter(_progress, _beat):
    """Never return to the interpreter loop: no other thread of this process runs Python again."""
    re.match("(a+)+$", "a" * 60 + "b")


def speak_out_of_turn(_progress, _beat):
    """Answer a request that was never asked."""
    own_channel().send(Message(Op.DONE, dist.get_rank(), int(own_option("generation")), 0))
    time.sleep(60)


def say_compiling(progress, _beat, begins):
    """As a rank does before and after it makes a graph."""
    progress(Compiling(begins=begins))


def answer_other_fields(progress, _beat):
    """Answer the request without the fields that its reply has."""
    progress(EmptyReply())
    time.sleep(60)


def send_garbage(_progress, _beat, length):
    own_socket().send(b"x" * length)
    time.sleep(60)


def close_channel(_progress, _beat):
    own_socket().shutdown(socket.SHUT_RDWR)
    time.sleep(60)


def own_option(name):
    """What this rank's command line says."""
    (value,) = (word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}="))
    return value


def own_socket():
    return socket.socket(fileno=os.dup(int(own_option("socket"))))


def own_channel():
    return Channel(own_socket())
