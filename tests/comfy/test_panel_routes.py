"""The panel's routes on a real server: what they tell, to whom, and what their actions do."""

import asyncio
import http.client
import json
import random
import re
import statistics
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from runtime.test_report_compare import ALONE, PAIR, named
from runtime.test_report_compare import run as report_of

from host import workflows
from host.client import ComfyClient, Event
from host.pack_workflows import parallel
from host.server import ComfyServer
from host.tiny_models import TinyModels
from host.workers import generation

STATE = "/parallel_dit/state"
LOOPBACK_HOST = r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?"


def asked(server: ComfyServer, method: str, path: str, **headers: str) -> tuple[int, Any]:
    """A request with these headers alone, such as another page or another program could send."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in {"Content-Length": "0", **headers}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body.startswith(b"{") else body
    finally:
        connection.close()


def settled(client: ComfyClient, done: Callable[[dict], bool], *, within_s: float = 300.0) -> dict:
    """The state once `done` holds of it."""
    end_s = time.monotonic() + within_s
    while not done(state := client.get(STATE)):
        assert time.monotonic() < end_s, state
        time.sleep(0.1)
    return state


def run(client: ComfyClient, tiny: TinyModels, *, seed: int, devices: str = "cpu:2", **more: Any) -> Any:
    """A small image over two ranks."""
    graph = workflows.text_to_image(tiny, seed=seed, steps=3)
    graph = parallel(graph, devices=devices, mode="manual", ulysses=2, sampler="ParallelFluxSampler")
    return client.queue(graph, **more)


def pool_of(state: dict, devices: int = 2) -> dict:
    """The pool of so many devices."""
    (pool,) = [pool for pool in state["pools"] if len(pool["ranks"]) == devices]
    return pool


def test_the_state_tells_of_ranks_plan_memory_and_reports(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    run(client, tiny_models, seed=901).require_success()
    state = client.get(STATE)
    pool = pool_of(state)
    assert pool["state"] in ("idle", "busy")
    assert pool["generation"] == generation(comfy_server)
    assert [rank["device"] for rank in pool["ranks"]] == ["cpu:0", "cpu:1"]
    assert all(rank["memory"]["resident_bytes"] > 1e8 and rank["memory_bytes"] > 1e8 for rank in pool["ranks"])
    assert pool["plans"][-1]["ulysses"] == 2
    text = json.dumps(state)
    assert "pids" not in text and str(comfy_server.base) not in text
    assert not [word for word in text.replace('"', " ").split() if word.startswith("/")], "no path"
    newest = state["reports"][-1]
    assert newest["kind"] == "denoise"
    report = client.get(f"/parallel_dit/reports/{newest['number']}")
    assert report["kind"] == "denoise"


def test_a_run_is_told_with_what_it_is_of_and_how_it_compares_with_one_device(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = workflows.text_to_image(tiny_models, seed=911, steps=3, width=96)
    for ulysses, sent in ((1, {"workflow": {"id": "mine"}}), (2, {"workflow": ["not one"]})):
        asked = parallel(graph, mode="manual", ulysses=ulysses, sampler="ParallelFluxSampler")
        client.queue(asked, extra_data={"extra_pnginfo": sent}).require_success()
    alone, pair = [entry for entry in client.get(STATE)["reports"] if entry["kind"] == "denoise"][-2:]
    assert (alone["node_id"], alone["graph"], "graph" in pair) == ("sampler", "mine", False)
    steps = [client.get(f"/parallel_dit/reports/{each['number']}")["timings"]["step_s"] for each in (alone, pair)]
    one_s, plan_s = map(statistics.median, steps)
    figures = {"factor": pytest.approx(one_s / plan_s), "one_s": pytest.approx(one_s), "plan_s": pytest.approx(plan_s)}
    figures |= {"plan": "uly2", "kind": "denoise"}
    assert pair["summary"]["speedup"] == figures | {"number": alone["number"]}
    assert alone["summary"]["speedup"] == figures | {"number": pair["number"]}
    assert pair["summary"]["verdict"] in ("good", "fair", "poor")


def test_one_device_is_remembered_when_its_report_is_not_kept_any_more(
    module_of_pack: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of_pack("nodes.host.panel.report_history")
    monkeypatch.setattr(module, "executing", lambda: None)
    history = module.ReportHistory()
    for plan in [ALONE, *[PAIR] * (module.KEPT + 1)]:
        history.add(named(report_of(plan, 0.3)))
    kept = history.entries()
    assert [entry["number"] for entry in kept] == list(range(3, module.KEPT + 3))
    assert kept[-1]["summary"]["speedup"]["number"] == 1 and history.report(1) is None


@pytest.mark.parametrize("loop", ["auto", "host"])
def test_every_tab_is_told_of_a_run_while_it_is_held_between_steps(
    loop: str, client: ComfyClient, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Its step, what is left of it, and where each rank's time goes, in the parts of the report."""
    told: list[dict] = []

    def on_event(event: Event) -> None:
        if event.type == "parallel_dit.state":
            told.append(event.data)
            run = event.data["run"] or {}
            if run.get("step") == 1:
                (tmp_path / "gate.1").touch()
            if "left_s" in run:
                (tmp_path / "gate").touch()

    graph = workflows.text_to_image(tiny_models, seed=905, steps=4, width=256, height=256)
    graph = parallel(graph, mode="manual", ulysses=2, sampler="ParallelSampler")
    graph["hold"] = {"class_type": "HoldSteps", "inputs": {"model": ["model", 0], "gate": str(tmp_path / "gate")}}
    graph["sampler"]["inputs"] |= {"loop": loop, "model": ["hold", 0]}
    client.queue(graph, on_event=on_event).require_success()
    assert [state["revision"] for state in told] == sorted({state["revision"] for state in told})
    runs = [state["run"] for state in told if (state["run"] or {}).get("node") == "sampler"]
    assert {(run["class"], run["steps"]) for run in runs if run.get("steps")} == {("ParallelSampler", 4)}
    (held, *_) = [run for run in runs if "left_s" in run]
    assert (held["step"], held["left_s"]) == (2, pytest.approx(2 * held["step_s"], rel=0.05))
    entry = client.get(STATE)["reports"][-1]
    report = client.get(f"/parallel_dit/reports/{entry['number']}")
    assert report["loop"]["kind"] == {"auto": "resident", "host": "host"}[loop]
    if loop == "host":  # held within a request: of the one before it the panel may have seen nothing
        return
    shares = [[rank.get("shares") for rank in pool["ranks"]] for state in told for pool in state["pools"]]
    (known, *_) = [each for each in shares if len(each) == 2 and all(each)]
    for rank, share in zip(report["ranks"], known, strict=True):
        assert {part for part in ("compute", "communication", "idle") if f"{part}_s" in rank} == share.keys()
        assert sum(share.values()) == pytest.approx(1.0, abs=0.01)


