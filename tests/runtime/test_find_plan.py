"""`find-plan` finds, proves and keeps the plan of a file's class; what is kept holds for one class of one ComfyUI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from host.fetch import comfyui_path
from host.tiny_hosted import write_tiny
from parallel_runtime.cli import find_plan
from parallel_runtime.models.specs import SPECS, spec_of
from parallel_runtime.models.specs.found import FoundKey, FoundPlans, key_of
from parallel_runtime.models.specs.written import from_data, to_data

ROOT = Path(__file__).resolve().parents[2]
FLUX, WAN = "comfy.ldm.flux.model.Flux", "comfy.ldm.wan.model.WanModel"
KEY = FoundKey(model_class=FLUX, source="1f", comfyui="0.30.0")


@pytest.mark.slow
def test_the_plan_of_a_file_is_found_proven_printed_and_kept(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "parallel_runtime", "find-plan", str(file), "--comfyui", str(comfyui_path()), "--json"],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["class"], report["cuts"], report["refused"]) == (WAN, "cut once", "")
    assert report["error"] <= 1e-5 < 1e-3 < report["control"]
    assert report["plan"]["cut"] == {"blocks.0": {"x": "img"}, "blocks.*": {"freqs": "img"}}
    assert report["plan"]["gather"] == {"head": "img"}
    key = FoundKey(model_class=WAN, source=report["source"], comfyui=report["comfyui"])
    assert FoundPlans(Path(report["kept"])).load(key) == from_data(report["plan"])
    said = find_plan.describe(report)
    assert "cross_attn" in said and said.splitlines()[-1].startswith("found, proven: cut once")


def test_a_kept_plan_is_of_one_source_and_damage_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = FoundPlans(tmp_path / "found_plans.json")
    spec = SPECS[FLUX]
    assert kept.load(KEY) is None
    assert kept.save(KEY, spec, cuts="cut once", errors={"error": 1e-7})
    assert kept.load(KEY) == spec
    assert kept.load(FoundKey(model_class=FLUX, source="2f", comfyui="0.30.0")) is None
    content = json.loads(kept.path.read_text())
    content["plans"][KEY.digest]["plan"]["cut"]["double_blocks.0"]["img"] = "img@@"
    kept.path.write_text(json.dumps(content))
    assert kept.load(KEY) is None
    assert "is not used" in caplog.text
    kept.path.write_text("{")
    assert kept.load(KEY) is None


def test_a_class_without_a_plan_takes_the_one_that_was_found_for_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of a made-up ComfyUI: its plan holds until its file changes, and never for one that people wrote."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "comfy" / "ldm" / "new" / "model.py"
    (tmp_path / "comfy" / "ldm" / "modules").mkdir(parents=True)
    file.parent.mkdir()
    for each in ("model_base.py", "ldm/modules/attention.py"):
        (tmp_path / "comfy" / each).write_text("")
    file.write_text("")
    module = types.ModuleType("comfy.ldm.new.model")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = type("New", (), {"__module__": module.__name__})
    with pytest.raises(ValueError, match="New has no plan"):
        spec_of(kind)
    key, spec = key_of(kind), SPECS[FLUX]
    assert key is not None
    assert FoundPlans(FoundPlans.default_path(os.environ, Path.home())).save(key, spec, cuts="cut once", errors={})
    assert spec_of(kind) == spec
    file.write_text("# another one")
    with pytest.raises(ValueError, match="New has no plan"):
        spec_of(type("New", (), {"__module__": module.__name__}))


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"attention": {}, "cut": {}},
        {**to_data(SPECS[FLUX]), "run": "x"},
        {"attention": 1, "cut": 1, "gather": 1},
    ],
)
def test_what_is_no_plan_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="it is no plan"):
        from_data(data)
