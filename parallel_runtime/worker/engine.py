"""What one rank holds and what it answers: models by number and meshes by plan, loaded, changed, run and freed.

Owns the handles, and what each request does. Runs a model under a plan's mesh; a step of it is hosted.py's. Knows no
ComfyUI, no socket, and no arithmetic of a model.
"""

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch

from ..choices import card_choice, choice_for
from ..models.hosted.compiled import CompiledRun
from ..models.hosted.cuda_graphs import CudaRecorder, GraphRecorder
from ..models.hosted.graphs import Graphs, Watch
from ..parallel.collectives import Axis
from ..parallel.kernels import ATTENDED
from ..plan import BatchSlice, ParallelPlan
from ..timing import LaunchThrottle, RegionTimer
from ..wire.channel import SegmentTable
from ..wire.protocol import TensorSpec
from ..wire.replies import (
    CheckReply,
    Compiling,
    EmptyReply,
    Memory,
    MemoryReply,
    ProbeReply,
    Progress,
    RankStep,
    SampleReply,
    StepReply,
)
from ..wire.requests import (
    AnyRequest,
    ChangeWeights,
    CheckCopies,
    Load,
    MakeMesh,
    MeasureDevice,
    OfVae,
    Probe,
    Sample,
    SetStrengths,
    Step,
    Trim,
    Unload,
)
from .held_state import HeldState
from .host_copies import HostCopies
from .hosted import HostedForward, HostedModel
from .hosted_pipeline import HostedPipeline
from .hosted_sampling import HostedCalls
from .loading import LoadedModels
from .measure import measure
from .mesh import Groups, Mesh
from .steady_pipeline import SteadyCalls
from .trace import Trace
from .vae import RankVae
from .worker_loop import Calls, Gate, WorkerLoop

MEMORY_S = 1.0  # between two questions for the memory of steps


