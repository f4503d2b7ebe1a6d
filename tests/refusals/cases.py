"""Every graph that is refused, the node that tells it, and what its first line must name."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from families.comfy_classes import shapes_of
from families.files import ModelFile
from families.wan import TEXT, TOKENS, wan_file
from host import workflows
from host.client import Workflow
from host.pack_workflows import parallel, to_latent
from host.tiny_models import TinyModels, write_layout
from host.workflows import node

Build = Callable[[TinyModels], Workflow]
CONFIG = node("SPConfig", mode="auto", devices="cpu:2", ulysses=1, ring=1)


@dataclass(frozen=True)
class Case:
    """`what` as the table calls it; `node` is the class whose execution fails; its first line holds all of `says`.

    `stock`: whether stock ComfyUI runs the same graph, as it must where a stock node stands for the case. `needs`: a
    node that not every ComfyUI has.
    """

    what: str
    node: str
    says: tuple[str, ...]
    build: Build
    stock: bool = False
    needs: str = ""


def ours(tiny: TinyModels) -> Workflow:
    """Parallel Flux Loader straight into KSampler."""
    return to_latent(parallel(workflows.text_to_image(tiny, width=64, height=64)))


def adopted(tiny: TinyModels, source: str = "model") -> Workflow:
    """Load Diffusion Model, then Parallelize Model behind `source`, then KSampler."""
    graph = to_latent(workflows.text_to_image(tiny, width=64, height=64))
    graph["sampler"]["inputs"]["model"] = [source, 0]
    return workflows.between(graph, "parallel", "ParallelizeModel", sp_config=["config", 0]) | {"config": CONFIG}


def between(class_type: str, **inputs: Any) -> Build:
    """A node between our loader and the sampler."""
    return lambda tiny: workflows.between(ours(tiny), "between", class_type, **inputs)


def before(class_type: str, **inputs: Any) -> Build:
    """A node between the stock loader and Parallelize Model."""

    def build(tiny: TinyModels) -> Workflow:
        graph = adopted(tiny, "before")
        return graph | {"before": node(class_type, model=["model", 0], **inputs)}

    return build


def merged(graph: Workflow, name: str) -> Workflow:
    """The graph with a merge of its MODEL with itself under `name`."""
    inputs = {"model1": ["model", 0], "model2": ["model", 0], "ratio": 0.5}
    return graph | {name: node("ModelMergeSimple", **inputs)}


def merged_after(tiny: TinyModels) -> Workflow:
    graph = merged(ours(tiny), "between")
    graph["sampler"]["inputs"]["model"] = ["between", 0]
    return graph


def saved(class_type: str, *, takes: str = "model", **more: Any) -> Build:
    """Our MODEL written to a file."""

    def build(tiny: TinyModels) -> Workflow:
        graph = ours(tiny)
        inputs = {takes: ["model", 0], "filename_prefix": "no", **more}
        graph["between"] = node(class_type, **inputs)
        return {name: graph[name] for name in ("config", "model", "clip", "vae", "between")}

    return build


def in_the_model_of_another(tiny: TinyModels) -> Workflow:
    """A node that changes the MODEL of the node before it, which copied the loader's."""
    graph = between(LATER, way="in place")(tiny)
    inputs = {"model": ["model", 0], "max_shift": 1.37, "base_shift": 0.5, "width": 64, "height": 64}
    graph["shifted"] = node("ModelSamplingFlux", **inputs)
    graph["between"]["inputs"]["model"] = ["shifted", 0]
    return graph


def patched_by(class_type: str, **inputs: Any) -> Build:
    """A node that takes inputs which nobody computes with, between the loader and the sampler."""

    def build(tiny: TinyModels) -> Workflow:
        graph = between(class_type, **inputs)(tiny)
        graph["inputs"] = node("RefusedInputs")
        graph["pictures"] = node("RandomPictures", width=64, height=64, count=1, seed=1)
        graph["encoder"] = node("RandomVAE", channels=16, spatial=8, temporal=4)
        return graph

    return build


CONTROL = "comfy.ldm.qwen_image.controlnet.QwenImageFunControlNetModel"
SIZES = {"inner_dim": 16, "num_attention_heads": 1, "attention_head_dim": 16}
FUN = ModelFile(name="tiny_fun.safetensors", class_path=CONTROL, arguments=SIZES)
CAUSAL = wan_file("causal", "t2v", heads=5, seed=33, model="ar_model.CausalWanModel")


