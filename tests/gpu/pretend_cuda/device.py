"""torch.cuda on the pretend device: streams and events that torch's own sanitizer follows, sites, and what is refused.

Computing happens at once, in the order of the host. What a real device may do otherwise is followed beside it: each
operator is told to torch's CUDA sanitizer as a read and a write of whole storages on its stream, so that two streams
that touch one storage without an order are found however they fell out. Rules beyond the sanitizer's own:

- Memory is the caching allocator's: freed, it may serve the stream that allocated it at once. Another stream's use of
  it must be ordered before that.
- The host is a stream too, for pinned memory: it waits by events and synchronizations alone.
- A launch may wait for all that is in flight (`launches_wait`); the allocator may refuse at one place of the product.
- A device that is asked for its memory, or waited for, is touched: a real one makes a context of some hundred MiB.

Owns what says `cuda`. The rules of NCCL are nccl_rules.py's, the bytes and their book device.cpp's.
"""

import contextlib
import ctypes
import itertools
import os
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from nccl_rules import join_world, launches
from pretend_cuda.library import library
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode

HOST = -1  # the host as a stream
PRODUCT = f"{os.sep}parallel_runtime{os.sep}"
ROOM = 4096  # freed blocks taken at once
CAPACITY, CAPABILITY = 24 << 30, (8, 6)


class RaceError(RuntimeError):
    """Two streams use the same memory, and nothing orders them."""


@dataclass
class Pretence:
    """The state of this process's device."""

    lib: ctypes.CDLL
    handler: _sanitizer.EventHandler = field(default_factory=_sanitizer.EventHandler)
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))
    streams: list["Stream"] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)  # by storage, the stream it was allocated on
    pinned: set[int] = field(default_factory=set)  # storages of the host that a device may use
    sites: dict[str, None] = field(default_factory=dict)  # of the product, where this request allocated
    touched: set[int] = field(default_factory=set)
    refuse: str = ""
    cold: object = None  # waits for all that is in flight
    simulation: object = None  # of NCCL, where ranks do not share a device
    lock: threading.RLock = field(default_factory=threading.RLock)

    def launched(self, name: str, stream: int, reads: set[int], writes: set[int]) -> None:
        """An operator on a stream, or the host's own; raises `RaceError` when another stream is in its way."""
        with self.lock:
            if stream != HOST:  # what the host did before, a launch comes after
                self.handler._handle_event_record(HOST, HOST)
                self.handler._handle_event_wait(HOST, stream)
            aliases = defaultdict(lambda: [name])
            found = self.handler._handle_kernel_launch(stream, reads - writes, writes, set(), name, aliases)
        if found:
            before = found[0].previous_access
            raise RaceError(
                f"{name} on stream {stream} uses memory that {before.operator} on stream {before.stream} used, and "
                f"nothing orders them (stream {HOST} is the host)"
            )

    def collect_freed(self) -> None:
        """Take in what was freed: every use on another stream must be ordered before its own stream's present."""
        room = (ctypes.c_void_p * ROOM)()
        for pointer in room[: self.lib.pretend_take_freed(room, ROOM)]:
            info = self.handler.tensors_accessed.accesses.pop(pointer, None)
            owner = self.owners.pop(pointer, None)
            for access in [] if info is None or owner is None else (*info.reads, info.write):
                if access is None or access.stream == owner:
                    continue
                if not self.handler.syncs.is_ordered_after(owner, access.seq_num, access.stream):
                    raise RaceError(
                        f"memory of stream {owner} was freed while {access.operator} of stream {access.stream} uses it"
                    )


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, device=None, priority=0, **_):
        self.id = next(PRETENCE.numbers)
        self.device = torch.device("cuda", device_index(device))
        PRETENCE.handler._handle_stream_creation(self.id)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        PRETENCE.handler._handle_event_wait(event.id, self.id)

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def synchronize(self):
        PRETENCE.handler._handle_stream_synchronization(self.id)


class Event:
    """As `torch.cuda.Event`. Its first query says that the device is not there yet."""

    def __init__(self, enable_timing=False, **_):
        self.id, self._at_s, self._timed, self._asked = next(PRETENCE.numbers), None, enable_timing, False
        PRETENCE.handler._handle_event_creation(self.id)

    def record(self, stream=None):
        self._at_s = time.perf_counter()
        PRETENCE.handler._handle_event_record(self.id, (stream or current_stream()).id)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        PRETENCE.handler._handle_event_synchronization(self.id)

    def query(self):
        if not self._asked:
            self._asked = True
            return False
        self.synchronize()
        return True

    def elapsed_time(self, other):
        if self._at_s is None or other._at_s is None or not (self._timed and other._timed):
            raise RuntimeError("both events must be recorded, and made with enable_timing")
        return max(1e-6, (other._at_s - self._at_s) * 1e3)


