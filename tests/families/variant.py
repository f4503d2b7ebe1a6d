"""What a variant of a family is: a file and the stock graph that runs it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from host.client import Workflow
from host.fetch import comfyui_path

from .graphs import plain


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a family: `file` lies in `diffusion_models`, `add` puts the family's own nodes into a graph.

    `latents` are the ids of the graph's SaveLatent nodes: joint latents are split by a stock node and saved apart.
    `previews`: whether ComfyUI makes any of such latents; `unshown`: where only some ComfyUIs do, what the source of
    latent formats says in those that do not.
    """

    name: str
    family: str
    file: str
    add: Callable[[Workflow], None]
    latents: tuple[str, ...] = ("save",)
    previews: bool = True
    unshown: str = ""

    @property
    def shown(self) -> bool:
        """Whether this ComfyUI makes previews."""
        formats = comfyui_path() / "comfy" / "latent_formats.py"
        return self.previews and not (self.unshown and self.unshown in formats.read_text(encoding="utf-8"))

    def graph(
        self, loader: dict[str, Any] | None = None, *, cfg: float = 1.0, seed: int = 7, steps: int = 3
    ) -> Workflow:
        """A fresh graph in API form. `loader` takes the place of UNETLoader, whose id is "model" and whose input
        `unet_name` is `file`; the sampler's id is "sampler", at `cfg` above 1 it calls the model for both prompts."""
        graph = plain(self.file, cfg=cfg, seed=seed, steps=steps)
        self.add(graph)
        if loader is not None:
            graph["model"] = copy.deepcopy(loader)
        return graph


def variants(*rows: tuple[str, str, str, Callable[[Workflow], None]], **more: Any) -> tuple[Variant, ...]:
    """Of rows of a name, a family, a tiny file's name and what adds nodes; `more` is what all have in common."""
    return tuple(
        Variant(name=name, family=family, file=f"tiny_{file}.safetensors", add=add, **more)
        for name, family, file, add in rows
    )
