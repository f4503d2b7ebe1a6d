"""verify and doctor of models that ComfyUI's own modules compute: beside those modules in one process of their own."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from host.fetch import comfyui_path
from parallel_runtime.__main__ import main
from parallel_runtime.cli.doctor_model import describe as describe_the_file
from parallel_runtime.cli.doctor_model import describe_file
from parallel_runtime.devices import parse_devices

from .files import write_model_files
from .variants import FILES

Command = Callable[..., subprocess.CompletedProcess[str]]
WAN = "tiny_wan_t2v.safetensors"
VERIFY = ("verify", "--plan", "ulysses=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where files are written, once each."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def not_ours(folder: Path) -> Path:
    """A file that is none of ComfyUI's diffusion models."""
    path = folder / "encoder.safetensors"
    save_file({"encoder.block.0.weight": torch.zeros(2, 2)}, path)
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (VERIFY, ["needs ComfyUI's own modules", "not in the custom_nodes", "--comfyui PATH"]),
        ((*VERIFY, "--comfyui", "/nowhere"), ["/nowhere has no comfy/model_base.py", "--comfyui PATH"]),
        ((*VERIFY, "--frames", "0"), ["--frames=0 is outside 1 to"]),
        (("doctor",), ["needs ComfyUI's own modules"]),
        (("doctor", "--model", "/nowhere.safetensors"), ["/nowhere.safetensors does not exist"]),
    ],
)
def test_what_cannot_be_looked_at_is_refused_in_one_line_before_anything_starts(
    not_ours: Path, arguments: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *more = arguments
    assert main([command, "--model", str(not_ours), "--devices", "cpu:2", *more]) == 2
    said = capsys.readouterr().err
    (sentence,) = (line for line in said.splitlines() if not line.endswith(" ..."))  # what goes on is said before
    for word in words:
        assert word in sentence


def test_what_comfyui_does_not_know_is_refused(not_ours: Path, command: Command) -> None:
    done = command(*VERIFY, "--devices", "cpu:2", "--comfyui", str(comfyui_path()), "--model", str(not_ours))
    assert done.returncode == 2, done.stdout
    assert "ComfyUI recognises no diffusion model in this file" in done.stderr


def test_the_doctor_says_what_a_file_is_and_which_plans_it_takes_here(folder: Path) -> None:
    """What is said of the file alone: the rest of the doctor's report is tests/runtime/test_command_line.py's."""
    write_model_files(folder, [FILES[WAN]])
    devices = parse_devices("cpu:2").devices
    report = describe_file(str(folder / WAN), str(comfyui_path()), devices, [2**34] * 2)
    assert report["model"] == "WAN21" and report["latent"] == [1, 16, 3, 128, 128]
    assert "comfy.ldm.wan.model.WanModel in " in report["computed_by"]
    rows = {row["plan"]: row for row in report["plans"]}
    assert list(rows) == [
        *("ulysses=2", "ring=2", "cfg=2", "data=2", "ulysses=2,weights=sharded", "cfg=2,weights=sharded"),
        "ulysses=2,weights=offloaded",
    ]
    assert all(row["takes"] and row["fits"] for row in rows.values())
    size = report["file_bytes"]
    whole, half = (rows[plan]["bytes_per_rank"] for plan in ("cfg=2", "ulysses=2"))
    assert size * 0.99 < whole and whole - half == pytest.approx((whole - size) / 2, rel=0.01), "calls are halved"
    sharded, offloaded = (rows[f"ulysses=2,weights={kind}"] for kind in ("sharded", "offloaded"))
    part = offloaded["host_bytes_per_rank"]  # half of three blocks, of which two visit the device
    assert sharded["bytes_per_rank"] == offloaded["bytes_per_rank"] + part
    assert half - offloaded["bytes_per_rank"] == pytest.approx(part * 2 / 3, rel=0.01)
    said = "\n".join(describe_the_file(report))
    assert said.startswith(f"model {WAN}: WAN21, computed by ComfyUI's") and "\n  ulysses=2: yes, " in said
    small = describe_the_file({**report, "plans": [{**rows["cfg=2"], "fits": False}]})
    assert small[1].endswith("which does not fit")
