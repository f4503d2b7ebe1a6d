"""Training the demo's model: a few steps on a CPU, cut and resumed, with what it writes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo import networks, train
from demo.glyphs import GLYPH, write_glyphs
from demo.train import main, parse_arguments
from demo.words import THINGS, combinations

STEPS = 4


@pytest.fixture
def glyphs(tmp_path: Path) -> Path:
    """Glyphs as the font's would be, without the font: a disc of another colour for each thing."""
    axis = torch.linspace(-1, 1, GLYPH)
    disc = (axis[:, None] ** 2 + axis**2 < 1).float()
    colours = torch.rand(len(THINGS), 3, 1, 1, generator=torch.Generator().manual_seed(0))
    drawn = torch.cat((colours * disc, disc.expand(len(THINGS), 1, -1, -1)), 1)
    save_file({"glyphs": (drawn * 255).byte()}, tmp_path / "glyphs.safetensors")
    return tmp_path / "glyphs.safetensors"


def options(folder: Path, glyphs: Path, *more: str) -> Namespace:
    """The smallest training that has every part; its three networks take a second a step."""
    small = ["--width", "128", "--depth", "1", "--single", "1", "--variants", "1", "--judged", "5", "--cfg", "2"]
    for name in ("autoencoder", "classifier", "transformer"):
        small += [f"--{name}-steps", str(STEPS), f"--{name}-batch", "4"]
    folders = ["--glyphs", str(glyphs), "--output", str(folder / "out"), "--state", str(folder / "state")]
    return parse_arguments([*small, *folders, "--save-every", "2", *more])


class CutError(Exception):
    """Stands for whatever ends a training."""


@pytest.mark.slow
def test_a_training_that_was_cut_goes_on_to_the_same_files(
    tmp_path: Path, glyphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = combinations()[0][::100], combinations()[1]
    monkeypatch.setattr(train, "combinations", lambda: few)
    figures = main(options(tmp_path / "whole", glyphs))
    saved, save = [], networks.save

    def cut(network: torch.nn.Module, path: Path) -> None:
        save(network, path)
        saved.append(path)
        if len(saved) in (1, 4):  # in the middle of the autoencoder, then behind the classifier's first state
            raise CutError

    monkeypatch.setattr(networks, "save", cut)
    for _ in range(2):
        with pytest.raises(CutError):
            main(options(tmp_path / "cut", glyphs))
    main(options(tmp_path / "cut", glyphs))
    names = ("demo_autoencoder", "demo_classifier", "demo_transformer")
    for name in names:
        whole, resumed = (load_file(tmp_path / kind / "out" / f"{name}.safetensors") for kind in ("whole", "cut"))
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole), name
        assert all(value.dtype == torch.bfloat16 for value in whole.values())
    main(options(tmp_path / "cut", glyphs, "--output", str(tmp_path / "elsewhere")))  # from finished states
    for name in names:
        again, resumed = (load_file(tmp_path / kind / f"{name}.safetensors") for kind in ("elsewhere", "cut/out"))
        assert all(torch.equal(again[key], resumed[key]) for key in resumed), name
    assert set(figures["drawn"]["cfg 2"]) == {"thing", "colour", "place", "all", "wrong"}
    assert json.loads((tmp_path / "whole" / "out" / "evaluation.json").read_text()) == figures
    with pytest.raises(ValueError, match="another --state"):
        main(options(tmp_path / "cut", glyphs, "--autoencoder-lr", "0.5"))


def test_without_the_font_drawing_glyphs_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="apt install fonts-noto-color-emoji"):
        write_glyphs(tmp_path / "glyphs.safetensors", tmp_path / "missing.ttf")


def test_training_without_glyphs_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="apt install fonts-noto-color-emoji, then python -m demo.glyphs"):
        main(options(tmp_path, tmp_path / "glyphs.safetensors"))
