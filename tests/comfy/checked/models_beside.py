"""The other models of the prompt that runs, on the same devices, in the size of the file of the node that executes.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

from trace_samplers import NAME, load

load(sys.argv[1])
beside = importlib.import_module(f"{NAME}.nodes.host.model.models_beside")
server = importlib.import_module("server").PromptServer.instance
utils = importlib.import_module("comfy_execution.utils")
SIZES = {"high": 100, "low": 120, "half": 50, "sd": 200}
beside.os = SimpleNamespace(
    path=SimpleNamespace(getsize=lambda path: SIZES[Path(path).name], isfile=lambda path: path.startswith("/"))
)
beside.folder_paths = SimpleNamespace(get_full_path=lambda folder, name: f"/{folder}/{name}" if name in SIZES else None)
running = server.prompt_queue.currently_running


def graph_of(wanted=None, **nodes):
    """Have a prompt run, of nodes by their ids: the class and the inputs of each. `wanted`: what is to be made."""
    queued = {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()}
    running[0] = (0, "p", queued, {}, list(nodes) if wanted is None else wanted)


def beside_of(name, node="here"):
    with utils.CurrentNodeContext("p", node):
        return beside.models_beside(f"/diffusion_models/{name}")


CONFIG, OTHER = ("SPConfig", {"devices": "all"}), ("SPConfig", {"devices": "cpu:2"})
HERE = ("ParallelModelLoader", {"unet_name": "high", "sp_config": ["config", 0]})
assert beside_of("high") == 0, "no prompt runs"
graph_of(config=CONFIG, here=HERE)
assert beside_of("high") == beside_of("high", "of a subgraph") == 0 and beside.models_beside("/x/high") == 0
loader = ("ParallelFluxLoader", {"unet_name": "low", "sp_config": ["again", 0]})
graph_of(config=CONFIG, again=CONFIG, here=HERE, low=loader, twice=loader, same=HERE)
assert beside_of("high") == 1.2 and beside_of("low", "low") == 100 / 120, "each file once"
far = ("SPConfig", {"devices": "all", "machines": "10.0.0.2:1"})
for elsewhere in (OTHER, far, ("SPConfig", {})):
    graph_of(config=CONFIG, again=elsewhere, here=HERE, low=loader)
    assert beside_of("high") == 0, "its weights lie on other devices"
graph_of(
    ["save", "gone"], config=CONFIG, again=CONFIG, here=HERE, low=loader, save=("SaveLatent", {"samples": ["here", 0]})
)
assert beside_of("high") == 0, "nothing that is made depends on the other"
graph_of(["save"], config=CONFIG, again=CONFIG, here=HERE, low=loader, save=("X", {"a": ["low", 0], "b": ["here", 0]}))
assert beside_of("high") == 1.2

# What Parallelize Model makes ours is of the file that its MODEL began with; one that names no file is as large.
STOCK = {
    "unet": ("UNETLoader", {"unet_name": "half"}),
    "lora": ("LoraLoaderModelOnly", {"model": ["unet", 0], "lora_name": "x"}),
    "ours": ("ParallelizeModel", {"model": ["lora", 0], "sp_config": ["config", 0]}),
    "checkpoint": ("CheckpointLoaderSimple", {"ckpt_name": "sd"}),
    "both": ("LoraLoader", {"clip": ["checkpoint", 1], "model": ["checkpoint", 0]}),
    "more": ("ParallelizeModel", {"model": ["both", 0], "sp_config": ["config", 0]}),
    "number": ("PrimitiveFloat", {"value": 0.5}),
    "linked": ("LoraLoaderModelOnly", {"strength_model": ["number", 0], "model": ["unet", 0]}),
    "strong": ("ParallelizeModel", {"model": ["linked", 0], "sp_config": ["config", 0]}),
    "gguf": ("AnotherLoader", {"file": "x", "models": [["a", 1.0], ["b", 0.5]], "odd": [{"a": 1}, 2]}),
    "odd": ("ParallelizeModel", {"model": ["gguf", 0], "sp_config": ["config", 0]}),
    "gone": ("ParallelModelLoader", {"unet_name": "gone", "sp_config": ["config", 0]}),
    "round": ("ParallelizeModel", {"model": ["round", 0], "sp_config": ["config", 0]}),
    "sampler": ("KSampler", {}),
}
for names, times in (
    (("unet", "lora", "ours"), 0.5),
    (("checkpoint", "both", "more"), 2.0),
    (("unet", "number", "linked", "strong"), 0.5),
    (("gguf", "odd"), 1.0),
    (("gone",), 1.0),
    (("round",), 1.0),
    (("ours",), 1.0),
    (("sampler",), 0.0),
    (STOCK, 5.5),
):
    graph_of(config=CONFIG, here=HERE, **{name: STOCK[name] for name in names})
    assert beside_of("high") == times, (names, beside_of("high"))
