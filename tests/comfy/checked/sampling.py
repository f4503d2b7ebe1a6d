"""What is around ComfyUI's sampling and decoding: conditionings in tasks, lists of runs, clocks, tiles.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import importlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from trace_samplers import NAME, load

load(sys.argv[1])
sys.path.append(str(Path(__file__).resolve().parents[2]))
encoder_layouts, tiny = (importlib.import_module(f"host.{name}") for name in ("encoder_layouts", "tiny_models"))
samplers, extension, controlnet, sd, utils, stock_nodes = (
    importlib.import_module(name)
    for name in (
        *("comfy.samplers", "comfy.patcher_extension", "comfy.controlnet", "comfy.sd", "comfy.utils", "nodes"),
    )
)
together, lists, stock, late, decode, decoding, order, run_context, new_model = (
    importlib.import_module(f"{NAME}.nodes.host.{name}")
    for name in (
        *("tasks.cond_tasks", "tasks.list_sampling", "sampling.stock", "sampling.late_previews"),
        *("vae.parallel_decode", "vae.decoding", "contract.order", "sampling.run_context", "model.new_model"),
    )
)
plans, devices, replies = (
    importlib.import_module(f"{NAME}.parallel_runtime.{name}") for name in ("plan", "devices", "wire.replies")
)
make = torch.Generator().manual_seed(3)


def drawn(*shape):
    return torch.randn(shape, generator=make)


def raised(kind, do, *given, **named):
    """The text of the error of this kind that a call ends with."""
    try:
        do(*given, **named)
    except kind as error:
        return str(error)
    raise AssertionError(do)


# Conditionings in tasks of their own have the sum that ComfyUI's one call after the other has.
class Toy(torch.nn.Module):
    """A model that notes what it is called with."""

    def __init__(self):
        super().__init__()
        self.pooled, self.calls = SimpleNamespace(shares_tokens=True, num_heads=24), []
        self.current_patcher = SimpleNamespace(
            callbacks={}, get_all_callbacks=lambda *_: [], prepare_state=lambda *_: None
        )
        self.current_patcher.apply_hooks = lambda hooks=None, **_: {}
        self.current_patcher.get_free_memory = lambda *_: 2**40

    def memory_required(self, *_, **__):
        return 1.0

    def apply_model(self, x, t, c_crossattn=None, transformer_options=None, **_):
        self.calls.append(tuple(x.shape))
        return torch.tanh(x) * c_crossattn.mean((1, 2)).view(-1, 1, 1, 1)


conds_module = importlib.import_module("comfy.conds")


def cond(length, **more):
    text = conds_module.CONDCrossAttn(drawn(1, length, 8))
    return {"model_conds": {"c_crossattn": text}, "uuid": object(), **more}


x, t = drawn(2, 4, 8, 12), torch.tensor([0.5, 0.5])
CONDS = [
    [cond(7), cond(7, area=(4, 6, 2, 3), strength=0.5), cond(9, area=(8, 6, 0, 6))],
    [cond(11)],
    None,
]
toy = Toy()


def calculated(plan, conds=CONDS, **more):
    """What comes of it, and how many tasks there were."""
    toy.calls.clear()
    seen = []
    run = SimpleNamespace(plan=plan, captured=more.get("captured"), model=more.get("model", toy.pooled))
    options = {"transformer_options": {run_context.RUN_KEY: run} if more.get("run", True) else {}}
    turns = together.run_in_turns

    def in_turns(tasks, at_once, at_end):
        seen.append((len(tasks), at_once))
        assert at_end is together.forget_records, "a later thread of its number"
        return turns(tasks, at_once=at_once, at_end=at_end)

    together.run_in_turns = in_turns
    try:
        executor = extension.WrapperExecutor.new_executor(samplers._calc_cond_batch, [together.calc_together])
        return executor.execute(toy, conds, x, t, options), seen
    finally:
        together.run_in_turns = turns


said = []
together.NodeText = lambda: SimpleNamespace(say=said.append)
together.TOLD_IDLE.first_time = lambda: True
cfg = plans.ParallelPlan(cfg=2)
wanted, none = calculated(plans.ParallelPlan(ulysses=2))
found, tasks = calculated(cfg)
assert none == [] and tasks == [(4, 4)] and len(found) == len(wanted) == 3
assert all(torch.allclose(each, other, atol=1e-6) for each, other in zip(found, wanted, strict=True))
assert not wanted[2].any() and wanted[0].std() > 0.01
for more in ({"captured": []}, {"model": None}, {"run": False}):
    found, tasks = calculated(cfg, **more)
    assert tasks == [] and all(torch.equal(each, other) for each, other in zip(found, wanted, strict=True))
(first, second), tasks = calculated(cfg, [[same := cond(7)], [same]])
assert tasks == [] and torch.equal(first, second) and first.std() > 0.01, "of one batch"
assert calculated(cfg, [[cond(7)], [cond(9)]])[1] == [(2, 2)]
assert calculated(cfg, [[cond(7)], [cond(9, default=True)]])[1] == [], "an order that has to be kept"
entries = list(together._active(CONDS, x, t))
assert [each.output for each in entries] == [0, 0, 0, 1]
groups = together._together(entries)
assert [[entries.index(each) for each in group] for group in groups] == [[0], [1], [2], [3]]
assert together._only(groups[1], CONDS) == [[CONDS[0][1]], [], None]
weight = together._weight([entries[1]], x)
assert weight[:, :, 2:6, 3:9].eq(0.5).all()
assert weight[:, :, :2].max() < 1e-30 and weight[..., 9:].max() < 1e-30 and weight.min() > 0

# Ranks that have nothing to do.
said.clear()
model = SimpleNamespace(shares_tokens=True, num_heads=24)
for plan, rows, shares_tokens, words in (
    (
        "cfg=2,ulysses=2",
        1,
        True,
        "a step has 1 row(s) for 2 batch groups (cfg scale 1 takes one conditioning), so 2 of 4",
    ),
    ("data=2,cfg=2", 2, True, "so 2 of 4 ranks idle; use ulysses=2,cfg=2 in SP Config, or a bigger batch"),
    ("cfg=2", 1, True, "ranks idle; use ulysses=2 in SP Config, or a bigger batch"),
    ("data=4", 3, False, "so 1 of 4 ranks idle; use a bigger batch, or 3 device(s)"),
    ("cfg=2,ulysses=2", 2, True, ""),
):
    model.shares_tokens = shares_tokens
    together.tell_idle(SimpleNamespace(plan=plans.ParallelPlan.parse(plan), model=model), rows)
    assert words in said.pop() if words else not said, (plan, words)
assert (
    together._better(plans.ParallelPlan.parse("cfg=2,data=2,weights=sharded"), 3, 24).describe()
    == "ulysses=4,weights=sharded"
)


# Lists: copies of ControlNets, one bar.
first, second = (controlnet.ControlNet(torch.nn.Linear(1, 1), load_device=torch.device("cpu")) for _ in range(2))
first.set_previous_controlnet(second)
copies = {}
copied = lists._copied(first, copies)
assert copied is not first and copied.previous_controlnet not in (None, second) and len(copies) == 2
assert lists._copied(first, copies) is copied and lists._copied(second, copies) is copied.previous_controlnet
both = {"positive": [[1, {"control": first}]], "negative": [[2, {"control": first, "a": 1}], [3, {}]], "seed": 4}
own = lists._with_own_controlnets(both)
assert own["positive"][0][1]["control"] is own["negative"][0][1]["control"] is not first and own["seed"] == 4
assert own["negative"][0][1]["a"] == 1 and own["negative"][1] == [3, {}] and both["positive"][0][1]["control"] is first
assert (
    lists._conds([both]) == [both["positive"], both["negative"]] and lists._at_once(SimpleNamespace(), [both] * 3) == 1
)
holder = SimpleNamespace(current_patcher=1)
noted = lists.OfTheRun(holder)
before = noted.get()
holder.current_patcher, holder.latent_shapes = 2, [(1, 2)]
of_run = noted.get()
noted.put(before)
assert before == {"current_patcher": 1} and noted.get() == {"current_patcher": 1, "latent_shapes": [(1, 2)]}
noted.put(of_run)
assert noted.get() == of_run == {"current_patcher": 2, "latent_shapes": [(1, 2)]}

# One plan for all runs of a list whose prompts differ by a few tokens.
taken = {name: getattr(lists, name) for name in ("RemotePatcher", "why_runs_keep_order", "work_of_settings")}
planner_work = importlib.import_module(f"{NAME}.parallel_runtime.planner.work").Work
asks, of_list = [], SimpleNamespace(decision=SimpleNamespace(work=1, plan=SimpleNamespace(data=2)))
of_list.decision_for = lambda work: asks.append(work) or of_list.decision
of_list.under = lambda decision: "under"
vars(lists).update(RemotePatcher=SimpleNamespace, why_runs_keep_order=lambda *_: None)
for tokens, more, result in (((7, 9, 8), {}, "under"), ((7, 7), {"steps": 9}, of_list), ((7, None), {}, of_list)):
    works = [each and planner_work(image_tokens=4, text_tokens=each) for each in tokens]
    works[0] = replace(works[0], **more)
    lists.work_of_settings = lambda model, run, decision, works=works: works[run["number"]]
    runs = [{"number": number, "positive": [], "negative": []} for number in range(len(works))]
    assert lists._under_plan_of_list(of_list, runs) == result, tokens
assert [(each.text_tokens, each.batch) for each in asks] == [(9, 3)]
vars(lists).update(taken)
bar = []
utils.set_progress_bar_global_hook(lambda *told, **_: bar.append(told[:2]))
form = SimpleNamespace(latent_rgb_factors=None, taesd_decoder_name=None, spacial_downscale_ratio=8)
model = SimpleNamespace(load_device=torch.device("cpu"), model=SimpleNamespace(latent_format=form))
progress, done = lists.SharedProgress(model, [4, 6]), []
for number, step, of in ((0, 0, 4), (1, 1, 3), (0, 3, 4), (1, 2, 3)):
    progress.of(number)(step, x, x, of)
    done.append(list(progress._done))
assert done == [[1, 0], [1, 4], [4, 4], [4, 6]] and (bar[0], bar[-1]) == ((1, 10), (10, 10))

# Lists that do not go together are refused by their names, and latents of no images by their numbers, before a run.
list_sampler = importlib.import_module(f"{NAME}.nodes.list_sampler").ParallelFluxListSampler.execute
given = {"seed": [1, 2], "positive": ["a", "b", "c"], "latent_image": ["x", "y", "z"], "cfg": [3.0]}
unequal = "seed has 2, positive has 3, latent_image has 3; make them equal, or give one for all images"
assert raised(ValueError, list_sampler, [model], **given) == f"lists of different lengths: {unequal}"
given |= {"seed": [4], "positive": []}
assert raised(ValueError, list_sampler, [model], **given) == "positive: the list is empty; connect at least one"
some, none = ({"samples": torch.zeros(images, 4, 8, 8)} for images in (1, 0))
no_images = raised(ValueError, list_sampler, [model], latent_image=[some, none, some])
assert no_images.startswith("latent_image 2 of 3 has shape [0, 4, 8, 8], a batch of 0 images; connect")

# The clock of a list is around its runs.
same = {name: getattr(lists, name) for name in ("refuse_off", "check_latent", "_under_plan_of_list", "timed_run")}
taken = {"refuse_off": print, "check_latent": print, "_under_plan_of_list": lambda model, runs: model}
vars(lists).update(taken, timed_run=lambda *given: given[1])
began_s = time.perf_counter()
latents, record = lists.sample_list(model, runs := [{"latent": None, "steps": steps} for steps in (4, 6)])
assert latents == runs and len(record.runs) == 2 and 0 < record.denoise_s < time.perf_counter() - began_s
vars(lists).update(same)

# A device is waited for before the clock is read.
waited, get_device_module = [], torch.get_device_module
torch.get_device_module = lambda device: SimpleNamespace(synchronize=lambda: waited.append(device.type))
assert 0 < stock.synchronized_s(torch.device("cpu")) <= stock.synchronized_s(torch.device("cuda", 0))
assert waited == ["cuda"]
torch.get_device_module = get_device_module

# A clock around a run.
assert stock.sampler_names() == list(samplers.KSampler.SAMPLERS)
assert stock.scheduler_names() == list(samplers.KSampler.SCHEDULERS) and stock.pooled_of(model) is None
assert stock.decision_of(model) is stock.advice_of(model, {}) is None
for shape, sizes in (
    ((2, 16, 8, 4), {"batch": 2, "width": 32, "height": 64}),
    ((1, 16, 5, 8, 4), {"batch": 1, "width": 32, "height": 64, "frames": 5}),
    ((1, 16, 1, 8, 4), {"batch": 1, "width": 32, "height": 64}),
    ((1, 16, 2, 8, 4), {"batch": 1, "width": 32, "height": 64, "frames": 2}),
    ((3, 16, 8), {"batch": 3}),
):
    assert stock.sizes_of(model, {"samples": torch.zeros(shape)}) == sizes
stock.check_latent({"samples": torch.zeros(1, 4, 8, 8)}, "it")
empty = raised(ValueError, stock.check_latent, {"samples": torch.zeros(0, 4)}, "latent_image")
assert empty.startswith("latent_image has shape [0, 4], a batch of 0 images")
ticks = iter((10.0, 11.0, 13.0, 14.5))
stock.synchronized_s = lambda device: next(ticks)
told = []


def sampled(guider, sigmas, extra, callback, *rest, **named):
    for step in range(2):
        callback(step, "denoised", "x", 2)
    return guider, sigmas, rest, named


run = SimpleNamespace(
    step=0, decision="a plan", proofs=[1], remarks=["r"], loop="host", loop_reason="why", step_cache=0.2
)
record = stock.SamplingRecord(decision="before")
clock = stock._clock(record, torch.device("cpu"))
extra = {"model_options": {"transformer_options": {run_context.RUN_KEY: run}}}
assert clock(sampled, "g", "s", extra, lambda *given: told.append(given), 1, a=2) == ("g", "s", (1,), {"a": 2})
assert (record.began_s, record.step_s, record.denoise_s, run.step) == (10.0, [1.0, 2.0], 4.5, 2)
assert told == [(0, "denoised", "x", 2), (1, "denoised", "x", 2)]
assert (record.decision, record.proofs, record.remarks) == ("a plan", [1], ["r"])
assert (record.loop, record.loop_reason, record.step_cache, record.skipped) == ("host", "why", 0.2, None)
ticks, record = iter((0.0, 1.0, 2.0, 3.0)), stock.SamplingRecord(decision="before")
told.clear()
stock._clock(record, torch.device("cpu"))(sampled, "g", "s", {"model_options": {}}, lambda *given: told.append(given))
assert (len(told), record.decision, record.step_cache, record.proofs) == (2, None, 0.0, ())
ticks = iter((0.0, 1.0, 2.0, 3.0))
stock._clock(record, torch.device("cpu"))(sampled, "g", "s", {"model_options": {}}, None)

# What a list shows of a step takes the place of the run's callback; several latents in one come apart.
seen = []
telling = stock._telling(lambda *given: seen.append(given))
packed, shapes = utils.pack_latents([drawn(1, 3, 2, 4, 4), drawn(1, 5, 6)])


def whole_run(noise, latent, sampler, sigmas, mask, callback, *rest, **named):
    callback(0, latent, noise, 2)
    return mask, rest, named


one = torch.zeros(1, 4, 8, 8)
assert telling(whole_run, one, one, "s", "t", "m", print, 1, latent_shapes=[one.shape]) == (
    *("m", (1,), {"latent_shapes": [one.shape]}),
)
assert telling(whole_run, one, one, "s", "t", denoise_mask=None, callback=print) == (None, (), {})
assert len(seen) == 2 and all(given[1] is one for given in seen)
telling(whole_run, packed + 1, packed, "s", "t", None, None, latent_shapes=shapes)
_, denoised, noised, _ = seen[-1]
assert [tuple(part.shape) for part in denoised.unbind()] == [(1, 3, 2, 4, 4), (1, 5, 6)]
assert torch.equal(utils.pack_latents(denoised.unbind())[0], packed)
assert not torch.equal(noised.tensors[0], denoised.tensors[0])

# A step's callback, later.
given = []
run = SimpleNamespace(loop_reason=None)
callback = late.LateCallback(lambda *told: given.append(told), run, stays=False)
callback(0, x, x, 3)
assert len(given) == 1 and given[0][1] is x
told = []
from_the_first = late.LateCallback(lambda *step: told.append(step), run, stays=True)
from_the_first(0, x, x, 3)
assert not told
from_the_first.call_due()
assert [each[0] for each in told] == [0]
run.loop_reason = "a mask"
callback(1, x, x, 3)
callback.call_due()
callback.call_due()
assert len(given) == 2 and given[1][0] == 1 and given[1][1] is not x and torch.equal(given[1][2], x)
callback(2, x, x, 3)
callback(3, x, x, 3)
assert [each[0] for each in given] == [0, 1, 2]

# Tiles, decoded one round after another, are what ComfyUI decodes tiled.
weights = {
    row.name: torch.cat(list(tiny.parts_of(row, seed=3, dtype=torch.float32))).view(row.shape)
    for row in encoder_layouts.taesd()
}
vae = sd.VAE(sd=weights)
TWO = tuple(devices.parse_devices("cpu:2").devices)
latent = {"samples": drawn(1, 16, 80, 72)}
whole = decode.weights_of(vae)
assert whole.tensors.keys() == vae.first_stage_model.state_dict().keys() and whole.dtype == vae.vae_dtype
assert decode.weights_of(vae).key == whole.key and whole.metadata == {}
# Changed in place once ranks have it: other weights are another VAE, a layer's own method is none that ranks have.
layer = next(each for each in vae.first_stage_model.modules() if isinstance(each, torch.nn.Conv2d))
with torch.no_grad():
    layer.weight.mul_(1.01)
changed = decode.weights_of(vae).key
assert changed != whole.key and decode.weights_of(vae).key == changed
with torch.no_grad():
    layer.weight[-1].zero_()
part = decode.weights_of(vae).key
with torch.no_grad():
    layer.bias[0] = float("nan")
broken = decode.weights_of(vae).key
assert len({whole.key, changed, part, broken, decode.weights_of(vae).key}) == 4, "what is no number stays the same"
layer._conv_forward = print
assert "something else" in raised(decode.CannotShareError, decode.weights_of, vae)
del layer._conv_forward
for add in (layer.register_forward_hook, layer.register_forward_pre_hook):
    hook = add(print)
    assert "something else" in raised(decode.CannotShareError, decode.weights_of, vae)
    hook.remove()
assert decode.weights_of(vae).key == broken
vae.first_stage_model.half()
vae.vae_dtype, other_dtype = torch.float16, vae.vae_dtype
halves = decode.weights_of(vae)
assert halves.key != broken and halves.dtype == torch.float16 and decode.weights_of(vae).key == halves.key
vae.first_stage_model.to(other_dtype)
vae.vae_dtype = other_dtype
vae.first_stage_model.extra = torch.nn.Linear(1, 1)
decode._KNOWN.clear()


class Quick(torch.nn.Module):
    """A network that only makes a latent larger."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def decode(self, latent):
        return torch.nn.functional.interpolate(latent[:, :3] * self.weight, scale_factor=8)


