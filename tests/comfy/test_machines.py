"""SP Config's `machines`: another machine joins while the node waits, and the image is the one of stock nodes.

The address is open while prompts ask for it: nothing listens after one that does not, nor after Stop listening.
"""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from comfy.test_panel_routes import settled
from rounding import ROUNDING

from host import workflows
from host.client import ComfyClient
from host.fetch import comfyui_path
from host.pack_workflows import latent_of, parallel, relative_error, to_latent
from host.server import PACK_ROOT, ComfyServer, free_port
from host.tiny_models import TinyModels
from host.workers import command

HERE = "127.0.0.1"


def listening(server: ComfyServer) -> set[str]:
    """Where the server's process listens, and what it has for machines; its own ranks meet on loopback."""
    own = psutil.Process(server.pid)
    relays = [child for child in own.children() if "parallel_runtime.machines.relay" in command(child)]
    pids = {process.pid for process in (own, *relays)}
    found = [each for each in psutil.net_connections("inet") if each.pid in pids and each.status == "LISTEN"]
    return {f"{each.laddr.ip}:{each.laddr.port}" for each in found if each.type == socket.SOCK_STREAM}


@contextmanager
def joining(address: str, token: Path, models: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`join` with one rank on the CPU, as a newcomer types it."""
    arguments = ["--token-file", str(token), "--devices", "cpu:1", "--name", "shelf", "--models", str(models)]
    arguments += ["--comfyui", str(comfyui_path())]
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
        process.wait(120)


@pytest.mark.full
def test_an_image_over_two_machines_equals_stock_and_nothing_listens_once_no_prompt_asks_for_it(
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
        before = listening(server)
        with joining(address, token, tiny_models.models, tmp_path / "log"):
            assert relative_error(latent_of(client, ours), stock) <= ROUNDING, (tmp_path / "log").read_text()
            others = parallel(graph, mode="manual", devices="cpu:1", ring=2, machines=address, pipefusion=1)
            others["sampler"]["inputs"]["seed"] = 5
            client.queue(to_latent(others)).require_success()
            assert "starting 1 ranks of 2" in (tmp_path / "log").read_text()
            assert address in listening(server) - before  # with the store and gloo, while ranks live
            here = parallel(graph, mode="manual", devices="cpu:1", ring=1)
            assert relative_error(latent_of(client, here), stock) <= ROUNDING
            assert listening(server) == before
            assert "it closed the connection" in (tmp_path / "log").read_text()
            others["sampler"]["inputs"]["seed"] = 6
            client.queue(to_latent(others)).require_success()  # which offers the address again
            assert (tmp_path / "log").read_text().count("starting 1 ranks of 2") == 2
            client.post("/parallel_dit/stop_listening", {})  # the panel's button
            settled(client, lambda state: state["action"] is None)
            assert listening(server) == before
            others["sampler"]["inputs"]["seed"] = 7
            client.queue(to_latent(others)).require_success()
            assert (tmp_path / "log").read_text().count("starting 1 ranks of 2") == 3
        alone = parallel(graph, mode="manual", devices="cpu:1", ring=2, machines=address)
        assert relative_error(latent_of(client, alone), stock) <= ROUNDING


def test_a_disk_without_room_leaves_no_empty_token(module_of_pack, monkeypatch, tmp_path) -> None:
    machines = module_of_pack("nodes.host.panel.machines")
    monkeypatch.setattr(machines, "refuse_off", lambda _: None)
    monkeypatch.setattr(machines, "folder_paths", SimpleNamespace(get_user_directory=lambda: str(tmp_path)))

    def full(_: int) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as written:
        written.setattr(machines.secrets, "token_hex", full)
        with pytest.raises(
            ValueError, match=r"written to \S+join-token \(No space left on device\); free space there, "
        ):
            machines.token_file()
    token = machines.token_file()
    assert len(token.read_text()) >= 32 and token.stat().st_mode & 0o77 == 0
    assert machines.token_file().read_text() == token.read_text()
