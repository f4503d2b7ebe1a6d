"""`make demo`: a picture that shows its prompt, from stock ComfyUI and through several ranks, in one PNG with a table.

Owns: the story a visitor sees, the verdict (the exit status), and that no process is left. Does not own: the server and
the client (tests/host), the graphs (graphs.py), the table (table.py), the PNG (sheet.py), what is measured (nodes).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from host.client import ComfyClient, Event, PromptResult, Workflow
from host.server import PACK_ROOT, ComfyServer, cuda_available
from host.workers import worker_pids

from . import networks
from .evaluation import PARTS
from .graphs import MODELS, demo_server, find, parallel_graph, without_exchange, without_our_nodes
from .sheet import GAIN, Panel, difference, draw_sheet
from .table import image_error, predictions, print_table
from .words import COLOURS, PLACES, THINGS, Combination

ASKED = Combination(list(THINGS).index("red apple"), list(COLOURS).index("blue"), list(PLACES).index("top left"))
# Root mean square of the pixel differences over the standard deviation of the image. The CPU computes in fp32 and is
# exact to 1e-5, so only rounding to 8 bits shows (every pixel off by one level would be about 0.01); attention that
# does not communicate gives more than 0.1. GPUs compute in bf16 through other kernels, which the steps amplify.
TOLERANCE = {"cpu": 0.005, "cuda": 0.1}
FLAT_LEVELS = 2.0
KILLED_AT, STEPS_TO_KILL = 5, 60
OTHER_SEED = 8  # of the picture in whose middle a worker is killed


@dataclass(frozen=True)
class Run:
    """One finished graph: what happened, and its image as (height, width, 3) in 0..255."""

    graph: Workflow
    result: PromptResult
    image: np.ndarray

    def node(self, class_type: str) -> str:
        """The id of the graph's node of a class."""
        return find(self.graph, class_type)

    def report(self, class_type: str) -> dict:
        """What a node of ours measured, as it reported it to the client."""
        return self.result.outputs[self.node(class_type)]["parallel_dit"][0]


@dataclass(frozen=True)
class Recovery:
    """A worker that was killed: what the user read, and what came after."""

    message: str
    step: int
    failed_s: float
    next_picture_s: float
    image: np.ndarray


@dataclass(frozen=True)
class Story:
    """All that the demo ran."""

    stock: Run
    parallel: Run
    broken: Run | None
    recovery: Recovery | None


def show(text: str) -> None:
    """Prints a line at once, so that it is seen while the next thing runs."""
    print(text, flush=True)  # noqa: T201


def run(client: ComfyClient, graph: Workflow, label: str) -> Run:
    """Queues a graph and fetches its image. Raises RuntimeError when it failed or saved none."""
    show(f"- {label} ...")
    result = client.queue(graph, timeout_s=1200).require_success()
    if len(result.images()) != 1:
        raise RuntimeError(f"{label}: {len(result.images())} images were saved; the graph saves one")
    show(f"  {result.wall_s:.1f} s")
    return Run(graph, result, np.asarray(client.image(result.images()[0]), dtype=np.float64))


def kill_a_worker(client: ComfyClient, server: ComfyServer, graph: Workflow) -> Recovery:
    """Kills the last rank in the middle of a picture and queues the next one at once."""
    graph = copy.deepcopy(graph)
    sampler = graph[find(graph, "ParallelSampler")]["inputs"]
    sampler |= {"seed": OTHER_SEED, "steps": STEPS_TO_KILL}
    killed: list[tuple[float, int]] = []

    def on_event(event: Event) -> None:
        if event.type == "progress" and event.data["value"] >= KILLED_AT and not killed:
            os.kill(worker_pids(server)[-1], signal.SIGKILL)
            killed.append((time.monotonic(), event.data["value"]))

    show("- a worker is killed in the middle of a picture ...")
    failed = client.queue(graph, on_event=on_event, timeout_s=1200)
    if not killed or failed.status != "error":
        raise RuntimeError(f"the prompt whose worker was killed ended as {failed.status!r}; it had to fail")
    failed_s = time.monotonic() - killed[0][0]
    message = failed.error_message.splitlines()[0]
    show(f"  {message}")
    sampler["steps"] = 20
    after = run(client, graph, "the next picture")
    return Recovery(message, killed[0][1], failed_s, time.monotonic() - killed[0][0], after.image)


