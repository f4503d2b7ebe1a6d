"""CONTRIBUTING.md, the README and docs/ name files, folders, make targets and tests that exist."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP = (ROOT / name for name in ("CONTRIBUTING.md", "README.md", "README.zh.md", "README.ja.md", "SECURITY.md"))
PAGES = sorted([*TOP, *(ROOT / "docs").glob("*.md")])
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


@pytest.mark.parametrize("page", ["docs/reliability.md", "SECURITY.md"])
def test_each_promise_names_the_test_that_holds_it(page: str) -> None:
    tables = re.findall(
        r"^\|.*held by \|\n\| --- .*\n((?:\|.*\n)+)", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 5, "a table of promises was not read"
    assert [row for row in rows if not re.search(r"`test_\w+`", row.split("|")[-2])] == []


MADE = re.compile(r"<!-- made by .*?<!-- end.*?-->", re.DOTALL)
ADDRESS = re.compile(r"\]\(([^)]+)\)")
NUMBER = re.compile(r"\d+(?:\.\d+)*")


def facts(text: str) -> tuple[set[str], set[str], Counter[str]]:
    """Links, names in backticks and numbers of a README: what its translations have alike."""
    text = MADE.sub("", text)
    links = {link for link in ADDRESS.findall(text) if not link.startswith("README.")}
    return links, set(CODE.findall(text)), Counter(NUMBER.findall(CODE.sub("", ADDRESS.sub("", text))))


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_a_translated_readme_has_the_figures_names_and_links_of_the_english_one(language: str) -> None:
    english = (ROOT / "README.md").read_text(encoding="utf-8")
    links, names, numbers = facts(english)
    of_translation = facts((ROOT / f"README.{language}.md").read_text(encoding="utf-8"))
    assert of_translation[:2] == (links, names)
    assert numbers - of_translation[2] == Counter(), "a figure is missing, or was changed"
    assert {each for each in of_translation[2] if "." in each} <= {*NUMBER.findall(english)}
    changed = facts(english.replace("1.39 to 1.77", "1.39 to 1.79"))[2]
    assert changed - of_translation[2] == Counter({"1.79": 1})
