"""What a rank's process does once, before it answers: read its command line, import torch, join the other ranks.

Does not own the order (entry.py). Imports torch in functions alone: the parent hears of the process before that.
"""

import argparse
from datetime import timedelta
from typing import TYPE_CHECKING

from ..devices import gpu_uuid

if TYPE_CHECKING:
    import torch

# The parent watches and ends the ranks, so the backend's own patience must never end first. torch gives a group that is
# made without a timeout minutes, not what the default group has.
BACKEND_TIMEOUT = timedelta(days=7)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line that process/rank_process.py writes, and machines/launch.py."""
    parser = argparse.ArgumentParser(prog="parallel_runtime.worker.entry", description="One rank; started by the pool.")
    for name in ("rank", "ranks", "generation", "parent", "socket", "lifeline", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--store", type=int)
    where.add_argument("--meet")
    for name in ("device", "backend", "engine"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--uuid", default="")
    return parser.parse_args(arguments)


def prepare_torch(device_name: str, *, threads: int, uuid: str = "") -> "torch.device":
    """Import torch and set the process up for inference on one device. `uuid`: its GPU's, where the parent knows it."""
    import torch  # here: HELLO comes first

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    torch.set_grad_enabled(False)
    kind, _, index = device_name.partition(":")
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, int(index))
    if device.type == "cuda":
        take_gpu(device, uuid)
    return device


def take_gpu(device: "torch.device", uuid: str) -> None:
    """Have the process compute on a GPU, the one of that UUID where there is a UUID.

    Raises ValueError where the process has another GPU under that name, or none.
    """
    import torch

    if uuid and 0 < torch.cuda.device_count() <= device.index:
        found = ""
    else:
        torch.cuda.set_device(device)
        found = uuid and gpu_uuid(device.index)
    if found != uuid:
        here = f"GPU {found}" if found else "no GPU"
        raise ValueError(f"{device} is {here} in this rank and GPU {uuid} in ComfyUI")


def join_ranks(options: argparse.Namespace, device: "torch.device") -> None:
    """Make the default process group."""
    import torch.distributed as dist

    dist.init_process_group(
        options.backend,
        store=_store(options),
        rank=options.rank,
        world_size=options.ranks,
        timeout=BACKEND_TIMEOUT,
        device_id=device if options.backend == "nccl" else None,
    )


def _store(options: argparse.Namespace) -> "torch.distributed.Store":
    """Where ranks find each other: on one machine, a memfd that all of them inherited.

    A FileStore listens on nothing, where a TCPStore listens on every interface; a nameless file needs no folder, no
    space on a disk and no cleaning up. Ranks of several machines meet at a store that machines/relay.py has, on one
    address.
    """
    import torch.distributed as dist

    if options.meet is None:
        found = dist.FileStore(f"/proc/self/fd/{options.store}", options.ranks)
        found.set_timeout(BACKEND_TIMEOUT)  # which is 300 s otherwise, too few where a rank reads from a slow disk
        return found
    host, _, port = options.meet.rpartition(":")
    store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=BACKEND_TIMEOUT)
    return dist.PrefixStore("ranks", store)
