"""What the registry would hand out: accepted by ComfyUI's own tool, and working alone in a host that has nothing else.

The tool is the published comfy-cli, in an environment of its own, as it brings many packages that no test needs.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from host.client import ComfyClient
from host.fetch import comfyui_path
from host.server import ComfyServer
from host.tiny_models import TinyModels
from parallel_runtime.report.schema import validate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
COMFY = ROOT / "build" / "registry" / "bin" / "comfy"
NEEDED = {"__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md", "web/parallel_dit.js"}
NEEDED |= {
    "web/vendor/chart.mjs",
    "locales/en/main.json",
    "locales/zh/main.json",
    "example_workflows/flux_parallel.json",
    "subgraphs/Parallel Text to Image (Flux.1).json",
    "api_workflows/headless_client.py",
}
LEFT_OUT = (".github/", "docker/", "tests/", "tools/", "benchmarks/", "demo/", ".ci/", ".pre-commit-config.yaml")
LEFT_OUT += ("Makefile", "constraints.txt")
MOST_BYTES = 3_000_000


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder; returns what it printed."""
    command = [shutil.which("git") or "git", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def comfy(folder: Path, *arguments: str) -> str:
    """Run the tool in a folder, asking nothing and reporting nothing; returns what it printed."""
    if not COMFY.exists():
        raise FileNotFoundError(f"{COMFY} is missing; `make archive` installs it")
    command = [str(COMFY), "--skip-prompt", "--no-enable-telemetry", "node", *arguments]
    home = folder.parent / "home"
    (home / ".config").mkdir(parents=True, exist_ok=True)  # where it writes, and which it does not make itself
    there = {"env": os.environ | {"HOME": str(home)}, "cwd": folder, "stdin": subprocess.DEVNULL}
    run = subprocess.run(command, **there, capture_output=True, text=True, timeout=600, check=False)
    said = run.stdout + run.stderr  # its verdict is on either
    assert run.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows, as they are now, in a repository of their own: the tool packs what git tracks."""
    folder = tmp_path_factory.mktemp("pack") / "parallel-dit"
    for name in filter(None, git(ROOT, "ls-files", "-z").split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    return folder


@pytest.fixture(scope="module")
def archive(checkout: Path) -> Path:
    comfy(checkout, "pack")
    return checkout / "node.zip"


def test_the_registrys_tool_finds_nothing_wrong(checkout: Path) -> None:
    assert "All validation checks passed" in comfy(checkout, "validate")


def test_the_archive_holds_what_a_user_needs_and_nothing_else(checkout: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        names = set(packed.namelist())
    tracked = set(filter(None, git(checkout, "ls-files", "-z").split("\0")))
    assert names == {name for name in tracked if not name.startswith(LEFT_OUT)}
    assert names >= NEEDED
    assert archive.stat().st_size < MOST_BYTES


# A pack that adds an option which no rank's parser has, and sets one to what cannot be sent.
ADDS_OPTIONS = """
import comfy.cli_args, comfy_kitchen, logging
comfy.cli_args.parser.add_argument("--of-a-pack", type=int, default=0)
comfy.cli_args.args.of_a_pack = 7
comfy.cli_args.args.force_fp32 = object()
logging.warning("ComfyUI imported %s", comfy_kitchen.__path__[0])
NODE_CLASS_MAPPINGS = {}
"""


def as_of_version_99(name: str, folder: Path) -> Path:
    """A folder with a package as it is installed, which says that it is version 99."""
    spec = importlib.util.find_spec(name)
    shutil.copytree(Path(spec.origin).parent, folder / name, copy_function=os.symlink)
    about = folder / f"{name}-99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 99.0\n")
    return folder


def test_the_archive_alone_makes_an_image_and_says_what_ranks_do_without(
    archive: Path, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """A folder of packages has a name relative to where ComfyUI was started; a pack has ComfyUI search one of its own,
    which no rank knows of."""
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(pack := tmp_path / "custom_nodes" / "parallel-dit")
    graph = json.loads((pack / "api_workflows" / "flux_parallel.json").read_text())
    graph["model"]["inputs"]["unet_name"] = tiny_models.dev
    graph["clip"]["class_type"] = "TinyDualCLIPLoader"
    graph["clip"]["inputs"] |= {"clip_name1": tiny_models.clip_l, "clip_name2": tiny_models.t5}
    graph["vae"]["inputs"]["vae_name"] = tiny_models.vae
    graph["config"]["inputs"]["devices"] = "cpu:2"
    graph["latent"]["inputs"] |= {"width": 128, "height": 96}
    graph["sampler"]["inputs"]["steps"] = 1
    told = as_of_version_99("comfy_kitchen", tmp_path / "told")
    of_a_pack = as_of_version_99("einops", tmp_path / "of_a_pack")
    other = tmp_path / "of_others"
    other.mkdir()
    (other / "__init__.py").write_text(ADDS_OPTIONS)
    (other / "prestartup_script.py").write_text(f"import sys; sys.path.insert(0, {str(of_a_pack)!r})")
    environment = {"START_EACH_RANK": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.path.relpath(told, comfyui_path())
    options = {"flags": ("--deterministic", "--reserve-vram", "1"), "environment": environment}
    with ComfyServer(tmp_path, models=tiny_models.models, pack=False, packs=(other,), **options) as server:
        client = ComfyClient(server.url)
        result = client.queue(graph).require_success()
        assert client.image(result.images()[0]).size == (128, 96)
        assert client.get("/parallel_dit/state")["pools"][0]["ranks"][1]["device"] == "cpu:1"
        assert client.get_bytes("/extensions/parallel-dit/parallel_dit.js")
        log = server.log
    report = result.report()
    validate(report)
    assert f"ComfyUI imported {told}/comfy_kitchen" in log
    assert set(report["options"]["workers"]) == {"--use-pytorch-cross-attention", "--deterministic", "--of-a-pack"}
    assert {"--reserve-vram", "--port", "--force-fp32"} <= set(report["options"]["comfyui_alone"])
    for said in ("workers run without --force-fp32 of", "cpu:0, cpu:1: workers run without --of-a-pack:"):
        assert log.count(said) == 1, said
    (warning,) = [text for text in report["warnings"] if "workers have" in text]
    installed = importlib.metadata.version("einops")
    assert warning.startswith(f"cpu:0, cpu:1: workers have einops {installed}, and ComfyUI has einops 99.0; leave one")
    assert warning in log
