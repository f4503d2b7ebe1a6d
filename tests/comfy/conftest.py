"""Fixtures of the tests of the nodes: what the session's server is given once, and the pack without a server."""

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from host.client import ComfyClient
from host.fetch import comfyui_path
from host.server import PACK_ROOT, ComfyServer

PACK = "pack_without_a_server"


@pytest.fixture(scope="session")
def hint(comfy_server: ComfyServer) -> str:
    """An image in the server's input folder, its middle transparent."""
    picture = np.random.default_rng(0).integers(0, 255, (256, 256, 4), dtype=np.uint8)
    picture[:, :, 3] = 255
    picture[64:192, 64:192, 3] = 0
    return ComfyClient(comfy_server.url).upload_image(Image.fromarray(picture), "hint.png")


@pytest.fixture(scope="session")
def object_info(comfy_server: ComfyServer) -> dict[str, Any]:
    """The server's description of all nodes; to be left as it is."""
    return ComfyClient(comfy_server.url).object_info()


@pytest.fixture(scope="session")
def in_comfyui() -> Iterator[Callable[..., list[str]]]:
    """Runs a script (a file, or Python itself) with arguments in a ComfyUI without a server; returns lines it printed.

    It is given ComfyUI's folder first. Each has a process of its own, forked from one that has loaded ComfyUI.
    """
    command = [sys.executable, str(Path(__file__).with_name("loaded_comfyui.py")), str(comfyui_path())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(script: Path | str, *arguments: str) -> list[str]:
        process.stdin.write(json.dumps([str(script), [str(comfyui_path()), *arguments]]) + "\n")
        process.stdin.flush()
        status, printed, errors = json.loads(process.stdout.readline())
        assert status == 0, errors[-4000:]
        return printed.splitlines()

    yield run
    process.stdin.close()
    process.wait()


@contextmanager
def imported_pack(name: str) -> Iterator[ModuleType]:
    """The pack imported as ComfyUI imports it, by its path and under a name of the importer's."""
    spec = importlib.util.spec_from_file_location(name, PACK_ROOT / "__init__.py")
    root = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(root)
    yield root
    for each in [each for each in sys.modules if each.split(".")[0] == name]:
        del sys.modules[each]


@pytest.fixture(scope="session")
def module_of_pack() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the pack that needs no ComfyUI: `nodes` alone would be the name of a module of ComfyUI's."""
    with imported_pack(PACK):
        yield lambda name: importlib.import_module(f"{PACK}.{name}")
