"""A plan is proven by computing a call shared and whole, refused where they differ, and neither where nothing is said.

Owns: the verdict of real ranks on ComfyUI's own Wan, with plans that are wrong on purpose (proving_engine.py), and how
a call is made smaller. Does not own: the file of proofs (test_proof.py), nor who asks (families/test_self_proof.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from noted import FOLDER
from rounding import ROUNDING

from families.files import write_model_files
from families.wan import TEXT, wan_file
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import OutOfMemoryInRankError, PoolError, RaisedInRankError, SilentWorkersError
from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.calls import from_tree, to_tree
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool import failures, proving
from parallel_runtime.pool.calls import RunResult
from parallel_runtime.pool.pool import Pool
from parallel_runtime.pool.proving import arguments_of, other_sizes, prove, smaller_call
from parallel_runtime.proof import NOT_PROVEN, PROVEN, REFUSED, Proof, relative_error

ULYSSES, SINGLE = ParallelPlan(ulysses=2), ParallelPlan()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A tiny Wan of 5 heads."""
    (path,) = write_model_files(tmp_path_factory.mktemp("wan"), [wan_file("t2v", "t2v", heads=5, seed=21)])
    comfyui = ComfyUI(str(comfyui_path()), ("--use-pytorch-cross-attention",))
    return ModelSpec.of(str(path), "float32", comfyui=comfyui)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two ranks whose plans can be wrong."""
    engine, folders = "proving_engine:ProvingEngine", (str(Path(__file__).parent), FOLDER)
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1, engine=engine, python_path=folders) as made:
        yield made


def call_of(x: torch.Tensor | list[torch.Tensor], *, wrong: str = "", **kwargs: Any) -> ModelCall:
    """A call of Wan with a text of 13 tokens."""
    context = torch.randn(1, 13, TEXT, generator=torch.Generator().manual_seed(1))
    given = {"args": [x, torch.tensor([700.0])], "kwargs": {"context": context, "transformer_options": {}, **kwargs}}
    tree, tensors = to_tree(given)
    options = {"call": tree, "tensors": len(tensors), "method": None, "wrong": wrong}
    sent = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    return ModelCall(
        tensors=sent, out_shape=(1, sum(each.numel() for each in tensors[:1])), out_dtype=torch.float32, options=options
    )


def latent(height: int = 10, width: int = 14) -> torch.Tensor:
    """3 frames, of 35 tokens by default."""
    return torch.randn(1, 16, 3, height, width, generator=torch.Generator().manual_seed(height))


def proof_of(
    pool: Pool,
    spec: ModelSpec,
    call: ModelCall,
    *,
    plan: ParallelPlan = ULYSSES,
    room: float = 2.0,
    fits: bool = True,
    two_sizes: bool = False,
) -> tuple[Proof, list[RunResult]]:
    """The proof, and what was asked for it."""
    asked: list[RunResult] = []

    def ask(calls: list[ModelCall]) -> RunResult:
        asked.append(pool.run(spec, plan, calls))
        return asked[-1]

    whole_bytes = room * call.tensors["t0"].numel()
    return (
        prove(
            ask,
            call,
            "float32",
            room=lambda each: whole_bytes / each.tensors["t0"].numel(),
            possible=lambda _: fits,
            retract=pool.retract_failure,
            two_sizes=two_sizes,
        ),
        asked,
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ulysses=2", "ring=2", "ulysses=2,weights=sharded"])
def test_a_right_plan_is_proven_in_three_calls(plan: str, pool: Pool, spec: ModelSpec) -> None:
    proof, asked = proof_of(pool, spec, call_of(latent()), plan=ParallelPlan.parse(plan))
    assert (proof.verdict, proof.calls, proof.tokens) == (PROVEN, 3, 105), proof
    assert proof.error <= ROUNDING < 10 * ROUNDING < proof.control
    (alone,) = pool.run(spec, SINGLE, [call_of(latent())]).outs
    (whole,), (control,) = asked[1].outs, asked[2].outs
    assert relative_error(whole, alone) <= ROUNDING < relative_error(control, alone)
    assert [step.sent_bytes for step in asked[0].ran] != [0, 0]
    gathered, *others = [[(step.weight_collectives, step.weight_bytes) for step in each.ran] for each in asked]
    assert others == [gathered] * 2 and (gathered[0][1] > 0) == ("sharded" in plan), "block by block in each call"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["attention", "gather"])
def test_a_wrong_plan_is_refused_with_its_error_and_the_next_right_one_is_proven(
    wrong: str, pool: Pool, spec: ModelSpec
) -> None:
    pool.start()
    generation = pool.generation
    proof, _ = proof_of(pool, spec, call_of(latent(), wrong=wrong))
    assert proof.verdict == REFUSED
    assert f"relative error {proof.error:.1e}" in proof.reason and "at most 1.0e-05 in float32" in proof.reason
    assert proof_of(pool, spec, call_of(latent()))[0].verdict == PROVEN
    assert pool.generation == generation


@pytest.mark.slow
def test_what_tf32_rounds_otherwise_refuses_no_plan(
    pool: Pool, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is the same proof with TF32: cuDNN's convolutions have it in any process of torch."""
    call = call_of(latent(), wrong="tf32")
    assert proof_of(pool, spec, call)[0].verdict == PROVEN
    monkeypatch.setitem(proving.AGAIN, "exact_fp32", False)
    assert proof_of(pool, spec, call)[0].verdict == REFUSED


