"""What becomes of a template: small enough for a test machine, then with the pack's loader, then without exchange.

Owns: graphs in API form, in and out; nothing is run. `small` keeps what the samplers need and puts stand-ins in the
place of what loads files (models.py) or makes an input; every other node, each link and each value is the template's
own but sizes, lengths and steps. `ours` swaps the loader alone.
"""

from __future__ import annotations

import copy
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from families.graphs import node as node_of
from host.client import Workflow

from .models import Tiny, tiny_of, vae_of

Info = Mapping[str, Mapping[str, Any]]
Link = list[Any]
SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced")
DIFFUSION_MODEL = "UNETLoader"
CHECKPOINTS = ("CheckpointLoaderSimple", "ImageOnlyCheckpointLoader")
LORAS = ("LoraLoader", "LoraLoaderModelOnly")
LOADED = ("CLIP", "VAE", "CLIP_VISION", "CONTROL_NET", "STYLE_MODEL", "MODEL_PATCH")
# Nodes that load or compute what no test machine has; what they give is made up by its type.
MADE_UP = {"LoadImage", "LoadImageMask", "LoadImageOutput", "LoadVideo", "LoadAudio", "RecordAudio", "Painter"}
MADE_UP |= {"TextGenerate", "TextGenerateLTX2Prompt", "SAM3_Detect", "DA3Inference", "DA3Render", "MoGeInference"}
MADE_UP |= {"MoGeRender", "RemoveBackground", "AudioEncoderEncode", "ImageUpscaleWithModel", "VOIDWarpedNoise"}
CONSTANTS: dict[str, Any] = {"STRING": "a lighthouse at dusk", "INT": 64, "FLOAT": 1.0, "BOOLEAN": False}
WIDTH, HEIGHT, LENGTH, SECONDS = 224, 160, 17, 2.0
MEGAPIXELS = WIDTH * HEIGHT / 1e6
MOST = {
    **dict.fromkeys(("width", "largest_size", "longer_edge", "resolution", "target_width", "size"), WIDTH),
    **dict.fromkeys(("height", "shorter_edge", "target_height"), HEIGHT),
    **dict.fromkeys(("length", "video_length", "num_frames", "frames_number", "video_frames", "amount"), LENGTH),
}
SMALL_FLOATS = {"megapixels": MEGAPIXELS, "seconds": SECONDS, "duration": SECONDS}
ANY = ("*", "COMFY_MATCHTYPE_V3")
MODELS = ("MODEL", "GUIDER", *ANY)  # what a model goes through to its sampler
CONDITIONED_BY = ("LATENT", "IMAGE", "MASK", "AUDIO", "VIDEO", "STRING")  # through these no encoder's width matters


class NotTriedError(ValueError):
    """There is nothing to compare; the text says why, for the table."""


@dataclass
class Small:
    """A template made small: its graph, the files that it needs, and the names of its weights' types."""

    graph: Workflow
    files: list[tuple[str, Tiny]] = field(default_factory=list)

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks share the tokens of each of its models."""
        return all(tiny.shares_tokens for _, tiny in self.files)

    @property
    def models(self) -> list[str]:
        """The tiny files that stand for its models."""
        return sorted({tiny.name.removeprefix("tiny_").removesuffix(".safetensors") for _, tiny in self.files})


def links(node: Mapping[str, Any]) -> Iterator[tuple[str, Link]]:
    """The inputs of a node that other nodes give."""
    for name, value in node["inputs"].items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
            yield name, value


def needed(graph: Workflow, ends: Sequence[str]) -> Workflow:
    """The nodes that these and what they need are. Raises NotTriedError for a link to a node that is not there."""
    kept: Workflow = {}
    waiting = list(ends)
    while waiting:
        name = waiting.pop()
        if name in kept:
            continue
        if name not in graph:
            raise NotTriedError(f"node {name}, which another one is linked to, is not in the graph")
        kept[name] = copy.deepcopy(graph[name])
        waiting += [source for _, (source, _) in links(graph[name])]
    return kept


def small(graph: Workflow, info: Info) -> Small:
    """The template's graph up to its samplers, whose every latent is kept. Raises NotTriedError where it cannot be."""
    samplers = [name for name, node in graph.items() if node["class_type"] in SAMPLERS]
    if not samplers:
        raise NotTriedError("no stock sampler node is active in it")
    made = _Making(needed(graph, samplers), info)
    made.replace_sources()
    graph = made.graph = needed(made.graph, samplers)
    if not any(node["class_type"] in (DIFFUSION_MODEL, *CHECKPOINTS) for node in graph.values()):
        raise NotTriedError("no loader of a model is active in it")
    made.load_tiny_files()
    made.make_small()
    for name in samplers:
        outputs = info[graph[name]["class_type"]]["output"]
        for slot, kind in enumerate(outputs):
            if kind == "LATENT":
                graph[f"keep {name} {slot}"] = node_of("KeepLatent", samples=[name, slot], name=f"{name} {slot}")
    return Small(graph, made.files)


