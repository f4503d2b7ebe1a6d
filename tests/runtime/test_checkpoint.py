"""Headers: read without the weights, refused when they lie."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.mapped_file import MappedFile

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("name", ["a.safetensors", "A.SAFETENSORS", "a.Sft"])
def test_a_header_written_by_the_library_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    tensors = {"x": torch.zeros(3, 2), "y": torch.zeros(5, dtype=torch.bfloat16), "z": torch.zeros(0, 4)}
    save_file(tensors, path, metadata={"by": "us"})
    header = read_header(path)
    assert {name: (value.dtype, value.shape) for name, value in header.tensors.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert header.metadata == {"by": "us"}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"x": entry([2], 0, 8)}, b"\0" * 4, ["truncated", "download"]),
        ({"x": entry([2], 0, 8)}, b"\0" * 12, ["4 bytes after"]),
        ({"x": entry([2], 0, 4)}, b"\0" * 4, ["'x'", "needs 8 bytes", "span 4"]),
        ({"x": entry([1], 0, 4), "y": entry([1], 0, 4)}, b"\0" * 4, ["starts at byte"]),
        ({"x": entry([1], 4, 8)}, b"\0" * 8, ["starts at byte"]),
        ({"x": entry([-1], 0, 4)}, b"\0" * 4, ["shape [-1]"]),
        ({"x": entry([1], 0, 8)}, b"\0" * 8, ["needs 4 bytes for shape [1]", "span 8"]),
        ({"x": entry([1], 0, 4, "F1")}, b"\0" * 4, ["dtype 'F1'"]),
        ({"x": [1]}, b"", ["no description"]),
        ([1], b"", ["no JSON object"]),
        (b"{not json", b"", ["damaged"]),
        (b'{"x": 1, "x": 2}', b"", ["twice"]),
        (b"[" * 100_000, b"", ["damaged"]),
        (b'{"x": ' * 10_000, b"", ["damaged"]),
        ({"x": {"dtype": ["F32"] * 10_000, "shape": [], "data_offsets": [0, 4]}}, b"\0" * 4, ["'F32', 'F32'", "..."]),
        ({"x": entry([1] * 9, 0, 4)}, b"\0" * 4, ["'x' has 9 dims, at most 8"]),
        ({"x": entry([1] * 500_000, 0, 4)}, b"\0" * 4, ["500000 dims"]),
        ({"x": entry([10**18] * 8, 0, 4)}, b"\0" * 4, ["1000000000000000000, 1000", "beyond"]),
        ({"x": entry([0, 2**63], 0, 0)}, b"", ["[0, 9223372036854775808]", "beyond"]),
        ({"x": entry([1], 10**30, 10**30 + 4)}, b"\0" * 4, ["beyond"]),
        (b'{"x": ' + b"9" * 100_000 + b"}", b"", ["damaged"]),
        ({"x" * 100_000: [1]}, b"", ["'xxxx", "...", "no description"]),
    ],
)
def test_a_lying_header_is_refused_in_one_line(tmp_path: Path, header: object, data: bytes, words: list[str]) -> None:
    path = write(tmp_path / "a.safetensors", header, data)
    with pytest.raises(ValueError) as caught:
        read_header(path)
    for word in (*words, str(path)):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def exhausting() -> Iterator[tuple[bytes, str]]:
    """Headers that would take far more memory than they have bytes, and what is said of each."""
    entries = (b'"%d":{"dtype":"F32","shape":[],"data_offsets":[0,0]}' % number for number in range(250_000))
    yield b"{" + b",".join(entries), "250000"
    yield b'{"x":[' + b"[]," * 5_000_000 + b"0]}", "parts"
    yield b"{" + b",".join(b'"%d":{}' % number for number in range(1_200_000)), "parts"
    yield b'{"x": [' + b"0," * 8_000_000 + b"0]}", "no description"
    yield b" " * (100 << 20), "header of 104857600 bytes"


READ_EACH = """
import os, re, sys
from parallel_runtime.checkpoint import read_header
peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])
for path in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    before = peak()
    try:
        read_header(path)
    except ValueError as error:
        print(peak() - before, error, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_header_made_to_exhaust_us_is_refused_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """Each in a process of its own: 16 MiB of header may cost at most 12 times as much."""
    said = {str(write(tmp_path / f"{n}.safetensors", header)): words for n, (header, words) in enumerate(exhausting())}
    command = [sys.executable, "-c", READ_EACH, *said]
    lines = subprocess.check_output(command, cwd=ROOT, text=True, timeout=900).splitlines()
    for line, words in zip(lines, said.values(), strict=True):
        grown_kib, error = line.split(" ", 1)
        assert words in error
        assert int(grown_kib) < 12 * 16 * 1024


def test_a_header_as_big_as_the_biggest_models_is_read(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i // 9}.weights.{i % 9}.scale": entry([1], 4 * i, 4 * i + 4) for i in range(30_000)}
    metadata = {"workflow": json.dumps([{"inputs": [[1, 2]] * 3}] * 20_000)}
    path = write(tmp_path / "a.safetensors", {"__metadata__": metadata, **tensors}, b"\0" * 120_000)
    assert len(read_header(path).tensors) == 30_000


def test_lists_and_objects_of_a_header_are_limited_those_in_texts_of_its_metadata_included(tmp_path: Path) -> None:
    others, path = 5, tmp_path / "a.safetensors"  # two objects around the text; an object and two lists of the tensor
    for parts, is_read in ((524_288, True), (524_289, False)):
        text = "[" * ((parts - others) // 2) + "{" * ((parts - others + 1) // 2)
        write(path, {"__metadata__": {"workflow": text}, "x": entry([1], 0, 4)}, b"\0" * 4)
        if is_read:
            assert read_header(path).metadata == {"workflow": text}
        else:
            with pytest.raises(ValueError, match="524289 parts, at most 65536 and 524288 are read"):
                read_header(path)


def test_lengths_beyond_the_file_are_refused_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_header(path)
    path.write_bytes(struct.pack("<Q", 5000) + b"{}")
    with pytest.raises(ValueError, match="truncated"):
        read_header(path)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="truncated: 3 bytes"):
        read_header(path)


def test_a_file_that_the_system_does_not_let_us_read_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    path.symlink_to("/proc/self/mem")  # its first bytes are unreadable even for root, whom no mode keeps out
    with pytest.raises(ValueError, match=r"kept\.safetensors cannot be read \(.+\); see that its disk or network"):
        read_header(path)


def test_a_file_of_a_file_system_that_maps_none_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    path.symlink_to("/sys/kernel/uevent_seqnum")  # as files of some network drives: it can be read, not mapped
    assert path.read_bytes()
    with pytest.raises(ValueError, match=r"kept\.safetensors cannot be mapped into memory, .* copy it to a local disk"):
        MappedFile(ModelSpec.of(path))


def test_a_mapped_file_that_was_written_to_since_it_was_identified_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(4)}, path)
    spec = ModelSpec.of(path)
    mapped = MappedFile(spec)
    save_file({"x": torch.zeros(5)}, tmp_path / "other.safetensors")  # clocks of files are coarse
    (tmp_path / "other.safetensors").replace(path)
    mapped.refuse_changed()  # what is mapped is the file that was identified, whatever has its name now
    with pytest.raises(ValueError, match="was changed after it was chosen"):
        MappedFile(spec)
    longer = MappedFile(ModelSpec.of(path))
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="was changed after it was chosen"):
        longer.refuse_changed()