def test_ctrl_c_waits_for_no_action(module_of_pack: Callable[[str], ModuleType], monkeypatch) -> None:
    """Python joins every thread at its end that is no daemon."""
    module, daemons = module_of_pack("nodes.host.panel.actions"), []
    monkeypatch.setattr(module, "_release", lambda: daemons.append(threading.current_thread().daemon))
    queue = SimpleNamespace(prompt_queue=SimpleNamespace(currently_running={}))
    monkeypatch.setattr(module, "PromptServer", SimpleNamespace(instance=queue))
    tune = SimpleNamespace(work=lambda asked: lambda: daemons.append((threading.current_thread().daemon, asked)))
    state = SimpleNamespace(action=None, tune=tune)

    async def act() -> None:
        actions = module.Actions(state)
        actions.begin("release")
        with pytest.raises(module.BusyError, match="release is under way; wait until it has ended"):
            actions.tune("these")
        await actions._task
        actions.tune("these")
        await actions._task

    asyncio.run(act())
    assert (daemons, state.action) == ([True, (True, "these")], None)
    monkeypatch.setattr(module, "_cancel_prompt", lambda: daemons.append("cancel"))
    monkeypatch.setattr(module, "MACHINES", SimpleNamespace(keep=daemons.append))
    module._stop_listening()
    assert daemons[2:] == ["cancel", ()], "no prompt runs on machines that are let go"


