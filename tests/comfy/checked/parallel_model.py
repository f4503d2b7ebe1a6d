"""What a parallel MODEL of a small Flux file answers to ComfyUI and its nodes before any worker is started.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import gc
import importlib
import logging
import math
import os
import sys
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from unittest.mock import patch

import torch
from trace_samplers import NAME, load

load(sys.argv[1])
sys.path.append(str(Path(__file__).resolve().parents[2]))
write_flux = importlib.import_module("host.tiny_models").write_flux

folder = tempfile.mkdtemp()
os.environ["XDG_CACHE_HOME"] = folder
comfy, samplers = importlib.import_module("comfy.sd"), importlib.import_module("comfy.samplers")
hooks, lora = importlib.import_module("comfy.hooks"), importlib.import_module("comfy.weight_adapter.lora")
utils, comfy_lora = importlib.import_module("comfy.utils"), importlib.import_module("comfy.lora")
weight_adapter = importlib.import_module("comfy.weight_adapter")
model_nodes, runtime = f"{NAME}.nodes.host", f"{NAME}.parallel_runtime"
new_model, pools, deltas, stand_in, convert, workload, run_context = (
    importlib.import_module(f"{model_nodes}.{name}")
    for name in (
        *("model.new_model", "model.pools", "model.weight_deltas", "model.stand_in"),
        *("model.convert_stock_model", "sampling.workload_from_guider", "sampling.run_context"),
    )
)
choice = importlib.import_module(f"{NAME}.nodes.choice")
patcher = importlib.import_module(f"{model_nodes}.model.patcher")
plans, decisions, counting, caches = (
    importlib.import_module(f"{runtime}.{name}")
    for name in ("plan", "planner.automatic", "planner.counting", "stock_caches")
)
file = str(write_flux(Path(folder) / "tiny.safetensors", depth=2, single=3))


def asked(**given):
    settings = {"mode": "manual", "devices": "cpu:2", "ulysses": 2, "shares": "equal", "plans": "written", **given}
    return choice.choice_of(**settings)


def refused(do, *words):
    """The error's text, which has each of the words."""
    try:
        do()
    except ValueError as error:
        assert all(word in str(error) for word in words), error
        return str(error)
    raise AssertionError(words)


SIZE = sum(weight.nbytes for weight in utils.load_torch_file(file).values())
model = new_model.remote_patcher(file, "default", asked(compiled="off", step_cache=0.0, lora="side branch"))
pooled = model.model.pooled
assert (pooled.plan, pooled.sizes.total, pooled.num_heads) == (plans.ParallelPlan(ulysses=2), SIZE, 2)
assert not pooled.started and pooled.measured == pooled.unlike_host == [] and not pooled.holds(model.plan)
assert pools.POOLS.all() == [pooled.pool] and pools.POOLS.last_loaded is None
again = new_model.remote_patcher(file, "default", asked(ring=2, ulysses=1, loop="host", tries="off"))
assert again.model is model.model and again.parent is model.parent and again.origin is not model.origin
assert (again.plan.ring, again.worker_loop, again.tries, again.side_branch) == (2, False, False, False)
assert (model.plan.ring, model.worker_loop, model.tries, model.side_branch) == (1, True, True, True)
assert (model.choose_again, model.advise, model.recorder, model.shares) == (None, None, None, ())
# A shift that a node sets in place is this MODEL's and its copies' alone; on ComfyUI's model, the newest MODEL's.
shift = again.get_model_object("model_sampling").shift
model.get_model_object("model_sampling").set_parameters(shift=shift + 1)
again.model.model_sampling.set_parameters(shift=shift + 2)
newest = new_model.remote_patcher(file, "default", asked())
newest.patch_model(load_weights=False)
after = new_model.remote_patcher(file, "default", asked())  # while another is patched
newest.unpatch_model(unpatch_weights=False)
after.model.model_sampling.set_parameters(shift=shift + 3)
shifts = ((model, 1), (model.clone(), 1), (again, 2), (newest, 0), (after, 3))
for it, has in ((each, shift + more) for each, more in shifts):
    it.patch_model(load_weights=False)
    assert it.model is model.model and it.model.model_sampling.shift == has
    it.unpatch_model(unpatch_weights=False)
for it, _ in shifts:
    it.get_model_object("model_sampling").set_parameters(shift=shift)
del newest, after, it, shifts
assert model.memory_text == f"weights: about {SIZE / 1e9:.2g} of {model.memory_text.split()[4]} GB on each device" + (
    "; what a step computes is not in this figure"
)

# Copies have all of it.
model.recorder, model.step_cache, model.attention = run_context.Recorder(), 0.2, "a kernel"
model.compiled, model.choose_again, model.advise = True, (lambda work: work), (lambda it, settings: settings)
copy = model.clone()
KEPT = ("decision", "choose_again", "advise", "side_branch", "compiled", "recorder", "origin", "step_cache")
KEPT += ("memory_text", "attention", "exchange", "worker_loop", "tries", "shares", "refused", "parent", "model")
assert {name: getattr(copy, name) for name in KEPT} == {name: getattr(model, name) for name in KEPT}
assert copy.parent is model.parent is not None and copy.clone().parent is model.parent
other = decisions.Decision(plan=plans.ParallelPlan(cfg=2))
under = model.under(other)
assert (under.plan, under.choose_again, model.plan.cfg) == (other.plan, None, 1)
assert model.decision_for("work") == "work" and model.decision_for(None) is model.decision
assert under.decision_for("work") is other and model.advice({"a": 1}) == {"a": 1} and again.advice({}) is None
assert model.shares_of_run() == () and not model.loaded_size()
unequal = new_model.remote_patcher(file, "default", asked(shares="3, 1"))
assert unequal.shares_of_run() == unequal.shares == (3, 1)
unequal.shares = None
assert unequal.shares_of_run() == ()
unequal.model.corrected.now = (5, 3)
assert unequal.shares_of_run() == (5, 3)
unequal.model.corrected.now = ()

# What ComfyUI's memory manager is told.
assert model.model_size() == again.model_size() == 2 * SIZE, "two ranks on the CPU keep all of it each"
sharded = new_model.remote_patcher(file, "default", asked(weights="sharded"))
assert sharded.model_size() == 2 * math.ceil(SIZE / 2) and sharded.parent is not model.parent
uneven = new_model.remote_patcher(file, "default", asked(weights="sharded", shares="3, 1"))
assert uneven.model_size() == math.ceil(SIZE * 0.75) + math.ceil(SIZE * 0.25)
assert uneven._plan_of_load().shares == (3, 1) and sharded._plan_of_load() == sharded.plan
assert model._plan_of_load() == model.plan and model._loads()
# ComfyUI's Linear of 0.39 and later takes what stands around its product, and so does what stands for it.
ops = importlib.import_module("comfy.ops")
source = importlib.import_module(f"{model_nodes}.model.source")
ops_stock, ops.linear_input_act = (
    vars(ops).get("linear_input_act"),
    lambda *given, **named: (given, named),
)
linear, rows = source.MetaOperations.Linear(3, 4), torch.ones(2, 3)
assert linear(rows).shape == (2, 4)
for given, named, wanted in (
    (("swiglu", 1), {"residual": rows}, (("swiglu", 1), {"residual": rows})),
    ((), {"input_act": "swiglu", "act_eps": 1}, (("swiglu",), {"act_eps": 1})),
    ((), {"residual": rows}, ((None,), {"residual": rows})),
):
    assert linear(rows, *given, **named) == ((linear, rows, *wanted[0]), wanted[1])
if ops_stock is None:
    del ops.linear_input_act
else:
    ops.linear_input_act = ops_stock
three = torch.zeros(3)
weights = {"b.0.w": three, "b.1.w": three, "b.1.v": three, "out": three}
sizes = source._sizes(weights, torch.nn.Module(), {"out": torch.half})
assert (sizes.total, sizes.biggest_block) == (3 * 12 + 6, 2 * 12)
one_cpu, one_cuda = (importlib.import_module(f"{runtime}.devices").Device(kind, 0) for kind in ("cpu", "cuda"))
for dtype, device, factor in (("bfloat16", one_cpu, 1), ("float32", one_cuda, 1), ("bfloat16", one_cuda, 0.5)):
    read = source.read_hosted(file, dtype, (device,))
    assert round(read.sizes.total / SIZE, 2) == factor, (dtype, device)
