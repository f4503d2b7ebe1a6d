"""Several ranks on one GPU, through gloo or through NCCL, so that a machine with one GPU runs every plan.

`share(exchange)` changes this process, before it starts a pool. Through "gloo", exchanges go by the host's memory: the
pack does so by itself where two ranks have one device. Through "nccl", each rank says that it is a host of its own
(NCCL_HOSTID, in path/sitecustomize.py): NCCL, which refuses two ranks of a host on one GPU, then takes them for two
machines that exchange over sockets. Its streams, its order of operations and its kernels are the real ones; its speed
says nothing, since one GPU takes its ranks in turn.

Owns: what is changed in the pack for that. In ComfyUI, the variable SHARE_ONE_GPU does it (probe_nodes/starting.py).
"""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXCHANGES = ("nccl", "gloo")
PATH = str(Path(__file__).resolve().parent / "path")


def share(exchange: str, *, pack: str = "") -> None:
    """Allow a device to be named several times; `pack` is the module that holds `parallel_runtime`, with a dot."""
    devices = importlib.import_module(f"{pack}parallel_runtime.devices")
    process = importlib.import_module(f"{pack}parallel_runtime.process.rank_process")
    environment = process.rank_environment

    def with_path(ours: Mapping[str, str], settings: Any) -> dict[str, str]:
        told = environment(ours, settings)
        return {**told, "PYTHONPATH": os.pathsep.join((told["PYTHONPATH"], PATH))}

    devices._refuse_repeats = lambda _: None
    process.rank_environment = with_path
    stocks = process.RankSettings.backend.fget

    def backend(settings: Any) -> str:
        on_gpus = all(device.kind == "cuda" for device in settings.devices)
        return exchange if on_gpus else str(stocks(settings))

    process.RankSettings.backend = property(backend)
