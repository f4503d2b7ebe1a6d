"""What the guide says of several machines where somebody decides by it what their network must be."""

from pathlib import Path

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "machines.md").read_text(encoding="utf-8")


def test_the_guide_says_which_weights_travel_unencrypted() -> None:
    assert "Weights never travel" not in GUIDE
    assert "patches of LoRAs and the VAE's weights do travel, from ComfyUI to each machine and unencrypted" in GUIDE


def test_the_guide_says_how_long_an_address_stays_open() -> None:
    assert "to the next prompt with an SP Config that names another one or none, to **Stop listening**" in GUIDE
