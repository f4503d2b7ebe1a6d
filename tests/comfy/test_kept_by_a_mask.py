"""What a model says of a latent, asked ahead; what cannot be asked keeps the loop in ComfyUI, with the reason."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

SIGMAS, SHAPE = (0.9, 0.5), (1, 2, 3, 4)


@pytest.fixture(scope="module")
def loop(module_of_pack: Callable[[str], ModuleType]) -> ModuleType:
    return module_of_pack("nodes.host.sampling.worker_loop")


@pytest.fixture(scope="module")
def traced(module_of_pack: Callable[[str], ModuleType]) -> ModuleType:
    return module_of_pack("nodes.host.sampling.trace_recurrence")


@pytest.fixture(scope="module")
def recurrence(module_of_pack: Callable[[str], ModuleType]) -> Any:
    """A call at each sigma, then what the last one said."""
    recurrences = module_of_pack("parallel_runtime.sampler_recurrence")
    steps = [
        recurrences.RecurrenceStep(inputs=(), denoised=(), sigma=sigma, timestep=sigma, given=True) for sigma in SIGMAS
    ]
    last = recurrences.RecurrenceStep(inputs=(), denoised=((1, 1.0),), sigma=None, timestep=None, given=False)
    return recurrences.SamplerRecurrence(states=(*steps, last), step_ends=(0, 1))


@pytest.fixture(scope="module")
def asked(loop: ModuleType, recurrence: Any) -> Callable[[Any], object]:
    """Asks a model what a mask of some places keeps, as a run does."""
    generator = torch.Generator().manual_seed(3)
    noise, latent = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    mask = torch.ones(1, 1, 3, 4)
    mask[..., 1, :], mask[..., 2, :] = 0.4, 0.0

    def ask(scaling: Any) -> object:
        sampling = SimpleNamespace(
            calculate_input=lambda _, x: x, calculate_denoised=lambda sigma, out, x: x - out * sigma
        )
        base = SimpleNamespace(model_sampling=sampling, scale_latent_inpaint=scaling)
        model = SimpleNamespace(inner_model=SimpleNamespace(inner_model=base), noise=noise, latent_image=latent)
        with loop._traceable(lambda error: f"the model: {error}"):
            found = loop.with_predictions(recurrence, base, dims=4, masked=True)
        x = SIGMAS[0] * noise + (1 - SIGMAS[0]) * latent
        return loop._inpaint(model, mask, x, found)

    return ask


def usual(sigma: Tensor, noise: Tensor, latent_image: Tensor, **_: object) -> Tensor:
    sigma = sigma.reshape(-1, 1, 1, 1)
    return sigma * noise + (1 - sigma) * latent_image


def of_older(x: Tensor, sigma: Tensor, noise: Tensor, latent_image: Tensor) -> Tensor:
    """Takes no mask."""
    return usual(sigma, noise, latent_image)


def where_all_is_new(sigma: Tensor, noise: Tensor, latent_image: Tensor, x: Tensor, **told: Any) -> Tensor:
    """Another number only where the mask keeps nothing."""
    return usual(sigma, noise, latent_image) + (told["denoise_mask"] == 1 if "denoise_mask" in told else 0)


def blending(
    sigma: Tensor, noise: Tensor, latent_image: Tensor, x: Tensor, denoise_mask: Tensor | None = None
) -> Tensor:
    """With the latent itself, where the mask keeps a part; as usual for whoever says no mask."""
    found = usual(sigma, noise, latent_image)
    return found if denoise_mask is None else found + 0.3 * ((0 < denoise_mask) & (denoise_mask < 1)) * (x - found)


def blending_whatever_it_is_told(**told: Any) -> Tensor:
    """Names none of what it reads."""
    return blending(**told)


def of_its_size(sigma: Tensor, noise: Tensor, latent_image: Tensor, **_: object) -> Tensor:
    """Unpacks a latent of two parts."""
    return usual(sigma, noise.reshape(SHAPE), latent_image.reshape(SHAPE))


@pytest.mark.parametrize("scaling", [usual, of_older, where_all_is_new])
def test_a_mask_is_kept_in_the_workers_where_numbers_say_it(scaling: Any, asked: Callable[[Any], Any]) -> None:
    assert asked(scaling).keys() == {"mask", "noise", "latent"}


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        (blending, "in its own way"),
        (blending_whatever_it_is_told, "in its own way"),
        (of_its_size, "the model: shape '.*' is invalid"),
    ],
)
def test_what_numbers_cannot_say_of_a_mask_keeps_the_loop_in_comfyui(
    scaling: Any, reason: str, asked: Callable[[Any], object], loop: ModuleType
) -> None:
    with pytest.raises(loop.HostLoopError, match=reason):
        asked(scaling)


def test_a_sampling_that_multiplies_what_it_is_given_keeps_the_loop_in_comfyui(
    loop: ModuleType, recurrence: Any
) -> None:
    for product in (0.0, 1e-4):  # of what the model says and the latent
        sampling = SimpleNamespace(
            calculate_input=lambda _, x: x,
            calculate_denoised=lambda sigma, out, x, product=product: x - out * sigma + product * out * x,
        )
        base = SimpleNamespace(model_sampling=sampling)
        refused = pytest.raises(loop.HostLoopError, match="no sum of multiples") if product else nullcontext()
        with refused:
            loop.with_predictions(recurrence, base, dims=4, masked=False)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_noise_that_memory_is_too_small_for_keeps_the_loop_in_comfyui_and_the_seed_as_it_was(
    error: type[Exception], loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*_: object) -> None:
        torch.randn(4)
        raise error("no memory")

    monkeypatch.setattr(loop, "given_tensors", draw)
    noisy, x = SimpleNamespace(given=(0, 2), states=range(5)), torch.zeros(SHAPE)
    before = torch.get_rng_state()
    with pytest.raises(loop.HostLoopError, match="the noise of all steps cannot be drawn ahead: no memory"):
        loop._drawn(None, noisy, x)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(loop, "MOST_NOISE_BYTES", 4 * x.nbytes)  # a latent a state is kept at once
    with pytest.raises(loop.HostLoopError, match="the noise of all steps takes"):
        loop._drawn(None, noisy, x)


def test_samplers_that_call_or_end_steps_by_what_the_model_says_keep_the_loop_in_comfyui(traced: ModuleType) -> None:
    zeros = {"sigmas": [0.9], "step_ends": [0]}
    for others in ({"sigmas": [0.8]}, {"step_ends": [1]}, {"sigmas": [0.8], "step_ends": [1]}):

        def with_answers(x: Tensor, answer: Any, others: Any = others, **_: Any) -> Any:
            return traced.TracedCalls(**zeros | (others if answer(0, x).any() else {}))

        run = SimpleNamespace(sigmas=torch.tensor(SIGMAS), with_answers=with_answers)
        with pytest.raises(traced.NotLinearError, match="what it does depends on what the model says"):
            traced.trace(run, lambda sigma: sigma)


def test_images_that_leave_batch_groups_idle_keep_the_loop_in_comfyui(
    loop: ModuleType, module_of_pack: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = module_of_pack("parallel_runtime.plan").ParallelPlan(data=2)
    monkeypatch.setattr(loop, "run_of", lambda _: SimpleNamespace(proven_for=(plan, None)))
    monkeypatch.setattr(loop, "_traced", lambda _: loop.Traced(None, torch.tensor(SIGMAS), torch.tensor(SIGMAS)))
    for name in ("with_predictions", "refuse_long", "_refuse_ranges", "_inpaint"):
        monkeypatch.setattr(loop, name, lambda *_, **__: None)
    monkeypatch.setattr(loop, "cond_names", lambda *_: ("positive", "negative"))
    monkeypatch.setattr(loop, "conds_of_run", lambda *_: 1 / 0)
    sampler, told = loop.WorkerLoopSampler.__new__(loop.WorkerLoopSampler), {"callback": None, "disable": True}
    told["extra_args"] = {"model_options": {}, "denoise_mask": None}
    model = SimpleNamespace(inner_model=SimpleNamespace(inner_model=None))
    for images, error in ((1, loop.HostLoopError), (2, ZeroDivisionError)):  # which is as far as it comes
        with pytest.raises(error, match=r"shares out 1 image\(s\) inside the workers|division"):
            sampler._run(model, torch.zeros(images, 16, 4, 4), torch.tensor(SIGMAS), **told)

    # as does a group without a prompt, where all of them decide what a step cache skips
    call = SimpleNamespace(options={"step_cache": 0.1}, out_shape=(1, 4))
    rows = list[int]()
    monkeypatch.setattr(loop, "conds_of_run", lambda *_: [SimpleNamespace(call=call, module_call=None)] * 2)
    monkeypatch.setattr(loop, "cache_of_run", lambda *_: None)
    monkeypatch.setattr(loop, "tell_idle", lambda _, told: (rows.append(told), 1 / 0))
    for cfg, images, error in ((3, 1, loop.HostLoopError), (2, 3, ZeroDivisionError)):
        context = SimpleNamespace(proven_for=(replace(plan, data=1, cfg=cfg), None), check=print, try_plans=print)
        monkeypatch.setattr(loop, "run_of", lambda _, context=context: context)
        with pytest.raises(error, match=r"a step cache decides on all of them; use cfg=2|division"):
            sampler._run(model, torch.zeros(images, 16, 4, 4), torch.tensor(SIGMAS), **told)
    assert rows == [2 * 3], "each image with the prompt and without it"


def test_blocks_of_an_unknown_order_that_ranks_share_keep_the_loop_in_comfyui(
    module_of_pack: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = module_of_pack("parallel_runtime.plan").ParallelPlan
    calls = module_of_pack("nodes.host.sampling.worker_loop_calls")
    guider = SimpleNamespace(inner_model=SimpleNamespace(diffusion_model=torch.nn.Linear(1, 1)))

    def refuse(parts: str) -> None:
        monkeypatch.setattr(calls, "run_of", lambda _: SimpleNamespace(plan=plan.parse(parts)))
        calls.refuse_calls(guider, {})

    for parts in ("cfg=2", "ulysses=2,weights=sharded"):
        refuse(parts)
    with pytest.raises(calls.HostLoopError, match="the order of Linear's blocks is not known, by which ranks share"):
        refuse("cfg=2,weights=sharded")
    monkeypatch.setattr(calls, "find_whole", lambda kind: "known")
    refuse("cfg=2,weights=sharded")


def test_rows_that_a_class_reads_of_each_other_keep_the_loop_in_comfyui_where_ranks_would_part_them(
    module_of_pack: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = module_of_pack("nodes.host.sampling.worker_loop_calls")
    reads = module_of_pack("parallel_runtime.models.hosted.calls").READ_OF_OTHER_ROWS
    monkeypatch.setitem(reads, "torch.nn.modules.linear.Linear", ("denoise_mask",))
    guider = SimpleNamespace(inner_model=SimpleNamespace(diffusion_model=torch.nn.Linear(1, 1)))

    def applied(mask: list[float], images: tuple[int, ...]) -> None:
        kwargs = {"denoise_mask": torch.tensor(mask), "transformer_options": {"cond_or_uncond": [0, 1]}}
        calls._applied(guider, kwargs, torch.zeros(2, 4, 1, 1), images, {})

    applied([1.0, 0.5, 1.0, 0.5], (2,))  # two images with the prompt, then without it
    applied([1.0, 1.0, 0.5, 0.5], (1, 1))  # ranks have both sides of an image
    with pytest.raises(calls.HostLoopError, match="Linear mixes the rows of a batch"):
        applied([1.0, 0.5, 1.0, 0.5], (1, 1))

    sides = [{"denoise_mask": torch.tensor([each])} for each in (1.0, 1.0, 0.5)]
    calls._refuse_differing(torch.nn.Linear, sides[:2])
    with pytest.raises(calls.HostLoopError, match="Linear mixes the rows of a batch"):
        calls._refuse_differing(torch.nn.Linear, sides[1:])


def test_rows_that_are_rounded_by_one_scale_keep_the_loop_in_comfyui_where_they_would_be_several_calls(
    module_of_pack: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = module_of_pack("nodes.host.sampling.worker_loop_calls")
    monkeypatch.setattr(calls, "coarse_inputs", lambda config, weights: config)
    for rows, whole, coarse in ((2, False, True), (1, False, True), (2, True, True), (2, False, False)):
        prover = SimpleNamespace(recognised=SimpleNamespace(config=coarse, weights=None))
        guider = SimpleNamespace(inner_model=SimpleNamespace(prover=prover))
        refused = pytest.raises(
            calls.HostLoopError, match="layers of the file's format round all rows of a step by one"
        )
        with refused if (rows, whole, coarse) == (2, False, True) else nullcontext():
            calls._refuse_parted(guider, rows=rows, whole=whole)


class Guider:
    """As ComfyUI's, whose methods a run calls."""

    def __init__(self, cfg: float = 2.0, **conds: Any) -> None:
        self.cfg, self.conds, self.model_options = cfg, {"positive": [{}], "negative": [{}], **conds}, {}
        self.model_patcher = SimpleNamespace(object_patches=[], callbacks={})
        self.inner_model = SimpleNamespace(pooled="ours", apply_model=None)

    def predict_noise(self) -> None: ...


