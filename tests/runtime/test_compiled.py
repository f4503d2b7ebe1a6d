"""Where graphs of blocks are kept on disk, and what is said where none can be made.

What graphs compute is models/test_compiled_blocks.py's.
"""

import os
from pathlib import Path

import pytest
import torch

from host.fetch import comfyui_path
from parallel_runtime.__main__ import main
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.compiling import FOLDER, cache_folder, why_not
from parallel_runtime.models.hosted.graphs import Graphs, NoGraphError, Watch
from parallel_runtime.timing import RegionTimer


def test_the_folder_is_where_the_user_says_in_the_cache_or_among_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o700)
    assert cache_folder({FOLDER: "/there"}) == Path("/there")
    assert cache_folder({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "parallel-dit" / "compiled"
    for no_home in ({"HOME": str(tmp_path / "file")}, {}, {"XDG_CACHE_HOME": "relative"}):
        found = cache_folder({**no_home, "TMPDIR": str(tmp_path)})
        assert found == tmp_path / f"parallel-dit-compiled-{os.getuid()}"


def test_what_is_missing_is_said_in_a_sentence(tmp_path: Path) -> None:
    here = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    here.pop(FOLDER, None)
    assert why_not(["cpu"], here) is None
    assert not (tmp_path / "parallel-dit" / "compiled").stat().st_mode & 0o022
    missing = "compiling needs a C++ compiler, and {} is not there; install g++"
    assert why_not(["cpu"], {**here, "PATH": str(tmp_path)}) == missing.format("g++")
    assert why_not(["cuda"], {**here, "PATH": str(tmp_path)}) == missing.format("gcc or clang")
    assert why_not(["cpu"], {**here, "CXX": "no-such-compiler"}) == missing.format("no-such-compiler")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    reason = why_not(["cpu"], {**here, FOLDER: str(tmp_path / "open")})
    assert reason is not None
    assert "others can write to" in reason
    (tmp_path / "file").touch()
    assert why_not(["cpu"], {**here, FOLDER: str(tmp_path / "file" / "below")}) == (
        "compiling has no folder for its libraries (Not a directory); "
        f"set {FOLDER} to a folder of your own before starting"
    )


@pytest.mark.slow
def test_the_command_line_refuses_to_compile_without_a_compiler(
    tiny_hosted: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    there = ["--model", tiny_hosted.path, "--comfyui", str(comfyui_path())]
    assert main(["verify", *there, "--plan", "ulysses=1", "--devices", "cpu:1", "--compile"]) == 2
    assert "--compile: compiling needs a C++ compiler, and g++ is not there" in capsys.readouterr().err


def test_a_function_of_which_no_graph_can_be_made_says_why_each_time_and_is_tried_once() -> None:
    from torch._dynamo.exc import TorchDynamoException  # more than a second

    asked = list[object]()

    def fails(function: object) -> object:
        asked.append(function)
        raise TorchDynamoException("it branches\non data")

    graphs = Graphs()
    graphs._for_all_lengths = fails  # type: ignore[method-assign, assignment]
    watch = Watch(timer=RegionTimer(torch.device("cpu")), beat=lambda: None, tell=lambda _: None)
    for _ in range(2):
        with pytest.raises(NoGraphError, match="^it branches$"):
            graphs.whole(abs, "a form", watch, 1)
    assert asked == [abs]
