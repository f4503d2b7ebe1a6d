"""ComfyUI's side on host 1 and joined machines on the others, for cases in namespaces of this machine.

Owns starting and ending `join` as a user does, the model folders of each host, and what is left on a host. Does not own
namespaces (hosts.py) nor what is tried (cases.py).
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from host.fetch import comfyui_path
from machines.hosts import ROOT, Hosts, die_with_parent
from parallel_runtime.machines.connection import join_address, read_token
from parallel_runtime.machines.machine import Machine
from parallel_runtime.machines.server import MachineServer
from parallel_runtime.machines.versions import own_versions

SILENCE_S = 3.0
JOIN_S = 240.0  # on a machine that does much else
LISTEN = "0A"


class Joined:
    """`python -m parallel_runtime join` on a host."""

    def __init__(self, world: "World", host: int, devices: str, *, token_file: Path | None = None, address="") -> None:
        self.host, self.name, self.log = host, f"host{host}", world.folder / f"join{host}.log"
        command = [sys.executable, "-u", "-m", "parallel_runtime", "join", address or world.server.address]
        command += ["--token-file", str(token_file or world.token_file), "--devices", devices, "--name", self.name]
        command += ["--models", str(world.models(host)), "--comfyui", str(comfyui_path())]
        with self.log.open("a") as out:
            self.process = subprocess.Popen(
                [*world.hosts.inside(host), *command], stdout=out, stderr=out, cwd=ROOT, preexec_fn=die_with_parent
            )

    def processes(self) -> list[psutil.Process]:
        """Launchers and ranks, but not `join` itself."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def end(self) -> None:
        """SIGTERM, as a service manager does."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.terminate()
        self.process.wait(120)


class World:
    """Hosts, of which this thread is on the first; a server there; a context that ends all."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        hosts.enter(1)
        self.token_file = folder / "token"
        self.token_file.write_text(os.urandom(16).hex())
        self.token_file.chmod(0o600)
        self._joined: list[Joined] = []
        self._held = ExitStack()
        self.server = self.listen()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        for joined in self._joined:
            joined.end()
        self.server.close()
        self._held.close()

    def listen(self, port: int = 0) -> MachineServer:
        """ComfyUI's side."""
        address = join_address(self.hosts.address(1), port)
        return MachineServer(address, read_token(self.token_file), versions=own_versions(""), silence_s=SILENCE_S)

    def models(self, host: int) -> Path:
        """The host's model folder."""
        folder = self.folder / f"models{host}"
        folder.mkdir(exist_ok=True)
        return folder

    def copy(self, name: str) -> None:
        """Give every host the file that host 1 has, where it has room for it: a subfolder of its own naming."""
        for host in range(2, self.hosts.count + 1):
            folder = self.models(host) / f"of host {host}"
            folder.mkdir(exist_ok=True)
            shutil.copyfile(self.models(1) / name, folder / name)

    def join(self, host: int, devices: str, **more) -> tuple[Joined, Machine]:
        """A host that has joined."""
        here = len(self.server.machines())
        joined = self.start_join(host, devices, **more)
        return joined, self.server.wait_for(here + 1, JOIN_S)[-1]

    def start_join(self, host: int, devices: str, **more) -> Joined:
        """A host that tries to."""
        joined = Joined(self, host, devices, **more)
        self._joined.append(joined)
        return joined

    def listening(self, host: int) -> set[int]:
        """TCP ports that something listens on, there and not on its loopback."""
        found = set()
        for line in subprocess.run(
            [*self.hosts.inside(host), "cat", "/proc/net/tcp", "/proc/net/tcp6"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines():
            fields = line.split()
            if len(fields) > 3 and fields[3] == LISTEN and not fields[1].startswith("0100007F"):
                found.add(int(fields[1].rpartition(":")[2], 16))
        return found


def until(holds, deadline_s: float) -> bool:
    """Wait until something holds; False when it does not in time."""
    end = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
