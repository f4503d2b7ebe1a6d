"""One request for a whole sampling run, on one rank.

Owns the choice between calls that run whole, a stage of a pipeline and ComfyUI's own model, and what the weights are
told. The loop over steps is in_worker_sampling.py's.
"""

from collections.abc import Callable, Mapping

import torch

from ..parallel.shard import SequenceShard
from ..timing import LaunchThrottle
from ..wire.replies import Compiling, Progress
from ..wire.requests import Sample
from .forward import Forward
from .host_copies import HostCopies
from .hosted import HostedForward
from .hosted_sampling import HostedCalls
from .in_worker_sampling import Calls, Gate, InWorkerLoop, WholeCalls
from .inputs import call_tensors
from .latent import LatentRows
from .mesh import Mesh
from .parted_latent import PartedLatent
from .pipeline import PipelinedCalls
from .steady_pipeline import SteadyCalls
from .stock_cache import SkippedCalls


def run_sample(
    forward: Forward | HostedForward,
    request: Sample,
    tensors: Mapping[str, torch.Tensor],
    *,
    mesh: Mesh,
    gate: Gate,
    pace: LaunchThrottle,
    copies: HostCopies,
    progress: Callable[[Progress | Compiling], None],
) -> InWorkerLoop:
    """Run it; what is returned can report it. Raises `RequestCancelledError`."""
    recurrence = request.recurrence
    calls: Calls
    if isinstance(forward, HostedForward):
        hosted = _staged_calls if mesh.plan.pipefusion > 1 else _hosted_calls
        calls = hosted(forward, request, tensors, mesh=mesh, copies=copies)
    else:
        passes = max(len(request.batch_groups[batch_group].conds) for batch_group in mesh.replica_groups)
        calls = _calls(forward, request, tensors, mesh=mesh, gate=gate, copies=copies, passes=passes)
    loop = InWorkerLoop(recurrence, calls, forward.timer, pace=pace, copies=copies)
    forward.weights.begin(calls.passes)
    try:
        steps = len(recurrence.step_ends)
        loop.run(gate, step_done=lambda step, spent: progress(Progress(done=step + 1, total=steps, spent=spent)))
    finally:
        forward.weights.end()
    return loop


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
            cache=request.cache,
        )
    shard = forward.shard(call_tensors(tensors, 0))
    rows = LatentRows(
        recurrence,
        share,
        tensors,
        shard,
        timer=forward.timer,
        copies=copies,
        cfg=cfg,
        cfg_axis=mesh.axes["cfg"],
        cache=request.cache,
        sides=share.conds,
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
        skipped=_skipped(request, rows, mesh=mesh, device=forward.device),
    )


def _staged_calls(
    forward: HostedForward, request: Sample, tensors: Mapping[str, torch.Tensor], *, mesh: Mesh, copies: HostCopies
) -> SteadyCalls:
    """The same on a stage of a pipeline."""
    if request.cache is not None:
        raise ValueError("a cache of ComfyUI's decides between the steps of a pipeline; use the host loop")
    latent = PartedLatent(
        request,
        request.batch_groups[mesh.batch_group],
        tensors,
        timer=forward.timer,
        copies=copies,
        cfg_axis=mesh.axes["cfg"],
        first=forward.sequence.index == 0,
    )
    return SteadyCalls(forward, request, tensors, mesh=mesh, latent=latent)


def _hosted_calls(
    forward: HostedForward, request: Sample, tensors: Mapping[str, torch.Tensor], *, mesh: Mesh, copies: HostCopies
) -> HostedCalls:
    """The calls of a run that ComfyUI's own model makes: each rank has the whole latent, as one row of numbers."""
    recurrence, share = request.recurrence, request.batch_groups[mesh.batch_group]
    rows = LatentRows(
        recurrence,
        share,
        tensors,
        SequenceShard(0, tensors["out"].shape[1], 1, 0),
        timer=forward.timer,
        copies=copies,
        cfg=request.cfg,
        cfg_axis=mesh.axes["cfg"],
        first=forward.sequence.index == 0,
        cache=request.cache,
        sides=sorted(side for cond in share.conds for side in request.calls[cond]["sides"]),
    )
    return HostedCalls(
        forward,
        recurrence,
        request.batch_groups,
        tensors,
        mesh=mesh,
        rows=rows,
        options=request.calls,
        skipped=_skipped(request, rows, mesh=mesh, device=forward.timer.device),
    )


def _skipped(request: Sample, rows: LatentRows, *, mesh: Mesh, device: torch.device) -> SkippedCalls | None:
    return None if request.cache is None else SkippedCalls(request.cache, [rows], mesh=mesh, device=device)