@pytest.mark.slow
def test_a_plan_that_was_found_is_proven_on_two_sizes(pool: Pool, spec: ModelSpec) -> None:
    """The control is a plan that is right at the run's own size and wrong at any other: one size proves it."""
    right, wrong = call_of(latent()), call_of(latent(), wrong="other size")
    proof, asked = proof_of(pool, spec, right, two_sizes=True)
    assert (proof.verdict, proof.calls, proof.tokens) == (PROVEN, 6, 105) and proof.error <= ROUNDING < proof.control
    assert {each.outs[0].shape[1] for each in asked} == {16 * 3 * 10 * 14, 16 * 3 * 8 * 8}
    assert proof_of(pool, spec, wrong)[0].verdict == PROVEN
    proof, _ = proof_of(pool, spec, wrong, two_sizes=True)
    assert proof.verdict == REFUSED and proof.reason.startswith("at another size: relative error"), proof


@pytest.mark.slow
def test_a_shared_call_that_raises_refuses_the_plan_and_counts_as_no_failure_of_the_workers(
    pool: Pool, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "MAX_FAILURES", 1)  # that many in a minute need the user
    proof, (whole,) = proof_of(pool, spec, call_of(latent(), wrong="raises"))
    assert (proof.verdict, proof.error) == (REFUSED, None)
    assert proof.reason == "TypeError: forward() got an unexpected keyword argument 'rope'"
    assert len(whole.outs) == 1 and pool.status()["last_failure"] is None
    assert proof_of(pool, spec, call_of(latent()))[0].verdict == PROVEN


@pytest.mark.slow
def test_a_smaller_call_that_fails_proves_nothing_and_ends_nothing(pool: Pool, spec: ModelSpec) -> None:
    call = call_of(latent(40, 40), wrong="corner")
    proof, _ = proof_of(pool, spec, call, room=0.5)
    assert (proof.verdict, proof.calls, proof.error) == (NOT_PROVEN, 2, None), proof
    assert proof.reason == "a call that is made for the proof alone failed: ShapesError: no layer is made for this"
    assert pool.status()["last_failure"] is None
    assert pool.run(spec, ULYSSES, [call]).outs[0].isfinite().all(), "the run goes on"


class Answers:
    """Ranks without processes. All calls come to the same, but without exchange; one that is `wrong` raises `error`."""

    def __init__(self, wrong: Callable[[ModelCall], bool], error: BaseException) -> None:
        self._wrong, self._error, self.retracted = wrong, error, 0

    def __call__(self, calls: Sequence[ModelCall]) -> Any:
        (call,) = calls
        if self._wrong(call):
            raise self._error
        out = torch.full(call.out_shape, 2.0 if call.options["local_attention"] else 1.0)
        return SimpleNamespace(outs=[out], ran=[SimpleNamespace(tokens=105)])

    def retract(self) -> None:
        self.retracted += 1

    def proof(self, *, two_sizes: bool = False) -> Proof:
        """Of a call that has room, and whose other sizes the class may not take."""
        judge = {"room": lambda _: 2.0, "possible": lambda _: False, "retract": self.retract}
        return prove(self, call_of(latent()), "float32", two_sizes=two_sizes, **judge)


MEMORY = OutOfMemoryInRankError("CUDA out of memory. Tried to allocate 9.00 GiB")
RAISED = RaisedInRankError("ShapesError: no layer is made for this")


@pytest.mark.parametrize("error", [MEMORY, RAISED], ids=["memory", "raised"])
@pytest.mark.parametrize(
    ("wrong", "calls"),
    [
        (lambda call: call.options["whole"], 2),
        (lambda call: call.options["local_attention"], 3),
        (lambda call: call.out_shape[1] != latent().numel(), 4),
    ],
    ids=["whole", "without exchange", "another size"],
)
def test_a_call_for_the_proof_alone_that_fails_proves_nothing(
    wrong: Callable[[ModelCall], bool], calls: int, error: PoolError
) -> None:
    """Of a run whose own call works."""
    ask = Answers(wrong, error)
    proof = ask.proof(two_sizes=True)
    assert (proof.verdict, proof.calls, proof.error) == (NOT_PROVEN, calls, None)
    assert proof.reason == f"a call that is made for the proof alone failed: {error.cause}"
    assert ask.retracted == 1