class Another(Guider):
    def predict_noise(self) -> None: ...


class Read(Guider):
    cfg_seen = property(lambda self: 1.0)


@pytest.fixture
def refusal(loop: ModuleType, module_of_pack: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Why a run of this guider stays in ComfyUI's loop, "" for none."""
    for name, value in {"CFGGuider": Guider, "READ_OF_GUIDERS": ("cfg_seen",), "refuse_calls": print}.items():
        monkeypatch.setattr(loop, name, value)
    monkeypatch.setattr(loop, "run_of", lambda options: options.get("run"))

    def why(guider: Guider, **options: Any) -> str:
        try:
            loop._refuse(guider, {"run": SimpleNamespace(model="ours"), **options})
        except loop.HostLoopError as error:
            return str(error)
        return ""

    return why


def test_what_needs_the_host_at_each_step_keeps_the_loop_in_comfyui(loop: ModuleType, refusal: Any) -> None:
    plain, hidden = Guider(), Guider()
    assert refusal(plain) == "" and refusal(plain, run=None) == "the MODEL is a stock loader's"
    assert refusal(plain, run=SimpleNamespace(model="another")) == "the MODEL is a stock loader's"
    hidden.predict_noise = print  # type: ignore[method-assign]
    kinds = (Another(), "Another"), (Read(), "Read"), (hidden, "Guider")
    assert all(refusal(guider) == f"the guider is a {kind}" for guider, kind in kinds)
    for name, reason in loop.OPTIONS.items():
        assert (refusal(plain, **{name: [1]}), refusal(plain, **{name: []})) == (reason, "")
    (outside, *_), here = loop.OUTSIDE, {"mine": [print], "unused": [], loop.TOGETHER_KEY: [print], None: [nullcontext]}
    for wrappers, said in (({outside: here}, ""), ({"calls": here, "more": here}, "(mine, contextlib)")):
        found = refusal(plain, transformer_options={"wrappers": wrappers})
        assert found == (f"a node wraps the model's calls {said}" if said else "")
    for name, said in (
        ("model_sampling.sigmas", ""),
        ("diffusion_model.x", "a node replaces the model's diffusion_model.x"),
    ):
        plain.model_patcher.object_patches = [name]
        assert refusal(plain) == said
    assert refusal(Guider(negative=[{}, {}])) == "the negative conditioning has 2 parts"
    assert refusal(Guider(positive=[])) == "the positive conditioning has 0 parts"
    for key, reason in loop.BY_STEP.items():
        assert refusal(Guider(negative=[{key: 0}])) == reason and refusal(Guider(1.0, negative=[{key: 0}])) == ""


def test_conditionings_that_some_steps_leave_out_keep_the_loop_in_comfyui(loop: ModuleType) -> None:
    recurrence = SimpleNamespace(states=[SimpleNamespace(sigma=sigma) for sigma in (0.5, 0.9, 0.1, None)])
    for entry, refused in (
        ({}, False),
        ({"timestep_start": 0.9, "timestep_end": 0.1}, False),
        ({"timestep_start": 0.8}, True),
        ({"timestep_end": 0.2}, True),
    ):
        with pytest.raises(loop.HostLoopError, match="for some steps only") if refused else nullcontext():
            loop._refuse_ranges(Guider(negative=[entry]), {}, recurrence)


def test_a_traced_sampler_gives_all_images_of_a_call_one_sigma_and_ends(traced: ModuleType) -> None:
    options: dict[str, Any] = {}
    model, run = traced._Model.__new__(traced._Model), traced.TracedCalls(sigmas_left=torch.tensor(SIGMAS))
    model._run, model._answer, model._options, model._max_calls = run, (lambda number, x: x + number), options, 3
    x = torch.ones(2, 1)
    for number, sigma in enumerate(([0.5], [0.25, 0.25], [0.0])):
        assert model(x, torch.tensor(sigma), model_options=options).tolist() == [[1.0 + number]] * 2
    assert run.sigmas == [0.5, 0.25, 0.0] and all(torch.equal(each, x) and each is not x for each in run.inputs)
    for told, most, error in (
        (options, 3, "it calls the model more than 3 times"),
        (options, 4, "it gives the images of a batch different sigmas"),
        ({}, 4, "it changes the model's options while it runs"),
    ):
        model._max_calls = most
        with pytest.raises(traced.NotLinearError, match=error):
            model(x, torch.tensor([0.5, 0.25]), model_options=told)


@pytest.fixture
def run_of(traced: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the run of a sampler's function over some sigmas, whose models need no guider."""
    kind = traced._Model

    def model(*_: object, **told: Any) -> Any:
        made = kind.__new__(kind)
        vars(made).update({f"_{name}": value for name, value in told.items()})
        return made

    def make(sample: Callable[..., Any], num_sigmas: int, **extra_options: Any) -> Any:
        sampler = SimpleNamespace(sampler_function=sample, extra_options=extra_options)
        given = {"sampler": sampler, "guider": None, "extra_args": {"model_options": {}}}
        return traced.SamplerRun(**given, sigmas=torch.ones(num_sigmas))

    monkeypatch.setattr(traced, "_Model", model)
    return make


def test_a_sampler_may_call_the_model_a_few_times_for_each_of_its_sigmas(
    traced: ModuleType, run_of: Callable[..., Any]
) -> None:
    def sample(model: Any, x: Tensor, sigmas: Tensor, *, calls: int, extra_args: Any, callback: Any, **_: Any) -> Any:
        for _ in range(calls):
            denoised = model(x, sigmas[:1], **extra_args)
            callback({"denoised": denoised})
            x = (x + denoised) / 2
        return x

    def found(calls: int) -> Any:
        return traced.trace(run_of(sample, 13, calls=calls), lambda sigma: sigma)[0]

    assert found(4 * 13 + 16).num_calls == 68
    with pytest.raises(traced.NotLinearError, match="it calls the model more than 68 times"):
        found(69)


@pytest.mark.parametrize("done", ["cdcd", "cdccd", "", "c", "dcd", "cdd"])
def test_a_sampler_is_traced_whose_steps_each_end_with_a_call_of_the_model_or_that_makes_none(
    traced: ModuleType, run_of: Callable[..., Any], done: str
) -> None:
    """What it does: c, a call of the model; d, a step is done."""

    def sample(model: Any, x: Tensor, sigmas: Tensor, *, extra_args: Any, callback: Any, **_: Any) -> Any:
        for each in done:
            if each == "c":
                x = model(x, sigmas[:1], **extra_args)
            else:
                callback({"denoised": x})
        return x

    ends = {"cdcd": (0, 1), "cdccd": (0, 2), "": ()}.get(done)
    refused = pytest.raises(traced.NotLinearError, match="its steps do not each end with a call of the model")
    with refused if ends is None else nullcontext():
        assert traced.trace(run_of(sample, 3), lambda sigma: sigma)[0].step_ends == ends


def test_calls_find_the_sigmas_as_the_sampler_has_made_them(
    loop: ModuleType, traced: ModuleType, run_of: Callable[..., Any]
) -> None:
    """uni_pc writes to the last one before its first call; what is written after the last call no call finds."""

    def sample(model: Any, x: Tensor, sigmas: Tensor, *, extra_args: Any, callback: Any, **_: Any) -> Any:
        sigmas[-1] = 0.001
        for step in range(2):
            sigmas[0] += step * between
            x = model(x, sigmas[1:2], **extra_args)
            callback({"denoised": x})
        sigmas[0] = 7.0
        return x

    between, run = 0.0, run_of(sample, 3)
    found = traced.trace(run, lambda sigma: sigma)
    assert torch.equal(found.sigmas_in_calls, torch.tensor([*run.sigmas[:-1], 0.001]))
    assert torch.equal(found.sigmas_left, torch.tensor([7.0, *run.sigmas[1:-1], 0.001]))
    options = {"a": 1, "transformer_options": {"b": 2, "sample_sigmas": run.sigmas}}
    seen = loop._as_calls_see(options, run.sigmas, found.sigmas_in_calls)
    assert torch.equal(seen["transformer_options"].pop("sample_sigmas"), found.sigmas_in_calls)
    assert seen == {"a": 1, "transformer_options": {"b": 2}} and run.sigmas[-1] != 0.001
    assert options["transformer_options"]["sample_sigmas"] is run.sigmas, "ComfyUI's loop may run yet"
    other = {"transformer_options": {"sample_sigmas": run.sigmas.clone()}}  # a wrapper's
    assert loop._as_calls_see(other, run.sigmas, found.sigmas_in_calls) is other
    assert loop._as_calls_see({}, run.sigmas, found.sigmas_in_calls) == {}
    between = 0.1
    with pytest.raises(traced.NotLinearError, match="it changes its sigmas between calls of the model"):
        traced.trace(run, lambda sigma: sigma)


def test_a_sampler_is_traced_without_a_tree_of_noise_and_draws_its_own_where_each_call_may_be_cancelled(
    traced: ModuleType, run_of: Callable[..., Any]
) -> None:
    """A Brownian tree takes seconds to make, and seconds a draw."""
    trees, drawn = [], list[int]()

    class Cancelled(BaseException):
        pass

    def sample(
        model: Any, x: Tensor, sigmas: Tensor, *, noise_sampler: Any = None, extra_args: Any, callback: Any, **_: Any
    ) -> Any:
        if noise_sampler is None:
            trees.append(x.shape)
            noise_sampler = lambda *_: drawn.append(1) or torch.full_like(x, 2.0)  # noqa: E731
        for step in range(3):
            denoised = model(x, sigmas[:1], **extra_args)
            callback({"denoised": denoised})
            x = (x + denoised) / 2 + noise_sampler(sigmas[step], sigmas[step + 1])
        return x

    run = run_of(sample, 4)
    recurrence = traced.trace(run, lambda sigma: sigma)[0]
    assert recurrence.given == (0, 1, 2, 3) and not trees
    told = traced.given_tensors(run, recurrence, torch.zeros(SHAPE), lambda: None)
    assert [float(told[number].mean()) for number in (1, 2, 3)] == [2.0] * 3 and trees == [SHAPE] and len(drawn) == 3

    def cancelled() -> None:
        if len(drawn) == 4:
            raise Cancelled

    with pytest.raises(Cancelled):
        traced.given_tensors(run, recurrence, torch.zeros(SHAPE), cancelled)
    assert len(drawn) == 4, "one more draw than before"


@pytest.mark.parametrize("more", [0.99, 1.01, 1.2])
def test_a_sampler_that_changes_a_latents_size_a_little_is_not_traced(
    traced: ModuleType, run_of: Callable[..., Any], more: float
) -> None:
    def sample(model: Any, x: Tensor, sigmas: Tensor, *, extra_args: Any, callback: Any, **_: Any) -> Any:
        for _ in range(2):
            denoised = model(x, sigmas[:1], **extra_args)
            callback({"denoised": denoised})
            size = [round(each * more) for each in x.shape[-2:]]
            x = torch.nn.functional.interpolate(denoised, size=size)
        return x

    with pytest.raises(traced.NotLinearError, match="it changes the size of the latent"):
        traced.trace(run_of(sample, 3), lambda sigma: sigma)


def test_what_steps_show_may_be_a_little_off_towards_what_the_model_was_given(traced: ModuleType) -> None:
    generator = torch.Generator().manual_seed(3)
    said, given, other = (torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(3))
    for part, sigma in ((0.0, 1.0), (0.2, 0.2), (-0.2, 0.2), (0.04, 1.0), (0.04, 14.0), (9.0, 0.005)):
        traced._check_shown(said + part * (given - said), given, said, sigma)
    traced._check_shown(said, said, said, 1.0)
    for part, sigma, off in ((0.2, 0.5, "1.0e-01"), (-0.2, 0.5, "1.0e-01"), (1.0, 14.0, "1.0e.00")):
        error = f"something else than the denoised latent .off by {off}"
        with pytest.raises(traced.NotLinearError, match=error):
            traced._check_shown(said + part * (given - said), given, said, sigma)
    with pytest.raises(traced.NotLinearError, match="it is not linear"):
        traced._check_shown(other, given, said, 0.01)


def test_a_samplers_states_are_written_by_the_fewest_calls_back(traced: ModuleType) -> None:
    """Rows: X_0, which is given, X_1 = 0.5 X_0 + 0.25 D_0, X_2 = 0.5 X_1 + 2 D_1, and the result, D_2."""
    rows = [[1.0, 0, 0, 0], [0.5, 0.25, 0, 0], [0.25, 0.125, 2, 0], [0, 0, 0, 1]]
    found = [torch.tensor(row, dtype=torch.float64) for row in rows]

    def states(*still: float, found: list[Tensor] = found) -> list[tuple[object, ...]]:
        zeros = [torch.full((4,), each, dtype=torch.float64) for each in still]
        told = traced._states([x + zero for x, zero in zip(found, zeros, strict=True)], zeros, 1e-9)
        return [
            tuple([(call, round(factor, 6)) for call, factor in state[name]] for name in ("inputs", "denoised"))
            + (state["given"],)
            for state in told
        ]

    made = [([], []), ([(0, 0.5)], [(0, 0.25)]), ([(1, 0.5)], [(1, 2.0)]), ([], [(2, 1.0)])]
    for noise, given in (
        ((0, 0, 0, 0), (True, False, False, False)),
        ((0, 3, 0, 0), (True, True, True, False)),
        ((0, 0, 0, 3), (True, False, False, True)),
    ):
        assert states(*noise) == [(*state, each) for state, each in zip(made, given, strict=True)]
    with pytest.raises(traced.NotLinearError, match="not finite"):
        states(0, 0, 0, 0, found=[*found[:3], found[3] / 0])
    with pytest.raises(traced.NotLinearError, match="no sum of earlier ones"):
        states(0, 0, 0, 0, found=[found[0], found[3], *found[2:]])
    alone = torch.eye(12, dtype=torch.float64)
    last = traced._states([*alone[:10], alone[:11].sum(0)], 11 * [torch.zeros(12, dtype=torch.float64)], 1e-9)[-1]
    assert (last["inputs"], last["denoised"]) == (((0, 1.0),), tuple((call, 1.0) for call in range(10)))
    x = torch.zeros(SHAPE)
    for given, latents in (((0,), 1), ((0, 2), 5)):
        assert traced.noise_bytes(SimpleNamespace(given=given, states=range(5)), x) == latents * x.nbytes


def test_a_run_that_stays_in_comfyui_samples_after_the_reason_is_gone(
    loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is being handled holds the tensors of what raised it, and is named by each error behind it."""
    stayed: list[str] = []
    run = SimpleNamespace(stays=stayed.append)

    def refuse(*_: object) -> None:
        raise loop.HostLoopError("the guider is a Dual")

    monkeypatch.setattr(loop, "_refuse", refuse)
    monkeypatch.setattr(loop, "run_of", lambda _: run)
    monkeypatch.setattr(loop.WorkerLoopSampler.__bases__[0], "sample", lambda *_: sys.exc_info()[1], raising=False)
    sampler = loop.WorkerLoopSampler.__new__(loop.WorkerLoopSampler)
    assert sampler.sample(None, torch.ones(2), {"model_options": {}}, None) is None
    assert stayed == ["the guider is a Dual"]
