"""Whose calls are tried: by the file, those of our own blocks (trial.py) or of ComfyUI's modules (hosted_trial.py)."""

import argparse
import math
from collections.abc import Sequence

from ..checkpoint import read_header
from ..devices import Device
from ..models.registry import find_family
from ..plan import ParallelPlan
from .hosted_trial import HostedTrial
from .terminal import Progress
from .trial import OwnTrial, Trial
from .workload import Workload


def open_trial(
    arguments: argparse.Namespace,
    workload: Workload,
    plans: Sequence[ParallelPlan],
    devices: Sequence[Device],
    progress: Progress,
) -> Trial:
    """The trial of `--model` under these plans; what takes a while is told.

    Raises `ValueError` for what the file or an option makes impossible.
    """
    family = find_family(read_header(arguments.model), comfyui=arguments.comfyui is not None)
    _refuse_step_cache(arguments.step_cache, plans, of_ours=None if family is None else family.title)
    if family is None:
        progress.phase("computing random calls in a ComfyUI process")
        more = {"comfyui": arguments.comfyui, "device": devices[0], "step_cache": arguments.step_cache or 0.0}
        return HostedTrial(arguments.model, arguments.dtype, workload, plans, steps=arguments.steps, **more)
    if arguments.frames is not None:
        raise ValueError(f"--frames={arguments.frames}: {family.title} makes images; leave --frames out")
    if arguments.comfyui is not None:
        raise ValueError(
            f"--comfyui {arguments.comfyui}: blocks of ours compute {family.title}, beside diffusers; leave it out"
        )
    on_cpu = devices[0].kind == "cpu"
    return OwnTrial(family, arguments.model, arguments.dtype, workload, plans, steps=arguments.steps, on_cpu=on_cpu)


def _refuse_step_cache(threshold: float | None, plans: Sequence[ParallelPlan], *, of_ours: str | None) -> None:
    """Raise `ValueError` for a step cache that this family, or one of the plans, has not."""
    if threshold is None:
        return
    if not 0.0 < threshold < math.inf:
        raise ValueError(
            f"--step-cache={threshold:g} is no number above 0; use for example 0.1, or leave --step-cache out"
        )
    if of_ours is not None:
        raise ValueError(f"--step-cache: blocks of this pack compute {of_ours}, and keep no step cache; leave it out")
    for plan in plans:
        if plan.pipefusion > 1:
            raise ValueError(
                f"--step-cache needs all blocks on one rank, and pipefusion={plan.pipefusion} gives each some; leave "
                "--step-cache out, or use a plan of ulysses, ring, cfg or data"
            )