def write_files(tiny: TinyModels) -> None:
    """Write FUN and CAUSAL once, and both at once: to ask ComfyUI for the shapes of one takes 3 s."""
    control, causal = tiny.models / "controlnet" / FUN.name, tiny.diffusion_model(CAUSAL.name)
    if control.exists():
        return
    shapes = shapes_of({file.name: (file.class_path, file.arguments) for file in (FUN, CAUSAL)})
    if CAUSAL.name in shapes:  # not every ComfyUI has it
        told = json.loads(CAUSAL.metadata["config"])["transformer"] | {"causal_ar": True}
        metadata = {"config": json.dumps({"transformer": told})}
        write_layout(causal, CAUSAL.rows(shapes[CAUSAL.name]), seed=33, metadata=metadata)
    write_layout(control, FUN.rows(shapes[FUN.name]), seed=33)


def with_fun_controlnet(tiny: TinyModels) -> Workflow:
    """A ControlNet of Qwen-Image that computes with layers of the model."""
    write_files(tiny)
    graph = ours(tiny)
    sampler = graph["sampler"]["inputs"]
    graph["net"] = node("ControlNetLoader", control_net_name=FUN.name)
    graph["pictures"] = node("RandomPictures", width=64, height=64, count=1, seed=1)
    graph["encoder"] = node("RandomVAE", channels=16, spatial=8, temporal=1)
    inputs = {"positive": sampler["positive"], "negative": sampler["negative"], "control_net": ["net", 0]}
    inputs |= {"image": ["pictures", 0], "vae": ["encoder", 0], "strength": 0.9}
    inputs |= {"start_percent": 0.0, "end_percent": 1.0}
    graph["control"] = node("ControlNetApplyAdvanced", **inputs)
    sampler["positive"], sampler["negative"] = ["control", 0], ["control", 1]
    return graph


def frame_by_frame(tiny: TinyModels) -> Workflow:
    """A causal Wan whose sampler makes a frame after the other."""
    write_files(tiny)
    inputs = {"tokens": TOKENS, "width": TEXT}
    graph: Workflow = {
        "config": CONFIG,
        "model": node("ParallelModelLoader", unet_name=CAUSAL.name, weight_dtype="default", sp_config=["config", 0]),
        "positive": node("RandomConditioning", **inputs, seed=1),
        "negative": node("RandomConditioning", **inputs, seed=2),
        "latent": node("EmptyARVideoLatent", width=64, height=64, length=5, batch_size=1),
        "frames": node("SamplerARVideo", num_frame_per_block=1),
        "sigmas": node("BasicScheduler", model=["model", 0], scheduler="simple", steps=2, denoise=1.0),
    }
    sampler = {"model": ["model", 0], "positive": ["positive", 0], "negative": ["negative", 0], "add_noise": True}
    sampler |= {"noise_seed": 1, "cfg": 1.0, "sampler": ["frames", 0], "sigmas": ["sigmas", 0]}
    graph["sampler"] = node("SamplerCustom", **sampler, latent_image=["latent", 0])
    graph["save"] = node("SaveLatent", samples=["sampler", 0], filename_prefix="latent")
    return graph


def sampled_by(kind: str) -> Build:
    """A sampler that another node brings."""

    def build(tiny: TinyModels) -> Workflow:
        graph = ours(tiny)
        given = graph["sampler"]["inputs"]
        wanted = {name: given[name] for name in ("model", "positive", "negative", "latent_image", "cfg")}
        graph["select"] = node(kind)
        graph["sigmas"] = node("BasicScheduler", model=given["model"], scheduler="simple", steps=2, denoise=1.0)
        links = {"sampler": ["select", 0], "sigmas": ["sigmas", 0]}
        graph["sampler"] = node("SamplerCustom", **wanted, **links, noise_seed=given["seed"], add_noise=True)
        return graph

    return build


def with_hook(hook: str, **inputs: Any) -> Build:
    """A change of weights on one conditioning."""

    def build(tiny: TinyModels) -> Workflow:
        graph = ours(tiny)
        strengths = {"strength_model": 1.0, "strength_clip": 0.0}
        graph["hook"] = node(hook, **inputs, **strengths)
        hooked = {"cond_NEW": ["guidance", 0], "strength": 1.0, "set_cond_area": "default", "hooks": ["hook", 0]}
        graph["hooked"] = node("ConditioningSetProperties", **hooked)
        graph["sampler"]["inputs"]["positive"] = ["hooked", 0]
        return graph

    return build


def read_by(published: str) -> Build:
    """A MODEL of a loader that reads a file of its own format, of this name."""

    def build(tiny: TinyModels) -> Workflow:
        graph = adopted(tiny)
        inputs = {"unet_name": graph["model"]["inputs"]["unet_name"], "published": published}
        return graph | {"model": node("LoadAsGGUF", **inputs)}

    return build


