"""What a weights file says it holds: the safetensors header, read and checked without touching a weight.

Owns the header's rules (https://github.com/huggingface/safetensors, "Format") and the identity of a file. Reads no
weights and knows no model.
"""

import errno
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, TypeGuard

import torch

# Far beyond any model's, so that a header made to exhaust us is refused before it can: a usual model has 780 tensors of
# one or two dims in 0.1 MB of header. The format itself would allow 100 MB.
HEADER_LIMIT = 16 << 20  # bytes
MAX_TENSORS = 1 << 16
MAX_PARTS = 1 << 19  # lists and objects in the header's JSON, those inside of metadata's texts included
MAX_DIMS = 8
MAX_BYTES = 1 << 46  # of one tensor, and where it may end
GGUF = b"GGUF"  # how such a file begins
SHOWN = 80  # characters of a name or value in a message
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    # the scales of mxfp8, which torch has since 2.7
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LOAD_AGAIN = "load it again (ComfyUI: Unload Models and Execution Cache)"
COMPUTE_DTYPES = ("default", "float32", "bfloat16", "float16")
# Load Diffusion Model's names for weights that are rounded to fp8 when they are loaded, and cast to the compute dtype
# where they are used; FAST multiplies in fp8 where the device can.
FP8: Mapping[str, torch.dtype] = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fn_fast": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FAST = "_fast"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file: `start` and `end` are byte offsets from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file."""
        return self.end - self.start


@dataclass(frozen=True)
class CheckpointHeader:
    """A checked header: every tensor lies inside the file, with as many bytes as its shape needs."""

    path: str
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComfyUI:
    """The ComfyUI whose modules a worker runs: the folder of its main.py, and options of its command line.

    Each is a text as models/hosted/options.py writes it, "--name" or "--name=JSON".
    """

    path: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """Which weights, in which dtype; equal specs are the same model in the workers.

    `comfyui` is whose modules compute; with `checkpoint` they are told what else lies in the file, as Load Checkpoint
    tells them. `flags` are torch's switches that ranks get with it (torch_flags.py), and no
    part of which model it is. `kept`: the name in `FP8` of what ComfyUI's modules round weights to when they
    are loaded; "": they have the file's. `found`: the plan that was found for its class, as models/specs/found.py
    writes it; "" where people wrote one, or there is none.
    """

    path: str
    dtype: str
    size_bytes: int
    mtime_ns: int
    comfyui: ComfyUI | None = None
    checkpoint: bool = False
    flags: dict[str, Any] = field(default_factory=dict, compare=False)
    kept: str = ""
    found: str = ""

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        dtype: str = "default",
        *,
        comfyui: ComfyUI | None = None,
        checkpoint: bool = False,
        flags: Mapping[str, bool | str] | None = None,
        kept: str = "",
    ) -> "ModelSpec":
        """Identify the file as it is now. `dtype` is the compute dtype; `default` keeps the file's.

        Raises `ValueError` when the file is missing or a dtype unknown.
        """
        if kept and kept not in FP8:
            raise ValueError(f"weights in {kept!r} are unknown; use one of {', '.join(FP8)}")
        if dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype={dtype!r} is unknown; use one of {', '.join(COMPUTE_DTYPES)}")
        stat = os.stat(_checked_path(path))
        size, mtime_ns = stat.st_size, stat.st_mtime_ns
        return cls(os.path.abspath(path), dtype, size, mtime_ns, comfyui, checkpoint, dict(flags or {}), kept)

    def refuse_changed(self) -> None:
        """Raise `ValueError` unless what lies at the path is the file that was identified."""
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            raise ValueError(f"{self.path} was there and is gone; put it back, then {LOAD_AGAIN}") from None
        except OSError as error:  # a network drive that does not answer
            raise unreadable(self.path, error) from error
        if (now.st_size, now.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise self.changed(now)

    def changed(self, now: os.stat_result) -> ValueError:
        """The refusal of a file that is another by now."""
        was, found = _age(self.size_bytes, self.mtime_ns), _age(now.st_size, now.st_mtime_ns)
        return ValueError(f"{self.path} was changed after it was chosen: it was {was}, it is {found}; {LOAD_AGAIN}")


def _age(size_bytes: int, mtime_ns: int) -> str:
    written = datetime.fromtimestamp(mtime_ns / 1e9, timezone.utc)
    return f"{size_bytes} bytes of {written:%Y-%m-%d %H:%M:%S.%f} UTC"


def unreadable(path: str, error: OSError) -> ValueError:
    """What a user is told of a file that is there and cannot be read."""
    if isinstance(error, PermissionError):
        return ValueError(f"{path} cannot be read ({error.strerror}); see that the user who runs this may read it")
    if error.errno == errno.ENODEV:  # of `mmap`, where a file system has none
        return ValueError(
            f"{path} cannot be mapped into memory, as on some network drives; copy it to a local disk, and use it there"
        )
    return ValueError(f"{path} cannot be read ({error.strerror}); see that its disk or network drive is there")


def read_header(path: str | os.PathLike[str]) -> CheckpointHeader:
    """Read and check the header of a safetensors file; weights stay unread.

    Raises `ValueError` with the file, what is wrong with it and what to do.
    """
    path = _checked_path(path)
    try:
        raw, file_size = _read_raw(path)
    except OSError as error:
        raise unreadable(path, error) from error
    base = 8 + len(raw)
    entries, metadata = _parse(path, raw)
    tensors = {name: _entry(path, name, value, base=base) for name, value in entries.items()}
    _check_extent(path, tensors, base=base, file_size=file_size)
    return CheckpointHeader(path, tensors, metadata)


def _read_raw(path: str) -> tuple[bytes, int]:
    """The header's text, and the size of the file."""
    file_size = os.path.getsize(path)
    with open(path, "rb") as file:
        raw_length = file.read(8)
        if len(raw_length) < 8:
            raise ValueError(f"{path} is truncated: {file_size} bytes, no safetensors header; download it again")
        if raw_length.startswith(GGUF):
            raise ValueError(f"{path} is a GGUF file, whatever its name says; use a .safetensors file of this model")
        (length,) = struct.unpack("<Q", raw_length)
        if length > HEADER_LIMIT or length < 2:
            raise ValueError(
                f"{path} is not a safetensors file that can be read (header of {length} bytes, 2 to {HEADER_LIMIT} are "
                "read); use a .safetensors file"
            )
        if 8 + length > file_size:
            raise ValueError(
                f"{path} is truncated: its header needs {8 + length} bytes, the file has {file_size}; download it again"
            )
        return file.read(length), file_size


def _checked_path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not text.lower().endswith((".safetensors", ".sft")):  # as ComfyUI's loader reads it
        suffix = os.path.splitext(text)[1] or "no suffix"
        raise ValueError(f"{text} has {suffix}; only .safetensors files are read, convert it first")
    if not os.path.isfile(text):
        raise ValueError(f"{text} does not exist; choose a file that does, by its path")
    return text


def _parse(path: str, raw: bytes) -> tuple[dict[str, object], dict[str, str]]:
    def refuse_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a key stands twice")
        return values

    # Counted before anything is made of them: memory and time of the parser are bounded by these.
    tensors, parts = raw.count(b'"data_offsets"'), raw.count(b"{") + raw.count(b"[")
    if tensors > MAX_TENSORS or parts > MAX_PARTS:
        raise ValueError(
            f"{path} has a header of {tensors} tensors and {parts} parts, at most {MAX_TENSORS} and {MAX_PARTS} are "
            "read; use the file of one model"
        )
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header ({error}); download it again") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a header that is no JSON object; download it again")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} has metadata that is no JSON object; download it again")
    return header, {str(key): str(value) for key, value in metadata.items()}


