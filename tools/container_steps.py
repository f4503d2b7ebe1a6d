"""Does the Dockerfile's steps in a folder that holds a Debian, for a machine without a container engine.

    python -m tools.container_steps --root DIR --comfyui DIR [--bind PATH ...] [--pip OPTION ...]

DIR is what debootstrap makes (`--include=ca-certificates,python3-dev,python3-pip,python-is-python3`); root alone may
change into it. Three steps differ: FROM is that folder with a torch for CPUs, ComfyUI is copied instead of cloned, and
it is started with `--cpu` on the loopback address. Then the health check must pass, and a picture over two CPU ranks
must equal the one of stock nodes. Owns: how each step is done. Does not own: the steps (docker/Dockerfile).
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from demo.graphs import MODELS, TEXT_ENCODER, parallel_graph, without_our_nodes
from demo.run import run as demo_run
from demo.table import image_error
from host.client import ComfyClient

from . import mend_cpu_torch

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
IGNORED = (*(ROOT / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split(), ".git", ".venv", "build")
SYSTEM = ("/proc", "/dev", "/dev/shm", "/etc/resolv.conf")  # noqa: S108 (what containers have)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 600.0
# It changes no system's own Python; this one is nobody's.
MEND = "import sys; sys.base_prefix = ''; sys.path.insert(0, '/'); import mend_cpu_torch; mend_cpu_torch.main()"
EQUAL = 1e-3  # relative, of pictures of 8 bits


def steps(text: str) -> list[tuple[str, str]]:
    """The Dockerfile's instructions with what each says, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    found = [line.split(maxsplit=1) for line in lines if line.strip()]
    return [(word, rest) for word, rest in found]


class CleanRoot:
    """A folder that commands see as the whole system. `variables` and `folder`: as ENV, ARG and WORKDIR left them."""

    def __init__(self, root: Path, comfyui: Path, pip: list[str]) -> None:
        self.root, self.comfyui, self.pip = root, comfyui, pip
        self.variables = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}
        self.folder = "/"

    def command(self, words: list[str]) -> list[str]:
        """What runs `words` inside, with its variables and in its folder."""
        given = [f"{name}={value}" for name, value in self.variables.items()]
        inside = f"cd {shlex.quote(self.folder)} && exec {shlex.join(words)}"
        return ["chroot", str(self.root), "env", "-i", *given, "sh", "-c", inside]

    def run(self, line: str) -> None:
        """A line of the shell. Raises CalledProcessError for one that fails."""
        subprocess.run(self.command(["sh", "-c", line]), check=True)

    def do(self, word: str, rest: str) -> None:
        """One instruction. Raises ValueError for one that is not known here."""
        say(f"{word} {rest[:100]}")
        if word == "FROM":
            packages = "--break-system-packages torch torchvision torchaudio"
            self.run(f"python -m pip install {shlex.join(self.pip)} {packages}")
            shutil.copy(Path(mend_cpu_torch.__file__), self.root)
            self.run(f"python -c {shlex.quote(MEND)}")
        elif word in ("ENV", "ARG"):
            self.variables |= dict(each.split("=", 1) for each in shlex.split(rest))
        elif word == "WORKDIR":
            self.folder = rest
            (self.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            target = self.root / self.folder.lstrip("/") / rest.split()[1]
            shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*(each.rstrip("/") for each in IGNORED)))
        elif word == "RUN":
            self.run(self._without_clone(rest).replace("pip install", f"pip install {shlex.join(self.pip)}"))
        elif word not in ("HEALTHCHECK", "EXPOSE", "CMD"):
            raise ValueError(f"{word} is no instruction that is known here; add it to tools/container_steps.py")

    def _without_clone(self, line: str) -> str:
        """ComfyUI is copied to where the line clones it."""
        if found := re.match(r"git clone .* (\S+) && (.*)", line):
            target, line = found.groups()
            shutil.copytree(self.comfyui, self.root / target.lstrip("/"))
        return line


def of_words(rest: str) -> list[str]:
    """The words of CMD, or of HEALTHCHECK's command: a JSON list."""
    return [str(word) for word in ast.literal_eval(rest[rest.index("[") :])]


def say(line: str) -> None:
    """One line of the log, with the time."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def try_out(root: CleanRoot, start: list[str], health: list[str]) -> float:
    """Start the server, wait for its health check, draw; the error of the parallel picture beside stock's."""
    for name, folder in (("demo_transformer", "diffusion_models"), ("demo_autoencoder", "vae")):
        shutil.copy(MODELS / f"{name}.safetensors", root.root / "opt/ComfyUI/models" / folder)
    shutil.copytree(TEXT_ENCODER.parent, root.root / "opt/demo", dirs_exist_ok=True)
    (root.root / "opt/ComfyUI/custom_nodes/text_encoder").symlink_to(f"/opt/demo/{TEXT_ENCODER.name}")
    start = [*("127.0.0.1" if word == "0.0.0.0" else word for word in start), "--cpu"]  # noqa: S104 (what is replaced)
    server = subprocess.Popen(root.command(start), start_new_session=True)
    try:
        began = time.monotonic()
        while subprocess.run(root.command(health), capture_output=True, check=False).returncode:
            if server.poll() is not None or time.monotonic() > began + START_S:
                raise RuntimeError(f"the health check did not pass within {START_S:g} s of the start")
            time.sleep(1)
        say(f"healthy after {time.monotonic() - began:.0f} s")
        client = ComfyClient("http://127.0.0.1:8188")
        graph = parallel_graph("a rocket on blue, centre", devices="cpu:2", steps=8)
        ours = demo_run(client, graph, "two ranks")
        stock = demo_run(client, without_our_nodes(graph), "stock")
        return image_error(ours.image, stock.image)
    finally:
        server.terminate()
        server.wait()


def main() -> int:
    """Do all steps; 0 where the pictures are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder that debootstrap made")
    parser.add_argument("--comfyui", type=Path, required=True, help="the ComfyUI to copy")
    parser.add_argument("--bind", nargs="*", default=[], metavar="PATH", help="what of this system is seen inside, too")
    parser.add_argument("--pip", nargs="*", default=[], metavar="OPTION", help="for each pip install, without dashes")
    options = parser.parse_args()
    root = CleanRoot(options.root, options.comfyui, [f"--{option}" for option in options.pip])
    with ExitStack() as mounts:
        for path in (*SYSTEM, *options.bind):
            inside = options.root / path.lstrip("/")
            if Path(path).is_dir():
                inside.mkdir(parents=True, exist_ok=True)
            else:
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.touch()
            subprocess.run(["mount", "--bind", path, str(inside)], check=True)  # noqa: S607 (of the system)
            mounts.callback(subprocess.run, ["umount", str(inside)], check=True)
        told = steps(DOCKERFILE.read_text(encoding="utf-8"))
        for word, rest in told:
            root.do(word, rest)
        (health,) = (rest for word, rest in told if word == "HEALTHCHECK")
        (start,) = (rest for word, rest in told if word == "CMD")
        error = try_out(root, of_words(start), of_words(health))
    say(f"two CPU ranks beside stock: {error:.1e} of the picture's spread; {'equal' if error <= EQUAL else 'wrong'}")
    return 0 if error <= EQUAL else 1


if __name__ == "__main__":
    if os.geteuid():
        raise SystemExit("only root may change into another root folder; run it as root")
    sys.exit(main())
