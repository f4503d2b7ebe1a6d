"""docs/get_models.md and the templates' notes get what each template itself names, into the folders it looks in."""

import pytest

from tools.get_models import PAGE, as_page, files_of, note_of, problems
from tools.get_models import drawn as template
from tools.templates import TEMPLATES

FIRST = ["z_image_turbo", "krea2_turbo", "minimax_h3_t2v", "wan22_t2v", "qwen_image", "ltx2_t2v", "flux_parallel"]


def test_page_and_notes_get_what_the_templates_name() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert problems(page) == []
    assert page == as_page(), "run python -m tools.get_models --write"
    assert list(TEMPLATES)[: len(FIRST)] == FIRST, "what fits most cards comes first"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_note_is_what_the_template_is_said_to_be(name: str) -> None:
    assert note_of(template(name)) == TEMPLATES[name].note(files_of(name)), "run python -m tools.get_models --write"