def _entry(path: str, name: str, value: object, *, base: int) -> TensorEntry:
    def refuse(reason: str) -> ValueError:
        return ValueError(f"{path}: tensor {shown(name)} {reason}; the header is damaged, download the file again")

    if not isinstance(value, dict):
        raise refuse("has no description")
    dtype = DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        raise refuse(f"has dtype {shown(value.get('dtype'))}, which is not one of {', '.join(DTYPES)}")
    shape, offsets = value.get("shape"), value.get("data_offsets")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise refuse(f"has shape {shown(shape)} and data_offsets {shown(offsets)}")
    if len(shape) > MAX_DIMS:
        raise refuse(f"has {len(shape)} dims, at most {MAX_DIMS} are read")
    extent = dtype.itemsize
    for size in shape:  # stopped early: such a product grows without bound. An empty dim must not hide a huge one.
        extent *= max(size, 1)
        if extent > MAX_BYTES or offsets[1] > MAX_BYTES:
            raise refuse(f"has shape {shown(shape)} and data_offsets {shown(offsets)}, beyond {MAX_BYTES} bytes")
    num_bytes = 0 if 0 in shape else extent
    if offsets[1] - offsets[0] != num_bytes:
        raise refuse(f"needs {num_bytes} bytes for shape {shape}, its offsets span {offsets[1] - offsets[0]}")
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def shown(value: object) -> str:
    """A name or value of a header for a message: whole when it is short, else its beginning."""
    text = repr(value[: SHOWN + 1] if isinstance(value, (str, list)) else value)
    return text if len(text) <= SHOWN + 2 else f"{text[:SHOWN]}..."


def _whole_numbers(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_extent(path: str, tensors: Mapping[str, TensorEntry], *, base: int, file_size: int) -> None:
    """Tensors must cover the data area without gap or overlap, as the format demands."""
    position = base
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise ValueError(
                f"{path}: tensor {shown(name)} starts at byte {entry.start}, expected {position}; "
                "the header is damaged, download the file again"
            )
        position = entry.end
    if position > file_size:
        raise ValueError(
            f"{path} is truncated: its tensors need {position} bytes, the file has {file_size}; download it again"
        )
    if position < file_size:
        raise ValueError(
            f"{path} has {file_size - position} bytes after its tensors; the header is damaged, download it again"
        )
