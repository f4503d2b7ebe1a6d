"""What one rank holds and what it answers: models and meshes by number, loaded, changed, run and freed.

Owns the handles and the requests. Marries one adapter, one set of weights and one plan's strategy; the loop over
blocks is forward.py's. Knows no ComfyUI, no socket, and no arithmetic of a model.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import psutil
import torch

from ..errors import RequestCancelledError
from ..strategies.collectives import Axis
from ..strategies.lanes import Piece
from ..timing import RegionTimer, wait_for
from ..wire.channel import SegmentTable
from ..wire.protocol import Message, TensorSpec
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
from .compiled import CompiledFlux, Graphs, Watch
from .forward import Forward
from .host_copies import HostCopies
from .host_memory import give_back_heap
from .latent import LatentRows, call_tensors
from .loading import LoadedModel, open_model
from .measure import free_bytes, measure
from .mesh import Groups, Mesh
from .pacing import Pace
from .pipeline import PipelinedCalls
from .pipelined_step import HeldKeys, PipelinedStep
from .repeated import RepeatedInputs, RequestInputs
from .resident import Gate, ResidentLoop, WholeCalls
from .trace import Trace


class Engine:
    """What one rank holds and does. `handle` is called with one request at a time."""

    def __init__(self, *, rank: int, device: torch.device, segments: SegmentTable) -> None:
        self.rank = rank
        self.device = device
        self.segments = segments
        self.models: dict[int, LoadedModel] = {}
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
        progress: Callable[[dict], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> dict:
        """Do what the message asks and return the reply's body. Raises what goes wrong.

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
        progress: Callable[[dict], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> dict:
        def report(loaded: int, total: int) -> None:
            beat()
            progress({"loaded_bytes": loaded, "total_bytes": total})

        if not request.first_rank <= self.rank < request.layout.ranks:  # it has it already, or sleeps
            return {"parameter_bytes": 0, "memory": self._memory()}
        began = time.perf_counter()
        group = Axis("shards") if request.mesh is None else self.meshes[request.mesh].shard_axis
        opened = open_model(request.spec, request.layout, rank=self.rank, device=self.device, group=group)
        evicted = self._make_room(opened.needed_bytes, order=request.eviction_order, budget=request.budget_bytes)
        try:
            opened.model.weights.load(progress=report, cancelled=cancelled)
        except RequestCancelledError:  # what had to go for it is gone all the same, and the parent must know
            self._give_back()
            return {"cancelled": True, "evicted": evicted}
        self.models[request.model] = opened.model
        wait_for(self.device)
        return {
            "load_s": time.perf_counter() - began,
            "parameter_bytes": opened.model.weights.parameter_bytes,
            "dtype": str(opened.model.weights.dtype).removeprefix("torch."),
            "evicted": evicted,
            "memory": self._memory(),
        }

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
                self._give_back()
        return evicted

    def _unload(self, request: Unload) -> dict:
        self.repeated.clear()
        self.models.pop(request.model, None)
        self.held_keys.drop()
        self._give_back()
        return {"memory": self._memory()}

    def _of_mesh(self, request: MakeMesh | CheckCopies | Probe) -> dict:
        if isinstance(request, MakeMesh):
            plan, groups, show_waiting = request.plan, self.groups, self._show_waiting
            self.meshes[request.mesh] = Mesh(plan, device=self.device, groups=groups, show_waiting=show_waiting)
            return {}
        mesh = self.meshes[request.mesh]
        if isinstance(request, Probe):
            return mesh.probe(self.device)
        return {"wrong_bytes": mesh.wrong_bytes(self.device)}

    def _trim(self, request: Trim) -> dict:
        """Keep nothing of a sampling run that has ended; what torch caches goes where others compute on the device."""
        self.repeated.clear()
        self.held_keys.drop()
        if self.rank in request.ranks:
            self._give_back()
        return {"memory": self._memory()}

    def _change(
        self,
        request: ChangeWeights | SetStrengths,
        specs: tuple[TensorSpec, ...],
        *,
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> dict:
        model = self.models.get(request.model)
        if model is None:  # a rank that the model's layout leaves out has nothing to change
            return {"set": True, "memory": self._memory()}
        if isinstance(request, SetStrengths):
            return {"set": model.changes.set_strengths(request.strengths), "memory": self._memory()}
        tensors = {spec.name: self.segments.tensor(spec) for spec in specs}
        model.changes.take(request, tensors, cancelled=cancelled, beat=beat)
        return {"memory": self._memory()}

    def _step(
        self,
        request: Step,
        specs: tuple[TensorSpec, ...],
        *,
        progress: Callable[[dict], None],
        beat: Callable[[], None],
    ) -> dict:
        mesh = self.meshes[request.mesh]
        if not mesh.member:
            return {"member": False, "memory": self._memory()}
        began = time.perf_counter()
        model = self.models[request.model]
        tensors = {spec.name: self.segments.tensor(spec) for spec in specs}
        sent = self.repeated.of_request(tensors, request.repeated)
        pace = Pace(self.device, beat)
        forward = self._forward(model, mesh, sent, calls=request.calls, progress=progress, beat=pace.block_queued)
        lanes = [[Piece(*piece) for piece in lane] for lane in request.lanes]
        pieces = lanes[mesh.lane]
        passes = max(len(lanes[lane]) for lane in mesh.replica_lanes)

        def run() -> None:
            if mesh.plan.pipefusion > 1:
                return PipelinedStep(forward, mesh, step=request, tensors=tensors, held=self.held_keys).run()
            model.weights.begin(passes)
            for piece in pieces:
                options = request.calls[piece.call]
                whole = call_tensors(tensors, 0 if options.get("first_row") else piece.call)
                forward.run(piece, whole | {"out": tensors[f"{piece.call}.out"]}, options)
            for _ in range(passes - len(pieces)):
                model.weights.idle_pass(forward.beat)  # the replica's other lanes need this rank's part of the weights

        report: dict = {"pieces": pieces, "began_s": began}
        room = tensors.get(f"trace.{self.rank}")
        if room is None:
            run()
        else:
            report["trace_bytes"] = self._traced(run, room)
        pace.drain()
        # Also where nobody times regions, and where a rank writes no result and so has waited for nothing yet: the
        # request ends with the last rank's answer, so to wait for the device delays nobody.
        forward.timer.mark()
        (ended,) = forward.timer.moments()
        report["step_s"] = ended - began
        if forward.timer.on:
            report["regions"] = forward.timer.seconds()
        return report | self._report(model, mesh, forward)

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
        progress: Callable[[dict], None],
        beat: Callable[[], None],
    ) -> dict:
        mesh = self.meshes[request.mesh]
        self.held_keys.drop()
        if not mesh.member:
            return {"member": False, "memory": self._memory()}
        model = self.models[request.model]
        sent = self.repeated.of_request({}, {})
        pace, copies = Pace(self.device, beat), HostCopies(self.device)

        def block_queued() -> None:
            pace.block_queued()
            copies.collect()

        forward = self._forward(model, mesh, sent, calls=request.calls, progress=progress, beat=block_queued)
        tensors = {spec.name: self.segments.tensor(spec) for spec in specs}
        program, share = request.program, request.lanes[mesh.lane]
        passes = max(len(request.lanes[lane].conds) for lane in mesh.replica_lanes)
        calls = _calls(forward, request, tensors, mesh=mesh, gate=gate, copies=copies, passes=passes)
        loop = ResidentLoop(program, calls, forward.timer, pace=pace, copies=copies)
        model.weights.begin(calls.passes)
        try:
            loop.run(gate, step_done=lambda step: progress({"step": step}))
        finally:
            model.weights.end()
        report = loop.report() | {"pieces": [[cond, share.start, share.stop] for cond in share.conds]}
        return report | self._report(model, mesh, forward)

    def _forward(
        self,
        model: LoadedModel,
        mesh: Mesh,
        sent: RequestInputs,
        *,
        calls: Sequence[Options],
        progress: Callable[[dict], None],
        beat: Callable[[], None],
    ) -> Forward:
        """The model under a plan, counters at zero. Raises `ValueError` when its file was changed."""
        model.weights.refuse_changed_file()
        timer = self.new_timer(on=_timed(calls))
        adapter = model.adapter
        if _compiled(calls):
            adapter = CompiledFlux(adapter.config, self.graphs, Watch(timer, beat, progress))
        mesh.traffic.reset(timer)
        model.group.traffic.reset(timer)
        return Forward(adapter, model.weights, mesh.sequence(), self.device, timer, beat, sent)

    def _report(self, model: LoadedModel, mesh: Mesh, forward: Forward) -> dict:
        """What was counted since `_forward`."""
        return {
            "lane": mesh.lane,
            "calls": mesh.traffic.calls,
            "bytes": mesh.traffic.num_bytes,
            "weight_calls": model.group.traffic.calls,
            "weight_bytes": model.group.traffic.num_bytes,
            "memory": self._memory(),
        } | (forward.adapter.report() if isinstance(forward.adapter, CompiledFlux) else {})

    def _give_back(self) -> None:
        """Memory kept for later goes back to the host and the device, where ComfyUI or another rank may want it."""
        give_back_heap()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _memory(self) -> dict[str, int]:
        """Bytes this rank occupies: resident in the process and, on a GPU, allocated and reserved by torch."""
        memory = {"resident_bytes": self._process.memory_info().rss}
        if self.device.type == "cuda":
            memory["allocated_bytes"] = torch.cuda.memory_allocated(self.device)
            memory["reserved_bytes"] = torch.cuda.memory_reserved(self.device)
        return memory


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
    program, share, cfg = request.program, request.lanes[mesh.lane], request.cfg
    options, modulation_bytes = request.calls, request.modulation_bytes
    if mesh.plan.pipefusion > 1:
        return PipelinedCalls(
            forward,
            program,
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
    rows = LatentRows(program, share, tensors, shard, timer=forward.timer, copies=copies, cfg=cfg, cfg_axis=mesh["cfg"])
    return WholeCalls(
        forward,
        program,
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
