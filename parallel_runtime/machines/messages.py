"""What ComfyUI's side and a joined machine say to each other on the control connection, after the challenge; and what
ComfyUI's process tells its relay.

Owns the records and which of them each side may send. Does not own how they travel nor how a side proves itself
(connection.py). All are JSON objects of at most `MAX_FRAME_BYTES`, read field by field by wire/records.py.
"""

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

from ..plan import MAX_RANKS
from ..wire.protocol import ProtocolError
from ..wire.records import from_body, to_body

MAX_LINES_CHARS = 4_000  # of a process's last output
MAX_NAME_CHARS = 64
MAX_DEVICE_NAME_CHARS = 128
DEVICE = re.compile(r"(cpu|cuda):[0-9]{1,3}")
BUNDLE_BYTES = 1 << 15  # of what the launcher hands its ranks


@dataclass(frozen=True, kw_only=True)
class RelayedMachine:
    """A machine's name, the number of its first rank, and the far ends of its ranks' channels, in rank order."""

    name: str
    first_rank: int
    sockets: tuple[int, ...]


@dataclass(frozen=True)
class Versions:
    """What has to be equal on all machines; "" where a machine has none. `nccl` counts where ranks use CUDA devices."""

    pack: str
    torch: str
    comfyui: str = ""
    nccl: str = ""
    python: str = ""


@dataclass(frozen=True)
class FileIdentity:
    """A weights file by its content: `name` as ComfyUI lists it, relative to a model folder, with forward slashes."""

    name: str
    size_bytes: int
    header_sha256: str
    sample_sha256: str


# From a joined machine.


@dataclass(frozen=True)
class Introduction:
    """First message: which machine joins. `devices` as Device's text, in rank order; `device_names`: what each is."""

    name: str
    devices: tuple[str, ...]
    device_names: tuple[str, ...]
    versions: Versions
    pid: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.devices) <= MAX_RANKS or len(self.devices) != len(self.device_names):
            raise ProtocolError(f"{len(self.devices)} devices with {len(self.device_names)} names, 1 to {MAX_RANKS}")
        if not 1 <= len(self.name) <= MAX_NAME_CHARS or not self.name.isprintable():
            raise ProtocolError(f"a machine's name is 1 to {MAX_NAME_CHARS} printable characters")
        if not all(map(DEVICE.fullmatch, self.devices)) or len(set(self.devices)) != len(self.devices):
            raise ProtocolError("a machine's devices are cpu:N or cuda:N, each once")
        if not all(len(each) <= MAX_DEVICE_NAME_CHARS and each.isprintable() for each in self.device_names):
            raise ProtocolError(f"a device's name is at most {MAX_DEVICE_NAME_CHARS} printable characters")
        if not all(len(each) <= MAX_NAME_CHARS and each.isprintable() for each in astuple(self.versions)):
            raise ProtocolError(f"a version is at most {MAX_NAME_CHARS} printable characters")


@dataclass(frozen=True)
class GenerationEnded:
    """No process of the generation is left on this machine. `code` is its launcher's exit code, negative for a signal.

    `last_lines` is the last of what the launcher and its ranks printed.
    """

    generation: int
    code: int
    last_lines: str


@dataclass(frozen=True)
class FoundFile:
    """The answer to `FindFile`: the machine's own copy, or in `problem` what is wrong and where to put the file.

    The identity found it; `content_sha256`, as files.py has it, says whether it is the same.
    """

    number: int
    path: str = ""
    size_bytes: int = 0
    mtime_ns: int = 0
    content_sha256: str = ""
    problem: str = ""


# From ComfyUI's side.


@dataclass(frozen=True)
class Welcome:
    """The machine is taken. A side that hears nothing for `silence_s` gives the connection up."""

    silence_s: float


@dataclass(frozen=True)
class Refused:
    """The machine is not taken, and why; the last message."""

    reason: str


@dataclass(frozen=True)
class StartGeneration:
    """Start ranks `first_rank` and following, one for each of `devices`, of `world_size`.

    `generation` is the machine's number for it, `number` the pool's, which messages of the ranks bear. The launchers of
    all `machines`, ComfyUI's side as the first of them, meet at the store at `master_addr`:`master_port`; this one is
    `machine`. A rank that has not started after `deadline_s` is ended. `peer_access` as in RankSettings. `seen_as`:
    the machine's address as ComfyUI's side has it.
    """

    generation: int
    master_addr: str
    master_port: int
    world_size: int
    first_rank: int
    devices: tuple[str, ...]
    threads: int
    deadline_s: float
    seen_as: str
    backend: str = "gloo"
    engine: str = ""
    number: int = 0
    machine: int = 1
    machines: int = 2
    peer_access: bool = True


@dataclass(frozen=True)
class KillGeneration:
    """End the generation's processes; answered by GenerationEnded, also where none is there."""

    generation: int


@dataclass(frozen=True)
class FindFile:
    """Look for the file in the machine's model folders."""

    number: int
    identity: FileIdentity


# From both.


@dataclass(frozen=True)
class Beat:
    """A sign of life."""


# Between `join` and the launcher that it starts, on the launcher's standard input.


@dataclass(frozen=True)
class Launch:
    """A generation as the launcher gets it: with the machine's own address, name and ComfyUI folder ("" for none)."""

    start: StartGeneration
    machine: str
    address: str
    comfyui: str = ""


FromMachine: TypeAlias = Introduction | GenerationEnded | FoundFile | Beat
FromServer: TypeAlias = Welcome | Refused | StartGeneration | KillGeneration | FindFile | Beat
FROM_MACHINE = {kind.__name__: kind for kind in (Introduction, GenerationEnded, FoundFile, Beat)}
FROM_SERVER = {kind.__name__: kind for kind in (Welcome, Refused, StartGeneration, KillGeneration, FindFile, Beat)}


def to_frame(message: object) -> dict[str, Any]:
    """The message with its kind, as JSON's values."""
    return {"kind": type(message).__name__, "body": to_body(message)}


def from_frame(kinds: Mapping[str, type], frame: object) -> Any:  # noqa: ANN401  one of `kinds`
    """The message of one of `kinds` that `frame` holds. Raises ProtocolError for anything else."""
    if type(frame) is not dict or frame.keys() != {"kind", "body"} or type(frame["kind"]) is not str:
        raise ProtocolError("a message is an object of kind and body")
    if (kind := kinds.get(frame["kind"])) is None:
        raise ProtocolError(f"a message of kind {frame['kind'][:MAX_NAME_CHARS]!r} may not come here")
    return from_body(kind, frame["body"], frame["kind"])