class Engine:
    """What one rank holds and does. `handle` is called with one request at a time."""

    def __init__(self, *, rank: int, device: torch.device, segments: SegmentTable) -> None:
        self.rank = rank
        self.device = device
        self.segments = segments
        self.models = LoadedModels(rank=rank, device=device, memory=self._memory)
        self.vae = RankVae(rank=rank, device=device, segments=segments, memory=self._memory)
        self.meshes: dict[ParallelPlan, Mesh] = {}
        self.groups = Groups()
        self.held_state = HeldState(device)
        self._show_waiting = partial(segments.show_waiting, rank)
        self.graphs = Graphs()
        self._process = psutil.Process()  # asked after many requests, and slow to make
        self._asked: tuple[float, Memory] | None = None  # when a step asked for its memory, and the answer

    @torch.inference_mode()
    def handle(
        self,
        request: AnyRequest,
        specs: tuple[TensorSpec, ...],
        *,
        progress: Callable[[Progress | Compiling], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> object:
        """Do what the request asks and return the reply that it names. Raises what goes wrong.

        `specs`: where its tensors lie.

        All of it in inference mode, so that every tensor is of one kind: a graph made for weights of the other would
        not serve these.
        """
        if isinstance(request, OfVae):
            self.models.switched = None  # it has switches of its own
            self.models.end_runs()
            self.models.drop_whole_blocks()
            return self.vae.answer(request, specs, progress=progress, cancelled=cancelled, beat=beat)
        if self.vae.on_device:
            self.vae.leave_device()
        if not isinstance(request, Step):
            self._asked = None
        if isinstance(request, Sample | Trim):
            gc.collect()  # not within a step; models are not looked at (loading.py)
        # what a class keeps between calls is of one run with one model, and as its weights were
        self.models.end_runs(but=request.model if isinstance(request, Step) else None)
        self.models.drop_whole_blocks(but=request.model if isinstance(request, Step | Sample | SetStrengths) else None)
        if isinstance(request, Step):
            with self.models.telling_of_whole_blocks():
                return self._step(request, specs, progress=progress, beat=beat)
        if isinstance(request, Sample):
            gate = Gate(self.segments, cancelled=cancelled, show_waiting=self._show_waiting)
            with self.models.telling_of_whole_blocks():
                return self._sample(request, specs, gate=gate, progress=progress, beat=beat)
        if isinstance(request, Load):
            group = Axis("shards") if request.plan is None else self.meshes[request.plan].shard_axis
            return self.models.load(request, group=group, progress=progress, cancelled=cancelled, beat=beat)
        if isinstance(request, Unload):
            return self._unload(request)
        if isinstance(request, ChangeWeights | SetStrengths):
            tensors = self._tensors(specs) if request.model in self.models else {}
            return self.models.change(request, tensors, cancelled=cancelled, beat=beat)
        return self._of_ranks(request, beat)

    def new_timer(self, *, on: bool, graphs: bool = False) -> RegionTimer:
        """What times one request on this rank; its regions too when it is `on`, on a GPU in one step of several.

        With `graphs` of blocks, in which nothing is timed, ranks of other cards take the same steps.
        """
        if not on or self.device.type != "cuda":
            return RegionTimer(self.device, on=on)
        choice = choice_for(None) if graphs else card_choice(self.device)
        return RegionTimer(self.device, on=True, every=choice.timed_every)

    def new_recorder(self) -> GraphRecorder:
        """What makes graphs of blocks. Raises `ValueError` for a device that has none."""
        if self.device.type != "cuda":
            raise ValueError(f"rank {self.rank} is on {self.device}, and graphs of blocks are CUDA's; set tries to off")
        return CudaRecorder(self.device)

    def _unload(self, request: Unload) -> MemoryReply:
        self.held_state.drop()
        self.vae.drop(request.model)
        return self.models.drop(request)

    def _of_ranks(self, request: AnyRequest, beat: Callable[[], None]) -> object:
        if isinstance(request, MeasureDevice):
            return measure(self.device)
        if isinstance(request, Trim):
            return self._trim(request)
        if isinstance(request, MakeMesh | CheckCopies | Probe):
            return self._of_mesh(request, beat)
        raise ValueError(f"a rank cannot do {request.op.name}; wire/requests.py has what it can be asked")

    def _of_mesh(
        self, request: MakeMesh | CheckCopies | Probe, beat: Callable[[], None]
    ) -> EmptyReply | CheckReply | ProbeReply:
        if isinstance(request, MakeMesh):
            return self._make_mesh(request)
        mesh = self.meshes[request.plan]
        if isinstance(request, Probe):
            return mesh.probe(self.device)
        return CheckReply(wrong_bytes=mesh.wrong_bytes(self.device, beat))

    def _make_mesh(self, request: MakeMesh) -> EmptyReply:
        for dropped in request.dropped:
            del self.meshes[dropped]
        if request.freed:
            for model in self.models.values():
                model.drop_graphs()  # a communicator does not end while a graph holds its exchanges
            self.groups.free(request.freed, self.device)
        self.meshes[request.plan] = Mesh(
            request.plan,
            device=self.device,
            groups=self.groups,
            show_waiting=self._show_waiting,
            overlap=request.overlap,
        )
        return EmptyReply()

    def _trim(self, request: Trim) -> MemoryReply:
        """Forget a sampling run that has ended; torch gives back what it caches where others compute on the device."""
        self.held_state.drop()
        for model in self.models.values():
            if request.graphs:
                model.graphs_left = True
            else:
                model.drop_graphs()  # on all ranks: those that share tokens replay together
        if self.rank in request.ranks:
            self.models.give_back()
        return MemoryReply(memory=self._memory())

    def _step(
        self,
        request: Step,
        specs: tuple[TensorSpec, ...],
        *,
        progress: Callable[[Progress | Compiling], None],
        beat: Callable[[], None],
    ) -> StepReply:
        mesh = self.meshes[request.plan]
        self._keep_graphs(request)
        if not mesh.member:
            return StepReply(memory=self._memory(), ran=None)
        began = time.perf_counter()
        model = self.models[request.model]
        tensors = self._tensors(specs)
        self.held_state.begin(request, tensors)
        pace = LaunchThrottle(self.device, beat)
        forward = self._forward(model, mesh, request, progress=progress, alive=beat, beat=pace.block_queued)
        forward.drain = pace.drain
        if (place := next((options["step"] for options in request.calls if options.get("step")), None)) is not None:
            forward.timer.enter_step(place[0], of=place[1])
        forward.begin_run(self.held_state.run, ranks=mesh.plan.ranks)
        forward.begin_step(request, tensors)
        run: Callable[[], None] = partial(forward.run_batch_groups, request.batch_groups, mesh, tensors, request.calls)
        room = tensors.get(f"trace.{self.rank}")
        trace_bytes = None
        if room is None:
            run()
        else:
            trace_bytes = Trace(self.rank, self.device).write_to(room, run)
        pace.drain()
        forward.end_step()
        # Also where no regions are timed, and where a rank writes no result and so has waited for nothing yet: the
        # request ends with the last rank's answer, so to wait for the device costs nothing.
        forward.timer.mark()
        (ended,) = forward.timer.moments()
        ran = RankStep(
            pieces=request.batch_groups[mesh.batch_group],
            began_s=began,
            step_s=ended - began,
            regions=forward.timer.seconds() if forward.timer.on else None,
            trace_bytes=trace_bytes,
            tokens=forward.sequence.most_keys,
            **self._counts(model, mesh, forward),
        )
        return StepReply(memory=self._memory_of_step(), ran=ran)

    def _sample(
        self,
        request: Sample,
        specs: tuple[TensorSpec, ...],
        *,
        gate: Gate,
        progress: Callable[[Progress | Compiling], None],
        beat: Callable[[], None],
    ) -> SampleReply:
        mesh = self.meshes[request.plan]
        self.held_state.drop()
        self._keep_graphs(request)
        if not mesh.member:
            return SampleReply(memory=self._memory(), ran=None)
        model = self.models[request.model]
        pace, copies = LaunchThrottle(self.device, beat), HostCopies(self.device)

        def block_queued() -> None:
            pace.block_queued()
            copies.collect()

        forward = self._forward(model, mesh, request, progress=progress, alive=beat, beat=block_queued)
        tensors = self._tensors(specs)
        forward.begin_run(request.op, ranks=mesh.plan.ranks)
        steps = len(request.recurrence.step_ends)
        try:
            make = SteadyCalls if mesh.plan.pipefusion > 1 else HostedCalls
            calls: Calls = make(forward, request, tensors, mesh=mesh, copies=copies)
            loop = WorkerLoop(request.recurrence, calls, forward.timer, pace=pace, copies=copies)
            loop.run(gate, step_done=lambda step, spent: progress(Progress(done=step + 1, total=steps, spent=spent)))
        finally:
            self.models.end_runs()
        work = request.batch_groups[mesh.batch_group]
        pieces = tuple(BatchSlice(cond, work.start, work.stop) for cond in work.conds)
        ran = loop.report(pieces=pieces, **self._counts(model, mesh, forward))
        return SampleReply(memory=self._memory(), ran=ran)

    def _keep_graphs(self, request: Step | Sample) -> None:
        """Also on a rank that the plan leaves out, which may have graphs of an earlier one. Those that a run left go
        where the next one asks for none: it counts on their memory."""
        for handle, model in self.models.items():
            if handle == request.model and _asks(request, "graphs"):
                model.keep_graphs_of(request.plan)
            elif model.graphs_left:
                model.drop_graphs()
            model.graphs_left = False

    def _tensors(self, specs: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
        """A request's tensors, views of shared memory."""
        return {spec.name: self.segments.tensor(spec) for spec in specs}

    def _forward(
        self,
        model: HostedModel,
        mesh: Mesh,
        request: Step | Sample,
        *,
        progress: Callable[[Progress | Compiling], None],
        alive: Callable[[], None],
        beat: Callable[[], None],
    ) -> HostedForward:
        """The model under a plan, counters at zero. Raises `ValueError` when its file was changed.

        `beat` is called after each block; `alive` from another thread, while a graph is being made.
        """
        if (file := model.weights.viewed_file) is not None:
            file.refuse_changed()
        self.models.switch_to(model)
        compiled, graphs = _asks(request, "compiled"), _asks(request, "graphs")
        timer = self.new_timer(on=_asks(request, "timed"), graphs=graphs)
        mesh.traffic.reset(timer)
        model.group.traffic.reset(timer)
        ATTENDED.clear()
        watch = Watch(timer, alive, progress)
        if isinstance(request, Step) and mesh.plan.pipefusion > 1:
            forward: HostedForward = HostedPipeline(model, mesh, timer, beat, self.held_state)
        else:
            forward = HostedForward(model, mesh.attention, timer, beat, self.held_state)
        if compiled:
            forward.by_graphs = CompiledRun(model.blocks, self.graphs, watch, model.weights.branches.form)
        elif graphs:
            forward.by_graphs = model.by_graphs(mesh.plan, request.calls[0], watch, self.new_recorder)
        return forward

    def _counts(self, model: HostedModel, mesh: Mesh, forward: HostedForward) -> dict[str, Any]:
        """What was counted since `_forward`: fields of `RankWork`."""
        return {
            "batch_group": mesh.batch_group,
            "collectives": mesh.traffic.calls,
            "sent_bytes": mesh.traffic.num_bytes,
            "weight_collectives": model.group.traffic.calls,
            "weight_bytes": model.group.traffic.num_bytes,
            "compiled": None if forward.by_graphs is None else forward.by_graphs.report(),
            "cached": forward.cached,
            "kept": forward.take_kept(),
            "attention": tuple(sorted(ATTENDED)),
            "exchange": forward.sequence.exchange if forward.sequence.rounded else "",
        }

    def _memory_of_step(self) -> Memory:
        """Asked in the first step of a run, where other blocks stay whole, and every `MEMORY_S`: it takes longer than a
        small step may."""
        now_s = time.perf_counter()
        asked_s, memory = self._asked or (-MEMORY_S, None)
        if memory is None or now_s - asked_s >= MEMORY_S or memory.staying_bytes != self.models.staying_bytes:
            memory = self._memory()
            self._asked = (now_s, memory)
        return memory

    def _memory(self) -> Memory:
        resident_bytes = self._process.memory_info().rss
        if self.device.type != "cuda":
            return Memory(resident_bytes=resident_bytes)
        return Memory(
            resident_bytes=resident_bytes,
            allocated_bytes=torch.cuda.memory_allocated(self.device),
            reserved_bytes=torch.cuda.memory_reserved(self.device),
            staying_bytes=self.models.staying_bytes,
        )


def _asks(request: Step | Sample, option: str) -> bool:
    """Whether any call of a request has this option."""
    return any(options.get(option) for options in request.calls)
