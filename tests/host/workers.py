"""The pack's worker processes as the system sees them: children of a server that run a rank's entry point."""

from __future__ import annotations

import psutil

from .server import ComfyServer

ENTRY = "parallel_runtime.rank.worker"


def workers(server: ComfyServer) -> list[psutil.Process]:
    """The living ranks of all pools of a server, oldest first."""
    children = psutil.Process(server.pid).children(recursive=True)
    found = [child for child in children if child.status() != psutil.STATUS_ZOMBIE and ENTRY in child.cmdline()]
    return sorted(found, key=lambda process: process.pid)


def worker_pids(server: ComfyServer) -> list[int]:
    """Their process ids."""
    return [process.pid for process in workers(server)]


def private_bytes(server: ComfyServer) -> list[int]:
    """Memory that belongs to each rank alone, in the order of `workers`."""
    return [process.memory_full_info().uss for process in workers(server)]
