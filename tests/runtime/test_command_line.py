"""The command line as a user runs it: reports, exit codes, and refusals by name."""

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from host.fetch import comfyui_path
from parallel_runtime.__main__ import main
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from runtime.shard_sizes import named, ranges, sent, weight_bytes
from runtime.stale_model import StaleModel

ROOT = Path(__file__).resolve().parents[2]


Command = Callable[..., subprocess.CompletedProcess[str]]


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, without asserts and docstrings (-OO)."""
    command = [sys.executable, "-OO", "-m", "parallel_runtime", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


VERIFIED = Workload(width=200, height=136, text_tokens=7, batch=2)


@pytest.fixture
def verify(command: Command) -> Command:
    """`verify` with a model and a plan, on inputs that no plan divides: `VERIFIED`."""
    size = ("--width", "200", "--height", "136", "--text-tokens", "7", "--batch", "2")
    return lambda model, plan, *more: command("verify", "--model", model, "--plan", plan, *size, *more)


@pytest.mark.slow
def test_verify_reports_an_exact_plan_and_exits_0(sample: ModelSpec, verify: Command) -> None:
    done = verify(sample.path, "ulysses=2,ring=2", "--devices", "cpu:4", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tolerance"] == 1e-5
    assert 0 < report["max_rel_err"] <= 1e-5
    assert len(report["per_rank"]) == 4
    assert report["parameter_bytes_per_rank"] == [sum(weight_bytes(sample.path).values())] * 4
    assert report["image_tokens"] == 9 * 13


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_negative_control_exits_1(sample: ModelSpec, dtype: str, command: Command) -> None:
    size = ("--width", "256", "--height", "256", "--text-tokens", "77")
    plan = ("--plan", "ring=2", "--dtype", dtype, "--negative-control")
    done = command("verify", "--model", sample.path, *plan, *size, "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["max_rel_err"] > 0.05 > 4 * report["tolerance"]
    assert report["negative_control"] is True


@pytest.mark.slow
def test_verify_runs_cond_and_uncond_in_a_batch_group_each(sample: ModelSpec, verify: Command) -> None:
    done = verify(sample.path, "cfg=2,ulysses=2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["name"] == "cfg2-ring1-uly2"
    assert report["text_tokens_by_call"] == [7, 4]
    assert report["lane_by_rank"] == [0, 0, 1, 1]
    assert [[piece["call"] for piece in pieces] for pieces in report["pieces_by_rank"]] == [[0], [0], [1], [1]]
    assert all(0 < error <= 1e-5 for error in report["per_rank"])
    assert report["warnings"] == []


@pytest.mark.slow
def test_verify_counts_the_weights_that_each_rank_holds(sample: ModelSpec, verify: Command) -> None:
    done = verify(sample.path, "data=2,ulysses=2", "--weights", "sharded", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["name"], report["weights"]) == ("data2-ring1-uly2-sharded", "sharded")
    units = ranges(weight_bytes(sample.path), 2)
    assert report["parameter_bytes_per_rank"] == [sum(units.values())] * 4
    assert report["weight_bytes_per_step"] == [sent(units, 2, passes=1)[1]] * 4
    assert report["max_rel_err"] <= 1e-5


@pytest.mark.slow
def test_a_batch_group_without_work_is_named(sample: ModelSpec, command: Command) -> None:
    done = command(
        "verify", "--model", sample.path, "--plan", "data=2", "--width", "64", "--height", "64", "--batch", "1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning: batch group 1 of 2 had no work (rank 1); use a larger --batch" in done.stdout
    assert "rank 1, batch group 1: no work" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["cfg=2", pytest.param("data=2", marks=pytest.mark.full)])
def test_the_negative_control_of_batch_groups_exits_1(sample: ModelSpec, plan: str, verify: Command) -> None:
    done = verify(sample.path, plan, "--negative-control", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["max_rel_err"] > 0.05


@pytest.mark.full
def test_verify_follows_several_steps(sample: ModelSpec, verify: Command) -> None:
    done = verify(sample.path, "ulysses=3", "--steps", "3", "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["steps"] == 3


@pytest.mark.slow
def test_verify_in_bf16_is_held_against_one_bf16_process(sample: ModelSpec, verify: Command) -> None:
    done = verify(sample.path, "ring=2", "--dtype", "bfloat16", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert report["tolerance"] == pytest.approx(1.1 * report["one_process_rel_err"])
    assert report["one_process_rel_err"] < 2e-2, "more than bf16's arithmetic makes of two blocks"


@pytest.mark.slow
def test_a_result_that_is_no_number_exits_1_and_leaves_the_report_strict_json(
    sample: ModelSpec, tmp_path: Path, verify: Command
) -> None:
    weights = load_file(sample.path)
    weights["img_in.bias"] *= float("nan")
    save_file(weights, tmp_path / "broken.safetensors")
    done = verify(str(tmp_path / "broken.safetensors"), "ulysses=2", "--json")
    assert done.returncode == 1, done.stderr
    assert "NaN" not in done.stdout
    report = json.loads(done.stdout)
    assert report["max_rel_err"] is None
    assert report["per_rank"] == [None, None]


@pytest.mark.full
def test_stdout_is_the_report_and_nothing_else_without_asserts_and_docstrings(sample: ModelSpec) -> None:
    """-OO takes away what -O does, and docstrings too."""
    size = ("--width", "64", "--height", "64", "--text-tokens", "5")
    done = process("verify", "--model", sample.path, "--plan", "ring=2", *size, "--json")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.slow
def test_help_is_there_without_docstrings() -> None:
    done = process("--help")
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_its_ranks_in_one_line(sample: ModelSpec) -> None:
    command = [sys.executable, "-m", "parallel_runtime", "verify", "--model", sample.path, "--plan", "ring=2"]
    size = ["--width", "64", "--height", "64", "--text-tokens", "5", "--steps", "1000000"]
    # a shell's background job may have passed on that SIGINT is ignored
    start = "import signal, os, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", start, *command, *size],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            ranks = wait_for_ranks(process.pid, count=2)
            process.send_signal(signal.SIGINT)
            said, complaint = process.communicate(timeout=60)
        finally:
            process.kill()
    *phases, last = complaint.splitlines()
    assert (process.returncode, said, last) == (130, "", "verify: interrupted")
    assert all(line.endswith(" ...") for line in phases), phases
    _, living = psutil.wait_procs(ranks, timeout=10)
    assert living == []


def wait_for_ranks(parent: int, *, count: int) -> list[psutil.Process]:
    """The rank processes of `parent`, once all have started."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        ranks = [child for child in psutil.Process(parent).children() if "worker.entry" in " ".join(child.cmdline())]
        if len(ranks) == count:
            return ranks
        time.sleep(0.1)
    raise AssertionError(f"{parent} has not started {count} ranks")


