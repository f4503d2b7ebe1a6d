"""What is said around the workers before there are any: their options, the node that ends them, tries from outside.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import importlib
import sys
from types import SimpleNamespace

from trace_samplers import NAME, load

load(sys.argv[1])

# Ranks get ComfyUI's options; of one that cannot travel it is said, of none nothing.
like_host, warned = importlib.import_module(f"{NAME}.nodes.host.contract.like_host"), []
like_host._warn = warned.append
for untold, said in (((), []), (("--odd",), ["workers run without --odd of ComfyUI's command line"])):
    like_host.options_now = lambda untold=untold: SimpleNamespace(told=("--fast",), untold=untold)
    assert like_host.options_for_ranks() == ("--fast",)
    assert [text.partition(":")[0] for text in warned] == said

# The node that ends pools runs again as long as there is one.
release = importlib.import_module(f"{NAME}.nodes.release")
asked = release.ReleaseParallelPool.fingerprint_inputs
release.POOLS = SimpleNamespace(has_something_to_release=lambda: True)
assert asked() != asked()
release.POOLS.has_something_to_release = lambda: False
assert asked() == asked()

# A loader, and a config, of which another node gives an input, run again only where something else changed: of those
# that make a MODEL, the file of one, too.
POOLS = importlib.import_module(f"{NAME}.nodes.host.model.pools").POOLS
for node, given in (
    ("loader.ParallelModelLoader", {"unet_name": None, "weight_dtype": "default", "sp_config": None}),
    ("loader.ParallelFluxLoader", {"unet_name": None, "weight_dtype": None, "sp_config": None}),
    ("parallelize.ParallelizeModel", {"model": None, "sp_config": None}),
    ("config.SPConfig", {"machines": None, "mode": "auto"}),
):
    module, _, name = node.partition(".")
    asked = getattr(importlib.import_module(f"{NAME}.nodes.{module}"), name).fingerprint_inputs
    before = asked(**given)
    assert asked(**given) == before, node
    POOLS.file_changes = lambda: 1
    assert (asked(**given) != before) == (name != "SPConfig"), node
    del POOLS.file_changes

# A MODEL whose runs try nothing is refused before a rank is started, with the reason.
tries = importlib.import_module(f"{NAME}.nodes.without_server")
tunable = SimpleNamespace(of=lambda patcher, shares: SimpleNamespace(why_not=f"{patcher}: {shares} are all"))
parts = {"host.proof.tuning": SimpleNamespace(TuningRequest=dict), "choice": SimpleNamespace(choice_of=dict)}
parts["host.model.new_model"] = SimpleNamespace(remote_patcher=lambda *_: Named("a patcher"))
parts["host.proof.begin_tries"] = SimpleNamespace(Tunable=tunable)
tries._module = parts.__getitem__


class Named(str):
    """With what is asked of a patcher; to load it is an error."""

    def shares_of_run(self):
        return (3, 1)


try:
    tries.WithoutServer().tune("file", {"mode": "auto"}, "default", {})
    raise AssertionError("it was tuned")
except ValueError as error:
    assert str(error) == "a patcher: (3, 1) are all"
