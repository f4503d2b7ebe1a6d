"""The command line as a user runs it: reports, exit codes, and refusals by name."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rounding import ROUNDING
from safetensors.torch import load_file, save_file

import parallel_runtime
from host.fetch import comfyui_path
from host.tiny_models import write_flux
from host.workers import ENTRY, command
from parallel_runtime.__main__ import main, model_file
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.planner.comfyui_process import find_comfyui

ROOT = Path(__file__).resolve().parents[2]


Command = Callable[..., subprocess.CompletedProcess[str]]


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, without asserts and docstrings (-OO)."""
    command = [sys.executable, "-OO", "-m", "parallel_runtime", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


SIZE = ("--width", "112", "--height", "80", "--frames", "5", "--text-tokens", "7")


@pytest.fixture
def verify(command: Command) -> Command:
    """`verify` with a model and a plan, on a small video."""

    def run(model: str, plan: str, *more: str) -> subprocess.CompletedProcess[str]:
        return command("verify", "--model", model, "--plan", plan, *SIZE, "--comfyui", str(comfyui_path()), *more)

    return run


@pytest.mark.slow
def test_a_batch_group_without_work_is_named_and_sharded_weights_are_counted(
    tiny_hosted: ModelSpec, verify: Command
) -> None:
    done = verify(tiny_hosted.path, "data=2,ulysses=2", "--weights", "sharded")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("data2-ring1-uly2-sharded: equal to one process: relative error")
    assert "warning: batch group 1 of 2 had no work (ranks 2 to 3); use a larger --batch" in done.stdout
    assert "rank 2, batch group 1: no work" in done.stdout
    assert " of weights sent a step, " in done.stdout
    assert done.stdout.splitlines()[-1] == "data2-ring1-uly2-sharded: equal to one process"
    assert [line.removesuffix(" ...") for line in done.stderr.splitlines() if line.endswith(" ...")] == [
        "computing random calls in a ComfyUI process",
        "starting 4 rank(s) and loading the model",
        "computing data2-ring1-uly2-sharded",
        "computing the same by ComfyUI in one process",
    ]


@pytest.mark.slow
def test_verify_in_bf16_is_held_against_one_bf16_process_over_several_steps(
    tiny_hosted: ModelSpec, verify: Command
) -> None:
    done = verify(tiny_hosted.path, "ring=2", "--dtype", "bfloat16", "--steps", "2", "--json")
    report = json.loads(done.stdout)
    one, error, limit = (report[name] for name in ("one_process_rel_err", "max_rel_err", "tolerance"))
    assert limit == pytest.approx(1.1 * one)
    assert 0 < one and 0 < error <= 2 * one, "both round as bf16 does"
    assert done.returncode == (error > limit), "which of the two is nearer to fp32 is this CPU's to say"
    assert report["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_flux_is_held_to_unmodified_diffusers_and_its_negative_control_exits_1(
    tmp_path: Path, dtype: str, command: Command
) -> None:
    write_flux(path := tmp_path / "flux.safetensors", seed=3)
    size = ("--width", "200", "--height", "136", "--text-tokens", "7", "--batch", "2")
    more = ("--against", "diffusers", "--comfyui", str(comfyui_path()), "--dtype", dtype, "--json")
    arguments = ("verify", "--model", str(path), "--plan", "cfg=2,ulysses=2", *size, *more)
    done = command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["max_rel_err"] > 0, "another program's arithmetic is never equal bit by bit"
    done = command(*arguments, "--negative-control")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["max_rel_err"] > max(0.02, 2 * report["tolerance"]), report
    assert report["negative_control"] is True


@pytest.mark.slow
def test_batch_groups_that_all_compute_the_first_row_exit_1(tiny_hosted: ModelSpec, verify: Command) -> None:
    done = verify(tiny_hosted.path, "cfg=2", "--batch", "2", "--negative-control", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout)["max_rel_err"] > 0.02


@pytest.mark.slow
def test_a_result_that_is_no_number_exits_1_and_leaves_the_report_strict_json(
    tiny_hosted: ModelSpec, tmp_path: Path, verify: Command
) -> None:
    weights = load_file(tiny_hosted.path)
    weights["patch_embedding.bias"] *= float("nan")
    save_file(weights, tmp_path / "broken.safetensors", dict(read_header(tiny_hosted.path).metadata))
    done = verify(str(tmp_path / "broken.safetensors"), "ulysses=2", "--json")
    assert done.returncode == 1, done.stderr
    assert "NaN" not in done.stdout
    report = json.loads(done.stdout)
    assert report["max_rel_err"] is None
    assert report["per_rank"] == [None, None]


@pytest.mark.slow
def test_help_is_there_without_docstrings() -> None:
    done = process("--help")
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout


@pytest.mark.slow
def test_ctrl_c_ends_a_command_with_its_ranks_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "parallel_runtime", "doctor", "--devices", "cpu:2"]
    # a shell's background job may have passed on that SIGINT is ignored
    start = "import signal, os, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    told = tmp_path / "told"  # no pipe, which the process would wait for once it is full
    with (
        told.open("w") as out,
        subprocess.Popen([sys.executable, "-c", start, *command], cwd=ROOT, stdout=out, stderr=out) as process,
    ):
        try:
            ranks = wait_for_ranks(process, count=2, told=told)
            process.send_signal(signal.SIGINT)
            process.wait(120)
        finally:
            process.kill()
    *phases, last = told.read_text().splitlines()
    assert (process.returncode, last) == (130, "doctor: interrupted")
    assert all(line.endswith(" ...") for line in phases), phases
    _, living = psutil.wait_procs(ranks, timeout=120)
    assert living == []