for dtype in ("fp16", "int8", "", None):  # as another node may give it
    unknown = f"weight_dtype={dtype!r} is unknown; use one of default, "
    refused(lambda dtype=dtype: source.read_hosted(file, dtype, (one_cpu,)), unknown)
staged = plans.ParallelPlan(pipefusion=2)
source.refuse_unplanned(model.model.diffusion_model, staged)
said = "pipefusion=2: patches between the blocks of Flux need all tokens"
refused(lambda: source.refuse_unplanned(model.model.diffusion_model, staged, source.SPECS | {}), said)
whole = model.model.memory_required([4, 16, 8, 8])
transformer = model.model.diffusion_model
stock_bytes = type(model.model).memory_required
assert whole == 2 * (stock_bytes(model.model, [4, 16, 8, 8], {}) / 2)
run, cached = under.new_run(other), under.clone()
cached.model_options = {"transformer_options": {"easycache": None}}
assert not run.stock_cache and cached.new_run(other).stock_cache
with run_context.begun({}, run):
    assert model.model.memory_required([5, 16, 8, 8]) == 2 * stock_bytes(model.model, [3, 16, 8, 8], {})
    run.stock_cache = True
    kept = caches.cached_rows_bytes(3 * 16 * 64)
    assert model.model.memory_required([5, 16, 8, 8]) == 2 * (stock_bytes(model.model, [3, 16, 8, 8], {}) + kept)
run = under.new_run(decisions.Decision(plan=plans.ParallelPlan(ulysses=2)))
for run.whole in (True, False):  # each rank computes all tokens, or its part
    with run_context.begun({}, run):
        part = 1 if run.whole else 2
        assert model.model.memory_required([4, 16, 8, 8]) == 2 * stock_bytes(model.model, [4, 16, 8, 8], {}) / part
visiting = 2 * sharded.model.pooled.sizes.biggest_block
assert sharded.model.memory_required([4, 16, 8, 8]) == 2 * (whole / 2 + visiting)
run = SimpleNamespace(stock_cache=True, step_cache=0.0, decision=other, plan=other.plan, whole=False)
assert stand_in.kept_by_caches(run, [3, 16, 8, 8]) == caches.cached_rows_bytes(3 * 16 * 64)
run.stock_cache = False
assert stand_in.kept_by_caches(run, [3, 16, 8, 8]) == 0.0
counted = counting.usual_counted()
usual = counting.usual_work_of(counted)
weighed = decisions.Decision(plan=other.plan, model=counted.model, work=usual)
run.decision, run.step_cache = weighed, 0.1
tokens = counted.model.image_tokens(16 * 64)
one = stand_in.kept_by_step_cache(counted.model, replace(usual, image_tokens=tokens, step_cache=True), other.plan)
assert stand_in.kept_by_caches(run, [3, 16, 8, 8]) == 3 * one > 0
run.whole, run.plan, asked_work = (
    True,
    plans.ParallelPlan(ulysses=2),
    replace(usual, image_tokens=tokens, step_cache=True),
)
whole_rows = stand_in.kept_by_step_cache(counted.model, asked_work, plans.ParallelPlan())
assert stand_in.kept_by_caches(run, [3, 16, 8, 8]) == 3 * whole_rows > 3 * one / 2

# A run's context.
context = model.new_run(other)
assert (context.model, context.decision, context.compiled, context.step_cache) == (pooled, other, True, 0.2)
assert (context.attention, context.exchange, context.recorder) == ("a kernel", "exact", model.recorder)
assert (context.wrapped, context.stock_cache, context.prover) == (False, False, model.model.prover)
assert context.written.values() == model.written().values() and context.deltas == deltas.delta_set(
    {}, None, shape_of=print
)
copy.model_options["model_function_wrapper"] = print
copy.model_options["transformer_options"]["easycache"] = 1
context = copy.new_run(other)
assert context.wrapped and context.stock_cache and model.told_of_proof() == [model.model.prover.told(model.plan)]


# What nodes may not do, and what they may.
def compile_by_patch(it, name):
    """As Compile Model of TeaCache's pack and Compile Model+ of WaveSpeed do."""
    it.add_object_patch(name, torch.compile(it.get_model_object(name), backend="eager"))


WHAT = (
    (lambda it: it.add_weight_wrapper("a", print), "it wraps weights"),
    (lambda it: it.add_wrapper_with_key("apply_model", "torch.compile", print), "it compiles the transformer in this"),
    (lambda it: it.set_injections("a key", []), "it injects modules into the model (a key)"),
    (lambda it: it.set_model_patch(print, "attn1_patch"), "it patches the model's blocks (attn1_patch)"),
    (lambda it: it.set_model_patch_replace(print, "dit", "double_block", 1), "blocks (double_block 1)"),
    (lambda it: it.add_object_patch("diffusion_model.img_in", 1), "it replaces diffusion_model.img_in"),
    (lambda it: it.add_object_patch("diffusion_model.params.theta", 1), "it replaces diffusion_model.params.theta"),
    (lambda it: it.add_object_patch("diffusion_model", torch.nn.Identity()), "it replaces diffusion_model, which"),
    (lambda it: compile_by_patch(it, "diffusion_model"), "it compiles the transformer in this process"),
    (lambda it: compile_by_patch(it, "diffusion_model.img_in"), "it compiles the transformer in this process"),
    (
        lambda it: it.set_model_compute_dtype(torch.float16),
        "compute dtype to float16 where the workers compute in float",
    ),
    (lambda it: it.get_key_patches(), "it reads the model's weights"),
    (lambda it: it.patch_weight_to_device("a", "cpu", return_weight=True), "it reads the model's weights"),
    (lambda it: it.state_dict_for_saving(None, None, None), "it saves the model's weights"),
    (lambda it: it.model_state_dict_for_saving(), "it saves the model's weights"),
    (lambda it: it.deepclone_multigpu(), "it copies the model to other devices"),
)
for do, what in WHAT:
    copy = again.clone()
    said = refused(lambda do=do, copy=copy: do(copy), what, "which a parallel MODEL cannot take")
    assert [str(each) for each in copy.refused] == [said] and again.refused == ()
    refused(lambda copy=copy: copy.new_run(other), what)  # also where a node went on
    refused(lambda do=do, copy=copy: do(copy), what)
    assert len(copy.refused) == 1
attentions = importlib.import_module("comfy.ldm.modules.attention")
registered_name = importlib.import_module(f"{NAME}.nodes.host.model.stock_functions").registered_name
for name, function in attentions.REGISTERED_ATTENTION_FUNCTIONS.items():
    assert registered_name(function) == name
assert registered_name(attentions.attention_basic) == registered_name(print) == "", "none is registered"
if hasattr(again, "set_model_optimized_attention"):
    refused(lambda: again.clone().set_model_optimized_attention(print), "it replaces the model's attention function")
for move in (lambda it: it.img_in.to("cpu"), lambda it: it.double_blocks.half(), lambda it: it.cpu()):
    layers = again.model.diffusion_model
    refused(
        lambda move=move, layers=layers: move(layers), "it reads the model's weights, which a parallel MODEL cannot"
    )
copy = again.clone()
copy.set_model_compute_dtype(None)
copy.set_model_compute_dtype(again.model_dtype())
copy.add_object_patch("model_sampling", again.model.model_sampling)
copy.add_wrapper_with_key("apply_model", "another", print)
assert copy.wrappers["apply_model"]["another"] == [print] and copy.object_patches.keys() >= {"model_sampling"}
copy.set_injections = lambda *_: None
copy.injections["a key"] = [SimpleNamespace()]
refused(copy._check_remote, "it injects modules into the model (a key)")
copy.injections.clear()
copy.weight_wrapper_patches["a"] = [print]
refused(copy._check_remote, "it wraps weights")
copy.weight_wrapper_patches.clear()
assert copy._check_remote() is None

