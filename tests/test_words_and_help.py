"""The words of the interface: complete in each language, and a page of help with a picture for every node."""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
LOCALES = ROOT / "locales"
FILES = ("main.json", "commands.json", "settings.json", "nodeDefs.json")
PANEL = ROOT / "web" / "panel"
KEY = re.compile(r"""\bt\(\s*(['"`])([\w.$\{\}]+?)\1""")
PUBLISHED = "71bc3edd52655b025341f0c9e71e630c3cf3163b07d2c431af153ae43ae5cbe9"
MOST_BYTES = 640_000  # of web/ in all: what every page of ComfyUI may have to load


def words(language: str, file: str) -> dict[str, str]:
    """The texts of a file by dotted key."""

    def flat(value: Any, inside: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, each in value.items():
                yield from flat(each, f"{inside}.{key}" if inside else key)
        else:
            yield inside, value

    return dict(flat(json.loads((LOCALES / language / file).read_text(encoding="utf-8")), ""))


def node_ids() -> list[str]:
    found = []
    for path in (ROOT / "nodes").glob("*.py"):
        found += re.findall(r'node_id="(\w+)"', path.read_text(encoding="utf-8"))
    return sorted(found)


@pytest.mark.parametrize("file", FILES)
def test_both_languages_have_the_same_words_with_the_same_places_to_fill_in(file: str) -> None:
    english, chinese = words("en", file), words("zh", file)
    assert english.keys() == chinese.keys()
    assert [key for key, text in {**english, **chinese}.items() if not text.strip()] == []
    assert [key for key, text in english.items() if places(text) != places(chinese[key])] == []


def places(text: str) -> list[str]:
    """The names in braces."""
    return sorted(re.findall(r"\{(\w+)\}", text))


def test_every_word_the_panel_asks_for_is_there() -> None:
    known = {key.removeprefix("parallelDit.") for key in words("en", "main.json")}
    asked = [
        (path.name, key)
        for path in [*PANEL.glob("*.mjs"), ROOT / "web" / "parallel_dit.js"]
        for _, key in KEY.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(asked) > 40, "the pattern finds nothing any more"
    missing = [(name, key) for name, key in asked if not any(re.fullmatch(as_pattern(key), each) for each in known)]
    assert missing == []


def as_pattern(key: str) -> str:
    """A key with a computed part stands for any of its words."""
    return re.sub(r"\\\$\\\{.*?\\\}", r"\\w+", re.escape(key))


def test_every_node_has_a_name_and_a_description() -> None:
    texts = words("en", "nodeDefs.json")
    for node in node_ids():
        assert {f"{node}.display_name", f"{node}.description"} <= texts.keys()


@pytest.mark.parametrize("node", node_ids())
def test_every_node_has_a_page_of_help_with_a_picture(node: str) -> None:
    page = (ROOT / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[.+?\]\((images/[\w.]+)\)", page)
    assert pictures
    for picture in pictures:
        with Image.open(ROOT / "web" / "docs" / picture) as image:
            assert image.width > 100


def test_no_page_of_help_is_left_of_a_node_that_went() -> None:
    assert sorted(path.stem for path in (ROOT / "web" / "docs").glob("*.md")) == node_ids()


def test_the_vendored_library_is_the_published_one_with_its_licence() -> None:
    """Between its marks the file is dist/chart.umd.min.js of chart.js 4.5.0, without the line of its source map."""
    text = (ROOT / "web" / "vendor" / "chart.mjs").read_text(encoding="utf-8")
    inside = text.partition("/* vendored from here */\n")[2].partition("\n/* to here */")[0]
    assert hashlib.sha256(inside.encode()).hexdigest() == PUBLISHED
    assert "MIT" in (ROOT / "web" / "vendor" / "chart.LICENSE.md").read_text(encoding="utf-8")


def test_only_one_script_is_loaded_with_the_page_and_all_of_it_is_small() -> None:
    web = ROOT / "web"
    assert [path.name for path in web.rglob("*.js")] == ["parallel_dit.js"], "ComfyUI loads every .js as an extension"
    assert sum(path.stat().st_size for path in web.rglob("*") if path.is_file()) < MOST_BYTES


def test_no_module_of_the_panel_knows_comfyui() -> None:
    """But for parallel_dit.js they take what they need as arguments, so that a page without ComfyUI can show them."""
    for path in PANEL.glob("*.mjs"):
        assert "scripts/app.js" not in path.read_text(encoding="utf-8"), path.name


def test_every_input_of_every_node_has_a_tooltip() -> None:
    """Read from the source, so that it needs no server: each `io.X.Input(...)` and socket's Input names one."""
    lacking = []
    for path in (ROOT / "nodes").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "Input":
                names = {keyword.arg for keyword in call.keywords}
                if "tooltip" not in names and None not in names:
                    lacking.append(f"{path.name}:{call.lineno}")
    assert lacking == []