@pytest.mark.slow
def test_a_command_that_is_told_to_end_leaves_no_files(tmp_path: Path) -> None:
    (model := tmp_path / "a.safetensors").touch()
    command = [sys.executable, "-B", "-m", "parallel_runtime"]  # with an option it is not forked, which has its TMPDIR
    command += ["find-plan", str(model), "--comfyui", str(comfyui_path())]
    told = {"cwd": ROOT, "env": {**os.environ, "TMPDIR": str(tmp_path)}, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **told) as process:
        try:
            while not list(tmp_path.glob("parallel-dit-*")) and process.poll() is None:
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == [model]


def test_a_command_that_is_told_to_end_while_it_is_imported_ends_at_once(tmp_path: Path) -> None:
    swallow = "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)\nexcept BaseException: pass\n"
    (tmp_path / "torch.py").write_text(f"import os, signal, time\n{swallow}")  # as C++ of torch's may do
    command = [sys.executable, "-B", "-m", "parallel_runtime", "find-plan", "a.safetensors"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, b"")


def wait_for_ranks(parent: subprocess.Popen, *, count: int, told: Path) -> list[psutil.Process]:
    """The rank processes of `parent`, once all have started. Fails with what it has `told` when it ends before."""
    while parent.poll() is None:
        ranks = [child for child in psutil.Process(parent.pid).children() if ENTRY in command(child)]
        if len(ranks) == count:
            return ranks
        time.sleep(0.1)
    raise AssertionError(f"the command ended before it had {count} ranks: {told.read_text()}")