# Of another setting that no text of its layers shows, and one that cannot be built without its weights.
built = []
one, other = Quick(), Quick()
assert decode._alike(one, other)
for value in (None, dict, 3, "text", True):
    one.latent_format, other.latent_format = value, list
    assert not decode._alike(one, other) and not decode._alike(other, one), value
    other.latent_format = value
    assert decode._alike(one, other)
one.latent_format, other.latent_format = torch.ones(2), 1.0
assert not decode._alike(one, other)
one.latent_format = other.latent_format
one._conv_forward = print  # a layer's own method, as of nodes that make seamless pictures
assert not decode._alike(one, other)
del one._conv_forward
one.comfy_patched_weights, one.of_host = True, 3  # what ComfyUI notes once it has loaded one
assert decode._alike(one, other)
made_vae, decode.VAE = decode.VAE, lambda **given: built.append(given) or {}["values"]
assert decode._again(vae, whole.tensors, {}) is None and len(built) == 1
kind = type(vae.first_stage_model).__name__
from_values = f"ComfyUI builds a {kind} like this from values of its weights"
assert raised(decode.CannotShareError, decode.weights_of, vae) == from_values
decode.VAE = made_vae

rounds = []


class Held:
    """What a rank has of the VAE: here it is ComfyUI's own."""

    needs, freed = 0, 0

    def host_bytes(self, weights):
        return self.needs

    def free(self, check):
        Held.freed += 1

    def hold(self, weights, check):
        assert weights.tensors.keys() == vae.first_stage_model.state_dict().keys()
        return SimpleNamespace(load_s=0.5)

    def decode(self, weights, some, check, *, method, last, on_tiles):
        rounds.append((len(some), method, last))
        on_tiles(len(some))
        pixels = [vae.first_stage_model.decode(tile.latent.to(vae.vae_dtype)).float() for tile in some]
        assert [tuple(each.shape) for each in pixels] == [tuple(tile.shape) for tile in some]
        ranks = [replies.DecodeReply(memory=MEMORY, num_tiles=rank, decode_s=1.0 + rank) for rank in range(2)]
        return SimpleNamespace(ranks=ranks, pixels=pixels)


