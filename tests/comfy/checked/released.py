"""That a parallel MODEL goes with its last reference, whatever still asks about its file.

ComfyUI says "memory leak" of a model that outlives its MODEL, and collects all garbage again and again.
Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import gc
import importlib
import os
import sys
import tempfile
import threading
import weakref
from pathlib import Path

from trace_samplers import NAME, load

load(sys.argv[1])
sys.path.append(str(Path(__file__).resolve().parents[2]))
write_flux = importlib.import_module("host.tiny_models").write_flux

folder = tempfile.mkdtemp()
os.environ["XDG_CACHE_HOME"] = folder
new_model, choice, counting, progress = (
    importlib.import_module(f"{NAME}.{name}")
    for name in (
        *("nodes.host.model.new_model", "nodes.choice", "parallel_runtime.planner.counting"),
        "nodes.host.panel.progress",
    )
)
comfyui = importlib.import_module(f"{NAME}.nodes.host.contract.comfyui")
choice._constants = lambda devices: "a speed"  # so that a user's plan is held against auto's
manual = {"mode": "manual", "devices": "cpu:2", "ulysses": 2, "shares": "equal", "plans": "written"}
file = str(write_flux(Path(folder) / "tiny.safetensors", depth=1, single=1))


def alive_after(made):
    """Whether the model of a MODEL, which `made` makes, outlives it."""
    left = weakref.ref(made().model)
    gc.collect()
    return left() is not None


asked, begun, goes_on = [], threading.Event(), threading.Event()


def slow(path, *_):
    asked.append(path)
    begun.set()
    assert goes_on.wait(60)
    raise ValueError("it makes sound")


counting._count = slow
threads = threading.active_count()
manual_model = lambda: new_model.remote_patcher(file, "default", choice.choice_of(**manual))  # noqa: E731
assert not alive_after(manual_model), "while its file is being counted for advice"
assert begun.wait(60)
assert not alive_after(manual_model) and asked == [file], "what another one counts is waited for"
goes_on.set()
while threading.active_count() > threads:
    gc.collect()
try:
    new_model._count(manual_model().model.pooled.spec, 1)
except ValueError as error:
    assert str(error) == "it makes sound" and asked == [file], "a refusal is remembered"
else:
    raise AssertionError("counted")
assert not alive_after(manual_model), "nor does the refusal hold it"

# Where ComfyUI computes on what workers cannot, `all` finds no GPU: no model runs on the CPU unless somebody says so.
for given in ("all", "2", "cpu:2"):
    config = choice.choice_of(**{**manual, "devices": given, "ulysses": 2 if given == "cpu:2" else 1})
    config.refuse_unasked_cpu("cpu")
    try:
        config.refuse_unasked_cpu("xpu")
    except ValueError as refused:
        assert str(refused) == "ComfyUI computes on xpu, which workers cannot; use Load Diffusion Model"
    else:
        assert given == "cpu:2"
loader = importlib.import_module(f"{NAME}.nodes.loader")
main_device = comfyui.comfy.model_management.get_torch_device
comfyui.comfy.model_management.get_torch_device = lambda: importlib.import_module("torch").device("xpu", 0)
try:
    loader.load("tiny.safetensors", "default", choice.choice_of(**{**manual, "devices": "all", "ulysses": 1}))
except ValueError as refused:
    assert "xpu" in str(refused)
else:
    raise AssertionError("a model on the CPU")
comfyui.comfy.model_management.get_torch_device = main_device

# A loader whose file another node names runs again where a file that was loaded is another one, and once.
loader, made = importlib.import_module(f"{NAME}.nodes.loader"), manual_model()
as_loaded = loader.state_of(None)
assert loader.state_of(None) == as_loaded
os.utime(file, ns=(1, 1))
written = loader.state_of(None)
assert written != as_loaded
del made
gc.collect()
assert loader.state_of(None) == written
made = manual_model()
os.utime(file, ns=(2, 2))
assert loader.state_of(None) not in (as_loaded, written)
of_no_model, made = made.parent, None
gc.collect()
seen = loader.state_of(None)
os.utime(file, ns=(3, 3))
assert loader.state_of(None) == seen and of_no_model is not None
made, states = manual_model(), []
for at in (4, 3, 4):  # there and back and there again
    os.utime(file, ns=(at, at))
    states.append(loader.state_of(None))
assert states[0] == states[1] != states[2]

# Under auto the prompt waits for the count: its node says so, and the user can cancel.
said = []
progress.NodeText.say = lambda self, text: said.append(text)
cancel = comfyui.comfy.model_management.InterruptProcessingException
new_model.check_cancelled = lambda: (_ for _ in ()).throw(cancel()) if len(said) else None


def waits(path, dtype, comfy, found, size, tick):
    while True:
        tick(float(len(said)))


counting._count = waits
other = str(write_flux(Path(folder) / "other.safetensors", depth=1, single=1))
try:
    new_model.remote_patcher(other, "default", choice.choice_of(**{**manual, "mode": "auto"}))
except cancel:
    assert said == ["counting what a step of other.safetensors computes: 0 s"]
else:
    raise AssertionError("not cancelled")
