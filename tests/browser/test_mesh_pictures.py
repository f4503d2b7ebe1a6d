"""The picture of a plan: every rank stands once, apart from the others, and lines join those that exchange."""

import json
import math
import os
from itertools import combinations
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from host.server import PACK_ROOT
from parallel_runtime.plan import AXES, MAX_RANKS, ParallelPlan

from .comfy_page import SHOTS
from .made_up import ONE

WORDS = json.loads((PACK_ROOT / "locales" / "en" / "main.json").read_text(encoding="utf-8"))
# plan, ranks that sleep, lines by axis: one a row of ulysses, a column's ring or hop, a pair of batch groups of one
# image
PICTURES: list[tuple[dict[str, int], int, dict[str, int]]] = [
    ({}, 0, {}),
    ({"ulysses": 4}, 0, {"ulysses": 1}),
    ({"ring": 2}, 0, {"ring": 1}),
    ({"ring": 8}, 0, {"ring": 1}),
    ({"ring": 2, "ulysses": 4}, 0, {"ring": 4, "ulysses": 2}),
    ({"cfg": 2}, 0, {"cfg": 1}),
    ({"cfg": 2, "ulysses": 2}, 1, {"cfg": 1, "ulysses": 2}),
    ({"data": 3}, 0, {}),
    ({"data": 8}, 0, {}),
    ({"data": 2, "ring": 2}, 0, {"ring": 2}),
    ({"data": 2, "cfg": 2, "ulysses": 2}, 0, {"cfg": 2, "ulysses": 4}),
    ({"pipefusion": 2}, 0, {"pipefusion": 1}),
    ({"pipefusion": 4}, 3, {"pipefusion": 3}),
    ({"pipefusion": 2, "ulysses": 2}, 0, {"pipefusion": 2, "ulysses": 2}),
    ({"pipefusion": 2, "ring": 2, "ulysses": 2}, 0, {"pipefusion": 2, "ring": 4, "ulysses": 4}),
    ({"data": 2, "cfg": 2, "pipefusion": 2}, 9, {"cfg": 2, "pipefusion": 4}),
    ({"ring": 8, "ulysses": 8}, 0, {"ring": 8, "ulysses": 8}),
]
DRAW = """async ([plan, numRanks, translations]) => {
  const { drawMesh, meshKeys } = await import('/extensions/parallel-dit/panel/mesh.mjs')
  const { makeWords } = await import('/extensions/parallel-dit/panel/words.mjs')
  if (!document.querySelector('link')) {
    document.body.replaceChildren()
    document.head.innerHTML = '<link rel="stylesheet" href="/extensions/parallel-dit/panel/style.css">'
    document.body.style.cssText = 'background:#202020;color:#ddd;display:flex;flex-wrap:wrap'
  }
  const t = makeWords({ en: translations }, 'en')
  const box = document.createElement('div')
  box.className = 'pdit'
  box.style.width = '340px'
  box.append(drawMesh(plan, numRanks, t), meshKeys(plan, t))
  document.body.append(box)
  const svg = box.firstChild
  const numbers = (element, ...names) => names.map((name) => Number(element.getAttribute(name)))
  return {
    dots: [...svg.querySelectorAll('[data-rank]')].map((dot) =>
      [Number(dot.dataset.rank), dot.getAttribute('class'), ...numbers(dot.querySelector('circle'), 'cx', 'cy', 'r')]),
    boxes: [...svg.querySelectorAll('rect')].map((rect) => numbers(rect, 'x', 'y', 'width', 'height')),
    lines: [...svg.querySelectorAll('line, path')].map((line) => line.dataset.axis),
    ends: [...svg.querySelectorAll('line')].map((line) =>
      [line.dataset.axis, ...numbers(line, 'x1', 'y1', 'x2', 'y2')]),
    size: svg.getAttribute('viewBox').split(' ').slice(2).map(Number),
    label: svg.getAttribute('aria-label'),
    keys: [...box.lastChild.children].map((key) => key.textContent) } }"""
