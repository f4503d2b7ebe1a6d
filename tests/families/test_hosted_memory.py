"""What replicated weights take in the ranks of a real server: the file's own pages.

Does not own: what ComfyUI frees, a run that is cancelled, a rank that is killed (comfy/test_nodes_memory.py,
test_nodes_cancel.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from host.client import ComfyClient
from host.layouts import Row
from host.pack_workflows import latent_of
from host.server import ComfyServer
from host.tiny_models import make_tensor, to_bytes, write_layout
from host.workers import worker_pids

from .comfy_classes import shapes_of
from .hosted import ours, small
from .wan import wan_file

LARGE = wan_file("large", "t2v", heads=5, seed=50, dim=640, ffn_dim=2560, num_layers=12, freq_dim=256)


@pytest.fixture(scope="module")
def large(family_models: Path) -> Iterator[Path]:
    """A Wan file of 330 MB whose blocks all repeat the first."""
    made: dict[str, bytes] = {}

    def values_of(row: Row) -> bytes:
        row = replace(row, name=re.sub(r"blocks\.\d+\.", "blocks.0.", row.name))
        if row.name not in made:
            made[row.name] = to_bytes(make_tensor(row, seed=LARGE.seed))
        return made[row.name]

    path = family_models / "diffusion_models" / LARGE.name
    shapes = shapes_of({LARGE.name: (LARGE.class_path, LARGE.arguments)})[LARGE.name]
    write_layout(path, LARGE.rows(shapes), seed=LARGE.seed, metadata=LARGE.metadata, values_of=values_of)
    yield path
    path.unlink()


def anonymous_bytes(server: ComfyServer) -> list[int]:
    """Each rank's memory that no file stands for."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in worker_pids(server)]
    return [int(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024 for text in texts]


def test_replicated_weights_stay_in_the_files_own_pages(
    hosted_client: ComfyClient, hosted_server: ComfyServer, large: Path
) -> None:
    graph = ours(small(seed=60, steps=1))
    latent_of(hosted_client, graph)  # ComfyUI is imported, buffers are there
    before = anonymous_bytes(hosted_server)
    graph["model"]["inputs"]["unet_name"] = large.name
    latent_of(hosted_client, graph)
    grown = [now - then for now, then in zip(anonymous_bytes(hosted_server), before, strict=True)]
    assert max(grown) < 150 * 2**20 < large.stat().st_size / 2, grown
