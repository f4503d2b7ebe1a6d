"""The messages between the parent and its ranks: one fixed layout, no pickle.

Owns the bytes of a message and every check a receiver makes before it believes one. Does not own how the bytes travel
or where tensors lie (channel.py), nor what a request means (pool/ and worker/).

A message is one packet, little endian, without padding::

    byte 0        4         5    6       8            12           16         24            28
         +--------+---------+----+-------+------------+------------+----------+-------------+
         | "PDiT" | version | op | rank  | generation | text bytes | request  | num tensors |
         |  4s    |  u8     | u8 |  u16  |   u32      |   u32      |   u64    |    u32      |
         +--------+---------+----+-------+------------+------------+----------+-------------+
         | num tensors x entry                                                              |
         +----------------------------------------------------------------------------------+
         | text: one JSON object, UTF-8                                                     |
         +----------------------------------------------------------------------------------+

    entry byte 0              24       32      33         34        36             60
               +--------------+--------+-------+----------+---------+--------------+
               | name         | offset | dtype | num dims | segment | shape        |
               | 24s, NUL pad |  u64   |  u8   |   u8     |  u16    | 6 x u32      |
               +--------------+--------+-------+----------+---------+--------------+

Unused bytes are zero, so a message has one encoding of its header and entries. `request` rises over the life of a pool,
`generation` with each start of its ranks: no reply can be taken for the answer to another request. Tensor data never
travels here: an entry says where it lies in which shared segment.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

from ..plan import MAX_RANKS

if TYPE_CHECKING:
    import torch

MAGIC = b"PDiT"
VERSION = 1
HEADER = struct.Struct("<4sBBHIIQI")
ENTRY = struct.Struct("<24sQBBH6I")

MAX_TENSORS = 1024
MAX_TEXT_BYTES = 96 * 1024
MAX_MESSAGE_BYTES = HEADER.size + MAX_TENSORS * ENTRY.size + MAX_TEXT_BYTES
MAX_NAME_BYTES = 24
MAX_DIMS = 6
MAX_SEGMENT_BYTES = 1 << 40
ALIGNMENT = 64  # bytes; every tensor starts on a cache line, which every dtype's alignment divides

# Codes are part of the layout: append, never renumber. Code 0 stays unused, so that zeroed bytes are no dtype.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_DTYPE_OF_CODE = dict(enumerate(DTYPE_BYTES, start=1))
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
_NAME = re.compile(r"[a-z0-9_.]{1,24}", re.ASCII)


class ProtocolError(ValueError):
    """A message, or what one is to be made of, breaks the layout above."""


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


class Op(IntEnum):
    """What a message says. A rank sends what replies.py has, and DONE; the parent sends the others."""

    HELLO = 1  # a rank's process runs, before it imports torch
    READY = 2  # its process group stands
    LOAD = 3
    UNLOAD = 4
    MESH = 5
    STEP = 6
    ATTACH = 7  # a shared segment, its descriptor rides along
    PROGRESS = 8
    DONE = 9
    ERROR = 10  # the last thing a rank says
    STOP = 11
    CHECK = 12  # exchange a known pattern over a mesh and count the bytes that arrived wrong
    CHANGE = 13  # change weights; a change takes one message or several
    SAMPLE = 15  # a whole sampling run; PROGRESS after each of its steps
    MEASURE = 14  # what the device is: memory and speed
    STRENGTHS = 21  # other strengths for LoRAs that run beside the weights
    TRIM = 22  # a sampling run has ended: give back memory that is only kept for later
    PROBE = 20  # measure the device, and the exchanges over a mesh's ulysses axis
    COMPILING = 23  # a rank begins to make a graph of a block, or has made it
    VAE = 25  # hold a VAE; its weights take one message or several
    DECODE = 26  # decode tiles of a latent
    CANCELLED = 24  # in place of DONE: a rank gave the request up, as it was told to


_OPS = frozenset(int(op) for op in Op)


@dataclass(frozen=True)
class TensorSpec:
    """Where a tensor lies: `offset` bytes into shared segment `segment`, contiguous.

    `name` is 1 to 24 of `[a-z0-9_.]`; `dtype` a torch dtype's name without "torch."; `shape` at most 6 dims;
    `offset` a multiple of 64. Raises ProtocolError for anything else.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    segment: int
    offset: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ProtocolError(f"tensor name {self.name!r} is not 1 to {MAX_NAME_BYTES} of [a-z0-9_.]; rename it")
        if self.dtype not in DTYPE_BYTES:
            raise ProtocolError(f"tensor {self.name}: dtype {self.dtype!r} cannot travel; use {', '.join(DTYPE_BYTES)}")
        if len(self.shape) > MAX_DIMS:
            raise ProtocolError(f"tensor {self.name}: {len(self.shape)} dims, at most {MAX_DIMS}; reshape it")
        if any(dim < 0 or dim >= 1 << 32 for dim in self.shape):
            raise ProtocolError(f"tensor {self.name}: shape {self.shape} has a dim outside 0 to 2^32 - 1")
        if not 0 <= self.segment < 1 << 16:
            raise ProtocolError(f"tensor {self.name}: segment {self.segment} outside 0 to 65535")
        if self.offset % ALIGNMENT:
            raise ProtocolError(f"tensor {self.name}: offset {self.offset} is not a multiple of {ALIGNMENT}")
        # Empty dims count as one here: the strides of an empty tensor must not overflow either.
        extent = math.prod(max(dim, 1) for dim in self.shape) * DTYPE_BYTES[self.dtype]
        if self.offset < 0 or self.offset + extent > MAX_SEGMENT_BYTES:
            raise ProtocolError(
                f"tensor {self.name}: {self.dtype} {self.shape} at offset {self.offset} passes the end of any segment, "
                f"{MAX_SEGMENT_BYTES} bytes"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Message:
    """One message. `rank` is the rank that it is for or from.

    On its way `body` is a dict of what JSON can carry, without NaN and infinities, as records.py makes it; an engine
    finds a dataclass of requests.py there.
    """

    op: Op
    rank: int
    generation: int
    request: int
    body: Any = field(default_factory=dict)
    tensors: tuple[TensorSpec, ...] = ()


def encode(message: Message) -> bytes:
    """The bytes of `message`. Raises ProtocolError when it does not fit the layout or its limits."""
    _check_counts(message.op, message.rank, len(message.tensors))
    _check_names(message.tensors)
    if not isinstance(message.body, dict):
        raise ProtocolError(f"{message.op.name}: the body is a {type(message.body).__name__}, not a dict")
    try:
        text = _TO_JSON.encode(message.body).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{message.op.name}: the body cannot be written as JSON: {error}") from error
    if len(text) > MAX_TEXT_BYTES:
        raise ProtocolError(f"{message.op.name}: a body of {len(text)} bytes, at most {MAX_TEXT_BYTES}; shorten it")
    op, rank, generation, request = message.op, message.rank, message.generation, message.request
    try:
        header = HEADER.pack(MAGIC, VERSION, op, rank, generation, len(text), request, len(message.tensors))
    except struct.error as error:
        raise ProtocolError(f"generation {generation}, request {request}: {error}") from error
    return b"".join((header, *map(_pack_entry, message.tensors), text))


def decode(data: bytes) -> Message:
    """The message that `data` holds, all of it. Raises ProtocolError and nothing else, whatever the bytes are."""
    if len(data) < HEADER.size:
        raise ProtocolError(f"{len(data)} bytes, a header alone has {HEADER.size}")
    magic, version, op, rank, generation, text_bytes, request, num_tensors = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"magic {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    _check_counts(op, rank, num_tensors)
    text_start = HEADER.size + num_tensors * ENTRY.size
    if text_bytes > MAX_TEXT_BYTES or len(data) != text_start + text_bytes:
        raise ProtocolError(f"{len(data)} bytes for {num_tensors} tensors and {text_bytes} bytes of text")
    tensors = tuple(_unpack_entry(data, HEADER.size + index * ENTRY.size) for index in range(num_tensors))
    _check_names(tensors)
    return Message(Op(op), rank, generation, request, _parse_body(data[text_start:]), tensors)


def _check_counts(op: int, rank: int, num_tensors: int) -> None:
    if op not in _OPS:
        raise ProtocolError(f"op {op} is unknown")
    if not 0 <= rank < MAX_RANKS:
        raise ProtocolError(f"rank {rank} outside 0 to {MAX_RANKS - 1}")
    if num_tensors > MAX_TENSORS:
        raise ProtocolError(f"{num_tensors} tensors in one message, at most {MAX_TENSORS}; send fewer")


def _check_names(tensors: tuple[TensorSpec, ...]) -> None:
    if len({spec.name for spec in tensors}) != len(tensors):
        raise ProtocolError(f"tensor names repeat: {', '.join(sorted(spec.name for spec in tensors))[:200]}")


def _pack_entry(spec: TensorSpec) -> bytes:
    dims = spec.shape + (0,) * (MAX_DIMS - len(spec.shape))
    code = _CODE_OF_DTYPE[spec.dtype]
    return ENTRY.pack(spec.name.encode("ascii"), spec.offset, code, len(spec.shape), spec.segment, *dims)


def _unpack_entry(data: bytes, start: int) -> TensorSpec:
    padded_name, offset, code, num_dims, segment, *dims = ENTRY.unpack_from(data, start)
    name = padded_name.rstrip(b"\0")
    if not name.isascii():
        raise ProtocolError(f"tensor name {name!r} is not ASCII")
    if code not in _DTYPE_OF_CODE:
        raise ProtocolError(f"tensor {name!r}: dtype code {code} is unknown")
    if num_dims > MAX_DIMS or any(dims[num_dims:]):
        raise ProtocolError(f"tensor {name!r}: {num_dims} dims of {tuple(dims)}")
    return TensorSpec(name.decode("ascii"), _DTYPE_OF_CODE[code], tuple(dims[:num_dims]), segment, offset)


def _parse_body(text: bytes) -> dict[str, Any]:
    try:
        body = FROM_JSON.decode(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"the body is a JSON {type(body).__name__}, not an object")
    return body


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse_number(text)
    return value


def _refuse_number(text: str) -> NoReturn:
    raise ProtocolError(f"the body holds {text[:32]}, which is no finite number")


# Made once: each message would make its own. The decoder takes finite numbers alone.
_TO_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
FROM_JSON = json.JSONDecoder(parse_constant=_refuse_number, parse_float=_finite_float)
