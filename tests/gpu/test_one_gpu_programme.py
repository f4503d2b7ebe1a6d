"""The experiments of `make gpu` in small form on a CPU, what becomes of their results, and what is refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rounding import ROUNDING

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.block_graphs import poisoned, what_is_wrong
from benchmarks.gpu.programme import BEGIN, END, EXPERIMENTS, apply, section, write_page
from benchmarks.gpu.setting import GIB, find_setting, refuse_little_memory
from benchmarks.gpu.state import State
from parallel_runtime.choices import TABLE, read
from parallel_runtime.planner.known import MEASURED, known_calibration

ROOT = Path(__file__).resolve().parents[2]
KEY = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11", "size": "full"}
RESULT = {"table": ["| a |"], "decided": "so", "choices": {}, "constants": {}}


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_experiment_runs_in_small_form_and_none_a_second_time(tmp_path: Path, capfd) -> None:
    """Experiment 9 raises unless a rank's share counts the bytes that a real rank sent, and they are right together."""
    state = tmp_path / "state.json"
    words = ["--small", "--state", str(state), "--models", str(tmp_path / "models")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    given = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": False}
    run = subprocess.run([sys.executable, "-m", "benchmarks.gpu", "--here", *words], **given)
    assert run.returncode == 0, run.stderr[-3000:]
    (machine,) = json.loads(state.read_text())["machines"]
    assert [int(number) for number in machine["results"]] == [1, 2, 4, 3, 7, 5, 6, 8, 9, 10]
    assert all(len(result["table"]) > 2 for result in machine["results"].values())
    assert not any(result["choices"] for result in machine["results"].values())  # a CPU decides nothing of a GPU
    assert float(machine["results"]["9"]["decided"].split("one process ")[1].split(",")[0]) < ROUNDING
    assert (command.main(words), capfd.readouterr().out) == (0, "")


def test_an_experiment_that_takes_too_long_is_ended_and_the_others_results_stay(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(command, "LIMIT_S", 0.01)
    parser = ["--small", "--state", str(tmp_path / "state.json"), "--models", str(tmp_path), "--only", "2"]
    assert command.main(parser) == 1
    assert "2 took more than 0.01 s and was ended; its figures of before stay" in capfd.readouterr().out


def test_results_count_for_the_device_and_the_versions_that_they_were_measured_with(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    State(path, KEY).keep(3, RESULT)
    assert list(State(path, KEY).results) == [3]
    other = State(path, {**KEY, "torch": "2.12"})
    assert (other.results, other.others) == ({}, [KEY])
    other.keep(1, RESULT)
    assert list(State(path, KEY).results) == [3]


@pytest.mark.parametrize(("text", "said"), [("{", "cannot be read"), ('{"format": 0, "machines": []}', "has format 0")])
def test_a_state_file_of_another_format_is_refused_and_not_overwritten(tmp_path, text, said) -> None:
    (path := tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        State(path, KEY)
    assert path.read_text() == text


def test_machines_that_cannot_run_it_are_refused(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command.main(["--state", str(tmp_path / "state.json")]) == 2
    assert "sees 0 GPUs, and these experiments need 1" in capsys.readouterr().err
    refuse_little_memory(20 * GIB, 24 * GIB, "cuda:0")
    with pytest.raises(ValueError, match=r"cuda:0 has 11\.0 of 24\.0 GiB free and the experiments need 20 GiB; close"):
        refuse_little_memory(11 * GIB, 24 * GIB, "cuda:0")


def test_choices_and_constants_are_written_with_their_device_and_nothing_else_changes(tmp_path: Path) -> None:
    table, measured = tmp_path / "choices.json", tmp_path / "measured.json"
    table.write_text(TABLE.read_text())
    measured.write_text(MEASURED.read_text())
    results = {
        2: {**RESULT, "choices": {"sdpa_first": "", "ring_kernel": "flash"}, "constants": {"attention_flops": 6e14}},
        3: {**RESULT, "choices": {"timed_every": 1}, "constants": {"operation_s": 5e-6, "unknown_s": 1.0}},
    }
    apply(KEY, (9, 0), results, table=table, measured=measured)
    rows = json.loads(table.read_text())
    chosen = read(rows, (9, 0))
    assert (chosen.sdpa_first, chosen.ring_kernel, chosen.timed_every) == ("", "flash", 1)
    assert "NVIDIA H100 80GB HBM3, torch 2.11" in chosen.source
    assert rows["10.0"] == json.loads(TABLE.read_text())["10.0"]
    h100 = json.loads(measured.read_text())["H100"]
    assert h100["attention_flops"] == 6e14
    assert h100["matmul_flops"] == json.loads(MEASURED.read_text())["H100"]["matmul_flops"]
    assert "unknown_s" not in h100
    assert "operation_s" not in h100  # the host's time is printed; auto counts with it only where a person wrote it


def test_a_result_that_lacks_a_model_stands_on_the_page_decides_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lacking = {
        **RESULT,
        "choices": {"timed_every": 1},
        "constants": {"operation_s": 5e-6},
        "failed": {"wan": "no room"},
    }
    assert "wan failed: no room" in section(KEY, {3: lacking})
    table, measured = tmp_path / "choices.json", tmp_path / "measured.json"
    table.write_text(TABLE.read_text())
    measured.write_text(MEASURED.read_text())
    apply(KEY, (9, 0), {3: lacking}, table=table, measured=measured)
    assert (table.read_text(), measured.read_text()) == (TABLE.read_text(), MEASURED.read_text())
    words = ["--small", "--state", str(tmp_path / "state.json"), "--models", str(tmp_path)]
    setting = find_setting(small=True, comfyui=None, models=tmp_path)
    state = State(tmp_path / "state.json", setting.key())
    for each in EXPERIMENTS:
        state.keep(each.number, lacking if each.number == 3 else RESULT)
    ran: list[int] = []
    monkeypatch.setattr(command, "in_process", lambda number, _: bool(ran.append(number)))
    assert (command.main(words), ran) == (1, [3])


def test_a_page_keeps_what_a_new_state_file_lacks_of_the_same_device_and_versions(tmp_path: Path) -> None:
    (page := tmp_path / "gpu.md").write_text(f"before\n\n{BEGIN}\n\n{END}\n\nafter\n")
    other = {**KEY, "torch": "2.12"}
    bold = {**RESULT, "table": ["**flux.1**, one rank's share, measured:", "", "| b |"]}
    write_page(page, section(KEY, {each.number: bold if each.number == 3 else RESULT for each in EXPERIMENTS}))
    write_page(page, section(other, {4: RESULT}))
    again = {**RESULT, "decided": "otherwise", "failed": {"wan": "no room"}}
    write_page(page, section(KEY, {7: again}))

    expected = {each.number: bold if each.number == 3 else RESULT for each in EXPERIMENTS} | {7: again}
    parts = [section(other, {4: RESULT}), section(KEY, expected)]
    assert page.read_text() == f"before\n\n{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}\n\nafter\n"


def test_what_an_experiments_own_process_measured_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    setting = find_setting(small=True, comfyui=None, models=tmp_path)
    State(path, setting.key()).keep(3, RESULT)
    again = {**RESULT, "decided": "otherwise"}
    monkeypatch.setattr(command, "in_process", lambda number, _: State(path, setting.key()).keep(number, again) is None)
    written: list[State] = []
    monkeypatch.setattr(command, "write", lambda _, state: written.append(state))
    assert command.main(["--small", "--only", "3", "--state", str(path), "--models", str(tmp_path)]) == 0
    assert written[0].results == {3: again}


def test_graphs_are_held_to_what_was_written_and_to_nothing_where_little_was() -> None:
    assert (
        poisoned(lambda: (torch.cat([torch.ones(3), torch.empty(2)]), None)).isnan().tolist()
        == [False] * 3 + [True] * 2
    )
    assert not torch.are_deterministic_algorithms_enabled()
    assert what_is_wrong(1e-3, 0.95) == ""
    assert what_is_wrong(1.1e-3, 1.0) == "graphs differ by 1.1e-03, at most 0.001 is rounding"
    assert what_is_wrong(math.nan, 1.0).startswith("graphs differ by nan")
    assert what_is_wrong(0.0, 0.9).startswith("90.0% of the output was written, at least 95% must be")


def test_what_this_project_measured_stands_in_the_place_of_other_engines_figures() -> None:
    own, others = known_calibration("H100"), known_calibration("H100", measured=False)
    assert own.rates.attention_flops == 5.66e14 > others.rates.attention_flops
    assert known_calibration("A100") == known_calibration("A100", measured=False)