def on_a_device(tiny: TinyModels) -> Workflow:
    """A MODEL that a pack's loader put on another device, and a LoRA before Parallelize Model."""
    graph = adopted(tiny, "lora")
    graph["lora"] = node("LoraLoaderModelOnly", model=["model", 0], lora_name=tiny.lora_fused, strength_model=1.0)
    return graph | {"model": node("LoadOnDevice", unet_name=graph["model"]["inputs"]["unet_name"])}


def changed_before(way: str, weight_dtype: str) -> Build:
    """A MODEL that no other case has: what is done to its transformer stays."""

    def build(tiny: TinyModels) -> Workflow:
        graph = before(CHANGE, way=way)(tiny)
        graph["model"]["inputs"] |= {"unet_name": tiny.schnell, "weight_dtype": weight_dtype}
        return graph

    return build


def set_on_the_model(way: str) -> Build:
    """Something set on ComfyUI's model of a MODEL that no other case has, as it stays there."""

    def build(tiny: TinyModels) -> Workflow:
        graph = before("SetOnModel", way=way)(tiny)
        graph["model"]["inputs"]["weight_dtype"] = {"extra_conds": "fp8_e5m2", "class": "fp8_e4m3fn_fast"}[way]
        return graph

    return build


def twice(tiny: TinyModels) -> Workflow:
    """Parallelize Model behind Parallelize Model."""
    return workflows.between(adopted(tiny), "again", "ParallelizeModel", sp_config=["config", 0])


def cast_to_fp8(tiny: TinyModels) -> Workflow:
    """The stock loader asked to cast, and a node that says what to multiply in."""
    graph = adopted(tiny)
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    graph["dtype"] = node("ModelComputeDtype", model=["model", 0], dtype="bf16")
    graph["parallel"]["inputs"]["model"] = ["dtype", 0]
    return graph


def told_by(node: str, what: str, build: Build, *says: str, stock: bool = False, needs: str = "") -> Case:
    """A case by the node that tells it."""
    return Case(what, node, says, build, stock=stock, needs=needs)


def done_by(kind: str, way: str, what: str, *says: str, node: str = "KSampler", stock: bool = True) -> Case:
    """A node of probe_nodes between loader and sampler, which does what packs were seen to do; it is named."""
    return told_by(node, what, between(kind, way=way), f"{kind} (node between)", *says, stock=stock)


