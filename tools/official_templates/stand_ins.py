"""Makes a template's graph small: stand-ins for what it loads and for its inputs, tiny files, few pixels and steps.

Owns: which node stands for what. Does not own: which tiny file stands for a published one (models.py), the nodes
(tests/host/probe_nodes).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from families.graphs import node as node_of
from host.client import Workflow

from .graph import CHECKPOINTS, DIFFUSION_MODEL, SAMPLERS, Info, Link, NotTriedError, links
from .models import Tiny, base, tiny_of, vae_of

LORAS = ("LoraLoader", "LoraLoaderModelOnly")
LOADED = ("CLIP", "VAE", "CLIP_VISION", "CONTROL_NET", "STYLE_MODEL", "MODEL_PATCH")
# Nodes that load or compute what no test machine has; what they give is made up by its type.
MADE_UP = {"LoadImage", "LoadImageMask", "LoadImageOutput", "LoadVideo", "LoadAudio", "RecordAudio", "Painter"}
MADE_UP |= {"TextGenerate", "TextGenerateLTX2Prompt", "SAM3_Detect", "DA3Inference", "DA3Render", "MoGeInference"}
MADE_UP |= {"SCAIL2ColoredMask", "SAM3_VideoTrack", "MoGeRender", "RemoveBackground", "AudioEncoderEncode"}
MADE_UP |= {"Video Slice"}
MADE_UP |= {"ImageUpscaleWithModel", "VOIDWarpedNoise"}
TWICE = {"upscale_method": "nearest-exact", "scale_by": 2.0}
# Names of parts beside a model that stand-ins of small sizes are of the same class as.
PARTS = {"MODEL_PATCH": r"diffsynth|Z-Image.*Fun-Controlnet", "CONTROL_NET": r"InstantX-ControlNet|sd3"}
PARTS |= {"STYLE_MODEL": r"redux"}
CONSTANTS: dict[str, Any] = {"STRING": "a lighthouse at dusk", "INT": 64, "FLOAT": 1.0, "BOOLEAN": False}
WIDTH, HEIGHT, LENGTH, SECONDS = 224, 160, 17, 2.0
FEW_FRAMES = 5  # of SVD, whose U-Net has one size
MEGAPIXELS = WIDTH * HEIGHT / 1e6
MOST = {
    **dict.fromkeys(("width", "largest_size", "longer_edge", "resolution", "target_width", "size"), WIDTH),
    **dict.fromkeys(("height", "shorter_edge", "target_height"), HEIGHT),
    **dict.fromkeys(("length", "video_length", "num_frames", "frames_number", "amount"), LENGTH),
    "video_frames": FEW_FRAMES,
}
SMALL_FLOATS = {"megapixels": MEGAPIXELS, "seconds": SECONDS, "duration": SECONDS}
ANY = ("*", "COMFY_MATCHTYPE_V3")
MODELS = ("MODEL", "GUIDER", *ANY)  # what a model goes through to its sampler
CONDITIONED_BY = ("LATENT", "IMAGE", "MASK", "AUDIO", "VIDEO", "STRING")  # through these no encoder's width matters


class Making:
    """One graph on its way to a small one."""

    def __init__(self, graph: Workflow, info: Info) -> None:
        self.graph, self.info = graph, info
        self.files: list[tuple[str, Tiny]] = []
        self.loaders: dict[str, Tiny] = {}

    def kind(self, link: Link, user: str = "", key: str = "") -> str:
        """The type of what a link carries; of a node that this ComfyUI does not have, by what takes it."""
        outputs = self.info.get(str(self.graph[link[0]]["class_type"]), {}).get("output", ())
        found = outputs[link[1]] if link[1] < len(outputs) else None
        if found is None and user:
            inputs = self.info.get(str(self.graph[user]["class_type"]), {}).get("input", {})
            found = next((part[key][0] for part in inputs.values() if key in part), None)
        return found if isinstance(found, str) else "COMBO" if found else "unknown"

    def make_up(self) -> None:
        """Puts a stand-in of its type in the place of what large models, files of a user and packs would give."""
        for name, node in list(self.graph.items()):
            if self._replaced(node):
                continue
            for key, link in list(links(node)):
                if self._replaced(self.graph[link[0]]):
                    node["inputs"][key] = self._made_up(self.kind(link, name, key), link)
            if node["class_type"] == "LTXVLatentUpsampler":
                self.graph[name] = node_of("LatentUpscaleBy", samples=node["inputs"]["samples"], **TWICE)

    def _replaced(self, node: Mapping[str, Any]) -> bool:
        return node["class_type"] in MADE_UP or str(node["class_type"]) not in self.info

    def replace_loaded(self) -> None:
        """Puts a stand-in without weights in the place of each encoder, VAE, ControlNet and patch that a file has."""
        for name, node in list(self.graph.items()):
            for key, link in list(links(node)):
                kind, source = self.kind(link, name, key), str(self.graph[link[0]]["class_type"])
                if kind not in LOADED or "Loader" not in source:
                    continue
                prompt = self._one_tiny(link).prompt_node if node["class_type"] == "CLIPTextEncode" else ""
                if prompt:
                    self.graph[name] = node_of(prompt, prompt=node["inputs"]["text"])
                else:
                    node["inputs"][key] = self._loaded(kind, link)

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
        if node["class_type"] == "LTXVAudioVAELoader" or "-audio-vae" in str(node["inputs"]):  # of LTX-2, of LTX-2.5
            return node_of("RandomSoundVAE", kind="spectral")
        if "minimax_h3_audio" in str(node["inputs"]):
            return node_of("RandomSoundVAE", kind="stereo")
        name = next((str(value) for key, value in node["inputs"].items() if key in ("vae_name", "ckpt_name")), "")
        sizes = vae_of(name)
        if sizes is None:
            raise NotTriedError(f"nothing stands for the VAE {name}")
        return node_of("RandomVAE", **dict(zip(("channels", "spatial", "temporal"), sizes, strict=True)))

    def _model_patch(self, link: Link) -> dict[str, Any]:
        family = {"small_qwen_image": "small qwen-image", "small_z_image": "small z-image"}
        return self._for(link, lambda tiny: node_of("RandomModelPatch", family=family[tiny.short]), family)

    def _control_net(self, link: Link) -> dict[str, Any]:
        inpainting = "Inpainting" in str(self.graph[link[0]]["inputs"])

        def made(tiny: Tiny) -> dict[str, Any]:
            if tiny.short == "small_qwen_image":
                return node_of("RandomInpaintingControlNet", mask=inpainting)
            self.files.append(("controlnet", tiny))
            return node_of("ControlNetLoader", control_net_name=tiny.name)

        return self._for(link, made, ("small_qwen_image", "sd35_controlled"))

    def _style_model(self, link: Link) -> dict[str, Any]:
        return self._for(link, lambda tiny: node_of("TinyStyle", width=tiny.text["width"], tokens=29), ("flux_1",))

    def _for(self, link: Link, made: Callable[[Tiny], dict[str, Any]], known: Container[str]) -> dict[str, Any]:
        """What stands for a loaded part of a tiny model among `known`. Raises NotTriedError for any other."""
        node = self.graph[link[0]]
        loaded = [base(value) for value in node["inputs"].values() if isinstance(value, str)]
        tiny = self._one_tiny(link)
        if tiny.short not in known or not any(re.search(PARTS[self.kind(link)], name) for name in loaded):
            raise NotTriedError(f"nothing stands for {', '.join(loaded) or node['class_type']}")
        return made(tiny)

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
                yield self._tiny(name)
            for key, link in links(node):
                if link[0] not in reached and self.kind(link, name, key) in MODELS:
                    reached.add(link[0])
                    waiting.append(link[0])

    def _tiny(self, loader: str) -> Tiny:
        """The tiny model of a loader, by the file that the template names."""
        if loader not in self.loaders:
            inputs = self.graph[loader]["inputs"]
            name = str(inputs.get("unet_name") or inputs.get("ckpt_name"))
            tiny = tiny_of(name)
            if tiny is None:
                raise NotTriedError(f"no tiny file stands for {name}")
            self.loaders[loader] = tiny
        return self.loaders[loader]

    def load_tiny_files(self) -> None:
        """The tiny files in the place of those that the template names, LoRAs with them."""
        self.loaders = {name: tiny for name, tiny in self.loaders.items() if name in self.graph}
        for name, node in self.graph.items():
            kind, inputs = node["class_type"], node["inputs"]
            if kind == DIFFUSION_MODEL:
                self._use("diffusion_models", inputs, "unet_name", [self._tiny(name)])
            elif kind in CHECKPOINTS:
                self._use("checkpoints", inputs, "ckpt_name", [self._tiny(name)])
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
                    inputs[key] = max(min(inputs[key], SMALL_FLOATS[last]), self._least(name, key))
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

    def _least(self, name: str, key: str) -> float:
        parts = self.info.get(str(self.graph[name]["class_type"]), {}).get("input", {}).values()
        described = next((part[key] for part in parts if key in part), ())
        return described[1].get("min", 0) if len(described) > 1 else 0

    def _few_steps(self, name: str) -> None:
        inputs = self.graph[name]["inputs"]
        steps = inputs["steps"]
        for key in ("steps", "start_at_step", "end_at_step"):
            if key in inputs:
                self.graph[f"few {name} {key}"] = node_of("FewSteps", step=inputs[key], steps=steps)
                inputs[key] = [f"few {name} {key}", 0]