def test_requests_of_comfyuis_loop_say_where_each_ranks_time_goes(module_of_pack: Callable[[str], ModuleType]) -> None:
    """Two of 0.5 s: a rank is busy for 0.4 s of each and waits for 0.1 s of that; the other was not timed."""
    context = module_of_pack("nodes.host.sampling.run_context")
    recorder, live = context.Recorder(), module_of_pack("nodes.host.panel.live_times").LiveTimes()
    live.begins(SimpleNamespace(recorder=recorder, model=SimpleNamespace(devices=("cpu:0", "cpu:1"))))
    assert live.fractions(("cpu:0", "cpu:1"), []) == [None, None]
    timed = SimpleNamespace(step_s=(0.4,), regions={"communication_s": (0.1,)}, timed_steps=None)
    ranks = [SimpleNamespace(ran=timed), SimpleNamespace(ran=None)]
    for began_s in (10.0, 10.5):
        request = context.MeasuredRequest(num_calls=1, began_s=began_s, wall_s=0.5, ranks=ranks, traces={})
        recorder.requests.append(request)
    shares = live.fractions(("cpu:0", "cpu:1"), [])
    assert shares == [{"compute": 0.6, "communication": 0.2, "idle": 0.2}, None]
    assert live.fractions(("cpu:0", "cpu:1"), []) == shares, "each request is counted once"
    untimed = SimpleNamespace(ran=SimpleNamespace(step_s=(0.4,), regions=None, timed_steps=None))
    recorder.requests.append(replace(request, began_s=11.0, ranks=[untimed, ranks[1]]))
    assert live.fractions(("cpu:0", "cpu:1"), []) == shares, "a step whose parts are not timed is as those before"


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({"Origin": "http://evil.example"}, "another page"),
        ({"Origin": "null"}, "a page without an address"),
        ({"Host": "evil.example:8188", "Origin": "http://evil.example:8188"}, "a name that resolves to this machine"),
        ({"Host": "evil.example:8188"}, "the same without an origin"),
        ({"Host": "[127.0.0.1"}, "a name that is none"),
        ({"Sec_Fetch_Site": "cross-site"}, "a form of another site"),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", STATE), ("POST", "/parallel_dit/release")])
def test_a_foreign_page_is_refused(
    comfy_server: ComfyServer, headers: dict[str, str], what: str, method: str, path: str
) -> None:
    status, _ = asked(comfy_server, method, path, **headers)
    assert status == 403, what


def test_whatever_a_client_sends_is_answered_or_refused_and_breaks_nothing(comfy_server: ComfyServer) -> None:
    seed = time.time_ns()
    chance = random.Random(seed)  # noqa: S311  no secret
    pieces = [*"[]:@%\xb5/#? ", "::1", "127.0.0.1", "localhost", "8188", "evil.example"]
    values = ["", "-1", "9" * 1900, "NaN", "cpu:32", "cpu:2", "all", "manual", "sharded", "\0", "[]", "x" * 500]
    values += ["\u0663"]
    names = ["mode", "devices", "ulysses", "ring", "data", "cfg", "weights", "pipefusion", "patches", "lora", "self"]
    names += ["unet_name", "beside"]
    for _ in range(100):
        host = "".join(chance.choices(pieces, k=chance.randint(0, 5))).strip()
        status, _ = asked(comfy_server, "GET", STATE, Host=host)
        assert status in (200, 400, 403), f"seed {seed}: Host {host!r}"
        assert status != 200 or re.fullmatch(LOOPBACK_HOST, host), f"seed {seed}: Host {host!r}"
        query = urllib.parse.urlencode({name: chance.choice(values) for name in chance.sample(names, k=4)})
        status, answer = asked(comfy_server, "GET", f"/parallel_dit/plan?{query}", Host="localhost")
        assert status in (200, 400), f"seed {seed}: {query[:200]}"
        assert status == 400 or {"plan", "error"} & answer.keys(), f"seed {seed}: {query[:200]}"


