"""What NCCL leaves in /dev/shm when ranks end in the middle of its start: ours go with the ranks, others' stay.

The files are what NCCL makes, a named file that a process maps; the ranks are real processes that are really killed.
"""

import mmap
import os
import signal
import uuid
from contextlib import suppress

import pytest

from parallel_runtime.process.nccl_segments import FOLDER, leftovers, segments_of
from pool.echo_pool import Gate, failure

SIZE = 4096


def unused_name():
    """A name that nobody has; what is there at the end goes."""
    path = FOLDER / f"nccl-{uuid.uuid4().hex}"
    yield path
    with suppress(FileNotFoundError):
        path.unlink()


segment = pytest.fixture(unused_name, name="segment")
others_segment = pytest.fixture(unused_name, name="others_segment")


def test_segments_of_ranks_that_end_are_removed(pool, segment, tmp_path):
    """Rank 1 has the segment while rank 0 ends."""
    gate, there = Gate(tmp_path), []

    def kill_rank_0():
        if gate.reached and not there:
            there.append(segment.exists())
            os.kill(pool.status()["pids"][0], signal.SIGKILL)

    failure(pool, check_cancelled=kill_rank_0, faults={1: [["map_file", str(segment), SIZE], gate.waits]})
    assert (there, segment.exists()) == ([True], False)


def test_a_rank_that_raises_removes_its_own_and_those_of_others_stay(lone_rank, segment, others_segment):
    others_segment.write_bytes(bytes(SIZE))
    failure(lone_rank, faults={0: [["map_file", str(segment), SIZE], ["fail", "RuntimeError", "NCCL error"]]})
    assert (segment.exists(), others_segment.exists()) == (False, True)


def test_a_file_of_such_a_name_elsewhere_is_no_segment(segment, tmp_path):
    segment.write_bytes(bytes(SIZE))
    mine = tmp_path / "nccl-model"
    mine.write_bytes(bytes(SIZE))
    with mine.open("r+b") as file, mmap.mmap(file.fileno(), SIZE):
        assert segments_of([os.getpid()]) == set()


def test_names_that_nccl_does_not_give_and_links_are_not_listed_with_a_command_to_remove_them(tmp_path):
    (tmp_path / "nccl-good").write_bytes(bytes(SIZE))
    (tmp_path / "nccl-x; rm -rf ~").write_bytes(bytes(SIZE))
    (tmp_path / "nccl-link").symlink_to("nccl-good")
    (tmp_path / "nccl-gone").symlink_to("nowhere")
    assert [left.path.name for left in leftovers(tmp_path)] == ["nccl-good"]


def test_a_segment_is_left_over_when_no_process_has_it(segment):
    segment.write_bytes(bytes(SIZE))
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), SIZE):
        assert segment not in {left.path for left in leftovers()}
    (left,) = (left for left in leftovers() if left.path == segment)
    assert left.num_bytes == SIZE
