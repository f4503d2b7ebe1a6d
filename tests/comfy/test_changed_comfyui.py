"""A server whose ComfyUI is newer than those tested, has other names for two things that the pack relies on, and gives
one thing more to the blocks of Flux.1 and to the methods of each MODEL.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rounding import ROUNDING

from host import workflows
from host.client import ComfyClient
from host.fetch import comfyui_path
from host.pack_workflows import latent_of, parallel
from host.server import ComfyServer
from host.tiny_models import TinyModels
from parallel_runtime.proof import relative_error

CHANGES = {
    "main.py": (),
    "comfyui_version.py": (),
    "comfy/samplers.py": ("KSamplerX0Inpaint", "can_concat_cond"),
    "comfy/ldm/flux/model.py": (),
    "comfy/model_patcher.py": (),
    "comfy/model_base.py": (),
    "comfy/sampler_helpers.py": (),
}
BODY = {  # of Flux.1, as it is and as it may be: what it takes, and what it is given
    "attn_mask: Tensor = None,\n    ) -> Tensor:": "attn_mask: Tensor = None, later=None,\n    ) -> Tensor:",
    "attn_mask=kwargs.get(": "later=1.0, attn_mask=kwargs.get(",
}
# Before a run, what asks for its memory gives one argument more, which ComfyUI's own takes.
ASKS = ("model.model.memory_required([", "__import__('functools').partial(model.model.memory_required, later=1)([")
TAKES_MORE = """

def _taking(self, *given, _method=BaseModel.memory_required, later=0, **named):
    return _method(self, *given, **named)


BaseModel.memory_required = _taking
"""
# Added to ComfyUI's file: its methods take one argument more, and all who ask a MODEL for one of them give it.
GIVES_MORE = """

def _takes_more(method):
    @functools.wraps(method)
    def taking(self, *given, later=0, **named):
        return method(self, *given, **named)
    return taking


class _Asked:
    METHODS = ("add_patches", "cleanup", "load", "loaded_size", "model_patches_models", "model_size", "partially_load",
        "partially_unload", "pre_run", "set_model_patch", "set_model_patch_replace", "unpatch_model")

    def asked(self, name):
        found = object.__getattribute__(self, name)
        return functools.partial(found, later=1) if name in _Asked.METHODS else found


import functools
for _name in _Asked.METHODS:
    setattr(ModelPatcher, _name, _takes_more(getattr(ModelPatcher, _name)))
ModelPatcher.__getattribute__ = _Asked.asked
"""
SAID = {
    "comfy.samplers.KSamplerX0Inpaint": "the loop in the workers is off, the loop stays in ComfyUI",
    "comfy.samplers.can_concat_cond": "prompt and negative at once is off, they run one after the other",
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ComfyUI of links, with some files changed as a later version may have them."""
    path = tmp_path_factory.mktemp("changed") / "ComfyUI"
    shutil.copytree(comfyui_path(), path, copy_function=os.symlink)  # with what is compiled
    for name, renamed in CHANGES.items():
        text = (path / name).read_text()
        (path / name).unlink()  # Python looks for modules beside what a script's link names
        for each in renamed:
            assert each in text
            text = text.replace(each, f"{each}_of_later")
        if name == "comfy/ldm/flux/model.py":
            for there, later in BODY.items():
                assert text.count(there) == 1
                text = text.replace(there, later)
        if name == "comfy/sampler_helpers.py":
            assert ASKS[0] in text
            text = text.replace(*ASKS)
        text += {"comfy/model_patcher.py": GIVES_MORE, "comfy/model_base.py": TAKES_MORE}.get(name, "")
        (path / name).write_text('__version__ = "0.99.0"\n' if name == "comfyui_version.py" else text)
    return path


@pytest.fixture(scope="module")
def server(changed: Path, models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COMFYUI_PATH", str(changed))
        with ComfyServer(models=models_dir, environment={"XDG_CACHE_HOME": cache}) as made:
            yield made


@pytest.mark.full  # a server of its own; test_contract.py deletes each line
def test_what_lacks_nothing_works_and_the_rest_is_said(server: ComfyServer, tiny_models: TinyModels) -> None:
    client = ComfyClient(server.url)
    state = client.get("/parallel_dit/state")["comfyui"]
    newer, *off = state["notes"]
    assert state["version"] == "0.99.0"
    assert newer.startswith("ComfyUI 0.99.0 is newer than ") and newer.endswith("kinds of calls there: none so far")
    for name, what in SAID.items():
        assert any(f" `{name}" in each and f"{what}; update the pack" in each for each in off)
    assert len(off) == len(SAID)
    assert [text for text in state["notes"] if server.log.count(text) != 1] == []

    graph = workflows.text_to_image(tiny_models)
    graph["sampler"]["inputs"]["cfg"] = 2.0
    stock = latent_of(client, graph)
    for plan, verdict in (({"ulysses": 2}, "proven"), ({"cfg": 2}, "not needed")):
        ours = parallel(graph, mode="manual", sampler="ParallelSampler", **plan)
        report = client.queue(ours).report()
        assert relative_error(latent_of(client, ours), stock) <= ROUNDING
        assert report["loop"]["kind"] == "host" and "the loop in the workers is off" in report["loop"]["reason"]
        assert report["proof"]["verdict"] == verdict
    (newer, *_) = client.get("/parallel_dit/state")["comfyui"]["notes"]
    assert newer.endswith("kinds of calls there: 1 proven")
    assert "Traceback" not in server.log
