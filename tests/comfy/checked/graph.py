"""What is told of a graph that ComfyUI executes: the nodes before, who wrote a value, the prompt that is validated.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import functools
import importlib
import os
import sys
import types
from types import SimpleNamespace
from unittest.mock import patch

from trace_samplers import NAME, load

load(sys.argv[1])
stock, graph, progress, utils = (
    importlib.import_module(name)
    for name in ("nodes", *(f"comfy_execution.{each}" for each in ("graph", "progress", "utils")))
)
advanced = importlib.import_module("comfy_extras.nodes_model_advanced")
easycache = importlib.import_module("comfy_extras.nodes_easycache")
contract = f"{NAME}.nodes.host.contract"
writers, queued, order, refusals = (
    importlib.import_module(f"{contract}.{name}") for name in ("writers", "queued_prompt", "order", "refusals")
)
config, parallelize = (importlib.import_module(f"{NAME}.nodes.{name}") for name in ("config", "parallelize"))
stock.NODE_CLASS_MAPPINGS |= advanced.NODE_CLASS_MAPPINGS
stock.NODE_CLASS_MAPPINGS |= {"SPConfig": config.SPConfig, "ParallelizeModel": parallelize.ParallelizeModel}
stock.NODE_DISPLAY_NAME_MAPPINGS["LoraLoaderModelOnly"] = "Load LoRA"


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


PROMPT = {
    "1": node("UNETLoader", unet_name="a", weight_dtype="default"),
    "2": node("LoraLoaderModelOnly", model=["1", 0], lora_name="b", strength_model=1.0),
    "config": node("SPConfig", devices="all"),
    "parallel": node("ParallelizeModel", model=["2", 0], sp_config=["config", 0]),
    "3": node("ModelSamplingFlux", model=["parallel", 0], max_shift=1.15),
    "3 again": node("ModelSamplingFlux", model=["3", 0], max_shift=2.0),
    "4": node("CLIPTextEncode", clip=["9", 0], text="a cat"),
    "5": node("ControlNetLoader", control_net_name="c"),
    "6": node("ControlNetApplyAdvanced", positive=["4", 0], negative=["4", 0], control_net=["5", 0], image=["7", 0]),
    "7": node("LoadImage", image="d"),
    "8": node("RescaleCFG", model=["3 again", 0], multiplier=0.7),
    "9": node("CLIPLoader", clip_name="e"),
    "10": node(
        "KSampler",
        **{"model": ["8", 0], "seed": 3, "positive": ["6", 0], "negative": ["6", 1], "latent_image": ["11", 0]},
        **{"gone": ["no node", 0], "pair": [1, 2], "named": ["8", "0"], "list": ["8", 0, 0]},
    ),
    "11": node("EmptyLatentImage", width=64),
    "lonely": {"class_type": "UNETLoader"},
    "outside": node("RescaleCFG", model=["1", 1]),
}
prompt = graph.DynamicPrompt(PROMPT)
prompt.add_ephemeral_node("10.0", node("RescaleCFG", model=["1", 0]), "10", "10")
progress.reset_progress_state("p", prompt)


def at(node_id):
    return utils.CurrentNodeContext("p", node_id)


def ids(found):
    return [each.node_id for each in found]


def graph_node(node_id):
    with at(node_id):
        return writers.executing_node()


def refusal_of(do, *given, **named):
    """The text of the error that a call is refused with, "" where it is not."""
    try:
        do(*given, **named)
    except ValueError as error:
        return str(error)
    return ""


# Nodes.
assert writers.executing() is None and writers.executing_node() is None and writers.nodes_before() == []
with at("2"):
    assert writers.executing().node_id == "2"
two = graph_node("2")
settings = "[('lora_name', 'b'), ('strength_model', 1.0)]"
assert two == writers.GraphNode(node_id="2", class_type="LoraLoaderModelOnly", settings=settings)
assert graph_node("lonely").settings == "[]" and graph_node("nowhere") is None
assert str(graph_node("10.0")) == "RescaleCFG (node 10)" and str(two) == "Load LoRA (node 2)"
known_by_class = writers.GraphNode(node_id="", class_type="UNETLoader")
assert str(known_by_class) == "Load Diffusion Model" and known_by_class.kind is stock.UNETLoader
assert writers.GraphNode(node_id="", class_type="Nothing").kind is object
assert [each for each in PROMPT if graph_node(each).ours] == ["config", "parallel"]
stock.NODE_CLASS_MAPPINGS["Beside"] = type("Beside", (), {"__module__": f"{NAME}.beside"})
assert not writers.GraphNode(node_id="", class_type="Beside").ours
pack = type("Pack", (), {"RETURN_TYPES": ("MODEL",)})
with at("10"), patch.dict(stock.NODE_CLASS_MAPPINGS, dict.fromkeys(("RescaleCFG", "KSampler", "UNETLoader"), pack)):
    assert ids(writers.packs_with_models()) == ["10", "8"]
assert writers.packs_with_models() == []

# What is before a node: the nearest first, each once, not what made a result.
BEFORE = ["8", "6", "3 again", "4", "5", "3", "9", "parallel", "2", "config", "1"]
with at("10"):
    assert ids(writers.nodes_before()) == BEFORE
    assert ids(writers.changers_of_models()) == ["8", "3 again", "3", "2"]
    assert writers.loader_of_model().node_id == "1"
    assert ids(writers.appliers_of_controlnets()) == ["6"]
    assert ids(writers.nodes_of("RescaleCFG", "UNETLoader")) == ["8", "1"]
    assert writers.nodes_of("CheckpointLoaderSimple", "Nothing") == [
        writers.GraphNode(node_id="", class_type="CheckpointLoaderSimple")
    ]
    assert ids(writers.nodes_like("lora")) == ["2"] and ids(writers.nodes_like("ksampler")) == ["10"]
    assert ids(writers.nodes_like("parallelize")) == ids(writers.nodes_like("apply")) == ["8", "3 again", "3", "2"]
    assert writers.still_there(two) and writers.still_there(graph_node("10"))
    assert writers.still_there(writers.GraphNode(node_id="77", class_type=two.class_type, settings=settings))
    assert not writers.still_there(writers.GraphNode(node_id="2", class_type=two.class_type, settings="[]"))
    assert not writers.still_there(writers.GraphNode(node_id="2", class_type="UNETLoader", settings=settings))
with at("2"):
    assert ids(writers.nodes_before()) == ["1"] and not writers.still_there(graph_node("3"))
with at("1"):
    assert writers.loader_of_model() is None and writers.nodes_before() == []
with at("outside"):
    assert ids(writers.nodes_before()) == ["1"], "a link to an output that ComfyUI does not know"
    assert writers.changers_of_models() == []
assert writers.still_there(two) and writers.loader_of_model() is None
assert writers.nodes_of("UNETLoader") == [known_by_class]

# What nodes wrote.
values = [object() for _ in range(3)]
written = writers.Written().after(values[:1], two).after(values[:2], graph_node("3"))
assert (written.by(values[0]), written.by(values[1]), written.by(values[2])) == (two, graph_node("3"), None)
assert written.values() == values[:2] and written.nodes() == [two, graph_node("3")]
assert written.after(values[1:2], None).values() == values[1:2]
ours = written.after(values, graph_node("parallel"))
assert ours.by(values[2]) is None and ours.nodes()[2].node_id == "parallel"
assert writers.Written().after(values, None).nodes() == []
deep = leaf = SimpleNamespace()
for _ in range(8):
    deep = [deep]
assert list(writers.values_in(deep)) == [leaf] and list(writers.values_in([deep])) == [[leaf]]
assert list(writers.values_in({"a": [1, 2.0, "3", None, True, leaf], "b": (leaf, print)})) == [leaf, leaf, print]


def inner(taken, given=None):
    def function():
        return taken, given, later

    if given is not None:
        later = given
    return function


assert writers.around(inner(1, 2)) == {"taken": 1, "given": 2, "later": 2}
assert writers.around(inner(1)) == {"taken": 1, "given": None} and writers.around(print) == {}


# Who wrote a value: the class whose code it is, else what the MODEL noted, its file, its pack.
class Kept:
    """Something with a function of a node in it."""

    def __init__(self, function):
        self.function, self.number = function, 3

    def method(self):
        """None of a node's."""


