"""What a joining machine says of itself is held against what it may be before anybody reads it."""

from dataclasses import asdict
from typing import Any

import pytest

from parallel_runtime.machines.messages import FROM_MACHINE, from_frame
from parallel_runtime.wire.protocol import ProtocolError

VERSIONS = {"pack": "0.1.0", "torch": "2.9.0+cu130"}
SAID = {"name": "shelf", "devices": ["cuda:0"], "device_names": ["H100"], "versions": VERSIONS, "pid": 7}


def introduced(**changes: object) -> Any:
    return from_frame(FROM_MACHINE, {"kind": "Introduction", "body": {**SAID, **changes}})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"devices": [text]}, "cpu:N or cuda:N, each once") for text in ("", "cuda", "cuda:x", "cuda:1000", "tpu:0")),
        *(({"devices": [text]}, "cpu:N or cuda:N, each once") for text in ("cuda:0 ", "cuda:0\n", "cuda:\u0661")),
        ({"devices": ["cuda:0"] * 2, "device_names": ["H100"] * 2}, "cpu:N or cuda:N, each once"),
        ({"devices": [f"cpu:{n}" for n in range(17)], "device_names": ["CPU"] * 17}, "17 devices"),
        ({"device_names": ["x" * 129]}, "a device's name is at most 128 printable"),
        ({"device_names": ["H100\n"]}, "a device's name is at most 128 printable"),
        ({"versions": VERSIONS | {"comfyui": "1" * 65}}, "a version is at most 64 printable"),
        ({"versions": VERSIONS | {"torch": "2.9\x1b[2J"}}, "a version is at most 64 printable"),
        ({"name": "x" * 65}, "name is 1 to 64 printable"),
    ],
)
def test_a_machine_that_says_what_no_machine_is_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        introduced(**changes)


def test_what_a_machine_may_say_is_taken() -> None:
    said = introduced(devices=["cuda:0", "cpu:999"], device_names=["x" * 128, ""])
    assert asdict(said.versions)["torch"] == "2.9.0+cu130"
