"""Memory of a device that the host computes on too: after a sampling run, a VAE decode finds what ranks only cached.

A rank and the host, each a process with a book of its own, have device 0. What the driver has left for the host is the
device less what the rank's allocator has reserved.
"""

import json
from pathlib import Path

import torch

from gpu.cases import Reference
from gpu.pretend_cuda.forked import with_device
from gpu.pretend_cuda.pool import PretendPool
from gpu.pretend_cuda.trial import Trial, wrong
from parallel_runtime.devices import Device

PLANS = ("ulysses=2", "pipefusion=2", "cfg=2")
UNLIMITED = 24 << 30
HOST_DEVICE = Device("cuda", 0)


def decode_error(pool: PretendPool, reference: Reference, trial: Trial) -> str:
    """What is wrong with the memory that a decode finds after a trial's run, nothing when all is well.

    The device has room for the rank's weights and the decode, and for nothing else.
    """
    pool.load(reference.spec, trial.parallel_plan)
    weights = pool.books()[0]["allocated"]
    needed, _ = decode(UNLIMITED)
    capacity = weights + needed
    if said := wrong(pool, reference, trial):
        return said
    cached = pool.books()
    _, early = decode(capacity - cached[0]["reserved"])
    pool.give_back([HOST_DEVICE])
    given = pool.books()
    _, late = decode(capacity - given[0]["reserved"])
    if "out of memory" not in early:
        return f"a decode of {needed} bytes fits beside {cached[0]} before anything is given back"
    if late:
        return f"after the run {given[0]} of {weights} bytes of weights are left: {late}"
    if given[1]["reserved"] != cached[1]["reserved"]:
        return f"rank 1, on a device of its own, gave back too: {cached[1]} became {given[1]}"
    return wrong(pool, reference, trial)


def decode(free_bytes: int) -> tuple[int, str]:
    """As a VAE does: the bytes that it takes at most, and what the device says when it has only `free_bytes`."""
    needed, said = json.loads(with_device(lambda: _decode(free_bytes)))
    return needed, said


def _decode(free_bytes: int) -> str:
    from pretend_cuda.device import PRETENCE  # type: ignore[import-not-found]  # with_device has put it on the path

    PRETENCE.lib.pretend_set_capacity(free_bytes)
    try:
        with torch.inference_mode():
            latent = torch.zeros(1, 16, 16, 18, device="cuda:0")
            for channels in (64, 64, 32, 3):
                kernel = torch.zeros(channels, latent.shape[1], 3, 3, device="cuda:0")
                latent = torch.nn.functional.conv2d(latent.repeat_interleave(2, 2).repeat_interleave(2, 3), kernel)
    except torch.OutOfMemoryError as error:
        return json.dumps([0, str(error).splitlines()[0]])
    return json.dumps([torch.cuda.memory_reserved(0), ""])


def checks(folder: Path, reference: Reference, match: str) -> tuple[int, list[str]]:
    """Every kind of plan's; how many they are, and what is wrong."""
    trials = [Trial(plan=plan) for plan in PLANS if match in plan]
    found = []
    for trial in trials:
        with PretendPool(2, folder) as pool:
            if said := decode_error(pool, reference, trial):
                found.append(f"{trial.plan}: {said}")
    return len(trials), found
