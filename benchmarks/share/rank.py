"""ComfyUI's module in this process, called as one rank of several calls it, and how long that takes.

What runs is what a worker runs (worker/hosted.py): weights of the file, hooks of the class's plan, packing, attention
with this rank's heads, signs of life after each block. Only the exchange is a local copy (exchange.py).
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.block_graphs import BlockGraphs, GraphRun
from parallel_runtime.models.hosted.graphs import Watch
from parallel_runtime.models.hosted.random_calls import Size, make_calls
from parallel_runtime.models.specs import spec_of
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.timing import LaunchThrottle, RegionTimer, wait_for_all
from parallel_runtime.wire.requests import Step
from parallel_runtime.worker.held_state import HeldState
from parallel_runtime.worker.hosted import HostedForward, HostedModel
from parallel_runtime.worker.hosted_weights import HostedWeights

from .attended import Attended, noting
from .device_time import Busy, busy_in
from .exchange import local_sequence

# Of a call in which a device has next to nothing to do: 64 tokens where a token is 16 x 16 pixels. PixArt and others
# take no such picture.
NEARLY_NOTHING = ((128, 16), (256, 16), (384, 32))
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank of `ranks` in one step of one call: seconds of its device, of its host, and by the clock.

    `block` is the same of one further block: (device, host); where the device waits for its host between two, no more
    than a block's part of the kernels. `host_s` is the time of a call that gives the device next to nothing to do.
    `num_bytes` in `messages` go to other ranks; `attended`: those of attention calls, one by one.
    """

    ranks: int
    ring: int
    blocks: int
    tokens: int
    device_s: float
    host_s: float
    clock_s: float
    block: tuple[float, float]
    num_bytes: int
    messages: int
    asynchronous: bool
    kernel: str = ""
    attended: tuple[Attended, ...] = ()
    repeated: float = 1.0  # how often the attention calls come

    def at_depth(self, blocks: int) -> "Share":
        """The same of a model of as many such blocks: what is outside of them stays."""
        more = blocks - self.blocks
        device, host = self.block
        return replace(
            self,
            blocks=blocks,
            device_s=self.device_s + more * device,
            host_s=self.host_s + more * host,
            clock_s=self.clock_s + more * (max(device, host) if self.asynchronous else device),
            num_bytes=round(self.num_bytes * blocks / self.blocks),
            messages=round(self.messages * blocks / self.blocks),
            repeated=self.repeated * blocks / self.blocks,
        )

    @property
    def computing_s(self) -> float:
        """A step without its exchange: a device that runs ahead of its host hides it, or waits for it."""
        return max(self.device_s, self.host_s) if self.asynchronous else self.device_s


@dataclass
class Beats:
    """When blocks ended, by the host's clock and, on a GPU, by the device's."""

    device: torch.device
    host_s: list[float] = field(default_factory=list)
    events: "list[torch.cuda.Event]" = field(default_factory=list)

    def beat(self) -> None:
        """A block has ended, or is queued; after the last of them so has the call."""
        self.host_s.append(time.perf_counter())
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.events.append(event)

    def block_s(self) -> tuple[float, float]:
        """Seconds from one block's end to the next one's in the mean, (device, host); on a CPU both are the clock's."""
        host = _between(self.host_s[:-1])
        if not self.events:
            return host, host
        self.events[-1].synchronize()
        moments = [self.events[0].elapsed_time(event) / 1000 for event in self.events[:-1]]
        return _between(moments), host


