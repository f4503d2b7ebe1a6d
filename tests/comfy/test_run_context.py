"""A run's context in ComfyUI's options: whoever copies them, and whatever run begins inside of another."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_runtime.model_call import ModelCall


def made(tensors: dict[str, torch.Tensor] | None = None, options: dict[str, object] | None = None) -> ModelCall:
    told = {"call": {}, "method": None, **(options or {})}
    return ModelCall(tensors=tensors or {}, out_shape=(1, 4), options=told)


@pytest.fixture(scope="module")
def run_context(module_of_pack) -> ModuleType:
    return module_of_pack("nodes.host.sampling.run_context")


@pytest.fixture(scope="module")
def new_run(module_of_pack, run_context) -> Any:
    """Makes a run with a MODEL of a file, with a LoRA; nothing is started."""
    pooled = module_of_pack("nodes.host.model.pooled_model")
    device = module_of_pack("parallel_runtime.devices").Device("cpu", 0)
    plan = module_of_pack("parallel_runtime.plan").ParallelPlan()
    decision = module_of_pack("parallel_runtime.planner.automatic").Decision(plan=plan)
    patch = module_of_pack("parallel_runtime.weight_delta")

    def make(path: str) -> Any:
        model = pooled.PooledModel(
            devices=(device,),
            spec=module_of_pack("parallel_runtime.checkpoint").ModelSpec(path, "bfloat16", 1, 0),
            plan=plan,
            sizes=pooled.WeightSizes(total=1, biggest_block=1),
            num_heads=24,
        )
        diff = patch.WeightDelta(key="img_in.weight", kind="diff", strength=1.0, values=(torch.ones(2),))
        deltas = patch.WeightDeltas("a", (diff,))
        return run_context.RunContext(model=model, decision=decision, deltas=deltas, recorder=run_context.Recorder())

    return make


def test_a_node_that_copies_the_options_deeply_hands_on_the_same_run(run_context, new_run) -> None:
    """Another object would be the run of no model, and the step would go by the plan and LoRAs loaded last."""
    run = new_run("/a.safetensors")
    with run_context.begun(options := {}, run):
        copied = copy.deepcopy(options)
    assert run_context.run_of(copied) is run
    assert run == run and run != new_run("/a.safetensors"), "options are compared by packs, a LoRA's tensors cannot be"
    assert hash(run) == hash(run_context.run_of(copied))


def test_a_run_inside_of_another_gives_the_options_back_to_it(run_context, new_run) -> None:
    """A wrapper around a guider's run that samples with the same guider once more."""
    outer, inner, options = new_run("/a.safetensors"), new_run("/b.safetensors"), {}
    with run_context.begun(options, outer):
        with run_context.begun(options, inner):
            assert run_context.run_of(options) is inner
            assert run_context.run_inside(inner.model) is inner
            assert run_context.run_inside(outer.model) is None, "its memory was counted by another model's plan"
        assert run_context.run_of(options) is outer
        assert run_context.run_inside(outer.model) is outer
    assert run_context.run_of(options) is None
    assert run_context.run_inside(outer.model) is None


def workers(note: Callable[..., object], ranks: Callable[[], list] = list) -> SimpleNamespace:
    """Stands where a pool is: tells `note` of each request, and answers it."""

    def run(spec: Any, plan: Any, calls: Any, *, deltas: Any = None, on_sent: Any = None, **_: object) -> Any:
        note(spec, plan, calls, deltas)
        if on_sent is not None:
            on_sent()
        outs = [torch.zeros(1, 4) for _ in calls]
        return SimpleNamespace(ranks=ranks(), wall_s=0.1, traces={}, outs=outs)

    return SimpleNamespace(run=run)


class NothingStartsError(Exception):
    """Raised where the pool would start workers."""


def test_a_proof_is_asked_for_once_for_each_form_and_shape_of_a_runs_calls(new_run) -> None:
    """The prover looks into the arguments, which costs more than the comparison; other arguments are another kind."""
    asked = []

    class Prover:
        def check(self, run: object, call: Any, check_cancelled: object) -> None:
            asked.append((call.options["call"], call.tensors["t0"].shape))

        def told(self, plan: object) -> str:
            return ""

    def stop() -> None:
        raise NothingStartsError

    run = replace(new_run("/a.safetensors"), prover=Prover())
    small, wide = torch.zeros(1, 4), torch.zeros(1, 6)
    plain, masked = {"d": {"x": {"t": 0}}}, {"d": {"x": {"t": 0}, "mask": {"t": 0}}}
    for tree, x in [(plain, small), (masked, small), (copy.deepcopy(plain), small + 1), (masked, small), (plain, wide)]:
        with pytest.raises(NothingStartsError):
            run.call(made({"t0": x}, {"call": tree}), check_cancelled=stop)
    assert asked == [(plain, small.shape), (masked, small.shape), (plain, wide.shape)]