def ours(made: Small, plan: Mapping[str, Any]) -> Workflow:
    """The same graph with Parallel Model Loader for Load Diffusion Model, and Parallelize Model behind checkpoints."""
    return _swapped(made, plan, lambda graph, name: [name, 0])


def without_exchange(made: Small, plan: Mapping[str, Any], *, rows: bool) -> Workflow:
    """The same whose ranks exchange nothing: what has to differ. `rows`: ranks that share a batch's rows."""

    def switched_off(graph: Workflow, name: str) -> Link:
        graph[f"control {name}"] = node_of("SwitchOffExchange", model=[name, 0], rows=rows)
        return [f"control {name}", 0]

    return _swapped(made, plan, switched_off)


def _swapped(made: Small, plan: Mapping[str, Any], then: Callable[[Workflow, str], Link]) -> Workflow:
    graph = copy.deepcopy(made.graph)
    graph["config"] = node_of("SPConfig", **plan)
    for name, node in list(graph.items()):
        if node["class_type"] == DIFFUSION_MODEL:
            node["class_type"] = "ParallelModelLoader"
            node["inputs"] |= {"sp_config": ["config", 0]}
            users, swapped = _users(graph, [name, 0]), name
        elif node["class_type"] in CHECKPOINTS:
            users, swapped = _users(graph, [name, 0]), f"parallel {name}"
            if users:
                graph[swapped] = node_of("ParallelizeModel", model=[name, 0], sp_config=["config", 0])
        else:
            continue
        link = then(graph, swapped) if users else None
        for inputs, key in users:
            inputs[key] = link
    return graph


def _users(graph: Workflow, link: Link) -> list[tuple[dict[str, Any], str]]:
    return [(node["inputs"], key) for node in graph.values() for key, value in links(node) if value == link]


