"""What the nodes that measure report of runs, lists and decodes: each part of a report, by value.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
from trace_samplers import NAME, load

load(sys.argv[1])
report, choice = (importlib.import_module(f"{NAME}.nodes.{name}") for name in ("report", "choice"))
stock, lists, decoding, order, run_context = (
    importlib.import_module(f"{NAME}.nodes.host.{name}")
    for name in (*("sampling.stock", "tasks.list_sampling", "vae.decoding", "contract.order", "sampling.run_context"),)
)
plans, devices, decisions, replies, proofs, counting, build = (
    importlib.import_module(f"{NAME}.parallel_runtime.{name}")
    for name in ("plan", "devices", "planner.automatic", "wire.replies", "proof", "planner.counting", "report.build")
)
TWO = tuple(devices.parse_devices("cpu:2").devices)
DECISION = decisions.Decision(plan=plans.ParallelPlan(ulysses=2), reasons=("a reason",))
measured = [SimpleNamespace(free_bytes=5 + rank, gflops=7.0 + rank, name="cpu") for rank in range(2)]
pooled = SimpleNamespace(
    devices=TWO,
    plan=plans.ParallelPlan(ring=2),
    spec=SimpleNamespace(path="/models/zip of Windows\\flux.safetensors", dtype="bfloat16"),
    pool=SimpleNamespace(generation=3, broken_copies=""),
    measured=measured,
    unlike_host=["another torch"],
    rounding_attention="sage",
    widened_formats=("fp8",),
    found_by="",
)
WORK = {"batch_group": 0, "pieces": (), "collectives": 0, "sent_bytes": 0, "weight_collectives": 0, "weight_bytes": 0}
MEMORY = replies.Memory(resident_bytes=1000)


def answered(**fields):
    return replies.StepReply(memory=MEMORY, ran=replies.RankStep(**{**WORK, "began_s": 0.0, "step_s": 1.0, **fields}))


def request(began_s, *ranks, calls=1, wall_s=1.5):
    return run_context.MeasuredRequest(num_calls=calls, began_s=began_s, wall_s=wall_s, ranks=ranks, traces={})


PATCHES = {"name": "0123456789ab", "weights": 1, "strengths": [1.0], "side_branch": False}
SETTINGS = {"steps": 2, "seed": 7, "sampler_name": "euler", "scheduler": "simple", "cfg": 3.0, "denoise": 1.0}
ASKED = {"steps": 2, "seed": 7, "sampler": "euler", "scheduler": "simple", "cfg": 3.0, "denoise": 1.0}
recorder = run_context.Recorder(rank_load_s={1: 4.0})
PAIR = (answered(), answered(exchange="fp8"))
recorder.requests.extend(
    [request(10.5, *PAIR, calls=2), request(11.0, *PAIR), request(11.9, *PAIR), request(99.0, *PAIR)]
)
not_proven = proofs.Proof(verdict=proofs.NOT_PROVEN, reason="a why", error=0.0, control=0.0, tolerance=1e-5, calls=1)
record = stock.SamplingRecord(
    pooled=pooled,
    decision=DECISION,
    device=torch.device("cuda", 1),
    load_s=0.5,
    began_s=10.0,
    denoise_s=3.0,
    step_s=[1.0, 2.0],
    recorder=recorder,
    sizes={"width": 64, "height": 32, "images": 1},
    loop_reason="a mask",
    proofs=[not_proven, not_proven, replace(not_proven, verdict=proofs.PROVEN)],
    remarks=["a remark"],
    skipped=order.StepCache("EasyCache", 0.2, 1, 2),
)

# The steps of a run, and the requests within each.
spans = report.steps_of(record)
assert [(each.wall_s, len(each.requests)) for each in spans] == [(1.0, 2), (2.0, 2)], "one at the end is of that step"
assert report.steps_of(stock.SamplingRecord(recorder=recorder)) == []
assert report.loop_of(record) == {"kind": "host", "reason": "a mask"}
assert report.loop_of(stock.SamplingRecord(loop="resident")) == {"kind": "resident"}
warnings = report.unproven(record.proofs)
assert warnings == [f"with this ComfyUI the plan is {not_proven.text}"]
assert report._exchange_of(recorder.requests) == "fp8" and report._exchange_of([request(0.0, answered())]) == ""
beyond = replies.StepReply(memory=MEMORY, ran=None)
assert report._exchange_of([request(0.0, beyond)]) == "" and report._rounded([request(0.0, beyond)]) == []
rounded = report._rounded(recorder.requests)
assert len(rounded) == 1 and report._device(torch.device("cuda", 1)) == devices.Device("cuda", 1)
assert report._device(torch.device("cpu")) == devices.Device("cpu", 0) and report._request_timings([]) == {}

# The whole report of a sampling run.
found = report.denoise_report(record, SETTINGS, {"patches": PATCHES})
assert (found["kind"], found.get("prompt_id")) == ("denoise", None)
assert found["model"] == {"file": "flux.safetensors", "dtype": "bfloat16", "patches": PATCHES}
assert not found.get("controls") and found["pool"] == {"generation": 3}
assert found["plan"]["name"] == "uly2" and found["plan"]["reasons"] == ["a reason"]
ring_is_not_that_plans = [*warnings, *rounded, "a remark", "another torch"]
assert found["warnings"][:-1] == ring_is_not_that_plans and "cannot multiply in fp8" in found["warnings"][-1]
assert (found["exchange"], found["sampling"], found["sizes"]) == ("fp8", ASKED, record.sizes)
assert found["loop"] == {"kind": "host", "reason": "a mask"}
assert found["step_caches"] == [{"name": "EasyCache", "threshold": 0.2, "counts": "steps", "skipped": 1, "of": 2}]
assert [(each["free_bytes"], each["gflops"]) for each in found["devices"]] == [(5, 7.0), (6, 8.0)]
assert set(found["options"]) == {"workers", "comfyui_alone"}
times = found["timings"]
shown = {name: times[name] for name in ("load_s", "denoise_s", "step_s", "per", "first_step_s", "request_s", "calls")}
assert shown == {
    **{"load_s": 0.5, "denoise_s": 3.0, "step_s": [1.0, 2.0], "per": "step", "first_step_s": 1.0},
    **{"request_s": [1.5] * 4, "calls": [2, 1, 1, 1]},
}
assert "prepare_s" not in times


def tells_of_slow_ranks(found):
    told = build.span_timings(found["ranks"])
    return (
        told.keys() == {"rank0_s", "slowest_rank_s", "slowest_rank", "skew_s"}
        and found["timings"].items() >= told.items()
    )


assert tells_of_slow_ranks(found)
assert [(each["rank"], each["device"], each.get("load_s")) for each in found["ranks"]] == [
    (0, "cpu:0", None),
    (1, "cpu:1", 4.0),
]
alone = report.denoise_report(stock.SamplingRecord(device=torch.device("cpu")), SETTINGS, {})
assert [each["name"] for each in alone["devices"]] == ["cpu:0"] and not alone.get("ranks") and "model" not in alone
assert "per" not in alone["timings"] and not alone.get("warnings")
assert report.denoise_report(stock.SamplingRecord(), SETTINGS, {})["devices"] == []


def ran(prepare_s, **fields):
    around = {"prepare_s": prepare_s, "finish_s": 0.0, "began_s": None, "step_s": [1.0, 2.0]}
    return replies.SampleReply(memory=MEMORY, ran=replies.RankRun(**{**WORK, **around, **fields}))


inside = run_context.Recorder(
    requests=[request(10.0, ran(0.25), ran(0.75), replies.SampleReply(memory=MEMORY, ran=None))]
)
resident = replace(record, loop="resident", loop_reason=None, recorder=inside)
assert [(each.wall_s, each.step) for each in report.steps_of(resident)] == [(1.0, 0), (2.0, 1)]
found = report.denoise_report(resident, SETTINGS, {})
assert found["timings"]["prepare_s"] == 0.75 and found["loop"] == {"kind": "resident"}

# Step caches of several runs count together.
ours = run_context.Recorder(
    requests=[
        request(0.0, answered(cached=replies.CachedCalls(calls=1, skipped=1))),
        request(0.0, answered(cached=replies.CachedCalls(calls=2, skipped=0))),
    ]
)
cached = replace(record, skipped=None, recorder=ours, step_cache=0.1)
counted = report._step_caches(
    [cached, replace(cached, step_cache=0.3), replace(record, recorder=run_context.Recorder())]
)
assert counted == [
    {"name": "EasyCache", "threshold": 0.2, "counts": "steps", "skipped": 1, "of": 2},
    {"name": "first block", "threshold": 0.3, "counts": "calls", "skipped": 1, "of": 3},
]
twice = report._step_caches([record, replace(record, skipped=order.StepCache("EasyCache", 0.2, 3, 4))])
assert twice[0]["skipped"] == 4 and twice[0]["of"] == 6 and report._step_caches([stock.SamplingRecord()]) == []

# A list of runs.
other = replace(record, denoise_s=2.0, began_s=9.0, step_s=[0.5], remarks=["a remark", "of this one"], skipped=None)
several = lists.ListRecord(pooled=pooled, at_once=2, runs=[record, other], denoise_s=5.0, recorder=recorder)
latents = [{"samples": torch.zeros(1, 16, 8, 8)}, {"samples": torch.zeros(1, 16, 4, 4)}]
found = report.list_report(several, latents, [SETTINGS, SETTINGS | {"seed": 8}], {})
assert found["images"] == [
    {"denoise_s": 3.0, "step_s": [1.0, 2.0], "latent": [1, 16, 8, 8], "seed": 7},
    {"denoise_s": 2.0, "step_s": [0.5], "latent": [1, 16, 4, 4], "seed": 8},
]
assert found["sizes"] == record.sizes | {"images": 2} and found["sampling"] == ASKED | {"at_once": 2}
assert found["warnings"][:4] == [*warnings, *rounded, "a remark", "of this one"] and found["loop"] == {"kind": "host"}
assert tells_of_slow_ranks(found)
assert (found["timings"]["per"], found["timings"]["denoise_s"]) == ("request", 5.0) and len(found["ranks"]) == 2
assert found["exchange"] == "fp8" and found["step_caches"][0]["of"] == 2 and found["plan"]["name"] == "uly2"
unsampled = replace(other, began_s=0.0, denoise_s=0.0, step_s=[])  # denoise 0: its loop never began
beside = report.list_report(
    replace(several, runs=[unsampled, record, other]), [*latents, *latents[:1]], [SETTINGS] * 3, {}
)
assert beside["ranks"] == found["ranks"] and "begin_s" in found["ranks"][0]

# A decode.
decoded = decoding.DecodeRecord(
    decode_s=2.0, device=torch.device("cpu"), latent_shape=(1, 16, 8, 8), image_shape=(3, 64, 32, 3), note="one tile"
)
assert (decoded.num_tiles, decoded.load_s) == (0, 0.0)
found = report.decode_report(decoded)
assert found["vae"] == {"decode_s": 2.0, "device": "cpu", "latent": [1, 16, 8, 8], "image": [3, 64, 32, 3]}
assert found["sizes"] == {"width": 32, "height": 64, "images": 3} and found["warnings"] == ["one tile"]
assert [each["name"] for each in found["devices"]] == ["cpu:0"]
tiles = [SimpleNamespace(num_tiles=3, decode_s=1.0), SimpleNamespace(num_tiles=2, decode_s=0.5)]
found = report.decode_report(replace(decoded, devices=TWO, ranks=tiles, num_tiles=5, load_s=0.25, note=""))
assert found["vae"] == {
    **{"decode_s": 2.0, "device": "cpu:0, cpu:1", "latent": [1, 16, 8, 8], "image": [3, 64, 32, 3]},
    **{"tiles": 5, "load_s": 0.25, "rank_tiles": [3, 2], "rank_s": [1.0, 0.5]},
}
assert [each["name"] for each in found["devices"]] == ["cpu:0", "cpu:1"] and not found.get("warnings")

# Where peer access is broken, a report says what that costs.
pooled.pool.broken_copies = "copies never arrive"
over_host = "copies never arrive; copies go through the host's memory in /dev/shm and are slower"
assert over_host in report.denoise_report(record, SETTINGS, {})["warnings"]
pooled.pool.broken_copies = ""

# A benchmark.
given = {"applied": {}, "warnings": ["few"], "sizes": record.sizes, "warmup": 1, "runs": 1}
CASE = {"name": "one", "kind": "plan", "engine": "pack", "run_s": [1.0], "median_s": 1.0, "min_s": 1.0, "max_s": 1.0}
given["contenders"] = [CASE]
times = [replace(decoded, decode_s=seconds) for seconds in (3.0, 1.0, 2.0)]
found = report.benchmark_report(pooled, SETTINGS, recorder.requests, decodes=times, **given)
assert found["vae"] == {"decode_s": 2.0, "run_s": [3.0, 1.0, 2.0], "device": "cpu"}
assert (
    found["warnings"][:3] == ["few", *rounded, "another torch"] and "ring=2 attends with exact" in found["warnings"][3]
)
assert (found["kind"], found["sampling"], found["exchange"]) == ("benchmark", ASKED, "fp8") and "plan" not in found
assert "vae" not in report.benchmark_report(pooled, SETTINGS, [], decodes=[], **given)

# What SP Config asks for.
FLUX = counting.usual_counted()


def asked(devices="cpu:2", mode="auto", **settings):
    return choice.choice_of(mode, devices, **settings)


def plan_of(it, unshared="", whole=False, weight_bytes=0, beside=0.0, count=lambda: FLUX):
    given = {"whole_batches": whole, "weight_bytes": weight_bytes, "beside": beside}
    return it.decision_for_model(unshared, **given, count=count)


def refused(do, *words):
    try:
        do()
    except ValueError as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(words)


usual = asked()
assert usual == choice.ParallelChoice(devices_text="cpu:2", selection=usual.selection)
assert usual.looks and not asked(plans="written").looks and not asked("cpu:1").looks
told = {"lora": "side branch", "loop": "host", "tries": "off", "plans": "written", "step_cache": 0.2, "shares": "2, 1"}
told |= {"exchange": "fp8"} if "fp8" in choice.EXCHANGES else {}
it = asked(**told)
assert (it.side_branch, it.worker_loop, it.tries, it.finds, it.step_cache, it.shares) == (
    True,
    False,
    False,
    False,
    0.2,
    (2, 1),
)
assert it.plan is None and it.attention == "" and it.compiled is False
by_hand = asked(mode="manual", ulysses=2, patches=5, warmup_steps=3, weights="sharded")
assert by_hand.plan == plans.ParallelPlan(ulysses=2, weights="sharded"), "without stages these say nothing"
staged = asked(mode="manual", pipefusion=2, ulysses=1, patches=5, warmup_steps=3)
assert staged.plan == plans.ParallelPlan(pipefusion=2, patches=5, warmup_steps=3) and staged.advises is False
assert by_hand.looks and not asked(mode="manual", cfg=2).looks and asked(mode="manual", cfg=3).looks
for name, words in choice.WORDS.items():  # another node may give what ComfyUI's own list has not
    refused(lambda name=name: asked(**{name: "Auto"}), f"{name}='Auto' is unknown; use one of {', '.join(words)}")
for name in ("devices", "machines", "shares"):
    refused(lambda name=name: asked(**{name: 2}), f"{name}=2 is not a text; connect one")
refused(lambda: asked(step_cache="0.1"), "step_cache='0.1' is not a number; use for example 0.1")
for value in (-0.1, 1.5, float("nan")):
    refused(lambda value=value: asked(step_cache=value), f"step_cache={value:g} is not from 0 to 1; use")
kernels = importlib.import_module(f"{NAME}.parallel_runtime.parallel.named_kernels")
finding = kernels.find_spec, kernels.version
kernels.find_spec = lambda package: package  # both packages are there
kernels.version = lambda package: "1.0.6"
OLD = "attention=SageAttention: this Python has sageattention 1.0.6, and 2 or newer is needed; pip install"
refused(lambda: asked(attention="SageAttention"), OLD, "SageAttention 2 from thu-ml/SageAttention")
kernels.version = lambda package: "2.2.0"
assert asked(attention="SageAttention").attention == "SageAttention"
kernels.find_spec, kernels.version = finding
refused(lambda: plan_of(asked(mode="manual", ulysses=3)), "ulysses=3 makes 3 rank(s)", "names 2")
assert plan_of(by_hand) == decisions.Decision(plan=by_hand.plan)
assert plan_of(asked(mode="manual", ulysses=1)).plan.ranks == 1
auto = plan_of(usual)
assert auto.automatic and auto.plan == plans.ParallelPlan(ulysses=2) and auto.reasons == decisions.on_cpu(auto.plan)
WHY = "ranks cannot"
both = plan_of(usual, WHY)
assert both.plan == plans.ParallelPlan(cfg=2)
assert both.reasons[0] == f"{WHY}; prompt and negative at once (cfg=2), for a cfg scale above 1"
four = plan_of(asked("cpu:4"), WHY)
assert four.plan == plans.ParallelPlan(cfg=2, data=2)
assert four.reasons[0].endswith("above 1; images of a batch on 2 replicas (data=2)")
one = plan_of(usual, WHY, True)
assert one.plan.ranks == 1 and one.reasons[0].startswith(f"{WHY}; one device computes it (weights set to sharded")
weights = plan_of(asked(weights="sharded"), WHY, True)
assert weights.plan == plans.ParallelPlan(cfg=2, weights="sharded")
assert weights.reasons[0] == f"{WHY}; the devices share its weights alone"
assert plan_of(asked("cpu:1"), WHY).plan.ranks == 1
known = importlib.import_module(f"{NAME}.parallel_runtime.planner.known")
stock_of = choice._constants, choice.whole_bytes
choice._constants = lambda devices: known.known_calibration("RTX 4090", devices=len(devices))
choice.whole_bytes = lambda devices: [24 * 2**30] * len(devices)
small = FLUX.with_weights(5 * 10**9)
unet = replace(small, model=replace(small.model, key_heads=0))
for names, plan, images in (
    ("cpu:2", plans.ParallelPlan(cfg=2), "one image"),
    ("cpu:3", plans.ParallelPlan(cfg=2), "one image"),
    ("cpu:4", plans.ParallelPlan(cfg=2, data=2), "2 images"),
):
    weighed = plan_of(asked(names), WHY, count=lambda: unet)
    assert weighed.plan == plan and weighed.reasons[0] == WHY, "a U-Net on GPUs whose speed is known"
    assert any(f"512 text tokens, cfg above 1, {images}" in each for each in weighed.reasons), weighed.reasons


def not_counted():
    raise ValueError("it reads values")


assert plan_of(asked(weights="sharded"), "", True).model is FLUX.model, "what ranks can share is weighed"
weights_alone = plan_of(asked(weights="sharded"), WHY, True, count=not_counted)
assert (weights_alone.plan, weights_alone.reasons) == (weights.plan, weights.reasons[:1]), "there is nothing to choose"

two, four = (tuple(devices.Device("cuda", index) for index in range(n)) for n in (2, 4))
for on, num_bytes, weights, data in (
    (two, 16 * 2**30, "replicated", 1),
    (two, 16 * 2**30 + 1, "sharded", 1),
    (two, 32 * 2**30, "sharded", 1),
    (two, 32 * 2**30 + 1, "offloaded", 1),
    (four, 64 * 2**30, "sharded", 1),
    (two[:1], 24 * 2**30, "offloaded", 1),
    ((devices.Device("cpu", 0), devices.Device("cpu", 1)), 32 * 2**30, "replicated", 1),
):
    it = replace(asked("cpu:2"), selection=devices.DeviceSelection(on))
    guessed = plan_of(it, weight_bytes=num_bytes, count=not_counted)
    assert (guessed.plan.weights, guessed.plan.data) == (weights, data), (on, num_bytes, guessed.plan)
    assert guessed.reasons == ("not weighed, as it could not be counted: it reads values",)
    kept = plan_of(replace(it, weights="offloaded"), weight_bytes=1, count=not_counted)
    assert kept.plan.weights == "offloaded"
it = replace(asked("cpu:2"), selection=devices.DeviceSelection(four))
assert plan_of(replace(it, weights="offloaded"), WHY, count=not_counted).plan.data == 1
replicas = [plan_of(it, WHY, weight_bytes=each * 2**30, count=not_counted).plan for each in (16, 17, 33)]
assert [(plan.cfg, plan.data, plan.weights) for plan in replicas] == [
    *((2, 2, "replicated"), (2, 2, "sharded"), (2, 1, "offloaded"))
]
weighed = plan_of(asked(), count=lambda: small)
assert weighed.plan == plans.ParallelPlan(ulysses=2) and not weighed.work.guided
assert any("512 text tokens, cfg 1, one image" in each for each in weighed.reasons), weighed.reasons
choice._constants, choice.whole_bytes = stock_of
assert plan_of(asked("cpu:1"), weight_bytes=1).reasons == decisions.on_cpu(plans.ParallelPlan())
assert usual.describe()[0] == "uly2" and len(usual.describe()) == 3 + len(auto.reasons)
remarked = replace(usual, remarks=("a remark",), attention="flash", exchange="x")
choice.described, choice.rounding_of = (lambda name: f"a {name}"), (lambda name: f"rounded by {name}")
assert remarked.told(decisions.Decision(plan=plans.ParallelPlan(ulysses=2)))[3:] == [
    "a remark",
    "attention by a flash, where there is no mask",
    "rounded by x",
]
assert remarked.told(decisions.Decision(plan=plans.ParallelPlan(cfg=2)))[-2:] == [
    "attention=flash is not used: it takes ulysses or ring above 1, and pipefusion 1",
    "exchange=x is not used: it takes ulysses or ring above 1",
]
staged = decisions.Decision(plan=plans.ParallelPlan(pipefusion=2, ulysses=2))
assert remarked.told(staged)[-2:] == [
    "attention=flash is not used: it takes ulysses or ring above 1, and pipefusion 1",
    "rounded by x",
]
shares = asked("cpu:3", shares="2, 0, 1")
assert shares.selection.devices == (devices.Device("cpu", 0), devices.Device("cpu", 2)) and shares.shares == (2, 1)
assert shares.selection.warnings[-1] == "cpu:1 has a share of 0 and is left out"
assert shares.told(decisions.Decision(plan=plans.ParallelPlan(ulysses=2)))[0] == "uly2-2:1"
choice.MACHINES = SimpleNamespace(
    devices_of=lambda _, say: [
        devices.Device("cuda", index, name) for name, n in (("a", 7), ("b", 1)) for index in range(n)
    ]
)
joined = choice.with_machines(devices.parse_devices("cpu:2"), "10.0.0.1:7861, 2")
assert joined.devices == (*TWO, devices.Device("cuda", 0, "b"))
assert joined.warnings == (
    "machine a is left out: its 7 devices make more than 8; start `join` there with fewer --devices",
)
assert replace(usual, devices_text=" ALL ")._may_shrink() and not usual._may_shrink()
fewer = replace(usual, plan=plans.ParallelPlan(ulysses=3), devices_text="all")
shrunk = plan_of(fewer)
assert shrunk.plan == plans.ParallelPlan(ulysses=2) and shrunk.automatic

# Where the devices' speed is known, it is weighed: but for one device whose memory holds the weights twice.
asks = []


def not_counted():
    raise ValueError("ComfyUI's own code (/home/me/ComfyUI) failed")


RATES = known.known_calibration("RTX 4090")
choice._constants, choice.whole_bytes = (lambda devices: RATES), (lambda devices: [2000] * len(devices))
choice.automatic_plan = lambda model, work, *given, **named: asks.append((model, work, given, named)) or DECISION
alone, several = asked("cpu:1"), asked("cpu:2", step_cache=0.5)
assert plan_of(alone, weight_bytes=1000, count=not_counted) == decisions.Decision(
    plan=plans.ParallelPlan(), automatic=True
)
for it, weight_bytes, beside in ((alone, 1001, 0), (alone, 1000, 0.1), (alone, 0, 0), (several, 1, 0)):
    assert plan_of(it, weight_bytes=weight_bytes, beside=beside, count=not_counted).reasons == (
        "not weighed, as it could not be counted: ComfyUI's own code (ComfyUI) failed",
    ), "a report may hold no folder"
assert plan_of(alone, weight_bytes=0).reasons == ("a reason",) and asks[-1][1].step_cache is False
assert plan_of(several, WHY, beside=0.5).reasons == (WHY, "a reason")
model, work, given, named = asks.pop()
assert (model, work.step_cache, work.exchange) == (FLUX.model, True, "exact")
assert given == (TWO, [2000, 2000], replace(RATES, shares=several.shares)) and named == {
    "weights": "replicated",
    "everything": plans.ParallelPlan(cfg=2),
    "host_bytes": choice.host_memory()[1],
    "blocks_stay": True,
    "beside": 0.5,
    "usual": True,
}
assert work.graphs is False, "a CPU has none"
two_gpus = replace(several.selection, devices=tuple(devices.Device("cuda", index) for index in range(2)))
on_gpus = replace(asked(), selection=two_gpus)
for changes in ({}, {"tries": False}, {"compiled": True}, {"step_cache": 0.5}):
    plan_of(replace(on_gpus, **changes))
    assert asks.pop()[1].graphs is (not changes), changes
eight = replace(several.selection, devices=tuple(devices.Device("cuda", index) for index in range(8)))
for shared, everything in ((True, plans.ParallelPlan(ulysses=2, ring=4)), (False, plans.ParallelPlan(ulysses=8))):
    choice.share_a_bridge = lambda on, shared=shared: shared
    plan_of(replace(asked(), selection=eight))
    assert asks.pop()[3]["everything"] == everything, "an all-to-all among so many on one bridge is slow"
assert asked(mode="manual", ulysses=2).advises and not usual.advises
advised = asked(mode="manual", ulysses=2).advised(FLUX.model, work)
assert advised is DECISION and asks[-1][3]["everything"] is None and not asks[-1][3]["usual"]
assert usual.advised(FLUX.model, work) is None
for it, weights in (
    (replace(alone, devices_text="all"), "replicated"),
    (replace(several, devices_text="all"), "sharded"),
):
    plan_of(replace(it, weights="sharded"))
    assert (asks[-1][3]["weights"], asks[-1][3]["everything"].weights) == (weights, weights)
refused(lambda: plan_of(replace(alone, weights="sharded")), "weights=sharded has one rank")
plan_of(replace(alone, devices_text="all", weights="offloaded"))
assert asks[-1][3]["weights"] == "offloaded"
choice.plan_of_run = lambda *given, **named: asks.append((given, named)) or DECISION
held = plans.ParallelPlan(ring=2)
assert several.plan_of_run(FLUX.model, work, held) == replace(DECISION, automatic=True)
equal, measured = ((FLUX.model, work, [2000, 2000], replace(RATES, shares=each)) for each in ((), None))
assert asks[-1] == (measured, {"held": held, "blocks_stay": True, "beside": 0.0}) != (equal, {})
replace(several, shares=()).plan_of_run(FLUX.model, work, held)
assert asks[-1][0] == equal, "shares that the user wrote are those that are weighed"
choice._constants = lambda devices: None
known, wide = several.plan_of_run(FLUX.model, work, held), replace(work, guided=True)
assert (known.plan, known.work, known.model, known.automatic) == (held, work, FLUX.model, True)
choice.whole_bytes = lambda devices: [10**12] * len(devices)
told = [replace(several, shares=shares).plan_of_run(FLUX.model, wide, held).plan for shares in (None, (), (2, 1))]
assert told == [plans.ParallelPlan(cfg=2), plans.ParallelPlan(cfg=2), held], "the sides are equal"
choice.kinds_here = lambda devices: ["a card", "another"]
assert several.plan_of_run(FLUX.model, wide, held).plan == held
