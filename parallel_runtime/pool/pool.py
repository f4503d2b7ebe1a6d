"""The pool: one set of workers for a set of devices, asked one thing at a time.

Owns what callers see: starting, loading, stepping, closing, and which models and meshes the present generation of workers
has. Does not own how ranks are asked, watched and ended (supervisor.py) nor where tensors lie (arena.py).

States: `stopped` -> `starting` -> `idle` <-> `busy`; any failure leads to `failed`, from which the next call starts a fresh
generation, until three have failed within a minute. Models and meshes are numbered handles inside a generation: another
plan makes other process groups, never other processes.

A cancelled request is left to finish, since a collective must never be abandoned; the next call first takes in the
answers that are still owed. Until then nobody writes the shared memory that the request reads.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

import torch

from ..checkpoint import ModelSpec
from ..devices import Device
from ..errors import PoolError
from ..plan import ParallelPlan
from ..wire.protocol import MAX_RANKS, Op
from .arena import OUT, Arena
from .process import RankSettings
from .supervisor import TICK_S, Generation, Request

State = Literal["stopped", "starting", "idle", "busy", "failed"]
Check = Callable[[], None]

ENGINE = "parallel_runtime.rank.engine:Engine"
SEGMENT_BYTES = 64 << 20  # of address space; memory is used where tensors have lain
MAX_FAILURES = 3
FAILURE_WINDOW_S = 60.0
RELEASE = "use Release Parallel Pool, then queue again"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadResult:
    """A loaded model: the ranks' own reports in rank order, and how long the load took (for all of them)."""

    ranks: list[dict[str, Any]]
    wall_s: float


@dataclass(frozen=True)
class StepResult:
    """A step's result in memory of its own, the ranks' reports in rank order, and the time from request to answer."""

    out: torch.Tensor
    ranks: list[dict[str, Any]]
    wall_s: float
