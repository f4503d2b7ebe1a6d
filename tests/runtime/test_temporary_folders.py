"""Temporary folders that a killed process has left go when the next one makes one; nobody else's do."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from parallel_runtime import pack_folder
from parallel_runtime.process import temporary_folders
from parallel_runtime.process.temporary_folders import LOCKED, PREFIX, TemporaryFolder, remove_left

HOLDS = "from parallel_runtime.process.temporary_folders import TemporaryFolder as Made; import sys; "
HOLDS += "made = Made(); (made.path / 'stderr').touch(); print(made.path, flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_killed_processs_folder_goes_with_the_next_and_a_living_ones_does_not(parent: Path) -> None:
    command, told = [sys.executable, "-c", HOLDS], {"env": {**os.environ, "TMPDIR": str(parent)}}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": pack_folder(os.environ)}
    with subprocess.Popen(command, **told, **pipes) as process:
        try:
            left = Path(process.stdout.readline().strip())
            assert left.parent == parent
            (first := TemporaryFolder()).cleanup()
            assert (left / "stderr").exists() and not first.path.exists()
        finally:
            process.kill()
        process.wait()
    assert (left / "stderr").exists()
    second, third = TemporaryFolder(), TemporaryFolder()
    assert sorted(parent.iterdir()) == sorted([second.path, third.path])
    for each in (second, third):
        each.cleanup()
        each.cleanup()
    assert list(parent.iterdir()) == []


def test_what_is_not_a_folder_of_this_user_with_a_lock_of_ours_is_left_alone(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere := parent / "elsewhere").mkdir()
    (elsewhere / LOCKED).touch()
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    (parent / f"{PREFIX}file").touch()
    (parent / f"{PREFIX}older").mkdir()
    (parent / f"{PREFIX}linked").mkdir()
    (parent / f"{PREFIX}linked" / LOCKED).symlink_to(elsewhere / LOCKED)
    before = sorted(parent.rglob("*"))
    remove_left()
    assert sorted(parent.rglob("*")) == before
    (others := parent / f"{PREFIX}others").mkdir()
    (others / LOCKED).touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        remove_left()
        assert others.is_dir()
    remove_left()
    assert not others.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "gone"))
    remove_left()


def test_where_files_cannot_be_locked_a_folder_stays_until_its_process_removes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fcntl

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refused)
        made = TemporaryFolder()
    assert list(made.path.iterdir()) == []
    temporary_folders.remove_left()
    assert made.path.is_dir()
    made.cleanup()
    assert not made.path.exists()
