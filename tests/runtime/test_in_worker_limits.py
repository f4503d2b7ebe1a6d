"""What a run in the workers refuses before any rank hears of it, and where ranks stop when it is cancelled."""

from dataclasses import replace

import pytest
import torch
from made_replies import run_reply

from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.model_call import ModelCall
from parallel_runtime.pool.calls import MAX_GIVEN, Inpaint, WorkerLoopRun, refuse_long
from parallel_runtime.report.schema import REGIONS
from parallel_runtime.sampler_recurrence import RecurrenceStep, SamplerRecurrence
from parallel_runtime.stock_caches import StockCache
from parallel_runtime.wire.protocol import Message, Op, encode
from parallel_runtime.wire.records import to_body
from parallel_runtime.worker.timeline import MOST_SPANS, Timeline
from parallel_runtime.worker.worker_loop import MOST_TIMED_STEPS, Gate

from .test_a_ranks_calls import table

SHAPE = (2, 1, 24)


def steps(count: int, *, noise: bool = False) -> SamplerRecurrence:
    """Steps of one call each, with factors as long as a sampler's are; with `noise`, a tensor given for each."""
    states = [RecurrenceStep(given=True, sigma=1.0, timestep=1.0)]
    states += [
        RecurrenceStep(inputs=((k, 1 / 3),), denoised=((k, 2 / 3),), given=noise, sigma=1 / 7, timestep=1 / 7)
        for k in range(count - 1)
    ]
    return SamplerRecurrence(
        states=(*states, RecurrenceStep(denoised=((count - 1, 1.0),))), step_ends=tuple(range(count))
    )


def make_run(
    recurrence: SamplerRecurrence, *, seen: tuple[int, ...] = SHAPE, inpaint: Inpaint | None = None
) -> WorkerLoopRun:
    call = ModelCall(tensors={}, out_shape=(seen[0], seen[2]), out_dtype=torch.float32)
    given = {number: torch.zeros(SHAPE) for number in recurrence.given}
    return WorkerLoopRun(recurrence=recurrence, conds=(call,), cfg=1.0, given=given, inpaint=inpaint)


def test_a_program_of_hundreds_of_steps_fits_and_one_of_thousands_is_refused() -> None:
    refuse_long(steps(500))
    with pytest.raises(ValueError, match=r"1000 calls takes \d+ bytes to describe, at most 81920; use fewer steps"):
        refuse_long(steps(1000))


def test_more_noise_than_a_message_names_is_refused() -> None:
    states = [RecurrenceStep(given=True, sigma=1.0, timestep=1.0)] + [
        RecurrenceStep(given=True, sigma=1.0, timestep=1.0)
    ] * MAX_GIVEN
    recurrence = SamplerRecurrence(states=(*states, RecurrenceStep(denoised=((0, 1.0),))), step_ends=(MAX_GIVEN,))
    with pytest.raises(ValueError, match="noise for 961 calls, at most 960; use fewer steps"):
        refuse_long(recurrence)


def test_latents_that_do_not_fit_are_refused_with_their_shapes() -> None:
    recurrence = steps(2)
    run = make_run(recurrence)
    for given, words in (
        (torch.zeros(0, 1, 24), "at least one of each"),
        (torch.zeros(1, 24), "at least one of each"),
        (torch.zeros(SHAPE, dtype=torch.bfloat16), "given.0 is torch.bfloat16"),
        (torch.zeros(1, 1, 24), r"images of shape \(2, 1, 24\), the latent is \(1, 1, 24\)"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(run, given={0: given})
    parts = [torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(2, 1, 6)]
    with pytest.raises(ValueError, match="inpaint.latent"):
        make_run(recurrence, inpaint=Inpaint(mask=parts[0], noise=parts[1], latent=parts[2]))
    make_run(recurrence, seen=(2, 1, 72))  # channels of Fill go with it


def test_noise_of_another_shape_than_the_latent_is_refused() -> None:
    run = make_run(steps(2, noise=True))
    with pytest.raises(ValueError, match="given.1"):
        replace(run, given={0: torch.zeros(SHAPE), 1: torch.zeros(1, 1, 24)})


def test_the_longest_report_of_a_run_fits_into_a_message() -> None:
    timeline = Timeline(torch.device("cpu"), on=True)
    late_s = 12_345_678.123456  # a machine that is up for months
    for _ in range(MOST_SPANS + 1):
        timeline.add(399, range(10, 20), 1, asked_s=late_s, began_s=late_s, ended_s=late_s)
    reply = run_reply(
        step_s=(12.345678,) * MOST_TIMED_STEPS,
        began_s=(late_s,) * MOST_TIMED_STEPS,
        regions={name: (12.345678,) * MOST_TIMED_STEPS for name in REGIONS},
        timeline=timeline.report(0),
    )
    assert reply.ran.timeline.left_out == 1
    encode(Message(Op.DONE, 0, 1, 1, to_body(reply)))


def test_a_rank_that_was_slow_to_look_goes_on_with_the_others() -> None:
    segments = table()

    def cancelled() -> bool:
        """The parent, between this rank's look at the credit and its look at the cancel word: leave, then cancel."""
        segments.credit = 4
        return True

    gate = Gate(segments, cancelled=cancelled, show_waiting=lambda _: None)
    gate.wait(3, meanwhile=lambda: None)  # a rank that looked a moment later has seen the credit, and is in step 3
    with pytest.raises(RequestCancelledError, match="before step 4"):
        gate.wait(4, meanwhile=lambda: None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"looked_at": None}, "belong together"),
        ({"looked_at": torch.ones(1, 1, 3, dtype=torch.bool)}, "give bool of shape"),
        ({"cache": StockCache(easy=False, threshold=0.1, calls="m")}, "a step cache for 1 calls, the run makes 2"),
        ({"conds": ()}, "0 conditionings"),
        ({"given": {}}, "the recurrence needs"),
    ],
)
def test_parts_of_a_run_that_do_not_fit_it_are_refused(change: dict, words: str) -> None:
    cache = StockCache(easy=False, threshold=0.5, calls="mm")
    run = replace(make_run(steps(2)), cache=cache, looked_at=torch.ones(1, *SHAPE[1:], dtype=torch.bool))
    with pytest.raises(ValueError, match=words):
        replace(run, **change)