def device_index(device):
    """The number of a device, the present one for None."""
    if device is None:
        return PRETENCE.lib.pretend_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return PRETENCE.lib.pretend_device() if index is None else index


def touch(device):
    """Note that the process makes a context on a device."""
    PRETENCE.touched.add(device_index(device))
    return True


def current_stream(device=None):
    return PRETENCE.streams[-1]


@contextlib.contextmanager
def on_stream(stream):
    PRETENCE.streams.append(stream)
    try:
        yield
    finally:
        PRETENCE.streams.pop()


class Watch(TorchDispatchMode):
    """Tells the sanitizer of every operator on device memory and of the host's own use of pinned memory."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or torch imports its compiler, 2 s a rank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", False) if func._schema.name.startswith("aten::empty") else False
        PRETENCE.collect_freed()
        if PRETENCE.cold is not None and launches(func):
            PRETENCE.cold()
        site = product_site(func)
        PRETENCE.lib.pretend_refuse_next(bool(site) and site == PRETENCE.refuse)
        before = PRETENCE.lib.pretend_count()
        out = func(*args, **kwargs)
        PRETENCE.lib.pretend_refuse_next(False)
        if PRETENCE.lib.pretend_count() > before:
            PRETENCE.sites[site] = None
        if pinned:
            PRETENCE.pinned.add(storage_of(out))
        allocates = "empty" in func._schema.name
        if allocates or launches(func):
            self._tell(func, args, kwargs, out, allocates=allocates)
        return out

    def _tell(self, func, args, kwargs, out, *, allocates):
        parameters = func._schema.arguments
        given = [*zip(parameters, args, strict=False), *((p, kwargs[p.name]) for p in parameters if p.name in kwargs)]
        reads, writes, on_device = set(), set(), False
        for parameter, value in given:
            for tensor in tensors_in(value):
                on_device |= tensor.is_cuda
                written = parameter.alias_info is not None and parameter.alias_info.is_write
                (writes if written else reads).add(storage_of(tensor))
        for tensor in tensors_in(out):
            on_device |= tensor.is_cuda
            storage = storage_of(tensor)
            if tensor.is_cuda and storage not in reads | writes:
                PRETENCE.handler.tensors_accessed.accesses.pop(storage, None)
                PRETENCE.owners[storage] = current_stream().id
                if not allocates:
                    writes.add(storage)
        host = {s for s in reads | writes if s not in PRETENCE.owners}
        followed = PRETENCE.owners.keys() | PRETENCE.pinned
        reads, writes = reads & followed, writes & followed
        name = func._schema.name
        if on_device:
            PRETENCE.launched(name, current_stream().id, reads, writes)
            told = any(parameter.name == "non_blocking" and value for parameter, value in given)
            asynchronous = not host or (told and host <= PRETENCE.pinned)  # for pageable memory the host waits
            if not asynchronous or name == "aten::_local_scalar_dense":
                current_stream().synchronize()
        elif (reads | writes) & PRETENCE.pinned:
            PRETENCE.launched(name, HOST, reads, writes)


def tensors_in(value):
    """The tensors with elements in an argument."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.numel()]


def storage_of(tensor):
    """Where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def product_site(func):
    """The place of the product that called an operator: file, function, line and operator."""
    frame = sys._getframe(2)
    while frame is not None and PRODUCT not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno} {func._schema.name}"


def plain_attention(q, k, v, bias=None):
    """Softmax attention and its log-sum-exp in fp32; out in flash attention's layout."""
    scores = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias.float()
    out = (scores.softmax(-1) @ v.float()).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Which kernel a device can run is tests/runtime/test_kernels.py's."""
    nothing = torch.empty(0, device=q.device)
    return *plain_attention(q, k, v), None, None, q.shape[2], k.shape[2], nothing, nothing, nothing


def efficient(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    """Its log-sum-exp has rows of a multiple of 32, of which the last are anything."""
    out, lse = plain_attention(q, k, v, bias)
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), float("nan"))
    padded[..., : lse.shape[2]] = lse
    nothing = torch.empty(0, device=q.device)
    return out, padded, nothing, nothing