def of_module(module, name="Patch"):
    return type(name, (), {"__module__": module, "__qualname__": name})()


def kept_by(pack, name):
    """A node's class of another pack."""
    sys.modules[f"{pack}.{name}"] = types.ModuleType(f"{pack}.{name}")
    return type(name, (), {"__module__": f"{pack}.{name}", "RETURN_TYPES": ("MODEL",)})


packs = {"OfAPack": ("a_pack", "first"), "Second": ("a_pack", "second"), "OfAnother": ("another_pack", "first")}
stock.NODE_CLASS_MAPPINGS |= {name: kept_by(*where) for name, where in packs.items()}
prompt.original_prompt["pack"] = node("OfAPack", model=["8", 0])
prompt.original_prompt["second"] = node("Second", model=["pack", 0])
prompt.original_prompt["packs"] = node("OfAnother", model=["second", 0])
rescale, sampling = advanced.RescaleCFG.patch, advanced.ModelSamplingFlux.patch
with at("10"):
    assert ids(writers.writers_of(rescale)) == ["8"]
    assert ids(writers.writers_of(functools.partial(functools.partial(rescale)))) == ["8"]
    assert ids(writers.writers_of(advanced.RescaleCFG().patch)) == ids(writers.writers_of(inner(rescale))) == ["8"]
    assert ids(writers.writers_of(Kept(rescale))) == ["8"] and writers.writers_of(Kept(3)) == []
    assert ids(writers.writers_of(sampling)) == ["3 again", "3"]
    assert ids(writers.writers_of(advanced.LCM)) == ["8", "3 again", "3"], "of the same file"
    noted = writers.Written().after([sampling], graph_node("3"))
    assert ids(writers.writers_of(sampling, noted)) == ["3"]
    assert ids(writers.writers_of(sampling, writers.Written().after([sampling], two))) == ["3 again", "3"]
    by_another = writers.Written().after([leaf], two)
    assert ids(writers.writers_of(leaf, by_another)) == ["2"] and writers.writers_of(leaf) == []
    numbered_anew = writers.GraphNode(node_id="77", class_type=two.class_type, settings=settings)
    assert ids(writers.writers_of(leaf, writers.Written().after([leaf], numbered_anew))) == ["2"]
    gone = writers.GraphNode(node_id="2", class_type=two.class_type, settings="[]")
    assert writers.writers_of(leaf, writers.Written().after([leaf], gone)) == []
    assert ids(writers.writers_of(sampling, writers.Written().after([1], graph_node("3 again")))) == ["3 again"]
