"""The verdict of a proof by its numbers, and the file in which proofs are kept: what is not right is not believed."""

import json
import logging
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_runtime.proof import (
    NOT_PROVEN,
    PROVEN,
    REFUSED,
    Proof,
    ProofKey,
    ProofStore,
    judged,
    relative_error,
)

KEY = ProofKey(
    comfyui="0.30.0",
    pack="0.3.0 1234",
    model_class="comfy.ldm.wan.model.WanModel",
    source="abcd",
    plan="ulysses=2",
    kernels="cpu",
    weights="float32 of float32",
    arguments=("args[0]:5", "kwargs.context:3"),
)
PROOF = Proof(verdict=PROVEN, error=1e-7, control=0.2, tolerance=1e-5, tokens=105, calls=3, seconds=0.5)
WHOLE = torch.ones(1, 1000)


def off_by(error: float) -> torch.Tensor:
    """A result with this relative error."""
    return WHOLE + error


@pytest.mark.parametrize(
    ("dtype", "error", "control", "verdict"),
    [
        ("float32", 2e-6, 2e-4, PROVEN),
        ("float32", 2e-5, 2e-4, REFUSED),
        ("float32", 2e-6, 9e-5, NOT_PROVEN),  # such a control would hide most mistakes
        ("float32", 2e-5, 9e-5, NOT_PROVEN),
        ("float32", 2e-4, 9e-5, REFUSED),  # no control is needed to see that
        ("bfloat16", 9e-3, 1.2e-1, PROVEN),
        ("bfloat16", 2e-2, 1.2e-1, NOT_PROVEN),  # rounding in many blocks may be as much
        ("bfloat16", 4e-2, 1.2e-1, REFUSED),
        ("bfloat16", 9e-3, 9e-2, NOT_PROVEN),
        ("float16", 1e-3, 3e-2, PROVEN),
        ("float16", 4e-3, 3e-2, NOT_PROVEN),
        ("float16", 7e-3, 3e-2, REFUSED),
        ("float32", float("nan"), 0.2, REFUSED),
        ("float32", 0.0, float("nan"), PROVEN),
    ],
)
def test_the_verdict_follows_from_error_control_and_dtype(
    dtype: str, error: float, control: float, verdict: str
) -> None:
    proof = judged(dtype, shared=off_by(error), whole=WHOLE, control=off_by(control))
    assert proof.verdict == verdict, proof
    assert proof.text.startswith(verdict)


@pytest.mark.parametrize(
    ("error", "control", "verdict"),
    [(9e-3, 0.2, PROVEN), (9e-3, 0.02, NOT_PROVEN), (2e-2, 0.2, NOT_PROVEN), (4e-2, 0.2, REFUSED)],
)
def test_where_layers_round_their_inputs_a_last_digit_may_move_more(error: float, control: float, verdict: str) -> None:
    for dtype in ("float32", "bfloat16"):
        proof = judged(dtype, shared=off_by(error), whole=WHOLE, control=off_by(control), coarse=1e-2)
        assert (proof.verdict, proof.tolerance) == (verdict, 1e-2), proof


@pytest.mark.parametrize("whole", [torch.zeros(1, 9), torch.full((1, 9), torch.inf), torch.full((1, 9), torch.nan)])
def test_an_output_of_nothing_or_no_numbers_proves_nothing(whole: torch.Tensor) -> None:
    proof = judged("float32", shared=whole, whole=whole, control=torch.ones(1, 9))
    assert proof.verdict == NOT_PROVEN and "zero or not finite" in proof.reason


def test_what_is_saved_is_loaded_for_its_key_alone(tmp_path: Path) -> None:
    store = ProofStore(tmp_path / "deep" / "proofs.json")
    assert store.load(KEY) is None
    store.save(KEY, PROOF)
    refused = Proof(verdict=REFUSED, reason="an error", error=0.3, control=0.2, tolerance=1e-5, calls=3)
    store.save(replace(KEY, plan="ring=2"), refused)
    assert store.load(KEY) == PROOF and store.load(replace(KEY, plan="ring=2")) == refused
    assert os.listdir(store.path.parent) == ["proofs.json"]


