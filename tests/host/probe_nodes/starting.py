"""How a test host starts its ranks: forked, or where SHARE_ONE_GPU says so, several on one GPU; and told sizes.

And how long it looks for a plan: a machine that runs tests may be many times slower than it is. SHIPPED_PLANS: the
folder of plans that the pack ships.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy.model_detection
from server import PromptServer

TESTS = Path(__file__).resolve().parents[2]
DEVICES = ".parallel_runtime.devices"
FOUND_PLANS, LOOKED_S = ".nodes.host.model.found_plans", 300.0
SHIPPING = ".parallel_runtime.models.specs.found"


def module(name: str, path: Path) -> ModuleType:
    """The tests' module of that path, which a test host has no package for."""
    spec = importlib.util.spec_from_file_location(name, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


module("forked_ranks", TESTS / "host" / "forked_ranks.py").fork_ranks()
module("told_sizes", TESTS / "host" / "told_sizes.py").tell_sizes(comfy.model_detection)


def look_longer(prompt: dict[str, Any]) -> dict[str, Any]:
    """Before a prompt, when every pack is imported."""
    for name in [name for name in sys.modules if name.endswith(FOUND_PLANS)]:
        sys.modules[name].LIMIT_S = LOOKED_S
    shipped = os.environ.get("SHIPPED_PLANS")
    for name in [name for name in sys.modules if shipped and name.endswith(SHIPPING)]:
        sys.modules[name].SHIPPED = Path(shipped)
    return prompt


def share_one_gpu(prompt: dict[str, Any]) -> dict[str, Any]:
    """Before the first prompt, when every pack is imported: name one GPU for several ranks (gpu/real_cuda)."""
    exchange = os.environ.pop("SHARE_ONE_GPU", None)
    if exchange is not None:
        pack = next(name for name in sys.modules if name.endswith(DEVICES)).removesuffix(DEVICES[1:])
        module("sharing", TESTS / "gpu" / "real_cuda" / "sharing.py").share(exchange, pack=pack)
    return prompt


PromptServer.instance.add_on_prompt_handler(share_one_gpu)
PromptServer.instance.add_on_prompt_handler(look_longer)