another = f"ComfyUI builds something else from the weights of this {kind}"
assert raised(decode.CannotShareError, decode.weights_of, vae) == another
vae.first_stage_model = Quick()
decode._again = lambda *_: Quick()
MEMORY = replies.Memory(resident_bytes=1)
pool = SimpleNamespace(devices=TWO, vae=lambda do, check_cancelled: do(Held(), check_cancelled))
decode.POOLS = SimpleNamespace(pool=lambda asked: pool)
said.clear()
decode.NodeText = together.NodeText
started = []
(wanted,) = stock_nodes.VAEDecodeTiled().decode(vae, latent, 512, 64, 64, 8)
tiles = decode.tiles_of(vae, latent["samples"])
decode.ROUND_TILES = 3
shared = decode.decode_over(vae, latent, TWO, clock=lambda: started.append(1))
assert torch.equal(shared.image, wanted) and shared.image.shape == (1, 640, 576, 3)
assert (shared.load_s, shared.num_tiles, started) == (0.5, len(tiles), [1]) and len(tiles) > 3
counts = [min(3, len(tiles) - start) for start in range(0, len(tiles), 3)]
last = len(counts) - 1
assert rounds == [(count, "decode", number == last) for number, count in enumerate(counts)]
assert [(each.num_tiles, each.decode_s) for each in shared.ranks] == [
    (0, float(len(counts))),
    (len(counts), 2.0 * len(counts)),
]
ends = [sum(counts[: number + 1]) for number in range(len(counts))]
assert said == ["bringing the VAE to 2 devices", *(f"{end} of {len(tiles)} tiles, on 2 devices" for end in ends)]
freed, ask = [], pool.vae
pool.give_back = freed.append


