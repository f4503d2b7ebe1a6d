"""What docs/quality.md says of defaults: PipeFusion's warm-up is the smallest that keeps agreement within 1 %."""

from pathlib import Path

from parallel_runtime.plan import ParallelPlan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quality.md"
PROMPTS, WITHIN = 200, 1.0  # percent of the prompts


def agreements(page: str) -> dict[str, float]:
    """Percent of the pictures that show their prompt, by row. Every row is over all prompts."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    assert {row[1] for row in rows} == {str(PROMPTS)}, [row[0] for row in rows if row[1] != str(PROMPTS)]
    return {row[0].strip("`"): float(row[5].removesuffix(" %")) for row in rows}


def smallest_warmup(page: str) -> int:
    """The fewest warm-up steps of two stages that keep agreement."""
    found = agreements(page)
    name, single = "pipefusion=2,warmup_steps=", found["single"]
    keeps = {int(row.removeprefix(name)): abs(value - single) for row, value in found.items() if row.startswith(name)}
    return min(steps for steps, change in keeps.items() if change <= WITHIN)


def test_the_default_warmup_is_the_smallest_that_keeps_agreement() -> None:
    assert smallest_warmup(PAGE.read_text(encoding="utf-8")) == ParallelPlan(pipefusion=2).warmup_steps