def test_a_call_that_waits_is_proven_again_where_the_call_of_another_task_has_another_plan_taken(
    new_run, module_of_pack
) -> None:
    """A proof that refuses a found plan has the next one taken for the model, in the middle of a step."""
    turns, asked, sent = module_of_pack("nodes.host.tasks.cooperative_tasks"), [], []

    class Prover:
        def check(self, run: Any, call: Any, check_cancelled: object) -> None:
            asked.append((call.options["call"], run.model.spec.found))
            if call.options["call"] == "refused":
                run.model.spec = replace(run.model.spec, found="another")

    def note(spec: Any, _: object, calls: Any, __: object) -> None:
        sent.extend((call.options["call"], spec.found) for call in calls)

    run = replace(new_run("/a.safetensors"), prover=Prover(), recorder=None)
    vars(run.model)["pool"] = workers(note)

    def call(name: str) -> None:
        run.call(made({}, {"call": name}), check_cancelled=lambda: None)

    turns.run_in_turns([lambda: call("first"), lambda: call("refused")], at_once=2)
    assert asked[:3] == [("first", ""), ("refused", ""), ("first", "another")]
    assert sorted(sent) == [("first", "another"), ("refused", "another")]


def test_runs_in_turn_that_compute_otherwise_go_in_requests_of_their_own_which_say_whether_blocks_are_compiled(
    new_run, module_of_pack
) -> None:
    turns, sent = module_of_pack("nodes.host.tasks.cooperative_tasks"), []

    def note(_: object, plan: Any, calls: Any, deltas: Any) -> None:
        sent.append((plan.name, deltas.name, len(calls), calls[0].options["compiled"]))

    run = replace(new_run("/a.safetensors"), recorder=None)
    vars(run.model)["pool"] = workers(note)
    two = replace(run.decision, plan=module_of_pack("parallel_runtime.plan").ParallelPlan(ulysses=2))
    others = [{"decision": two}, {"deltas": replace(run.deltas, name="b")}, {"compiled": True}, {"step_cache": 0.1}]
    others += [{"deltas": replace(run.deltas, side_branch=True)}, {"attention": "sage"}, {"exchange": "fp8"}]
    runs = [run, replace(run), *(replace(run, **changes) for changes in others)]

    def call(run: Any) -> None:
        run.call(made(), check_cancelled=lambda: None)

    turns.run_in_turns([lambda each=each: call(each) for each in runs], at_once=len(runs))
    assert sent == [
        *(("single", "a", 2, False), ("uly2", "a", 1, False), ("single", "b", 1, False), ("single", "a", 1, True)),
        *[("single", "a", 1, False)] * 4,
    ]


def test_why_blocks_run_without_graphs_is_told_once_and_kept_for_the_report(new_run, module_of_pack) -> None:
    told: list[str] = []
    compiled = module_of_pack("parallel_runtime.wire.replies").CompiledReport

    class Listener(module_of_pack("nodes.host.sampling.step_listener").StepListener):
        def uncompiled(self, why: str) -> None:
            told.append(why)

    def ranks() -> list:
        reports = [compiled(graphs=1, uncompiled_blocks=number, compile_s=0.0, reason=why) for number, why in said]
        return [SimpleNamespace(ran=SimpleNamespace(compiled=each)) for each in [*reports, None]]

    run = replace(new_run("/a.safetensors"), compiled=True, listener=Listener(), recorder=None)
    vars(run.model)["pool"] = workers(lambda *_: None, ranks)
    why = "A has no graph: '/usr/bin/gcc' failed"  # a report may hold no folder
    for said in ([(0, "")], [(2, why), (2, why)], [(2, why)]):
        run.call(made(), check_cancelled=lambda: None)
        assert told == run.remarks == (["blocks run uncompiled: A has no graph: 'gcc' failed"] if said[0][1] else [])