def cancelled_in_the_second_round(do, check_cancelled):
    if len(rounds) > len(counts):
        raise KeyboardInterrupt
    return ask(do, check_cancelled)


pool.vae = cancelled_in_the_second_round
raised(KeyboardInterrupt, decode.blended, vae, latent["samples"], tiles, whole, pool, check_cancelled=print)
assert freed == [TWO] and len(rounds) == len(counts) + 1, "the VAE stays on their GPUs"


def without_comfyui(*_: object, **__: object) -> None:
    raise decode.NoComfyUIError("machine shelf has no ComfyUI")


pool.vae = without_comfyui
never = raised(decode.CannotShareError, decode.decode_over, vae, latent, TWO, clock=lambda: None)
assert never == "machine shelf has no ComfyUI", "ComfyUI decodes it"
pool.vae = ask
round_of = decode._Rounds(tiles, num_ranks=2)
decode.ROUND_TILES, decode.ROUND_BYTES = 256, 1
assert [round_of._end_of_round(start) for start in (0, 1, len(tiles) - 1)] == [2, 3, len(tiles)]
decode.ROUND_BYTES = sum(torch.Size(each.shape).numel() * 4 for each in tiles[:3])
assert round_of._end_of_round(0) == 3 and decode._Rounds(tiles, num_ranks=5)._end_of_round(0) == 5
pixels = round_of.pixels_by(lambda some, before: [before] * len(some))
assert "ComfyUI asks for a tile of (1,)" in raised(RuntimeError, pixels, torch.zeros(1))
assert [decode.tiles_by_itself(each) for each in (vae, SimpleNamespace(handles_tiling=True))] == [False, True]


