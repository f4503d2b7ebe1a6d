"""What a user tells of a calibrated machine takes the place of what was measured, and the source says so."""

from dataclasses import replace

import pytest

from parallel_runtime.planner.hardware import Calibration, Interconnect
from parallel_runtime.planner.known import COMPILED, EAGER, known_calibration, known_link
from parallel_runtime.planner.machine import as_told

LINK = Interconnect(name="measured", bandwidth=9e9, latency_s=7e-6, contention=0.1)
SOFTWARE = replace(EAGER, name="eager", block_s=1e-4, exchange_s=2e-4, hop_s=3e-4)


def measured(**changes: object) -> Calibration:
    told = "measured on these devices by doctor"
    return replace(replace(known_calibration("NVIDIA L40"), link=LINK, software=SOFTWARE, source=told), **changes)


def test_a_link_that_is_told_takes_the_measured_ones_place_and_keeps_the_rest() -> None:
    found = as_told(measured(), link="pcie3", compiled=False)
    assert found == measured(link=known_link("pcie3"), source=found.source)
    assert found.source == "measured on these devices by doctor; the link is the table's pcie3, as told"
    assert as_told(measured(), link=None, compiled=False) == measured()
    with pytest.raises(ValueError, match="'string' is unknown"):
        as_told(measured(), link="string", compiled=False)


def test_compiled_blocks_are_the_tables_on_devices_as_measured() -> None:
    found = as_told(measured(), link=None, compiled=True)
    assert found.software == replace(COMPILED, swap_calls=SOFTWARE.swap_calls)
    assert (found.rates, found.link) == (measured().rates, LINK)
    assert found.source.endswith("; compiled blocks are the table's")
    on_cpu = measured(rates=replace(measured().rates, asynchronous=False))
    assert as_told(on_cpu, link=None, compiled=True) == on_cpu
