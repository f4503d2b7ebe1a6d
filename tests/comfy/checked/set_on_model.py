"""What nodes set on ComfyUI's model itself, and what Parallelize Model makes of it before any worker is started.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import importlib
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import MethodType

import torch
from trace_samplers import NAME, load

load(sys.argv[1])
sys.path.append(str(Path(__file__).resolve().parents[2]))
folder = tempfile.mkdtemp()
os.environ["XDG_CACHE_HOME"] = folder
comfy, latent_formats = (importlib.import_module(f"comfy.{name}") for name in ("sd", "latent_formats"))
choice = importlib.import_module(f"{NAME}.nodes.choice")
convert = importlib.import_module(f"{NAME}.nodes.host.model.convert_stock_model")
changed_model, kept_by_functions = (
    importlib.import_module(f"{NAME}.nodes.host.model.{name}") for name in ("changed_model", "kept_by_functions")
)
file = str(importlib.import_module("host.tiny_models").write_flux(Path(folder) / "tiny.safetensors"))


def stock_model():
    return comfy.load_diffusion_model(file)


def parallelized(stock):
    settings = {"mode": "manual", "devices": "cpu:2", "ulysses": 2, "shares": "equal", "plans": "written"}
    return convert.parallelized(stock, choice.choice_of(**settings))


def shift_of(model):
    """While the MODEL is patched, as in a run."""
    model.patch_model(load_weights=False)
    shift = model.model.model_sampling.shift
    model.unpatch_model(unpatch_weights=False)
    return shift


# It samples by the stock model's own object, so what is set later, on either, is both's.
stock, other = stock_model(), stock_model()
plain = parallelized(other)
own = shift_of(plain)
stock.model.model_sampling.set_parameters(shift=own + 1)
ours = parallelized(stock)
assert ours.get_model_object("model_sampling") is stock.model.model_sampling
assert torch.equal(ours.get_model_object("model_sampling").sigmas, stock.model.model_sampling.sigmas)
assert (shift_of(ours), shift_of(plain)) == (own + 1, own) and ours.model is plain.model
stock.model.model_sampling.set_parameters(shift=own + 2)
assert (shift_of(ours), shift_of(plain)) == (own + 2, own)
ours.model.model_sampling.set_parameters(shift=own + 3)  # of the newest MODEL, as behind our own loader
assert (shift_of(ours), stock.model.model_sampling.shift, shift_of(plain)) == (own + 3, own + 3, own)
# What a MODEL patches hides what is set, and another MODEL of the loader that is patched hides nothing.
patched = stock.clone()
patched.add_object_patch("model_sampling", sampling := stock_model().model.model_sampling)
assert parallelized(patched).get_model_object("model_sampling") is sampling
patched.patch_model(load_weights=False)
assert stock.model.model_sampling is sampling and shift_of(parallelized(stock)) == own + 3
patched.unpatch_model(unpatch_weights=False)
# Of what else was set, what differs is carried; what is as in the file is not.
assert set(plain.object_patches) == set(ours.object_patches) == {"model_sampling"}
for name, value in {
    "latent_format": latent_formats.SD3(),
    "concat_keys": ("mask",),
    "adm_channels": 3,
    "model_type": type(stock.model.model_type).EPS,
}.items():
    stock = stock_model()
    setattr(stock.model, name, value)
    ours = parallelized(stock)
    assert set(ours.object_patches) == {"model_sampling", name} and ours.get_model_object(name) is value
    ours.patch_model(load_weights=False)
    assert getattr(ours.model, name) is value
    ours.unpatch_model(unpatch_weights=False)
stock = stock_model()
stock.model.latent_format.scale_factor = 7.0
assert parallelized(stock).get_model_object("latent_format").scale_factor == 7.0
stock.model.latent_format = type(stock.model.latent_format)()
stock.model.latent_format.process_out = lambda latent: latent
assert parallelized(stock).get_model_object("latent_format") is stock.model.latent_format
# What IC-Light says of the first layer that it widens; the rest of the description is of the file and its layers.
stock = stock_model()
stock.model.model_config.unet_config["in_channels"] += 4
ours = parallelized(stock)
config, own = ours.get_model_object("model_config"), ours.model.model_config
assert set(ours.object_patches) == {"model_sampling", "model_config"} and type(config) is type(own)
assert config.unet_config == {**own.unet_config, "in_channels": own.unet_config["in_channels"] + 4}
assert {**vars(config), "unet_config": None} == {**vars(own), "unet_config": None}
# Parts of a model that conditionings are made by; ComfyUI reads no others.
for name, carried in (("embedder", {"embedder"}), ("of_a_pack", set())):
    stock, before = stock_model(), torch.nn.Linear(2, 3)
    if carried:
        plain.model.add_module(name, before)
    stock.model.add_module(name, torch.nn.Linear(2, 4))
    assert set(parallelized(stock).object_patches) == {"model_sampling"} | carried
    stock.model.add_module(name, before)
    assert set(parallelized(stock).object_patches) == {"model_sampling"}
alike = changed_model._alike
part, same = (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
same.load_state_dict(part.state_dict())
assert alike(part, same) and alike(part, torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).to("meta"))
same[1].running_mean += 1
assert not alike(part, same) and not alike(part, part[0])
assert alike({"a": [1, (2.0, None)]}, {"a": [1, (2.0, None)]}) and not alike({"a": [1]}, {"a": [1.0]})
assert not alike([1], [1, 2]) and not alike({"a": 1}, {"b": 1})
# Code of a pack, which computes with the stock model's weights, is refused; of another MODEL that is in use it is not.


def of_pack(*given, **named):
    """Code of a pack."""


def refusal(do):
    changed = stock_model()
    do(changed)
    try:
        parallelized(changed)
    except ValueError as error:
        return str(error)
    return ""


for name in ("extra_conds", "concat_cond", "_apply_model", "memory_required"):
    for value in (of_pack, partial(of_pack, 1), MethodType(of_pack, stock.model)):
        said = refusal(lambda it, name=name, value=value: setattr(it.model, name, value))
        assert said.startswith(f"some node: it replaces {name}, which a parallel MODEL cannot take; remove that"), said
other_class = type("Other", (type(stock.model),), {"__module__": __name__})
assert refusal(lambda it: setattr(it.model, "__class__", other_class)).startswith(
    "some node: it replaces the class of "
)
assert refusal(lambda it: setattr(it.model, "kept_by_a_pack", of_pack)) == ""
assert refusal(lambda it: setattr(it.model, "extra_conds", it.model.extra_conds)) == ""
stock = stock_model()
patched = stock.clone()
patched.add_object_patch("extra_conds", of_pack)
patched.patch_model(load_weights=False)
assert stock.model.extra_conds is of_pack and set(parallelized(stock).object_patches) == {"model_sampling"}
patched.unpatch_model(unpatch_weights=False)
assert "extra_conds" in vars(stock.model) and set(parallelized(stock).object_patches) == {"model_sampling"}


# A function of an object patch that keeps the stock model, or its transformer, keeps the parallel MODEL's.
class Kept:
    """What a function keeps, and what is kept in its place."""

    def method(self, *given, **named):
        return self, given, named


old, new, beside = Kept(), Kept(), Kept()
keeping = partial(kept_by_functions.keeping, {id(old): new})


def around_old():
    count, kept = 0, old
    if count:
        unset = count

    def inner(argument=old, *, named=old, left=beside):
        """Said of it."""
        nonlocal count
        count += 1
        return count, kept, argument, named, left, inner if count else unset

    inner.told = beside
    return inner


found = keeping(made := around_old())
assert found()[1:5] == (new, new, new, beside) and made()[:5] == (2, old, old, old, beside), "a count is shared"
assert (found.__doc__, found.__name__, found.__qualname__, found.__module__, found.told) == (
    *(made.__doc__, made.__name__, made.__qualname__, made.__module__, beside),
)
assert keeping(old.method)(1) == (new, (1,), {}) and keeping(old) is new
assert keeping(partial(old.method, old, beside, key=old))(3) == (new, (new, beside, 3), {"key": new})
call = partial(old.method)
assert keeping(lambda call=call: call())()[0] is new


def two_around_each_other():
    kept = old

    def first(times):
        return second(times - 1) if times else kept

    def second(times):
        return first(times - 1) if times else kept

    return first


for times in range(4):
    assert keeping(two_around_each_other())(times) is new, "as deep as they call each other"
for same in (beside.method, partial(beside.method, 1, key=2), of_pack, print, 3, None, (old,), lambda: beside):
    assert keeping(same) is same
stock = stock_model()


def keep_three(one, two, three):
    return lambda **_: (one, two, three)


base, transformer = stock.model, stock.model.diffusion_model
stock.add_object_patch("extra_conds", keep_three(base, transformer, base.concat_cond))
stock.add_object_patch("concat_keys", ("a",))
ours = parallelized(stock)
kept = ours.get_model_object("extra_conds")()
assert kept == (ours.model, ours.model.diffusion_model, ours.model.concat_cond)
blocks = transformer.double_blocks
stock.add_object_patch("extra_conds", keep_three(base, blocks, None))
try:
    parallelized(stock)
except ValueError as error:
    assert "it keeps the transformer of the stock loader to change it" in str(error), error
else:
    raise AssertionError("its blocks would be read where nothing is patched")
