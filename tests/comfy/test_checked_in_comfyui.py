"""Parts of the pack that ask ComfyUI, each called in a ComfyUI that is loaded once: the scripts of `checked`."""

from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).with_name("checked").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_each_part_gives_is_as_the_script_asserts(script: Path, in_comfyui) -> None:
    in_comfyui(script)
