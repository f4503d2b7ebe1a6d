"""CONTRIBUTING.md, the README and docs/ name files, folders and make targets that exist.

Owns: names in backticks and links. Does not own what the pages say of them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "CONTRIBUTING.md", ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")])
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)")
TARGET = re.compile(r"\bmake ([a-z][\w-]*)")
# Sources by their name alone or with folders; other files with folders, since many a `report.json` is a user's.
FILE = re.compile(
    r"(?<![\w./~*-])((?:[\w-]+/)*[\w-]+\.(?:py|mjs|js|css|yml|toml)|(?:[\w-]+/)+[\w.-]+\.(?:json|md|png))(?![\w./])"
)
FOLDER = re.compile(r"(?:[\w-]+/)+")
TEST = re.compile(r"\btest_\w+")
DEFINED = re.compile(r"^def (test_\w+)", re.MULTILINE)
# Files of ComfyUI's and of its user's, and a name that a reader replaces by their own.
OTHERS = {"comfy/model_base.py", "comfy/model_detection.py", "main.py"}
TO_REPLACE = re.compile(r"(?<![A-Z])(NAME|ID)(?![A-Z])")
OTHER_FOLDERS = {"models/diffusion_models/", "output/timing/", "traces/"}


def files() -> set[str]:
    """Every file of the repository, relative to its root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
    return set(listed.stdout.splitlines())


def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def ghosts(text: str, *, known: set[str], makes: set[str], tests: set[str]) -> list[str]:
    """What the text of a page names and nobody has."""
    ends = "".join(f"/{path}\n" for path in known)
    found = []
    for code in CODE.findall(text):
        if TO_REPLACE.search(code):
            continue
        found += [f"make {name}" for name in TARGET.findall(code) if name not in makes]
        found += [name for name in FILE.findall(code) if name not in OTHERS and f"/{name}\n" not in ends]
        if FOLDER.fullmatch(code) and code not in OTHER_FOLDERS and f"/{code}" not in ends:
            found.append(code)
        found += [name for name in TEST.findall(code) if name not in tests]
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """What there is: files, make targets, and the names of tests and of their files."""
    paths = files()
    tests = {Path(path).stem for path in paths if path.startswith("tests/")}
    for path in paths:
        if path.startswith("tests/") and path.endswith(".py"):
            tests |= set(DEFINED.findall((ROOT / path).read_text(encoding="utf-8")))
    return {"known": paths, "makes": targets(), "tests": tests}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_what_exists(page: Path, known: dict[str, set[str]]) -> None:
    text = page.read_text(encoding="utf-8")
    assert ghosts(text, **known) == []
    links = [link for link in LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`make tests` after `make test`", ["make tests"]),
        ("`FOLDER=here make picture`", ["make picture"]),
        ("`parallel_runtime/pool/crew.py` and `parallel_runtime/pool/pool.py`", ["parallel_runtime/pool/crew.py"]),
        ("`crew.py` and `pool.py`", ["crew.py"]),
        ("`nodes/shelf/` and `nodes/host/`", ["nodes/shelf/"]),
        ("`tests/runtime/test_paritty.py`", ["tests/runtime/test_paritty.py", "test_paritty"]),
        ("`test_that_went` and `test_a_page_names_only_what_exists`", ["test_that_went"]),
    ],
)
def test_a_name_that_nobody_has_is_found(text: str, found: list[str], known: dict[str, set[str]]) -> None:
    assert ghosts(text, **known) == found


def test_names_that_exist_are_found_in_the_pages(known: dict[str, set[str]]) -> None:
    """Else the patterns might match nothing."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    without = ghosts(text, known=set(), makes=set(), tests=set())
    assert len([name for name in without if name.startswith("make ")]) > 20
    assert len([name for name in without if name.endswith(".py")]) > 60
    assert len([name for name in without if name.startswith("test_")]) > 40
