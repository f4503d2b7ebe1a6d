"""Experiment 10: one rank beside stock in a real ComfyUI, previews on: a step, a prompt and memory, by format.

Flux.1 of published widths with a quarter of its blocks, random. Each format loads alone with each loader first; then
all run in turn with a seed of their own, every second round in the other order. A step is the median time between two
progress events; a prompt is all of it, moving weights included. What a rank holds is memory of another process, so the
whole GPU's use is read, while both are loaded.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.share.cases import CASES, see_tests, write_case
from parallel_runtime.proof import relative_error

from .formats import write_format
from .setting import GIB, Result, Setting

see_tests()

from families.graphs import plain, prompts, through  # noqa: E402  of the tests
from families.variants import BY_NAME  # noqa: E402
from host.client import ComfyClient, PromptResult, Workflow  # noqa: E402
from host.pack_workflows import parallel, saved_latent  # noqa: E402
from host.server import ComfyServer  # noqa: E402

STOCK, RANK, COMPILED = "stock ComfyUI", "one rank", "one rank, compiled blocks"
CONFIGS: dict[str, dict[str, str]] = {STOCK: {}, RANK: {"compiled": "off"}, COMPILED: {"compiled": "blocks"}}
DOUBLE, SINGLE, SIDE = 5, 10, 1024
STEPS, ROUNDS = 12, 3
SMALL_MODEL = "flux.1 t2i"
PLAIN = "as it is"
HEAD = ("file", "options", "loader", "first prompt s", "prompt s", "step ms", "beside stock", "GPU GiB", "differs")


@dataclass(frozen=True)
class Served:
    """A ComfyUI with these options, and by format of the file by which loaders it is run."""

    options: tuple[str, ...]
    ways: dict[str, tuple[str, ...]]


BOTH = (STOCK, RANK)
SERVERS = (
    Served((), {PLAIN: (*BOTH, COMPILED), "fp8 e4m3": BOTH, "int8, rotated": BOTH}),
    Served(("--fast", "fp8_matrix_mult"), {"fp8 e4m3": BOTH}),
)
SMALL = (Served((), {PLAIN: BOTH}),)


@dataclass(frozen=True)
class Run:
    """One prompt: its seconds, those of a step, what the GPU held, and the latent."""

    prompt_s: float
    step_s: float
    gib: float
    latent: torch.Tensor


def run(setting: Setting) -> Result:
    """Each server."""
    lines = [f"| {' | '.join(HEAD)} |", "| --- " * len(HEAD) + "|"]
    said, of_stock, leaks = list[str](), 0, 0
    os.environ["COMFYUI_PATH"] = setting.comfyui.path  # which the tests' server runs
    whole = setting.file(SMALL_MODEL) if setting.small else _file(setting.models)
    for served in SMALL if setting.small else SERVERS:
        files = {kind: whole if kind == PLAIN else write_format(whole, kind, setting.device) for kind in served.ways}
        with server_with(list(files.values()), served.options) as server:
            client = ComfyClient(server.url)
            for number, file in enumerate([*files.values()] * 2):  # whose leaks are stock's own
                client.queue(graph_of(setting, file, STOCK, number)).require_success()
            client.free()
            of_stock += len(server.leaks)
            for kind, file in files.items():
                found = in_turn(client, partial(graph_of, setting, file), served.ways[kind], setting)
                lines += rows(found, kind, served.options)
                for way in served.ways[kind][1:]:
                    named = " ".join((kind, *served.options, way))
                    said.append(f"{named} {_step(found, way) / _step(found, STOCK):.2f}x")
            leaks += len(server.leaks)
    decided = f"a step of one rank beside stock's: {'; '.join(said)}"
    decided += f"; ComfyUI warned of a leaked model {leaks} times, {of_stock} of them before a rank loaded anything"
    return Result(table=lines, decided=decided)


def graph_of(setting: Setting, file: Path, way: str, seed: int) -> Workflow:
    """A picture by one of the loaders."""
    if setting.small:
        graph = BY_NAME[SMALL_MODEL].graph(seed=seed, steps=2)
    else:
        graph = plain(file.name, cfg=1.0, seed=seed, steps=STEPS)
        prompts(graph, width=4096, tokens=512, pooled=768)
        through(graph, "latent", "EmptySD3LatentImage", "latent_image", width=SIDE, height=SIDE, batch_size=1)
        through(graph, "guidance", "FluxGuidance", "positive", conditioning=["positive", 0], guidance=3.5)
    devices = "cpu:1" if setting.small else str(setting.device)
    return parallel(graph, mode="manual", devices=devices, **CONFIGS[way]) if CONFIGS[way] else graph


def in_turn(
    client: ComfyClient, graph: Callable[[str, int], Workflow], ways: tuple[str, ...], setting: Setting
) -> dict[str, list[Run]]:
    """The runs of one file by each way; the first of each loads alone."""
    found: dict[str, list[Run]] = {way: [] for way in ways}
    for number in range(1 + (1 if setting.small else ROUNDS)):
        for way in ways if number % 2 == 0 else reversed(ways):  # drift hits all alike
            began = time.monotonic()
            result = client.queue(graph(way, 7 + number)).require_success()
            took = time.monotonic() - began
            found[way].append(Run(took, step_s(result), used_gib(setting.device), saved_latent(client, result)))
            if number == 0:
                client.free()
    client.free()
    return found


def rows(found: dict[str, list[Run]], kind: str, options: tuple[str, ...]) -> list[str]:
    """A row for each way."""
    lines = []
    for way, (first, *rest) in found.items():
        pairs = zip((first, *rest), found[STOCK], strict=True)
        error = max(relative_error(each.latent, stock.latent) for each, stock in pairs)
        cells = [kind, " ".join(options), way, f"{first.prompt_s:.1f}", f"{median(each.prompt_s for each in rest):.2f}"]
        cells += [f"{1e3 * _step(found, way):.1f}", f"{_step(found, way) / _step(found, STOCK):.3f}x"]
        cells += [f"{median(each.gib for each in rest):.1f}", f"{error:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _step(found: dict[str, list[Run]], way: str) -> float:
    return median(each.step_s for each in found[way][1:])


def step_s(result: PromptResult) -> float:
    """The median between two progress events."""
    return median(later.t_s - earlier.t_s for earlier, later in itertools.pairwise(result.progress))


def used_gib(device: torch.device) -> float:
    """What all processes hold on the GPU; 0 for a CPU."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GIB


@contextmanager
def server_with(files: list[Path], options: tuple[str, ...]) -> Iterator[ComfyServer]:
    """A ComfyUI that has these files and options."""
    with tempfile.TemporaryDirectory(prefix="beside-stock-") as folder:
        models = Path(folder) / "diffusion_models"
        models.mkdir()
        for file in files:
            (models / file.name).symlink_to(file.resolve())
        with ComfyServer(models=Path(folder), flags=options, environment={"START_EACH_RANK": "1"}) as server:
            yield server


def _file(folder: Path) -> Path:
    case = CASES["flux.1"]
    path = folder / f"flux_{DOUBLE}_{SINGLE}.safetensors"
    arguments = {**case.arguments, "depth": DOUBLE, "depth_single_blocks": SINGLE}
    return path if path.is_file() else write_case(replace(case, arguments=arguments), path, "bfloat16")
