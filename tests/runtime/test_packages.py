"""Which packages of a rank are said to differ from those of the process beside it."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy  # noqa: F401  what a process has imported is what is compared
import torch  # noqa: F401

from parallel_runtime.packages import Package, differences, imported_packages

ROOT = Path(__file__).resolve().parents[2]
HERE = {package.name: package for package in imported_packages()}


def test_a_process_knows_its_own_packages() -> None:
    assert HERE["torch"].version == metadata.version("torch")
    assert HERE["numpy"].version == metadata.version("numpy")
    assert differences(HERE.values(), elsewhere=False) == []


def test_another_version_another_copy_and_one_that_is_not_here_are_named() -> None:
    torch_here = HERE["torch"]
    theirs = [
        torch_here._replace(version="1.0"),
        HERE["numpy"]._replace(folder="/elsewhere"),
        Package("sageattention", "2.2.0", "/elsewhere"),
    ]
    older, copy, foreign = differences(theirs, elsewhere=False)
    assert older.startswith(f"workers have torch 1.0, and ComfyUI has torch {metadata.version('torch')}; ")
    assert copy.startswith(f"workers have another copy of numpy {metadata.version('numpy')} than ComfyUI; ")
    assert foreign.startswith("workers have sageattention 2.2.0, and ComfyUI has no sageattention; ")
    here = "leave one of the two installed, or name its folder in PYTHONPATH before you start ComfyUI"
    assert all(each.endswith(f"; {here}") for each in (older, copy, foreign))
    there = differences(theirs, elsewhere=True)
    assert len(there) == 2, "folders of another machine say nothing"
    assert all(
        each.endswith("; install ComfyUI's requirements on both machines in the same versions") for each in there
    )


def test_a_package_that_is_not_imported_here_is_found_as_it_would_be(tmp_path: Path) -> None:
    for name, version in (("first", "2.0"), ("second", "1.0")):
        (tmp_path / name / "xformers").mkdir(parents=True)
        (tmp_path / name / "xformers" / "__init__.py").touch()
        about = tmp_path / name / f"xformers-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: xformers\nVersion: {version}\n")
    code = (
        "import sys\nfrom parallel_runtime.packages import Package, differences\n"
        f"theirs = [Package('xformers', sys.argv[1], {str(tmp_path)!r} + '/' + sys.argv[2])]\n"
        "print(differences(theirs, elsewhere=False), 'xformers' in sys.modules)"
    )

    def said(version: str, folder: str) -> str:
        environment = {"PYTHONPATH": f"{ROOT}:{tmp_path / 'first'}:{tmp_path / 'second'}"}
        command = [sys.executable, "-c", code, version, folder]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert said("2.0", "first") == "[] False\n"
    assert "workers have xformers 1.0, and ComfyUI has xformers 2.0" in said("1.0", "second")
