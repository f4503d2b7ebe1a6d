"""In a ComfyUI that is too old, or lacks what all needs, the nodes say so, with one line in its log; all else works."""

import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from comfy.conftest import imported_pack

from host import workflows
from host.client import ComfyClient
from host.fetch import OLDEST_SDIST, TOO_OLD_SDIST, fetched
from host.pack_workflows import latent_of, parallel
from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import TinyModels


def version_of(comfyui: Path) -> str:
    return re.search(r'"(.+)"', (comfyui / "comfyui_version.py").read_text())[1]


def oldest() -> str:
    text = (PACK_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^requires-comfyui = ">=([\d.]+)"', text, flags=re.MULTILINE)[1]


@pytest.fixture
def pack() -> Iterator[ModuleType]:
    with imported_pack("pack_in_a_comfyui") as module:
        yield module


@pytest.fixture
def pretend_version(monkeypatch: pytest.MonkeyPatch):
    """Sets the version that ComfyUI says it has; None for one from before it said any, "" for one that no more does."""

    def pretend(version: str | None) -> None:
        module = None
        if version is not None:
            module = ModuleType("comfyui_version")
            if version:
                module.__version__ = version
        monkeypatch.setitem(sys.modules, "comfyui_version", module)

    return pretend


@pytest.mark.parametrize("version", ["0.3.40", "0.20.1", "v0.23.9", "0.23", None])
def test_an_older_comfyui_gets_nodes_that_say_so_and_one_line(version, pretend_version, pack, caplog) -> None:
    pretend_version(version)
    nodes, titles = pack.NODE_CLASS_MAPPINGS, pack.NODE_DISPLAY_NAME_MAPPINGS
    assert len(nodes) == 11 and titles.keys() == nodes.keys()
    (record,) = caplog.records
    line = record.getMessage()
    assert record.levelno == logging.ERROR
    assert "\n" not in line
    for word in (version or "without a version", f"needs ComfyUI {oldest()} or newer", "update ComfyUI (git pull"):
        assert word in line
    for kind in nodes.values():
        assert kind.INPUT_TYPES().keys() <= {"required", "optional"} and kind.VALIDATE_INPUTS(any=1) is True
        with pytest.raises(ValueError, match=re.escape(line)):
            getattr(kind(), kind.FUNCTION)(any=1)


@pytest.mark.parametrize("version", [oldest(), "0.30.0", "v0.30.0-12-gabcdef", "1.0", "nightly", "", 38])
def test_the_oldest_comfyui_and_newer_ones_are_looked_at(version, pretend_version, pack, monkeypatch, caplog) -> None:
    """They are sent to the entrypoint where they have all that is needed."""
    pretend_version(version)
    host = importlib.import_module(f"{pack.__name__}.nodes.host.contract.version")
    monkeypatch.setattr(host, "look", lambda: [])
    monkeypatch.setitem(sys.modules, f"{pack.__name__}.nodes.extension", ModuleType("extension"))
    assert not hasattr(pack, "NODE_CLASS_MAPPINGS")
    assert caplog.records == []


def test_what_no_line_of_the_contract_names_costs_one_line_too(pretend_version, pack, monkeypatch, caplog) -> None:
    """A name that the pack needs while it is imported, and that nobody has written down."""
    pretend_version("0.99.0")
    host = importlib.import_module(f"{pack.__name__}.nodes.host.contract.version")
    monkeypatch.setattr(host, "look", lambda: [])
    monkeypatch.setitem(sys.modules, "comfy_api", ModuleType("comfy_api"))
    assert len(pack.NODE_CLASS_MAPPINGS) == 11
    (record,) = caplog.records
    for word in ("this is 0.99.0", "comfy_api", f"needs ComfyUI {oldest()} or newer", "update the pack"):
        assert word in record.getMessage()


def test_a_name_that_comfyui_lacks_is_said_with_what_is_off_or_to_be_done(pack, monkeypatch) -> None:
    version = importlib.import_module(f"{pack.__name__}.nodes.host.contract.version")
    line = version.LINES[0]
    for off in ("", "a feature is off"):
        monkeypatch.setattr(version, "off", lambda feature, off=off: off if feature == line.feature else "")
        said = version.said_of(line.name)
        assert said == off or (not off and said.startswith("ComfyUI ") and line.name.rpartition(".")[2] in said)
    assert version.said_of("comfy.unwritten").startswith("ComfyUI has no `comfy.unwritten`; ")


def test_a_package_that_is_not_installed_is_named_with_the_remedy(pack) -> None:
    version = importlib.import_module(f"{pack.__name__}.nodes.host.contract.version")
    said = version.what_is_missing(ModuleNotFoundError("No module named 'psutil'", name="psutil"))
    assert said == "Parallel DiT needs the package psutil; pip install -r requirements.txt in its folder"


@pytest.mark.full
def test_the_oldest_comfyui_is_one_that_can_be_fetched() -> None:
    assert version_of(fetched(OLDEST_SDIST)) == oldest()  # `make test-host COMFYUI_PATH=oldest` tests with it


@pytest.mark.full
def test_a_real_comfyui_that_is_too_old_starts_says_so_and_works(
    models_dir: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = fetched(TOO_OLD_SDIST)
    monkeypatch.setenv("COMFYUI_PATH", str(older))
    with ComfyServer(models=models_dir) as server:
        client = ComfyClient(server.url)
        assert {"KSampler", "ParallelFluxLoader"} <= client.object_info().keys()
        refused = client.queue(parallel(workflows.text_to_image(tiny_models)))
        assert f"Parallel DiT needs ComfyUI {oldest()} or newer" in refused.error_line("SPConfig")
        assert latent_of(client, workflows.text_to_image(tiny_models)).isfinite().all()
        line = next(line for line in server.log.splitlines() if "Parallel DiT" in line)
    assert line.startswith(f"Parallel DiT needs ComfyUI {oldest()} or newer, this is {version_of(older)}; ")
