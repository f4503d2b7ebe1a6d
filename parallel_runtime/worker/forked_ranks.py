"""Ranks forked from a process that has a model: each computes the same calls by a plan, over gloo, on the CPU.

Owns their processes: one that fails or is silent ends all. Each computes with one thread, since OpenMP's other threads
are not forked. What travels back is JSON. Three ranks have unequal shares: of usual numbers of tokens equal ones begin
at multiples of 32, where nothing shows that a model mixes runs of 2, 4 or 8 tokens.
"""

import json
import os
import selectors
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import in_one_line, note_module
from ..kernel_calls import MFD_CLOEXEC, memfd_create
from ..models.hosted.hooks import SharedModel
from ..models.specs.spec import ShardingSpec
from ..parallel.attention import SequenceParallelAttention
from ..parallel.collectives import Axis
from ..proof import finite, relative_error
from .own_tokens import OwnTokens

LONGEST_S = 300.0  # that ranks may take for all calls
SHARES = {3: (2, 1, 4)}  # by ranks
NO_MEMORY = "can't allocate memory"  # of torch, in a RuntimeError


class RanksDisagreeError(ValueError):
    """The calls cannot be computed by the plan; the text is what the first rank raised."""


class RanksLostError(ValueError):
    """A rank ended without an answer, is silent, or lacks what it takes to compute: nothing is known of the plan."""


def errors_of(
    model: torch.nn.Module,
    spec: ShardingSpec,
    calls: Sequence[Callable[[], torch.Tensor]],
    wanted: Sequence[torch.Tensor],
    ranks: int,
) -> tuple[list[float], float]:
    """Relative error of each call over so many ranks, the largest of any rank, and the least of the first call when
    ranks exchange nothing.

    Raises RanksDisagreeError for what raises in a rank, RanksLostError for a rank that ended, is silent, has
    no memory, or does not find the others.
    """
    children: dict[int, int] = {}
    said: dict[int, Any] = {}
    store = memfd_create("parallel-dit-store", MFD_CLOEXEC)  # no file: what is killed meanwhile leaves none
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with selectors.DefaultSelector() as waiting:
        try:
            for rank in range(ranks):
                mine, its = os.pipe()
                child = os.fork()
                if child == 0:
                    try:
                        os.close(mine)
                        _rank(its, rank, ranks, store, model, spec, calls, wanted)
                    finally:  # whatever it raised: this process is a copy of the one that waits for it
                        os._exit(0)
                os.close(its)
                children[rank] = child
                waiting.register(os.fdopen(mine, "r", encoding="utf-8"), selectors.EVENT_READ, rank)
            while len(said) < ranks:
                ready = waiting.select(LONGEST_S)
                if not ready:
                    raise RanksLostError(f"{ranks} ranks were silent for {LONGEST_S:.0f} s")
                for key, _ in ready:
                    line = key.fileobj.read()  # type: ignore[union-attr]
                    waiting.unregister(key.fileobj)
                    if not line:
                        raise RanksLostError(f"rank {key.data} of {ranks} ended, as for want of memory")
                    said[key.data] = json.loads(line)
                    if "lost" in said[key.data]:
                        raise RanksLostError(f"rank {key.data} of {ranks} computed nothing: {said[key.data]['lost']}")
                    if "raised" in said[key.data]:
                        raise RanksDisagreeError(str(said[key.data]["raised"]))
        finally:
            for child in children.values():
                os.kill(child, signal.SIGKILL)  # one that has ended is not reaped yet
                os.waitpid(child, 0)
            os.close(store)
            torch.set_num_threads(threads)
    rows = [said[rank] for rank in range(ranks)]
    return [max(each) for each in zip(*(row["errors"] for row in rows), strict=True)], max(
        row["control"] for row in rows
    )


def _rank(
    answers: int,
    rank: int,
    ranks: int,
    store: int,
    model: torch.nn.Module,
    spec: ShardingSpec,
    calls: Sequence[Callable[[], torch.Tensor]],
    wanted: Sequence[torch.Tensor],
) -> None:
    """One rank: compute and answer."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    joined = False
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"/proc/self/fd/{store}", ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=LONGEST_S),
        )
        joined = True
        axis = Axis("ulysses", ranks, rank, dist.group.WORLD)
        with torch.inference_mode():
            sharing: dict[str, Any] = {"ulysses": axis, "chunks": lambda _: 1, "shares": ((), SHARES.get(ranks, ()))}
            shared = SharedModel(model, spec, SequenceParallelAttention(**sharing))
            errors = [finite(relative_error(call(), want)) for call, want in zip(calls, wanted, strict=True)]
            shared.group = OwnTokens(**sharing)
            said: dict[str, Any] = {"errors": errors, "control": finite(relative_error(calls[0](), wanted[0]))}
    except Exception as error:  # noqa: BLE001  told to the process that asked
        note_module(error, model)
        of_plan = joined and not isinstance(error, MemoryError) and NO_MEMORY not in str(error)
        said = {"raised" if of_plan else "lost": in_one_line(error)}
    with os.fdopen(answers, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(said))
