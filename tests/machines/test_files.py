"""Whether a machine's copy of a file is the same: every byte counts, and reading them all is done once."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel_runtime.checkpoint import read_header
from parallel_runtime.machines import files
from parallel_runtime.machines.connection import MachineChallenge, ServerChallenge
from parallel_runtime.machines.files import CHUNK_BYTES, content_sha256, find, identify
from parallel_runtime.machines.machine import Machine
from parallel_runtime.machines.messages import Introduction, Versions

SIZE = 2 * CHUNK_BYTES + 12_344  # of the one tensor


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    path = tmp_path / "flux.safetensors"
    save_file({"weight": torch.arange(SIZE // 4, dtype=torch.int32)}, path)
    return path


def copied(path: Path, folder: str, *, byte: int | None = None) -> Path:
    """A copy in a folder of its own, with one bit changed."""
    data = bytearray(path.read_bytes())
    if byte is not None:
        data[byte] ^= 1
    target = path.parent / folder / path.name
    target.parent.mkdir()
    target.write_bytes(data)
    return target


def machine_with(folder: Path) -> Machine:
    """One that answers at once, as `join` does."""
    server, joining = ServerChallenge(b"t" * 32), MachineChallenge(b"t" * 32)
    _, session = server.session(joining.answer(server.greeting))
    said = Introduction("shelf", ("cpu:0",), ("CPU",), Versions("1", "2"), 1)
    machine = Machine(said, "10.0.0.2:1", session, here="10.0.0.1", wake=lambda: None)
    tell = machine._tell

    def answer(message: object) -> None:
        tell(message)
        machine.take(find(message.number, message.identity, [str(folder)]))  # type: ignore[attr-defined]

    machine._tell = answer  # type: ignore[method-assign]
    return machine


# A process whose file is read by one thread, and looked for on a machine that does not answer by another.
INTERRUPTED = """
import sys, threading
from machines.test_files import machine_with
from parallel_runtime.machines import files
from parallel_runtime.pool.remote_ranks import RemoteRanks
from parallel_runtime.process.environment import RankSettings
reading, asked = threading.Event(), threading.Event()

def read(fd, start):
    reading.set()
    threading.Event().wait()

