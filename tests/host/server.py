"""A real ComfyUI server as a context manager: made, started, watched, restarted and stopped."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from .fetch import cache_folder, comfyui_path
from .forked_ranks import EndWithParent

PACK_ROOT = Path(__file__).resolve().parents[2]
PACK_NAME = "parallel-dit"
TEST_PACKS = tuple(Path(__file__).resolve().parent / name for name in ("tiny_text_encoders", "probe_nodes"))
GRACE_S = 10.0
# Attention as users run it: ComfyUI's own CPU default is slower and would flatter every comparison.
FLAGS = ("--use-pytorch-cross-attention", "--disable-api-nodes", "--preview-method", "latent2rgb")
MEMORY_DATABASE = ("--database-url", "sqlite:///:memory:")  # the default file is in the shared source tree


class ServerFailedError(RuntimeError):
    """The server ended or did not answer in time; the text carries the end of its log."""


@functools.cache
def cuda_available() -> bool:
    """Whether this environment's torch sees a GPU; asked once, in a process of its own, so no context stays here."""
    if "+cpu" in importlib.metadata.version("torch"):
        return False
    command = [sys.executable, "-c", "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)"]
    return subprocess.run(command, check=False, timeout=300).returncode == 0


def servers_cache() -> Path:
    """What servers keep between runs, proofs above all; one for each process of tests, since tests delete kept plans.

    It is not the user's, whose calibration would change what auto does.
    """
    return cache_folder() / "servers" / os.environ.get("PYTEST_XDIST_WORKER", "one")


class ComfyServer:
    """One ComfyUI on a free loopback port.

    `base` is its base directory (a temporary one when None). `models` is a models folder to use by link. `pack=False`
    leaves the pack out; `packs` are further ones. `flags` are appended to the command line, `environment` to the
    environment. Linux ends the server when the thread that started it ends, however that ends.
    """

    def __init__(
        self,
        base: Path | None = None,
        *,
        models: Path | None = None,
        pack: bool = True,
        packs: tuple[Path, ...] = (),
        flags: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        start_timeout_s: float = 180.0,
    ) -> None:
        self._owns_base = base is None
        self.base = Path(tempfile.mkdtemp(prefix="comfy-host-")) if base is None else base
        self.models = models
        self.pack = pack
        self.packs = (*TEST_PACKS, *packs)
        self.flags = flags
        self.environment = {"XDG_CACHE_HOME": str(servers_cache()), **(environment or {})}
        self.start_timeout_s = start_timeout_s
        self.port = 0
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if self._owns_base:
            shutil.rmtree(self.base)

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id; raises ServerFailedError when it was never started."""
        if self._process is None:
            raise ServerFailedError("the server was not started")
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """Everything the server printed, restarts appended."""
        return self.base / "server.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    @property
    def leaks(self) -> list[str]:
        """What its manager said of models whose patcher is gone while something keeps their weights."""
        return [line for line in self.log.splitlines() if "memory leak" in line]

    @property
    def output(self) -> Path:
        return self.base / "output"

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def prepare(self) -> None:
        """Makes the base directory: links to the packs and models, and settings that keep first-run tours away."""
        nodes = self.base / "custom_nodes"
        for folder in (nodes, self.base / "user" / "default", self.output, self.base / "input", self.base / "temp"):
            folder.mkdir(parents=True, exist_ok=True)
        for each in self.packs:
            link(nodes / each.name, each)
        if self.pack:
            link(nodes / PACK_NAME, PACK_ROOT)
        if self.models is not None:
            link(self.base / "models", self.models)
        settings = self.base / "user" / "default" / "comfy.settings.json"
        if not settings.exists():
            settings.write_text(json.dumps({"Comfy.TutorialCompleted": True, "ParallelDiT.FirstRun.Over": True}))

    def start(self) -> None:
        """Starts the server and waits until it answers; raises ServerFailedError with the log when it does not."""
        self.prepare()
        host = comfyui_path()
        self.port = free_port()
        command = [sys.executable, str(host / "main.py"), "--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--base-directory", str(self.base), *FLAGS, *MEMORY_DATABASE]
        command += [] if cuda_available() else ["--cpu"]
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self.flags],
                cwd=host,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                preexec_fn=EndWithParent(),
                start_new_session=True,  # a Ctrl-C at the terminal reaches the tests, which then stop the server
            )
        self._wait_until_answering()

    def _wait_until_answering(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while not answers(f"{self.url}/system_stats"):
            if not self.running():
                raise ServerFailedError(f"ComfyUI ended while starting; the end of its log:\n{self.log[-6000:]}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailedError(
                    f"ComfyUI did not answer within {self.start_timeout_s:g} s; the end of its log:\n{self.log[-6000:]}"
                )
            time.sleep(0.1)
        log = self.log_path.read_bytes()[self._log_start :].decode(errors="replace")
        if "(IMPORT FAILED)" in log:  # ComfyUI goes on without the pack; every test would fail far from the cause
            self.kill()
            raise ServerFailedError(f"ComfyUI could not import a pack; its log:\n{log[-6000:]}")

    def stop(self) -> None:
        """Interrupts the server as Ctrl-C would, kills it after a grace period; does nothing when it has ended."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Kills the server (SIGKILL, this process alone) and reaps it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def link(path: Path, target: Path) -> None:
    """Makes `path` a symbolic link to `target`; raises FileExistsError when something else is there."""
    if path.is_symlink() and path.resolve() == target.resolve():
        return
    path.symlink_to(target.resolve())


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """Whether an HTTP GET is answered with 200 at this moment."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 (our own loopback server)
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
