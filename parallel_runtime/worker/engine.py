"""What one rank holds and what it answers: models and meshes by number, loaded, changed, run and freed.

Owns the handles and the requests. Marries one adapter, one set of weights and one plan's strategy; the loop over
blocks is forward.py's. Knows no ComfyUI, no socket, and no arithmetic of a model.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import psutil
import torch

from ..errors import RequestCancelledError
from ..models.graphs import Graphs, Watch
from ..parallel.collectives import Axis
from ..plan import BatchSlice
from ..timing import Pace, RegionTimer, wait_for, wait_for_all
from ..weights.host_memory import give_back_heap
from ..wire.channel import SegmentTable
from ..wire.protocol import Message, TensorSpec
from ..wire.replies import (
    Cancelled,
    CheckReply,
    Compiling,
    EmptyReply,
    LoadReply,
    Memory,
    MemoryReply,
    ProbeReply,
    Progress,
    RankStep,
    SampleReply,
    StepReply,
    StrengthsReply,
)
from ..wire.requests import (
    AnyRequest,
    ChangeWeights,
    CheckCopies,
    Load,
    MakeMesh,
    MeasureDevice,
    Options,
    Probe,
    Sample,
    SetStrengths,
    Step,
    Trim,
    Unload,
)
from .forward import Forward
from .host_copies import HostCopies
from .hosted import HostedForward, HostedModel
from .in_worker_sampling import Gate, InWorkerLoop, WholeCalls
from .inputs import RepeatedInputs, RequestInputs, call_tensors
from .latent import LatentRows
from .loading import LoadedModel, open_model
from .measure import free_bytes, measure
from .mesh import Groups, Mesh
from .pipeline import PipelinedCalls
from .pipelined_step import HeldKeys, PipelinedStep
from .trace import Trace

NO_STAGES = "this model has no stages and no sampling loop in the workers; use pipefusion=1 and ComfyUI's own sampler"


class Engine:
    """What one rank holds and does. `handle` is called with one request at a time."""

    def __init__(self, *, rank: int, device: torch.device, segments: SegmentTable) -> None:
        self.rank = rank
        self.device = device
        self.segments = segments
        self.models: dict[int, LoadedModel | HostedModel] = {}
        self.meshes: dict[int, Mesh] = {}
        self.groups = Groups()
        self.held_keys = HeldKeys()  # of calls that one like them will follow
        self.repeated = RepeatedInputs(device)
        self._show_waiting = partial(segments.show_waiting, rank)
        self.graphs = Graphs()
        self._process = psutil.Process()  # asked after every request, and slow to make

    @torch.inference_mode()
    def handle(
        self,
        message: Message,
        *,
        progress: Callable[[Progress | Compiling], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> object:
        """Do what the message asks and return the reply that its request names. Raises what goes wrong.

        All of it in inference mode, so that every tensor is of one kind: a graph made for weights of the other would
        not serve these.
        """
        request: AnyRequest = message.body
        if isinstance(request, Load):
            return self._load(request, progress=progress, cancelled=cancelled, beat=beat)
        if isinstance(request, Unload):
            return self._unload(request)
        if isinstance(request, ChangeWeights | SetStrengths):
            return self._change(request, message.tensors, cancelled=cancelled, beat=beat)
        if isinstance(request, MakeMesh | CheckCopies | Probe):
            return self._of_mesh(request)
        if isinstance(request, Step):
            return self._step(request, message.tensors, progress=progress, beat=beat)
        if isinstance(request, Sample):
            gate = Gate(self.segments, cancelled=cancelled, show_waiting=self._show_waiting)
            return self._sample(request, message.tensors, gate=gate, progress=progress, beat=beat)
        if isinstance(request, MeasureDevice):
            return measure(self.device)
        if isinstance(request, Trim):
            return self._trim(request)
        raise ValueError(f"a rank cannot do {message.op.name}; wire/requests.py has what it can be asked")

    def new_timer(self, *, on: bool) -> RegionTimer:
        """What times one request on this rank; its regions too when it is `on`."""
        return RegionTimer(self.device, on=on)

    def _load(
        self,
        request: Load,
        *,
        progress: Callable[[Progress | Compiling], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> LoadReply | Cancelled:
        def report(loaded: int, total: int) -> None:
            beat()
            progress(Progress(done=loaded, total=total))

        if not request.first_rank <= self.rank < request.layout.ranks:  # it has it already, or sleeps
            return LoadReply(memory=self._memory())
        began = time.perf_counter()
        group = Axis("shards") if request.mesh is None else self.meshes[request.mesh].shard_axis
        opened = open_model(request.spec, request.layout, rank=self.rank, device=self.device, group=group)
        evicted = self._make_room(opened.needed_bytes, order=request.eviction_order, budget=request.budget_bytes)
        try:
            opened.model.weights.load(progress=report, cancelled=cancelled)
        except RequestCancelledError:  # what had to go for it is gone all the same, and the parent must know
            self._give_back()
            return Cancelled(evicted=tuple(evicted))
        self.models[request.model] = opened.model
        wait_for(self.device)
        return LoadReply(
            load_s=time.perf_counter() - began,
            parameter_bytes=opened.model.weights.parameter_bytes,
            dtype=str(opened.model.weights.dtype).removeprefix("torch."),
            evicted=tuple(evicted),
            memory=self._memory(),
        )

    def _make_room(self, needed: int, *, order: Sequence[int], budget: int | None) -> list[int]:
        """Evict models in the given order until `needed` bytes fit; returns the handles of those evicted.

        One that does not fit with all others gone is loaded all the same: what the device says is the better error.
        """
        evicted = []
        for handle in order:
            held = sum(model.weights.device_bytes for model in self.models.values())
            if needed <= (free_bytes(self.device) if budget is None else budget - held):
                break
            if self.models.pop(handle, None) is not None:
                evicted.append(handle)
                self._let_go()
        return evicted

    def _unload(self, request: Unload) -> MemoryReply:
        self.repeated.clear()
        self.models.pop(request.model, None)
        self.held_keys.drop()
        self._let_go()
        return MemoryReply(memory=self._memory())

    def _of_mesh(self, request: MakeMesh | CheckCopies | Probe) -> EmptyReply | CheckReply | ProbeReply:
        if isinstance(request, MakeMesh):
            return self._make_mesh(request)
        mesh = self.meshes[request.mesh]
        if isinstance(request, Probe):
            return mesh.probe(self.device)
        return CheckReply(wrong_bytes=mesh.wrong_bytes(self.device))

    def _make_mesh(self, request: MakeMesh) -> EmptyReply:
        for dropped in request.dropped:
            del self.meshes[dropped]
        if request.freed:
            wait_for_all(self.device)
            self.groups.free(request.freed)
        plan, groups, show_waiting = request.plan, self.groups, self._show_waiting
        self.meshes[request.mesh] = Mesh(plan, device=self.device, groups=groups, show_waiting=show_waiting)
        return EmptyReply()

    def _trim(self, request: Trim) -> MemoryReply:
        """Keep nothing of a sampling run that has ended; what torch caches goes where others compute on the device."""
        self.repeated.clear()
        self.held_keys.drop()
        if self.rank in request.ranks:
            self._give_back()
        return MemoryReply(memory=self._memory())

    def _change(
        self,
        request: ChangeWeights | SetStrengths,
        specs: tuple[TensorSpec, ...],
        *,
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> MemoryReply:
        model = self.models.get(request.model)  # a rank that the model's layout leaves out has nothing to change
        if isinstance(request, SetStrengths):
            changed = model is None or model.changes.set_strengths(request.strengths)
            return StrengthsReply(changed=changed, memory=self._memory())
        if model is not None:
            tensors = {spec.name: self.segments.tensor(spec) for spec in specs}
            model.changes.take(request, tensors, cancelled=cancelled, beat=beat)
        return MemoryReply(memory=self._memory())

    def _step(
        self,
        request: Step,
        specs: tuple[TensorSpec, ...],
        *,
        progress: Callable[[Progress | Compiling], None],
        beat: Callable[[], None],
    ) -> StepReply:
        mesh = self.meshes[request.mesh]
        if not mesh.member:
            return StepReply(memory=self._memory(), ran=None)
        began = time.perf_counter()
        model = self.models[request.model]
        tensors = {spec.name: self.segments.tensor(spec) for spec in specs}
        sent = self.repeated.of_request(tensors, request.repeated)
        pace = Pace(self.device, beat)
        forward = self._forward(model, mesh, sent, calls=request.calls, progress=progress, beat=pace.block_queued)
        pieces = request.batch_groups[mesh.batch_group]
        passes = max(len(request.batch_groups[batch_group]) for batch_group in mesh.replica_groups)

        def run() -> None:
            if mesh.plan.pipefusion > 1:
                if isinstance(forward, HostedForward):
                    raise ValueError(NO_STAGES)
                return PipelinedStep(forward, mesh, step=request, tensors=tensors, held=self.held_keys).run()
            if isinstance(forward, HostedForward):
                return forward.run_batch_groups(request.batch_groups, mesh, tensors, request.calls)
            forward.weights.begin(passes)
            for piece in pieces:
                options = request.calls[piece.call]
                whole = call_tensors(tensors, 0 if options.get("first_row") else piece.call)
                forward.run(piece, whole | {"out": tensors[f"{piece.call}.out"]}, options)
            for _ in range(
                passes - len(pieces)
            ):  # the replica's other batch groups need this rank's part of the weights
                forward.weights.join_gathers(forward.beat)

        room = tensors.get(f"trace.{self.rank}")
        trace_bytes = None
        if room is None:
            run()
        else:
            trace_bytes = self._traced(run, room)
        pace.drain()
        # Also where nobody times regions, and where a rank writes no result and so has waited for nothing yet: the
        # request ends with the last rank's answer, so to wait for the device delays nobody.
        forward.timer.mark()
        (ended,) = forward.timer.moments()
        ran = RankStep(
            pieces=pieces,
            began_s=began,
            step_s=ended - began,
            regions=forward.timer.seconds() if forward.timer.on else None,
            trace_bytes=trace_bytes,
            tokens=forward.tokens if isinstance(forward, HostedForward) else None,
            **self._counts(model, mesh, forward),
        )
        return StepReply(memory=self._memory(), ran=ran)

    def _traced(self, run: Callable[[], None], room: torch.Tensor) -> int:
        """Run under the profiler; the trace goes to `room`, (bytes,), as far as that goes. Returns its own length."""
        trace = Trace(self.rank, self.device)
        trace.of(run)
        fitting = trace.data[: room.numel()]
        room[: len(fitting)] = torch.frombuffer(bytearray(fitting), dtype=torch.uint8)
        return len(trace.data)

    def _sample(
        self,
        request: Sample,
        specs: tuple[TensorSpec, ...],
        *,
        gate: Gate,
        progress: Callable[[Progress | Compiling], None],
        beat: Callable[[], None],
    ) -> SampleReply:
        mesh = self.meshes[request.mesh]
        self.held_keys.drop()
        if not mesh.member:
            return SampleReply(memory=self._memory(), ran=None)
        model = self.models[request.model]
        sent = self.repeated.of_request({}, {})
        pace, copies = Pace(self.device, beat), HostCopies(self.device)

        def block_queued() -> None:
            pace.block_queued()
            copies.collect()

        forward = self._forward(model, mesh, sent, calls=request.calls, progress=progress, beat=block_queued)
        if isinstance(forward, HostedForward):
            raise ValueError(NO_STAGES)
        tensors = {spec.name: self.segments.tensor(spec) for spec in specs}
        recurrence, share = request.recurrence, request.batch_groups[mesh.batch_group]
        passes = max(len(request.batch_groups[batch_group].conds) for batch_group in mesh.replica_groups)
        calls = _calls(forward, request, tensors, mesh=mesh, gate=gate, copies=copies, passes=passes)
        loop = InWorkerLoop(recurrence, calls, forward.timer, pace=pace, copies=copies)
        model.weights.begin(calls.passes)
        try:
            steps = len(recurrence.step_ends)
            loop.run(gate, step_done=lambda step: progress(Progress(done=step + 1, total=steps)))
        finally:
            model.weights.end()
        pieces = tuple(BatchSlice(cond, share.start, share.stop) for cond in share.conds)
        ran = loop.report(pieces=pieces, **self._counts(model, mesh, forward))
        return SampleReply(memory=self._memory(), ran=ran)

    def _forward(
        self,
        model: LoadedModel | HostedModel,
        mesh: Mesh,
        sent: RequestInputs,
        *,
        calls: Sequence[Options],
        progress: Callable[[Progress | Compiling], None],
        beat: Callable[[], None],
    ) -> Forward | HostedForward:
        """The model under a plan, counters at zero. Raises `ValueError` when its file was changed."""
        if (file := model.weights.viewed_file) is not None:
            file.refuse_changed()
        timer = self.new_timer(on=_timed(calls))
        mesh.traffic.reset(timer)
        model.group.traffic.reset(timer)
        if isinstance(model, HostedModel):
            return HostedForward(model, mesh.uneven_sequence, timer, beat, sent)
        adapter = model.adapter
        if _compiled(calls):
            adapter = adapter.compiled(self.graphs, Watch(timer, beat, progress))
        return Forward(adapter, model.weights, mesh.sequence, self.device, timer, beat, sent)

    def _counts(self, model: LoadedModel | HostedModel, mesh: Mesh, forward: Forward | HostedForward) -> dict[str, Any]:
        """What was counted since `_forward`: fields of `RankWork`."""
        return {
            "batch_group": mesh.batch_group,
            "collectives": mesh.traffic.calls,
            "sent_bytes": mesh.traffic.num_bytes,
            "weight_collectives": model.group.traffic.calls,
            "weight_bytes": model.group.traffic.num_bytes,
            "compiled": None if forward.adapter is None else forward.adapter.report(),
        }

    def _let_go(self) -> None:
        """Free a model that was dropped: a module of ComfyUI's and the hooks on it refer to each other."""
        gc.collect()
        self._give_back()

    def _give_back(self) -> None:
        """Memory kept for later goes back to the host and the device, where ComfyUI or another rank may want it."""
        give_back_heap()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _memory(self) -> Memory:
        resident_bytes = self._process.memory_info().rss
        if self.device.type != "cuda":
            return Memory(resident_bytes=resident_bytes)
        return Memory(
            resident_bytes=resident_bytes,
            allocated_bytes=torch.cuda.memory_allocated(self.device),
            reserved_bytes=torch.cuda.memory_reserved(self.device),
        )