files._digest_at = read
machine = machine_with(None)
del machine._tell
machine._wake = asked.set
ranks = RemoteRanks([machine], RankSettings(devices=("cpu:0",), threads=1, engine=""))
spec = {"path": sys.argv[1], "size_bytes": 0, "mtime_ns": 0}
threading.Thread(target=ranks._copies, args=(spec, 2, lambda: None), daemon=True).start()
reading.wait()
asked.wait()
"""


def test_a_copy_that_differs_in_one_byte_anywhere_is_another_file(beside: Path) -> None:
    identity, content = identify(beside, beside.name), content_sha256(beside)
    same = copied(beside, "same")
    assert machine_with(same.parent).find_file(identity, lambda: content).path == str(same)
    end = beside.stat().st_size
    for byte in (end - SIZE, end - SIZE + SIZE // 4, CHUNK_BYTES, end - 1):
        other = copied(beside, f"byte {byte}", byte=byte)
        assert identify(other, beside.name) == identity, "the samples see it, so this shows nothing"
        machine = machine_with(other.parent)
        with pytest.raises(
            ValueError, match="shelf.* is another file than beside ComfyUI: .*, with other weights; copy"
        ):
            machine.find_file(identity, lambda: content)
        assert "with other weights" in machine.files[beside.name]


def test_a_file_that_cannot_be_read_is_named_with_its_fault(beside: Path, tmp_path: Path) -> None:
    broken = copied(beside, "broken")
    broken.write_bytes(b"\0")
    found = find(3, identify(beside, beside.name), [str(broken.parent)])
    with pytest.raises(ValueError) as fault:
        identify(broken, beside.name)
    said = str(fault.value).partition("\n")[0]
    assert (found.path, found.problem) == ("", f"{said}; copy ComfyUI's file to {broken}")


def test_a_folder_that_links_to_itself_is_looked_into_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "a.safetensors").touch()
    looked, stat = [], Path.stat
    monkeypatch.setattr(Path, "stat", lambda path: looked.append(path.name) or stat(path))
    assert list(files._called("a.safetensors", [str(tmp_path)])) == [str(tmp_path / "a.safetensors")]
    assert looked == [tmp_path.name, "again"]


def test_a_search_ends_after_so_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.safetensors", "b.safetensors", "c.safetensors"):
        (tmp_path / name).touch()
    for most, found in ((3, 1), (2, 0)):
        monkeypatch.setattr(files, "MAX_ENTRIES", most)
        assert len(list(files._called("b.safetensors", [str(tmp_path)]))) == found


def test_a_files_identity_is_of_the_middle_of_each_tensor_and_of_some_where_there_are_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"a": 4096, "b": 4096, "c": 10, "d": 4096, "e": 1025}
    path = tmp_path / "a.safetensors"
    save_file({name: torch.zeros(size, dtype=torch.int8) for name, size in sizes.items()}, path)
    tensors, before = read_header(path).tensors, identify(path, "n")
    assert (before.name, before.size_bytes) == ("n", path.stat().st_size)

    def seen(name: str, byte: int) -> bool:
        with open(path, "r+b") as file:
            for value in (b"\1", b"\0"):
                file.seek(tensors[name].start + byte)
                file.write(value)
                file.flush()
                found = identify(path, "n")
                if value == b"\1":
                    changed = found.sample_sha256 != before.sample_sha256
        assert found == before and found.header_sha256 == before.header_sha256
        return changed

    for name, inside, outside in (
        ("a", (1536, 2559), (1535, 2560)),
        ("d", (1536, 2559), (0, 1535, 2560)),  # it follows the small one
        ("c", (0, 9), ()),
        ("e", (0, 1023), (1024,)),
    ):
        assert all(seen(name, byte) for byte in inside) and not any(seen(name, byte) for byte in outside)
    for most, looked_at in ((5, "abcde"), (4, "ace"), (2, "ad"), (1, "a")):
        monkeypatch.setattr(files, "SAMPLES", most)
        before = identify(path, "n")
        assert "".join(name for name in sizes if seen(name, min(sizes[name], 4096) // 2)) == looked_at


def test_a_file_is_read_once_and_again_when_it_was_written(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    digest_at = files._digest_at
    monkeypatch.setattr(files, "_digest_at", lambda fd, start: read.append(start) or digest_at(fd, start))
    first = content_sha256(beside)
    assert sorted(read) == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert (content_sha256(beside), len(read)) == (first, 3)
    data = bytearray(beside.read_bytes())
    data[-1] ^= 1
    beside.write_bytes(data)
    os.utime(beside, ns=(1, 1))
    assert content_sha256(beside) != first


def test_a_file_that_is_written_while_it_is_read_is_refused(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest_at = files._digest_at

    def slow_copy(fd: int, start: int) -> bytes:
        os.utime(beside, ns=(2, 2))
        return digest_at(fd, start)

    monkeypatch.setattr(files, "_digest_at", slow_copy)
    with pytest.raises(ValueError, match="changes while it is read; wait until it is complete"):
        content_sha256(beside)


def test_a_file_that_cannot_be_read_is_closed_once_no_thread_reads_it(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, sizes = threading.Event(), list[int]()

    def read(fd: int, start: int) -> bytes:
        if not start:
            assert began.wait(60)
            raise OSError("worn out")
        began.set()
        time.sleep(0.1)
        sizes.append(os.fstat(fd).st_size)
        return b""

    monkeypatch.setattr(files, "_digest_at", read)
    monkeypatch.setattr(files, "MAX_THREADS", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(OSError, match="worn out"):
        content_sha256(beside)
    assert sizes and set(sizes) == {beside.stat().st_size}


def test_a_process_that_is_interrupted_waits_neither_for_a_file_that_is_read_nor_for_a_machine(beside: Path) -> None:
    """As ComfyUI is by Ctrl-C: its thread that runs prompts is a daemon."""
    subprocess.run([sys.executable, "-c", INTERRUPTED, str(beside)], check=True, timeout=120)