with at("packs"):
    assert ids(writers.writers_of(of_module("a_pack.patches"))) == ["second", "pack"]
    assert ids(writers.writers_of(of_module("a_pack.first"))) == ["pack"]
    assert ids(writers.writers_of(of_module("another_pack.first", "first"))) == ["packs"]
    assert writers.writers_of(of_module("third_pack.first")) == []
    assert writers.writers_of(of_module("comfy_extras.nodes_of_nobody")) == [], "ComfyUI's own is no pack"
    assert ids(writers.nodes_like("of")) == ["packs"]
assert [each.class_type for each in writers.writers_of(rescale)] == ["RescaleCFG"]
assert writers.writers_of(advanced.LCM) == [] == writers.writers_of(leaf)
assert writers.is_of_a_node(rescale) and writers.is_of_a_node(of_module("a_pack.x")) and not writers.is_of_a_node(leaf)
assert writers.defining_class(rescale) == "RescaleCFG" and writers.defining_class(leaf) == "SimpleNamespace"

# What a refusal says.
with at("3"):
    refusal = refusals.refused_here("it wraps weights")
    assert refusal.nodes == (graph_node("3"),) and refusal.holds and refusal.instead == refusals.INSTEAD
    named = "ModelSamplingFlux (node 3)"
    assert str(refusal) == (
        f"{named}: it wraps weights, which a parallel MODEL cannot take; remove that node, or {refusals.INSTEAD}"
    )
with at("2"):
    assert not refusal.holds