def cannot(why, given=latent, of=vae, over=TWO):
    error = raised(decode.CannotShareError, decode.decode_over, of, given, over, clock=lambda: None)
    assert why in error, error


cannot("one device (cpu:0) has no other", over=TWO[:1])
changed = decode.copy.copy(vae)
changed.__class__ = type("AnotherVAE", (sd.VAE,), {})
cannot("a AnotherVAE is not ComfyUI's own VAE", of=changed)
Held.needs, before, left = 3 << 30, decode.host_memory, decode.HOST_LEFT_BYTES
decode.host_memory = lambda: (left + (3 << 30) - 1 - Held.freed, 64 << 30)
cannot(
    "a copy of the VAE for each device takes 3.0 GiB of host memory, of which 3.0 GiB can be used; free host memory, or"
)
decode.host_memory = lambda: (left + (3 << 30) * (Held.freed == 2), 64 << 30)
assert decode.decode_over(vae, latent, TWO, clock=lambda: None).num_tiles == len(tiles), "another VAE left room"
decode.host_memory = lambda: (0, 64 << 30)
cannot("of which 0.0 GiB can be used")
Held.needs = 0
assert decode.decode_over(vae, latent, TWO, clock=lambda: None).num_tiles == len(tiles), "the ranks hold it"
decode.host_memory = before
cannot("the picture is one tile", {"samples": drawn(1, 16, 16, 16)})
cannot("ComfyUI does not tile a latent of 3 dims", {"samples": drawn(1, 16, 80)})
assert decode._refuse_unfit(vae, {"samples": drawn(1, 16, 1, 80, 72)}, TWO).shape == (1, 16, 80, 72)
for name, value, why in (("latent_dim", 1, "makes no pictures"), ("extra_1d_channel", 1, "makes no pictures")):
    changed = decode.copy.copy(vae)
    setattr(changed, name, value)
    cannot(why, of=changed)
