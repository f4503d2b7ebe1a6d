"""SP Config's `machines`: another machine joins while the node waits, and the image is the one of stock nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from host import workflows
from host.client import ComfyClient
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, to_latent
from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import TinyModels

HERE = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def joining(address: str, token: Path, models: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`join` with one rank on the CPU, as a newcomer types it."""
    arguments = ["--token-file", str(token), "--devices", "cpu:1", "--name", "shelf", "--models", str(models)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "parallel_runtime", "join", address, *arguments],
            cwd=PACK_ROOT,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": str(PACK_ROOT)},
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.full
def test_an_image_over_two_machines_equals_stock_and_the_next_one_does_without_a_machine_that_has_gone(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    graph = workflows.text_to_image(tiny_models, steps=2)
    address = f"{HERE}:{free_port()}"
    ours = parallel(graph, mode="manual", devices="cpu:1", ring=2, machines=address)
    with ComfyServer(models=tiny_models.models) as server:
        client = ComfyClient(server.url)
        stock = latent_of(client, graph)
        token = server.base / "user" / "parallel_dit" / "join-token"
        token.parent.mkdir(parents=True)
        token.write_text("0123456789abcdef" * 2)
        token.chmod(0o600)
        with joining(address, token, tiny_models.models, tmp_path / "log"):
            assert relative_error(latent_of(client, ours), stock) <= TOLERANCE, (tmp_path / "log").read_text()
            others = parallel(graph, mode="manual", devices="cpu:1", ring=2, machines=address, pipefusion=1)
            others["sampler"]["inputs"]["seed"] = 5
            client.queue(to_latent(others)).require_success()
            assert "starting 1 ranks of 2" in (tmp_path / "log").read_text()
        alone = parallel(graph, mode="manual", devices="cpu:1", ring=2, machines=address)
        assert relative_error(latent_of(client, alone), stock) <= TOLERANCE
