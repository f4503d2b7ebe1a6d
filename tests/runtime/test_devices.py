"""Devices: a count shrinks, a name does not."""

import pytest

from parallel_runtime.devices import Device, parse_devices


def names(text: str, num_cuda: int) -> list[str]:
    return [str(device) for device in parse_devices(text, num_cuda=num_cuda).devices]


def test_devices_are_read_in_rank_order() -> None:
    assert names("all", 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert names("2", 3) == ["cuda:0", "cuda:1"]
    assert names(" CUDA:2 , cuda:0", 3) == ["cuda:2", "cuda:0"]
    assert names("cpu:3", 0) == ["cpu:0", "cpu:1", "cpu:2"]


def test_a_count_shrinks_to_what_is_there_and_says_so() -> None:
    selection = parse_devices("8", num_cuda=2)
    assert selection.devices == (Device("cuda", 0), Device("cuda", 1))
    assert selection.warnings == ("8 devices asked for, 2 found; running on 2",)
    on_cpu = parse_devices("4", num_cuda=0)
    assert on_cpu.devices == (Device("cpu", 0),)
    assert "no CUDA device" in on_cpu.warnings[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuda:7", ["cuda:7", "does not exist", "cuda:0, cuda:1"]),
        ("cuda:0,cuda:9", ["cuda:9", "does not exist"]),
        ("", ["empty", "all"]),
        ("0", ["devices=0", "below 1"]),
        ("-2", ["devices=-2", "below 1"]),
        ("9", ["devices=9", "above 8"]),
        ("cpu:0", ["cpu:0", "cpu:1 to cpu:8"]),
        ("cpu:64", ["cpu:64", "cpu:8"]),
        ("tpu:1", ["'tpu:1'", "unknown"]),
        ("²", ["'²'", "unknown", "a count"]),
        ("--2", ["'--2'", "unknown", "a count"]),
        ("9" * 5000, ["unknown", "a count"]),
        ("cpu:" + "9" * 5000, ["no index", "cpu:2"]),
        ("cuda", ["'cuda'", "no index"]),
        ("cuda:x", ["'cuda:x'", "no index"]),
        ("cuda:0,cuda:0", ["cuda:0", "twice"]),
        ("cuda:0,cpu:1", ["'cpu:1'", "mixed"]),
    ],
)
def test_a_device_that_does_not_exist_is_an_error_with_the_remedy(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_devices(text, num_cuda=2)
    for word in words:
        assert word in str(caught.value)
