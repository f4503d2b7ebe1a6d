"""A headless ComfyUI client with a plain, synchronous face: queue a prompt, see what happened, fetch what came out."""

from __future__ import annotations

import asyncio
import io
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from PIL import Image

from parallel_runtime.report.schema import validate

Workflow = dict[str, dict[str, Any]]
PREVIEW, TEXT, PREVIEW_WITH_METADATA = 1, 3, 4  # ComfyUI's BinaryEventTypes
NOTHING: Workflow = {
    "image": {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}},
    "preview": {"class_type": "PreviewImage", "inputs": {"images": ["image", 0]}},
}
ENDS = {"execution_success": "success", "execution_error": "error", "execution_interrupted": "interrupted"}


class PromptRefusedError(ValueError):
    """The server refused the workflow; the text lists what is wrong with which node. `body` is the whole answer.

    `workflow`: what was refused.
    """

    def __init__(self, body: dict[str, Any], workflow: Workflow | None = None) -> None:
        self.body, self.workflow = body, workflow or {}
        error = body.get("error", {})
        lines = [f"{error.get('message')}: {error.get('details')}" if isinstance(error, dict) else str(error)]
        for node_id, node in body.get("node_errors", {}).items():
            for each in node["errors"]:
                lines.append(f"node {node_id} ({node['class_type']}): {each['message']}: {each['details']}")
        super().__init__("\n".join(lines))


class ServerGoneError(ConnectionError):
    """The server closed the connection while a prompt was running."""


@dataclass(frozen=True)
class Event:
    """One websocket message: seconds since the prompt was queued, its type, its data."""

    t_s: float
    type: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """One progress report: seconds since the prompt was queued, the node, and `value` of `max`."""

    t_s: float
    node: str
    value: int
    max: int


@dataclass
class PromptResult:
    """What became of one prompt: `status` is "success", "error" or "interrupted"; `outputs` go by node id, then key."""

    prompt_id: str
    status: str = ""
    wall_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    previews: list[bytes] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    node_s: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    node_errors: dict[str, Any] = field(default_factory=dict)  # of outputs that are not valid where others are

    @property
    def error_type(self) -> str:
        """The exception's type, with its module where it has one; "" without an error."""
        return str(self.error.get("exception_type", ""))

    @property
    def error_message(self) -> str:
        """The exception's text; "" without an error."""
        return str(self.error.get("exception_message", "")).strip()

    @property
    def error_node(self) -> str:
        """The class of the node that failed; "" without an error."""
        return str(self.error.get("node_type", ""))

    def images(self) -> list[dict[str, str]]:
        """The saved images, each as `view` takes it."""
        return [item for output in self.outputs.values() for item in output.get("images", [])]

    def report(self, node: str = "sampler") -> dict[str, Any]:
        """The one report that a node of this id put out, as the schema says; the prompt must have succeeded."""
        (report,) = self.require_success().outputs[node]["parallel_dit"]
        validate(report)
        return dict(report)

    def error_line(self, node: str) -> str:
        """The first line of the error that a node of this class must have raised."""
        if (self.status, self.error_node) != ("error", node):
            raise AssertionError(f"prompt {self.status} {self.error_node}: {self.error_message}")
        return self.error_message.splitlines()[0]

    def require_success(self) -> PromptResult:
        """Returns itself; raises RuntimeError with the node, the message and the traceback when it did not succeed."""
        if self.status != "success":
            trace = "".join(self.error.get("traceback", []))
            raise RuntimeError(f"prompt {self.status} in {self.error_node}: {self.error_message}\n{trace}")
        return self