def _calls(
    forward: Forward,
    request: Sample,
    tensors: Mapping[str, torch.Tensor],
    *,
    mesh: Mesh,
    gate: Gate,
    copies: HostCopies,
    passes: int,
) -> WholeCalls | PipelinedCalls:
    """The calls of a run as this rank makes them: whole, or as a stage of a pipeline."""
    recurrence, share, cfg = request.recurrence, request.batch_groups[mesh.batch_group], request.cfg
    options, modulation_bytes = request.calls, request.modulation_bytes
    if mesh.plan.pipefusion > 1:
        return PipelinedCalls(
            forward,
            recurrence,
            share,
            tensors,
            mesh=mesh,
            gate=gate,
            copies=copies,
            options=options,
            cfg=cfg,
            passes_a_chunk=passes,
            modulation_bytes=modulation_bytes,
            timeline=request.timeline,
        )
    shard = forward.shard(call_tensors(tensors, 0))
    rows = LatentRows(
        recurrence, share, tensors, shard, timer=forward.timer, copies=copies, cfg=cfg, cfg_axis=mesh.axes["cfg"]
    )
    return WholeCalls(
        forward,
        recurrence,
        share,
        tensors,
        rows=rows,
        options=options,
        passes_a_call=passes,
        modulation_bytes=modulation_bytes,
    )


def _timed(calls: Sequence[Options]) -> bool:
    """Whether the caller of any of the request's calls wants its regions timed; by default, no."""
    return any(options.get("timed") for options in calls)


def _compiled(calls: Sequence[Options]) -> bool:
    """Whether the caller of any of the request's calls wants its blocks compiled; by default, no."""
    return any(options.get("compiled") for options in calls)