@pytest.mark.slow
def test_verify_shows_a_pipeline_exact_in_warm_up_and_what_its_old_keys_change(
    sample: ModelSpec, config: FluxConfig, verify: Command
) -> None:
    done = verify(sample.path, "pipefusion=2", "--steps", "3", "--warmup", "1", "--patches", "3", "--json")
    report = json.loads(done.stdout)
    assert (report["patches"], report["warmup_steps"], report["tolerance"]) == (3, 1, 1e-5)
    assert 0 < report["max_rel_err"] <= 1e-5
    call = VERIFIED.tensors(config)
    exact, stale = (
        three_euler_steps(model, call)
        for model in (ReferenceModel(sample.path), StaleModel(sample.path, patches=3, warm_calls=1))
    )
    assert report["stale_difference"] == pytest.approx(relative_error(stale, exact), rel=0, abs=1e-5)
    assert report["stale_difference"] > 1e-3
    weights, everywhere = weight_bytes(sample.path), "time_in vector_in guidance_in"
    stages = (named(weights, everywhere, own) for own in ("img_in txt_in double_blocks", "single_blocks final_layer"))
    assert report["parameter_bytes_per_rank"] == [sum(stage.values()) for stage in stages]
    said = verify(sample.path, "pipefusion=2", "--steps", "2", "--warmup", "2").stdout
    assert "every step a warm-up" in said and "0 with keys a step old" in said


