"""What the panel and the nodes' texts say of a prompt that runs, in a ComfyUI whose server notes what it sends.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import asyncio
import errno
import importlib
import math
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
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
plans, decisions, found_devices = (
    importlib.import_module(f"{NAME}.parallel_runtime.{name}") for name in ("plan", "planner.automatic", "devices")
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
server.client_id = None  # of a script: its texts would reach every page, and what ends them none
on_ours.say("y")
server.client_id = "a tab"
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


# What a step took, and the node that runs.
def bar(value, most, node_id="2"):
    registry = registry_of()
    registry.nodes[node_id] = {"state": progress.NodeState.Running, "value": value, "max": most}


SKEWED = [SimpleNamespace(ran=SimpleNamespace(began_s=start, step_s=0.5 - start)) for start in (0.0, 0.01)]
given = decisions.Decision(plan=plans.ParallelPlan(ulysses=2))
bar(6.0, 20.0)
with at("2"):
    told.StepText(given).request(0.5, SKEWED)
assert said() == [("step 7/20 · 0.50 s · 2 ranks · skew 0 %", "2")]
told.StepText(given).request(0.5, SKEWED)
assert said() == []
bar(20.0, 20.0)
queue = server.prompt_queue
assert state._running_node() is None
queue.currently_running[0] = (0, "a/p\\1", PROMPT, {"extra_pnginfo": {"workflow": {"id": "a graph"}}}, [])
with at("1"):
    told.NodeText().say("x")
assert said() == [("parallel_dit.text", {"node_id": "1", "text": "x", "graph": "a graph"}, "a tab")]
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
panel.action = "release"
assert panel.state()["revision"] == 2
del registry_of().nodes["gone"]
for value in (1.0, 3.0):
    queue.currently_running[0] = (0, "a/p\\1", PROMPT, {}, [])
    bar(value, 9.0)
    run = panel.state()["run"]
assert run["step"] == 3 and {"step_s", "left_s"} <= run.keys()
queue.currently_running.clear()

# Buttons: one at a time.
panel.action = None
buttons = actions.Actions(panel)
done = []
actions.POOLS = SimpleNamespace(close_all=lambda: done.append("closed"), all=list)
actions.MACHINES = SimpleNamespace(keep=lambda names: done.append(names))


def check_refused(kind, do, *words):
    """The call has to end with an error of this kind, whose text has each of the words."""
    try:
        do()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(words)


async def pressed():
    for name, what in (("release", "closed"), ("stop_listening", ())):
        buttons.begin(name)
        assert panel.action == name
        check_refused(actions.BusyError, lambda: buttons.begin("doctor"), f"{name} is under way")
        await buttons._task
        assert panel.action is None and done.pop() == what
    queue.currently_running[0] = (0, "p", {}, {}, [])
    check_refused(actions.BusyError, lambda: buttons.tune(routes.read_asked({})), "a prompt is under way")
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

# The prompt that is cancelled is waited for, not the one that waited in the queue and begins at once.
prompts = [(number, name, {}, {}, [], {}) for number, name in enumerate(("cancelled", "next"))]
for prompt in prompts:
    queue.put(prompt)
_, item = queue.get()


def ended():
    queue.task_done(item, {}, None)
    queue.get()


stock.interrupt_processing = lambda: threading.Timer(0.1, ended).start()
actions.CANCEL_LIMIT_S = math.inf  # for the next one it would wait without end
actions._cancel_prompt()
assert [name for _, name, *_ in queue.currently_running.values()] == ["next"]
queue.currently_running.clear()

# A user folder that cannot be written.
machines = importlib.import_module(f"{NAME}.nodes.host.panel.machines")
machines.folder_paths = SimpleNamespace(get_user_directory=lambda: __file__)
offer = machines.Offer.parse("127.0.0.1:0")
remedy = "(Not a directory); free space there, let this user write there, or start ComfyUI with --user"
no_folder = ("cannot be written to", __file__, remedy)
check_refused(ValueError, lambda: machines.MACHINES.devices_of(offer, say=print), *no_folder)
assert machines.MACHINES.offered() == []

# A device that no rank has is told in the log too.
noted, logged = [], []
config.NodeText = lambda: SimpleNamespace(say=noted.append)
config.log = SimpleNamespace(info=lambda *told: logged.append(told), warning=print)
lines = config.SPConfig.execute("manual", "cpu:3", 2, 1).ui["parallel_dit"][0]["text"]
assert noted == ["\n".join(lines)] and logged == [("SP Config: %s", "cpu:2 sleeps")]
assert "cpu:1: 1/2 of the attention heads" in lines and "cpu:2 sleeps" in lines


# What the doctor is asked of: the devices that workers have, else those that they had.
def asked_of(*of_pools):
    made = [SimpleNamespace(devices=tuple(each), state=state) for state, each in of_pools]
    actions.POOLS = SimpleNamespace(all=lambda: made)
    return actions._devices()


cuda = tuple(found_devices.Device("cuda", index) for index in (2, 0, 1))
cpu = tuple(found_devices.parse_devices("cpu:2").devices)
away = (found_devices.Device("cuda", 0, "another machine"),)
all_pools = actions.POOLS
assert asked_of() == ()
assert asked_of(("stopped", cuda)) == ("--devices", "cuda:0,cuda:1,cuda:2")
assert asked_of(("stopped", cuda), ("failed", cuda[:2]), ("idle", cuda[1:2])) == ("--devices", "cuda:0,cuda:2")
assert asked_of(("idle", cuda[:1] + away), ("idle", cpu)) == ("--devices", "cuda:2")
assert asked_of(("idle", cpu)) == ("--devices", "cpu:2")

# It ends with ComfyUI, however that does.
folder = Path(tempfile.mkdtemp())
(folder / "waits.py").write_text(
    "import os, time; from pathlib import Path; Path(__file__).with_name('made').write_text(str(os.getpid()))\n"
    "Path(__file__).with_name('made').rename(Path(__file__).with_name('pid')); time.sleep(600)\n"
)
actions.this_comfyui = lambda: SimpleNamespace(path="there")
if (comfyui := os.fork()) == 0:
    os.environ["PYTHONPATH"], actions.DOCTOR = str(folder), ("waits",)
    asyncio.run(actions._examined(()))
    os._exit(0)
while not (folder / "pid").exists():
    assert os.waitpid(comfyui, os.WNOHANG) == (0, 0)
    time.sleep(0.01)
doctor = psutil.Process(int((folder / "pid").read_text()))
os.kill(comfyui, signal.SIGKILL)
os.waitpid(comfyui, 0)
until_s = time.monotonic() + 60
while psutil.pid_exists(doctor.pid) and doctor.status() != psutil.STATUS_ZOMBIE:
    assert time.monotonic() < until_s, "the doctor has outlived ComfyUI"
    time.sleep(0.01)

# What a killed ComfyUI left goes when the next one loads the pack.
extension, left = importlib.import_module(f"{NAME}.nodes.extension"), []
extension.tell_at_load, extension.off, extension.remove_left = int, lambda _: "off", lambda: left.append("gone")
asyncio.run(extension.ParallelDiTExtension().on_load())
assert left == ["gone"]

# What is added to ComfyUI's server when it loads the pack, as far as it is not switched off.
extension.add_routes, extension.watch_prompts = lambda _: left.append("routes"), lambda _: left.append("prompts")


async def renamed():
    left.append("names")


extension.register_renames = renamed
for switched_off, added in (("", ["routes", "prompts", "names"]), ("renames", ["routes", "prompts"]), ("panel", [])):
    extension.off = lambda feature, switched_off=switched_off: feature == switched_off
    left.clear()
    asyncio.run(extension.ParallelDiTExtension().on_load())
    assert left == ["gone", *added], switched_off

# What it says, and that it says nothing.
given = []
said = {
    b'{"checks": [1], "can_run": true, "other": 2}': {"state": "done", "checks": [1], "can_run": True},
    b'{"error": "no device"}': {"state": "failed", "message": "no device"},
    b"{}": {"state": "failed", "message": "the doctor gave no checks"},
    b"": {"state": "failed", "message": "the doctor ended with status 3 and said nothing"},
}
for out, shown in said.items():

    async def examined(*command, out=out, **__):
        given.append(command)

        async def communicate():
            return out, None

        return SimpleNamespace(returncode=3, communicate=communicate)

    asyncio.create_subprocess_exec = examined
    assert asyncio.run(actions._examine()) == shown, out
    again = [("--comfyui", "there")] if b"error" in out else []  # a device that is not there any more, such as one
    assert [each[each.index("--comfyui") :] for each in given] == [("--comfyui", "there", "--devices", "cpu:2"), *again]
    given.clear()
sys.platform = "win32"
message = (
    "workers need Linux, this is Windows; use ComfyUI's own nodes here; on Windows, docs/recipes.md says what to try"
)
assert asyncio.run(actions._examine()) == {"state": "failed", "message": message} and given == []
sys.platform = "linux"
actions.POOLS = all_pools


async def refused(*_, **__):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


asyncio.create_subprocess_exec = refused
message = "the doctor could not be started: Cannot allocate memory; restart ComfyUI"
assert asyncio.run(actions._examine()) == {"state": "failed", "message": message}
