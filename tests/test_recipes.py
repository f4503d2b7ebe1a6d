"""The Dockerfile, the compose file, the workflow and docs/recipes.md name the same files, version and port."""

import re
from pathlib import Path

from host.fetch import WRITTEN_WITH

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE, COMPOSE, RECIPES = (
    (ROOT / path).read_text(encoding="utf-8")
    for path in ("docker/Dockerfile", "docker/compose.yaml", "docs/recipes.md")
)
PORT = "8188"


def test_a_container_has_the_pack_where_its_steps_look_for_it() -> None:
    (folder,) = re.findall(r"^COPY \. (\S+)$", DOCKERFILE, re.MULTILINE)
    assert f"pip install -r {folder}/requirements.txt" in DOCKERFILE
    assert f"/opt/ComfyUI/{folder}" in RECIPES
    assert "/opt/ComfyUI/models" in COMPOSE
    assert "/opt/ComfyUI/models" in RECIPES


def test_one_version_and_one_port_are_named() -> None:
    (version,) = re.findall(r"^ARG COMFYUI=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert f"--branch {version} " in RECIPES
    assert f"COMFYUI=v{WRITTEN_WITH}" in RECIPES, "the version that others may take instead is a tested one"
    assert f"127.0.0.1:{PORT}:{PORT}" in COMPOSE
    assert f"127.0.0.1:{PORT}:{PORT}" in RECIPES
    assert {*re.findall(r"\b8\d{3}\b", DOCKERFILE)} == {PORT}


def test_a_container_leaves_out_what_the_archive_leaves_out() -> None:
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    folders = [
        line.rstrip("/") for line in (ROOT / ".comfyignore").read_text(encoding="utf-8").split() if line[-1] == "/"
    ]
    assert {*folders} <= {*ignored}
