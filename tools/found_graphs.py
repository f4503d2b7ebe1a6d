"""A graph of every variant of every family by found plans alone: `python -m tools.found_graphs [TEXT ...] [--update]`.

In a ComfyUI whose classes have other names, so that nobody wrote plans for them, each graph is run with stock's loader
and with ours under ulysses 2: what a user sees of a model on the day it appears. TEXT: parts of families and variants,
and of "ControlNet NAME", graphs with the ControlNets of tests/families/test_controlnets_in_turn.py.
`--update` puts the rows into docs/found_plans.md. Exit code 1 where a latent differs from stock's.

Owns the ComfyUI without written plans and the comparison. Does not own graphs (tests/families), nor the page
(find_plans.py).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from families.test_controlnets_in_turn import FILES as CONTROLLED
from families.test_controlnets_in_turn import KINDS, write_files
from families.variant import Variant
from families.variants import FAMILIES, FILES, write_families
from host.client import ComfyClient, PromptResult, Workflow
from host.fetch import comfyui_path
from host.pack_workflows import parallel, relative_error, saved_latent
from host.server import ComfyServer
from parallel_runtime.models.specs import SPECS
from tools.found_page import ERROR, GraphRow, Known

RENAMED = "Unwritten"
LIMIT_S = 900.0


def say(*lines: str) -> None:
    """Print."""
    print(*lines, sep="\n", flush=True)  # noqa: T201


def without_written(folder: Path) -> Path:
    """A ComfyUI of links to the one to use, whose classes with written plans have other names."""
    comfyui = folder / "ComfyUI"
    shutil.copytree(comfyui_path(), comfyui, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    lines: dict[str, list[str]] = {"main.py": []}
    for path in SPECS:
        module, _, name = path.rpartition(".")
        file = f"{module.replace('.', '/')}.py"
        if (comfyui / file).is_file() and f"class {name}(" in (comfyui / file).read_text():
            lines.setdefault(file, []).append(f'{name}.__qualname__ = "{RENAMED}{name}"')
    for file, more in lines.items():
        text = (comfyui / file).read_text()
        (comfyui / file).unlink()  # Python looks for modules beside what a script's link names
        (comfyui / file).write_text("\n".join([text, *more, ""]))
    return comfyui


@contextmanager
def server(models: Path, folder: Path) -> Iterator[ComfyServer]:
    """One of such a ComfyUI, in an empty folder, where `cache` is its cache."""
    os.environ["COMFYUI_PATH"] = str(without_written(folder))
    environment = {"XDG_CACHE_HOME": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
    with ComfyServer(models=models, environment=environment) as started:
        yield started


def shared(graph: Workflow) -> Workflow:
    """The graph under ulysses 2."""
    config = {"mode": "manual", "devices": "cpu:2", "ulysses": 2}
    return parallel(graph, loader="ParallelModelLoader", sampler="ParallelSampler", **config)


def why(result: PromptResult) -> str:
    """Of a run that failed: what the user reads, without what to do."""
    said = result.error_message.splitlines()[0] if result.error_message else result.status
    named = re.sub(rf"\b{RENAMED}(?=[A-Z])", "", said)
    return named.partition("; use cfg parallel")[0].partition("; in SP Config")[0]


@dataclass(frozen=True)
class Case:
    """A graph to compare: its class's path, its name, and the nodes that save its latents."""

    path: str
    name: str
    graph: Callable[[], Workflow]
    latents: Sequence[str] = ("save",)


def cases_of(wanted: Sequence[str]) -> list[Case]:
    """Those whose family and name have one of the texts."""
    named = [(f"{each.family} {each.name}", of_variant(each)) for each in FAMILIES]
    named += [(case.name, case) for case in of_controlnets()]
    return [case for name, case in named if any(text in name for text in wanted)]


def of_variant(variant: Variant) -> Case:
    """The graph of a variant of a family."""
    graph = partial(variant.graph, cfg=3.0, steps=2)
    return Case(FILES[variant.file].class_path, variant.name, graph, variant.latents)


def of_controlnets() -> Iterator[Case]:
    """A graph with each kind of ControlNet."""
    files = {each.name: each for each in CONTROLLED}
    for kind, graph in KINDS.items():
        yield Case(files[graph()["model"]["inputs"]["unet_name"]].class_path, f"ControlNet {kind}", graph)


def compared(client: ComfyClient, case: Case) -> GraphRow:
    """The row of a graph."""
    row = GraphRow(case.path, case.name)
    graph, began = case.graph(), time.perf_counter()
    stock = client.queue(graph, timeout_s=LIMIT_S)
    result = client.queue(shared(graph), timeout_s=LIMIT_S)
    row.seconds = time.perf_counter() - began
    if result.status != "success":
        row.reason = why(result)
        return row
    (report,) = result.outputs["sampler"]["parallel_dit"]
    proof = report["proof"]
    row.cuts, row.control = str(proof["found"]).partition(",")[0], proof["control"] or 0.0
    pairs = [[saved_latent(client, each, node=name) for each in (result, stock)] for name in case.latents]
    row.error = max(relative_error(*pair) for pair in pairs)
    return row


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of families and names of variants (default: all)")
    parser.add_argument("--update", action="store_true", help="write docs/found_plans.md")
    parser.add_argument("--models", type=Path, help="keep the small files in this models folder between runs")
    arguments = parser.parse_args()
    cases = cases_of(arguments.only or [""])
    variants = [each.name for each in FAMILIES if each.name in {case.name for case in cases}]
    rows = list[GraphRow]()
    with tempfile.TemporaryDirectory(prefix="families-") as temporary:
        models = write_families(arguments.models or Path(temporary) / "models", only=variants)
        (folder := Path(temporary) / "unwritten").mkdir()
        if any(case.name not in variants for case in cases):
            write_files(models)
        with server(models, folder) as started:
            client = ComfyClient(started.url)
            for case in cases:
                row = compared(client, case)
                rows.append(row)
                error = row.reason if row.error is None else f"{row.cuts}, error {row.error:.1e}"
                say(f"{row.path.removeprefix('comfy.ldm.')} {row.variant}: {error} ({row.seconds:.0f} s)")
                if arguments.update:
                    known = Known.read()
                    known.graphs[row.variant] = row
                    known.write()
    return int(any(row.error is not None and not row.error <= ERROR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