# A function in ComfyUI's file of the class that code of a pack stands for, for the time of a call or for good.
layers, changed_modules = (
    importlib.import_module(name) for name in ("comfy.ldm.flux.layers", f"{model_nodes}.model.changed_modules")
)
with patch.object(layers, "attention", lambda *given, **named: None):
    for deep in (False, True):
        check = partial(changed_modules.refuse_changed, again.model.diffusion_model, deep=deep)
        refused(check, "it replaces comfy.ldm.flux.layers.attention, which a parallel MODEL cannot take")
warned = []
log = SimpleNamespace(warning=lambda text, *given: warned.append(text % given))
with (
    patch.object(layers, "attention", lambda *given, **named: None),
    patch.multiple(changed_modules, executing_node=lambda: "of a graph without that pack", log=log),
):
    for _ in range(2):
        check()
        gone = "a node that is no longer in the graph had changed ComfyUI"
        assert warned == [f"{gone} (it replaces comfy.ldm.flux.layers.attention); ranks do without"], "it is said once"
with patch.object(layers, "attention", layers.apply_mod):  # ComfyUI's own
    check()
check()

# Switches of torch that a callback sets for the time of a run, as KJNodes' Model Patch Torch Settings does.
SWITCHES = (
    (torch.backends.cuda.matmul, "allow_fp16_accumulation", "start ComfyUI with --fast fp16_accumulation"),
    (torch.backends.cudnn, "benchmark", "use Load Diffusion Model for this graph"),
)
for switches, name, instead in SWITCHES:
    was = getattr(switches, name)
    for value in (not was, was):
        copy = again.clone()
        copy.add_callback("on_pre_run", lambda _, it=switches, name=name, value=value: setattr(it, name, value))
        if value == was:
            copy.pre_run()
        else:
            refused(copy.pre_run, f"{name} for a run, which a parallel MODEL cannot take", instead)
        assert getattr(switches, name) == was
again.model.current_patcher = None

# Weight patches.
weight = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
plain = torch.ones(768, 256)
up, down = torch.ones(768, 4), torch.ones(4, 256)
adapter = lora.LoRAAdapter({"x"}, (up, down, 4.0, None, None, None))
assert copy.add_patches({weight: adapter}, 0.5, 0.9) == [weight]
refused(lambda: copy.clone().add_patches({weight: adapter}, math.nan), "double_blocks.0.img_attn", "strength=nan")
added = copy.delta_set()
(delta,) = added.deltas
assert (delta.key, delta.kind, delta.strength) == (weight.removeprefix("diffusion_model."), "lora", 0.5)
assert (delta.strength_model, delta.offset, delta.swap, delta.values) == (0.9, None, False, (up, down, 4.0, None))
assert added.name == str(copy.patches_uuid) and not added.side_branch and model.side_branch
assert not delta.where_used
memory = importlib.import_module("comfy.memory_management")
memory.aimdo_enabled = True  # dynamic VRAM, which needs an NVIDIA GPU
assert copy.delta_set().deltas[0].where_used
memory.aimdo_enabled = False
model_with = model.clone()
model_with.add_patches({weight: adapter})
assert model_with.delta_set().side_branch
shape_of = model.model.shape_of
PATCHES = (
    ((1.0, (plain,), 1.0, None, None), ("diff", (plain,), None, False)),
    ((1.0, ("diff", (plain,)), 1.0, (0, 3, 4), None), ("diff", (plain,), (0, 3, 4), False)),
    ((1.0, ("diff", (plain, {"pad_weight": True})), 1.0, None, None), ("padded_diff", (plain,), None, False)),
    ((1.0, ("diff", (plain, {"pad_weight": False})), 1.0, None, None), ("diff", (plain,), None, False)),
    ((1.0, ("set", (plain,)), 1.0, None, utils.swap_scale_shift), ("set", (plain,), None, True)),
)
for given, (kind, values, offset, swap) in PATCHES:
    (delta,) = deltas.delta_set({weight: [given]}, "uuid", shape_of=print).deltas
    assert (delta.kind, delta.values, delta.offset, delta.swap) == (kind, values, offset, swap)
for middle, reshape in ((up, None), (None, [4, 5]), (up, [4, 5])):
    adapter = lora.LoRAAdapter({"x"}, (up, down, 4.0, middle, None, reshape))
    (delta,) = deltas.delta_set({weight: [(1.0, adapter, 1.0, None, None)]}, "uuid", shape_of=print).deltas
    assert (delta.kind, delta.values[3]) == ("lora_core", middle)
    assert delta.values[5] is None if reshape is None else delta.values[5].tolist() == reshape
refused(
    lambda: deltas.delta_set({weight: [(1.0, (plain,), 1.0, None, print)]}, "u", shape_of=print),
    "a function of its own",
)
for change in (("set", 1, 2), ("other", (plain,)), [1, 2], 3):
    entry = (1.0, change, 1.0, None, None)
    refused(lambda entry=entry: deltas.delta_set({weight: [entry]}, "u", shape_of=print), "another model's")
beside = tuple(
    deltas.WeightDelta(key=f"{number}/w", kind="hook_weight", strength=1.0, values=(plain,)) for number in (7, 3, 7)
)
found = deltas.delta_set({}, "uuid", shape_of=print, hook_weights=beside)
assert (found.name, found.deltas, deltas.delta_set({}, "uuid", shape_of=print)) == (
    "uuid 3 7",
    beside,
    deltas.WeightDeltas(),
)

# Shapes follow the deltas that make a weight wider.
shapes = model.model.take_shapes
name = "img_in.weight"
narrow = transformer.get_parameter(name)
first = f"diffusion_model.{name}"
padded = (1.0, ("diff", (torch.ones(256, 128), {"pad_weight": True})), 1.0, None, None)
wider = deltas.delta_set({first: [padded]}, "u", shape_of=shape_of)
shapes(wider)
assert transformer.get_parameter(name).shape == (256, 128) and transformer.get_parameter(name).device.type == "meta"
assert (shape_of(first), shape_of("diffusion_model.none.weight"), shape_of("text")) == (narrow.shape, None, None)
shapes(wider)
shapes(added)
assert transformer.get_parameter(name) is narrow


# What ComfyUI leaves out of a LoRA does not travel: whether it changes a weight is asked of ComfyUI's own function.
def change(kind, *shapes, strength=1.0, offset=None):
    first, second, *more = tensors = tuple(torch.ones(shape) for shape in (*shapes, (1,))[: max(2, len(shapes))])
    if kind == "diff":
        return strength, ("diff", tensors[:1]), 1.0, offset, None
    if kind == "lokr":
        return strength, weight_adapter.LoKrAdapter({"x"}, (first, second, 1.0, *[None] * 6)), 1.0, offset, None
    if kind == "loha":
        return strength, weight_adapter.LoHaAdapter({"x"}, (first, second, 1.0, *more, *[None] * 3)), 1.0, offset, None
    dora, reshape = (more or (None,))[0], list(narrow.shape) if kind == "wider" else None
    return strength, lora.LoRAAdapter({"x"}, (first, second, 4.0, None, dora, reshape)), 1.0, offset, None


