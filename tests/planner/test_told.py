"""What a user tells of a calibrated machine takes the place of what was measured, and the source says so."""

from dataclasses import replace

import pytest

from parallel_runtime.planner.hardware import Interconnect
from parallel_runtime.planner.known import EAGER, known_calibration, known_link
from parallel_runtime.planner.machine import as_told

MEASURED = replace(
    known_calibration("NVIDIA L40"),
    link=Interconnect(name="measured", bandwidth=9e9, latency_s=7e-6, contention=0.1),
    software=replace(EAGER, operation_s=4e-6),
    source="measured on these devices by doctor",
)


def test_a_link_that_is_told_takes_the_measured_ones_place_and_keeps_the_rest() -> None:
    found = as_told(MEASURED, link="pcie3")
    assert found == replace(MEASURED, link=known_link("pcie3"), source=found.source)
    assert found.source == "measured on these devices by doctor; the link is the table's pcie3, as told"
    assert as_told(MEASURED, link=None) == MEASURED
    with pytest.raises(ValueError, match="'string' is unknown"):
        as_told(MEASURED, link="string")
