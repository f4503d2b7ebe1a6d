"""The table of choices by compute capability: what it says, and what it refuses."""

import json

import pytest
import torch

from parallel_runtime.choices import TABLE, card_choice, choice_for, read, with_choice

ROWS = json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("capability", "first"),
    [((9, 0), "cudnn"), ((10, 0), "cudnn"), ((8, 9), ""), ((12, 0), ""), ((7, 5), ""), (None, "")],
)
def test_cudnn_is_tried_first_where_figures_say_so_and_nowhere_else(capability, first) -> None:
    assert choice_for(capability).sdpa_first == first


def test_a_device_has_the_choices_of_its_capability_and_amds_which_count_otherwise_the_usual_ones(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda", 0)
    assert card_choice(gpu) == choice_for((9, 0)) != choice_for(None) == card_choice(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert card_choice(gpu) == choice_for(None)


def test_a_measured_choice_changes_its_row_alone() -> None:
    table = with_choice(ROWS, (8, 9), sdpa_first="cudnn", most_chunks=0, source="measured")
    assert table["8.9"] == {"sdpa_first": "cudnn", "source": "measured"}  # the usual value is not written again
    assert read(table, (8, 9)).timed_every == read(ROWS, None).timed_every
    assert {name: row for name, row in table.items() if name != "8.9"} == ROWS


@pytest.mark.parametrize(
    "wrong",
    [{"sdpa_first": "math"}, {"ring_kernel": ""}, {"timed_every": 0}, {"head_start_cycles": -1}, {"chunks": 2}],
)
def test_what_nobody_could_act_on_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"choices\.json"):
        with_choice(ROWS, (8, 9), **wrong)
