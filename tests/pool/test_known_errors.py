"""Recorded messages of CUDA, NCCL, cuDNN and the driver: each is told in plain words with its cause and a remedy.

recorded_errors.json holds what users reported, and where: `type` is the exception; "print" a line that a rank printed,
"abort" what a thread of C++ printed as it ended the process. `peer`: the rank that says so may only have lost another.
"""

import json
from pathlib import Path

import pytest

from parallel_runtime.pool.failures import Failure, choose, failure_of_error, pool_error
from parallel_runtime.pool.known_errors import KNOWN, find_known
from parallel_runtime.wire.replies import RankError
from pool.echo_pool import FRESH, first_line

RECORDED = json.loads((Path(__file__).parent / "recorded_errors.json").read_text(encoding="utf-8"))
RAISED = [recorded for recorded in RECORDED if recorded["type"] not in ("print", "abort")]
VAGUE = "NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled cuda error (run with NCCL_DEBUG=INFO for details)"


def name_of(recorded):
    return f"{recorded['known']} ({recorded['source']})"


def told(failure_, printed="", device="cuda:1"):
    return first_line(pool_error(failure_, printed=printed, device=device, starting=False))


def raised(recorded, rank=1):
    return failure_of_error(rank, RankError(kind=recorded["type"], text=recorded["text"], traceback="Traceback"))


@pytest.mark.parametrize("recorded", RECORDED, ids=name_of)
def test_each_recorded_message_is_the_known_error_it_should_be(recorded):
    kind, text = recorded["type"], recorded["text"]
    found = find_known("", text) if kind in ("print", "abort") else find_known(f"{kind}: {text}")
    assert found is not None, "not in the table"
    assert found.known.name == recorded["known"]


@pytest.mark.parametrize("recorded", RAISED, ids=name_of)
def test_the_first_line_says_where_what_and_the_remedy(recorded):
    known = next(known for known in KNOWN if known.name == recorded["known"])
    line = told(raised(recorded))
    assert line.startswith("rank 1 (cuda:1): ")
    assert (known.cause or (recorded["text"].strip() or recorded["type"]).splitlines()[0]) in line
    assert line.endswith(f"; {known.remedy}; {FRESH}")
    assert raised(recorded).weak is recorded.get("peer", False), "only a lost peer may be another rank's fault"


@pytest.mark.parametrize("recorded", [r for r in RECORDED if r["type"] == "abort"], ids=name_of)
def test_an_abort_is_explained_by_what_the_rank_printed(recorded):
    known = next(known for known in KNOWN if known.name == recorded["known"])
    line = told(Failure(0, "killed by SIGABRT"), recorded["text"] + "\nFatal Python error: Aborted")
    assert line.startswith(f"rank 0 (cuda:1): killed by SIGABRT: {known.cause}")
    assert known.remedy in line


@pytest.mark.parametrize("recorded", [r for r in RECORDED if r["type"] == "print"], ids=name_of)
def test_a_vague_error_is_explained_by_what_the_rank_printed(recorded):
    known = next(known for known in KNOWN if known.name == recorded["known"])
    error = RankError(kind="DistBackendError", text=VAGUE, traceback="")
    assert known.remedy in told(failure_of_error(0, error), recorded["text"])


def test_every_entry_has_a_recorded_message_and_a_name_of_its_own():
    names = [known.name for known in KNOWN]
    assert len(set(names)) == len(names)
    assert set(names) == {recorded["known"] for recorded in RECORDED}
    assert len(names) >= 25


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ValueError", "a.safetensors has 3 layers, 4 are needed; load it again"),
        ("RuntimeError", "The size of tensor a (3) must match the size of tensor b (4) at dimension 0"),
        ("DistBackendError", "something that no NCCL has said yet"),
        ("KeyError", "'memory'"),
        ("ValueError", "handler MemoryErrorPolicy is not in the list of nodes"),
        ("RuntimeError", "on_error=OutOfMemoryError names no function"),
        ("RuntimeError", "expected MemoryError: nothing was raised"),
    ],
)
def test_what_is_not_known_stays_as_it_is(kind, text):
    """Whatever was printed before."""
    printed = "NCCL WARN Cuda failure 2 'out of memory'"
    error = RankError(kind=kind, text=text, traceback="")
    assert told(failure_of_error(2, error), printed, device="cpu:2") == f"rank 2: {kind}: {text}; {FRESH}"


@pytest.mark.parametrize(
    "said",
    [
        *("MemoryError: ", "OutOfMemoryError: asked for 3 GiB", "_ArrayMemoryError: Unable to allocate 3 GiB"),
        *(
            "InductorError: a kernel failed\nMemoryError",
            "BackendFailed: inductor raised:\ntorch.OutOfMemoryError: 3 GiB",
        ),
    ],
)
def test_memory_is_recognised_by_the_type_of_an_error(said):
    found = find_known(said)
    assert found is not None
    assert found.known.name == "memory"


def test_a_signal_is_not_explained_by_an_older_warning():
    line = told(Failure(0, "killed by SIGKILL"), "Error while creating shared memory segment /dev/shm/nccl-a (size 9)")
    assert line == f"rank 0 (cuda:1): killed by SIGKILL; {FRESH}"


def test_of_two_distributed_errors_the_cause_is_told_and_not_the_consequence():
    lost = next(r for r in RECORDED if r["known"] == "peer ended")
    full = next(r for r in RECORDED if r["known"] == "shm space")
    assert choose([raised(lost, rank=0), raised(full, rank=1)]).rank == 1
    assert choose([raised(full, rank=0), raised(lost, rank=1)]).rank == 0