@pytest.mark.slow
def test_verify_shows_a_pipeline_exact_in_warm_up_and_what_its_old_keys_change(
    tiny_hosted: ModelSpec, verify: Command
) -> None:
    steps = ("--patches", "3", "--steps", "3", "--warmup", "1")
    done = verify(tiny_hosted.path, "pipefusion=2", "--dtype", "float32", *steps, "--json")
    report = json.loads(done.stdout)
    assert (report["patches"], report["warmup_steps"], report["tolerance"]) == (3, 1, 1e-5)
    assert report["max_rel_err"] <= ROUNDING
    assert report["stale_difference"] > 1e-4
    whole = sum(entry.num_bytes for entry in read_header(tiny_hosted.path).tensors.values())
    assert all(0 < held < whole for held in report["parameter_bytes_per_rank"]), "each stage has some of the blocks"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plan", "ulysses=0"), ["ulysses=0", "1 to 8"]),
        (("--plan", "cfg=2", "--seed", str(1 << 70)), [f"--seed={1 << 70}", "outside 0 to"]),
        (("--plan", "ulysses=2", "--patches", "4"), ["patches=4", "needs stages"]),
        (("--plan", "ulysses=1", "--weights", "sharded"), ["weights=sharded", "one rank", "weights=offloaded"]),
        (("--plan", "ulysses=2,weights=sharded", "--weights", "sharded"), ["--weights sharded", "name them once"]),
        (("--plan", "ulysses=2", "--against", "diffusers"), ["only Flux.1 is converted", "leave --against out"]),
        (("--plan", "data=2", "--negative-control"), ["data2-ring1-uly1", "--batch 2"]),
        (("--plan", "ulysses=4", "--devices", "cpu:2"), ["4 ranks", "cpu:4"]),
        (("--plan", "ulysses=2", "--devices", "cuda:77"), ["cuda:77", "does not exist"]),
    ],
)
def test_what_cannot_be_run_exits_2_and_says_why_in_one_line(
    tiny_hosted: ModelSpec, arguments: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--model", tiny_hosted.path, *arguments]) == 2
    said = capsys.readouterr().err
    (sentence,) = (line for line in said.splitlines() if not line.endswith(" ..."))  # what goes on is said before
    for word in words:
        assert word in sentence


LONG = f"{'a' * 300}.safetensors"  # to look for it is an error of the system's, as below a folder of another user
NOWHERE = "~nobody-has-this-name/ComfyUI"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--kind", "H100", "--model", LONG), "does not exist"),
        (("plan", "--kind", "H100", "--model", LONG.removesuffix(".safetensors")), "is unknown; use a .safetensors"),
        (("verify", "--model", LONG, "--plan", "ulysses=2"), "does not exist"),
        (("find-plan", "FILE", "--comfyui", "a" * 300), "has no comfy/model_base.py"),
        (("find-plan", LONG, "--comfyui", "COMFYUI"), "is no file"),
        (("tune", LONG), "is no file"),
        (
            ("tune", "FILE", "--comfyui", "COMFYUI", "--comfyui-options='--fast"),
            "--comfyui-options='--fast: No closing",
        ),
        (("tune", "FILE", "--comfyui", "COMFYUI", "--cfg", "nan"), "--cfg=nan is outside 0 to 1000"),
        (("tune", "FILE", "--comfyui", NOWHERE), "has no comfy/model_base.py"),
        (("doctor", "--machines", "10.0.0.1:7861"), "--machines without --calibrate would do nothing; add --calibrate"),
        (("doctor", "--token-file", "TOKEN"), "--token-file without --calibrate would do nothing"),
        (("doctor", "--calibrate", "--machines", "10.0.0.1:7861"), "needs --token-file FILE"),
        (("doctor", "--calibrate", "--machines", "h:1", "--token-file", "gone"), "token file gone cannot be read"),
        (("doctor", "--calibrate", "--machines", "localhost:1", "--token-file", "TOKEN"), "names no single interface"),
        (("join", "h:1", "--token-file", "TOKEN", "--comfyui", NOWHERE), "has no comfy/model_base.py"),
        (("join", "h:1", "--token-file", "TOKEN", "--models", NOWHERE), "is no folder; name the folder"),
    ],
)
def test_what_is_not_there_or_cannot_be_read_exits_2_with_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"FILE": tmp_path / "a.safetensors", "TOKEN": tmp_path / "token", "COMFYUI": tmp_path / "comfyui"}
    for place in (places["FILE"], places["TOKEN"], places["COMFYUI"] / "comfy" / "model_base.py"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("secret" * 9)
    places["TOKEN"].chmod(0o600)
    assert main([str(places.get(each, each)) for each in arguments]) == 2
    (sentence,) = (line for line in capsys.readouterr().err.splitlines() if not line.endswith(" ..."))
    assert words in sentence


def test_an_error_is_told_in_json_where_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", str(tmp_path / "gone.safetensors"), "--plan", "ulysses=2", "--json"]) == 2
    assert "does not exist" in json.loads(capsys.readouterr().out)["error"]


def test_a_file_is_found_by_the_name_that_loaders_list(tmp_path: Path) -> None:
    listed = tmp_path / "models" / "unet" / "sub" / "model.safetensors"
    listed.parent.mkdir(parents=True)
    listed.touch()
    pack = tmp_path / "custom_nodes" / "parallel-dit"
    assert model_file("sub/model.safetensors", pack) == str(listed)
    assert model_file("gone.safetensors", pack) == "gone.safetensors"


def test_a_pack_that_is_linked_into_custom_nodes_finds_its_comfyui(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, link = tmp_path / "models" / "unet" / "model.safetensors", tmp_path / "custom_nodes" / "parallel-dit"
    for file in (model, tmp_path / "comfy" / "model_base.py"):
        file.parent.mkdir(parents=True)
        file.touch()
    link.parent.mkdir()
    link.symlink_to(ROOT)
    monkeypatch.setenv("PWD", str(link))
    assert find_comfyui(None).path == str(tmp_path) and model_file("model.safetensors") == str(model)
    for elsewhere in (str(tmp_path), str(tmp_path / "gone"), "", "custom_nodes/parallel-dit"):
        monkeypatch.setenv("PWD", elsewhere)
        assert model_file("model.safetensors") == "model.safetensors"
    monkeypatch.setattr(parallel_runtime, "__file__", str(link / "parallel_runtime" / "__init__.py"))
    monkeypatch.setenv("PWD", str(ROOT))
    assert find_comfyui(None).path == str(tmp_path), "Python has imported it by the link"


def test_a_command_that_is_gone_says_in_a_line_what_replaces_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", "flux.safetensors", "--plan", "ulysses=2", "--chart", "bench.png"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bench is gone; the node Parallel Benchmark times plans") and said.count("\n") == 1


@pytest.mark.slow
def test_doctor_lists_passes_and_problems_with_remedies(command: Command) -> None:
    done = command("doctor", "--devices", "cpu:2", "--comfyui", str(comfyui_path()), "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert report["can_run"] is True
    names = [check["name"] for check in report["checks"] if check["name"] != "cuda"]  # of a torch for GPUs, without one
    machine = ["system", "torch", "packages", "shared memory", "descriptors", "temporary folder", "loopback"]
    assert names == [*machine, "devices", "comfyui", "host contract", "workers", "byte pattern", "parity"]
    assert all(check["ok"] or check["remedy"] for check in report["checks"])
    assert report["versions"]["torch"]
    assert command("doctor", "--devices", "cuda:77").returncode == 2
