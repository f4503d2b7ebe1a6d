"""All graphs under all plans: prints the table as it grows and writes docs/parity.md. `make parity` runs it.

Owns: the order of the runs and how the table looks. Exit code 1 when any cell differs or fails.

`PYTHONPATH=tests python -m tools.graph_matrix [--only TEXT] [--plan NAME] [--models DIR] [--write FILE]`
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from host.client import ComfyClient
from host.layouts import FluxShape
from host.pack_workflows import TOLERANCE
from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import TinyModels, write_tiny_models
from parity.graphs import Graph
from parity.runner import PLANS, Bench, FailedRunError, Row, effect, prepare

from .graphs import GRAPHS, NOT_IN_STOCK
from .tables import markdown, shown, verdict

ONE_CONDITIONING = ("sampler", "scheduler", "model sampling", "position", "guidance", "saved by comfyui")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # more cost more than they give, on models as small as these
DOCUMENT = PACK_ROOT / "docs" / "parity.md"
INTRODUCTION = f"""# Parity with stock ComfyUI

The same graph once with Load Diffusion Model and once with Parallel Flux Loader, in one ComfyUI, fp32, on small models
with random weights. Compared: the saved latents (relative error, at most {TOLERANCE:.0e}), every progress event, the
number of previews, the number of calls of the model (several may go to the pool in one request). "Changed by" is how
far the graph's own nodes move stock ComfyUI's latent: what a node does must show, or to agree about it would mean
nothing. `make parity` writes this file.

Plans with cfg are not run with graphs of the kinds {", ".join(ONE_CONDITIONING)}, which have one conditioning a step.
Left out, as stock ComfyUI itself cannot run them: {"; ".join(graph.name for graph in NOT_IN_STOCK)}.
"""


@contextmanager
def tiny_models(folder: Path | None) -> Iterator[TinyModels]:
    """The tiny models in `folder`, written if they are not there; in a temporary one without."""
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        tiny = TinyModels(base=folder or Path(temporary), shape=FluxShape())
        yield tiny if tiny.models.exists() else write_tiny_models(tiny.base)


def line(row: Row, changed: str = "") -> tuple[object, ...]:
    """One row of the table."""
    return row.kind, row.graph, row.plan, shown(row), row.calls, row.previews, changed, verdict(row)


def effects(bench: Bench, graphs: list[Graph]) -> dict[str, str]:
    """By graph, how far its nodes move the stock latent; "" where there are none. Runs all stock graphs."""
    found = {}
    for graph in graphs:
        try:
            bench.stock(graph)
            found[graph.name] = f"{effect(bench, graph):.1e}" if graph.edits else ""
        except FailedRunError as failed:
            found[graph.name] = f"stock ComfyUI: {failed}"
        except ValueError:  # another size of latent: certainly changed
            found[graph.name] = "size"
    return found


def run(bench: Bench, graphs: list[Graph], plans: list[str], changed: dict[str, str]) -> list[Row]:
    """Every graph under every plan, plan by plan, each printed as it is known."""
    rows = []
    for plan in plans:
        for graph in worthwhile(graphs, plan):
            rows.append(bench.compare(graph, plan))
            print(*line(rows[-1], changed[graph.name]), sep=" | ", flush=True)  # noqa: T201
    return rows


def worthwhile(graphs: list[Graph], plan: str) -> list[Graph]:
    """The graphs that a plan could make a difference to: one conditioning a step goes the same way under any cfg."""
    return [graph for graph in graphs if "cfg" not in PLANS[plan] or graph.kind not in ONE_CONDITIONING]


def document(rows: list[Row], changed: dict[str, str]) -> str:
    """The text of docs/parity.md."""
    worst = max(rows, key=lambda row: row.error)
    differing = sum(bool(row.problems) for row in rows)
    summary = (
        f"{len(changed)} graphs, {len({row.plan for row in rows})} plans, {len(rows)} cells, {differing} differ. "
        f"Worst: {worst.error:.1e} ({worst.graph}, {worst.plan}).\n"
    )
    head = ("kind", "graph", "plan", "relative error", "calls", "previews", "changed by", "result")
    order = {name: number for number, name in enumerate(changed)}
    ordered = sorted(rows, key=lambda row: order[row.graph])  # stable: the plans keep their order
    return f"{INTRODUCTION}\n{summary}\n{markdown(head, [line(row, changed[row.graph]) for row in ordered])}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="graphs whose kind or name contains this")
    parser.add_argument("--plan", action="append", choices=list(PLANS), help="default: all")
    parser.add_argument("--models", type=Path, help="keep the tiny models here between runs")
    parser.add_argument("--write", type=Path, help=f"default: {DOCUMENT}, when everything was run")
    arguments = parser.parse_args()
    graphs = [graph for graph in GRAPHS if arguments.only in f"{graph.kind} {graph.name}"]
    plans = arguments.plan or list(PLANS)
    start = time.monotonic()
    with tiny_models(arguments.models) as tiny, ComfyServer(models=tiny.models, environment=ONE_THREAD) as server:
        bench = prepare(ComfyClient(server.url), tiny)
        changed = effects(bench, graphs)
        print(f"stock ComfyUI: {len(graphs)} graphs, {time.monotonic() - start:.0f} s", flush=True)  # noqa: T201
        rows = run(bench, graphs, plans, changed)
    text = document(rows, changed)
    print(text.split("\n| kind")[0].split("\n\n")[-1], f"{time.monotonic() - start:.0f} s")  # noqa: T201
    whole = len(graphs) == len(GRAPHS) and len(plans) == len(PLANS)
    target = arguments.write or (DOCUMENT if whole else None)
    if target:
        target.write_text(text)
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
