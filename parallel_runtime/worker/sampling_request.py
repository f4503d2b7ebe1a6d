"""One request for a whole sampling run, on one rank.

Owns the choice between calls that run whole and a stage of a pipeline. The loop over steps is worker_loop.py's.
"""

from collections.abc import Callable, Mapping

import torch

from ..timing import LaunchThrottle
from ..wire.replies import Compiling, Progress
from ..wire.requests import Sample
from .host_copies import HostCopies
from .hosted import HostedForward
from .hosted_sampling import HostedCalls
from .latent import AllRows, LatentRows
from .mesh import Mesh
from .parted_latent import PartedLatent
from .steady_pipeline import SteadyCalls
from .stock_cache import SkippedCalls
from .worker_loop import Calls, Gate, WorkerLoop


def run_sample(
    forward: HostedForward,
    request: Sample,
    tensors: Mapping[str, torch.Tensor],
    *,
    mesh: Mesh,
    gate: Gate,
    pace: LaunchThrottle,
    copies: HostCopies,
    progress: Callable[[Progress | Compiling], None],
) -> WorkerLoop:
    """Run it; what is returned can report it. Raises `RequestCancelledError`."""
    recurrence = request.recurrence
    made = _staged_calls if mesh.plan.pipefusion > 1 else _hosted_calls
    calls: Calls = made(forward, request, tensors, mesh=mesh, copies=copies)
    loop = WorkerLoop(recurrence, calls, forward.timer, pace=pace, copies=copies)
    steps = len(recurrence.step_ends)
    loop.run(gate, step_done=lambda step, spent: progress(Progress(done=step + 1, total=steps, spent=spent)))
    return loop


def _staged_calls(
    forward: HostedForward, request: Sample, tensors: Mapping[str, torch.Tensor], *, mesh: Mesh, copies: HostCopies
) -> SteadyCalls:
    """The calls of a run on a stage of a pipeline."""
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
        AllRows(),
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