assert refusals.refused_here("it does").nodes == ()
both = str(refusals.refuse_by([two, graph_node("3"), two], "it does", "wait"))
cannot = "which a parallel MODEL cannot take"
assert both == f"one of Load LoRA (node 2), {named}: it does, {cannot}; remove that node, or wait"
assert str(refusals.refuse_by([], "it does", "wait")) == f"some node: it does, {cannot}; remove that node, or wait"
assert str(refusals.refuse_in("it", "this", "wait")) == f"this, {cannot}; remove it, or wait"
with at("10"):
    assert str(refusals.refuse_value(rescale, "it does")).startswith("RescaleCFG (node 8): it does, which")
    changers = "one of RescaleCFG (node 8), ModelSamplingFlux (node 3 again), ModelSamplingFlux (node 3), Load LoRA"
    assert str(refusals.refuse_value(leaf, "it does")).startswith(changers)
    error = refusals.CannotTravelError("options['a']", rescale)
    said = "RescaleCFG (node 8): it adds options['a'], a function, which"
    assert str(refusals.refuse_added(error, None)).startswith(said)
    error = refusals.CannotTravelError("options['a']", leaf)
    assert str(refusals.refuse_added(error, None)) == str(error)
    patches = {"patches": {"attn1_patch": [rescale, rescale], "own": [leaf]}}
    patches["patches_replace"] = {"dit": {("double_block", 1): sampling}, "attn": {("input", 4, 0): leaf}}
    names = [("attn1_patch", rescale), ("attn1_patch", rescale), ("own", leaf)]
    names += [("double_block 1", sampling), ("attn of input 4", leaf)]
    assert refusals.block_patches(patches) == names and refusals.block_patches({}) == []
    lines = refusal_of(refusals.check_transformer_options, patches).split("\n")
    assert [line.partition(": ")[2].partition(", which")[0] for line in lines] == [
        "it patches the model's blocks (attn1_patch)",
        "it patches the model's blocks (own, attn of input 4)",
        "it patches the model's blocks (double_block 1)",
    ]
    assert refusals.check_transformer_options({"patches": {}, "sigmas": 3}) is None
transformer = ("diffusion_model.blocks.0", "diffusion_model.params.x", "model_sampling")
assert [refusals.is_of_transformer(name) for name in transformer] == [True, True, False]

control = importlib.import_module("comfy.controlnet")
plain, lora = control.ControlNet(), control.ControlLora({})
plain.previous_controlnet = lora
refusals.check_controlnets({"positive": None, "negative": [{"control": control.ControlNet()}, {}]})
assert refusals.have_controlnet({"positive": None, "negative": [{"control": control.ControlNet()}, {}]})
assert not refusals.have_controlnet({"positive": None, "negative": [{"control": None}, {}]})
with at("10"):
    for first in (lora, plain):
        error = refusal_of(refusals.check_controlnets, {"negative": None, "positive": [{}, {"control": first}]})
        assert "(node 6): its ControlNet (ControlLora) computes with the model's own weights, which" in error

skips = inner(1)
skips.__code__ = skips.__code__.replace(co_filename=os.path.join("x", "comfy_extras", "nodes_slg.py"))
skips.__qualname__ = "a_node.<locals>.skip"
skipping = {"patches_replace": {"dit": {("double_block", 1): skips, ("double_block", 2): skips}}}
linear = importlib.import_module("torch").nn.Linear
error = refusal_of(refusals.check_skipping, linear, skipping, None)
assert ": it skips blocks of Linear (double_block 1, double_block 2; there is no plan for it), which" in error
refusals.check_skipping(linear, {"patches_replace": {"dit": {("double_block", 1): leaf}}}, None)


class SkipLayerGuidanceDiT:
    """As stock's node of that name: what it decides by is around its function."""

    def execute(self, double_layers, scale, sigma_start, sigma_end):
        def post(args):
            return double_layers, scale, sigma_start, sigma_end

        return post


class SkipLayerGuidanceDiTSimple(SkipLayerGuidanceDiT):
    """It skips them in the negative conditioning alone."""

    def execute(self, double_layers):
        def post(args):
            return double_layers

        return post


def why_not_in(*functions, guided=True):
    written, sigmas = writers.Written().after(functions, None), (1.0, 0.5)
    return refusal_of(refusals.check_skipped_layers, linear, written, sigmas, guided=guided).partition(";")[0]


