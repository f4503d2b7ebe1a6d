"""Ranks of a real server: they import what ComfyUI imports, and what they do without is said in log and report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from families.hosted import WAN, ours
from families.variants import write_families
from host.client import ComfyClient
from host.fetch import comfyui_path
from host.server import ComfyServer
from parallel_runtime.report.schema import validate

pytestmark = pytest.mark.slow

# A pack that adds an option which no rank's parser has, and sets one to what cannot be sent.
ADDS_OPTIONS = """
import comfy.cli_args, comfy_kitchen, logging
comfy.cli_args.parser.add_argument("--of-a-pack", type=int, default=0)
comfy.cli_args.args.of_a_pack = 7
comfy.cli_args.args.force_fp32 = object()
logging.warning("ComfyUI imported %s", comfy_kitchen.__path__[0])
NODE_CLASS_MAPPINGS = {}
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with comfy-kitchen as it is installed, which says that it is version 99."""
    folder = tmp_path_factory.mktemp("packages")
    spec = importlib.util.find_spec("comfy_kitchen")
    shutil.copytree(Path(spec.origin).parent, folder / "comfy_kitchen", copy_function=os.symlink)
    about = folder / "comfy_kitchen-99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: comfy-kitchen\nVersion: 99.0\n")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_families(tmp_path_factory.mktemp("models"), only=[WAN.name])


def server_with(models: Path, folder: Path, files: Mapping[str, str], **environment: str) -> ComfyServer:
    """A server with a pack of these files, whose ranks are started one by one as a user's are."""
    pack = folder / "of_others"
    pack.mkdir()
    for name, text in files.items():
        (pack / name).write_text(text)
    environment |= {"START_EACH_RANK": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    flags = ("--deterministic", "--reserve-vram", "1")
    return ComfyServer(models=models, packs=(pack,), flags=flags, environment=environment)


def report_of(server: ComfyServer) -> dict[str, Any]:
    """The report of a run on two ranks."""
    graph = ours(WAN.graph(seed=1, steps=1), "cfg 2", loader="ParallelModelLoader", sampler="ParallelSampler")
    (report,) = ComfyClient(server.url).queue(graph).require_success().outputs["sampler"]["parallel_dit"]
    validate(report)
    return report


def test_ranks_search_where_comfyui_does_and_say_which_options_they_do_without(
    packages: Path, models: Path, tmp_path: Path
) -> None:
    """The folder of packages has a name relative to where ComfyUI was started."""
    relative = os.path.relpath(packages, comfyui_path())
    with server_with(models, tmp_path, {"__init__.py": ADDS_OPTIONS}, PYTHONPATH=relative) as server:
        report = report_of(server)
        assert f"ComfyUI imported {packages}/comfy_kitchen" in server.log
        assert not [text for text in report.get("warnings", ()) if "comfy_kitchen" in text]
        assert set(report["options"]["workers"]) == {"--use-pytorch-cross-attention", "--deterministic", "--of-a-pack"}
        assert {"--reserve-vram", "--port", "--force-fp32"} <= set(report["options"]["comfyui_alone"])
        for said in ("workers run without --force-fp32 of", "cpu:0, cpu:1: workers run without --of-a-pack:"):
            assert server.log.count(said) == 1, said


def test_a_package_that_ranks_have_in_another_version_is_named_in_log_and_report(
    packages: Path, models: Path, tmp_path: Path
) -> None:
    """A pack has ComfyUI search a folder of its own, which no rank knows of."""
    files = {"prestartup_script.py": f"import sys; sys.path.insert(0, {str(packages)!r})", "__init__.py": ADDS_OPTIONS}
    with server_with(models, tmp_path, files) as server:
        report = report_of(server)
        assert f"ComfyUI imported {packages}/comfy_kitchen" in server.log
        (warning,) = [text for text in report["warnings"] if "comfy_kitchen" in text]
        installed = importlib.metadata.version("comfy_kitchen")
        assert warning.startswith(
            f"cpu:0, cpu:1: workers have comfy_kitchen {installed}, and ComfyUI has comfy_kitchen 99.0; leave one"
        )
        assert warning in server.log
