"""What wrappers around a transformer get and may change, where its `_forward` is elsewhere: as with ComfyUI's own.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import contextlib
import copy
import importlib
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from trace_samplers import NAME, load

load(sys.argv[1])
import models.cases  # noqa: E402, F401  which adds them
from host.outcomes import StockFailsError  # noqa: E402
from models.tiny import CASES, Case  # noqa: E402

forward, changed_modules = (
    importlib.import_module(f"{NAME}.nodes.host.model.{name}") for name in ("forward", "changed_modules")
)
caches = importlib.import_module(f"{NAME}.nodes.host.sampling.stock_caches")
calls = importlib.import_module(f"{NAME}.parallel_runtime.models.hosted.calls")
torch.set_num_threads(2)


class Elsewhere(forward.RemoteForward):
    """Sends to the module itself, as a rank gets it."""

    def __init__(self, transformer, *more):
        super().__init__(transformer, *more)
        changed_modules.note_as_made(transformer)

    def _run(self, options):
        def call(sent, **_):
            self.sent.append(sent)
            events.append("call")
            given = calls.from_tree(sent.options["call"], [each.clone() for each in sent.tensors.values()])
            function = self.transformer._forward if sent.options.get("inside") else self.transformer
            out = function(*given["args"], **given["kwargs"])
            outs = [out] if isinstance(out, torch.Tensor) else out
            return torch.cat([each.reshape(sent.out_shape[0], -1) for each in outs], 1)

        self.sent = []
        late = partial(events.append, "late")
        deltas = SimpleNamespace(deltas=())
        return SimpleNamespace(call=call, call_late=late, written={}, plan=None, deltas=deltas, packs_around=False)


def around(executor, *args, **kwargs):
    """Notes the order and kinds of what it gets, and has the result changed."""
    told.append(([type(each).__name__ for each in args], sorted(kwargs)))
    out = executor(*args, **kwargs)
    return out * 1.5 + 0.25 if isinstance(out, torch.Tensor) else [each * 1.5 + 0.25 for each in out]


def asked(function, given, wrapper):
    x, *others = given
    options = {**given.get("transformer_options", {}), "wrappers": {"diffusion_model": {"test": [wrapper]}}}
    named = {name: copy.deepcopy(given[name]) for name in others} | {"transformer_options": options}
    told.clear()
    with torch.inference_mode():
        out = function(copy.deepcopy(given[x]), **named)
    return [out] if isinstance(out, torch.Tensor) else out


def by_name(executor, *args, **kwargs):
    """Hands on all but the latent by name, as some do."""
    names = list(forward.inspect.signature(executor.class_obj.__class__._forward).parameters)[1:]
    told.append(isinstance(executor.class_obj, torch.nn.Module))
    return executor(args[0], **dict(zip(names[1:], args[1:], strict=False)), **kwargs)


# Of positions only, of names, of several latents; of a class's own kinds of values; that compute around, or before.
TRIED = (
    *("Flux.1", "Krea 2", "Wan t2v", "Cosmos 1", "MiniMax H3", "Z-Image in pixel space"),
    *("Anima, text through its adapter", "LTX-2, gates, adaptive text"),
)
computing, there = set[str](), set[str]()
told: list[object] = []
events: list[str] = []
for name in TRIED:
    try:
        case: Case = CASES[name]()
    except StockFailsError:  # an older ComfyUI lacks its class
        continue
    model, given = case
    there.add(name)
    assert forward.runs_wrappers(type(model)), name
    computing |= {name} if caches.computes_around(type(model)) else set()
    want = asked(model, given, around)
    got = list(told)
    remote = Elsewhere(model, None, want[0].shape[1])
    for wrapper in (around, by_name):
        stock = asked(model, given, wrapper)
        found = asked(remote, given, wrapper)
        assert told == got or wrapper is by_name, (name, told, got)
        assert told[0] is not False and remote.sent[0].options["inside"] is True
        for one, other in zip(stock, found, strict=True):
            assert torch.equal(one.float(), other.float()), (name, wrapper)
    stock = [asked(each, given, lambda executor, *args, **named: executor(*args, **named)) for each in (model, remote)]
    assert all(map(torch.equal, *[[each.float() for each in outs] for outs in stock])), name

# ComfyUI's compiler, which this process has none of on a CPU: what wrappers allocate is recorded, a call is not, and no
# preview is made inside of a record.
prefetch = importlib.import_module("comfy.model_prefetch")
remote = Elsewhere(model, None, want[0].shape[1])


@contextlib.contextmanager
def pause():
    events.append("pause")
    yield
    events.append("resume")


def recorded(executor, *args, **kwargs):
    events.append("wrapper")
    return executor(*args, **kwargs)


forgets = partial(events.append, "forgotten")
for enabled in (False, True):
    has = {"malloc_graph_enabled": lambda device, it=enabled: it and device.type == "cpu", "pause_malloc_graph": pause}
    remote.records = enabled
    with patch.multiple(prefetch, create=True, **has, cleanup_malloc_graph=forgets):
        events.clear()
        asked(remote, given, recorded)
        assert events == [*["late"] * enabled, "wrapper", *["pause"] * enabled, "call", *["resume"] * enabled], events
        events.clear()
        with contextlib.suppress(ZeroDivisionError):
            asked(remote, given, lambda *_, **__: 1 / 0)
        assert events == ["late", "forgotten"] * enabled, events

# Of these, a step cache keeps something else than what the class returns.
pixels, h3 = "Z-Image in pixel space", "MiniMax H3"
assert {pixels} & there <= computing <= {pixels, h3} and "Wan t2v" in there, (computing, there)
