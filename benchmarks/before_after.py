"""A step of hosted models in two checkouts of this pack, in turn: what a change does to a step, or to loading.

    PYTHONPATH=tests python -m benchmarks.before_after OTHER_CHECKOUT [--only wan] [--pairs 11] [--loads] [--write FILE]

Each checkout has a process with a pool of two CPU ranks of one thread; both are alive all the time and take turns at
the same call of the same file, so that a neighbour slows both alike. Of each model there is a file that arithmetic
binds and one that the overhead of many small operations binds. "On a core" are the seconds for which the busiest rank
had a core, by the kernel's own books (`/proc/PID/task/*/schedstat`): work, without waiting. Hand-over is a call of the
pool less the time that the slowest rank was at it. With `--loads` each turn unloads the model, and a row is the
step that loads it again, and what a rank holds then: its own memory, and its part of what it shares with other
processes (Pss).

The processes run this file by its path, with the other checkout's modules: it uses what both of them have.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RANKS, WARMUP, TEXT = (1, 2), 2, 48
HEAD = ("model", "bound by", "ranks", "before ms", "after ms", "clock, of each pair", "on a core, of each pair")
HEAD += ("quartiles", "hand-over ms, before and after")
KEPT = ("replicated", "sharded")  # the weights, at two ranks
LOADS_HEAD = ("model", "MB", "weights", "load s, before and after", "clock, of each pair", "quartiles")
LOADS_HEAD += ("MB of a rank's own, before and after", "Pss MB, before and after")


def _flux(blocks: int, heads: int) -> dict[str, Any]:
    found = {"in_channels": 16, "out_channels": 16, "vec_in_dim": TEXT, "context_in_dim": TEXT, "mlp_ratio": 4.0}
    found |= {"hidden_size": 128 * heads, "num_heads": heads, "depth": blocks // 3, "theta": 10000, "patch_size": 2}
    found |= {"depth_single_blocks": blocks - blocks // 3, "axes_dim": [16, 56, 56], "qkv_bias": True}
    return found | {"guidance_embed": True, "txt_ids_dims": []}


def _qwen(blocks: int, heads: int) -> dict[str, Any]:
    found = {"in_channels": 64, "out_channels": 16, "num_layers": blocks, "attention_head_dim": 128}
    return found | {"num_attention_heads": heads, "joint_attention_dim": TEXT, "axes_dims_rope": [16, 56, 56]}


def _wan(blocks: int, heads: int) -> dict[str, Any]:
    found = {"model_type": "t2v", "dim": 128 * heads, "ffn_dim": 344 * heads, "num_heads": heads, "num_layers": blocks}
    return found | {"in_dim": 16, "out_dim": 16, "freq_dim": 256, "text_dim": TEXT}


def _z_image(blocks: int, heads: int) -> dict[str, Any]:
    found = {"patch_size": 2, "in_channels": 16, "dim": 128 * heads, "n_layers": blocks, "n_refiner_layers": 1}
    found |= {"n_heads": heads, "n_kv_heads": heads, "qk_norm": True, "cap_feat_dim": TEXT, "axes_dims": [32, 48, 48]}
    found |= {"axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "time_scale": 1000.0}
    return found | {"z_image_modulation": True, "pad_tokens_multiple": 32}


def _ltx2(blocks: int, heads: int) -> dict[str, Any]:
    found = {"attention_head_dim": 128, "num_attention_heads": heads, "cross_attention_dim": 128 * heads}
    found |= {"caption_channels": 128, "num_layers": blocks, "rope_type": "split", "frequencies_precision": "float64"}
    found |= {"audio_attention_head_dim": 64, "audio_num_attention_heads": heads, "connector_num_layers": 1}
    found |= {"audio_cross_attention_dim": 64 * heads, "connector_attention_head_dim": 64}
    found |= {"connector_num_attention_heads": 2, "use_middle_indices_grid": True}
    return found | {"timestep_scale_multiplier": 1000, "causal_temporal_positioning": True}


def _h3(blocks: int, heads: int) -> dict[str, Any]:
    found = {"hidden_size": 128 * heads, "num_layers": blocks, "token_refiner_num_layers": 1, "text_dim": TEXT}
    found |= {"num_attention_heads": heads, "attention_head_dim": 128, "ffn_hidden_size": 344 * heads}
    found |= {"rope_inv_freq_len": 16, "timestep_input_dim": 256, "time_embed_hidden_size": 256}
    return found | {"time_embed_dim": 256}


# Of each model ComfyUI's class, its arguments by blocks and heads of 128, frames, and pixels of a large call.
MODELS: dict[str, tuple[str, Callable[[int, int], dict[str, Any]], int | None, int]] = {
    "Wan 2.1": ("wan.model.WanModel", _wan, 9, 320),
    "Qwen-Image": ("qwen_image.model.QwenImageTransformer2DModel", _qwen, None, 512),
    "MiniMax H3": ("minimax.model.MiniMaxH3Model", _h3, 10, 512),
    "LTX-2": ("lightricks.av_model.LTXAVModel", _ltx2, 33, 480),
    "Z-Image": ("lumina.model.NextDiT", _z_image, None, 512),
    "Flux.1": ("flux.model.Flux", _flux, None, 512),
}
BOUNDS = {"arithmetic": (4, 4), "overhead": (24, 2)}  # blocks and heads; the second is called with 128 pixels
TO_LOAD = (8, 8)  # of a file whose loading is timed, called with as few


def main() -> None:
    """Measure what the command line chooses; print a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of the pack as it was before")
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--loads", action="store_true", help="loading and memory, instead of a step")
    parser.add_argument("--write", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    head = LOADS_HEAD if arguments.loads else HEAD
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    show(*lines)
    with tempfile.TemporaryDirectory(prefix="before-after-") as folder, ExitStack() as until:
        comfyui = str(told_comfyui(Path(folder)))
        both = [until.enter_context(closing(Checkout(root, comfyui))) for root in (arguments.other.resolve(), ROOT)]
        for name in MODELS:
            sizes = {"load": TO_LOAD} if arguments.loads else BOUNDS
            for bound in sizes if arguments.only.lower() in name.lower() else ():
                path = write_model(Path(folder), name, *sizes[bound])
                try:
                    for side in both:
                        side.ask(open=call_of(name, bound, path))
                    for each in KEPT if arguments.loads else RANKS:
                        row = (loaded if arguments.loads else compared)(both, each, arguments.pairs)
                        what = str(path.stat().st_size // 10**6) if arguments.loads else bound
                        lines.append(f"| {name} | {what} | {each} | {' | '.join(row)} |")
                        show(lines[-1])
                except ValueError as error:
                    show(f"{name}, {bound}: {error}")
                path.unlink()
    if arguments.write:
        with arguments.write.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


def told_comfyui(folder: Path) -> Path:
    """The tests' ComfyUI, linked, but that a file tells its detection the model's sizes (tests/host/told_sizes.py)."""
    from host import told_sizes
    from host.fetch import comfyui_path

    source, found = comfyui_path(), folder / "ComfyUI"
    found.mkdir()
    for each in source.iterdir():
        if each.name != "comfy":
            (found / each.name).symlink_to(each)
    shutil.copytree(source / "comfy", found / "comfy")
    shutil.copy(told_sizes.__file__, found / "comfy" / "told_sizes.py")
    with (found / "comfy" / "model_detection.py").open("a", encoding="utf-8") as file:
        file.write("\nimport sys\nfrom comfy.told_sizes import tell_sizes\ntell_sizes(sys.modules[__name__])\n")
    return found


def write_model(folder: Path, name: str, blocks: int, heads: int) -> Path:
    """Its file of random values."""
    from families.files import ModelFile, Rule, write_model_files

    class_path, sizes, _, _ = MODELS[name]
    arguments, file = sizes(blocks, heads), f"{name} {blocks} {heads}.safetensors"
    told, rules = tuple(arguments), (Rule(r"inv_freq$", std=0.1, mean=0.4),)
    given = {"arguments": arguments, "told": told, "told_by_test_host": True, "rules": rules}
    write_model_files(folder, [ModelFile(name=file, class_path=f"comfy.ldm.{class_path}", **given)])
    return folder / file


def call_of(name: str, bound: str, path: Path) -> dict[str, Any]:
    """What a checkout is asked to open."""
    _, _, frames, large = MODELS[name]
    side = large if bound == "arithmetic" else 128
    return {"path": str(path), "size": {"width": side, "height": side, "frames": frames, "text_tokens": TEXT}}


def pairs_of(both: list["Checkout"], pairs: int, **what: Any) -> list[list[dict[str, float]]]:  # noqa: ANN401
    """What both answer to the same request, in turn; which is first alternates."""
    taken: list[list[dict[str, float]]] = []
    for number in range(pairs + WARMUP):
        order = both if number % 2 else both[::-1]
        took = {side: side.ask(**what) for side in order}
        taken.append([took[side] for side in both])
    return taken[WARMUP:]


def loaded(both: list["Checkout"], weights: str, pairs: int) -> tuple[str, ...]:
    """A row of loading: medians, and of the ratio of each pair its median."""
    taken = pairs_of(both, pairs, load=weights)
    middle = {what: [median(pair[side][what] for pair in taken) for side in (0, 1)] for what in taken[0][0]}
    clock = [after["clock"] / before["clock"] for before, after in taken]
    low, _, high = quantiles(clock, n=4)
    return (
        ", ".join(f"{seconds:.3f}" for seconds in middle["clock"]),
        f"{median(clock):.3f}x",
        f"{low:.3f} to {high:.3f}",
        *(", ".join(f"{held:.1f}" for held in middle[what]) for what in ("own", "pss")),
    )


def compared(both: list["Checkout"], ranks: int, pairs: int) -> tuple[str, ...]:
    """A row of a step: medians, and of the ratio of each pair its median."""
    taken = pairs_of(both, pairs, step=ranks)
    middle = [{what: 1000 * median(pair[side][what] for pair in taken) for what in taken[0][0]} for side in (0, 1)]
    clock, core = ([after[what] / before[what] for before, after in taken] for what in ("clock", "core"))
    low, _, high = quantiles(core, n=4)
    return (
        *(f"{side['clock']:.1f} ({side['core']:.1f})" for side in middle),
        f"{median(clock):.3f}x",
        f"{median(core):.3f}x",
        f"{low:.3f} to {high:.3f}",
        ", ".join(f"{side['hand_over']:.2f}" for side in middle),
    )


class Checkout:
    """A process that runs steps with the modules of a checkout, until `close`."""

    def __init__(self, root: Path, comfyui: str) -> None:
        path = os.pathsep.join((str(root), str(root / "tests")))
        self._process = subprocess.Popen(  # noqa: S603  this file
            [sys.executable, "-P", __file__, "--steps", comfyui],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> dict[str, float]:  # noqa: ANN401
        """Its answer. Raises `ValueError` for what it could not do."""
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101  pipes
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"a checkout's process ended with status {self._process.wait()}; see above")
        found: dict[str, float] = json.loads(line)
        if "error" in found:
            raise ValueError(found["error"])
        return found

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def trial_classes() -> tuple:
    """Trial, Workload and PlanRunner of this checkout, wherever it has them."""
    try:
        from parallel_runtime.trials.plan_runner import PlanRunner
        from parallel_runtime.trials.trial import Trial
        from parallel_runtime.trials.workload import Workload
    except ImportError:  # where the commands have them
        from parallel_runtime.cli.verify import PlanRunner
        from parallel_runtime.cli.workload import Workload

        try:
            from parallel_runtime.cli.hosted_trial import HostedTrial as Trial  # its name in checkouts of two engines
        except ImportError:
            from parallel_runtime.cli.trial import Trial
    return Trial, Workload, PlanRunner


def steps(comfyui: str) -> None:
    """Be a checkout's process: a line of JSON in, one out."""
    from parallel_runtime.devices import parse_devices
    from parallel_runtime.plan import ParallelPlan
    from parallel_runtime.pool.pool import Pool

    Trial, Workload, PlanRunner = trial_classes()  # noqa: N806
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # ComfyUI prints
    devices = parse_devices(f"cpu:{max(RANKS)}").devices
    plans = {ranks: ParallelPlan(ulysses=ranks) for ranks in RANKS}
    plans |= {kept: ParallelPlan(ulysses=max(RANKS), weights=kept) for kept in KEPT}
    trial = None
    with Pool(devices, threads_per_rank=1) as pool:
        pool.start()
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                if "open" in asked:
                    if trial is not None:
                        pool.unload(trial.spec)
                        trial.close()
                    given = (asked["open"]["path"], "float32", Workload(**asked["open"]["size"]), list(plans.values()))
                    trial = Trial(*given, steps=1, comfyui=comfyui, device=devices[0])
                    runners = {each: PlanRunner(pool, trial.spec, plan, options={}) for each, plan in plans.items()}
                    answer = {}
                elif "load" in asked:
                    pool.unload(trial.spec)
                    answer = load(runners[asked["load"]], trial.calls, pool.status()["pids"])
                else:
                    answer = step(runners[asked["step"]], trial.calls, pool.status()["pids"])
            except ValueError as error:
                answer = {"error": str(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    if trial is not None:
        trial.close()


def step(runner: Any, calls: Any, pids: list[int]) -> dict[str, float]:  # noqa: ANN401  of either checkout
    """Seconds of a step: by the clock, of the busiest rank on a core, and beside the slowest rank's own time."""
    before, began = [core_s(pid) for pid in pids], time.perf_counter()
    runner.run(calls)
    clock = time.perf_counter() - began
    core = max(core_s(pid) - was for pid, was in zip(pids, before, strict=True))
    return {"clock": clock, "core": core, "hand_over": clock - max(rank.step_s for rank in runner.ranks)}


def load(runner: Any, calls: Any, pids: list[int]) -> dict[str, float]:  # noqa: ANN401  of either checkout
    """Seconds of a step that loads the weights, and the most that a rank holds then in MB: its own, and its part."""
    began = time.perf_counter()
    runner.run(calls)
    clock, held = time.perf_counter() - began, []
    for pid in pids:
        rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        held.append({row[0]: int(row[1]) * 1024 / 1e6 for row in rows})
    return {"clock": clock, "own": max(one["Anonymous:"] for one in held), "pss": max(one["Pss:"] for one in held)}


def core_s(pid: int) -> float:
    """Seconds that all threads of a process have had a core."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def show(*lines: str) -> None:
    """Lines, at once."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "--steps":
        steps(sys.argv[2])
    else:
        main()
