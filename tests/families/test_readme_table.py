"""README's table of models is what docs/models.md says."""

from __future__ import annotations

from tools.class_list import DOCUMENT
from tools.readme_table import README, table, with_table


def test_the_readme_has_the_table_that_the_page_gives() -> None:
    readme, text = README.read_text(encoding="utf-8"), table(DOCUMENT.read_text(encoding="utf-8"))
    assert with_table(readme, text) == readme, "make readme-models"
    assert "Qwen-Image" in text
    assert with_table(readme, text.replace("Qwen-Image", "another")) != readme