def tell(client: ComfyClient, server: ComfyServer, graph: Workflow) -> Story:
    """Runs everything."""
    devices = graph[find(graph, "SPConfig")]["inputs"]["devices"]
    stock = run(client, without_our_nodes(graph), "stock ComfyUI draws")
    parallel = run(client, graph, f"Parallel DiT draws the same over devices {devices!r}")
    if len(parallel.report("ParallelSampler")["ranks"]) < 2:
        return Story(stock, parallel, None, None)
    broken = run(client, without_exchange(graph), "once more, the exchange between the ranks switched off")
    return Story(stock, parallel, broken, kill_a_worker(client, server, graph))


def seen(image: np.ndarray) -> dict[str, str]:
    """What the classifier sees in an image: a thing, a colour and a place, or "nothing"."""
    classifier = networks.load(MODELS / "demo_classifier.safetensors", torch.device("cpu"))
    pixels = torch.from_numpy(image).float().permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        found = [int(each.argmax()) for each in classifier(pixels)]
    return {
        part: [*names, "nothing"][index]
        for part, names, index in zip(PARTS, (THINGS, COLOURS, PLACES), found, strict=True)
    }


def words(shown: dict[str, str]) -> str:
    """The same in words."""
    return ", ".join(shown.values())


def asked() -> dict[str, str]:
    """What the prompt asks for, as `seen` says it."""
    return dict(
        zip(PARTS, (list(THINGS)[ASKED.thing], list(COLOURS)[ASKED.colour], list(PLACES)[ASKED.place]), strict=True)
    )


def wrong(parallel: Run, stock: Run, limit: float) -> str:
    """What is wrong with the parallel image, "" when nothing is."""
    if parallel.image.shape != stock.image.shape:
        return f"the image is {parallel.image.shape}, stock ComfyUI's {stock.image.shape}"
    if parallel.image.std() < FLAT_LEVELS:
        return f"the image is flat (standard deviation {parallel.image.std():.2f} of 255), so it proves nothing"
    error = image_error(parallel.image, stock.image)
    if not error <= limit:  # not a number is wrong as well
        return f"the image's relative error against stock ComfyUI's is {error:.3g}; at most {limit:g} is allowed"
    return ""


def problem_of(story: Story, limit: float) -> str:
    """What is wrong with any of it, "" when nothing is."""
    problem = wrong(story.parallel, story.stock, limit)
    if problem:
        return problem
    pictures = [("stock ComfyUI's", story.stock.image), ("our", story.parallel.image)]
    if story.recovery:
        pictures.append(("after a worker was killed, the", story.recovery.image))
    for name, image in pictures:
        if seen(image) != asked():
            return f"{name} picture shows {words(seen(image))}; asked was {words(asked())}"
    if story.broken and not wrong(story.broken, story.stock, TOLERANCE["cuda"]):
        return "without exchange the picture is right as well, so its equality proves nothing"
    return ""


