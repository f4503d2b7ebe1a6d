"""The pack's worker processes as the system sees them: children of a server that run a rank's entry point."""

import re
from contextlib import suppress

import psutil

from .server import ComfyServer

ENTRY = "parallel_runtime.worker.entry"


def command(process: psutil.Process) -> list[str]:
    """Its words; none where it has ended, be it a moment ago: the system then knows neither state nor command."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    return []


def workers(server: ComfyServer) -> list[psutil.Process]:
    """The living ranks of all pools of a server, oldest first."""
    children = psutil.Process(server.pid).children(recursive=True)
    return sorted((child for child in children if ENTRY in command(child)), key=lambda process: process.pid)


def worker_pids(server: ComfyServer) -> list[int]:
    """Their process ids."""
    return [process.pid for process in workers(server)]


def private_bytes(server: ComfyServer) -> list[int]:
    """Memory that belongs to each rank alone, in the order of `workers`."""
    return [process.memory_full_info().uss for process in workers(server)]


def generation(server: ComfyServer, *, ranks: int = 2) -> int:
    """The number that the living ranks of the one pool of so many were started with."""
    options = [dict(re.findall(r"--(\w+)=(\d+)", " ".join(process.cmdline()))) for process in workers(server)]
    (number,) = {each["generation"] for each in options if each["ranks"] == str(ranks)}
    return int(number)
