"""A ComfyUI node pack for the demo's host only: the text encoder of the demo's model, as a CLIP for CLIPTextEncode.

Owns: ComfyUI's face of it. Does not own: words and weights (demo/words.py, which a seed makes again). Linked into the
custom_nodes of the demo's ComfyUI, never part of the pack; it finds words.py beside its own folder.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from comfy_api.latest import ComfyExtension, io


def load_words() -> ModuleType:
    """demo/words.py as a module of its own: the host does not have the repository on its path."""
    name = f"{__name__}_words"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().parent.parent / "words.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{Path(__file__).resolve().parent.parent / 'words.py'} is missing")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


words = load_words()


class DemoTextEncoder:
    """What CLIPTextEncode asks of a CLIP."""

    def tokenize(self, text: str) -> str:
        """The text; raises `ValueError` for a word that the demo's model never learnt."""
        words.words_of(text)
        return text

    def encode_from_tokens_scheduled(self, tokens: str) -> list[Any]:
        """A conditioning of 8 vectors of 128, with the pooled one."""
        vectors, pooled = words.encode(tokens)
        return [[vectors[None], {"pooled_output": pooled[None]}]]


class DemoTextEncoderLoader(io.ComfyNode):
    """The text encoder of the demo's small Flux; a seed makes its weights, so it has no file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemoTextEncoderLoader",
            display_name="Demo Text Encoder",
            category="parallel/demo",
            description=f"Knows {', '.join(words.THINGS)}; on {', '.join(words.COLOURS)}; {', '.join(words.PLACES)}.",
            inputs=[],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(DemoTextEncoder())


class DemoNodes(ComfyExtension):
    """The extension ComfyUI asks for its nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [DemoTextEncoderLoader]


async def comfy_entrypoint() -> DemoNodes:
    """ComfyUI's entry into the pack."""
    return DemoNodes()