def test_a_loop_in_the_workers_is_told_as_it_begins_and_at_each_step_and_why_its_pipeline_was_empty(
    new_run, module_of_pack
) -> None:
    told: list[object] = []

    class Listener(module_of_pack("nodes.host.sampling.step_listener").StepListener):
        def worker_loop_began(self) -> None:
            told.append("began")

        def worker_loop_step(self, num_ranks: int) -> None:
            told.append(("step", num_ranks))

        def drained(self, why: str) -> None:
            told.append(why)

    def sample(spec: Any, plan: Any, run: Any, *, on_step: Callable[..., None], **_: object) -> Any:
        told.append("sent")
        on_step(0, torch.ones(1))
        seconds = [SimpleNamespace(step_s=each) for each in ((0.5, 0.25), (0.25, 1.0))]
        return SimpleNamespace(ranks=[], ran=seconds, wall_s=1.0, drained="a sampler looks back")

    run = replace(new_run("/a.safetensors"), listener=Listener(), recorder=None)
    vars(run.model)["pool"] = SimpleNamespace(sample=sample)
    loop = Loop(conds=(made(),), recurrence=SimpleNamespace(num_calls=2))
    run.sample(loop, on_step=lambda step, shown: told.append((step, shown.item())), check_cancelled=lambda: None)
    why = "the pipeline is empty between steps: a sampler looks back"
    assert told == ["began", "sent", ("step", run.plan.ranks), (0, 1.0), why]
    assert (run.loop_reason, run.step_seconds) == (why, [0.5, 1.0])


def test_a_second_call_of_a_step_that_blocks_compute_otherwise_has_a_place_of_its_own(module_of_pack) -> None:
    """As LTXV's Modality and Spatio Temporal Guidance call the model for the same conditioning again."""
    place_of = module_of_pack("nodes.host.sampling.run_context").place_of
    usual = {"uuids": ["a", "b"], "cond_or_uncond": [0, 1], "sigmas": torch.ones(1), "sample_sigmas": (0.5, 1.0)}
    again = [{"a2v_cross_attn": False}, {"stg_blocks": frozenset((14, 2))}, {"stg_blocks": [2, 15]}]
    places = {place_of(usual), *(place_of({**usual, **more}) for more in again)}
    assert len(places) == 4 and place_of(usual).startswith("a b ")
    assert place_of({**usual, "sigmas": torch.zeros(1)}) == place_of(usual), "the next step's is the same"
    turned = dict(reversed({**usual, **again[0], 7: True}.items()))
    assert place_of(turned) == place_of({**usual, **again[0], 7: True}), "whatever order options have, and names"
    assert place_of({"a2v_cross_attn": False}) is place_of({**usual, "context_window": 1}) is None


def test_ranks_find_what_the_call_before_left_where_it_leaves_something_and_can_be_told_from_others(
    new_run, module_of_pack
) -> None:
    plan = module_of_pack("parallel_runtime.plan").ParallelPlan

    def place(text: str, name: str | None = "a", *, keeps: bool = False, **changed: object) -> object:
        run = new_run("/a.safetensors")
        run = replace(run, decision=replace(run.decision, plan=plan.parse(text)), **changed)
        run.model.keeps_state = keeps
        found = run._place(name)
        return None if found is None else (found.run == run.run_id, found.key)

    staged = "pipefusion=2"
    assert place("ulysses=2") is place(staged, None) is place(staged, wrapped=True) is None
    assert place("ulysses=2", step_cache=0.1) == place(staged) == (True, "a")
    assert place("ulysses=2", None, keeps=True) == (True, "")


@dataclass
class Loop:
    """As a run that the workers have, without its numbers."""

    conds: tuple
    recurrence: Any


@pytest.mark.parametrize(("reason", "stays"), [(None, False), ("a conditioning has an area", False), (None, True)])
def test_a_step_is_told_once_the_next_is_under_way_where_the_loop_stays_in_comfyui(
    reason: str | None, stays: bool, new_run, module_of_pack
) -> None:
    """The sampler goes on with the tensors that it showed, in place."""
    seen: list[object] = []

    run = replace(new_run("/a.safetensors"), recorder=None, loop_reason=reason)
    vars(run.model)["pool"] = workers(lambda *_: seen.append("sent"))
    late = module_of_pack("nodes.host.sampling.late_previews").LateCallback
    callback = lambda step, denoised, x, steps: seen.append((step, denoised.item(), x.item(), steps))  # noqa: E731
    run.late = late(callback, run, stays=stays)
    for step in range(2):
        run.call(made(), check_cancelled=lambda: None)
        denoised, x = torch.tensor(1.0), torch.tensor(2.0)
        run.late(step, denoised, x, 2)
        denoised.zero_(), x.zero_()
    run.call_late()
    told = [(step, 1.0, 2.0, 2) for step in range(2)]
    assert seen == (["sent", "sent", *told] if reason or stays else ["sent", told[0], "sent", told[1]])