def test_the_servers_own_page_is_answered(comfy_server: ComfyServer) -> None:
    for host in (f"127.0.0.1:{comfy_server.port}", f"localhost:{comfy_server.port}"):
        status, state = asked(comfy_server, "GET", STATE, Host=host, Origin=f"http://{host}")
        assert (status, "pools" in state) == (200, True)


def test_actions_take_no_get(comfy_server: ComfyServer) -> None:
    assert asked(comfy_server, "GET", "/parallel_dit/release")[0] in (404, 405)


def test_a_report_that_is_not_there_says_so(comfy_server: ComfyServer) -> None:
    status, body = asked(comfy_server, "GET", "/parallel_dit/reports/999999999")
    assert (status, body["error"].startswith("this report is not kept")) == (404, True)


def test_release_ends_the_workers_and_restart_starts_them_again(client: ComfyClient, tiny_models: TinyModels) -> None:
    run(client, tiny_models, seed=906).require_success()
    before = pool_of(client.get(STATE))["generation"]
    client.post("/parallel_dit/restart", {})
    state = settled(client, lambda state: state["action"] is None)
    assert (pool_of(state)["state"], pool_of(state)["generation"]) == ("idle", before + 1)
    client.post("/parallel_dit/release", {})
    state = settled(client, lambda state: state["action"] is None)
    assert pool_of(state)["state"] == "stopped"
    run(client, tiny_models, seed=907).require_success()


@pytest.mark.full
def test_the_doctor_runs_aside_one_at_a_time(client: ComfyClient, comfy_server: ComfyServer) -> None:
    assert asked(comfy_server, "POST", "/parallel_dit/doctor")[0] == 202
    status, body = asked(comfy_server, "POST", "/parallel_dit/doctor")
    assert (status, body["error"]) == (409, "doctor is under way; wait until it has ended")
    found = settled(client, lambda state: state["action"] is None)["doctor"]
    assert (found["state"], found.get("can_run")) == ("done", True), found
    assert {"workers", "loopback"} <= {check["name"] for check in found["checks"] if check["ok"]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mode": "auto", "devices": "cpu:1"}, {"plan": "single"}),
        ({"mode": "manual", "devices": "cpu:2", "ulysses": "1", "ring": "2"}, {"plan": "ring2"}),
        ({"mode": "manual", "devices": "cpu:5", "ulysses": "5"}, {"plan": "uly5"}),
        ({"mode": "manual", "devices": "cpu:3", "ulysses": "2"}, {"devices": "['cpu:0', 'cpu:1']"}),
        ({"mode": "manual", "devices": "cpu:2", "ulysses": "many"}, {"error": "ulysses='many' is not a whole number"}),
        ({"mode": "auto", "devices": "cpu:1", "step_cache": "0.0"}, {"plan": "single"}),
        ({"mode": "auto", "devices": "cpu:1", "unet_name": "nowhere.safetensors"}, {"plan": "single"}),
        ({"mode": "auto", "devices": "cpu:1", "unet_name": "../x"}, {"error": "'../x' is no name within models"}),
        ({"mode": "auto", "devices": "cpu:1", "step_cache": "few"}, {"error": "step_cache='few' is not a number"}),
    ],
)
def test_a_plan_is_judged_before_it_is_queued(
    client: ComfyClient, values: dict[str, str], said: dict[str, str]
) -> None:
    answer = client.get("/parallel_dit/plan", **values)
    for key, text in said.items():
        assert str(answer[key]).startswith(text)