layers, simple = SkipLayerGuidanceDiT().execute, SkipLayerGuidanceDiTSimple().execute([3])
skips = "some node: it skips blocks of Linear (double_block {}"
assert why_not_in(rescale, layers([1, 2], 3.0, 0.7, 0.2)) == skips.format("1, double_block 2")
assert why_not_in(simple) == skips.format("3")
nothing = (rescale, layers([], 3.0, 0.7, 0.2), layers([1], 0.0, 0.7, 0.2), layers([1], 3.0, 0.4, 0.2))
assert [why_not_in(each) for each in nothing] == [""] * 4 and why_not_in(simple, guided=False) == ""

# The prompt that is validated, and the one that runs.
server = queued.PromptServer.instance
assert queued.validated_inputs() == {}
handlers = len(server.on_prompt_handlers)
first = []
queued.watch_prompts(lambda: first.append(1))
assert len(server.on_prompt_handlers) == handlers + 1
request = {"prompt": {"4": node("X", a=1, b=["1", 0], c={"__value__": [1, 2]}, d={"e": 1}), "5": {}, "6": 3}}
assert server.on_prompt_handlers[-1](request) is request and queued.validated_inputs() == {}
server.on_prompt_handlers[-1](request)
assert first == [1], "once, before any node runs"
with at("4"):
    assert queued.validated_inputs() == {"a": 1, "b": ["1", 0], "c": [1, 2], "d": {"e": 1}}
for node_id in ("5", "6", "7"):
    with at(node_id):
        assert queued.validated_inputs() == {}
settings = {"mode": "manual", "devices": "cpu:1", "ulysses": 4, "ring": 1, "weights": "sharded", "shares": "3, 1"}
for more, said in (
    ({}, "names 2 device(s), 1 are there"),
    ({"machines": "127.0.0.1:7861, 3"}, ""),  # which devices will be there is not known
    ({"machines": "127.0.0.1:7861,x"}, "waits for 'x' machines"),
    ({"machines": "127.0.0.1:7861", "devices": "cpu:x"}, "cpu:x"),
    ({"machines": ["4", 0], "devices": "cpu:x"}, "cpu:x"),
    ({"machines": ["4", 0]}, ""),
):
    server.on_prompt_handlers[-1]({"prompt": {"7": node("SPConfig", **settings | more)}})
    with at("7"):
        why = config.why_refused(str((settings | more)["devices"]))
    assert said in why and bool(said) == bool(why), (more, why)
server.on_prompt_handlers[-1]({"prompt": "no graph"})
with at("4"):
    assert queued.validated_inputs() == {}
assert not queued.prompt_runs() and queued.running_values("X", "a", absent=0) == []
running = {"a": node("X", a={"__value__": [5]}), "b": node("Y", a=2), "c": node("X"), "d": {}}
server.prompt_queue.currently_running[7] = (0, "id", running, {}, [])
assert queued.prompt_runs() and queued.running_values("X", "a", absent=0) == [[5], 0]
queued.off = lambda feature: feature == "panel"
assert queued.running_values("X", "a", absent=0) == [None]

# What keeps state from call to call.
holder = easycache.EasyCacheHolder(0.2, 0.0, 1.0, 8, False, output_channels=4)
holder.total_steps_skipped = 3
options = {"transformer_options": {"easycache": holder}}
assert order.skipped_by_stock(options, steps=9) == order.StepCache("EasyCache", 0.2, 3, 9)
assert order.skipped_by_stock({}, steps=9) is None
assert order.skipped_by_stock({"transformer_options": {"easycache": leaf}}, steps=9) is None
assert order.of_step_cache(easycache.easycache_forward_wrapper) and not order.of_step_cache(rescale)
other, elsewhere = of_module("x.comfy_extras.nodes_easycache"), of_module("x.extras.nodes_easycache")
windows = of_module("C:\\Comfy\\comfy_extras\\nodes_easycache")
assert [order.of_step_cache(type(each)) for each in (other, elsewhere, windows)] == [True, False, True]


def promised():
    """Keeps nothing."""


def unknown():
    """Nobody knows."""


promised.parallel_dit_any_order = True
unknown.__module__ = None
mine = type(of_module(f"{NAME}.nodes.host.x"))
MAY = "a function of {} may keep state from one call to the next"
model_call, step = order.WrappersMP.DIFFUSION_MODEL, order.WrappersMP.OUTER_SAMPLE
prepare = order.CallbacksMP.ON_PREPARE_STATE