def test_what_is_known_of_calls_with_any_arguments(tmp_path: Path) -> None:
    store = ProofStore(tmp_path / "proofs.json")
    assert store.of_any_call(KEY) == []
    masked, refused = replace(KEY, arguments=("mask",)), replace(PROOF, verdict=REFUSED)
    for key, proof in ((KEY, PROOF), (masked, refused), (replace(KEY, plan="ring=2"), PROOF)):
        store.save(key, proof)
    assert store.of_any_call(replace(KEY, arguments=())) == [PROOF, refused]
    content = json.loads(store.path.read_text())
    content["proofs"] |= {"a": 1, "b": {"key": 2}, "c": {"key": content["proofs"][KEY.digest]["key"]}}
    store.path.write_text(json.dumps(content))
    assert store.of_any_call(KEY) == [PROOF, refused]


def test_verdicts_are_counted_by_the_version_of_comfyui(tmp_path: Path) -> None:
    store = ProofStore(tmp_path / "proofs.json")
    assert store.counted("0.30.0") == {}
    for number, verdict in enumerate((PROVEN, PROVEN, REFUSED)):
        store.save(replace(KEY, source=str(number)), replace(PROOF, verdict=verdict))
    store.save(replace(KEY, comfyui="0.99.0"), PROOF)
    assert store.counted("0.30.0") == {PROVEN: 2, REFUSED: 1} and store.counted("0.99.0") == {PROVEN: 1}


@pytest.mark.parametrize("name", [field.name for field in fields(ProofKey)])
def test_a_proof_of_another_version_is_not_believed(name: str, tmp_path: Path) -> None:
    """Nor one whose entry was moved under the name of another."""
    store = ProofStore(tmp_path / "proofs.json")
    store.save(KEY, PROOF)
    other = replace(KEY, **{name: ("args[0]:4",) if name == "arguments" else f"{getattr(KEY, name)} other"})
    assert store.load(other) is None
    content = json.loads(store.path.read_text())
    content["proofs"][other.digest] = content["proofs"].pop(KEY.digest)
    store.path.write_text(json.dumps(content))
    assert store.load(other) is None and store.load(KEY) is None


BROKEN = (
    "",
    "{",
    "null",
    "[]",
    "[" * 100_000,
    '{"version": 2, "proofs": {}}',
    '{"version": 1, "proofs": []}',
    "\udcff",
)


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_ignored_with_a_warning_and_replaced(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProofStore(tmp_path / "proofs.json")
    store.path.write_text(content, errors="surrogateescape")
    assert store.load(KEY) is None
    assert "proofs.json is damaged or of another version and is not believed" in caplog.text
    caplog.clear()
    store.save(KEY, PROOF)
    caplog.clear()
    assert store.load(KEY) == PROOF and not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verdict", "true"),
        ("verdict", None),
        ("reason", 1),
        ("error", None),
        ("error", "small"),
        ("error", True),
        ("control", -0.1),
        ("tokens", 10**400),
        ("unknown", 1),
    ],
)
def test_an_entry_with_another_content_is_not_believed(name: str, value: Any, tmp_path: Path) -> None:
    store = ProofStore(tmp_path / "proofs.json")
    store.save(KEY, PROOF)
    content = json.loads(store.path.read_text())
    content["proofs"][KEY.digest]["proof"][name] = value
    store.path.write_text(json.dumps(content))
    assert store.load(KEY) is None
    del content["proofs"][KEY.digest]["proof"]
    store.path.write_text(json.dumps(content))
    assert store.load(KEY) is None


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        ProofStore(tmp_path / "file" / "proofs.json").save(KEY, PROOF)
    assert "proofs.json cannot be written (" in caplog.text
    assert "so each plan is proven again; set XDG_CACHE_HOME" in caplog.text


def test_a_proof_knows_no_other_verdict() -> None:
    with pytest.raises(ValueError, match="verdict='perhaps' is unknown; use one of proven, refused, not proven"):
        Proof(verdict="perhaps")


def test_results_of_other_shapes_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"^shapes differ: \(2,\) and \(3,\); compare equal ones$"):
        relative_error(torch.zeros(2), torch.zeros(3))
    assert relative_error(torch.ones(2), torch.ones(2)) == 0.0
