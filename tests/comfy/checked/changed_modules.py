"""That a class of ComfyUI's changes no plain value that is looked at as it runs, and what packs change is found.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from trace_samplers import NAME, load

load(sys.argv[1])
import models.cases  # noqa: E402, F401  which adds them
from host.outcomes import StockFailsError  # noqa: E402
from models.tiny import CASES, call  # noqa: E402

changed_modules = importlib.import_module(f"{NAME}.nodes.host.model.changed_modules")
torch.set_num_threads(1)  # tensors of a few hundred numbers


def what_changed(model, as_made):
    return [change.what for change in as_made.changes(model, deep=True)]


looked_at = 0
for name, make in CASES.items():
    with torch.no_grad():
        try:
            model, inputs = make()
        except StockFailsError:  # it has no such class
            continue
        as_made = changed_modules.AsMade(model)
        assert as_made.code.replaced_before() == [], name
        for _ in range(2):
            try:
                call(model, inputs)
            except ValueError:  # as of Stable Audio's in ComfyUI 0.24; test_hosted_parity.py says so
                break
            assert what_changed(model, as_made) == [], name
            looked_at += 1
assert looked_at > 2 * len(CASES) * 0.7

# Each kind of plain value is found, in place as well, and taken back; what torch sets by itself is not.
model, _ = CASES["Flux.1"]()
embedder, root = model.pe_embedder, "it sets diffusion_model"
embedder.axes_dim = [*embedder.axes_dim]  # the case's own
model.kind_of_text, model.nothing = "made", None
as_made = changed_modules.AsMade(model)
embedder.theta, model.kind_of_text, model.nothing = 5000.0, "set", object()
embedder.axes_dim[0] += 2
model.train()
found = list(as_made.changes(model, deep=True))
names = ("kind_of_text", "nothing", "pe_embedder.theta", "pe_embedder.axes_dim")
assert sorted(change.what for change in found) == sorted(f"{root}.{name}" for name in names)
for change in found:
    change.take_back()
assert what_changed(model, as_made) == [] and embedder.theta == 10000 and model.nothing is None and model.training
embedder.axes_dim[0] += 2  # what was noted is another list than what was taken back
assert what_changed(model, as_made) == [f"{root}.pe_embedder.axes_dim"]

# Another model's block in ours is put back whole, and keeps what it has.
model, other = CASES["Flux.1"]()[0], CASES["Flux.1"]()[0]
as_made, theirs, mine = changed_modules.AsMade(model), other.single_blocks[0], model.single_blocks[0]
theirs.register_forward_hook(lambda *_: None)
model.single_blocks[0] = theirs
(change,) = as_made.changes(model, deep=True)
assert change.what == "it replaces diffusion_model.single_blocks.0"
layer, hooks = theirs.linear1, dict(theirs._forward_hooks)
change.take_back()
assert model.single_blocks[0] is mine and theirs.linear1 is layer and theirs._forward_hooks == hooks
assert what_changed(model, as_made) == []

# A value has no code: the nodes whose source has its name set it, here this file's.
writers = importlib.import_module(f"{NAME}.nodes.host.contract.writers")
kinds = {"Here": type("Here", (), {}), "Elsewhere": importlib.import_module("json").JSONDecoder}
both = [writers.GraphNode(node_id="1", class_type=name) for name in kinds]
with patch.dict(writers.comfy_nodes.NODE_CLASS_MAPPINGS, kinds):
    assert writers.naming(both, "kind_of_text") == both[:1] and writers.naming(both, "raw_" + "decode") == both[1:]
    assert writers.naming(both, "nobody_" + "has_it") == []
# What a MODEL that is in use patches is no change of a stock loader's model.
stock, _ = CASES["Flux.1"]()
fresh = SimpleNamespace(as_made=changed_modules.AsMade(stock))
stock.pe_embedder.theta = 5000
name = "diffusion_model.pe_embedder.theta"
assert [what for what, _ in changed_modules._of_packs(stock, fresh.as_made.made, ())] == [f"it sets {name}"]
assert list(changed_modules._of_packs(stock, fresh.as_made.made, {name: 1}.keys())) == []
stock.pe_embedder.theta = 10000
# A function of a pack in a file, which may have been there before: of a node of the graph it is refused.
flux_math = importlib.import_module("comfy.ldm.flux.math")
theirs = lambda *given, **named: None  # noqa: E731
with (
    patch.object(flux_math, "optimized_attention", theirs),
    patch.object(changed_modules, "writers_of", lambda _, **__: []),
):
    fresh.as_made = changed_modules.AsMade(stock)
    assert "comfy.ldm.flux.math.optimized_attention" in dict(fresh.as_made.code.foreign())
    changed_modules.refuse_changed_stock(stock, fresh, ())
    changed_modules.writers_of = lambda value, **_: both[:1] if value is theirs else []
    try:
        changed_modules.refuse_changed_stock(stock, fresh, ())
    except ValueError as error:
        assert "it replaces comfy.ldm.flux.math.optimized_attention" in str(error), error
    else:
        raise AssertionError("it was not seen")
# What the import of a pack put there is no node's, but of one whose file has it: the pack's others did nothing.
replaced_code = importlib.import_module(f"{NAME}.nodes.host.model.replaced_code")
theirs.__module__, theirs.__qualname__ = "a_pack.attention", "attend"
of_class = lambda *given, **named: None  # noqa: E731
kinds = {"Here": type("Here", (), {"__module__": "a_pack.attention"})}
kinds["Beside"] = type("Beside", (), {"__module__": "a_pack.nodes"})
here, beside = (writers.GraphNode(node_id="1", class_type=name) for name in kinds)


def by_code(nodes, least):
    return writers.defining([writers.code_of(theirs)], nodes, least)


with patch.dict(writers.comfy_nodes.NODE_CLASS_MAPPINGS, kinds):
    assert by_code([beside], writers.PACK) == [beside] and by_code([beside, here], writers.PACK) == [here]
    assert by_code([beside], writers.USES) == []
    assert by_code([beside, here], writers.USES) == [here]
    # One that has something of that file in its own, as layerdiffuse's node, may have switched it on.
    its = {"a_pack.nodes": ModuleType("a_pack.nodes"), "a_pack.attention": ModuleType("a_pack.attention")}
    with patch.dict(sys.modules, its):
        for switch in (its["a_pack.attention"], kinds["Here"], theirs):
            assert by_code([beside], writers.USES) == []
            with patch.object(its["a_pack.nodes"], "switch", switch, create=True):
                assert by_code([beside], writers.USES) == [beside], switch
with patch.object(flux_math, "optimized_attention", theirs), patch.object(type(stock), "forward_orig", of_class):
    assert not replaced_code.is_imported(theirs)
    replaced_code.note_imported()
    assert replaced_code.is_imported(theirs) and replaced_code.is_imported(of_class)
assert not replaced_code.is_imported(flux_math.optimized_attention)

# A method that a pack put on a class of ComfyUI's: before the model was made it is told, since then it is found.
warned = []
log = SimpleNamespace(warning=lambda text, *given: warned.append(text % given))
forward = "comfy.ldm.flux.model.Flux.forward_orig"
with patch.object(type(model), "forward_orig", lambda *given, **named: None), patch.object(changed_modules, "log", log):
    assert [where for where, _ in as_made.code.replaced()] == [forward]
    changed_modules.note_as_made(model)
    assert list(model.as_made.code.replaced()) == []
assert warned == [f"a pack had changed ComfyUI before the model was made ({forward}); ranks do without"]
assert list(as_made.code.replaced()) == list(model.as_made.code.replaced()) == [], "ComfyUI's own again"

# As well where the class has it of another.
model, _ = CASES["Chroma Radiance, mask, ControlNet"]()
as_made = changed_modules.AsMade(model)
assert "forward_orig" not in vars(type(model))
with patch.object(type(model), "forward_orig", lambda *given, **named: None):
    (found,) = as_made.code.replaced()
    assert found[0] == "comfy.ldm.chroma_radiance.model.ChromaRadiance.forward_orig"
