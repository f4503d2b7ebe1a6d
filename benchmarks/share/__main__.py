"""What one rank of several computes in a step, measured in one process; then the bound of such a step by link.

    python -m benchmarks.share --model FILE --ranks 1,2,4,8 [--comfyui PATH] [--links nvlink4,pcie4,10]
    PYTHONPATH=tests python -m benchmarks.share --model "wan 2.1 t2v" --ranks 1,2 --real 5

FILE is any that ComfyUI loads and whose class has a plan, or the name of a case: a published width with a few blocks
(flux.1, wan 14b ...), or one of the tests' small files, for a CPU. --real runs two CPU ranks beside it, in pairs.
Prints tables, of which benchmarks/share.md has those of --real; writes no page.

Exchanges are local copies of the same bytes. A host's time is that of a call in which the device has next to nothing
to do. The bound is no measurement of several devices: nobody can be faster, anybody may be slower.
"""

import argparse
import contextlib
import json
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.models.hosted.comfyui import import_comfyui
from parallel_runtime.models.hosted.random_calls import Size
from parallel_runtime.planner.comfyui_process import find_comfyui

from . import cases
from .bound import LINKS, bounds_table, link_named, shares_table
from .rank import OneRank, Share


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured: a file, its call, and where."""

    path: str
    name: str
    size: Size
    dtype: str
    depth: int | None
    device: torch.device
    comfyui: ComfyUI


def main() -> int:
    """Command line; 2 for what cannot be measured."""
    arguments = parser().parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="share-") as folder:
            for model in arguments.model:
                run(arguments, model, Path(folder))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    found = argparse.ArgumentParser(
        prog="benchmarks.share", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--model", required=True, action="append", help="a file, or the name of a case; several in turn")
    found.add_argument("--ranks", default="1,2,4,8", help="(default: %(default)s)")
    found.add_argument("--ring", action="store_true", help="they share tokens around a ring, not by heads")
    found.add_argument("--links", default=",".join(LINKS), help="names, or GB/s (default: %(default)s)")
    found.add_argument("--width", type=int)
    found.add_argument("--height", type=int)
    found.add_argument("--frames", type=int)
    found.add_argument("--text-tokens", type=int)
    found.add_argument("--dtype", help="(default: bfloat16 on a GPU, float32 on a CPU)")
    found.add_argument("--device", help="(default: cuda:0 where there is one, else cpu)")
    found.add_argument("--steps", type=int, default=5, help="medians of so many (default: %(default)s)")
    found.add_argument("--comfyui", help="the folder of its main.py (default: the one that this pack is in)")
    found.add_argument("--option", action="append", default=[], help="an option of ComfyUI's, as --option=--fast")
    found.add_argument("--json", action="store_true", help="print a line of JSON a model, and no table")
    found.add_argument("--real", type=int, metavar="PAIRS", help="the formula beside two real CPU ranks, in pairs")
    return found


def asked_of(arguments: argparse.Namespace, model: str, folder: Path) -> Asked:
    """The file and the call. Raises `ValueError` for what there is not."""
    device = torch.device(arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no GPU; use cpu, or look at nvidia-smi")
    dtype = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    case = cases.CASES.get(model)
    path = Path(model)
    if not path.is_file():
        path = cases.write(model, folder, "bfloat16" if case else dtype)
    side, text = (1024, 512) if device.type == "cuda" else (256, 64)
    size = Size(
        width=arguments.width or (case.width if case else side),
        height=arguments.height or (case.height if case else side),
        text_tokens=arguments.text_tokens or (case.text_tokens if case else text),
        frames=arguments.frames or (case.frames if case else None),
        batch=1,
        seed=7,
    )
    comfyui = find_comfyui(arguments.comfyui or cases.comfyui_of_tests())
    comfyui = replace(comfyui, options=(*comfyui.options, *arguments.option))
    depth = case.depth if case else None
    return Asked(path=str(path), name=model, size=size, dtype=dtype, depth=depth, device=device, comfyui=comfyui)


def measure(asked: Asked, degrees: list[int], *, ring: bool, steps: int) -> list[Share]:
    """The share for each number of ranks. Imports ComfyUI into this process."""
    import_comfyui(asked.comfyui, asked.device)
    with contextlib.redirect_stdout(sys.stderr):  # ComfyUI prints
        rank = OneRank(asked.path, dtype=asked.dtype, comfyui=asked.comfyui, device=asked.device)
        call, small = rank.call(asked.size), rank.small_call(asked.size)
        return [
            rank.measure(call, small, steps=steps, **({"ring": ranks} if ring else {"ulysses": ranks}))
            for ranks in degrees
        ]


def run(arguments: argparse.Namespace, model: str, folder: Path) -> None:
    """Measure and print. Raises `ValueError` for what cannot be measured."""
    degrees = [int(each) for each in arguments.ranks.split(",")]
    if min(degrees) < 1 or arguments.steps < 1:
        raise ValueError(f"--ranks={arguments.ranks} --steps={arguments.steps}; use 1 or more of each")
    links = [link_named(each) for each in arguments.links.split(",")]
    asked = asked_of(arguments, model, folder)
    if arguments.real:
        from .real import compare

        say(*compare(asked, pairs=arguments.real))
        return
    if asked.device.type == "cpu":
        torch.set_num_threads(1)
    shares = measure(asked, degrees, ring=arguments.ring, steps=arguments.steps)
    if arguments.json:
        say(json.dumps([asdict(each) for each in shares]))
        return
    frames = "" if asked.size.frames is None else f", {asked.size.frames} frames"
    say(
        f"{asked.name}: {asked.size.width} x {asked.size.height}{frames}, {asked.size.text_tokens} tokens of text, "
        f"{shares[0].blocks} blocks, {asked.dtype}; {device_words(asked.device)}; one rank's share, measured",
        "",
        *shares_table(shares),
        "",
        "bound: the share, and what shows of its exchange over a modelled link",
        "",
        *bounds_table(shares, links),
    )
    if asked.depth is not None:
        whole = [share.at_depth(asked.depth) for share in shares]
        say("", f"the same with the {asked.depth} blocks of the published model", "", *bounds_table(whole, links))


def device_words(device: torch.device) -> str:
    """The device and the versions, for a table's caption."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, one thread"
    return f"{name}, torch {torch.__version__}"


def say(*lines: str) -> None:
    """Lines, at once."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
