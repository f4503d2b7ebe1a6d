"""The route of one step: which functions of the pack run between ComfyUI's call of the model and its result.

Owns a process that has ComfyUI imported, samples with ComfyUI's KSampler over two ranks, and records the calls of
functions of the pack in this process and in rank 0, in the last step. Does not own what the route may be
(tests/test_route_of_a_step.py).

`python -m host.route COMFYUI FOLDER FILE`, a Wan 2.1, writes FOLDER/route.json, in order of first calls:
{"host": [[file, function], ...], "rank": [...]}.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACK, ENTRY, ROUTE_FILE = "pack_on_the_route", "parallel_runtime.worker.entry", "ROUTE_FILE"
MEASURED = ("parallel_runtime/", "nodes/")
STEPS = 3
OPTIONS = ("--use-pytorch-cross-attention",)
START = ("nodes/host/hosted_model.py", "RemoteForward.__call__")
LATENT = (1, 16, 2, 16, 16)
WIDTH = 48  # of a token of text


class Route:
    """Functions of the pack in order of their first calls, since `clear`."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        self._names: dict[Any, tuple[str, str] | None] = {}

    def note(self, frame: FrameType) -> tuple[str, str] | None:
        """Take in a call; which function of the pack it is, None for any other."""
        code = frame.f_code
        if code not in self._names:
            path = os.path.relpath(code.co_filename, ROOT) if code.co_filename.startswith(str(ROOT)) else ""
            name = getattr(code, "co_qualname", code.co_name)  # 3.10 has no qualified one
            self._names[code] = (path, name) if path.startswith(MEASURED) else None
        found = self._names[code]
        if found is not None:
            self.calls.setdefault(found)
        return found


def trace_rank() -> None:
    """Run a rank's entry; after each step that it reports, what ran since it heard of it goes to the named file."""
    path, route = Path(os.environ.pop(ROUTE_FILE)), Route()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            if frame.f_code.co_name == "result_of":
                route.calls.clear()
            route.note(frame)
        elif (
            event == "return"
            and frame.f_code.co_name == "say"
            and any(name == "Engine._step" for _, name in route.calls)
        ):
            path.write_text(json.dumps(list(route.calls)), encoding="utf-8")

    sys.setprofile(profile)
    runpy.run_module(ENTRY, run_name="__main__", alter_sys=True)


class TracedRanks(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`; rank 0 writes its route to `file`."""

    file = ""

    def __init__(self, args: Any, *more: Any, **settings: Any) -> None:
        if isinstance(args, list) and ENTRY in args and "--rank=0" in args:
            at = args.index(ENTRY)
            args = [*args[:at], "host.route", *args[at + 1 :]]
            paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
            settings["env"] = {**settings["env"], ROUTE_FILE: self.file, "PYTHONPATH": paths}
        super().__init__(args, *more, **settings)


def pack() -> Callable[[str], Any]:
    """The pack as ComfyUI imports it; its modules by their names."""
    spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py")
    assert spec is not None and spec.loader is not None
    root = sys.modules[PACK] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(root)
    return lambda name: importlib.import_module(f"{PACK}.{name}")


def sample(path: Path) -> None:
    """A run of ComfyUI's sampler, the file's MODEL over two ranks."""
    import comfy.sample
    import torch

    of_pack = pack()
    devices = of_pack("parallel_runtime.devices").parse_devices("cpu:2")
    plan = of_pack("parallel_runtime.plan").ParallelPlan(ulysses=2)
    choice = of_pack("nodes.choice").ParallelChoice(devices_text="cpu:2", selection=devices, plan=plan)
    make = of_pack("nodes.host.new_model").remote_patcher
    model = make(str(path), "default", devices=devices.devices, chooser=choice, side_branch=False, in_workers=False)
    latent = torch.zeros(LATENT)
    conditioning = [[torch.randn(1, 13, WIDTH), {}]]
    noise = torch.randn(latent.shape)
    comfy.sample.sample(model, noise, STEPS, 1.0, "euler", "simple", conditioning, conditioning, latent)
    of_pack("nodes.host.pools").POOLS.close_all()


def trace(folder: Path, path: Path) -> None:
    """Sample and write the route of the last step to `folder`/route.json."""
    route, frames, host = Route(), [], []
    TracedRanks.file = str(folder / "rank.json")

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found = route.note(frame)
            if found == START and not frames:
                frames.append(frame)
                route.calls = {found: None}
        elif event == "return" and frames and frame is frames[0]:
            frames.clear()
            host[:] = route.calls

    sys.setprofile(profile)
    try:
        sample(path)
    finally:
        sys.setprofile(None)
    rank = json.loads((folder / "rank.json").read_text(encoding="utf-8"))
    (folder / "route.json").write_text(json.dumps({"host": host, "rank": rank}), encoding="utf-8")


def main() -> None:
    """The route of a step with a file."""
    comfyui, folder, file = sys.argv[1:]
    sys.path.insert(0, comfyui)
    sys.argv = ["comfyui", "--cpu", *OPTIONS]
    importlib.import_module("comfy.options").enable_args_parsing()
    subprocess.Popen = TracedRanks  # type: ignore[misc]
    trace(Path(folder), Path(file))


if __name__ == "__main__":
    trace_rank() if ROUTE_FILE in os.environ else main()
