"""A rank has the options of the ComfyUI that asks, and computes as it does: its real main.py beside a real rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from families.hosted import QWEN
from families.variants import write_families
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.hosted.options import ALWAYS, REASONS
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
TELL = f"""
import json, os, sys, torch
sys.path += [{str(ROOT)!r}, {str(HERE)!r}]
import told_states
torch.backends.cudnn.benchmark = True  # as packs do with all of these; main.py sets it too, and on a GPU alone
torch.backends.cuda.enable_math_sdp(False)
torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
torch.set_float32_matmul_precision("high")
torch.use_deterministic_algorithms(True)
with open(os.environ["TELL"], "w") as file:
    json.dump([told_states.options().told, told_states.values(), told_states.states()], file)
NODE_CLASS_MAPPINGS = {{}}
"""
TURNED = ("backends.cudnn.benchmark", "backends.cuda.math_sdp", "backends.cuda.fp16_bf16_reduction_math_sdp")
TURNED += ("float32_matmul_precision", "deterministic_algorithms")
# What needs a GPU's packages: ComfyUI ends where it is asked for and they are missing.
NOT_INSTALLED = {"--use-sage-attention", "--use-flash-attention", "--use-ck-attention"}
# The host's, given to every run: they stay there.
OF_THE_HOST = ["--cpu", "--reserve-vram", "1.5", "--preview-method", "auto", "--disable-api-nodes", "--cache-none"]
DEVICES = parse_devices("cpu:1").devices
KEPT = {name.removeprefix("--").replace("-", "_") for name in REASONS}


@pytest.fixture(scope="module")
def each_option() -> dict[str, Any]:
    """What each_option.py says of the ComfyUI at hand."""
    command = [sys.executable, str(HERE / "each_option.py"), str(comfyui_path())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def test_every_option_that_is_not_on_the_list_has_the_hosts_value_in_a_rank(each_option: dict[str, Any]) -> None:
    options = each_option["options"]
    assert {"--fast", "--deterministic", "--use-pytorch-cross-attention", "--fp16-vae"} <= options.keys()
    for name, found in options.items():
        assert any(told.partition("=")[0] == name for told in found["told"]), f"{name} was given and is not sent"
        assert (found["untold"], found["left_out"], found["unlike"]) == ([], [], []), name


def test_a_rank_computes_as_the_host_with_its_options_and_otherwise_without_them(
    each_option: dict[str, Any], tmp_path: Path
) -> None:
    (words, *_) = runs_of(each_option)
    values, states = compare(words, tmp_path)
    their_values, their_states = rank((), {}, tmp_path)
    assert {"fast", "deterministic"} <= {name for name in their_values if their_values[name] != values[name]}
    assert {"attention", "fp8"} <= {name for name in states if states[name] != their_states[name]}
    assert [name for name in TURNED if their_states["flags"][f"torch.{name}"] == states["flags"][f"torch.{name}"]] == []


@pytest.mark.full
def test_a_rank_computes_as_the_host_with_every_other_option(each_option: dict[str, Any], tmp_path: Path) -> None:
    """An option a run of those that exclude each other, and without any."""
    for number, words in enumerate([*runs_of(each_option)[1:], []]):
        folder = tmp_path / str(number)
        folder.mkdir()
        compare(words, folder)


def runs_of(each_option: dict[str, Any]) -> list[list[str]]:
    """Command lines without what this machine lacks."""
    return [[word for word in words if word not in NOT_INSTALLED] for words in each_option["runs"]]


def compare(words: list[str], folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Hold a rank to the host of this command line; the host's values and states."""
    told, values, states = host(words, folder)
    their_values, their_states = rank(tuple(told), states["flags"] | {"torch.unheard_of": True}, folder)
    different = {name for name in values if their_values[name] != values[name]}
    assert different <= KEPT, f"{words}: {sorted(different - KEPT)}"
    assert their_states == states, words
    always = {name.removeprefix("--").replace("-", "_") for name in ALWAYS} & values.keys()
    assert {their_values[name] for name in always} == {"True"}
    return values, states


def host(words: list[str], folder: Path) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    """Options for ranks, values of all options and states, as a custom node of ComfyUI's own process finds them."""
    pack, said = folder / "base" / "custom_nodes" / "telling", folder / "host.json"
    pack.mkdir(parents=True)
    (pack / "__init__.py").write_text(TELL)
    command = [sys.executable, str(comfyui_path() / "main.py"), "--quick-test-for-ci", *OF_THE_HOST, *words]
    command += ["--disable-all-custom-nodes", "--whitelist-custom-nodes", "telling"]
    command += ["--base-directory", str(folder / "base"), "--database-url", "sqlite:///:memory:"]
    environment = {**os.environ, "TELL": str(said), "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "log").open("wb") as log:
        subprocess.run(command, env=environment, cwd=comfyui_path(), stdout=log, stderr=log, check=False)
    assert said.exists(), f"{words}: {(folder / 'log').read_text()[-3000:]}"
    told, values, states = json.loads(said.read_text())
    return told, values, states


def rank(told: tuple[str, ...], flags: dict[str, Any], folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The same of a rank that has loaded a model for a ComfyUI with these options."""
    path = write_families(folder, only=[QWEN.name]) / "diffusion_models" / QWEN.file
    comfyui = ComfyUI(str(comfyui_path()), told)
    spec = ModelSpec.of(path, "float32", comfyui=comfyui, flags=flags)
    with Pool(DEVICES, threads_per_rank=1, engine="telling_engine:Telling", python_path=(str(HERE),)) as pool:
        pool.load(spec, ParallelPlan())
    values, states = json.loads(Path(f"{path}.json").read_text())
    return values, states