class OneRank:
    """A file's model, on one device of this process. Raises `ValueError` for a file that ranks cannot share."""

    def __init__(self, path: str, *, dtype: str, comfyui: ComfyUI, device: torch.device) -> None:
        self.device = device
        spec = ModelSpec.of(os.path.abspath(path), dtype, comfyui=comfyui)
        alone = Axis("shards")
        weights = HostedWeights(spec, device=device, group=alone, offloaded=False)
        weights.load(progress=lambda done, total: None, cancelled=lambda: False)
        self.plan = spec_of(type(weights.module))
        self.model = HostedModel(weights)
        self.name = type(weights.whole).__name__
        self.recorded_s = 0.0  # what recording graphs took, in all steps

    @property
    def blocks(self) -> int:
        """How many blocks the file has."""
        return len(self.model.weights.blocks)

    def call(self, size: Size) -> ModelCall:
        """A random call of that size, which the whole model has computed once. Raises `ValueError` for an impossible
        one.
        """
        if self.model.shared is not None:
            self.model.shared.group = None
        with torch.inference_mode():
            ((recorded,),) = make_calls(self.model.weights.whole, size, [size.text_tokens], steps=1, device=self.device)
        return recorded.call

    def small_call(self, size: Size) -> ModelCall:
        """A call in which the device has next to nothing to do."""
        for side, text in NEARLY_NOTHING:
            try:
                return self.call(replace(size, width=side, height=side, text_tokens=text, batch=1, frames=None))
            except ValueError as error:
                last = error
        raise last

    def step(
        self,
        call: ModelCall,
        sequence: SequenceParallelAttention,
        *,
        timed: bool = False,
        graphs: BlockGraphs | None = None,
    ) -> Callable[[], tuple[torch.Tensor, Beats]]:
        """A function that runs the call as the rank of `sequence` does, blocks by `graphs`: its result (B, numbers),
        and when blocks ended."""
        batch, numbers = call.out_shape
        whole, held = {**call.tensors, "out": torch.empty(batch, numbers)}, self._held(call)

        def run() -> tuple[torch.Tensor, Beats]:
            beats = Beats(self.device)
            pace = LaunchThrottle(self.device, lambda: None)

            def beat() -> None:
                beats.beat()
                pace.block_queued()

            timer = RegionTimer(self.device, on=timed)
            sequence.ulysses.traffic.reset(timer)
            forward = HostedForward(self.model, sequence, timer, beat, held)
            watch = Watch(timer, beat, lambda _: None)
            if graphs is not None:
                forward.by_graphs = GraphRun(graphs, version=0, watch=watch)
            with torch.inference_mode():
                forward.run(BatchSlice(0, 0, batch), whole, call.options)
            pace.drain()
            wait_for_all(self.device)
            timer.seconds()
            self.recorded_s += watch.compile_s
            return whole["out"], beats

        return run

    def step_of_several_s(
        self, call: ModelCall, sequence: SequenceParallelAttention, *, steps: int, graphs: BlockGraphs | None = None
    ) -> float:
        """Seconds of each of so many steps that are queued one behind the other and awaited together, as in the
        sampler's loop in ranks: the host is up to `timing.BLOCKS_AHEAD` blocks ahead."""
        timer, pace = RegionTimer(self.device, on=False), LaunchThrottle(self.device, lambda: None)
        whole, held = {**call.tensors, "out": torch.empty(call.out_shape)}, self._held(call)
        sequence.ulysses.traffic.reset(timer)
        began = time.perf_counter()
        with torch.inference_mode():
            for _ in range(steps):
                forward = HostedForward(self.model, sequence, timer, pace.block_queued, held)
                if graphs is not None:
                    watch = Watch(timer, pace.block_queued, lambda _: None)
                    forward.by_graphs = GraphRun(graphs, version=0, watch=watch)
                rows = BatchSlice(0, 0, call.out_shape[0])
                forward.call(rows, whole, call.options, sequence=sequence, over=None)
                pace.block_queued()
        pace.drain()
        wait_for_all(self.device)
        return (time.perf_counter() - began) / steps

    def _held(self, call: ModelCall) -> HeldState:
        held = HeldState(self.device)
        repeated = {name: number for number, name in enumerate(call.tensors)}
        held.begin(Step(model=0, plan=ParallelPlan(), calls=(), batch_groups=(), repeated=repeated), call.tensors)
        return held

    def measure(
        self, call: ModelCall, small: ModelCall, *, ulysses: int = 1, ring: int = 1, steps: int = 5, index: int = 0
    ) -> Share:
        """The share of one of ulysses * ring ranks; medians of `steps` steps."""
        sequence = local_sequence(ulysses=ulysses, ring=ring, index=index, device=self.device)
        run = self.step(call, sequence)
        clock, (block_s, _) = timed_runs(run, steps)
        traffic = sequence.ulysses.traffic
        sent = traffic.num_bytes, traffic.calls
        tokens = sequence.most_keys
        cuda = self.device.type == "cuda"
        busy = busy_in(run, self.device) if cuda else Busy(clock)
        with noting(sequence, self.device) as attended:
            run()
        host, (_, host_block_s) = timed_runs(self.step(small, sequence), steps)
        return Share(
            ranks=ulysses * ring,
            ring=ring,
            blocks=self.blocks,
            tokens=tokens,
            device_s=busy.seconds,
            host_s=host,
            clock_s=clock,
            block=(min(block_s, busy.seconds / self.blocks) if cuda else block_s, host_block_s),
            num_bytes=sent[0],
            messages=sent[1],
            asynchronous=cuda,
            kernel=busy.attention_kernel(),
            attended=tuple(attended) if ulysses * ring > 1 else (),
        )


def timed_runs(
    run: Callable[[], tuple[torch.Tensor, Beats]], steps: int, *, warm_up: int = WARM_UP
) -> tuple[float, tuple[float, float]]:
    """Median seconds of a run that is awaited, and of a further block of it (device, host)."""
    seconds: list[float] = []
    blocks: list[tuple[float, float]] = []
    for _ in range(warm_up + steps):
        began = time.perf_counter()
        _, beats = run()
        seconds.append(time.perf_counter() - began)
        blocks.append(beats.block_s())
    devices, hosts = zip(*blocks[warm_up:], strict=True)
    return median(seconds[warm_up:]), (median(devices), median(hosts))


def _between(moments: Sequence[float]) -> float:
    return (moments[-1] - moments[0]) / (len(moments) - 1) if len(moments) > 1 else 0.0