def test_pages_that_were_read_of_a_mapped_file_are_given_back(tmp_path: Path) -> None:
    def resident() -> int:
        """KiB of the file that are in this process's memory."""
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        next(line for line in lines if line.endswith(str(path)))
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(1 << 20)}, path)
    mapped = MappedFile(ModelSpec.of(path))
    tensor = mapped.tensor(read_header(path).tensors["x"])
    assert tensor.sum() == 1 << 20 and resident() >= 4096
    mapped.give_back()
    assert resident() == 0 and tensor.sum() == 1 << 20, "a view reads them again"


def test_only_safetensors_files_are_read(tmp_path: Path) -> None:
    for name in ("model.ckpt", "model.pt", "model.gguf", "model"):
        path = tmp_path / name
        path.write_bytes(b"\x80\x02never read")
        with pytest.raises(ValueError, match="only .safetensors"):
            read_header(path)
        with pytest.raises(ValueError, match="only .safetensors"):
            ModelSpec.of(path)
    with pytest.raises(ValueError, match="does not exist"):
        ModelSpec.of(tmp_path / "gone.safetensors")


def test_a_spec_changes_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {})
    before = ModelSpec.of(path)
    assert before == ModelSpec.of(path)
    write(path, {"x": entry([1], 0, 4)}, b"\0" * 4)
    assert before != ModelSpec.of(path)
