"""What ranks of this machine have written of a request's results, to be sent to where the other ranks' parts are.

Each rank writes the rows that are its own, into memory that the ranks of a machine share; which ones they are only the
ranks know. So the room for results is filled beforehand with a signalling NaN, which no arithmetic returns (IEEE
754-2019, 6.2): what is something else has been written. Owns that comparison. Sends nothing.
"""

import re
from collections.abc import Iterator, Sequence

import torch

from ..wire.channel import SegmentTable
from ..wire.protocol import Message, Op, ProtocolError, TensorSpec

PREVIEW = "preview."
RESULT = re.compile(r"(?:\d+\.)?out\d*|preview\.\d+")
TRACE = re.compile(r"trace\.(\d+)")
# Of each dtype that a result may have: an integer of its width, and the bits of a signalling NaN.
UNWRITTEN = {
    "float64": (torch.int64, 0x7FF4_5A5A_5A5A_5A5A),
    "float32": (torch.int32, 0x7FA5_5A5A),
    "bfloat16": (torch.int16, 0x7FA5),
    "float16": (torch.int16, 0x7D5A),
}


def is_input(spec: TensorSpec) -> bool:
    """Whether a request's tensor is one that ranks read; they write the others."""
    return not RESULT.fullmatch(spec.name) and not TRACE.fullmatch(spec.name)


class WrittenResults:
    """The results of one request. Make it before the ranks of this machine hear of the request.

    Raises ProtocolError for a result of a dtype in which nothing is unwritten.
    """

    def __init__(self, specs: Sequence[TensorSpec], segments: SegmentTable) -> None:
        self._rooms: list[tuple[TensorSpec, torch.Tensor, torch.Tensor, int]] = []
        self._traces = {spec.name: spec for spec in specs if TRACE.fullmatch(spec.name)}
        for spec in specs:
            if not RESULT.fullmatch(spec.name) or not spec.num_bytes:
                continue
            if spec.dtype not in UNWRITTEN:
                raise ProtocolError(f"result {spec.name} is {spec.dtype}; use one of {', '.join(UNWRITTEN)}")
            integer, unwritten = UNWRITTEN[spec.dtype]
            room = segments.tensor(spec).view(integer).flatten()
            room.fill_(unwritten)
            self._rooms.append((spec, room, room.clone(), unwritten))

    def new_parts(self, reply: Message) -> Iterator[tuple[TensorSpec, int, int]]:
        """Parts of results that were written since the last call, and the trace that a reply tells of.

        While a run goes on, only previews are looked at: what it results in is there at its end. Each part is a tensor
        with the bytes from and to, and holds nothing but what ranks of this machine wrote.
        """
        for spec, room, known, unwritten in self._rooms:
            if reply.op is Op.PROGRESS and not spec.name.startswith(PREVIEW):
                continue
            now = room.clone()  # ranks go on writing
            changed = now != known
            if changed.any():
                yield from _in_bytes(spec, changed, now != unwritten)
                known.copy_(now)
        ran = reply.body.get("ran")
        trace = self._traces.get(f"trace.{reply.rank}")
        if trace is not None and ran and ran.get("trace_bytes"):
            yield trace, 0, min(ran["trace_bytes"], trace.num_bytes)


def _in_bytes(spec: TensorSpec, changed: torch.Tensor, written: torch.Tensor) -> Iterator[tuple[TensorSpec, int, int]]:
    """From the first to the last change of each run of written elements."""
    size = spec.num_bytes // written.numel()
    none = torch.zeros(1, dtype=torch.int8)
    steps = torch.diff(written.to(torch.int8), prepend=none, append=none).nonzero().flatten()
    for start, stop in steps.view(-1, 2).tolist():
        at = changed[start:stop].nonzero()
        if at.numel():
            yield spec, (start + int(at[0])) * size, (start + int(at[-1]) + 1) * size