def test_a_controlnet_is_named_by_its_shapes_and_numbers(module_of_pack) -> None:
    name = module_of_pack("nodes.host.sampling.applied")._name
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    same, other = dict(reversed(tensors.items())), {**tensors, "a": torch.zeros(2)}
    assert name(same.items()) == name(tensors.items()) != name(other.items())
    assert name([("a", torch.empty(2, device="meta"))]) != name([("a", torch.empty(3, device="meta"))])


LATE = """
import importlib, sys
from types import SimpleNamespace
import torch
from trace_samplers import NAME, load
load(sys.argv[1])
import comfy.samplers, latent_preview
late = importlib.import_module(f"{NAME}.nodes.host.sampling.late_previews")
formats = SimpleNamespace(latent_rgb_factors=None, taesd_decoder_name=None)
model = SimpleNamespace(load_device=torch.device("cpu"), model=SimpleNamespace(latent_format=formats))
sampler = comfy.samplers.KSAMPLER(comfy.k_diffusion.sampling.sample_euler)
stock, of_a_pack = latent_preview.prepare_callback(model, 3), lambda *_: None
for sampler, given, named in (
    (sampler, (None, stock, False), {}), (sampler, (), {"callback": stock}),
    (sampler, (None, of_a_pack), {}), (object(), (None, stock), {}), (sampler, (None,), {}),
):
    run = SimpleNamespace(late=None)
    arguments, named = late.with_late_callback(run, sampler, given, named, stays=False)
    print(run.late is not None and run.late in [*arguments, *named.values()])
"""


def test_comfyuis_own_callback_with_a_stock_sampler_is_the_one_that_may_come_late(in_comfyui) -> None:
    assert in_comfyui(LATE) == ["True", "True", "False", "False", "False"]


def test_loaders_load_again_once_a_plan_took_the_place_of_another_and_a_replaced_file_is_not_looked_at(
    module_of_pack, tmp_path, monkeypatch
) -> None:
    """What they told and predicted was of the first plan."""
    module = module_of_pack("nodes.host.model.found_plans")
    found, specs = (
        module_of_pack("parallel_runtime.models.specs.found"),
        module_of_pack("parallel_runtime.models.specs"),
    )
    first, second, third = (specs.SPECS[each] for each in sorted(specs.SPECS)[:3])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = found.FoundKey(model_class="New", source="1f", comfyui="0.30.0", kind="5b")
    monkeypatch.setattr(module, "key_of", lambda *_: key)
    monkeypatch.setattr(module, "why_unshared", lambda _: "")
    assert found.found_specs().save(key, second, cuts="cut once", errors={"error": 0.0, "control": 1.0})
    search, transformer = module.SpecSearch(), torch.nn.Identity()

    def refused(spec: Any) -> Any:
        return search.instead_of(transformer, "5b", spec, lambda: None)

    (file := tmp_path / "new.safetensors").write_bytes(b"1")
    spec = replace(module_of_pack("parallel_runtime.checkpoint").ModelSpec.of(str(file)), found=found.to_text(first))
    assert (search.news(), refused(spec).spec, refused(spec).spec, search.news()) == (0, second, second, 1)
    assert refused(replace(spec, found=found.to_text(second))) == found.Found() and search.news() == 1
    monkeypatch.setattr(found.FoundSpecs, "pass_over", lambda *_: False)  # a folder that can be read alone
    digests = [found.of_text(found.to_text(each)).digest for each in (first, third)]
    assert refused(replace(spec, found=found.to_text(third))).spec == second
    assert list(search.unkept[key].instead_of) == digests, "this process knows it until it ends"
    file.write_bytes(b"another")
    assert "was changed after it was chosen" in refused(spec).why


def test_a_run_says_that_blocks_are_compiled_while_they_are(module_of_pack) -> None:
    module, said = module_of_pack("nodes.host.sampling.run_context"), []
    for compiled, state, told in ((True, "compiling", 1), (True, "busy", 0), (False, "compiling", 0)):
        said.clear()
        run = SimpleNamespace(compiled=compiled, model=SimpleNamespace(pool=SimpleNamespace(state=state)))
        run.listener = SimpleNamespace(compiling=lambda: said.append("compiling"))
        module.RunContext._checks(run, lambda: said.append("checked"))()
        assert said == ["checked"] + ["compiling"] * told


