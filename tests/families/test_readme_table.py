"""README's table of models is what docs/models.md says."""

from __future__ import annotations

import pytest

from tools.class_list import DOCUMENT
from tools.readme_table import README, table, with_table


def test_the_readme_has_the_table_that_the_page_gives() -> None:
    readme, text = README.read_text(encoding="utf-8"), table(DOCUMENT.read_text(encoding="utf-8"))
    assert with_table(readme, text) == readme, "make readme-models"
    assert "Qwen-Image" in text
    assert with_table(readme, text.replace("Qwen-Image", "another")) != readme


def test_a_page_with_a_wrong_case_gives_no_table() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| Krea 2 |"))
    with pytest.raises(ValueError, match="wrong cases of Krea 2"):
        table(page.replace(row, row.removesuffix("| 0 |") + "| 1 |"))


def test_a_family_that_nobody_has_sorted_is_named() -> None:
    with pytest.raises(KeyError, match="Quux"):
        table(DOCUMENT.read_text(encoding="utf-8").replace("| Krea 2 | `", "| Quux | `"))
