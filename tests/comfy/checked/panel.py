"""What the panel and the nodes' texts say of a prompt that runs, in a ComfyUI whose server notes what it sends.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import asyncio
import importlib
import sys
from types import SimpleNamespace

from trace_samplers import NAME, load

load(sys.argv[1])
stock, graph, progress, utils = (
    importlib.import_module(name)
    for name in ("nodes", "comfy_execution.graph", "comfy_execution.progress", "comfy_execution.utils")
)
told, state, routes, actions, history, pools = (
    importlib.import_module(f"{NAME}.nodes.host.{name}")
    for name in (
        "panel.progress",
        "panel.state",
        "panel.routes",
        "panel.actions",
        "panel.report_history",
        "model.pools",
    )
)
plans, decisions, proofs, replies, found_devices = (
    importlib.import_module(f"{NAME}.parallel_runtime.{name}")
    for name in ("plan", "planner.automatic", "proof", "wire.replies", "devices")
)
config = importlib.import_module(f"{NAME}.nodes.config")
stock.NODE_CLASS_MAPPINGS["SPConfig"] = config.SPConfig
server = told.PromptServer.instance
server.client_id = "a tab"
sent = []
server.send_sync = lambda *given: sent.append(given)
server.send_progress_text = lambda *given: sent.append(given)
PROMPT = {
    "1": {"class_type": "SPConfig", "inputs": {}},
    "2": {"class_type": "KSampler", "inputs": {"model": ["1", 0]}},
    "3": {"class_type": "VAEDecode", "inputs": {"samples": ["2", 0]}},
}
registry_of = progress.get_progress_state
progress.reset_progress_state("a/p\\1", graph.DynamicPrompt(PROMPT))


def at(node_id):
    return utils.CurrentNodeContext("a/p\\1", node_id)


def said():
    """What was sent since this was asked last."""
    found, sent[:] = list(sent), []
    return found


clock = [10.0]
told.time = SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: clock[0])

# Texts on nodes.
assert told.prompt_id() == ""
told.NodeText().say("nowhere")
with at("1"):
    assert told.prompt_id() == "a_p_1"
    on_ours = told.NodeText()
    once = told.OncePerPrompt()
    assert [once.first_time(), once.first_time()] == [True, False]
assert once.first_time() and not once.first_time()
on_ours.say("x")
with at("2"):
    on_stocks = told.NodeText()
    on_stocks.say("y")
assert said() == [("parallel_dit.text", {"node_id": "1", "text": "x"}, "a tab"), ("y", "2")]
for gigabytes in (1, 2):
    on_stocks.loading("a file", gigabytes * 10**9, 4 * 10**9)
assert said() == [("Loading a file: 1.00 of 4.00 GB", "2")], "the second comes too soon"

for clock[0] in (20.0, 20.1, 20.2):
    on_stocks.loading("b", 0, 0)
assert len(said()) == 2, "as soon as the interval is over"

# What a step took.
plan = plans.ParallelPlan(ulysses=2)
given, chosen = decisions.Decision(plan=plan), decisions.Decision(plan=plan)
object.__setattr__(chosen, "automatic", True)


def rank(began_s, step_s):
    return SimpleNamespace(ran=SimpleNamespace(began_s=began_s, step_s=step_s))


def bar(value, most, node_id="2"):
    registry = registry_of()
    registry.nodes[node_id] = {"state": progress.NodeState.Running, "value": value, "max": most}


SKEWED = [rank(0.0, 0.5), rank(0.1, 0.41), SimpleNamespace(ran=None)]
with at("2"):
    text = told.StepText(given)
    text.request(0.5, SKEWED)
    assert said() == [], "no progress bar"
    bar(0.0, 1.0)
    text.request(0.5, SKEWED)
    assert said() == [], "a bar of one step is none"
    bar(6.0, 20.0)
    text.request(0.5, SKEWED)
    text.request(0.5, SKEWED)
    clock[0] += 0.1
    text.request(0.5, SKEWED)
    assert said() == [("step 7/20 · 0.50 s · 2 ranks · skew 2 %", "2")]
    clock[0] = text._next_s
    text.request(0.5, SKEWED)
    assert len(said()) == 1
    bar(19.0, 20.0)
    text.request(0.0999, SKEWED[:1])
    text.request(0.1, [])
    text.request(0.0, SKEWED)
    bar(20.0, 20.0)
    text.worker_loop_step(3)
    last = said()
    assert last[:3] == [
        ("step 20/20 · 100 ms · 1 rank", "2"),
        ("step 20/20 · 0.10 s · 0 ranks", "2"),
        ("step 20/20 · 0 ms · 2 ranks", "2"),
    ]
    assert last[3][0].startswith("step 20/20 · ") and last[3][0].endswith(" s · 3 ranks")
    text = told.StepText(given)
    text.worker_loop_began()
    text.worker_loop_step(1)
    bar(1.0, 2.0)
    text.request(0.5, [])
    bar(20.0, 20.0)
    (line, _), (two, _) = said()
    assert two == "step 2/2 · 0.50 s · 0 ranks"
    assert line.endswith(" ms · 1 rank"), "since the loop began"
    not_proven = proofs.Proof(
        verdict=proofs.NOT_PROVEN, reason="a why", error=0.0, control=0.0, tolerance=1e-5, calls=1
    )
    text.proved(not_proven)
    text.proved(not_proven.__class__(**{**vars(not_proven), "verdict": proofs.PROVEN}))
    text.uncompiled("no compiler")
    text.uncompiled("no graph")
    text.loop_stays("a mask")
    text.tried(given, "tried two")
    text.trying("trying")
    text.drained("drained")
    for _ in range(2):
        text.compiling()
    stays = "The loop stays in ComfyUI: a mask"
    lines = [not_proven.text, "no compiler", "no graph", stays, "tried two", "trying", "drained"]
    assert [line for line, _ in said()] == lines, "what is said at most every so often was said by the step"
    for clock[0] in (text._next_s, text._next_s + 0.1):
        text.compiling()
    assert [line for line, _ in said()] == ["compiling the blocks; the next steps do without"]
    text.request(0.5, [])
    below = ("tried two", not_proven.text, "no compiler", "no graph", stays)
    assert said() == [("\n".join(("step 20/20 · 0.50 s · 0 ranks", *below)), "2")]
    text.fell_back(given, "it fell back")
    text.request(0.5, [])
    below = (plan.name, "tried two", "it fell back", "no compiler", "no graph", stays)
    assert said() == [("it fell back", "2"), ("\n".join(("step 20/20 · 0.50 s · 0 ranks", *below)), "2")]
    assert told._told(given) == ""
told.StepText(given).request(0.5, SKEWED)
assert said() == []

# The node that runs.
queue = server.prompt_queue
assert state._running_node() is None
queue.currently_running[0] = (0, "a/p\\1", PROMPT, {"extra_pnginfo": {"workflow": {"id": "a graph"}}}, [])
run = {"prompt": "a/p\\1", "node": "2", "graph": "a graph", "class": "KSampler", "step": 20, "steps": 20}
bar(0.0, 1.0, "3")
bar(0.0, 1.0, "1")
assert state._running_node() == run
bar(0.0, 1.0)
first = next(iter(registry_of().nodes))
assert state._running_node() == {"prompt": "a/p\\1", "node": first, "graph": "a graph", "class": "KSampler"}
registry_of().nodes.clear()
assert state._running_node() is None
registry_of().nodes["gone"] = {"state": progress.NodeState.Running, "value": 1.0, "max": 2.0}
registry_of().nodes["3"] = {"state": progress.NodeState.Finished, "value": 1.0, "max": 9.0}
assert state._running_node() == {"prompt": "a/p\\1", "node": "gone", "graph": "a graph", "step": 1, "steps": 2}
assert history.origin_of("another") == {} and history.origin_of("a/p\\1") == {"graph": "a graph"}
for sent_along in ({}, {"extra_pnginfo": 3}, {"extra_pnginfo": {"workflow": {"id": 7}}}):
    queue.currently_running[0] = (0, "p", PROMPT | {"parallel-dit-measure": {}}, sent_along, [])
    assert history.origin_of("p") == {"reference": True}

# The panel's state.
devices = tuple(found_devices.parse_devices("cpu:2").devices)
pool = SimpleNamespace(devices=devices, generation=3, state="busy")
STATUS = {
    "state": "busy",
    "generation": 3,
    "models": ["/a/b/model.safetensors"],
    "plans": ["uly2"],
    "peer_access": None,
}
STATUS |= {"last_failure": "", "failed_rank": None, "memory": [{"used": 1}, {"used": 2}], "private": "/home/me"}
STATUS |= {"spent": [{"compute_s": 1.0, "communication_s": 2.0, "idle_s": 1.0}]}
pool.status = lambda: dict(STATUS)
pools.POOLS._pools[devices] = pool
calibrated = [None]
state.calibration_identity = lambda: calibrated[0]
panel = state.PanelState()
found = panel.state()
assert (found["revision"], found["session"]) == (1, panel.session) and panel.state()["revision"] == 1
KEYS = {"version", "comfyui", "devices", "pools", "machines", "offered", "run", "reports", "action", "doctor", "tune"}
assert found.keys() == KEYS | {"calibrations", "session", "revision"}
assert found["calibrations"] == 0
assert found["doctor"] == {"state": "never"} and found["tune"] == {"state": "never", "of": None}
(shown,) = found["pools"]
assert shown.keys() == {*state.SHOWN, "ranks", "sampling"} and shown["models"] == ["model.safetensors"]
assert [(each["rank"], each["device"], each["memory"]) for each in shown["ranks"]] == [
    (0, "cpu:0", {"used": 1}),
    (1, "cpu:1", {"used": 2}),
]
assert all("name" not in each for each in shown["ranks"])
fractions = {"compute": 0.25, "communication": 0.5, "idle": 0.25}
assert shown["sampling"] and [each.get("shares") for each in shown["ranks"]] == [fractions, None]
panel.action = "release"
assert panel.state()["revision"] == 2
STATUS["state"] = "idle"
assert panel.state()["pools"][0]["sampling"], "it rests between two steps"
del registry_of().nodes["gone"]
assert panel.state()["run"] is None and not panel.state()["pools"][0]["sampling"]
registry_of().nodes["gone"] = {"state": progress.NodeState.Running, "value": 1.0, "max": 1.0}
assert not panel.state()["pools"][0]["sampling"], "of no steps"
bar(1.0, 9.0)
assert not panel.state()["pools"][0]["sampling"], "another node's"
STATUS["state"] = "compiling"
assert panel.state()["pools"][0]["sampling"] and panel.state()["pools"][0]["state"] == "compiling"
queue.currently_running.clear()
(shown,) = panel.state()["pools"]
assert (shown["state"], shown["sampling"]) == ("idle", False), "a cancelled request"
STATUS["state"] = "failed"
assert panel.state()["pools"][0]["state"] == "failed"

for calibrated[0], seen in ((1, 1), (1, 1), (2, 2)):
    assert panel.state()["calibrations"] == seen

for value in (1.0, 3.0):
    queue.currently_running[0] = (0, "a/p\\1", PROMPT, {}, [])
    bar(value, 9.0)
    run = panel.state()["run"]
assert run["step"] == 3 and {"step_s", "left_s"} <= run.keys()
queue.currently_running.clear()

# Tabs are told of each change, once.
state.INTERVAL_S = 0.01
said()


async def watched():
    watch = asyncio.get_running_loop().create_task(panel.watch())
    await asyncio.sleep(0.2)
    assert len(said()) == 1
    panel.action = "restart"
    await asyncio.sleep(0.2)
    ((event, shown),) = said()
    assert (event, shown["action"]) == ("parallel_dit.state", "restart")
    kept, panel._pool = panel._pool, None
    await asyncio.sleep(0.05)
    panel._pool, panel.action = kept, None
    await asyncio.sleep(0.2)
    assert [shown["action"] for _, shown in said()] == [None], "a look that failed is not the last"
    watch.cancel()


asyncio.run(watched())


# How long a step takes, by a clock that this sets.
class Clock:
    """Seconds as they are set."""

    now_s = 10.0

    @classmethod
    def monotonic(cls):
        return cls.now_s


state.time = Clock
eta = state.StepEta()


def estimate(now_s, step, steps=10, node="2"):
    Clock.now_s = now_s
    return eta.of({"prompt": "p", "node": node, "steps": steps} | ({} if step is None else {"step": step}))


assert [estimate(10.0, None), estimate(10.0, 0), estimate(11.0, 1), estimate(12.0, 1)] == [{}] * 4
assert estimate(14.0, 3) == {"step_s": 1.5, "left_s": 10.5} == estimate(15.0, 3)
assert estimate(16.0, 4) == {"step_s": 1.6667, "left_s": 10.0}
assert estimate(17.0, 2) == {} and estimate(18.0, 3) == {"step_s": 1.0, "left_s": 7.0}
assert (
    estimate(19.0, 4, node="3") == {} and estimate(20.0, 5, 6, "3") == {} and estimate(21.0, 6, 6, "3")["left_s"] == 0
)

# Buttons: one at a time.
panel.action = None
buttons = actions.Actions(panel)
done = []
actions.POOLS = SimpleNamespace(close_all=lambda: done.append("closed"), all=list)
actions.MACHINES = SimpleNamespace(keep=lambda names: done.append(names))


def busy(do, *words):
    try:
        do()
    except actions.BusyError as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(words)


async def pressed():
    for name, what in (("release", "closed"), ("stop_listening", ())):
        buttons.begin(name)
        assert panel.action == name
        busy(lambda: buttons.begin("doctor"), f"{name} is under way")
        await buttons._task
        assert panel.action is None and done.pop() == what
    queue.currently_running[0] = (0, "p", {}, {}, [])
    busy(lambda: buttons.tune(routes.read_asked({})), "a prompt is under way")
    queue.currently_running.clear()
    buttons.tune(routes.read_asked({}))
    assert panel.action == "tune"
    await buttons._task
    tried = panel.state()["tune"]
    assert tried == {
        "state": "failed",
        "message": importlib.import_module(f"{actions.__package__}.tuning").NOTHING_LOADED,
    } | {"of": None}


asyncio.run(pressed())
asked = routes.read_asked({"width": "512", "seconds": "1.5", "guided": "true", "other": "x"})
assert (asked.width, asked.seconds, asked.guided) == (512, 1.5, True)
assert routes.read_asked({"guided": "false"}) == routes.Asked(guided=False)
try:
    routes.read_asked({"height": "tall"})
except ValueError as error:
    assert str(error).startswith("height='tall' is no number")
else:
    raise AssertionError
for listen, alone in (("127.0.0.1", True), ("127.0.0.1, ::1", True), ("127.0.0.1,0.0.0.0", False), ("a name", False)):
    assert routes._loopback_only(listen) is alone
