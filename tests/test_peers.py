"""The peers that we measure ourselves against compute what one process computes; else their times mean nothing."""

import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from benchmarks.peers.ranks import Peer, PeerError, PeerRanks
from benchmarks.peers.table import Candidate, ratio
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.models.flux.sample import sample_config, write_sample

CONFIG = sample_config(heads=4, head_dim=32)
TENSORS = Workload(width=64, height=64, text_tokens=4).tensors(CONFIG)


def ranks(folder: Path, peer: Peer) -> PeerRanks:
    model, inputs = str(folder / "model.safetensors"), str(folder / "inputs.safetensors")
    write_sample(model, CONFIG)
    save_file(TENSORS, inputs)
    return PeerRanks(peer, python=sys.executable, kind="cpu", dtype="float32", model=model, inputs=inputs)


@pytest.mark.full
def test_a_peer_over_two_processes_equals_one_process(tmp_path: Path) -> None:
    with ranks(tmp_path, Peer(module="diffusers_peer", ring=2)) as peer:
        peer.wait_ready()
        assert peer.run(1) > 0
        output = peer.output()
    assert relative_error(output, ReferenceModel(str(tmp_path / "model.safetensors"))(TENSORS)) <= 1e-5


@pytest.mark.full
def test_our_loop_without_a_pool_equals_one_process(tmp_path: Path) -> None:
    with ranks(tmp_path, Peer(module="own_loop")) as own:
        own.wait_ready()
        assert own.run(1) > 0
        output = own.output()
    assert relative_error(output, ReferenceModel(str(tmp_path / "model.safetensors"))(TENSORS)) <= 1e-5


@pytest.mark.full
def test_a_peer_that_ends_says_why(tmp_path: Path) -> None:
    with ranks(tmp_path, Peer(module="no_such_peer")) as peer, pytest.raises(PeerError, match="no_such_peer"):
        peer.wait_ready()


def test_ratios_are_paired_by_round() -> None:
    """Every second round the machine was ten times as slow; the ratio does not notice, as one of medians would."""
    one = Candidate("one", "ours", float, seconds=[1.0, 10.0, 1.0, 10.0, 10.0])
    other = Candidate("other", "peer", float, seconds=[2.0, 20.0, 2.0, 20.0, 20.0])
    assert ratio(other, one) == 2