def test_what_another_process_saw_of_another_file_serves_no_load_and_is_not_looked_at_again(
    module_of_pack, tmp_path, monkeypatch
) -> None:
    module, found = (
        module_of_pack(name) for name in ("nodes.host.model.found_plans", "parallel_runtime.models.specs.found")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = found.FoundKey(model_class="a.New", source="1f", comfyui="0.30.0", kind="5b")
    comfyui = module_of_pack("parallel_runtime.checkpoint").ComfyUI("/comfyui", ())
    monkeypatch.setattr(module, "this_comfyui", lambda: comfyui)
    report = {"class": "a.New", "source": "1f", "comfyui": "0.30.0", "kind": "5b", "refused": "mixes", "kept": True}
    spec = SimpleNamespace(path="/a.safetensors", checkpoint=False)
    for changes, why, unkept in (
        ({}, "mixes", False),
        ({"kept": False}, "mixes", True),
        ({"class": "a.Old"}, "a process of its own takes the file for a.Old", True),
        ({"kind": "14b"}, "a process of its own takes the file for another kind of its class; load it again", True),
        ({"source": "2e"}, "ComfyUI's files were changed meanwhile; restart ComfyUI", True),
    ):
        monkeypatch.setattr(module, "find_plan", lambda *_, report=report | changes, **__: report)
        search = module.SpecSearch()
        assert search._looked(spec, key, print).why == f"no plan was found: {why}"
        assert len(search.unkept) == unkept


def test_a_plan_that_is_kept_serves_a_load_where_it_fits_the_transformer(module_of_pack, monkeypatch, caplog) -> None:
    module, transformer = module_of_pack("nodes.host.model.found_plans"), torch.nn.Identity()
    kept = module_of_pack("parallel_runtime.models.specs.found").Found(why="kept")
    source = SimpleNamespace(
        model=SimpleNamespace(diffusion_model=transformer), recognised=SimpleNamespace(kind="5b"), spec="spec"
    )
    monkeypatch.setattr(module, "may_be_found", lambda _: True)
    key = module_of_pack("parallel_runtime.models.specs.found").FoundKey(
        model_class="New", source="1f", comfyui="0.30", kind="5b"
    )
    monkeypatch.setattr(module, "key_of", lambda *_: key)
    monkeypatch.setattr(module, "replace", lambda _, **changes: changes)
    monkeypatch.setattr(module, "found_spec_of", lambda *_, fits, known: kept if fits(kept) else None)
    search = SimpleNamespace(unkept={}, _looked=lambda *_: module.UNSEEN)
    for misfit in ("", "no such block"):
        monkeypatch.setattr(module, "_given", lambda _, found, misfit=misfit: misfit if found is kept else found.why)
        got = module.SpecSearch.with_found(search, source, look=False)
        assert (got.get("unshared") == module.UNSEEN.why) is bool(misfit), got
    assert caplog.text.count("a plan that is kept for New is not used: no such block") == 1


def test_nothing_is_weighed_for_a_run_whose_work_nobody_knows_or_where_comfyui_cannot_tell_it(
    new_run, module_of_pack, monkeypatch
) -> None:
    workload, decision = module_of_pack("nodes.host.sampling.workload_from_guider"), new_run("/a.safetensors").decision
    for work, off in ((None, ""), (None, "gone"), ("a work", "gone")):
        monkeypatch.setattr(workload, "off", lambda feature, off=off: off)
        assert workload.work_of_settings(None, {}, replace(decision, work=work)) is None
        assert workload.work_of_run(None, torch.zeros(1), torch.zeros(1), replace(decision, work=work)) is None


def test_a_users_plan_is_held_against_autos_where_the_devices_speed_is_known(module_of_pack, monkeypatch) -> None:
    module = module_of_pack("nodes.choice")
    choice = module.choice_of("manual", "cpu:2", ulysses=2)
    for known, plan, advises in (("a speed", choice.plan, True), (None, choice.plan, False), ("a speed", None, False)):
        monkeypatch.setattr(module, "_constants", lambda devices, known=known: known)
        assert replace(choice, plan=plan).advises is advises


def test_what_a_class_asks_before_a_run_is_no_step_of_it(new_run) -> None:
    """MiniMax H3's, LTX-2's and Anima's text refiner: a plan that is timed by it says nothing of a step."""
    asked: list[object] = []

    class Trier:
        now = None

        def __getattr__(self, name: str) -> object:
            asked.append(name)
            raise NothingStartsError

    run = replace(new_run("/a.safetensors"), trier=Trier())
    vars(run.model)["pool"] = workers(lambda *_: None)
    run._send([made(options={"method": "preprocess_text_embeds"})], print)
    assert (asked, run.step_seconds) == ([], []) and run.trier is not None
    with pytest.raises(NothingStartsError):
        run._send([made()], print)
    run.trier = None
    run._send([made()], print)
    assert asked and run.step_seconds == [0.1]