changed = decode.copy.copy(vae)
changed.handles_tiling = True
cannot("tiles in a way of its own", of=changed)
vae.patcher.object_patches["a"] = 1
cannot("a node has changed the weights or parts of")
vae.patcher.object_patches.clear()
vae.patcher.patches["a"] = [1]
cannot("a node has changed the weights or parts of")
vae.patcher.patches.clear()
one, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
assert decode._alike(one, other) and not decode._alike(one, torch.nn.Linear(3, 2))
other.weight = torch.nn.Parameter(torch.zeros(3, 4))
assert not decode._alike(one, other)
scaled = SimpleNamespace(upscale_ratio=(lambda frames: frames * 4 - 3, 8, 8), latent_dim=3, output_channels=4)
assert decode._pixels_of(scaled, torch.zeros(2, 16, 5, 8, 4)) == (2, 4, 17, 64, 32)
flat = SimpleNamespace(upscale_ratio=8, latent_dim=2, output_channels=4)  # as of Qwen-Image 2.1's previews
assert decode._pixels_of(flat, torch.zeros(2, 16, 5, 8)) == (2, 4, 40, 64)
by_itself = SimpleNamespace(
    handles_tiling=True,
    first_stage_model=SimpleNamespace(decoder=SimpleNamespace(out_channels=3, patch_size=4, patch_size_t=2)),
)
assert decode._pixels_of(by_itself, torch.zeros(2, 16, 5, 8, 7)) == (2, 3, 10, 32, 28)
hook = utils.PROGRESS_BAR_HOOK
with decode._no_progress():
    assert utils.PROGRESS_BAR_HOOK is None
