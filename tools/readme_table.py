"""README's table of models, made from docs/models.md: `make readme-models` writes it, a test holds it to the page.

Owns the table's text, and which families make pictures, video or sound. Figures are the page's, never counted anew.
"""

from __future__ import annotations

import re
import sys

from families.variants import KNOWN
from host.pack_workflows import TOLERANCE
from host.server import PACK_ROOT

from .class_list import DOCUMENT
from .tables import markdown

README = PACK_ROOT / "README.md"
TABLE = re.compile(r"(?<=<!-- made by make readme-models -->\n).*?(?=<!-- end -->)", re.DOTALL)
IMAGES, VIDEO, SHAPES = "images", "video, some with sound", "3D shapes"
KINDS = {
    **dict.fromkeys(("Flux.1", "Flux.2", "Qwen-Image", "Z-Image", "Lumina 2", "Krea 2", "Chroma"), IMAGES),
    **dict.fromkeys(("SD3.5", "PixArt", "HunyuanDiT", "Lens", "JoyImage", "Ideogram 4"), IMAGES),
    **dict.fromkeys(("Ernie-Image", "Boogu", "Mage-Flow", "PixelDiT", "PiD", "Z-Image in pixels"), IMAGES),
    **dict.fromkeys(("Chroma Radiance", "HiDream-O1", "Anima"), IMAGES),
    **dict.fromkeys(("Wan", "LTX", "MiniMax H3", "HunyuanVideo", "Kandinsky 5", "CogVideoX"), VIDEO),
    **dict.fromkeys(("TripoSplat", "Hunyuan3D"), SHAPES),
}


def tables(page: str) -> list[list[dict[str, str]]]:
    """Each table of a page: its rows, by column."""
    found: list[list[dict[str, str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines())
        found.append([dict(zip((name.strip() for name in head), row, strict=True)) for row in rows])
    return found


def table(page: str) -> str:
    """README's table. Raises KeyError for a family that `KINDS` lacks; ValueError for a page with a wrong case."""
    measured, plans = (next(rows for rows in tables(page) if column in rows[0]) for column in ("wrong", "transformer"))
    if wrong := [row["family"] for row in measured if row["wrong"] != "0"]:
        raise ValueError(f"docs/models.md counts wrong cases of {', '.join(wrong)}; mend them first")
    rows = []
    for kind in (IMAGES, VIDEO, SHAPES):
        mine = [row for row in measured if KINDS[row["family"]] == kind]
        names = ", ".join(dict.fromkeys(row["family"] for row in mine))
        worst = max((row["largest error"] for row in mine), key=float)
        rows.append((kind, names, sum(int(row["cases"]) for row in mine), worst))
    known = {row["class"].removesuffix("*") for row in measured}
    more = [row for row in plans if row["transformer"] not in known]
    names = dict.fromkeys(KNOWN[name][0] for row in more for name in row["beside stock ComfyUI"].split("; ") if name)
    limit = f"at most {TOLERANCE:.0e}"
    if names:
        rows.append(("the same, under fewer plans", ", ".join(names), "", limit))
    alone = sum(not row["beside stock ComfyUI"] for row in more)
    rows.append(("images, video, sound", f"{alone} transformers more, by module", "", limit))
    return markdown(("", "compared with stock ComfyUI", "cases", "largest error"), rows)


def with_table(readme: str, text: str) -> str:
    """A README whose table is this one. Raises ValueError where it has no place for it."""
    if not TABLE.search(readme):
        raise ValueError("README.md lacks `<!-- made by make readme-models -->`, or `<!-- end -->` below it")
    return TABLE.sub(lambda _: f"\n{text}\n", readme)


def main() -> None:
    """Write README's table."""
    text = table(DOCUMENT.read_text(encoding="utf-8"))
    README.write_text(with_table(README.read_text(encoding="utf-8"), text), encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
