"""Every graph that is refused, the node that tells it, and what its first line must name.

Owns: the graphs. Does not own: files that cannot be used (tests/comfy/test_nodes_bad_input.py), running them
(test_refusals.py), the table (table.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save_file

from host import workflows
from host.client import Workflow
from host.pack_workflows import parallel, to_latent
from host.tiny_models import TinyModels

Build = Callable[[TinyModels], Workflow]
CONFIG = {"class_type": "SPConfig", "inputs": {"mode": "auto", "devices": "cpu:2", "ulysses": 1, "ring": 1}}
LORA_WITH_A_CORE = "tiny_lora_with_a_core.safetensors"


@dataclass(frozen=True)
class Case:
    """`what` as the table calls it; `node` is the class whose execution fails; its first line holds all of `says`.

    `stock`: whether stock ComfyUI runs the same graph, as it must where a stock node stands for the case.
    """

    what: str
    node: str
    says: tuple[str, ...]
    build: Build
    stock: bool = False


def ours(tiny: TinyModels) -> Workflow:
    """Parallel Flux Loader straight into KSampler."""
    return to_latent(parallel(workflows.text_to_image(tiny, width=64, height=64)))


def adopted(tiny: TinyModels, source: str = "model") -> Workflow:
    """Load Diffusion Model, then Parallelize Model behind `source`, then KSampler."""
    graph = to_latent(workflows.text_to_image(tiny, width=64, height=64))
    graph["parallel"] = {"class_type": "ParallelizeModel", "inputs": {"model": [source, 0], "sp_config": ["config", 0]}}
    graph["sampler"]["inputs"]["model"] = ["parallel", 0]
    return graph | {"config": CONFIG}


def between(class_type: str, **inputs: Any) -> Build:
    """A node between our loader and the sampler."""

    def build(tiny: TinyModels) -> Workflow:
        graph = ours(tiny)
        graph["between"] = {"class_type": class_type, "inputs": {"model": ["model", 0], **inputs}}
        graph["sampler"]["inputs"]["model"] = ["between", 0]
        return graph

    return build


def before(class_type: str, **inputs: Any) -> Build:
    """A node between the stock loader and Parallelize Model."""

    def build(tiny: TinyModels) -> Workflow:
        graph = adopted(tiny, "before")
        return graph | {"before": {"class_type": class_type, "inputs": {"model": ["model", 0], **inputs}}}

    return build


def merged(graph: Workflow, name: str) -> Workflow:
    """The graph with a merge of its MODEL with itself under `name`."""
    inputs = {"model1": ["model", 0], "model2": ["model", 0], "ratio": 0.5}
    return graph | {name: {"class_type": "ModelMergeSimple", "inputs": inputs}}


def merged_after(tiny: TinyModels) -> Workflow:
    """Our MODEL merged."""
    graph = merged(ours(tiny), "between")
    graph["sampler"]["inputs"]["model"] = ["between", 0]
    return graph


def saved(class_type: str, **more: Any) -> Build:
    """Our MODEL written to a file."""

    def build(tiny: TinyModels) -> Workflow:
        graph = ours(tiny)
        inputs = {"model": ["model", 0], "filename_prefix": "no", **more}
        graph["between"] = {"class_type": class_type, "inputs": inputs}
        return {name: graph[name] for name in ("config", "model", "clip", "vae", "between")}

    return build


def with_hook(hook: str, **inputs: Any) -> Build:
    """A change of weights on one conditioning."""

    def build(tiny: TinyModels) -> Workflow:
        graph = ours(tiny)
        strengths = {"strength_model": 1.0, "strength_clip": 0.0}
        graph["hook"] = {"class_type": hook, "inputs": {**inputs, **strengths}}
        hooked = {"cond_NEW": ["guidance", 0], "strength": 1.0, "set_cond_area": "default", "hooks": ["hook", 0]}
        graph["hooked"] = {"class_type": "ConditioningSetProperties", "inputs": hooked}
        graph["sampler"]["inputs"]["positive"] = ["hooked", 0]
        return graph

    return build


def lora_with_a_core(tiny: TinyModels) -> Workflow:
    """A LoCon file: a third matrix between the two."""
    hidden, module = tiny.shape.hidden, "diffusion_model.double_blocks.0.img_attn.proj"
    tensors = {"up": torch.ones(hidden, 4, 1, 1), "down": torch.ones(4, hidden, 1, 1), "mid": torch.ones(4, 4, 1, 1)}
    path = tiny.models / "loras" / LORA_WITH_A_CORE
    if not path.exists():
        save_file({f"{module}.lora_{name}.weight": value for name, value in tensors.items()}, path)
    return workflows.with_lora(ours(tiny), LORA_WITH_A_CORE)


def twice(tiny: TinyModels) -> Workflow:
    """Parallelize Model behind Parallelize Model."""
    graph = adopted(tiny)
    graph["again"] = {
        "class_type": "ParallelizeModel",
        "inputs": {"model": ["parallel", 0], "sp_config": ["config", 0]},
    }
    graph["sampler"]["inputs"]["model"] = ["again", 0]
    return graph


def cast_to_fp8(tiny: TinyModels) -> Workflow:
    """The stock loader asked to cast, and a node that says what to multiply in."""
    graph = adopted(tiny)
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    graph["dtype"] = {"class_type": "ModelComputeDtype", "inputs": {"model": ["model", 0], "dtype": "bf16"}}
    graph["parallel"]["inputs"]["model"] = ["dtype", 0]
    return graph


SKIPPED = {"double_layers": "0", "single_layers": "0", "scale": 3.0, "rescaling_scale": 0.0}
SKIPPED |= {"start_percent": 0.0, "end_percent": 1.0}
REACH = "ReachIntoModel"
REACHED = "ReachIntoModel (node between)"
NAMES = TinyModels  # the defaults of its fields are the files' names
CASES = (
    Case("Model merging", "ModelMergeSimple", ("ModelMergeSimple (node between)",), merged_after, stock=True),
    Case("Save Model", "ModelSave", ("ModelSave (node between)",), saved("ModelSave"), stock=True),
    Case(
        "Save Checkpoint",
        "CheckpointSave",
        ("Save Checkpoint (node between)",),
        saved("CheckpointSave", clip=["clip", 0], vae=["vae", 0]),
    ),
    Case("Flux KV Cache", "FluxKVCache", ("Flux KV Cache (node between)",), between("FluxKVCache"), stock=True),
    Case(
        "Skip Layer Guidance",
        "KSampler",
        ("SkipLayerGuidanceDiT", "double_block 0, single_block 0"),
        between("SkipLayerGuidanceDiT", **SKIPPED),
    ),
    Case(
        "ModelComputeDtype",
        "ModelComputeDtype",
        ("ModelComputeDtype (node between)", "weight_dtype in Parallel Model Loader"),
        between("ModelComputeDtype", dtype="bf16"),
        stock=True,
    ),
    Case(
        "Hook LoRA",
        "KSampler",
        ("remove Create Hook LoRA",),
        with_hook("CreateHookLora", lora_name=NAMES.lora_fused),
        stock=True,
    ),
    Case(
        "Hook of a model",
        "KSampler",
        ("Create Hook Model as LoRA",),
        with_hook("CreateHookModelAsLora", ckpt_name=NAMES.checkpoint),
    ),
    Case(
        "TorchCompileModel after our loader",
        "TorchCompileModel",
        ("TorchCompileModel (node between)", "compiles"),
        between("TorchCompileModel", backend="inductor"),
    ),
    Case(
        "TorchCompileModel before Parallelize Model",
        "ParallelizeModel",
        ("remove TorchCompileModel",),
        before("TorchCompileModel", backend="inductor"),
    ),
    Case(
        "MultiGPU CFG Split (and Select Model Device to another device)",
        REACH,
        (REACHED, "name those devices in SP Config"),
        between(REACH, way="copy to device"),
    ),
    Case("Injections", REACH, (REACHED, "injects modules"), between(REACH, way="inject"), stock=True),
    Case("Injections before Parallelize Model", "ParallelizeModel", ("injected",), before(REACH, way="inject")),
    Case("Wrapped weights", REACH, (REACHED, "wraps weights"), between(REACH, way="wrap weight")),
    Case("A layer replaced", REACH, (REACHED, "replaces diffusion_model.img_in"), between(REACH, way="replace layer")),
    Case("Patches inside of blocks", REACH, (REACHED, "double_block"), between(REACH, way="patch block")),
    Case("Blocks replaced", REACH, (REACHED, "single_block 1"), between(REACH, way="replace block"), stock=True),
    Case(
        "Another attention function",
        "KSampler",
        ("optimized_attention_override",),
        between(REACH, way="override attention"),
        stock=True,
    ),
    Case(
        "A LoRA with a core (LoCon)", "LoraLoaderModelOnly", ("remove the LoRA loader",), lora_with_a_core, stock=True
    ),
    Case(
        "Model merging before Parallelize Model",
        "ParallelizeModel",
        ("another model's weights", "remove"),
        lambda tiny: merged(adopted(tiny, "merged"), "merged"),
    ),
    Case("Parallelize Model twice", "ParallelizeModel", ("parallel already", "change SP Config"), twice),
    Case("A cast to fp8, and another dtype", "ParallelizeModel", ("remove ModelComputeDtype", "default"), cast_to_fp8),
)