def visible():
    """The GPUs that this process may use, by their numbers on the machine: those of the variable, else all eight."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [int(number) for number in told.split(",")] if told else list(range(8))


def capturing():
    """Whether a graph is recorded. The engine imports the tape, and with it the product, which is yet to be spoilt."""
    tape = sys.modules.get("tape")
    return tape is not None and tape.Tape.now is not None


def settings_file():
    """`pretend.json` in a folder of the path, written anew by whoever asks."""
    return next(path for folder in sys.path if (path := Path(folder) / "pretend.json").exists())


def install():
    """Put the pretend device into torch. Once a process, before anything asks for a device."""
    torch.ops.load_library(str(library()))
    cuda = torch.cuda
    PRETENCE.handler._handle_event_creation(HOST)
    PRETENCE.handler._handle_stream_creation(HOST)
    PRETENCE.streams.append(Stream(0))
    cuda._lazy_init = lambda: None
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: len(visible())
    cuda.set_device = lambda device: PRETENCE.lib.pretend_set_device(device_index(device))
    # a torch without CUDA makes no device of a number alone, as ComfyUI asks it to
    cuda.current_device = lambda: torch.device("cuda", device_index(None))
    cuda.synchronize = lambda device=None: touch(device) and PRETENCE.handler._handle_device_synchronization()
    cuda.empty_cache = PRETENCE.lib.pretend_empty_cache
    cuda.memory_allocated = lambda device=None: PRETENCE.lib.pretend_allocated(device_index(device))
    cuda.memory_reserved = lambda device=None: PRETENCE.lib.pretend_reserved(device_index(device))
    cuda.mem_get_info = lambda device=None: touch(device) and (CAPACITY - cuda.memory_reserved(device), CAPACITY)
    names = {"active_bytes.all.current": "memory_allocated", "reserved_bytes.all.current": "memory_reserved"}
    cuda.memory_stats = lambda device=None: (
        touch(device) and {name: getattr(cuda, function)(device) for name, function in names.items()}
    )
    cuda.get_allocator_backend = lambda: "native"
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="pretend",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=CAPACITY,
        uuid=f"pretend-{visible()[device_index(device)]}",
    )
    cuda.get_device_name = lambda device=None: "pretend"
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.cudart = lambda: SimpleNamespace(  # memory of the host that the device may read
        cudaHostRegister=lambda pointer, num_bytes, flags: PRETENCE.pinned.add(pointer) or 0,
        cudaHostUnregister=lambda pointer: PRETENCE.pinned.discard(pointer) or 0,
    )
    cuda._sleep = lambda cycles: None
    cuda.is_current_stream_capturing = capturing
    cuda.default_stream = lambda device=None: PRETENCE.streams[0]
    cuda.Stream, cuda.Event, cuda.current_stream, cuda.stream = Stream, Event, current_stream, on_stream
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_scaled_dot_product_flash_attention", flash, "CUDA")
    kernels.impl("_scaled_dot_product_efficient_attention", efficient, "CUDA")
    PRETENCE.streams[0].kernels = kernels  # held, or they are taken back
    dispatched = torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, **options):
        if not q.is_cuda:
            return dispatched(q, k, v, attn_mask=attn_mask, **options)
        return plain_attention(q, k, v, attn_mask)[0]

    torch.nn.functional.scaled_dot_product_attention = attention
    join_with_nccl_rules()
    Watch().__enter__()


def join_with_nccl_rules():
    """Have `init_process_group("nccl")` join the simulated NCCL."""
    real = dist.init_process_group

    def init_process_group(backend, *, device_id=None, **options):
        if backend != "nccl":
            return real(backend, **options)
        dist.init_process_group = real
        real("gloo", **options)
        PRETENCE.simulation = join_world(device=Communication())
        return None

    dist.init_process_group = init_process_group


class Communication:
    """A communicator's kernels on a stream of its own: after what was queued, and before what waits for them."""

    def __init__(self):
        self._streams = defaultdict(Stream)

    def issue(self, text, communicator, sources, targets):
        """The event of the operation's end. Raises `RuntimeError` for a tensor on another device than the rank's."""
        for tensor in (*sources, *targets):
            if tensor.get_device() != PRETENCE.lib.pretend_device():
                raise RuntimeError(f"{text}: a tensor on {tensor.device} of rank on cuda:{device_index(None)}")
        stream = self._streams[id(communicator)]
        stream.wait_stream(current_stream())
        reads, writes = ({storage_of(t) for t in run if t.is_cuda and t.numel()} for run in (sources, targets))
        PRETENCE.launched(text, stream.id, reads, writes)
        return stream.record_event()


def _pretence():
    lib = ctypes.CDLL(str(library()))
    for name in ("allocated", "reserved", "count", "take_freed"):
        getattr(lib, f"pretend_{name}").restype = ctypes.c_int64
    lib.pretend_take_freed.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return Pretence(lib)


PRETENCE = _pretence()
