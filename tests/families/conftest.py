"""Stock latents of the families, each run once; a server of a ComfyUI that is another than the plans were made for."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from host.client import ComfyClient, Workflow
from host.fetch import comfyui_path
from host.pack_workflows import saved_latent
from host.server import ComfyServer
from host.tally import by_stock

Stock = Callable[[Workflow], torch.Tensor]

DRIFTED_FILE = "comfy/ldm/wan/model.py"
# A later ComfyUI, in which a block of Wan mixes neighbouring tokens, and takes what modulates it in a list where CLIP
# vision saw a picture: what no plan of ours can know. The first gives another picture, the second an error in ranks.
# Two of its classes have other names, so that nobody wrote a plan for them; blocks of one of these mix tokens, too.
NEW, NEW_FILE, MIXING = "NewJoyImage", "comfy/ldm/joyimage/model.py", "MixingKandinsky"
CROSS = "        x = x + self.cross_attn("
GIVES = "        return visual_embed\n\n\nclass Kandinsky5("
# Its made-up packages: were PYTHONPATH set before it starts, it would not be forked (host/forked_ranks.py), for 10 s.
SEARCHES = """import os, sys
os.environ["PYTHONPATH"] = os.path.join(os.path.dirname(os.path.dirname(__file__)), "packages")
sys.path.insert(1, os.environ["PYTHONPATH"])
"""
DRIFTS = {
    "main.py": {"import comfy.options\n": f"{SEARCHES}import comfy.options\n"},
    DRIFTED_FILE: {
        CROSS: f"        x = x + 0.1 * x.roll(1, dims=1)\n{CROSS}",
        "x = block(x, e=e0, freqs": "x = block(x, e=e0 if context_img_len is None else [e0], freqs",
    },
    NEW_FILE: {"class JoyImageTransformer3DModel(": f"class {NEW}("},
    "comfy/ldm/kandinsky5/model.py": {
        GIVES: f"        return visual_embed + 0.1 * visual_embed.roll(1, dims=1)\n\n\nclass {MIXING}("
    },
    "comfy/model_base.py": {".JoyImageTransformer3DModel)": f".{NEW})", ".Kandinsky5)": f".{MIXING})"},
}
HEAD = """

of_this_comfyui = WanAttentionBlock.forward


def forward(self, x, e, freqs, context, context_img_len=257, transformer_options={}):
    e = e[0] if isinstance(e, list) else e
    return of_this_comfyui(self, x, e, freqs, context, context_img_len, transformer_options)


WanAttentionBlock.forward = forward
"""
# As yunchang's, of version 0.6: exact, and its log-sum-exp is (B, H, S).
YUNCHANG = """
from types import SimpleNamespace
import torch
AttnType = SimpleNamespace(FLASHINFER="flashinfer", SAGE_AUTO="sage")
def select_flash_attn_impl(kind, stage):
    def attend(q, k, v, sm_scale=None, softmax_scale=None, **options):
        assert kind == "sage" or len(q) == 1
        scale = softmax_scale or sm_scale
        scores = torch.einsum("bshd,bthd->bhst", q * scale, k)
        lse = scores.logsumexp(-1)
        return torch.einsum("bhst,bthd->bshd", (scores - lse.unsqueeze(-1)).exp(), v), lse
    return attend
"""


@pytest.fixture(scope="package")
def stock(hosted_server: ComfyServer) -> Stock:
    """Runs a stock graph and returns its latent; equal graphs run once."""
    client, kept = ComfyClient(hosted_server.url), {}

    def run(graph: Workflow) -> torch.Tensor:
        key = json.dumps(graph, sort_keys=True)
        if key not in kept:
            with by_stock():
                kept[key] = saved_latent(client, client.queue(graph))
        return kept[key]

    return run


@dataclass(frozen=True)
class Drifted:
    """The server of the ComfyUI that has drifted, and the cache folder that it alone has: nothing is proven there."""

    server: ComfyServer
    comfyui: Path
    cache: Path

    @property
    def shipped(self) -> Path:
        """Where it has what the pack ships."""
        return self.cache / "shipped"

    @property
    def client(self) -> ComfyClient:
        return ComfyClient(self.server.url)

    @property
    def proofs_file(self) -> Path:
        return self.cache / "parallel-dit" / "proofs.json"

    @property
    def plans_file(self) -> Path:
        return self.cache / "parallel-dit" / "found_plans.json"

    @property
    def proofs(self) -> list[dict[str, Any]]:
        file = self.proofs_file
        return list(json.loads(file.read_text())["proofs"].values()) if file.exists() else []


@pytest.fixture(scope="package")
def drifted(family_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drifted]:
    """A ComfyUI of links with some files changed, whose Python has made-up packages of attention."""
    folder = tmp_path_factory.mktemp("drifted")
    comfyui, cache, packages = folder / "ComfyUI", folder / "cache", folder / "packages"
    shutil.copytree(comfyui_path(), comfyui, copy_function=os.symlink)  # with what is compiled
    for name, drifts in DRIFTS.items():
        if not (comfyui / name).is_file():  # a class that this ComfyUI does not have
            continue
        text = (comfyui / name).read_text()
        (comfyui / name).unlink()  # Python looks for modules beside what a script's link names
        for before, after in drifts.items():
            assert before in text or name == "comfy/model_base.py"
            text = text.replace(before, after)
        (comfyui / name).write_text(text + (HEAD if name == DRIFTED_FILE else ""))
    for name, text in {"yunchang": "", "flashinfer": "", "sageattention": "def sageattn(): ...\n"}.items():
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(text)
    (packages / "yunchang" / "kernels.py").write_text(YUNCHANG)
    environment = {"XDG_CACHE_HOME": str(cache), "SHIPPED_PLANS": str(cache / "shipped")}
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("COMFYUI_PATH", str(comfyui))
            server = stack.enter_context(ComfyServer(models=family_models, environment=environment))
        yield Drifted(server, comfyui, cache)
