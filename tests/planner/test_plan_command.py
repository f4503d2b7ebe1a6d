"""`python -m parallel_runtime plan`: what it prints, its JSON and its exit codes."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from host.fetch import comfyui_path
from host.server import PACK_ROOT as ROOT
from parallel_runtime.devices import parse_devices
from parallel_runtime.planner.known import known_calibration
from parallel_runtime.planner.machine import device_set
from parallel_runtime.planner.store import CalibrationStore


@pytest.fixture
def plan(
    command: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of `plan`; `cache` is the user's cache folder."""

    def run(*options: str, cache: Path | None = None) -> tuple[int, str, str]:
        if cache:
            monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        done = command("plan", *options)
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_readme_has_what_is_predicted_now(plan) -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| predicted |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert len(rows) == 4
    for name, _, *told in rows:
        kind = name.partition(" (")[0]
        found = [json.loads(plan("--kind", kind, "--devices", str(n), "--json")[1])["speedup"] for n in (2, 4, 8)]
        assert [f"{each:.1f}" for each in found] == told, kind


def test_the_readme_calls_no_prediction_and_no_bound_a_speed_up() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("|") and " 2 GPUs " in line]
    assert [line.strip("| ").split(" |")[0] for line in tables] == ["predicted", "bound, from one measured GPU"]
    said = [line for line in lines if "speed-up" in line or "speedup" in line]
    assert len(said) == 1 and said[0].startswith("**No speed-up on several GPUs has been measured.**")


def test_stale_also_weighs_pipefusion_and_marks_it(plan) -> None:
    common = ("--kind", "A100", "--devices", "4", "--json")
    usual, stale = json.loads(plan(*common)[1]), json.loads(plan(*common, "--stale")[1])
    assert all(row["exact"] for row in usual["table"])
    assert [row["name"] for row in stale["table"] if row["exact"]] == [row["name"] for row in usual["table"]]
    assert any(not row["exact"] for row in stale["table"])


@pytest.mark.slow
def test_a_file_and_devices_here_are_planned_with_the_calibration_kept(plan, tmp_path, tiny_hosted) -> None:
    options = ("--model", tiny_hosted.path, "--comfyui", str(comfyui_path()), "--devices", "cpu:2", "--json")
    options += ("--dtype", "float32")
    devices = parse_devices("cpu:2").devices
    store = CalibrationStore(tmp_path / "parallel-dit" / "calibration.json")
    store.save(device_set(devices), replace(known_calibration("cpu"), source="measured by the test"))
    kept = json.loads(plan(*options, cache=tmp_path)[1])
    assert kept["calibration"]["source"] == "measured by the test"
    assert kept["model"] == "tiny.safetensors"
    assert kept["work"]["element_bytes"] == 4
    assert kept["plan"] is not None


def test_a_link_that_is_told_does_not_drop_the_calibration_and_compiled_is_not_ignored_in_silence(
    plan, tmp_path
) -> None:
    devices = parse_devices("cpu:2").devices
    measured = replace(known_calibration("cpu"), source="measured by the test")
    measured = replace(measured, rates=replace(measured.rates, matmul_flops=1e9))
    CalibrationStore(tmp_path / "parallel-dit" / "calibration.json").save(device_set(devices), measured)
    options = ("--devices", "cpu:2", "--free-gib", "64", "--dtype", "float32")
    told = json.loads(plan(*options, "--link", "pcie3", "--json", cache=tmp_path)[1])
    assert told["calibration"]["rates"]["matmul_flops"] == 1e9
    assert told["calibration"]["link"]["name"] == "pcie3"
    assert told["calibration"]["source"] == "measured by the test; the link is the table's pcie3, as told"
    assert (told["warnings"], told["work"]["graphs"]) == ([], True)
    _, out, _ = plan(*options, "--compiled", cache=tmp_path)
    assert "warning: --compiled: what compiled blocks take is not known; they have no CUDA graphs" in out
    assert json.loads(plan(*options, "--compiled", "--json", cache=tmp_path)[1])["work"]["graphs"] is False


def test_nothing_fits_is_an_answer_and_exit_code_1(plan) -> None:
    code, out, _ = plan("--kind", "RTX 4090", "--devices", "1", "--free-gib", "0.5")
    assert code == 1
    assert "plan: none" in out and "does not fit" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", ""), "devices is empty; use all, a count"),
        (("--kind", "H100", "--devices", "two"), "no count; use 1 to 8"),
        (("--model", "none.safetensors", "--file-dtype", "fp8", "--kind", "H100"), "says its own; leave"),
        (("--kind", "Voodoo", "--devices", "2"), "'Voodoo' is unknown; use one of B200"),
        (("--kind", "H100", "--devices", "9"), "--devices=9 with --kind is no count; use 1 to 8"),
        (("--model", "sdxl", "--kind", "H100", "--devices", "2"), "model 'sdxl' is unknown"),
        (("--kind", "H100", "--devices", "2", "--free-gib", "nan"), "--free-gib=nan is not above 0"),
        (("--kind", "H100", "--devices", "2", "--bandwidth-gbs", "0"), "--bandwidth-gbs=0.0 is not above 0"),
        (("--kind", "H100", "--devices", "2", "--batch", "0"), "--batch=0 is outside 1 to 1000000"),
        (("--kind", "H100", "--steps", "1" + "0" * 400), "is outside 1 to 1000000; use a value in that range"),
        (("--kind", "H100", "--text-tokens", "1" + "0" * 400), "is outside 0 to 1000000; use a value in that range"),
        (("--kind", "H100", "--model", "none.safetensors", "--frames", "0"), "--frames=0 is outside 1 to 4096"),
        (("--kind", "H100", "--devices", "2", "--width", "0"), "--width=0 is outside 16 to 16384"),
        (("--kind", "H100", "--devices", "2", "--cfg", "nan"), "--cfg=nan is outside 0 to 1000"),
        (("--kind", "H100", "--devices", "2", "--cfg=-3"), "--cfg=-3.0 is outside 0 to 1000"),
        (("--kind", "H100", "--devices", "2", "--free-gib", "1e300"), "--free-gib=1e+300 is not above 0 and at most"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_value_and_the_remedy(plan, options, message) -> None:
    code, out, err = plan(*options)
    assert code == 2
    assert out == ""
    assert message in err and len(err.splitlines()) == 1
