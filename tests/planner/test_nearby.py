"""A calibration of another number of the same devices: what it stands for, what the table adds, and that it says so."""

from dataclasses import replace

import pytest

from parallel_runtime.planner.hardware import Calibration, Link
from parallel_runtime.planner.known import COMPILED, EAGER, known_calibration, known_link
from parallel_runtime.planner.nearby import as_told, nearest

NAME = "NVIDIA L40"
LINK = Link(name="measured", bandwidth=9e9, latency_s=7e-6, contention=0.1)
SOFTWARE = replace(EAGER, name="eager", block_s=1e-4, exchange_s=2e-4, hop_s=3e-4)


def measured(**changes: object) -> Calibration:
    found = replace(known_calibration(NAME), link=LINK, software=SOFTWARE, source="measured on these devices by doctor")
    return replace(found, **changes)


def test_the_same_number_is_taken_as_it_was_measured() -> None:
    assert nearest({2: measured(), 4: measured(node_ranks=4)}, NAME, 2, present=8) == measured()


def test_fewer_devices_have_the_constants_of_the_smallest_larger_set_and_the_source_says_so() -> None:
    sets = {4: measured(), 8: measured(node_ranks=8, source="of eight")}
    found = nearest(sets, NAME, 2, present=8)
    assert found == measured(source="measured on 4 of these devices by doctor, 2 are offered")
    assert nearest(sets, NAME, 1, present=8).source.startswith("measured on 4 of these devices by doctor, 1 are")
    assert nearest({2: measured(), 8: measured()}, NAME, 4, present=8).source.startswith("measured on 8 of these")


def test_more_devices_than_were_measured_contend_as_the_table_says() -> None:
    found = nearest({1: measured(), 2: measured()}, NAME, 8, present=8)
    assert (found.rates, found.software) == (measured().rates, SOFTWARE)
    assert found.link == replace(LINK, contention=known_link("pcie4-shared").contention)
    assert "measured on 2 of these devices by doctor, 8 are offered" in found.source
    assert "exchanges among 8 are slower is the table's (pcie4-shared), not measured here" in found.source
    worse = measured(link=replace(LINK, contention=3.0))
    assert nearest({4: worse}, NAME, 8, present=8).link.contention == 3.0


def test_more_devices_on_nvlink_do_not_contend() -> None:
    found = nearest({2: measured(link=replace(LINK, contention=0.0))}, "NVIDIA H100 80GB HBM3", 8, present=8)
    assert found.link.contention == 0.0
    assert found.source == "measured on 2 of these devices by doctor, 8 are offered"


def test_the_machine_decides_the_tables_link_and_not_how_many_are_offered() -> None:
    found = nearest({2: measured()}, NAME, 4, present=8)
    assert found.link.contention == known_link("pcie4-shared").contention
    assert nearest({2: measured()}, NAME, 4, present=4).link.contention == known_link("pcie4").contention


def test_one_device_calibrated_alone_tells_nothing_of_exchanges() -> None:
    alone = measured(link=known_link("memory"), software=replace(SOFTWARE, exchange_s=0.0, hop_s=0.0))
    found = nearest({1: alone}, NAME, 2, present=2)
    assert found.link == known_link("pcie4")
    assert (found.software.exchange_s, found.software.hop_s) == (EAGER.exchange_s, EAGER.hop_s)
    assert (found.rates, found.software.block_s) == (alone.rates, SOFTWARE.block_s)
    assert "exchanges are the table's (pcie4), not measured here" in found.source
    assert nearest({1: alone}, "Voodoo 2", 2, present=2) is None  # no link to take


def test_devices_that_are_not_in_the_table_contend_as_on_pcie() -> None:
    assert nearest({2: measured()}, "Voodoo 2", 4, present=4).link.contention == known_link("pcie4").contention
    assert nearest({2: measured()}, "Voodoo 2", 8, present=8).link.contention == known_link("pcie4-shared").contention


def test_without_a_calibration_there_is_none() -> None:
    assert nearest({}, NAME, 2, present=2) is None


def test_a_link_that_is_told_takes_the_measured_ones_place_and_keeps_the_rest() -> None:
    found = as_told(measured(), link="ethernet", compiled=False)
    assert found == measured(link=known_link("ethernet"), source=found.source)
    assert found.source == "measured on these devices by doctor; the link is the table's ethernet, as told"
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
