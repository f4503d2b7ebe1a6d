"""Tune, by the panel's button and on the command line: what is kept is what the next run of such work begins under.

Owns both ways through a real server. Does not own the rules (planner/test_tries.py) nor what happens in a try
(test_trying.py).
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from comfy.test_auto_each_run import measured, report_of, stock_graph
from comfy.test_panel_routes import asked, settled
from comfy.test_tries import KEPT, LINE, runs

from host.client import ComfyClient
from host.fetch import comfyui_path
from host.server import FLAGS, ComfyServer
from host.tiny_models import TinyModels
from parallel_runtime.devices import parse_devices
from parallel_runtime.planner.known import known_calibration
from parallel_runtime.planner.machine import device_set
from parallel_runtime.planner.store import CalibrationStore

SIZE = {"width": 64, "height": 80}


def few_steps(tiny: TinyModels, seed: int) -> dict[str, Any]:
    """A run that is too short to try anything, whose planner takes plans of two ranks to be near."""
    graph = measured(stock_graph(tiny, seed=seed, steps=3, **SIZE), tries="auto")
    graph["known"]["inputs"]["latency_s"] = 0.001
    return graph


def tune(server: ComfyServer, **changes: object) -> tuple[int, Any]:
    """The server's answer to the button."""
    values = {**SIZE, "text_tokens": 256, "batch": 1, "guided": "false", "seconds": 60} | changes
    return asked(server, "POST", f"/parallel_dit/tune?{urlencode(values)}")


def test_the_button_measures_and_the_next_run_begins_under_what_it_kept(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    KEPT.unlink(missing_ok=True)
    graph = few_steps(tiny_models, 530)
    first = report_of(client.queue(graph))
    assert "measured" not in first["plan"]["reasons"][-1]
    of = client.get("/parallel_dit/state")["tune"]["of"]
    assert of == {"model": tiny_models.dev, "why_not": "", "text_tokens": 256, "guided": False, "batch": 1, **SIZE}

    for name, bad in {"seconds": 0, "width": "wide", "batch": 100}.items():
        status, told = tune(comfy_server, **{name: bad})
        assert status == 400 and told["error"].startswith(f"{name}="), told
    assert tune(comfy_server, seconds="nan")[0] == 400 and not KEPT.exists()
    assert tune(comfy_server)[0] == 202
    told = settled(client, lambda state: state["action"] is None)["tune"]
    found = LINE.fullmatch(told["line"])
    assert found and found["kept"] in (told["kept"].replace("=", " "), "one device"), told
    assert {row["name"] for row in told["plans"] if row["step_s"]} >= {"ring 2", "ulysses 2"}
    graph["sampler"]["inputs"]["seed"] = 531
    ran = report_of(client.queue(graph))["plan"]
    assert runs(ran, found["kept"]) and ran["reasons"][-1] == f"measured on these devices: {told['line']}"


@pytest.mark.slow
def test_the_command_keeps_what_a_run_in_comfyui_finds(
    client: ComfyClient,
    tiny_models: TinyModels,
    command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices, table = parse_devices("cpu:2").devices, known_calibration("cpu")
    slow = replace(table.rates, matmul_flops=1e10, attention_flops=1e10)
    near = replace(table, rates=slow, link=replace(table.link, latency_s=0.0001))
    CalibrationStore.of_user().save(device_set(devices), near)
    file = str(tiny_models.models / "diffusion_models" / tiny_models.dev)
    given = ["--devices", "cpu:2", "--width", "64", "--height", "80", "--text-tokens", "256"]
    given += ["--comfyui", str(comfyui_path()), f"--comfyui-options={' '.join(FLAGS)}"]
    done = command("tune", file, *given)
    lines = done.stdout.splitlines()
    found = LINE.fullmatch(lines[0])
    assert (done.returncode, lines[-1]) == (0, lines[0]) and found, done
    assert "trying ring 2" in done.stderr

    KEPT.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(tmp_path / "parallel-dit" / "plans.json", KEPT)
    ran = report_of(client.queue(few_steps(tiny_models, 532)))["plan"]
    assert runs(ran, found["kept"]) and ran["reasons"][-1] == f"measured on these devices: {lines[0]}"