@pytest.mark.parametrize(
    ("sampler", "loop"), [("KSampler", "host"), ("KSampler", "auto"), ("ParallelFluxSampler", "auto")]
)
def test_each_step_is_told_on_the_node_that_samples(
    sampler: str, loop: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = workflows.text_to_image(tiny_models, seed=908, steps=3)
    result = client.queue(parallel(graph, mode="manual", ulysses=2, sampler=sampler, loop=loop))
    told = [text for node, text in result.require_success().texts if node == "sampler" and text.startswith("step ")]
    skew = r" · skew \d+ %" if loop == "host" else ""  # ranks of a loop of their own report at its end
    assert re.fullmatch(rf"step 3/3 · \d+(\.\d+)? m?s · 2 ranks{skew}", told[-1]), told


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_server_has_words_for_every_input_of_every_node(language: str, client: ComfyClient) -> None:
    texts = client.get("/i18n")[language]["nodeDefs"]
    ours = {
        name: info
        for name, info in client.object_info().items()
        if info["python_module"] == "custom_nodes.parallel-dit"
    }
    missing = [name for name in ours if name not in texts]
    for name, info in ours.items():
        inputs = [*info["input"].get("required", {}), *info["input"].get("optional", {})]
        missing += [f"{name}.{each}" for each in inputs if not texts.get(name, {}).get("inputs", {}).get(each)]
    assert missing == []


def test_pages_of_this_server_may_ask_by_an_address_or_as_localhost(
    module_of_pack: Callable[[str], ModuleType],
) -> None:
    routes = module_of_pack("nodes.host.panel.routes")
    page = (
        "the page of {} is not of localhost, as where a proxy changes the address; open ComfyUI through "
        "ssh -L 8188:127.0.0.1:PORT MACHINE, or run python -m parallel_runtime doctor there"
    )
    name = "{} is not this machine; open ComfyUI as localhost, or start it with --listen"
    proxied = {"Host": "localhost", "Origin": "https://x-8188.proxy.example"}
    for headers, beyond, said in (
        ({"Host": "127.0.0.1:8188"}, False, ""),
        ({"Host": "LOCALHOST"}, False, ""),
        ({"Host": "[::1]:8188", "Origin": "http://[::1]:8188"}, False, ""),
        ({"Host": "localhost", "Origin": "http://localhost:8188"}, True, page.format("http://localhost:8188")),
        ({"Host": "localhost", "Origin": "http://[1"}, True, page.format("http://[1")),
        ({"Host": "8.8.8.8"}, False, name.format("8.8.8.8")),
        ({"Host": "a.example"}, False, name.format("a.example")),
        ({"Host": "a.example"}, True, ""),
        ({"Host": "localhost:123456"}, False, name.format("no name")),
        ({}, False, name.format("no name")),
        ({"Host": "localhost", "Sec-Fetch-Site": "Cross-Site"}, True, "this request comes from a page of another site"),
        ({"Host": "localhost", "Sec-Fetch-Site": "same-origin"}, False, ""),
        ({**proxied, "Sec-Fetch-Site": "same-origin"}, True, ""),
        ({**proxied, "Sec-Fetch-Site": "same-origin"}, False, page.format(proxied["Origin"])),
        ({**proxied, "Sec-Fetch-Site": "same-site"}, True, page.format(proxied["Origin"])),
        (proxied, True, page.format(proxied["Origin"])),
    ):
        assert routes.foreign(headers, listens_beyond_loopback=beyond) == said, headers
    listens = ("127.0.0.1", "127.0.0.1, ::1", "127.0.0.1,0.0.0.0", "a name")
    assert [routes._loopback_only(each) for each in listens] == [True, True, False, False]
    numbers = {"width": 512, "height": 256, "frames": 9, "text_tokens": 64, "batch": 2, "seconds": 1.5}
    query = {name: str(value) for name, value in numbers.items()} | {"guided": "true", "other": "x"}
    assert routes.read_asked(query) == routes.TuningRequest(**numbers, guided=True)
    assert routes.read_asked({"guided": "yes"}) == routes.TuningRequest()
    with pytest.raises(ValueError, match="width='1.5' is no number; use a whole one"):
        routes.read_asked({"width": "1.5"})


def test_a_step_takes_what_the_steps_that_were_seen_took(
    module_of_pack: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    panel, now_s = module_of_pack("nodes.host.panel.state"), [0.0]
    monkeypatch.setattr(panel, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    eta = panel.StepEta()
    for at_s, step, node, steps, found in (
        (10, None, "2", 9, {}),
        (11, 0, "2", 9, {}),
        (12, 1, "2", 9, {}),
        (13, 1, "2", 9, {}),
        (15, 3, "2", 9, {"step_s": 1.5, "left_s": 9.0}),
        (19, 3, "2", 9, {"step_s": 1.5, "left_s": 9.0}),
        (20, 4, "2", 9, {"step_s": 2.6667, "left_s": 13.33}),
        (21, 2, "2", 9, {}),
        (22, 4, "2", 9, {"step_s": 0.5, "left_s": 2.5}),
        (23, 5, "3", 9, {}),
        (24, 6, "3", 8, {}),
        (26, 8, "3", 8, {"step_s": 1.0, "left_s": 0.0}),
    ):
        now_s[0] = at_s
        run = {"prompt": "p", "node": node, "steps": steps} | ({} if step is None else {"step": step})
        assert eta.of(run) == found, run


def test_a_pool_samples_while_it_works_for_the_node_that_runs_and_calibrations_are_counted(
    module_of_pack: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    panel, runs = module_of_pack("nodes.host.panel.state"), [True]
    known = iter((1, 1, 2, None))
    replaced: dict[str, Any] = {"prompt_runs": lambda: runs[0], "calibration_identity": lambda: next(known)}
    replaced["_described"] = lambda devices: [{"name": each, "cores": 2} for each in devices]
    replaced["LIVE"] = SimpleNamespace(fractions=lambda devices, told: [told, None])
    for name, value in replaced.items():
        monkeypatch.setattr(panel, name, value)
    status = {key: key for key in panel.SHOWN} | {"state": "busy", "memory": [5], "spent": "spent", "private": 1}
    pool, state = SimpleNamespace(devices=("a", "b"), status=lambda: dict(status)), panel.PanelState()
    ranks = [{"rank": 0, "device": "a", "cores": 2, "memory": 5}, {"rank": 1, "device": "b", "cores": 2}]
    run, sampling = {"prompt": "p", "node": "2", "steps": 9}, [ranks[0] | {"shares": "spent"}, ranks[1]]
    for told, of, runs[0], shown, samples in (
        ("idle", run, True, "idle", False),
        ("busy", None, True, "busy", False),
        ("busy", run, True, "busy", True),
        ("idle", run, True, "idle", True),
        ("failed", run, True, "failed", False),
        ("idle", run | {"node": "1"}, True, "idle", False),
        ("compiling", run, True, "compiling", True),
        ("compiling", None, False, "idle", False),
    ):
        status["state"] = told
        found = {"state": shown, "sampling": samples, "ranks": sampling if samples else ranks}
        assert state._pool(pool, of) == {key: key for key in panel.SHOWN} | found, (told, of)
    assert [state._calibrated() for _ in range(4)] == [1, 1, 2, 3]


def test_tabs_are_told_of_each_change_once_and_a_look_that_fails_is_not_the_last(
    module_of_pack: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    panel, sent, ends = module_of_pack("nodes.host.panel.state"), list[tuple[str, dict]](), RuntimeError("no more")
    gone, other = KeyError("a pool"), KeyError("a machine")
    looks = [1, 1, 2, gone, gone, other, 2, 3]

    def look() -> dict:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return {"revision": found}

    async def sleep(_: float) -> None:
        if not looks:
            raise ends

    state = panel.PanelState()
    monkeypatch.setattr(state, "state", look)
    monkeypatch.setattr(panel, "asyncio", SimpleNamespace(sleep=sleep))
    tabs = SimpleNamespace(send_sync=lambda event, told: sent.append((event, told)))
    monkeypatch.setattr(panel, "PromptServer", SimpleNamespace(instance=tabs))
    with pytest.raises(RuntimeError, match="no more"), caplog.at_level("WARNING"):
        asyncio.run(state.watch())
    assert sent == [("parallel_dit.state", {"revision": number}) for number in (1, 2, 3)]
    assert [entry.getMessage().rpartition(": ")[2] for entry in caplog.records] == [repr(gone), repr(other)]


def test_a_steps_line_has_its_place_time_ranks_and_what_was_told_of_the_run(
    module_of_pack: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, said, now_s = module_of_pack("nodes.host.panel.progress"), list[str](), [50.0]
    nodes = {"2": {"value": 0.0, "max": 3.0}}
    replaced = {"NodeText": lambda: SimpleNamespace(say=said.append), "executing": lambda: SimpleNamespace(node_id="2")}
    replaced |= {"get_progress_state": lambda: SimpleNamespace(nodes=nodes)}
    replaced["time"] = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: now_s[0])
    for name, value in replaced.items():
        monkeypatch.setattr(progress, name, value)
    plan = SimpleNamespace(name="uly2")
    text = progress.StepText(SimpleNamespace(plan=plan, chosen_for=""))
    ran = [SimpleNamespace(ran=SimpleNamespace(began_s=1.0, step_s=step_s)) for step_s in (0.5, 0.46)]
    idle = SimpleNamespace(ran=None)
    text.request(0.4, [*ran, idle])
    for now_s[0] in (50.1, 50.2):  # too soon, and as soon as the interval is over
        text.request(0.5, [])
    now_s[0] = 51.0
    text.proved(SimpleNamespace(verdict="proven", text="proven"))
    text.proved(SimpleNamespace(verdict=progress.NOT_PROVEN, text="not proven"))
    text.loop_stays("a mask")
    text.uncompiled("no compiler")
    text.request(0.0999, [ran[0], idle])
    nodes["2"] |= {"value": 2.0}
    text.fell_back(SimpleNamespace(plan=plan), "fell back")
    text.request(0.0, ran)  # the last, however soon
    nodes["2"] |= {"value": 3.0}
    text.worker_loop_began()
    now_s[0] = 53.5
    text.tried(SimpleNamespace(plan=plan, chosen_for="this run"), "tried two")
    text.worker_loop_step(2)
    for now_s[0] in (53.5, 53.6, 53.7, 53.8):  # too soon twice, as soon as the interval is over, and too soon again
        text.compiling()
    text.trying("trying")
    text.drained("drained")
    for nodes["2"] in ({"value": 0.0, "max": 1.0}, None):  # a bar of one step is none
        text.request(1.0, ran)
    below, stays = "\n".join(("", "fell back", "no compiler")), "The loop stays in ComfyUI: a mask"
    chosen = "uly2, chosen for this run"
    assert said == [
        *("step 1/3 · 0.40 s · 2 ranks · skew 10 %", "step 1/3 · 0.50 s · 0 ranks"),
        *("not proven", stays, "no compiler"),
        f"step 1/3 · 100 ms · 1 rank\nnot proven\nno compiler\n{stays}",
        "fell back",
        f"step 3/3 · 0 ms · 2 ranks\nuly2{below}\n{stays}",
        "tried two",
        f"step 3/3 · 2.50 s · 2 ranks\n{chosen}\ntried two{below}\n{stays}",
        *("compiling the blocks; the next steps do without", "trying", "drained"),
    ]