class ComfyClient:
    """Talks to the server at `url` (no slash at its end)."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        return json.loads(self.get_bytes(path, **query))

    def get_bytes(self, path: str, **query: str) -> bytes:
        """The body of a GET; raises urllib.error.HTTPError for a status that is not success."""
        address = f"{self.url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        with urllib.request.urlopen(address, timeout=300) as response:  # noqa: S310 (a loopback server of ours)
            return bytes(response.read())

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The body of the answer to a POST of JSON; raises urllib.error.HTTPError for a status that is not success."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(  # noqa: S310 (a loopback server of ours)
            f"{self.url}{path}", data=json.dumps(body).encode(), headers=headers
        )
        with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310
            return bytes(response.read())

    def object_info(self, node: str = "") -> dict[str, Any]:
        """The server's description of all nodes, or of one (empty when there is no such node)."""
        return dict(self.get(f"/object_info/{node}" if node else "/object_info"))

    def interrupt(self) -> None:
        """What the Cancel button does."""
        self.post("/interrupt", {})

    def free(self) -> None:
        """Has ComfyUI unload models and free memory before it runs another prompt.

        It does so when its queue next wakes, and after a prompt that it finds there then: so one of nothing is queued.
        """
        self.post("/free", {"unload_models": True, "free_memory": True})
        self.queue(NOTHING).require_success()

    def history(self, prompt_id: str) -> dict[str, Any]:
        """The server's record of a finished prompt; empty while it has none."""
        return dict(self.get(f"/history/{prompt_id}").get(prompt_id, {}))

    def view(self, item: dict[str, str]) -> bytes:
        """The bytes of a file a node reported."""
        return self.get_bytes("/view", **{key: item[key] for key in ("filename", "subfolder", "type")})

    def image(self, item: dict[str, str]) -> Image.Image:
        """A reported image, decoded to RGB."""
        return Image.open(io.BytesIO(self.view(item))).convert("RGB")

    def upload_image(self, image: Image.Image, name: str) -> str:
        """Puts an image into the server's input folder and returns the name LoadImage takes."""
        return asyncio.run(self._upload(image, name))

    async def _upload(self, image: Image.Image, name: str) -> str:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        form = aiohttp.FormData()
        form.add_field("image", buffer.getvalue(), filename=name, content_type="image/png")
        form.add_field("overwrite", "true")
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/upload/image", data=form) as response:
            response.raise_for_status()
            return str((await response.json())["name"])

    def queue(
        self,
        workflow: Workflow,
        *,
        on_event: Callable[[Event], None] | None = None,
        timeout_s: float = 300.0,
        extra_data: dict[str, Any] | None = None,
    ) -> PromptResult:
        """Queues a workflow, with `extra_data` as an editor sends its graph, and waits for its end.

        `on_event` sees every message as it arrives and may call this client (to interrupt, for one). Raises
        PromptRefusedError when validation fails, ServerGoneError when the server ends, TimeoutError after `timeout_s`.
        """
        return asyncio.run(asyncio.wait_for(self._queue(workflow, on_event, extra_data or {}), timeout_s))

    async def _queue(
        self, workflow: Workflow, on_event: Callable[[Event], None] | None, extra_data: dict[str, Any]
    ) -> PromptResult:
        client_id = uuid.uuid4().hex
        async with aiohttp.ClientSession() as session:
            address = f"{self.url}/ws?clientId={client_id}"
            async with session.ws_connect(address, max_msg_size=0) as socket:
                start = time.monotonic()
                body = {"prompt": workflow, "client_id": client_id, "extra_data": extra_data}
                async with session.post(f"{self.url}/prompt", json=body) as response:
                    answer = await response.json()
                    if response.status != 200:
                        raise PromptRefusedError(answer, workflow)
                result = PromptResult(answer["prompt_id"], node_errors=answer.get("node_errors", {}))
                record = Recorder(result, start, on_event)
                async for message in socket:
                    if message.type == aiohttp.WSMsgType.BINARY:
                        record.binary(message.data)
                    elif message.type == aiohttp.WSMsgType.TEXT and record.text(json.loads(message.data)):
                        return await self._with_outputs(record.result)
        raise ServerGoneError(f"{self.url} closed the connection while prompt {answer['prompt_id']} was running")

    async def _with_outputs(self, result: PromptResult) -> PromptResult:
        for _ in range(1200):  # the history is written a moment after the last event
            history = await asyncio.to_thread(self.history, result.prompt_id)
            if history:
                result.outputs = history["outputs"]
                return result
            await asyncio.sleep(0.05)
        raise ServerGoneError(f"{self.url} has no history of prompt {result.prompt_id} a minute after its end")


class Recorder:
    """Turns the websocket's messages into a PromptResult."""

    def __init__(self, result: PromptResult, start: float, on_event: Callable[[Event], None] | None) -> None:
        self.result = result
        self._start = start
        self._on_event = on_event
        self._node: str | None = None
        self._node_start = start

    def binary(self, data: bytes) -> None:
        """Takes a preview or a node's progress text; other kinds are ignored."""
        kind = int.from_bytes(data[:4], "big")
        if kind in (PREVIEW, PREVIEW_WITH_METADATA):
            self.result.previews.append(data[4:])
        elif kind == TEXT:
            length = int.from_bytes(data[4:8], "big")
            self.result.texts.append((data[8 : 8 + length].decode(), data[8 + length :].decode()))

    def text(self, message: dict[str, Any]) -> bool:
        """Takes a JSON message and returns whether it ended the prompt."""
        now = time.monotonic()
        data = message["data"]
        event = Event(now - self._start, message["type"], data)
        self.result.events.append(event)
        if event.type == "executing":
            self._enter(data["node"], now)
        elif event.type == "execution_cached":
            self.result.cached += data["nodes"]
        elif event.type == "parallel_dit.text":
            self.result.texts.append((data["node_id"], data["text"]))
        elif event.type == "progress":
            self.result.progress.append(Progress(event.t_s, str(data.get("node")), data["value"], data["max"]))
        if self._on_event:
            self._on_event(event)
        if event.type not in ENDS or data["prompt_id"] != self.result.prompt_id:
            return False
        self._enter(None, now)
        self.result.status, self.result.wall_s = ENDS[event.type], event.t_s
        self.result.error = data if event.type != "execution_success" else {}
        return True

    def _enter(self, node: str | None, now: float) -> None:
        """Books the time since the last change on the node that ran until now."""
        if self._node is not None:
            self.result.node_s[self._node] = self.result.node_s.get(self._node, 0.0) + now - self._node_start
        self._node, self._node_start = node, now