def three_euler_steps(model: Callable[[dict], torch.Tensor], call: dict[str, torch.Tensor]) -> torch.Tensor:
    """The latent after three even steps of the flow."""
    img, sigmas = call["img"].clone(), torch.linspace(1, 0, 4)
    for now, after in itertools.pairwise(sigmas):
        velocity = model({**call, "img": img, "timesteps": now.expand(len(img))})
        img[..., : velocity.shape[2]] += (after - now) * velocity
    return img[..., : velocity.shape[2]]


@pytest.mark.slow
def test_verify_speaks_to_people_too(sample: ModelSpec, verify: Command) -> None:
    done = verify(sample.path, "ulysses=2")
    assert done.stdout.startswith("uly2: equal to one process: relative error")
    assert "rank 1:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plan", "ulysses=5"), ["ulysses=5 does not divide 24 heads", "ring=5"]),
        (("--plan", "ulysses=0"), ["ulysses=0", "1 to 8"]),
        (("--plan", "cfg=2", "--seed", str(1 << 70)), [f"--seed={1 << 70}", "outside 0 to"]),
        (("--plan", "cfg=3,ulysses=3"), ["ulysses=3,cfg=3", "9 ranks"]),
        (("--plan", "pipefusion=3"), ["pipefusion=3", "2 blocks"]),
        (("--plan", "ulyses=2"), ["'ulyses'"]),
        (("--plan", "ulysses=2", "--patches", "4"), ["patches=4", "needs stages"]),
        (("--plan", "ulysses=2", "--warmup", "2"), ["warmup_steps=2", "needs stages"]),
        (("--plan", "pipefusion=2", "--warmup", "2"), ["warmup_steps=2", "--steps=1"]),
        (("--plan", "pipefusion=2", "--patches", "1"), ["patches=1", "2 stages"]),
        (("--plan", "ulysses=1", "--weights", "sharded"), ["weights=sharded", "one rank", "weights=offloaded"]),
        (("--plan", "data=2", "--weights", "sharded"), ["weights=sharded", "2 replica(s)"]),
        (("--plan", "ulysses=2", "--weights", "torn"), ["'torn'", "replicated, sharded, offloaded"]),
        (("--plan", "ulysses=2,weights=sharded", "--weights", "sharded"), ["--weights sharded", "name them once"]),
        (("--plan", "data=2", "--negative-control"), ["data2-ring1-uly1", "--batch 2"]),
        (("--plan", "ulysses=4", "--devices", "cpu:2"), ["4 ranks", "cpu:4"]),
        (("--plan", "ulysses=2", "--devices", "cuda:77"), ["cuda:77", "does not exist"]),
        (("--plan", "ulysses=2", "--width", "0"), ["--width=0", "16 to"]),
        (("--plan", "ulysses=2", "--text-tokens", "0"), ["--text-tokens=0"]),
        (("--plan", "ulysses=2", "--batch", "-1"), ["--batch=-1"]),
        (("--plan", "ulysses=2", "--steps", "0"), ["--steps=0"]),
        (("--plan", "ulysses=2", "--dtype", "int4"), ["dtype='int4'"]),
    ],
)
def test_what_cannot_be_run_exits_2_and_says_why_in_one_line(
    sample: ModelSpec, arguments: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--model", sample.path, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    for word in words:
        assert word in said


def test_a_file_that_cannot_be_read_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", str(tmp_path / "gone.safetensors"), "--plan", "ulysses=2", "--json"]) == 2
    assert "does not exist" in json.loads(capsys.readouterr().out)["error"]
    pickled = tmp_path / "model.pt"
    pickled.write_bytes(b"\x80\x02")
    assert main(["verify", "--model", str(pickled), "--plan", "ulysses=2"]) == 2
    assert "only .safetensors" in capsys.readouterr().err


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
