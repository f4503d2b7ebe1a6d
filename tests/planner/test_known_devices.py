"""Which device of the table a name means, by the names that drivers report; and the link such a machine usually has."""

import json
from dataclasses import replace

import pytest

from parallel_runtime.planner.hardware import GIB, Rates
from parallel_runtime.planner.known import (
    MEASURED,
    OF_RATES,
    known_calibration,
    known_link,
    known_rates,
    table_name,
    usual_link,
)

KNOWN = {
    "NVIDIA H100 80GB HBM3": ("H100", "nvlink4"),
    "NVIDIA H100 PCIe": ("H100 PCIe", "pcie4"),
    "NVIDIA H100 NVL": ("H100 NVL", "pcie4"),
    "NVIDIA H200": ("H200", "nvlink4"),
    "NVIDIA H200 NVL": ("H200 NVL", "pcie4"),
    "NVIDIA H20": ("H20", "nvlink4"),
    "NVIDIA A100-SXM4-80GB": ("A100", "nvlink3"),
    "NVIDIA A100-SXM4-40GB": ("A100 40GB", "nvlink3"),
    "A100-SXM4-40GB": ("A100 40GB", "nvlink3"),
    "NVIDIA A100-PCIE-40GB": ("A100 PCIe 40GB", "pcie4"),
    "NVIDIA A100 80GB PCIe": ("A100 PCIe", "pcie4"),
    "NVIDIA L40": ("L40", "pcie4"),
    "NVIDIA L40S": ("L40S", "pcie4"),
    "NVIDIA L20": ("L20", "pcie4"),
    "NVIDIA GeForce RTX 4090": ("RTX 4090", "pcie4"),
    "NVIDIA GeForce RTX 3090": ("RTX 3090", "pcie3"),
    "NVIDIA RTX 2000 Ada Generation": ("RTX 2000 Ada", "pcie3"),
    "NVIDIA B200": ("B200", "nvlink5"),
    "NVIDIA L4": ("L4", "pcie4"),
    "NVIDIA A40": ("A40", "pcie4"),
    "NVIDIA A10G": ("A10G", "pcie4"),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("RTX PRO 6000 Blackwell Server Edition", "pcie4"),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (
        *("RTX PRO 6000 Blackwell Max-Q Workstation Edition", "pcie4"),
    ),
    # as a user types them
    "A100": ("A100", "nvlink3"),
    "h100 sxm": ("H100", "nvlink4"),
    "rtx 4090": ("RTX 4090", "pcie4"),
}
OTHERS = [
    "NVIDIA RTX A1000",
    "NVIDIA RTX A1000 6GB Laptop GPU",
    "NVIDIA RTX A1000 Laptop GPU",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA RTX 2000 Ada Generation Laptop GPU",
    "NVIDIA RTX 4000 Ada Generation",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA H100 PCIe MIG 2g.20gb",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA H100 64GB HBM3",
    "NVIDIA A100X",
    "GRID A100-40C",
    "NVIDIA A100-4-20C",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA H20-3e",
    "NVIDIA GH200 480GB",
    "NVIDIA A10",
    "NVIDIA L4-24Q",
    "Tesla V100-SXM2-16GB",
    "AMD Instinct MI300X",
    "",
]


@pytest.mark.parametrize(("name", "device", "link"), [(name, *meant) for name, meant in KNOWN.items()])
def test_a_name_means_its_device_and_has_nvlink_only_where_the_board_does(name, device, link) -> None:
    calibration = known_calibration(name)
    assert (calibration.rates.name, calibration.link.name) == (device, link)
    assert f"({device}, {link}, eager)" in calibration.source


@pytest.mark.parametrize("name", OTHERS)
def test_a_device_that_is_not_in_the_table_is_no_other_one(name) -> None:
    with pytest.raises(ValueError, match="is unknown; use one of B200, H200, .* or calibrate with doctor"):
        known_rates(name)


def test_the_card_on_pcie_is_slower_than_the_board_on_nvlink() -> None:
    boards = {"NVIDIA H100 PCIe": "NVIDIA H100 80GB HBM3", "NVIDIA A100-PCIE-40GB": "A100-SXM4-80GB"}
    for card, board in boards.items():
        slow, fast = known_rates(card), known_rates(board)
        assert slow.matmul_flops <= fast.matmul_flops and slow.memory_bandwidth < fast.memory_bandwidth
    assert known_rates("NVIDIA A100-PCIE-40GB").memory_bytes == 40 * GIB


def test_rates_are_what_the_spec_sheet_says_times_what_is_reached_or_what_was_measured() -> None:
    a100 = known_rates("NVIDIA A100-SXM4-40GB")
    assert (a100.matmul_flops, a100.attention_flops) == (pytest.approx(312e12 * 0.61), pytest.approx(312e12 * 0.7))
    assert (a100.memory_bandwidth, a100.memory_bytes, a100.most_chunks) == (1555e9, 40 * GIB, 0)
    assert known_calibration("cpu").rates.memory_bytes == 8 * GIB and known_calibration("CPU") == known_calibration(
        "cpu"
    )
    assert known_rates("RTX 2000 Ada").memory_bytes == 16 * GIB
    for name, own in json.loads(MEASURED.read_text()).items():
        rates = known_calibration(name).rates
        assert all(getattr(rates, each) == own[each] for each in OF_RATES if each in own)
        assert known_calibration(name, measured=False).rates == known_rates(name)
    assert [table_name(name) for name in ("NVIDIA L40", "Voodoo")] == ["L40", "Voodoo"]


def test_what_takes_how_long_on_a_device_and_a_link() -> None:
    rates = Rates(name="", matmul_flops=1.0, attention_flops=4.0, memory_bandwidth=5.0, memory_bytes=0, score_s=2.0)
    assert rates.attention_s(512.0, 10.0) == 128 + 2 * (10 - 2)  # 256 FLOPs a score, with heads of 64
    assert rates.moving_s(10.0) == 2.0 and replace(rates, elementwise_bandwidth=2.0).moving_s(10.0) == 5.0
    assert rates.waited_s(sent_s=4.0, attend_s=6.0, both_s=8.0) == 3.0  # half of the two seconds that could hide
    assert replace(rates, asynchronous=False).waited_s(sent_s=4.0, attend_s=6.0, both_s=8.0) == 4.0
    link = replace(known_link("pcie4"), bandwidth=8.0, contention=1.0)
    assert [link.all_to_all_bandwidth(ranks) for ranks in (1, 2, 4)] == [8.0, 8.0, 4.0]
    several = replace(known_calibration("L40"), between=known_link("ethernet1"), machines=(2, 2))
    assert [several.link_of(run, 4) for run in (2, 4)] == [several.link, several.between]
    assert known_calibration("L40").link_of(2, 2) == usual_link("L40", 2)


def test_a_machine_of_many_cards_on_pcie_has_the_link_that_they_share_and_nvlink_stays_itself() -> None:
    for name in ("NVIDIA L40", "NVIDIA GeForce RTX 4090", "NVIDIA A100-PCIE-40GB"):
        few, many = usual_link(name, 4), usual_link(name, 5)
        assert (few.name, many.name) == ("pcie4", "pcie4-shared")
        assert many.all_to_all_bandwidth(8) < few.all_to_all_bandwidth(8) / 4
    assert usual_link("NVIDIA H100 80GB HBM3", 8) == usual_link("NVIDIA H100 80GB HBM3", 2)
    assert known_calibration("NVIDIA L40", devices=8).link.name == "pcie4-shared"
    assert known_calibration("NVIDIA L40", "pcie4", devices=8).link.name == "pcie4"  # the user knows better