rows, columns = narrow.shape
CHANGES = (
    *(change("diff", (rows, columns)), change("diff", (rows, columns + 1)), change("diff", (2, 2), strength=0.0)),
    *(change("diff", (4, columns), offset=(0, 3, 4)), change("diff", (rows, columns), offset=(0, 3, 4))),
    *(change("lora", (rows, 2), (2, columns)), change("lora", (rows, 2), (2, columns + 1))),
    *(change("lora", (rows, 2), (3, columns)), change("lora", (rows + 1, 2), (2, columns))),
    *(change("lora", (4, 2), (2, columns), offset=(0, 3, 4)), change("lora", (5, 2), (2, columns), offset=(0, 3, 4))),
    *(change("lora", (rows, 2), (2, columns, 1, 1)), change("wider", (rows, 2), (2, columns))),
    change("wider", (rows, 2), (2, columns + 1)),
    *(change("lora", (rows, 2), (2, columns), (rows, 1)), change("lora", (rows, 2), (2, columns), (3, 1))),  # DoRA
    *(change("lokr", (2, 2), (rows // 2, columns // 2)), change("lokr", (3, 2), (rows // 2, columns // 2))),
    *(change("loha", (rows, 2), (2, columns), (rows, 2), (2, columns)),),
    *(change("loha", (rows, 2), (2, columns), (rows + 1, 2), (2, columns)), change("lora", (rows,), (columns,))),
)
travels = []
for entry in CHANGES:
    merged = comfy_lora.calculate_weight([entry], torch.zeros(rows, columns), first)
    found = deltas.delta_set({first: [entry]}, "u", shape_of=shape_of).deltas
    assert bool(found) == bool(merged.any()), entry
    travels.append(bool(found))
assert sorted(set(travels)) == [False, True] and travels.count(False) == 12
with ThreadPoolExecutor(1) as beside_us:
    warned, merge = [], comfy_lora.calculate_weight

    def while_another_warns(*given):
        warned.append(beside_us.submit(logging.warning, "of another thread").result())
        return merge(*given)

    comfy_lora.calculate_weight = while_another_warns
    whole = change("loha", (rows, 2), (2, columns), (rows, 2), (2, columns))
    assert deltas.delta_set({first: [whole]}, "u", shape_of=shape_of).deltas, warned
    assert warned == [None], warned
    comfy_lora.calculate_weight = merge
fits, misfits = CHANGES[0], CHANGES[1]
nothing = (1.0, (None,), 1.0, None, None)  # as of a node that multiplies a weight by 1
assert len(deltas.delta_set({first: [nothing]}, "u", shape_of=shape_of).deltas) == 1
again_with = again.clone()
again_with.add_patches({first: misfits[1], weight: (plain,)})
assert [each.key for each in again_with.delta_set().deltas] == [weight.removeprefix("diffusion_model.")]
told = "1 of 2 changes of weights do not fit this model and are left out, as in ComfyUI; the first is of img_in.weight"
assert deltas.refuse_misfit(again_with.patches, {}, shape_of) == told
assert deltas.refuse_misfit(again_with.patches, {first: 1}, shape_of) == ""
refused(
    lambda: again_with.add_patches({first: misfits[1], weight: misfits[1]}),
    "does not fit double_blocks.0.img_attn.qkv.weight, a weight of [768, 256]; use one made for this model",
)
again_with.clone().add_patches({first: misfits[1]})  # of a LoRA that is added weight by weight


# A LoRA that would have layers attend by another function, as ComfyUI applies it from 0.39 on: not among its patches,
# and at a strength of 0 not at all. The class is a newer ComfyUI's.
AT = "diffusion_model.double_blocks.0.comfy_attention"


class Attention(torch.nn.Module):
    function = None


def attention_comfy_kitchen_sol(): ...


def add(self, patches, strength=1.0, *more):
    if strength:
        self.add_object_patch(AT, wish)
    return [f"{AT}.config", *stock_add(self, patches, strength, *more)]


core, attentions = (
    importlib.import_module("comfy.model_patcher").ModelPatcher,
    importlib.import_module("comfy.ldm.modules.attention"),
)
wish, unmet, stock_add, said = Attention(), Attention(), core.add_patches, []
wish.function = partial(attention_comfy_kitchen_sol, tau=0.5)
refused(lambda: again.clone().add_object_patch(AT, wish), f"it replaces {AT}")
on_node = patch.object(patcher, "NodeText", lambda: SimpleNamespace(say=said.append))
left_out = "attention by comfy_kitchen_sol, which the LoRA asks for, is left out: workers attend as without it"
with on_node, patch.object(attentions, "ComfyAttention", Attention, create=True):
    with patch.object(core, "add_patches", add):
        for strength in (0.0, 1.0, 1.0):
            again_with = again.clone()
            assert again_with.add_patches({weight: adapter}, strength) == [f"{AT}.config", weight]
            assert AT not in again_with.object_patches and again_with.left_out == (left_out if strength else "")
        again_with.add_patches({first: misfits[1], weight: adapter})
    assert said[:2] == [left_out] * 2 and said[2] == again_with.left_out == f"{left_out}; {told}", said
    refused(lambda: again_with.add_object_patch(AT, wish), f"it replaces {AT}")  # of another node than a LoRA's
    with_wish = again.clone()
    with_wish.note_kernels()
    for layer in (wish, unmet, wish):
        with_wish.add_object_patch(AT, layer)
    with_wish.tell_misfits({}, {})
    assert with_wish.left_out == said[-1] == left_out
second = (1.0, ("diff", (torch.ones(256, 128),)), 1.0, None, None)
lying = deltas.delta_set({first: [padded, second]}, "u", shape_of=shape_of)
assert len(lying.deltas) == 2, "the second fits what the first makes"
reshaped = change("wider", (3, 2), (2, 5))
assert not deltas.delta_set({first: [reshaped, second]}, "u", shape_of=shape_of).deltas, "nothing is padded"

# A latent that is none ends a benchmark before anything runs.
benchmark = importlib.import_module(f"{NAME}.nodes.benchmark").ParallelBenchmark
none = {"samples": torch.zeros(0, 16, 8, 8)}
refused(lambda: benchmark.execute(model, none, "", 0, 1, False), "latent_image has shape [0, 16, 8, 8]")

# Two MODELs on the same weights.
new_model._refuse_other_weights(model, [model_with, again, 3])
again_with = again.clone()
again_with.add_patches({weight: adapter})
refused(
    lambda: new_model._refuse_other_weights(model, [again_with]), "two MODELs of tiny.safetensors", "different LoRAs"
)
new_model._refuse_other_weights(sharded, [again_with])
for cfg, options, guided in ((1.0, {}, False), (2.0, {}, True), (1.0, {"disable_cfg1_optimization": True}, True)):
    assert new_model._is_guided(SimpleNamespace(cfg=cfg, model_options=options)) is guided
assert new_model._is_guided(SimpleNamespace(model_options={}))

# What was sampled last, as Tune makes it up again: an image of a model of videos is one frame, not a few.
wan = importlib.import_module("comfy.latent_formats").Wan21()
for kind, frames, told in (("WAN21", 1, 1), ("WAN21", 3, 9), ("QwenImage", 1, None)):
    sampled = SimpleNamespace(model=type(kind, (), {"latent_format": wan})())
    sizes = {"batch": 2, "width": 64, "height": 32} | ({} if told is None else {"frames": told})
    assert new_model._sizes_of_run(sampled, torch.zeros(2, 16, frames, 4, 8)) == sizes, (kind, frames)

# What a run is asked for.
numbers, entry = 16 * 64 * 64, {"cross_attn": torch.zeros(1, 77, 8)}
image = counted.model.image_tokens(numbers)


def guider(cfg=3.0, **conds):
    options = {"transformer_options": {}}
    conds = {"positive": [entry], "negative": [{"cross_attn": torch.zeros(1, 99, 8)}], **conds}
    it = samplers.CFGGuider(model)
    it.conds, it.cfg, it.model_options = conds, cfg, options
    it.model_patcher = SimpleNamespace(callbacks={}, model=model.model, patches={})
    return it


def work(it, shape=(2, 16, 64, 64), steps=4, decision=weighed):
    return workload.work_of_run(it, torch.zeros(shape), torch.zeros(steps + 1), decision)


asks = {"image_tokens": image, "text_tokens": 99, "reference_tokens": 0, "guided": True, "batch": 2, "steps": 4}
assert work(guider()) == replace(usual, **asks)
assert work(guider(1.0)) == replace(usual, **{**asks, "text_tokens": 77, "guided": False})
assert work(guider(), steps=0).steps == work(guider(), steps=1).steps == 1
assert work(guider(), shape=(0, 16, 64, 64)) is None and work(guider(), decision=other) is None
assert work(guider(), decision=replace(weighed, model=None)) is None
for more, guided in (
    ({"start_percent": 0.1}, False),
    ({"start_percent": 0.0, "end_percent": 1.0}, True),
    ({"end_percent": 0.9}, False),
    ({"hooks": 1}, False),
):
    assert work(guider(positive=[entry | more])).guided is guided
assert work(guider(negative=None)).guided is False and workload.asks_both(guider())
assert not workload.asks_both(guider(1.0)) and not workload.asks_both(guider(negative=[]))
scheduled = guider([1.0, 3.0])  # a scale for each step, as a pack's guider has it
assert work(scheduled).guided and workload.asks_both(scheduled) and new_model._is_guided(scheduled)
two = guider()
two.model_patcher = two.uncond_model_patcher = model  # as Dual Model CFG Guider has it: one side after the other
assert not workload.asks_both(two) and work(guider()).guided and not work(two).guided
assert work(guider(positive=[{}], negative=[{"cross_attn": None}])).text_tokens == 0
pictures = [torch.zeros(1, 16, 64, 64), torch.zeros(1, 16, 32, 32)]
with_references = work(guider(positive=[entry, entry | {"reference_latents": pictures}]))
beside = counted.model.image_tokens(numbers) + counted.model.image_tokens(numbers // 4)
assert (with_references.image_tokens, with_references.reference_tokens) == (image + beside, 0)
keeping = replace(weighed, model=replace(counted.model, kept_bytes=8))
kept = work(guider(positive=[entry | {"reference_latents": pictures}]), decision=keeping)
assert (kept.image_tokens, kept.text_tokens, kept.reference_tokens) == (image, 77 + beside, beside)
with_graphs = replace(weighed, work=replace(usual, graphs=True))
patched = [guider() for _ in range(4)]
patched[1].model_patcher.patches = {"a weight": 1}
patched[2].model_options["transformer_options"]["patches"] = {"attn1_patch": [1]}
patched[3].model_options["transformer_options"]["patches_replace"] = {"dit": {("double_block", 0): 1}}
assert [work(it, decision=with_graphs).graphs for it in patched] == [True, False, False, False]
settings = {"positive": [[torch.zeros(1, 77, 8), {}]], "negative": [[torch.zeros(1, 99, 8), {}]], "cfg": 3.0}
settings |= {"latent": {"samples": torch.zeros(2, 16, 64, 64)}, "steps": 4}
assert workload.work_of_settings(again, settings, weighed) == replace(usual, **asks)
empty = settings | {"latent": {"samples": torch.zeros(2, 4, 64, 64)}}  # Empty Latent Image's, of 4 channels
assert workload.work_of_settings(again, empty, weighed) == replace(usual, **asks)
assert workload.work_of_settings(again, settings | {"cfg": 1.0}, weighed).guided is False
assert workload.work_of_settings(again, settings, other) is None
hooked = settings | {"positive": [[torch.zeros(1, 77, 8), {"hooks": hooks.HookGroup()}]]}
assert workload.work_of_settings(again, hooked, weighed).guided is False

# One device that is not ComfyUI's computes in a worker; ComfyUI's own leaves the MODEL as it is, and that is said.
parallelize = importlib.import_module(f"{NAME}.nodes.parallelize")
passed, logged = object(), []
log = SimpleNamespace(info=lambda text, *given: logged.append(text % given))
with patch.multiple(parallelize, parallelized=lambda *_: model, log=log):
    for device, result in ((one_cpu, passed), (one_cuda, model)):
        on_one = SimpleNamespace(selection=SimpleNamespace(devices=(device,)), weights="replicated", step_cache=0.0)
        on_one.told, on_one.refuse_unasked_cpu = lambda _: [], lambda main: None
        assert parallelize.ParallelizeModel.execute(passed, on_one).args == (result,), device
assert logged == ["Parallelize Model: one device (cpu:0), nothing to share; the model stays as it is"]

# A stock MODEL with what was applied to it.
stock = comfy.load_diffusion_model(file)
stock.add_patches({weight: (plain,)}, 0.5)
stock.add_object_patch("model_sampling", stock.model.model_sampling)
stock.model_options["transformer_options"]["told"] = [1]
stock.add_wrapper_with_key("outer_sample", "mine", print)
stock.attachments["a"] = 1
stock.add_callback_with_key("on_load", "mine", print)
stock.set_additional_models("beside", [comfy.load_diffusion_model(file)])
ours = convert.parallelized(stock, asked())
assert ours.parent is model.parent and ours.patches.keys() == {weight} and ours.patches_uuid == stock.patches_uuid
assert ours.object_patches.keys() >= {"model_sampling"} and ours.attachments == {"a": 1}
assert ours.model_options["transformer_options"]["told"] == [1] and ours.wrappers["outer_sample"]["mine"] == [print]
assert run_context.RUN_KEY in ours.wrappers["outer_sample"] and ours.callbacks == stock.callbacks != {}
assert [each.model for each in ours.additional_models["beside"]] == [stock.additional_models["beside"][0].model]
stock.model_options["transformer_options"]["told"].append(2)
stock.add_wrapper_with_key("outer_sample", "mine", len)
stock.patches[weight].append(3)
assert ours.model_options["transformer_options"]["told"] == [1] and len(ours.patches[weight]) == 1
assert ours.wrappers["outer_sample"]["mine"] == [print]
refused(lambda: convert.parallelized(ours, asked()), "this MODEL is parallel already")
HELD = (
    (lambda it: it.add_weight_wrapper("a", print), "it wraps weights"),
    (lambda it: it.set_injections("a key", [SimpleNamespace()]), "it injects modules into the model"),
    (lambda it: it.add_object_patch("diffusion_model.img_in", SimpleNamespace()), "it replaces diffusion_model.img_in"),
    (lambda it: it.add_object_patch("diffusion_model", torch.nn.Identity()), "it replaces diffusion_model, which"),
    (lambda it: compile_by_patch(it, "diffusion_model"), "it compiles the transformer in this process"),
    (lambda it: it.set_model_patch(print, "attn1_patch"), "it patches the model's blocks (attn1_patch)"),
    (lambda it: it.add_wrapper_with_key("apply_model", "torch.compile", print), "it compiles the transformer"),
    (lambda it: it.set_additional_models("multigpu", [it.clone()]), "it copies the model to other devices"),
    (lambda it: setattr(it, "load_device", torch.device("cuda", 1)), "it puts the model on cuda:1"),
)
for do, what in HELD:
    changed = comfy.load_diffusion_model(file)
    do(changed)
    refused(lambda changed=changed: convert.parallelized(changed, asked()), what)
# What a node changed by hand on the stock transformer is not in its MODEL, and would be lost.
BY_HAND = (
    (lambda it: setattr(it, "__class__", type("Other", (type(it),), {})), "it replaces the class of diffusion_model,"),
    (lambda it: setattr(it, "forward_orig", MethodType(print_it, it)), "it replaces diffusion_model.forward_orig"),
    (lambda it: it.double_blocks[0].register_forward_hook(print_it), "it hooks diffusion_model.double_blocks.0"),
    (lambda it: it.double_blocks.append(Pack()), "it replaces the class of diffusion_model.double_blocks.2"),
)


def blocks_for_a_call(it, model):
    """As First Block Cache does."""
    blocks = torch.nn.ModuleList(it.double_blocks)

    def wrapper(function, given):
        with patch.object(it, "double_blocks", blocks):
            return function(given["input"], given["timestep"], **given["c"])

    model.set_model_unet_function_wrapper(wrapper)


def method_for_a_call(it, model):
    """As MagCache does: the patch is made beforehand."""
    context = patch.multiple(it, forward_orig=MethodType(print_it, it))

    def wrapper(function, given):
        with context:
            return function(given["input"], given["timestep"], **given["c"])

    model.add_wrapper_with_key("apply_model", "mine", wrapper)


def in_a_callback(it, model):
    """What keeps it in an object."""
    model.add_callback("on_pre_run", partial(print_it, SimpleNamespace(layers=it.double_blocks)))


def of_the_model(it, model):
    """What reads the MODEL alone."""
    base = model.model
    model.set_model_unet_function_wrapper(lambda function, given: (base, model, function, given))


class Pack(torch.nn.Module):
    """A module of a pack's."""


def print_it(*given, **named):
    """Code of a pack."""


for do, what in BY_HAND:
    changed = comfy.load_diffusion_model(file)
    do(changed.model.diffusion_model)
    refused(lambda changed=changed: convert.parallelized(changed, asked()), what)
for do in (blocks_for_a_call, method_for_a_call, in_a_callback):
    changed = comfy.load_diffusion_model(file)
    do(changed.model.diffusion_model, changed)
    refused(lambda changed=changed: convert.parallelized(changed, asked()), "it keeps the transformer of the stock")
changed = comfy.load_diffusion_model(file)
of_the_model(changed.model.diffusion_model, changed)
assert convert.parallelized(changed, asked()).model_options["model_function_wrapper"]
changed = comfy.load_diffusion_model(file)
changed.cached_patcher_init = None
refused(lambda: convert.parallelized(changed, asked()), "Parallelize Model: it reads the MODEL otherwise than")
# As Diffusion Model Loader KJ notes it, with a second file or without; ends in the file's own name.
for second, said in ((None, "use Parallel Model Loader with tiny.safetensors"), ("/b/c.safetensors", "MODEL of tiny")):
    changed.cached_patcher_init = print, (file, {}, second)
    refused(lambda: convert.parallelized(changed, asked()), said)
changed.cached_patcher_init = print, ("z_image_turbo.gguf",)
refused(lambda: convert.parallelized(changed, asked()), f"use Parallel Model Loader with {convert.ANY_SMALL}")
for named, instead in (
    ("Qwen-Image-Edit-2511-Q4_K_M.gguf", "qwen_image_edit_2511_int8_convrot.safetensors"),
    ("Qwen-Image-Edit-2509-Q4_K_M.gguf", convert.ANY_SMALL),
    ("krea2-turbo-Q8_0.gguf", "krea2_turbo_int8_convrot.safetensors"),
    ("krea2-raw-Q8_0.gguf", convert.ANY_SMALL),
):
    assert convert.small_file(named) == instead, named
changed = comfy.load_diffusion_model(file)
changed.add_object_patch("manual_cast_dtype", torch.bfloat16)
ours = convert.parallelized(changed, asked())
assert (ours.model.pooled.spec.dtype, "manual_cast_dtype" in ours.object_patches) == ("bfloat16", False)
changed.add_object_patch("manual_cast_dtype", torch.float64)
refused(
    lambda: convert.parallelized(changed, asked()),
    "the model computes in float64, the workers in",
    "put ModelComputeDtype",
)
eight = comfy.load_diffusion_model(file, model_options={"dtype": torch.float8_e4m3fn, "fp8_optimizations": True})
assert convert._compute_dtype(eight, {"dtype": torch.float8_e4m3fn}) == "fp8_e4m3fn"
assert convert._compute_dtype(eight, {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}) == "fp8_e4m3fn_fast"
assert convert._compute_dtype(eight, {"dtype": torch.float8_e5m2}) == "fp8_e5m2"
eight.add_object_patch("manual_cast_dtype", torch.bfloat16)
refused(lambda: convert._compute_dtype(eight, {"dtype": torch.float8_e5m2}), "remove ModelComputeDtype")

# What a benchmark compares.
benchmark, cases, proving, proofs, version = (
    importlib.import_module(name)
    for name in (
        *(f"{NAME}.nodes.benchmark", f"{model_nodes}.proof.benchmark_cases", f"{model_nodes}.proof.proving"),
        *(f"{runtime}.proof", f"{model_nodes}.contract.version"),
    )
)
plain = new_model.remote_patcher(file, "default", asked())
hooked_weight = {next(iter(plain.model.state_dict())): ("diff", (torch.ones(1),))}
assert plain.add_hook_patches(hooks.WeightHook(0.0, 1.0), hooked_weight, 0.0) == [], "for the text encoder alone"
try:
    plain.add_hook_patches(hooks.WeightHook(0.5, 1.0), hooked_weight, 0.5)
except (ValueError, RuntimeError) as error:
    assert "it changes weights by a hook of a conditioning" in str(error)
else:
    raise AssertionError
assert cases.require_ours(plain) is plain
remedy = "connect Parallel Model Loader or Parallelize Model"
refused(lambda: benchmark.CaseRunner(stock, settings, worker_loop=True), "a ModelPatcher without workers", remedy)
assert cases.plan_of_settings(plain, settings) == plain.plan
weighing = plain.clone()
weighing.decision, weighing.choose_again = (
    weighed,
    lambda work: decisions.Decision(plan=plans.ParallelPlan(ring=work.batch)),
)
assert cases.plan_of_settings(weighing, settings) == plans.ParallelPlan(ring=2), "the one that such a run gets"
assert cases.under_plan(plain, plans.ParallelPlan(cfg=2)).plan == plans.ParallelPlan(cfg=2)
of_three, whole_weights = plans.ParallelPlan(ulysses=3), plans.ParallelPlan(cfg=2)
for it, plan, says, remedy in (
    (plain, of_three, "ulysses=3 needs 3 ranks, this MODEL has 2", "name more devices in SP Config"),
    (sharded, whole_weights, "replicated, this MODEL has them sharded", "compare plans of the same weights"),
):  # as cases are made, before any runs
    runner = benchmark.CaseRunner(it, settings, worker_loop=True)
    refused(lambda runner=runner, plan=plan: runner.cases([plan], stock=False), says, remedy)
again_with.add_wrapper_with_key("outer_sample", "mine", print)
again_with.add_callback_with_key("on_load", "mine", print)
again_with.set_attachments("a", 1)
again_with.set_additional_models("beside", [stock])
copy = cases.stock_copy(again_with)
assert {kind: by_key for kind, by_key in copy.wrappers.items() if by_key} == {"outer_sample": {"mine": [print]}}
assert (copy.callbacks, copy.attachments) == (again_with.callbacks, {"a": 1}) and copy.callbacks["on_load"]["mine"]
assert [each.model for each in copy.additional_models["beside"]] == [stock.model]
assert type(copy) is type(stock) and copy.patches.keys() == {weight} and copy.model_dtype() == torch.float32
refused(lambda: cases.stock_copy(model_with), "stock ComfyUI has no LoRA beside the weights", "lora=side branch")
nested = SimpleNamespace(is_nested=True, unbind=lambda: [torch.ones(1, 2, dtype=torch.bfloat16), torch.zeros(3)])
assert cases.numbers_of(nested).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
assert cases.numbers_of(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.float32
before = torch.get_num_threads()
with cases.threads(before + 1):
    assert torch.get_num_threads() == before + 1
with cases.threads(None):
    assert torch.get_num_threads() == before
assert torch.get_num_threads() == before and not cases.attention_is_slow(torch.device("cuda"))
runner = benchmark.CaseRunner(plain, settings, worker_loop=True)
rows, warnings = runner.cases([plans.ParallelPlan(ring=2), plain.plan], stock=True)
each = pooled.pool.threads_per_rank
assert [(row.name, row.kind, row.engine, row.threads) for row in rows] == [
    ("one rank", "one_rank", "parallel-dit", each),
    (f"ComfyUI, {2 * each} threads", "one_process", "comfyui", 2 * each),
    ("ring2", "plan", "parallel-dit", 2 * each),
    ("uly2", "plan", "parallel-dit", 2 * each),
]
assert warnings == ([cases.SLOW_ATTENTION] if cases.attention_is_slow(torch.device("cpu")) else [])
assert [len(row.devices or ()) for row in rows] == [1, 0, 2, 2]
rows, warnings = benchmark.CaseRunner(sharded, settings, worker_loop=True).cases([sharded.plan], stock=False)
assert [row.name for row in rows] == ["uly2-sharded"] and warnings[0].startswith(
    "no one rank to compare with: this MODEL's"
)
assert benchmark.read_plans(" \nring=2\nulysses=2\nring=2\n", plain.plan) == [plans.ParallelPlan(ring=2), plain.plan]
assert benchmark.read_plans("\n", plain.plan) == [plain.plan]
sampler = importlib.import_module(f"{NAME}.nodes.sampler")
empty, said = {"samples": torch.zeros(1, 16, 8, 8)}, "loop='resident' is unknown; use one of auto, host"
refused(lambda: sampler.ParallelSampler.execute(plain, empty, "resident"), said)
given = {"plans": "", "warmup": 0, "runs": 1, "stock": False, "loop": "resident"}
refused(lambda: benchmark.ParallelBenchmark.execute(plain, empty, **given), said)
staged = new_model.remote_patcher(file, "default", asked(ulysses=1, pipefusion=2))
alike = benchmark.read_plans("pipefusion=2,patches=2\npipefusion=2,patches=8", staged.plan)
rows, _ = benchmark.CaseRunner(staged, settings, worker_loop=True).cases(alike, stock=False)
assert [row.name for row in rows] == ["pipefusion=2,patches=2", "pipefusion=2,patches=8"]

# What is known of a plan before and in a run.
prover = plain.model.prover
ring, whole = plans.ParallelPlan(ring=2), plans.ParallelPlan(cfg=2)
for plan, told in (
    ("ulysses=2", "ulysses=2"),
    ("ring=2,ulysses=2,shares=1:2:3:4", "ulysses=2,ring=2,shares=1:2:3:4"),
    ("data=2,ulysses=2,shares=3:1:1:1", "ulysses=2,shares=3:1:1:1"),
    ("pipefusion=2,ulysses=2,shares=3:1:1:1", "ulysses=2"),
    ("cfg=2,ulysses=2,weights=sharded", "ulysses=2,weights=sharded"),
):
    assert proving._told(plans.ParallelPlan.parse(plan)) == told
assert prover.told(plans.ParallelPlan(pipefusion=2)) == proving.STAGED.text
there, prover._transformer = prover._transformer, weakref.ref(torch.nn.Identity())  # which nothing holds
assert prover.gone
prover._transformer = there
assert not prover.gone
assert prover.told(whole) == f"no proof needed: {proving.WHOLE.reason}"
not_yet = "is proven against one device before its first step, once for each kind of call;"
assert prover.told(ring) == f"ring2 {not_yet} not done yet"
key = prover.key(ring, ("x",))
kind = type(plain.model.diffusion_model)
assert (key.comfyui, key.model_class) == (version.comfyui_version(), f"{kind.__module__}.{kind.__qualname__}")
assert (key.plan, key.arguments, key.weights) == ("ring=2", ("x",), "float32 of float32")
assert key.kernels.startswith(f"cpu torch {torch.__version__}") and len(key.source.split()[0]) == 16
assert key == prover.key(ring, ("x",)) != prover.key(plain.plan, ("x",))
there, Device = prover.pooled, type(one_cuda)
proving.kinds_here = lambda devices: ["RTX 3090", "RTX 4090"]
for machine, cards in (("", "RTX 3090 RTX 4090"), ("far", "RTX 3090 RTX 4090 far")):
    prover.pooled = SimpleNamespace(**vars(there) | {"devices": [one_cuda, Device("cuda", 0, machine)]})
    assert prover.key(ring, ("x",)).kernels.startswith(f"{cards} torch {torch.__version__}"), "they choose kernels"
prover.pooled = there
proof = proofs.Proof(verdict=proofs.PROVEN, reason="", error=1e-7, control=0.5, tolerance=1e-5, calls=3)
for number, verdict in enumerate((proofs.PROVEN, proofs.PROVEN, proofs.REFUSED)):
    prover._store.save(prover.key(ring, (str(number),)), replace(proof, verdict=verdict))
assert prover.told(ring) == f"ring2 {not_yet} kinds of calls so far: 2 {proofs.PROVEN}, 1 {proofs.REFUSED}"
plain.model.pooled.found_by = "by a look"
assert prover.told(ring).startswith("found, proven: by a look; ring2 is")
plain.model.pooled.found_by = ""


def running(plan, *, automatic=False):
    decision = decisions.Decision(plan=plan, automatic=automatic)
    return run_context.RunContext(model=plain.model.pooled, decision=decision, images=2, guided=True)


model_call, to_tree = (importlib.import_module(f"{runtime}.{name}") for name in ("model_call", "models.hosted.calls"))
tree, tensors = to_tree.to_tree({"args": [torch.zeros(1, 16, 8, 8)], "kwargs": {"transformer_options": {}}})
call = model_call.ModelCall(
    tensors={f"t{number}": each for number, each in enumerate(tensors)},
    out_shape=(1, 16, 8, 8),
    options={"call": tree, "method": None},
)
verdicts = []
prover._proven = lambda run, call, check: verdicts[-1]
for plan, known in ((whole, proving.WHOLE), (plans.ParallelPlan(pipefusion=2), proving.STAGED)):
    prover.check(run := running(plan), call, print)
    assert run.proofs == [known]
assert prover.knows(whole, call) and not prover.knows(ring, call)
prover.check(run := running(ring), replace(call, options={**call.options, "method": "m"}), print)
assert run.proofs == []
verdicts.append(replace(proof, verdict=proofs.NOT_PROVEN, error=None, reason="too large"))
prover.check(run := running(ring), call, print)
assert run.proofs == verdicts and prover.knows(ring, call)
assert prover._store.load(prover.key(ring, prover._arguments(call))) is None, "it was not judged"
verdicts.append(proof)
other_size = replace(call, tensors={name: torch.zeros(1, 16, 8, 12) for name in call.tensors})
assert prover._arguments(other_size) == prover._arguments(call)
prover.check(run := running(ring), other_size, print)
assert run.proofs == [proof] and prover._store.load(prover.key(ring, prover._arguments(call))) == proof
prover._known.clear()
verdicts.append("not asked again")
assert prover.knows(ring, call)
prover.check(run := running(ring), call, print)
assert run.proofs == [proof]
stored, type(prover)._store = type(prover)._store, None
prover.check(run := running(ring), call, print)
assert run.proofs == [proof], "what is known is read from no file again"
type(prover)._store = stored
verdicts.append(replace(proof, verdict=proofs.REFUSED, reason="an error of 0.3"))
refused(
    lambda: prover.check(running(plain.plan), call, print),
    *("ulysses=2 is refused for Flux of ComfyUI", "an error of 0.3; in SP Config", "the pack's plan does not fit this"),
)
prover.check(run := running(plain.plan, automatic=True), call, print)
assert run.plan == decisions.without_sharing(decisions.Decision(plan=plain.plan), 2, guided=True, images=2).plan
assert (
    "the proof of uly2 failed for Flux" in run.remarks[0] and "where one device computes each image" in run.remarks[0]
)
assert run.proofs == [proving.WHOLE] and not run.whole and run._as_found(call) is call
spread = plans.ParallelPlan(ulysses=3, weights="sharded")
prover.check(run := running(spread, automatic=True), call, print)
assert run.plan == spread and run.whole and run.proofs == [proving.WHOLE] and run.trier is None
assert "goes on with uly3-sharded, as the weights lie, and each device computes each image whole" in run.remarks[0]
run.graphs_under = spread
assert run._as_found(call).options == {**call.options, "whole": True}
verdicts.append("not asked again")
prover.check(run, call, print)
assert run.proofs == [proving.WHOLE] and len(run.remarks) == 1
assert prover._room(call, [600, 400]) == proving.SPARE * 400 / (2 * prover.memory_required([1, 16, 8, 8]))
assert prover._room(call, [400]) == proving.SPARE * 400 / prover.memory_required([1, 16, 8, 8])
prover.memory_required = lambda shape: 0.0
assert prover._room(call, [600, 400]) == proving.SPARE * 400

# What stands for the transformer's forward: a call is sent with its run; here it is captured, and answered with zeros.
forward = importlib.import_module(f"{model_nodes}.model.forward")
transformer = plain.model.diffusion_model
remote = transformer.forward
x, text, pooled_text = torch.ones(2, 16, 8, 8, dtype=torch.bfloat16), torch.ones(2, 9, 64), torch.ones(2, 32)
given = {"timestep": torch.ones(2), "context": text, "y": pooled_text, "guidance": torch.ones(2)}


def called(options=None, x=x, **more):
    run = running(ring)
    run.captured = []
    around = {run_context.RUN_KEY: run, **(options or {})}
    return remote(x, **{**given, **more}, transformer_options=around), run.captured


out, (call,) = called()
assert out.shape == x.shape and out.dtype == torch.float32 and not out.any()
assert call.out_shape == (2, 16 * 8 * 8) and [each.shape for each in call.tensors.values()][0] == x.shape
assert call.options["compiled"] is False and call.options["method"] is None
assert (remote.channels, remote.wrapped, forward.runs_wrappers(torch.nn.Flatten)) == (16, True, False)
seen = []
around = {
    "wrappers": {
        "diffusion_model": {"mine": [lambda executor, *args, **named: seen.append(1) or executor(*args, **named)]}
    }
}
assert called(around)[1] and seen == [1]
refused(lambda: remote(x, torch.ones(2)), "Flux is called with", "as graphs of another model do")
refused(lambda: called({"ar_state": 1}), "it keeps state in the model (ar_state)")
refused(lambda: called({"patches": {"attn1_patch": [print]}}), "it patches the model's blocks (attn1_patch)")
refused(lambda: called({"an object": SimpleNamespace()}), "a SimpleNamespace")
assert called({"patches": {}, "patches_replace": {}})[1]
of_another = [{"module": "a module", "patch": "ADiffSynth"}]
passes = {"check_transformer_options": lambda *_, **__: None, "refuse_unplanned": print}
with patch.multiple(forward, records=lambda *_: of_another, **passes):
    refused(lambda: called({"patches": {"double_block": [print]}}), "that another MODEL carries (ADiffSynth)")
other_run = running(whole)
transformer.outside_runs, outside = other_run, transformer.outside_runs
assert remote._run({}) is other_run and remote._run({run_context.RUN_KEY: SimpleNamespace(model=3)}) is other_run
with run_context.begun({}, run := running(ring)):
    assert remote._run({}) is run and remote._run({run_context.RUN_KEY: other_run}) is other_run
transformer.outside_runs = outside
assert forward.alive(lambda: 5) == 5
try:
    forward.alive(lambda: None)
except RuntimeError as error:
    assert "a MODEL that is gone" in str(error)
else:
    raise AssertionError

# Loading is all or nothing, and ComfyUI is told the bytes; what the workers hold is noted here.
held, called_back, kind = [], [], type(pooled)
kind.holds = lambda self, plan: bool(held)
kind.held_layout = lambda self, plan: plan.layout if held else None
kind.ensure = lambda self, plan, changes, *, progress, check_cancelled: held.append((plan, changes)) or {1: 2.5}
kind.unload = lambda self, plan: held.clear()
it = again_with.clone()
it.recorder, it.compiled = run_context.Recorder(), True
it.add_callback_with_key(
    importlib.import_module("comfy.patcher_extension").CallbacksMP.ON_LOAD,
    "mine",
    lambda *given: called_back.append(given),
)
here = torch.device("cpu")
assert it.partially_load(here, 1) == it.loaded_size() == it.model_size() == 2 * SIZE
assert [(plan, changes.name) for plan, changes in held] == [
    (it.plan, it.delta_set().name)
] and it.recorder.rank_load_s == {1: 2.5}
assert called_back == [(it, here, 0, False, True)] and (it.model.device, it.model.model_loaded_weight_memory) == (
    here,
    2 * SIZE,
)
assert it.model.current_weight_patches_uuid == it.patches_uuid
outside = it.model.diffusion_model.outside_runs
assert (outside.decision, outside.deltas.name, outside.compiled, outside.wrapped) == (
    it.decision,
    it.delta_set().name,
    True,
    False,
)
assert it.partially_load(here, 1) == 0
kind.in_callback = True  # of a step: a preview that loads a model of its own finds no room here
uuid, objects = it.model.current_weight_patches_uuid, it.object_patches_backup.copy()
assert (it.partially_unload(here, 77), it.partially_load(here, 1), it.unpatch_model(here)) == (77, 0, None)
assert held and (it.model.current_weight_patches_uuid, it.object_patches_backup) == (uuid, objects) and uuid
kind.in_callback = False
it.unpatch_model(unpatch_weights=False)
assert held and it.model.current_weight_patches_uuid == it.patches_uuid
assert it.partially_unload(here, 1) == 2 * SIZE and held == [] and it.loaded_size() == 0
assert (it.model.model_loaded_weight_memory, it.model.current_weight_patches_uuid) == (0, None)
held.append(1)
it.unpatch_model(torch.device("meta"))
assert held == [] and it.model.device == torch.device("meta")
it.unpatch_model()
assert it.model.device == it.offload_device

# ComfyUI's manager takes a model off its list before it loads models for a run; after a cancel, weights that stayed in
# the workers are on it again, whatever else is, and Unload Models frees them.
management = importlib.import_module("comfy.model_management")
listed = lambda: [each.model for each in management.current_loaded_models]  # noqa: E731
it = new_model.remote_patcher(file, "default", asked())
management.load_models_gpu([it])
assert held and listed() == [it] and it.model_size() == 2 * SIZE
other = importlib.import_module("comfy.model_patcher").ModelPatcher(torch.nn.Linear(2, 2), here, here)
management.load_models_gpu([other])


def cancels(*_, **__):
    raise management.InterruptProcessingException


loads, kind.ensure = kind.ensure, cancels
conditioning = [[torch.zeros(1, 8, 64), {"pooled_output": torch.zeros(1, 32)}]]
guider = samplers.CFGGuider(it)
guider.set_conds(conditioning, conditioning)
latent = torch.zeros(1, 16, 8, 8)
try:
    management.load_models_gpu([it], force_patch_weights=True)  # as of a guider with another MODEL before it
except management.InterruptProcessingException:
    assert held and listed() == [it, other]
else:
    raise AssertionError("loaded")
for _ in range(2):  # the second finds it as the first left it
    try:
        guider.sample(latent, latent, samplers.sampler_object("euler"), torch.tensor([1.0, 0.0]))
    except management.InterruptProcessingException:
        assert held and listed() == [it, other]
    else:
        raise AssertionError("sampled")
root = it.parent
del it, guider
gc.collect()
assert listed() == [root, other], "a root is what is left of MODELs"
management.unload_all_models()
assert not held and listed() == []

# A MODEL without a byte on ComfyUI's device: what needs memory there gets none of it, Unload Models does.
kind.ensure, elsewhere = loads, torch.device("cuda", 0)
it = new_model.remote_patcher(file, "default", asked())
entry = management.LoadedModel(it)
it.load_device = entry.device = elsewhere
for _ in range(2):
    assert it.model_size() == entry.model_memory_required(elsewhere) == 0
    entry.model_load()
assert not entry.model_unload(80e9) and held
assert entry.model_unload(1e30) and not held and it.loaded_size() == 0
here, management.get_torch_device = management.get_torch_device, lambda: elsewhere
assert it.model.memory_required([4, 16, 8, 8]) == 0
it.model.diffusion_model.outside_runs.controlled = True  # a ControlNet computes there
assert it.model.memory_required([4, 16, 8, 8]) == stock_bytes(it.model, [4, 16, 8, 8], {})
it.model.diffusion_model.outside_runs.controlled = False
it.model.current_patcher = it  # in a run: how many conditionings go at once
assert it.model.memory_required([4, 16, 8, 8]) == stock_bytes(it.model, [4, 16, 8, 8], {}) / 2
it.model.current_patcher, management.get_torch_device = None, here

# Weights on more ranks than the MODEL's plan has, or on fewer, count where they lie: on ComfyUI's device here.
held.append(1)
device = importlib.import_module(f"{NAME}.parallel_runtime.devices").Device
it.model.pooled.devices = (device("cuda", 1), device("cuda", 0))
one, two = replace(it.plan, ulysses=1), it.plan
for lie, plan, size, loaded in (
    (two, two, SIZE, SIZE),
    (two, one, SIZE, SIZE),
    (one, one, 0, patcher.ELSEWHERE),
    (one, two, SIZE, patcher.ELSEWHERE),
):
    kind.held_layout = lambda self, plan, lie=lie: lie.layout if held else None
    it.decision = replace(it.decision, plan=plan)
    assert (it.model_size(), it.loaded_size()) == (size, loaded), (lie, plan)
    assert (it.current_loaded_device() is None) == (loaded == patcher.ELSEWHERE)
kind.held_layout = lambda self, plan: two.layout if held else None
assert it.partially_unload(elsewhere, 1) == SIZE and not held