assert utils.PROGRESS_BAR_HOOK is hook is not None

# A stock MODEL's loop is ComfyUI's; it is said where the ranks' own was asked for.
plain = SimpleNamespace(load_device=torch.device("cpu"), add_wrapper_with_key=lambda *_: None)
plain.clone, plain.model = lambda: plain, SimpleNamespace(latent_format=SimpleNamespace(spacial_downscale_ratio=8))
stock.comfy_nodes = SimpleNamespace(common_ksampler=lambda model, **_: ({"samples": torch.zeros(2, 4, 3, 5)},))
for asked in (False, True):
    record = stock.SamplingRecord()
    stock.timed_run(plain, {}, record, worker_loop=asked)
    assert record.loop_reason == ("the MODEL is a stock loader's" if asked else stock.SamplingRecord().loop_reason)
    assert record.sizes == {"batch": 2, "width": 40, "height": 24}

# Which wrappers of a run are a known cache's alone, and what each call is to it.
easycache = importlib.import_module("comfy_extras.nodes_easycache")
caches = importlib.import_module(f"{NAME}.nodes.host.sampling.stock_caches")
EASY = {
    "calc_cond_batch": easycache.easycache_calc_cond_batch_wrapper,
    "diffusion_model": easycache.easycache_forward_wrapper,
}
LAZY = {"predict_noise": easycache.lazycache_predict_noise_wrapper}


def keys(holder, wrappers, **more):
    inside = {kind: {"easycache": [each], "another": [print]} for kind, each in wrappers.items()} | more
    return caches.cache_keys({"transformer_options": {"easycache": holder}}, inside)


def held(kind, *, verbose=False):
    return kind(0.2, 0.0, 1.0, 8, False, verbose, output_channels=4)