@pytest.mark.parametrize(
    ("error", "retracted"),
    [
        (RAISED, 1),  # a whole call raises, too
        (MEMORY, 0),
        (PoolError("exited with code 7"), 0),
        (SilentWorkersError("no answer"), 0),
        (KeyboardInterrupt(), 0),
    ],
    ids=["the class takes the call in no way", "memory", "a rank is lost", "silence", "cancel"],
)
def test_what_is_no_fault_of_the_plan_is_no_failed_proof(error: BaseException, retracted: int) -> None:
    """The error is told, and nothing is judged: the run makes the same call, and would end with it."""
    ask = Answers(lambda _: True, error)
    with pytest.raises(type(error)) as raised:
        ask.proof()
    assert raised.value is error and ask.retracted == retracted


@pytest.mark.parametrize(
    ("here", "there", "error", "control", "reason"),
    [
        ((2e-6, 0.5), (4e-6, 0.25), 4e-6, 0.25, ""),
        ((4e-6, 0.25), (2e-6, 0.5), 4e-6, 0.25, ""),
        ((2e-6, 0.5), (4e-6, 0.0), 4e-6, 0.0, "at another size: it cannot be judged: without any exchange"),
        ((2e-6, 0.5), (0.125, 0.5), 0.125, 0.5, "at another size: relative error 1.2e-01 of a shared call"),
    ],
)
def test_a_proof_on_two_sizes_has_the_larger_error_and_the_smaller_control(
    here: tuple[float, float], there: tuple[float, float], error: float, control: float, reason: str
) -> None:
    def ask(calls: Sequence[ModelCall]) -> Any:
        (call,) = calls
        shared, alone = here if call.out_shape[1] == latent().numel() else there
        off = 0.0 if call.options["whole"] else alone if call.options["local_attention"] else shared
        out = torch.full(call.out_shape, 1.0 + off)
        return SimpleNamespace(outs=[out], ran=[SimpleNamespace(tokens=105)])

    judge = {"room": lambda _: 2.0, "possible": lambda _: True, "two_sizes": True}
    proof = prove(ask, call_of(latent()), "float32", **judge)
    assert (proof.verdict == PROVEN, proof.calls) == (not reason, 6) and proof.reason.startswith(reason)
    assert (proof.error, proof.control) == (pytest.approx(error, rel=0.1), pytest.approx(control, rel=0.1))


@pytest.mark.slow
def test_a_call_whose_attention_says_nothing_cannot_be_judged(pool: Pool, spec: ModelSpec) -> None:
    """All tokens are the same, so each rank's own are as good as all: a plan without attention would pass."""
    proof, _ = proof_of(pool, spec, call_of(torch.ones(1, 16, 3, 10, 14)))
    assert proof.verdict == NOT_PROVEN
    assert "cannot be judged" in proof.reason and f"the error is {proof.control:.1e}" in proof.reason
    assert proof.error <= ROUNDING


