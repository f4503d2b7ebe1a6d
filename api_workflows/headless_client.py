"""Queue a workflow on a ComfyUI server, follow it, and download what it made: images and timing reports.

Standard library only. Example:

    python headless_client.py z_image_turbo.json --server http://127.0.0.1:8188 --set sampler.seed=11 --output out

Exit status: 0 when the images are in the output folder, 1 when the prompt failed or made none, 2 when the server
refused it or a part of it, or there is none.
"""

import argparse
import base64
import io
import json
import os
import re
import socket
import struct
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10  # opcodes of RFC 6455
PROGRESS_TEXT = 3  # ComfyUI's binary event that carries a node's text


class WebSocket:
    """A client's end of one websocket connection (RFC 6455), enough to read what a server sends."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port or 80), timeout_s)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {parts.path}?{parts.query} HTTP/1.1", f"Host: {parts.netloc}", "Upgrade: websocket"]
        lines += ["Connection: Upgrade", f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self._socket.sendall("\r\n".join(lines).encode())
        self._file = self._socket.makefile("rb")
        status = self._file.readline()
        if b" 101 " not in status:
            raise ConnectionError(f"{url} did not open a websocket: {status.decode(errors='replace').strip()}")
        while self._file.readline().strip():
            pass

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Opcode (TEXT or BINARY) and payload of each message, until the server closes."""
        kind, whole = 0, b""
        while True:
            final, opcode, payload = self._frame()
            if opcode == PING:
                self._send(PONG, payload)
            elif opcode == CLOSE:
                return
            elif opcode != PONG:
                kind, whole = (opcode or kind), whole + payload
                if final:
                    yield kind, whole
                    whole = b""

    def close(self) -> None:
        """Drop the connection."""
        self._file.close()
        self._socket.close()

    def _frame(self) -> tuple[bool, int, bytes]:
        first, second = self._read(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack(">H", self._read(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", self._read(8))
        return bool(first & 0x80), first & 0x0F, self._read(length)

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise ConnectionError("the server closed the connection in the middle of a message")
        return data

    def _send(self, opcode: int, payload: bytes) -> None:
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        self._socket.sendall(bytes([0x80 | opcode, 0x80 | len(payload)]) + mask + masked)


class Server:
    """A ComfyUI server's HTTP API; `url` without a slash at the end."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # As the WebSocket: a proxy of the environment (http_proxy) would be asked for 127.0.0.1.
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, **query: str) -> bytes:
        """Body of a GET."""
        with self._direct.open(f"{self.url}{path}?{urllib.parse.urlencode(query)}") as answer:
            return answer.read()

    def queue(self, workflow: dict[str, Any], client_id: str) -> tuple[str, str]:
        """Queue a workflow in API form; returns its prompt id, and what the server says of outputs that it leaves out.

        Raises `urllib.error.HTTPError` when refused.
        """
        body = json.dumps({"prompt": workflow, "client_id": client_id}).encode()
        request = urllib.request.Request(f"{self.url}/prompt", body, {"Content-Type": "application/json"})  # noqa: S310
        with self._direct.open(request) as answer:
            said = answer.read().decode()
        found = json.loads(said)
        return found["prompt_id"], refusal(said) if found.get("node_errors") else ""

    def outputs(self, prompt_id: str) -> dict[str, Any]:
        """What each node put out. The history is written a moment after the prompt's last event."""
        for _ in range(100):
            history = json.loads(self.get(f"/history/{prompt_id}"))
            if prompt_id in history:
                return history[prompt_id]["outputs"]
            time.sleep(0.1)
        raise TimeoutError(f"{self.url} has no history of prompt {prompt_id} 10 s after its end")


def follow(socket_: WebSocket, prompt_id: str) -> str:
    """Print progress until the prompt ends. Returns "" or the error's text."""
    for kind, payload in socket_.messages():
        if kind == BINARY:
            if struct.unpack(">I", payload[:4]) == (PROGRESS_TEXT,):
                (length,) = struct.unpack(">I", payload[4:8])
                say(payload[8 + length :].decode())
            continue
        message = json.loads(payload)
        name, data = message["type"], message["data"]
        if name == "progress":
            say(f"{data['node']}: {data['value']} of {data['max']}")
        elif data.get("prompt_id") == prompt_id and name == "execution_success":
            return ""
        elif data.get("prompt_id") == prompt_id and name == "execution_error":
            return f"{data['node_type']} (node {data['node_id']}): {data['exception_message']}"
        elif data.get("prompt_id") == prompt_id and name == "execution_interrupted":
            return f"interrupted in {data['node_type']} (node {data['node_id']})"
    return "the server closed the connection"


def save(server: Server, outputs: dict[str, Any], folder: Path, prompt_id: str) -> int:
    """Write images, charts, files and timing reports into `folder`. Returns the number of images and files."""
    folder.mkdir(parents=True, exist_ok=True)
    items = [item for output in outputs.values() for kind in ("images", "files") for item in output.get(kind, [])]
    for item, name in zip(items, local_names(items), strict=True):
        target = folder / name
        target.write_bytes(server.get("/view", **{key: item[key] for key in ("filename", "subfolder", "type")}))
        say(f"saved {target}")
    reports = {node: output["parallel_dit"] for node, output in outputs.items() if "parallel_dit" in output}
    for node, found in reports.items():
        if any(report.get("prompt_id", prompt_id) != prompt_id for report in found):
            say(f"{node}: served from the server's cache, its times are of an earlier prompt")
    if reports:
        target = folder / "timing.json"
        target.write_text(json.dumps(reports, indent=2), encoding="utf-8")
        say(f"saved {target}")
    return len(items)


def local_names(items: list[dict[str, str]]) -> list[str]:
    """A name for each of the server's files, all within one folder: its own, with more to it where two are alike.

    Whatever the server says, a name leads to no other folder.
    """
    names = ["timing.json"]
    for item in items:
        path = re.split(r"[/\\]", f"{item['subfolder']}/{item['filename']}")
        parts = [part for part in path if part.strip(".")] or ["unnamed"]
        choices = (parts[-1], "_".join(parts), f"{len(names)}_{parts[-1]}")
        names.append(next(name for name in choices if name not in names))
    return names[1:]


def refusal(body: str) -> str:
    """What the server says of a workflow that it refuses, a line for each input; the body itself if it is no such."""
    try:
        answer = json.loads(body)
        found = [
            f"refused: {answer['node_errors'][node]['class_type']} (node {node}): {each['message']}: {each['details']}"
            for node in answer["node_errors"]
            for each in answer["node_errors"][node]["errors"]
        ]
        return "\n".join(found) or f"refused: {answer['error']['message']}: {answer['error']['details']}"
    except (ValueError, TypeError, LookupError):
        return f"refused: {body}"


def read(path: Path) -> dict[str, Any]:
    """A workflow in API form. Raises `ValueError` for another file, as what the editor saves."""
    workflow = json.loads(path.read_text(encoding="utf-8-sig"))  # ComfyUI's own, whatever this system's is
    if not isinstance(workflow, dict) or not all(
        isinstance(node, dict) and "class_type" in node for node in workflow.values()
    ):
        raise ValueError("not every entry is a node with a class_type")
    return workflow


def with_settings(workflow: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Apply NODE.INPUT=VALUE settings; a value that is JSON is taken as such, anything else as text."""
    for setting in settings:
        target, _, text = setting.partition("=")
        node, _, name = target.partition(".")
        if node not in workflow:
            raise SystemExit(f"--set {setting}: no node {node!r}; the workflow has {', '.join(workflow)}")
        try:
            workflow[node]["inputs"][name] = json.loads(text)
        except json.JSONDecodeError:
            workflow[node]["inputs"][name] = text
    return workflow


def say(text: str) -> None:
    """Print at once, so that progress shows through a pipe too; nothing that would steer the terminal."""
    print("".join(each if each.isprintable() or each in "\n\t" else "?" for each in text), flush=True)  # noqa: T201


def asked() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options of the command line, and the workflow with its settings; ends where they cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow", type=Path, help="a workflow in API form")
    parser.add_argument("--server", default="http://127.0.0.1:8188")
    parser.add_argument("--set", action="append", default=[], metavar="NODE.INPUT=VALUE", dest="settings")
    parser.add_argument("--output", type=Path, default=Path("output"))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of silence before giving up")
    options = parser.parse_args()
    try:
        workflow = with_settings(read(options.workflow), options.settings)
    except (OSError, ValueError) as error:
        parser.error(f"{options.workflow} is no workflow in API form (Export (API) in ComfyUI's menu): {error}")
    if not options.server.startswith("http://"):
        parser.error(f"--server {options.server}: only http:// is spoken; use ssh -L 8188:127.0.0.1:8188 MACHINE")
    return options, workflow


def main() -> int:
    """The command line; see the module's text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal need not know every character
    options, workflow = asked()
    server = Server(options.server)
    client_id = uuid.uuid4().hex
    address = "ws" + server.url.removeprefix("http") + f"/ws?clientId={client_id}"
    try:
        websocket = WebSocket(address, options.timeout)
    except OSError as error:
        say(f"no ComfyUI answers at {server.url} ({error}); start it, or give its address with --server")
        return 2
    try:
        prompt_id, refused_part = server.queue(workflow, client_id)
        if refused_part:
            say(refused_part)
        error = follow(websocket, prompt_id)
    except urllib.error.HTTPError as refused:
        say(refusal(refused.read().decode(errors="replace")))
        return 2
    except OSError as lost:
        silent = isinstance(lost, TimeoutError)
        say(
            f"nothing was heard for {options.timeout:g} s, and the prompt may still run; raise --timeout"
            if silent
            else f"the connection to {server.url} was lost ({lost}); the prompt may still run"
        )
        return 1
    finally:
        websocket.close()
    if error:
        say(error)
        return 1
    saved = save(server, server.outputs(prompt_id), options.output, prompt_id)
    if not saved:
        say("the prompt ended, and no image or file came of it")
    return 2 if refused_part else 0 if saved else 1


if __name__ == "__main__":
    sys.exit(main())
