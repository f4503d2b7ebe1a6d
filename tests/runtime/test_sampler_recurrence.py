"""A sampler's run as numbers: that a recurrence does what its recurrence says, and refuses what it cannot mean."""

import itertools

import pytest
import torch

from host.hosted_runs import euler
from parallel_runtime.sampler_recurrence import CallReading, RecurrenceStep, SamplerRecurrence, Trajectory

FIRST = RecurrenceStep(given=True, sigma=1.0, timestep=1.0)


def test_a_program_does_what_the_sampler_written_out_does() -> None:
    """Of Euler."""
    numbers = torch.Generator().manual_seed(3)
    x, recurrence = torch.randn(2, 5, 3, dtype=torch.float64, generator=numbers), euler(3)
    by_hand, sigmas = x.clone(), [state.sigma or 0.0 for state in recurrence.states]
    for now, after in itertools.pairwise(sigmas):
        denoised = torch.tanh(by_hand) * now
        by_hand = by_hand + (by_hand - denoised) / now * (after - now)
    result = recurrence.run(lambda _: x, lambda call, latent: torch.tanh(latent) * sigmas[call])
    assert torch.allclose(result, by_hand, rtol=0, atol=1e-14)


def test_a_call_is_read_by_the_sigma_of_its_state_and_the_result_goes_into_none() -> None:
    states = euler(2).states
    assert states[1].reading == CallReading.of_flow(0.5)
    with pytest.raises(ValueError, match="a state without sigma goes into no call; the recurrence is not whole"):
        _ = states[-1].reading


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


def test_a_state_whose_tensor_is_not_given_is_refused() -> None:
    with pytest.raises(ValueError, match="state 0 is made of nothing; it needs a tensor given ahead"):
        Trajectory(SamplerRecurrence(states=(FIRST, RecurrenceStep(inputs=((0, 1.0),))), step_ends=())).enter(0, None)


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
