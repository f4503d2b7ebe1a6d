"""The repository's address: it stands once, in pyproject.toml's [project.urls]; what else needs it has it from there.

`python -m tools.address` writes the READMEs' install line, and the icon's and the banner's addresses; `--check` says
whether the pack may be published and ends with 1 while there is no address. Owns: these. Does not own: what else the
registry asks for (comfy-cli validates it).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README.zh.md", "README.ja.md")
LINE = re.compile(r"(?<=<!-- made by make address -->\n).*?(?=<!-- end of address -->)", re.DOTALL)
ADDRESS = re.compile(r'^\[project\.urls\]\n(?:#.*\n)*Repository = "([^"]*)"', re.MULTILINE)
PICTURES = {"Icon": "docs/images/icon.svg", "Banner": "docs/images/banner.svg"}
FOLDER = "`ComfyUI/custom_nodes/parallel-dit`"
# With an address, and without.
INSTALL = {
    "README.md": (
        "1. `git clone {address} ComfyUI/custom_nodes/parallel-dit`",
        "1. Get this folder (**Code → Download ZIP** on its page, or `git clone` with the page's address) "
        f"and put it at {FOLDER}.",
    ),
    "README.zh.md": (
        "1. `git clone {address} ComfyUI/custom_nodes/parallel-dit`",
        f"1. 获取本文件夹（在它的页面上选 **Code → Download ZIP**，或用该页面的地址执行 `git clone`），放到 {FOLDER}。",
    ),
    "README.ja.md": (
        "1. `git clone {address} ComfyUI/custom_nodes/parallel-dit`",
        "1. このフォルダを入手し（ページの **Code → Download ZIP**、"
        f"またはそのページのアドレスで `git clone`）、{FOLDER} に置きます。",
    ),
}


def address(pyproject: str) -> str:
    """The address in the text of pyproject.toml; empty where there is none."""
    found = ADDRESS.search(pyproject)
    return found.group(1) if found else ""


def why_not(pyproject: str) -> str:
    """Why the pack cannot be published with this pyproject.toml; empty where nothing is missing."""
    known = address(pyproject)
    if not known:
        return 'pyproject.toml has no address; write Repository = "https://..." below [project.urls], then make address'
    if not re.fullmatch(r"https://[\w.-]+/\S+", known):
        return f"Repository = {known!r} in pyproject.toml is no https address; write one, then make address"
    return ""


def with_pictures(pyproject: str, known: str) -> str:
    """A pyproject.toml whose icon and banner are the repository's files; empty while there is no address."""
    for field, path in PICTURES.items():
        value = f"{known}/raw/HEAD/{path}" if known else ""
        pyproject = re.sub(rf'^{field} = ".*"$', f'{field} = "{value}"', pyproject, flags=re.MULTILINE)
    return pyproject


def with_address(name: str, readme: str, known: str) -> str:
    """A README with its install line for this address. Raises ValueError where it has no place for it."""
    if not LINE.search(readme):
        raise ValueError(f"{name} lacks `<!-- made by make address -->`, or `<!-- end of address -->` below it")
    line = INSTALL[name][0 if known else 1].format(address=known)
    return LINE.sub(lambda _: f"\n{line}\n\n", readme)


def main(arguments: Sequence[str]) -> int:
    """Write the READMEs' lines, or check; returns the exit status."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if "--check" in arguments:
        sys.stdout.write(f"{why_not(text)}\n" if why_not(text) else f"published from {address(text)}\n")
        return 1 if why_not(text) else 0
    (ROOT / "pyproject.toml").write_text(with_pictures(text, address(text)), encoding="utf-8")
    for name in READMES:
        path = ROOT / name
        path.write_text(with_address(name, path.read_text(encoding="utf-8"), address(text)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