def wrapped(kind, *functions):
    return {"transformer_options": {"wrappers": {kind: {"key": list(functions)}}}}


for (callbacks, conds, given), why in (
    (({}, [{}], {}), None),
    (({}, iter([{"default": 1}]), {}), "a conditioning has default conditioning"),
    (({}, [{}, {"hooks": 1}], {}), "a conditioning has hooks"),
    (({}, [{"gligen": 1, "hooks": None}], {}), "a conditioning has GLIGEN"),
    (({}, [{}], {"context_handler": 1}), "the MODEL has context windows"),
    (({}, [{}], {"multigpu_clones": 1, "context_handler": None}), "the MODEL has copies on other devices"),
    (({}, [{}], {"model_function_wrapper": inner(1)}), MAY.format(inner.__module__)),
    (({}, [{}], {"model_function_wrapper": unknown}), MAY.format("no module")),
    (({}, [{}], {"model_function_wrapper": promised}), None),
    (({}, [{}], {"model_function_wrapper": mine}), None),
    (({}, [{}], wrapped(model_call, rescale)), None),
    (({}, [{}], wrapped(model_call, promised, inner(1))), MAY.format(inner.__module__)),
    (({}, [{}], wrapped(order.WrappersMP.APPLY_MODEL, inner(1))), MAY.format(inner.__module__)),
    (({}, [{}], wrapped(step, inner(1))), None),
    (({}, [{"area": 1}], wrapped(model_call, easycache.easycache_forward_wrapper)), "EasyCache begins again where"),
    (({}, [{}], wrapped(model_call, easycache.easycache_forward_wrapper)), None),
    (({}, [{"area": 1}], wrapped(model_call, rescale)), None),
    (({prepare: {None: [inner(1)]}}, [{}], {}), MAY.format(inner.__module__)),
    (({}, [{}], {"transformer_options": {"callbacks": {prepare: {0: [inner(1)]}}}}), MAY.format(inner.__module__)),
):
    told = order.why_calls_keep_order(callbacks, conds, given)
    assert told == why or why and told and told.startswith(why), (told, why)


def model_with(wrappers=None, callbacks=None, **options):
    options.setdefault("transformer_options", {})
    return SimpleNamespace(model_options=options, wrappers=wrappers or {}, callbacks=callbacks or {})


kinds = {step: {"key": [inner(1)]}}
for model, conds, why in (
    (model_with(), [[[0, {}]]], None),
    (model_with(), [[[0, {"hooks": 1}]]], "a conditioning has hooks"),
    (model_with(context_handler=1), [], "the MODEL has context windows"),
    (model_with(sampler_cfg_function=unknown), [], MAY.format("no module")),
    (model_with(sampler_post_cfg_function=[promised, unknown]), [], MAY.format("no module")),
    (model_with(another_function=unknown), [], None),
    (model_with(kinds), [], MAY.format(inner.__module__)),
    (model_with(None, kinds), [], MAY.format(inner.__module__)),
    (model_with(transformer_options={"wrappers": kinds}), [], MAY.format(inner.__module__)),
    (model_with(transformer_options={"callbacks": kinds}), [], MAY.format(inner.__module__)),
):
    assert order.why_runs_keep_order(model, conds) == why
order.off = lambda feature: "off" if feature == "cfg" else ""
assert order.why_runs_keep_order(model_with(), []) == order.why_calls_keep_order({}, [], {}) == "off"

# A process without a server is told ComfyUI's options, or why it does not take them.
without, cli = importlib.import_module(f"{contract}.without_server"), importlib.import_module("comfy.cli_args")
path, before = list(sys.path), dict(vars(cli.args))
error = refusal_of(without.begin, "/a", ["--no-such-option", "2"], on_cpu=True)
assert error == "--comfyui-options: this ComfyUI does not take --no-such-option 2; see its --help"
assert vars(cli.args) == before and sys.path.pop(0) == "/a"
without.begin("/b", ["--disable-metadata"], on_cpu=True)
assert (cli.args.disable_metadata, cli.args.cpu, sys.path.pop(0), sys.path) == (True, True, "/b", path)
without.begin("/b", ["--cpu"], on_cpu=False)
assert (cli.args.disable_metadata, cli.args.cpu) == (False, True)
vars(cli.args).update(before)