CHANGE = "ChangeModules"
REACH = "ReachIntoModel"
LATER = "RefusedLater"
OVERRIDE = "optimized_attention_override"
DONE_AT_ONCE = {"node": REACH, "stock": False}  # refused as the node runs
INPUTS = {"model_patch": ["inputs", 0]}
STRENGTH = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0}
TALK = {"mode": "single_speaker", "positive": ["guidance", 0], "negative": ["guidance", 0], "vae": ["encoder", 0]}
TALK |= {"width": 64, "height": 64, "length": 5, "start_image": ["pictures", 0], "motion_frame_count": 5}
TALK |= {"audio_encoder_output_1": ["inputs", 2], "audio_scale": 1.0}
LLLITE = patched_by("AnimaLLLiteApply", **INPUTS, image=["pictures", 0], **STRENGTH)
USO = patched_by("USOStyleReference", **INPUTS, clip_vision_output=["inputs", 1])
TALKING = patched_by("WanInfiniteTalkToVideo", **INPUTS, **TALK)
SAVED = saved("CheckpointSave", clip=["clip", 0], vae=["vae", 0])
EXTRACTED = saved("LoraSave", takes="model_diff", rank=1, lora_type="standard", bias_diff=False)
LORA = with_hook("CreateHookLora", lora_name=TinyModels.lora_fused)  # the defaults of fields are the files' names
HOOK = with_hook("CreateHookModelAsLora", ckpt_name=TinyModels.checkpoint)
COMPILE, DTYPE, MERGE, ADOPT = "TorchCompileModel", "ModelComputeDtype", "ModelMergeSimple", "ParallelizeModel"
SAMPLER, BETWEEN = "KSampler", "(node between)"
CASES = (
    told_by(MERGE, "Model merging", merged_after, "ModelMergeSimple (node between)", stock=True),
    told_by("ModelSave", "Save Model", saved("ModelSave"), "ModelSave (node between)", stock=True),
    told_by("CheckpointSave", "Save Checkpoint", SAVED, "Save Checkpoint (node between)"),
    told_by("LoraSave", "Extract and Save Lora", EXTRACTED, "reads the model's weights"),
    told_by("FluxKVCache", "Flux KV Cache", between("FluxKVCache"), "Flux KV Cache (node between)", stock=True),
    told_by("AnimaLLLiteApply", "Anima LLLite", LLLITE, BETWEEN, "post_input", needs="AnimaLLLiteApply"),
    told_by("USOStyleReference", "USO Style Reference", USO, BETWEEN, "post_input"),
    told_by(
        *("WanInfiniteTalkToVideo", "Wan InfiniteTalk", TALKING, BETWEEN, "attn2_patch"), needs="WanInfiniteTalkToVideo"
    ),
    told_by(
        *("SamplerCustom", "Sampler AR Video", frame_by_frame, "Sampler AR Video (node frames)", "ar_state"),
        needs="SamplerARVideo",
    ),
    told_by(SAMPLER, "Qwen Fun ControlNet", with_fun_controlnet, "(node control)", "QwenFunControlNet"),
    done_by(LATER, "at each step", "Attention of another kind at each step (block sparse attention)", OVERRIDE),
    done_by(
        *(CHANGE, "method for a call", "A method replaced for the time of a call (TeaCache, MagCache, WaveSpeed)"),
        "replaces diffusion_model.forward_orig",
    ),
    done_by(
        *(CHANGE, "forward for a call", "The forward replaced for the time of a call (TeaCache, NAG's samplers)"),
        "replaces diffusion_model.forward,",
    ),
    done_by(
        *(CHANGE, "blocks for a call", "Blocks replaced for the time of a call (WaveSpeed)"),
        "replaces diffusion_model.single_blocks",
    ),
    done_by(
        *(CHANGE, "inner method for a call", "A method of a block replaced for the time of a call (Comfy Couple)"),
        "replaces diffusion_model.single_blocks.0.forward,",
    ),
    done_by(
        *(CHANGE, "inner method around a call", "A method of a block replaced around the model's call"),
        "replaces diffusion_model.single_blocks.0.forward,",
    ),
    done_by(
        *(CHANGE, "inner method for a run", "A method of a block replaced for the time of a run"),
        "replaces diffusion_model.single_blocks.0.forward,",
    ),
    told_by(
        *("SamplerCustom", "A method of a block replaced by a sampler while it samples"),
        *(sampled_by("ChangeWhileSampling"), "ChangeWhileSampling (node select)"),
        "replaces diffusion_model.single_blocks.0.forward,",
        stock=True,
    ),
    done_by(
        *(CHANGE, "value for a call", "A value that a module computes by (WanMotionScaleAdvanced)"),
        "sets diffusion_model.single_blocks.0.scale,",
    ),
    done_by(
        *(CHANGE, "attention for a call", "A function of ComfyUI's replaced for the time of a call (RadialAttn)"),
        "replaces comfy.ldm.flux.layers.attention",
    ),
    done_by(
        *(CHANGE, "inner attention for a call", "A function of a file without classes, for the time of a call"),
        "replaces comfy.ldm.flux.math.optimized_attention",
    ),
    done_by(
        *(CHANGE, "method of a class", "A method replaced on a class of ComfyUI's"),
        "replaces comfy.ldm.flux.layers.SingleStreamBlock.forward",
    ),
    done_by(LATER, "go on", "A patch that a node goes on without", "double_block"),
    done_by(
        *(LATER, "compile and go on", "Compiling that a node goes on without", "compiles", "compiled=blocks"),
        stock=False,
    ),
    done_by(LATER, "read and go on", "Weights read by a node that goes on without", "reads the model's weights"),
    told_by(
        *(SAMPLER, "Another attention function, in the MODEL of the node before", in_the_model_of_another),
        *("RefusedLater (node between)", OVERRIDE),
        stock=True,
    ),
    told_by(SAMPLER, "A patch by a node inside of another node", between("PatchInside"), BETWEEN, OVERRIDE, stock=True),
    told_by(
        *(DTYPE, DTYPE, between(DTYPE, dtype="bf16"), f"{DTYPE} {BETWEEN}", "weight_dtype in Parallel Model Loader"),
        stock=True,
    ),
    told_by(SAMPLER, "Hook LoRA", LORA, "Create Hook LoRA (node hook)", stock=True),
    told_by(SAMPLER, "Hook of a model", HOOK, "Create Hook Model as LoRA (node hook)"),
    told_by(
        *(COMPILE, f"{COMPILE} after our loader", between(COMPILE, backend="inductor"), f"{COMPILE} {BETWEEN}"),
        "compiles",
    ),
    told_by(
        *(ADOPT, f"{COMPILE} before Parallelize Model", before(COMPILE, backend="inductor"), f"{COMPILE} (node before)")
    ),
    done_by(
        *(REACH, "copy to device", "MultiGPU CFG Split (and Select Model Device to another device)"),
        "name those devices in SP Config",
        **DONE_AT_ONCE,
    ),
    told_by(
        *(ADOPT, "MultiGPU CFG Split before Parallelize Model", before(REACH, way="copy to device")),
        *("ReachIntoModel (node before)", "copies the model", "name those devices in SP Config"),
        needs="MultiGPU_WorkUnits",
    ),
    told_by(
        *(ADOPT, "Select Model Device before Parallelize Model", before(REACH, way="select device")),
        *("ReachIntoModel (node before)", "puts the model on cuda:1", "name that device in SP Config"),
    ),
    told_by(
        *(ADOPT, "A loader for another device, and a LoRA, before Parallelize Model (MultiGPU)", on_a_device),
        *("LoadOnDevice (node model): it puts the model on cuda:1", "load the file by Parallel Model Loader"),
    ),
    done_by(REACH, "inject", "Injections", "injects modules", node=REACH),
    told_by(
        *(ADOPT, "Injections before Parallelize Model", before(REACH, way="inject")),
        *("ReachIntoModel (node before)", "injects"),
    ),
    done_by(REACH, "wrap weight", "Wrapped weights", "wraps weights", **DONE_AT_ONCE),
    done_by(REACH, "replace layer", "A layer replaced", "replaces diffusion_model.img_in", **DONE_AT_ONCE),
    done_by(REACH, "move layer", "A layer moved to a device (WanVideoNAG)", "reads the model's weights", node=REACH),
    done_by(REACH, "patch block", "Patches inside of blocks", "double_block", **DONE_AT_ONCE),
    done_by(REACH, "replace block", "Blocks replaced", "single_block 1", node=REACH),
    done_by(REACH, "override attention", "Another attention function", OVERRIDE),
    told_by(
        *(ADOPT, "Model merging before Parallelize Model", lambda tiny: merged(adopted(tiny, "merged"), "merged")),
        *("ModelMergeSimple (node merged)", "another model's weights"),
    ),
    told_by(
        *(ADOPT, "The transformer's class replaced before Parallelize Model", changed_before("class", "fp8_e4m3fn")),
        *("ChangeModules (node before)", "replaces the class of diffusion_model,"),
    ),
    told_by(
        *(ADOPT, "A method of ComfyUI's model replaced before Parallelize Model (FlexTools)"),
        *(set_on_the_model("extra_conds"), "SetOnModel (node before): it replaces extra_conds, which"),
    ),
    told_by(
        *(ADOPT, "The class of ComfyUI's model replaced before Parallelize Model", set_on_the_model("class")),
        *("SetOnModel (node before): it replaces the class of Flux, which",),
    ),
    told_by(
        *(ADOPT, "A value set before Parallelize Model", changed_before("value for good", "fp8_e5m2")),
        *("ChangeModules (node before)", "sets diffusion_model.single_blocks.0.scale,"),
    ),
    told_by(
        *(ADOPT, "Blocks replaced for the time of a call before Parallelize Model (WaveSpeed, MagCache)"),
        *(before(CHANGE, way="blocks for a call"), "ChangeModules (node before): it keeps the transformer"),
    ),
    told_by(
        *(ADOPT, "Another MODEL made of the stock loader's before Parallelize Model (AnimateDiff Evolved)"),
        *(before("MakeAnotherModel"), "MakeAnotherModel (node before): it hands on another MODEL,"),
    ),
    told_by(
        *(SAMPLER, "Another MODEL made of ours", between("MakeAnotherModel")),
        "MakeAnotherModel (node between): it moves the model's weights, or hands on another MODEL",
    ),
    told_by(
        *(ADOPT, "A GGUF file of a model that has an int8 file", read_by("z_image_turbo-Q4_K_M.gguf")),
        *("LoadAsGGUF (node model)", "with z_image_turbo_int8_convrot.safetensors"),
    ),
    told_by(
        *(ADOPT, "A GGUF file of another model, or a loader of classes of its own (nunchaku)"),
        *(read_by("svdq-int4_r32-flux.1-dev.gguf"), "LoadAsGGUF (node model)", "in int8 or fp8"),
    ),
    told_by(ADOPT, "Parallelize Model twice", twice, "parallel already", "change SP Config"),
    told_by(ADOPT, "A cast to fp8, and another dtype", cast_to_fp8, "remove ModelComputeDtype", "default"),
)
