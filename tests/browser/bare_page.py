"""A page with the panel and without ComfyUI, from plain files; `bare/` stands for ComfyUI's frontend."""

import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from host.server import PACK_ROOT

from .comfy_page import ComfyPage

BARE = Path(__file__).parent / "bare"
LOCALES = PACK_ROOT / "locales"
ONES = dict.fromkeys(("ulysses", "ring", "cfg", "data", "pipefusion", "warmup_steps"), 1) | {"patches": 0}
PLAN = {"plan": "uly2", "degrees": {"ulysses": 2}, "devices": ["cpu:0", "cpu:1"], "reasons": [], "warnings": []}
LOAD = "(nodes) => window.load(nodes)"


def words() -> dict[str, Any]:
    """What ComfyUI answers to /i18n: the pack's words by language."""
    return {
        folder.name: _read(folder / "main.json") | {"nodeDefs": _read(folder / "nodeDefs.json")}
        for folder in LOCALES.iterdir()
    }


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


class _Files(SimpleHTTPRequestHandler):
    def translate_path(self, path: str) -> str:
        """The file of an address; ComfyUI has the pack's `web` below its extensions."""
        for prefix, folder in (("/extensions/parallel-dit/", PACK_ROOT / "web"), ("/scripts/", BARE), ("/", BARE)):
            if path.startswith(prefix):
                return str(folder / path.removeprefix(prefix).partition("?")[0])
        raise ValueError(path)

    def do_GET(self) -> None:
        """A file, the words, or a plan of which nothing is wrong."""
        if self.path.startswith("/parallel_dit/plan"):
            body = json.dumps(PLAN).encode()
        elif self.path == "/i18n":
            body = json.dumps(words()).encode()
        else:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Files:
    """Where the bare page is, in place of a ComfyUI."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"


@contextmanager
def serve_files() -> Iterator[Files]:
    """The page and the pack's modules on a free port of this machine."""
    handler = functools.partial(_Files, directory=str(BARE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Files(server.server_port)
        server.shutdown()


class BarePage(ComfyPage):
    """A tab with the panel alone."""

    def end_runs(self) -> None:
        """There are none."""

    def load_example(self, name: str = "flux_parallel", **values: Any) -> None:
        """SP Config with these values, a loader that reads it, and the node that the example samples with."""
        config = {"mode": "manual", "devices": "cpu:2", **ONES, "ulysses": 2, "weights": "replicated"} | values
        sampler = "ParallelBenchmark" if name == "flux_benchmark" else "ParallelSampler"
        nodes: list[tuple[str, dict[str, Any], dict[str, str]]] = [
            ("SPConfig", config, {}),
            ("ParallelModelLoader", {"unet_name": "flux.safetensors"}, {"sp_config": "SPConfig"}),
            (sampler, {}, {"model": "ParallelModelLoader"}),
            ("ShowTimingReport", {}, {}),
        ]
        self.page.evaluate(LOAD, nodes)