class _Making:
    """One graph on its way to a small one."""

    def __init__(self, graph: Workflow, info: Info) -> None:
        self.graph, self.info = graph, info
        self.files: list[tuple[str, Tiny]] = []

    def kind(self, link: Link, user: str = "", key: str = "") -> str:
        """The type of what a link carries; of a node that this ComfyUI does not have, by what takes it."""
        outputs = self.info.get(str(self.graph[link[0]]["class_type"]), {}).get("output", ())
        found = outputs[link[1]] if link[1] < len(outputs) else None
        if found is None and user:
            inputs = self.info.get(str(self.graph[user]["class_type"]), {}).get("input", {})
            found = next((part[key][0] for part in inputs.values() if key in part), None)
        return found if isinstance(found, str) else "COMBO" if found else "unknown"

    def replace_sources(self) -> None:
        """Puts a stand-in in the place of each output that a file or a large model gives."""
        for name, node in list(self.graph.items()):
            for key, link in list(links(node)):
                kind, source = self.kind(link, name, key), str(self.graph[link[0]]["class_type"])
                if kind in LOADED and "Loader" in source:
                    node["inputs"][key] = self._loaded(kind, link)
                elif source in MADE_UP or source not in self.info:
                    node["inputs"][key] = self._made_up(kind, link)

    def _loaded(self, kind: str, link: Link) -> Link:
        stand_in = f"small {link[0]} {link[1]}"
        if stand_in not in self.graph:
            self.graph[stand_in] = getattr(self, f"_{kind.lower()}")(link)
        return [stand_in, 0]

    def _made_up(self, kind: str, link: Link) -> object:
        source = str(self.graph[link[0]]["class_type"])
        if kind in CONSTANTS:
            return CONSTANTS[kind]
        stand_in, seed = f"small {link[0]} {link[1]}", zlib.crc32(link[0].encode()) % 1000
        size = {"width": WIDTH, "height": HEIGHT}
        pictures = node_of("RandomPictures", **size, count=1, seed=seed)
        if kind == "IMAGE":
            made = pictures
        elif kind == "MASK":
            self.graph[f"picture of {stand_in}"] = pictures
            made = node_of("ImageToMask", image=[f"picture of {stand_in}", 0], channel="red")
        elif kind == "VIDEO":
            pictures["inputs"]["count"] = LENGTH
            self.graph[f"pictures of {stand_in}"] = pictures
            self.graph[f"sound of {stand_in}"] = node_of("RandomSound", seconds=SECONDS, seed=seed)
            images, sound = [f"pictures of {stand_in}", 0], [f"sound of {stand_in}", 0]
            made = node_of("CreateVideo", images=images, audio=sound, fps=24.0)
        elif kind == "AUDIO":
            made = node_of("RandomSound", seconds=SECONDS, seed=seed)
        elif kind == "AUDIO_ENCODER_OUTPUT":
            layers, frames, width = self._one_tiny(link).hearing
            made = node_of("StandInHearing", layers=layers, frames=frames, width=width)
        else:
            raise NotTriedError(f"{source} gives {kind}, which nothing stands for")
        self.graph[stand_in] = made
        return [stand_in, 0]

    def _clip(self, link: Link) -> dict[str, Any]:
        return node_of("StandInText", sizes=json.dumps(self._one_tiny(link).text))

    def _clip_vision(self, link: Link) -> dict[str, Any]:
        tokens, width, wide = self._one_tiny(link).vision
        return node_of("StandInVision", tokens=tokens, width=width, wide=wide)

    def _vae(self, link: Link) -> dict[str, Any]:
        node = self.graph[link[0]]
        if node["class_type"] == "LTXVAudioVAELoader":
            return node_of("RandomSoundVAE", kind="spectral")
        name = next((str(value) for key, value in node["inputs"].items() if key in ("vae_name", "ckpt_name")), "")
        sizes = vae_of(name)
        if sizes is None:
            raise NotTriedError(f"nothing stands for the VAE {name}")
        return node_of("RandomVAE", **dict(zip(("channels", "spatial", "temporal"), sizes, strict=True)))

    def _refused(self, link: Link) -> dict[str, Any]:
        node = self.graph[link[0]]
        loaded = [value for value in node["inputs"].values() if isinstance(value, str)]
        raise NotTriedError(f"nothing stands for {', '.join(loaded) or node['class_type']} of {node['class_type']}")

    _control_net = _style_model = _model_patch = _refused

    def _one_tiny(self, link: Link) -> Tiny:
        """The tiny model whose conditionings an encoder makes. Raises NotTriedError where these are several kinds."""
        reached, waiting, found = set(), [link[0]], {}
        while waiting:
            source = waiting.pop()
            for name, node in self.graph.items():
                for key, each in links(node):
                    if each[0] != source or self.kind(each, name, key) in CONDITIONED_BY and source != link[0]:
                        continue
                    if node["class_type"] in SAMPLERS:
                        found |= {tiny.name: tiny for tiny in self._sampled(name)}
                    elif name not in reached:
                        reached.add(name)
                        waiting.append(name)
        if len(found) != 1:
            raise NotTriedError(f"an encoder conditions {len(found)} kinds of models: {', '.join(found)}")
        return next(iter(found.values()))

    def _sampled(self, sampler: str) -> Iterator[Tiny]:
        """The tiny models that a sampler calls."""
        reached, waiting = set(), [sampler]
        while waiting:
            name = waiting.pop()
            node = self.graph[name]
            if node["class_type"] in (DIFFUSION_MODEL, *CHECKPOINTS):
                yield self._tiny(node)
            for key, link in links(node):
                if link[0] not in reached and self.kind(link, name, key) in MODELS:
                    reached.add(link[0])
                    waiting.append(link[0])

    def _tiny(self, loader: Mapping[str, Any]) -> Tiny:
        name = str(loader["inputs"].get("unet_name") or loader["inputs"].get("ckpt_name"))
        tiny = tiny_of(name)
        if tiny is None:
            raise NotTriedError(f"no tiny file stands for {name}")
        return tiny

    def load_tiny_files(self) -> None:
        """The tiny files in the place of those that the template names, LoRAs with them."""
        for name, node in self.graph.items():
            kind, inputs = node["class_type"], node["inputs"]
            if kind == DIFFUSION_MODEL:
                self._use("diffusion_models", inputs, "unet_name", [self._tiny(node)])
            elif kind in CHECKPOINTS:
                self._use("checkpoints", inputs, "ckpt_name", [self._tiny(node)])
            elif kind in LORAS:
                self._use("loras", inputs, "lora_name", list(self._sampled(name)))

    def _use(self, folder: str, inputs: dict[str, Any], key: str, tinies: Sequence[Tiny]) -> None:
        if not tinies:
            raise NotTriedError(f"no model reaches the LoRA {inputs[key]}")
        self.files.append((folder, tinies[0]))
        inputs[key] = tinies[0].name

    def make_small(self) -> None:
        """Sizes, lengths and steps, whoever says them."""
        split = any(node["class_type"] == "SplitSigmas" for node in self.graph.values())
        for name, node in list(self.graph.items()):
            if name.startswith("small "):
                continue
            if node["class_type"] == "FluxKontextImageScale":
                inputs = {"image": node["inputs"]["image"], "upscale_method": "lanczos", "crop": "center"}
                self.graph[name] = node_of("ImageScale", **inputs, width=WIDTH, height=HEIGHT)
                continue
            inputs = node["inputs"]
            for key in list(inputs):
                last = key.split(".")[-1]
                if last in SMALL_FLOATS and isinstance(inputs[key], int | float):
                    inputs[key] = min(inputs[key], SMALL_FLOATS[last])
                elif last in MOST:
                    self._at_most(name, key, MOST[last])
            if "steps" in inputs and not split:
                self._few_steps(name)

    def _at_most(self, name: str, key: str, most: int) -> None:
        inputs = self.graph[name]["inputs"]
        if isinstance(inputs[key], list):
            if self.kind(inputs[key]) not in ("INT", *ANY):
                return
            self.graph[f"at most {name} {key}"] = node_of("AtMost", value=inputs[key], most=most)
            inputs[key] = [f"at most {name} {key}", 0]
        elif isinstance(inputs[key], int) and not isinstance(inputs[key], bool):
            inputs[key] = max(min(inputs[key], most), self._least(name, key))

    def _least(self, name: str, key: str) -> int:
        parts = self.info.get(str(self.graph[name]["class_type"]), {}).get("input", {}).values()
        described = next((part[key] for part in parts if key in part), ())
        return int(described[1].get("min", 0)) if len(described) > 1 else 0

    def _few_steps(self, name: str) -> None:
        inputs = self.graph[name]["inputs"]
        steps = inputs["steps"]
        for key in ("steps", "start_at_step", "end_at_step"):
            if key in inputs:
                self.graph[f"few {name} {key}"] = node_of("FewSteps", step=inputs[key], steps=steps)
                inputs[key] = [f"few {name} {key}", 0]


def named_files(graph: Workflow) -> list[str]:
    """The model files that a template's graph names."""
    values = (value for node in graph.values() for value in node["inputs"].values() if isinstance(value, str))
    return sorted({value for value in values if re.search(r"\.(safetensors|ckpt|pth|pt|sft|gguf)$", value)})