easy, lazy = held(easycache.EasyCacheHolder), held(easycache.LazyCacheHolder)
assert keys(easy, EASY) == [(kind, "easycache") for kind in EASY] and keys(lazy, LAZY) == [
    ("predict_noise", "easycache")
]
assert keys(None, EASY) == keys(object(), EASY) == keys(lazy, EASY) == keys(easy, LAZY) == []
assert keys(held(easycache.EasyCacheHolder, verbose=True), EASY) == []
twice = {"a": [EASY["diffusion_model"]], "b": [EASY["diffusion_model"]]}
assert keys(easy, EASY, diffusion_model=twice) == []
beside = {"easycache": [EASY["diffusion_model"], print]}
assert keys(easy, EASY, diffusion_model=beside) == [("calc_cond_batch", "easycache")]
easy.start_t = lazy.start_t = 2.0
easy.end_t = lazy.end_t = 0.5
sigmas = (3.0, 2.0, 1.0, 2.5, 0.4)
assert (caches._letters(easy, sigmas, easy=True), caches._letters(lazy, sigmas, easy=False)) == ("-mmn-", "nmmn-")
looked_at = caches._looked_at(easy, (2, 4, 16, 24), easy=True)
assert looked_at.shape == (1, 4, 16, 24) and looked_at.unique().tolist() == [0.0, 1.0]

# A model that is given the parts of a latent apart, as sound beside a picture, is not followed.
x, options = torch.zeros(1, 4, 8, 8), {"transformer_options": {"cond_or_uncond": [0]}}
captured, caches.captured = caches.captured, lambda *given: given[-1]["diffusion_model"](print, [x, x], x, **options)
guider = SimpleNamespace(cfg=4.0, conds={"positive": []})
error = raised(caches.HostLoopError, caches._seen, guider, {}, x, torch.ones(1), easy)
assert error == "EasyCache keeps the parts of a latent apart", error
caches.captured = captured

# An error of sizes in a run with another model's latent names both channels; any other error stays what it is.
made = SimpleNamespace(latent_format=SimpleNamespace(latent_channels=16), diffusion_model=Toy())
SIZES = "The size of tensor a (4) must match the size of tensor b (16) at non-singleton dimension 1"
one = torch.zeros(1, 4, 8, 8)
assert new_model._latent_shape(one, {}) == new_model._latent_shape(x, {"latent_shapes": [one.shape]}) == one.shape
AS_IT_IS = [
    (SIZES, new_model._latent_shape(packed, {"latent_shapes": shapes})),  # of several, none has the format's channels
    *((SIZES, (1, 16, 8, 8)), (SIZES, (1, 77, 12)), ("CUDA out of memory", (1, 4, 8, 8))),
    ("a node has 3 images of size 4", (1, 4, 8, 8)),
]
for text, shape in AS_IT_IS:
    error = RuntimeError(text)
    assert stock.told_of_another_model(error, SimpleNamespace(model=made), shape) is error
pool_error = importlib.import_module(f"{NAME}.parallel_runtime.errors").PoolError(SIZES, remedy="so")
for error in (ValueError(SIZES), pool_error, KeyboardInterrupt(SIZES)):
    assert stock.told_of_another_model(error, SimpleNamespace(model=made), (1, 4, 8, 8)) is error
for text in (SIZES, "mat1 and mat2 shapes cannot be multiplied (24x16 and 64x384)", "to have 16 channels, but got 4"):
    told = stock.told_of_another_model(RuntimeError(text), SimpleNamespace(model=made), (1, 4, 8, 8))
    said = "the latent has 4 channels, Toy takes 16; use the VAE or the empty latent that belongs to this model"
    assert type(told) is ValueError and str(told) == f"{said} (torch says: {text})"

# Where a pack stands in the place of a function that each step calls, the loop stays in ComfyUI.
loop = importlib.import_module(f"{NAME}.nodes.host.sampling.worker_loop")
sampler = SimpleNamespace(sampler_function=samplers.calc_cond_batch, extra_options={})
guider = SimpleNamespace(model_options={}, model_patcher=SimpleNamespace(callbacks={}), inner_model=SimpleNamespace())
assert loop._refuse_foreign(sampler, guider, None) is None
kept = samplers.sampling_function
samplers.sampling_function = lambda *given: kept(*given)
error = raised(loop.HostLoopError, loop._refuse_foreign, sampler, guider, None)
assert error.endswith(" replaces sampling_function of ComfyUI"), error
samplers.sampling_function = kept
