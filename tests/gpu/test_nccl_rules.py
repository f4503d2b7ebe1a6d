"""The simulated NCCL finds each breach of the rules it stands for, and lets sound exchanges through."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from noted import FOLDER, Notes

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool

FOUND = {
    "strided": "all_to_all .* wants contiguous",
    "source_written": "all_to_all among .*: its source was written to before it was waited for",
    "target_written": "all_to_all among .*: its target was written to before it was waited for",
    "never_waited": "all_to_all among .* was never waited for; 1 are in flight",
    "destroyed_in_flight": "all_to_all among .*: its group is destroyed before it was waited for",
    "other_order": "rank . is at all_.* instead; ranks must agree on the order",
    "each_sends_first": "connecting to rank . among ranks .*: rank . connects otherwise",
    "unequal": "12 bytes in 1 messages|16 bytes in 1 messages",
    "other_dtype": "8 bytes in 1 messages of dtypes [23].*",
    "without_elements": "isend to rank . among .*: a message without elements",
    "uneven_sums": r"all_to_all of 4 rows in runs of \[2, 1\]; they do not add up",
    "uneven_gather": "all_gather of 3 elements each into 5",
    "unknown_dtype": "of torch.int16: NCCL has no such dtype",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    folder, devices = str(Path(__file__).parent), parse_devices("cpu:2").devices
    with Pool(devices, threads_per_rank=1, engine="nccl_breaking:Breaking", python_path=(folder, FOLDER)) as pool:
        yield pool


def said(pool: Pool, spec: ModelSpec, breach: str, **options: object) -> list[str]:
    """What each rank found."""
    with Notes() as notes:
        options = {"breach": breach, **options, **notes.option}
        call = ModelCall(tensors={"x": torch.ones(1)}, out_shape=(1,), out_dtype=torch.float32, options=options)
        pool.run(spec, ParallelPlan(ulysses=2), [call])
        return notes.read()


@pytest.mark.parametrize("lazy", [False, True])
def test_sound_exchanges_are_poisoned_until_they_are_waited_for(
    ranks: Pool, tiny_hosted: ModelSpec, lazy: bool
) -> None:
    gathered = "[0.0, 0.0, 1.0, 1.0] [1, 1, 1, 2, 2, 2]"
    assert said(ranks, tiny_hosted, "sound", lazy=lazy) == [
        f"[True, True, True] {gathered}  [1]",
        f"[True, True, True] {gathered} {[7.0] * 5} [0]",
    ]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_message_that_nobody_takes_is_a_deadlock(ranks: Pool, tiny_hosted: ModelSpec, lazy: bool) -> None:
    waits = "deadlock for 1 s: rank 0 waits in irecv from rank 1 among ranks (0, 1)"
    assert said(ranks, tiny_hosted, "nobody_comes") == [waits, ""]
    connects, nothing = said(ranks, tiny_hosted, "nobody_connects", lazy=lazy)
    making = "making the communicator of ranks (0, 1)" if lazy else "connecting from rank 1 among ranks (0, 1)"
    assert (connects, nothing) == (f"deadlock for 1 s: rank 0 waits in {making}", "")


@pytest.mark.parametrize("lazy", [False, True])
def test_hosts_that_both_send_their_first_message_wait_for_each_other(
    ranks: Pool, tiny_hosted: ModelSpec, lazy: bool
) -> None:
    making = "making the communicator of ranks" if lazy else "connecting to rank [01] among ranks"
    for text in said(ranks, tiny_hosted, "a_circle_of_first_messages", lazy=lazy):
        assert re.search(f"deadlock for 1 s: .*rank 0 waits in {making}.*rank 1 waits in {making}", text), text


@pytest.mark.parametrize("breach", FOUND)
def test_a_breach_is_named(ranks: Pool, tiny_hosted: ModelSpec, breach: str) -> None:
    found = said(ranks, tiny_hosted, breach)
    assert all(re.search(FOUND[breach], text) for text in found), found
