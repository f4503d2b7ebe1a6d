"""A sampler's run as numbers: that a recurrence does what its recurrence says, and refuses what it cannot mean."""

import pytest
import torch

from parallel_runtime.sampler_recurrence import CallReading, RecurrenceStep, SamplerRecurrence

SIGMAS = (1.0, 0.7, 0.3, 0.0)
FIRST = RecurrenceStep(given=True, sigma=1.0, timestep=1.0)


def euler() -> SamplerRecurrence:
    """Euler by hand: X' = (s' / s) X + (1 - s' / s) D."""
    states = [FIRST]
    for number, (now, after) in enumerate(zip(SIGMAS[:-1], SIGMAS[1:], strict=True)):
        ratio = after / now
        last = after == 0.0
        states.append(
            RecurrenceStep(
                inputs=() if last else ((number, ratio),),
                denoised=((number, 1 - ratio),),
                sigma=None if last else after,
                timestep=None if last else after,
            )
        )
    return SamplerRecurrence(states=tuple(states), step_ends=(0, 1, 2))


def test_a_program_does_what_the_sampler_written_out_does() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    by_hand = x.clone()
    for now, after in zip(SIGMAS[:-1], SIGMAS[1:], strict=True):
        denoised = torch.tanh(by_hand) * now
        by_hand = by_hand + (by_hand - denoised) / now * (after - now)
    recurrence = euler()
    result = recurrence.run(lambda _: x, lambda call, latent: torch.tanh(latent) * recurrence.states[call].sigma)
    assert torch.allclose(result, by_hand, rtol=0, atol=1e-14)


def test_a_call_is_read_by_the_sigma_of_its_state_and_the_result_goes_into_none() -> None:
    assert euler().states[1].reading == CallReading.of_flow(0.7)
    with pytest.raises(ValueError, match="a state without sigma goes into no call; the recurrence is not whole"):
        _ = euler().states[-1].reading


def test_noise_given_ahead_is_added_where_its_state_says() -> None:
    states = (
        FIRST,
        RecurrenceStep(denoised=((0, 1.0),), given=True, sigma=0.5, timestep=0.5),
        RecurrenceStep(denoised=((1, 1.0),)),
    )
    recurrence = SamplerRecurrence(states=states, step_ends=(0, 1))
    given = {0: torch.zeros(1, 2, 2), 1: torch.full((1, 2, 2), 3.0)}
    seen = []
    recurrence.run(given.__getitem__, lambda _, x: seen.append(x.clone()) or x + 1)
    assert recurrence.given == (0, 1)
    assert torch.equal(seen[1], torch.full((1, 2, 2), 4.0))


@pytest.mark.parametrize(
    ("states", "step_ends", "words"),
    [
        ((), (), "without states"),
        ((FIRST, RecurrenceStep(inputs=((1, 1.0),))), (), "made of number 1"),
        ((FIRST, RecurrenceStep(denoised=((4, 1.0),))), (), "made of number 4"),
        ((RecurrenceStep(given=True), RecurrenceStep(inputs=((0, 1.0),))), (), "need a sigma"),
        ((FIRST, RecurrenceStep(inputs=((0, 1.0),))), (1,), "step_ends"),
        (
            (RecurrenceStep(given=True, sigma=1.0), RecurrenceStep(denoised=((0, 1.0),))),
            (0,),
            "need a sigma and a timestep",
        ),
        (
            (RecurrenceStep(sigma=1.0, timestep=1.0), RecurrenceStep(denoised=((0, 1.0),))),
            (0,),
            "state 0 is made of nothing",
        ),
        ((FIRST, RecurrenceStep(denoised=((0, 1.0),))), (0, 0), "do not rise"),
        ((FIRST, RecurrenceStep(denoised=((0, 1.0),))), (-1, 0), "step_ends"),
    ],
)
def test_recurrences_that_cannot_be_are_refused(states: tuple, step_ends: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplerRecurrence(states=states, step_ends=step_ends)
