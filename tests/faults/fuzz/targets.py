"""What is fuzzed: the wire's decoder with the segments behind it, requests and replies, and a weights file's header.

Owns what must hold of each. They get what is not only random: a message's counts and a header's length are made right
again for half of the inputs, or nearly all of them would be refused for that alone; a request's or a reply's text
always comes in a message that is one.
"""

import json
import os
import struct
from dataclasses import fields
from pathlib import Path

from pool.messages import CASES, REPLIES

from parallel_runtime.wire.protocol import HEADER, MAGIC, VERSION, Message, Op, ProtocolError, decode, encode
from parallel_runtime.wire.replies import Hello

from .fuzzer import Target
from .marking import Edges, marked_module

SEGMENT_BYTES = 1 << 14
MAX_REFUSAL_CHARS = 6000  # a program or a plan may say which of its own numbers do not go together
KINDS = sorted({type(each) for each in (*CASES, *REPLIES)}, key=lambda kind: kind.__name__)
JSON_WORDS = (*b'{ } [ ] , : " -1 1e999 NaN true null \\ud800'.split(), b"9" * 40, b"9" * 400)
HEADER_WORDS = (
    *(b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"F32"', b'"BF16"', b'"F8_E4M3"', b"[0,4]", b"[]"),
    b'"y":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},',
)


def wire() -> Target:
    """`decode`, and each tensor of an accepted message looked up in a small segment."""
    edges = Edges()
    protocol = marked_module("parallel_runtime.wire.protocol", edges)
    channel = marked_module("parallel_runtime.wire.channel", edges)
    segment, fd = channel.Segment.create(SEGMENT_BYTES)
    os.close(fd)
    table = channel.SegmentTable(segment)
    refusals = (protocol.ProtocolError, channel.ProtocolError)

    def run(data: bytes) -> bool:
        if data[-1:] < b"\x80":
            data = _with_text_bytes(protocol, data)
        try:
            message = protocol.decode(data)
        except protocol.ProtocolError:
            return False
        if protocol.decode(protocol.encode(message)) != message:
            raise AssertionError("another message came back")
        for spec in message.tensors:
            try:
                view = table.tensor(spec)
            except refusals:
                continue
            _within(view, segment, control_bytes=channel.CONTROL_BYTES)
        return True

    op, spec = protocol.Op, protocol.TensorSpec
    specs = (spec("x", "float32", (2, 3), 0, 4096), spec("y.1", "bfloat16", (5,), 0, 8192))
    messages = [
        protocol.Message(op.STEP, 1, 2, 3, {"model": 1, "options": {"a": [1.5, None]}}, specs),
        protocol.Message(op.HELLO, 0, 1, 0, {"pid": 4}),
        protocol.Message(op.ATTACH, 3, 1, 0, {"segment": 0, "num_bytes": 1 << 20, "drop": []}),
        protocol.Message(op.CHANGE, 0, 1, 9, {"records": [{"key": "a.weight", "values": ["patch.0", 2.0]}]}, specs[:1]),
    ]
    return Target("wire", edges, run, [protocol.encode(each) for each in messages], JSON_WORDS)


def records() -> Target:
    """Every kind of request and reply, read from the text of a message; the first byte says which kind."""
    edges = Edges()
    own = marked_module("parallel_runtime.wire.records", edges)

    def run(data: bytes) -> bool:
        kind = KINDS[data[0] % len(KINDS)] if data else Hello
        message = HEADER.pack(MAGIC, VERSION, Op.DONE, 0, 1, len(data[1:]), 1, 0) + data[1:]
        try:
            record = own.from_body(kind, decode(message).body, kind.__name__)
        except ProtocolError as error:
            if "\n" in str(error) or len(str(error)) > MAX_REFUSAL_CHARS:
                raise AssertionError(f"a message of {len(str(error))} characters in several lines") from error
            return False
        back = decode(encode(Message(Op.DONE, 0, 1, 1, own.to_body(record)))).body
        if own.from_body(kind, back, kind.__name__) != record:
            raise AssertionError("another record came back")
        return True

    seeds = [bytes([KINDS.index(type(each))]) + json.dumps(own.to_body(each)).encode() for each in (*CASES, *REPLIES)]
    names = sorted({field.name for kind in KINDS for field in fields(kind)})
    return Target("requests and replies", edges, run, seeds, (*JSON_WORDS, *(f'"{name}":'.encode() for name in names)))


def control() -> Target:
    """What a machine with the token may say, and what ComfyUI's side says to it, whole frames and broken ones.

    The first byte says whose words they are, and whether they come as a frame that is theirs or as they are.
    """
    edges = Edges()
    connection = marked_module("parallel_runtime.machines.connection", edges)
    said = marked_module("parallel_runtime.machines.messages", edges)
    kinds = (said.FROM_MACHINE, said.FROM_SERVER)

    def session(*, ours: bytes, theirs: bytes) -> object:
        return connection.Session(b"token", bytes(32), bytes(32), ours=ours, theirs=theirs)

    def run(data: bytes) -> bool:
        first, text = data[:1] or b"\0", data[1:]
        theirs, ours = session(ours=b"them", theirs=b"us"), session(ours=b"us", theirs=b"them")
        if first[0] & 2:
            code = connection.hmac.digest(theirs._our_key, connection.NUMBER.pack(0) + text, "sha256")
            text = connection.HEAD.pack(len(text), code) + text
        try:
            messages = [said.from_frame(kinds[first[0] & 1], frame) for frame in ours.take(text)]
            sent = b"".join(theirs.frame(said.to_frame(message)) for message in messages)
        except ProtocolError as error:
            if "\n" in str(error) or len(str(error)) > MAX_REFUSAL_CHARS:
                raise AssertionError(f"a message of {len(str(error))} characters in several lines") from error
            return False
        back = session(ours=b"us", theirs=b"them").take(sent)
        if [said.from_frame(kinds[first[0] & 1], frame) for frame in back] != messages:
            raise AssertionError("another message came back")
        return bool(messages)

    identity = said.FileIdentity("flux/a.safetensors", 10, "ab", "cd")
    start = said.StartGeneration(1, "10.0.0.1", 5000, 4, 2, ("cuda:0", "cuda:1"), 1, 60.0, "10.0.0.2", engine="a:B")
    intro = said.Introduction("attic", ("cuda:0",), ("H100",), said.Versions("1", "2.9.0", nccl="2.27"), 77)
    machine = (intro, said.GenerationEnded(1, -9, "words"), said.FoundFile(1, "/a", 3, 4), said.Beat())
    server = (start, said.Welcome(20.0), said.Refused("why"), said.KillGeneration(1), said.FindFile(1, identity))
    seeds = [
        bytes([2 + side]) + json.dumps(said.to_frame(each)).encode()
        for side in (0, 1)
        for each in (machine, server)[side]
    ]
    names = sorted({field.name for kind in {**kinds[0], **kinds[1]}.values() for field in fields(kind)})
    words = [f'"{name}"'.encode() for name in (*kinds[0], *kinds[1], *names, "kind", "body")]
    return Target("control connection", edges, run, seeds, (*JSON_WORDS, *words))


def header(folder: Path) -> Target:
    """`read_header` of a file in `folder`."""
    edges = Edges()
    checkpoint = marked_module("parallel_runtime.checkpoint", edges)
    path = folder / "fuzzed.safetensors"
    file = os.memfd_create("fuzzed")  # a disk would take most of the time
    path.symlink_to(f"/proc/{os.getpid()}/fd/{file}")

    def run(data: bytes) -> bool:
        if data[-1:] < b"\x80":
            data = _with_length(data)
        os.ftruncate(file, 0)
        os.pwrite(file, data, 0)
        try:
            found = checkpoint.read_header(path)
        except ValueError as error:
            if "\n" in str(error) or len(str(error)) > 3000:
                raise AssertionError(f"a message of {len(str(error))} characters in several lines") from error
            return False
        _covers(found, len(data))
        return True

    tensors = {"x": ("F32", [3, 2]), "y": ("BF16", [5]), "z": ("F8_E4M3", [0, 4])}
    return Target(
        "safetensors header", edges, run, [_file(tensors), _file({}), _file({"a": ("I64", [])})], HEADER_WORDS
    )


def _with_text_bytes(protocol: object, data: bytes) -> bytes:
    """The message with its length of text made right."""
    layout, entry = vars(protocol)["HEADER"], vars(protocol)["ENTRY"]
    if len(data) < layout.size:
        return data
    fields = list(layout.unpack_from(data))
    fields[5] = max(0, len(data) - layout.size - fields[7] * entry.size) & 0xFFFFFFFF
    return bytes(layout.pack(*fields)) + data[layout.size :]


def _with_length(data: bytes) -> bytes:
    """The file with its header's length made right, up to the last closing brace."""
    end = data.rfind(b"}") + 1
    return struct.pack("<Q", end - 8) + data[8:] if end > 8 else data


def _file(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8}
    entries, start = {}, 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = sizes[dtype]
        for size in shape:
            num_bytes *= size
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + num_bytes]}
        start += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(start)


def _within(view: object, segment: object, *, control_bytes: int) -> None:
    """The view lies in the segment behind its control page, or is empty."""
    import torch

    if not isinstance(view, torch.Tensor) or view.numel() == 0:
        return
    whole = torch.frombuffer(vars(segment)["_map"], dtype=torch.uint8)
    start = view.data_ptr() - whole.data_ptr()
    if start < control_bytes or start + view.nbytes > whole.nbytes:
        raise AssertionError(f"bytes {start} to {start + view.nbytes} of a segment of {whole.nbytes}")


def _covers(found: object, file_size: int) -> None:
    """The tensors of an accepted header lie in the file one after the other, to its end."""
    entries = sorted((entry.start, entry.end, entry) for entry in vars(found)["tensors"].values() if entry.num_bytes)
    position = entries[0][0] if entries else file_size
    for start, end, entry in entries:
        num_bytes = entry.dtype.itemsize
        for size in entry.shape:
            num_bytes *= size
        if start != position or end - start != num_bytes:
            raise AssertionError(f"{entry} after byte {position}")
        position = end
    if position != file_size:
        raise AssertionError(f"tensors end at byte {position} of {file_size}")
