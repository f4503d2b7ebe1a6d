"""Regions: what they measure, that they wait for nothing, and what they cost, counted and weighed against a step."""

import time

import pytest
import torch

from parallel_runtime.timing import RegionTimer

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


@pytest.mark.parametrize("device", DEVICES)
def test_a_region_has_the_seconds_of_what_ran_inside_it_and_no_more(device: str) -> None:
    timer = RegionTimer(torch.device(device))
    work = torch.randn(512, 512, device=device)
    torch.mm(work, work)  # what the first call prepares is not what is measured
    began = time.perf_counter()
    with timer.region("whole"):
        for _ in range(3):
            with timer.region("part"):
                torch.mm(work, work)
            torch.mm(work, work)
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - began
    seconds = timer.seconds()
    assert set(seconds) == {"whole_s", "part_s"}
    assert 0 < seconds["part_s"] < seconds["whole_s"] <= elapsed_s
    assert timer.regions["part"].entries == 3


def test_a_timer_that_is_off_measures_nothing() -> None:
    timer = RegionTimer(torch.device("cpu"), on=False)
    with timer.region("whole"), timer.region("part"), timer.region("whole"):
        pass
    assert (timer.seconds(), timer.regions) == ({}, {})


def test_an_error_inside_passes_through_a_region() -> None:
    for on in (True, False):
        with pytest.raises(KeyError), RegionTimer(torch.device("cpu"), on=on).region("whole"):
            raise KeyError("inside")
