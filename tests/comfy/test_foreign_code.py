"""Whose code a function is, however it is wrapped: a pack that looks at each step must not be passed over."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

PACK, COMFY = "custom_nodes.some_pack.steps", "comfy.samplers"


def made_in(module: str, code: str) -> Any:
    """What `made` is in code of a module of that name."""
    names: dict[str, Any] = {"__name__": module, "functools": functools, "torch": torch}
    exec(code, names)  # noqa: S102  of this file
    return names["made"]


STEP = "def made(step, x0, x, total): pass"
CLOSURE = "def around(inner):\n    def callback(*step): inner(*step)\n    return callback\nmade = around"
WRAPS = CLOSURE.replace("    def callback", "    @functools.wraps(inner)\n    def callback")
CLASS = "class Look:\n    def __call__(self, *step): pass\n    def step(self, *step): pass\nmade = Look()"
OF_STOCK = made_in("latent_preview", STEP)
OF_PACK = made_in(PACK, STEP)
FOREIGN = {
    "a function": OF_PACK,
    "ComfyUI's closure over one": made_in(COMFY, CLOSURE)(OF_PACK),
    "one around ComfyUI's": made_in(PACK, CLOSURE)(OF_STOCK),
    "one that says it is ComfyUI's": made_in(PACK, WRAPS)(OF_STOCK),
    "a partial": functools.partial(OF_PACK, 1),
    "a partial of ComfyUI's with one": functools.partial(OF_STOCK, OF_PACK),
    "a decorated one": torch.no_grad()(OF_PACK),
    "an object that is called": made_in(PACK, CLASS),
    "a method": made_in(PACK, CLASS).step,
}
STOCK = {
    "a function": OF_STOCK,
    "a decorated one": torch.no_grad()(OF_STOCK),
    "a closure over one": made_in(COMFY, CLOSURE)(OF_STOCK),
    "one that names itself": made_in(COMFY, "def make():\n    def me(*x): return me\n    return me\nmade = make()"),
    "one of a file of extra nodes": made_in("/srv/ComfyUI/comfy_extras/nodes_lcm", STEP),
    "one of a module of extra nodes": made_in("comfy_extras.nodes_lcm", STEP),
}


@pytest.fixture(scope="module")
def foreign(module_of_pack: Callable[[str], ModuleType]) -> Callable[[object], str | None]:
    return module_of_pack("nodes.host.contract.foreign_code").foreign


@pytest.mark.parametrize("kind", FOREIGN)
def test_code_of_a_pack_is_found(kind: str, foreign: Callable[[object], str | None]) -> None:
    assert foreign(FOREIGN[kind]) == PACK


def test_a_pack_whose_name_begins_as_ours_is_another_one(
    foreign: Callable[[object], str | None], module_of_pack: Callable[[str], ModuleType]
) -> None:
    ours = module_of_pack("nodes.host.contract.order").OURS
    assert [foreign(made_in(name, STEP)) for name in (ours, f"{ours}.nodes", f"{ours}_extra")] == [
        None,
        None,
        f"{ours}_extra",
    ]


@pytest.mark.parametrize("kind", STOCK)
def test_code_of_comfyui_is_nobody_elses(kind: str, foreign: Callable[[object], str | None]) -> None:
    assert foreign(STOCK[kind]) is None


def test_plain_options_of_a_sampler_are_nobodys(module_of_pack: Callable[[str], ModuleType]) -> None:
    option = module_of_pack("nodes.host.contract.foreign_code").foreign_option
    assert [option(each) for each in (1, 0.5, "midpoint", None, True)] == [None] * 5
    assert option(OF_PACK) == PACK