AXIS_BETWEEN = """async ([plan, a, b]) =>
  (await import('/extensions/parallel-dit/panel/mesh.mjs')).axisBetween(plan, a, b)"""


def test_every_plan_has_a_picture_with_all_its_ranks_and_links(plain_page: Page) -> None:
    for plan, asleep, lines in PICTURES:
        needed = math.prod(plan.values())
        seen = plain_page.evaluate(DRAW, [ONE | plan, needed + asleep, WORDS])
        assert [dot[0] for dot in seen["dots"]] == list(range(needed + asleep)), plan
        assert [dot[1] for dot in seen["dots"]] == ["pdit-rank"] * needed + ["pdit-spare"] * asleep, plan
        assert {axis: seen["lines"].count(axis) for axis in set(seen["lines"])} == lines, plan
        assert seen["keys"] == [f"{NAMES.get(axis, axis)} {plan[axis]}" for axis in ONE if plan.get(axis, 1) > 1]
        assert seen["label"] == (" × ".join(seen["keys"]) or "one rank")
        nothing_overlaps(seen)
        every_batch_group_holds_its_ranks(seen, plan, needed)
    folder = os.environ.get(SHOTS)
    if folder:
        plain_page.screenshot(path=Path(folder) / "meshes.png", full_page=True)


NAMES = {"pipefusion": "PipeFusion"}


def nothing_overlaps(seen: dict[str, Any]) -> None:
    """No circle lies on another, none beyond the picture, and every straight line ends at circles or batch groups."""
    for (_, _, x, y, radius), (_, _, other_x, other_y, _) in combinations(seen["dots"], 2):
        assert math.dist((x, y), (other_x, other_y)) >= 2 * radius
    width, height = seen["size"]
    for _, _, x, y, radius in seen["dots"]:
        assert radius <= x <= width - radius
        assert radius <= y <= height - radius
    places = {(x, y) for _, _, x, y, _ in seen["dots"]}
    for axis, x1, y1, x2, y2 in seen["ends"]:
        if axis != "cfg":
            assert {(x1, y1), (x2, y2)} <= places
        else:  # from one batch group's side to the next one's
            assert any(x + wide == x1 for x, _, wide, _ in seen["boxes"])
            assert any(x == x2 for x, *_ in seen["boxes"])


def every_batch_group_holds_its_ranks(seen: dict[str, Any], plan: dict[str, int], needed: int) -> None:
    """Batch groups come in order, data outermost, and each has its own ranks inside its box and no others."""
    batch_groups = plan.get("data", 1) * plan.get("cfg", 1)
    assert len(seen["boxes"]) == batch_groups
    for batch_group, (x, y, wide, high) in enumerate(seen["boxes"]):
        inside = [rank for rank, _, cx, cy, _ in seen["dots"] if x < cx < x + wide and y < cy < y + high]
        assert inside == list(range(batch_group * needed // batch_groups, (batch_group + 1) * needed // batch_groups))


def test_the_panel_counts_ranks_as_the_plan_does(plain_page: Page) -> None:
    plans = [ParallelPlan(**degrees) for degrees, _, _ in PICTURES if math.prod(degrees.values()) <= MAX_RANKS]
    pairs = [(plan, a, b) for plan in plans for a, b in combinations(range(plan.ranks), 2)]
    asked = [[ONE | dict(zip(AXES, plan.degrees, strict=True)), a, b] for plan, a, b in pairs]
    answered = plain_page.evaluate(f"asked => Promise.all(asked.map({AXIS_BETWEEN}))", asked)
    for (plan, a, b), axis in zip(pairs, answered, strict=True):
        places = zip(plan.coordinates(a).items(), plan.coordinates(b).values(), strict=True)
        differ = [name for (name, one), other in places if one != other]
        assert axis == (differ[0] if len(differ) == 1 and differ != ["data"] else ""), (plan, a, b)
    assert plain_page.evaluate(AXIS_BETWEEN, [ONE | {"ulysses": 2}, 0, 2]) == "", "a rank beyond the plan"
    assert plain_page.evaluate(AXIS_BETWEEN, [ONE | {"ring": "two"}, 0, 1]) == ""
