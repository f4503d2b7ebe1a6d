"""The short mix of what `make soak` does for longer: some of its faults, at random moments, every result checked."""

import time
from functools import partial

import pytest
import torch

from faults.soak import Soak
from faults.soak_cases import Case, Cases

pytestmark = pytest.mark.full

FAULTS = 7  # of thirteen; each has tests of its own


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two are slower where others want the cores too
    made = Cases(tmp_path_factory.mktemp("soak"), num_ranks=2, num_models=1)
    torch.set_num_threads(threads)
    return made


def test_faults_in_a_random_order_leave_every_result_right(cases: Cases) -> None:
    seed = time.time_ns() % 2**32
    soak = Soak(cases, num_ranks=2, seed=seed)
    ledger = soak.run(0, steady_prompts=0, at_least=FAULTS)
    assert ledger.wrong == [], f"seed {seed}\n{ledger.table()}"
    assert len(ledger.injected) == FAULTS
    assert ledger.right >= 2 * FAULTS
    assert ledger.worst_error > 0, "nothing was compared"


def test_a_wrong_result_and_another_error_are_seen(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: another LoRA's reference, and an error that names something else."""
    first, *others = cases.cases
    other = next(case.deltas for case in others if case.deltas.name != first.deltas.name)
    wrong = Case(first.spec, other, first.work, first.reference)
    monkeypatch.setattr(cases, "cases", [wrong])
    monkeypatch.setattr(cases, "plans", cases.plans[:1])
    soak = Soak(cases, num_ranks=1, seed=1)
    with soak.pool:
        soak.prompt()
        soak.fails("raises", "raise", "quite another text")
    found = "\n".join(soak.ledger.wrong)
    assert "relative error" in found
    assert "raises: rank 0: RuntimeError: asked to raise" in found


def test_memory_that_ranks_keep_of_each_prompt_is_seen(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of growth."""
    monkeypatch.setattr(cases, "cases", cases.cases[:1])
    monkeypatch.setattr(cases, "plans", cases.plans[:1])
    soak = Soak(cases, num_ranks=1, seed=1)
    monkeypatch.setattr(soak, "prompt", partial(soak.prompt, options={"fault": "leak"}))
    with soak.pool:
        soak.steady(50)
    assert any("private bytes grew" in each for each in soak.ledger.wrong), soak.ledger.table()
