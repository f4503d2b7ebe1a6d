"""Which device of the table a name means, by the names that drivers report; and the link such a machine usually has."""

import pytest

from parallel_runtime.planner.hardware import GIB
from parallel_runtime.planner.known import SHARED_ABOVE, known_calibration, known_rates, usual_link

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
    "NVIDIA L4",
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
    with pytest.raises(ValueError, match="is unknown; use one of H200, .* or calibrate with doctor"):
        known_rates(name)


def test_the_card_on_pcie_is_slower_than_the_board_on_nvlink() -> None:
    for card, panel_state in (
        ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100-PCIE-40GB", "A100-SXM4-80GB"),
    ):
        slow, fast = known_rates(card), known_rates(panel_state)
        assert slow.matmul_flops <= fast.matmul_flops and slow.memory_bandwidth < fast.memory_bandwidth
    assert known_rates("NVIDIA A100-PCIE-40GB").memory_bytes == 40 * GIB


def test_a_machine_of_many_cards_on_pcie_has_the_link_that_they_share_and_nvlink_stays_itself() -> None:
    for name in ("NVIDIA L40", "NVIDIA GeForce RTX 4090", "NVIDIA A100-PCIE-40GB"):
        few, many = usual_link(name, SHARED_ABOVE), usual_link(name, SHARED_ABOVE + 1)
        assert (few.name, many.name) == ("pcie4", "pcie4-shared")
        assert many.all_to_all_bandwidth(8) < few.all_to_all_bandwidth(8) / 4
    assert usual_link("NVIDIA H100 80GB HBM3", 8) == usual_link("NVIDIA H100 80GB HBM3", 2)
    assert known_calibration("NVIDIA L40", devices=8).link.name == "pcie4-shared"
    assert known_calibration("NVIDIA L40", "pcie4", devices=8).link.name == "pcie4"  # the user knows better