@pytest.mark.slow
def test_a_call_that_is_too_large_is_proven_on_a_smaller_latent(
    pool: Pool, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(latent(40, 40))
    monkeypatch.setattr(proving, "MAX_TOKENS", 400)  # of 1200
    proof, _ = proof_of(pool, spec, call)
    assert (proof.verdict, proof.calls, proof.tokens) == (PROVEN, 4, 192)
    monkeypatch.undo()
    proof, _ = proof_of(pool, spec, call, room=0.5)
    assert (proof.verdict, proof.calls, proof.tokens) == (PROVEN, 4, 192)
    assert proof_of(pool, spec, call_of(latent(40, 40), wrong="attention"), room=0.5)[0].verdict == REFUSED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "reason"), [(0.5, "does not fit into the memory of one device"), (2.0, "1200 tokens")]
)
def test_a_call_that_is_too_large_and_cannot_be_smaller_is_not_proven(
    room: float, reason: str, pool: Pool, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    if room > 1:
        monkeypatch.setattr(proving, "MAX_TOKENS", 400)
    proof, _ = proof_of(pool, spec, call_of(latent(40, 40)), room=room, fits=False)
    assert (proof.verdict, proof.calls, proof.error) == (NOT_PROVEN, 1, None)
    assert reason in proof.reason and "no smaller latent fits" in proof.reason


def test_a_smaller_call_cuts_whatever_has_the_latents_height_and_width() -> None:
    mask, other = torch.rand(1, 1, 60, 104), torch.rand(1, 16, 1, 30, 52)
    rows = torch.rand(1, 3 * 30 * 52, 8)
    beside = {"mask": mask, "rays": torch.rand(1, 6, 3, 8 * 60, 8 * 104), "times": torch.rand(1, 3 * 60 * 104, 1)}
    call = call_of(latent(60, 104), control={"output": [rows]}, pictures=[other, None], **beside)
    control = next(int(name[1:]) for name, tensor in call.tensors.items() if torch.equal(tensor, rows))
    call = replace(call, options={**call.options, "residuals": [control]})
    smaller = smaller_call(call, 0.5)
    given: Any = from_tree(smaller.options["call"], list(smaller.tensors.values()))
    x, kwargs = given["args"][0], given["kwargs"]
    assert x.shape == (1, 16, 3, 24, 48) and torch.equal(x, latent(60, 104)[..., :24, :48])
    assert kwargs["mask"].shape == (1, 1, 24, 48) and kwargs["pictures"][0].shape == other.shape
    assert kwargs["rays"].shape == (1, 6, 3, 8 * 24, 8 * 48) and kwargs["times"].shape == (1, 3 * 24 * 48, 1)
    assert kwargs["context"].shape == (1, 13, TEXT) and kwargs["control"]["output"][0].shape == (1, 3 * 12 * 24, 8)
    assert smaller.out_shape == (1, x.numel())


def test_a_smaller_call_has_the_rows_and_channels_of_the_output() -> None:
    picture = torch.rand(2, 36, 3, 60, 104)  # 20 channels beside the 16 that come out
    call = replace(call_of(picture), out_shape=(2, 16 * 3 * 60 * 104))
    assert smaller_call(call, 0.5).out_shape == (2, 16 * 3 * 24 * 48)
    with_sound = call_of([torch.rand(2, 16, 3, 60, 104), torch.rand(2, 8, 25, 16)])
    with_sound = replace(with_sound, out_shape=(2, 16 * 3 * 60 * 104 + 8 * 25 * 16))
    assert smaller_call(with_sound, 0.5).out_shape == (2, 16 * 3 * 24 * 48 + 8 * 25 * 16)


@pytest.mark.parametrize(
    ("shape", "smaller", "other"),
    [
        ((1, 16, 3, 8, 8), None, [(16, 8)]),
        ((1, 64, 400), (96,), [(200,), (408,)]),
        ((1, 4, 32, 16), (16, 8), [(16, 8), (40, 16)]),
        ((1, 64), None, []),
    ],
)
def test_a_call_has_other_sizes_and_none_smaller_than_one_patch(
    shape: tuple[int, ...], smaller: tuple[int, ...] | None, other: list[tuple[int, ...]]
) -> None:
    call = call_of(torch.rand(*shape))
    less = smaller_call(call, 0.5)
    assert (None if less is None else less.tensors["t0"].shape[2:][-2:]) == smaller
    assert [each.tensors["t0"].shape[2:][-2:] for each in other_sizes(call)] == other


def test_a_found_plan_is_proven_for_each_side_of_cfg_and_where_a_number_steers() -> None:
    sides = [call_of(latent(), transformer_options={"cond_or_uncond": sides}) for sides in ([1, 0], [0], [1], [])]
    strengths = [call_of(latent(), guides=[{"strength": each}]) for each in (1.0, 0.5, 0.0, 2.0)]
    for told in (sides, strengths):
        assert len({arguments_of(each, closely=True) for each in told}) == 4
        assert len({arguments_of(each) for each in told}) == (2 if told is sides else 1)  # an empty list has no entries
    for values in ((0.3, 0.7), (2.0, 3.0)):
        alike = (call_of(latent(), guides=[{"strength": each, "frames": 8 + each}]) for each in values)
        assert len({arguments_of(each, closely=True) for each in alike}) == 1


def test_a_call_is_known_by_its_arguments_and_not_by_their_sizes() -> None:
    plain = arguments_of(call_of(latent()))
    assert plain == arguments_of(call_of(latent(20, 20), reference=None)) == ("args[0]:5", "args[1]:1", *plain[2:])
    others = [
        arguments_of(call_of(latent(), **more))
        for more in (
            {"reference": torch.rand(1, 16, 6, 8)},
            {"references": [torch.rand(1, 16, 6, 8)]},
            {"mask": torch.rand(1, 1, 10, 14)},
            {"mask": torch.rand(1, 10, 14)},
            {"method": "offset"},
            {"method": "index"},
            {"flag": True},
        )
    ]
    assert len({plain, *others}) == 8
    one, two = ([torch.rand(1, 16, 6, 8)] * count for count in (1, 2))
    assert arguments_of(call_of(latent(), references=one)) == arguments_of(call_of(latent(), references=two))