def panels(story: Story) -> list[Panel]:
    """The sheet's pictures."""
    stock, parallel = story.stock.image, story.parallel.image
    ranks = len(story.parallel.report("ParallelSampler")["ranks"])
    largest = np.abs(parallel - stock).max()
    shown = [
        Panel(stock, "stock ComfyUI", f"classifier: {words(seen(stock))}"),
        Panel(parallel, f"Parallel DiT, {ranks} ranks", f"classifier: {words(seen(parallel))}"),
        Panel(difference(parallel, stock), "their difference", f"{GAIN} times; largest {largest:g} of 255 levels"),
    ]
    if story.broken:
        error = image_error(story.broken.image, stock)
        shown.append(
            Panel(story.broken.image, "exchange switched off", f"broken: relative error {error:.2g}", bad=True)
        )
        lost = difference(story.broken.image, stock)
        shown.append(Panel(lost, "its difference", f"{GAIN} times, as above", bad=True))
    if story.recovery:
        told = f"{story.recovery.next_picture_s:.1f} s after a worker was killed"
        shown.append(Panel(story.recovery.image, "the next picture", told))
    return shown


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="One picture over several ranks in a real ComfyUI.")
    parser.add_argument("--devices", help="as the SP Config node takes them (default: all GPUs, else cpu:2)")
    parser.add_argument("--steps", type=int, default=20, help="denoise steps")
    parser.add_argument("--open", action="store_true", help="leave ComfyUI up at the end, until Ctrl-C")
    parser.add_argument("--output", type=Path, default=PACK_ROOT / "demo_output", help="where images and the log go")
    return parser.parse_args()


def save(story: Story, output: Path) -> Path:
    """Writes the sheet, the pictures and the graph that ComfyUI opens; returns the sheet's path."""
    for name, each in (("stock", story.stock), ("parallel", story.parallel), ("without_exchange", story.broken)):
        if each:
            Image.fromarray(each.image.astype(np.uint8)).save(output / f"{name}.png")
    (output / "workflow.json").write_text(json.dumps(story.parallel.graph, indent=1) + "\n", encoding="utf-8")
    draw_sheet(f'"{ASKED.prompt()}"', panels(story)).save(output / "demo.png")
    return output / "demo.png"


def stay_open(server: ComfyServer, output: Path) -> None:
    """Says where the server is and waits until it ends, or for a signal."""
    show(
        f"\nComfyUI is at {server.url} (Ctrl-C ends it). Load {output / 'workflow.json'}; the sidebar has the timeline."
    )
    while server.running():
        time.sleep(0.5)


def end_on_signals() -> None:
    """SIGTERM and a closed terminal leave through every `with`, as Ctrl-C does, so the server is stopped."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def main(arguments: argparse.Namespace) -> int:
    """Runs everything and returns 0 when the picture is there and right."""
    end_on_signals()
    arguments.output.mkdir(parents=True, exist_ok=True)
    busy, started = os.getloadavg()[0], time.monotonic()
    devices = arguments.devices or ("all" if cuda_available() else "cpu:2")
    graph = parallel_graph(ASKED.prompt(), devices=devices, steps=arguments.steps)
    with tempfile.TemporaryDirectory(prefix="parallel-dit-demo-") as base, demo_server(Path(base)) as server:
        show(f"ComfyUI answers on {server.url} after {time.monotonic() - started:.1f} s")
        show(f'the prompt: "{ASKED.prompt()}"')
        try:
            story = tell(ComfyClient(server.url), server, graph)
        finally:
            (arguments.output / "server.log").write_text(server.log, encoding="utf-8")
        problem = problem_of(story, TOLERANCE["cuda" if cuda_available() else "cpu"])
        sheet = save(story, arguments.output)
        show("")
        print_table(story, predictions(), seen)
        took = time.monotonic() - started
        show(f"\n{os.cpu_count()} CPU cores, load average before the start {busy:.1f}; {took:.0f} s in all")
        if busy > 1:
            show("others were using this machine, so none of these times is fair; run it again when it is idle")
        show(f"pictures: {sheet}")
        if problem:
            print(f"VERDICT: WRONG: {problem}", file=sys.stderr)  # noqa: T201
        else:
            show(verdict(story))
        if arguments.open:
            stay_open(server, arguments.output)
    return 1 if problem else 0


def verdict(story: Story) -> str:
    """One line for a story without a problem."""
    ranks = len(story.parallel.report("ParallelSampler")["ranks"])
    error = image_error(story.parallel.image, story.stock.image)
    same = f"{ranks} ranks drew stock ComfyUI's picture (relative error {error:.1g})"
    return f"VERDICT: right: {same}, and it shows {words(asked())}"


if __name__ == "__main__":
    try:
        raise SystemExit(main(parse_arguments()))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
