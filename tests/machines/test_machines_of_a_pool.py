"""Further machines as the pool counts them: which have a part, which are left out, how they ended, what they have.

No process is started; that machines do what is said here is test_joining.py's and test_remote_ranks.py's.
"""

import errno
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from parallel_runtime.errors import PoolError
from parallel_runtime.machines import server
from parallel_runtime.machines.connection import (
    ANSWER,
    GREETING,
    MAX_TOKEN_BYTES,
    REFUSAL,
    VERDICT,
    MachineChallenge,
    ServerChallenge,
    TokenRefusedError,
    join_address,
    read_token,
    split_address,
)
from parallel_runtime.machines.files import find, identify
from parallel_runtime.machines.machine import MAX_ENDED, MAX_FILES, MAX_UNSENT_BYTES, Lost, Machine
from parallel_runtime.machines.messages import FileIdentity, FoundFile, GenerationEnded, Introduction, Versions
from parallel_runtime.machines.server import MachineServer, Offer
from parallel_runtime.machines.versions import difference
from parallel_runtime.plan import MAX_RANKS
from parallel_runtime.pool import remote_ranks
from parallel_runtime.pool.remote_ranks import NoComfyUIError, RemoteRank, RemoteRanks
from parallel_runtime.process.environment import RankSettings
from parallel_runtime.wire.protocol import Op, ProtocolError

TOKEN = b"0123456789abcdef"
SETTINGS = RankSettings(devices=("cpu:0",), threads=1, engine="")  # type: ignore[arg-type]


def machine(name: str, num_devices: int, comfyui: str = "") -> Machine:
    server, joining = ServerChallenge(TOKEN), MachineChallenge(TOKEN)
    _, session = server.session(joining.answer(server.greeting))
    devices = tuple(f"cpu:{index}" for index in range(num_devices))
    said = Introduction(name, devices, devices, Versions("1", "2", comfyui), 1)
    return Machine(said, "10.0.0.2:1", session, here="10.0.0.1", wake=lambda: None)


def test_machines_have_a_part_in_order_of_joining_while_their_ranks_are_not_too_many() -> None:
    lost = machine("lost", 1)
    lost.lose("silent")
    given = [lost, machine("a", 2), machine("b", MAX_RANKS - 2), machine("c", MAX_RANKS - 3), machine("d", 1)]
    ranks = RemoteRanks(given, SETTINGS)
    assert ([each.name for each in ranks.machines], ranks.num_ranks) == (["a", "c"], MAX_RANKS)
    assert [ranks.reach(count) for count in range(1, 6)] == [1, 3, 3, MAX_RANKS, MAX_RANKS]


def test_a_machine_that_fails_is_left_out_with_those_behind_it_unless_its_ranks_are_asked() -> None:
    ranks = RemoteRanks([machine("a", 2), machine("b", 1)], SETTINGS)
    assert not ranks.does_without(1, "it failed", 2)
    assert ranks.reach(4) == 4
    assert ranks.does_without(3, "it failed", 3)
    assert [ranks.reach(count) for count in (1, 2, 4)] == [1, 3, 3]
    assert ranks.does_without(1, "it failed", 1)
    assert ranks.does_without(3, "it failed", 1), "which is left out already"
    assert [ranks.reach(count) for count in (1, 2, 4)] == [1, 1, 1]


def test_why_a_machine_ended_early_is_said_once_by_the_last_line_that_it_printed() -> None:
    there = [machine(name, 2) for name in ("a", "b", "c", "d")]
    of_pool = RemoteRanks(there, SETTINGS)
    relay: Any = SimpleNamespace(output=None, pid=7, pidfd=os.open(os.devnull, os.O_RDONLY), end_text=lambda: "killed")
    ranks = [RemoteRank(1 + rank, there[rank // 2], "cpu:0", SimpleNamespace(close=int), relay) for rank in range(8)]
    assert {rank.pid for rank in ranks} == {7}, "the relay's, which the panel shows"
    there[0].take(GenerationEnded(of_pool._number, 1, "first\nthe last line\n"))
    there[1].take(GenerationEnded(of_pool._number, 3, ""))
    there[1].take(GenerationEnded(of_pool._number + 1, 4, "of another pool"))
    there[2].lose("it closed the connection")
    assert of_pool.ended_early([*ranks, "a rank of ours"]) == {
        1: "machine a (10.0.0.2:1) has ended its ranks: the last line",
        3: "machine b (10.0.0.2:1) has ended its ranks: exit code 3",
        5: "machine c (10.0.0.2:1) is lost: it closed the connection",
    }
    assert (ranks[0].place, ranks[0].end_text()) == (
        "cpu:0 of machine a (10.0.0.2:1)",
        "killed (the process that passes on to other machines)",
    )
    assert (ranks[0].is_process(1), ranks[0].is_process(0), ranks[0].is_stopped(), ranks[0].gets_on()) == (
        *(True, False, False, True),
    )
    assert all(rank.reap() for rank in ranks)
    os.close(relay.pidfd)


def test_machines_have_one_limit_in_which_all_say_that_their_ranks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    of_pool, left_s, ticks = RemoteRanks([], SETTINGS), list[float](), iter((100.0, 100.0, 104.0, 900.0))
    monkeypatch.setattr(remote_ranks, "time", SimpleNamespace(monotonic=lambda: next(ticks)))

    def ends(ended: bool) -> Any:
        return SimpleNamespace(wait_ended=lambda number, left: left_s.append(left) or ended)

    of_pool._started = first, second, third = [ends(True), ends(False), ends(False)]
    assert of_pool.reap() == [second, third] and of_pool._started == []
    limit_s = remote_ranks.REAP_TIMEOUT_S
    assert left_s == [limit_s, limit_s - 4.0, 0.0]


def found(file: FoundFile) -> Future[FoundFile]:
    future = Future[FoundFile]()
    future.set_result(file)
    return future


def test_a_machine_loads_its_own_copy_where_its_ranks_have_a_part_and_needs_comfyui_where_that_computes() -> None:
    there = machine("shelf", 1)
    of_pool, rank = RemoteRanks([there], SETTINGS), RemoteRank.__new__(RemoteRank)
    rank.rank, rank.machine = 1, there
    spec = {"path": "/ours", "size_bytes": 1, "mtime_ns": 2, "dtype": "float32", "comfyui": None}
    of_pool._looks["/ours", 1, 2] = {"shelf": found(FoundFile(1, "/theirs", 1, 9, ""))}
    body = {"spec": spec, "layout": {"ranks": 2}}
    theirs = {**body, "spec": {**spec, "path": "/theirs", "size_bytes": 1, "mtime_ns": 9}}
    assert of_pool.body_for(rank, Op.LOAD, body) == theirs
    for asked, op, given in (("ours", Op.LOAD, body), (rank, Op.STEP, body), (rank, Op.VAE, {})):
        assert of_pool.body_for(asked, op, given) is given
    one = {**body, "layout": {"ranks": 1}}
    assert of_pool.body_for(rank, Op.LOAD, one) is one, "it sleeps"
    for op, given in ((Op.LOAD, {**body, "spec": {**spec, "comfyui": {"path": "/c"}}}), (Op.VAE, {"comfyui": "/c"})):
        with pytest.raises(
            NoComfyUIError, match=r"shelf .* has no ComfyUI, .*; start `join` there with --comfyui PATH"
        ):
            of_pool.body_for(rank, op, given)
        rank.machine = machine("shelf", 1, "0.30")
        assert of_pool.body_for(rank, op, given)["comfyui" if op is Op.VAE else "layout"]
        rank.machine = there


class CancelledError(Exception):
    """What a user's Cancel raises."""


def test_machines_that_look_for_a_file_hold_up_no_cancel_and_the_first_error_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both machines answer when they are let; our own file is never read to its end."""
    gate, looks = threading.Event(), list[str]()
    path, there = write(tmp_path / "a.safetensors", 1.0), [machine("a", 1), machine("b", 1)]
    spec = {"path": str(path), "size_bytes": 1, "mtime_ns": 2}
    monkeypatch.setattr(remote_ranks, "content_sha256", lambda _: gate.wait())

    def looks_long(identity: FileIdentity, content: Any) -> FoundFile:
        looks.append(identity.name)
        return FoundFile(1, "/theirs", 1, 9, content() and "")

    def has_none(identity: FileIdentity, content: Any) -> FoundFile:
        raise ValueError(f"b: {identity.name} is not there")

    def cancel() -> None:
        if len(looks) == 2:
            raise CancelledError

    for each in there:
        each.find_file = looks_long  # type: ignore[method-assign]
    of_pool = RemoteRanks(there, SETTINGS)
    for _ in range(2):
        with pytest.raises(CancelledError):
            of_pool._copies(spec, 3, cancel)
    assert len(looks) == 2, "who asks again waits for what the first began"
    there[1].find_file = has_none  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"b: a\.safetensors is not there"):
        RemoteRanks(there, SETTINGS)._copies(spec, 3, lambda: None)
    gate.set()
    assert [*of_pool._copies(spec, 3, lambda: None)] == ["a", "b"]
    assert [*RemoteRanks(there, SETTINGS)._copies(spec, 2, lambda: None)] == ["a"], "the third rank sleeps"
    monkeypatch.setattr(remote_ranks, "content_sha256", mock.Mock(side_effect=OSError(errno.EIO, "its disk fails")))
    with pytest.raises(ValueError, match=r"a\.safetensors cannot be read: its disk fails; put the file back"):
        RemoteRanks(there, SETTINGS)._copies(spec, 2, lambda: None)


def test_a_machine_remembers_so_many_ends_and_files_and_takes_no_answer_that_nobody_waits_for() -> None:
    there = machine("shelf", 1)
    for number in range(MAX_ENDED + 1):
        there.take(GenerationEnded(number, 0, ""))
    assert (there.ended(0), there.ended(1)) == (None, GenerationEnded(1, 0, ""))
    tell = there._tell

    def answer(message: Any) -> None:
        tell(message)
        there.take(FoundFile(message.number + 5, "/another question's"))
        there.take(FoundFile(message.number, f"/{message.number}", content_sha256="right"))

    there._tell = answer  # type: ignore[method-assign]
    for number in range(MAX_FILES + 1):
        assert there.find_file(FileIdentity(f"{number}", 1, "", ""), lambda: "right").path == f"/{number + 1}"
    assert list(there.files) == [str(number) for number in range(1, MAX_FILES + 1)]
    there._tell = tell  # type: ignore[method-assign]
    with pytest.raises(PoolError, match="did not say within 0 s whether it has late; its disk may be slow or away"):
        there._search(FileIdentity("late", 1, "", ""), 0.0)
    assert there._found == {}
    with pytest.raises(ProtocolError, match="it introduces itself twice"):
        there.take(Introduction("shelf", ("cpu:0",), ("CPU",), Versions("1", "2"), 1))
    there.lose("silent")
    there.kill(1)
    with pytest.raises(PoolError, match=r"machine shelf \(10\.0\.0\.2:1\) is lost: silent; look at what `join` prints"):
        there.find_file(FileIdentity("late", 1, "", ""), str)


def test_whoever_waits_for_a_machine_that_is_lost_is_woken() -> None:
    there, waiting, woken = machine("shelf", 1), threading.Event(), list[bool]()
    wait = there._changed.wait

    def waits(timeout_s: float) -> bool:
        waiting.set()  # the lock is held until it waits
        woken.append(wait(timeout_s))
        return woken[-1]

    there._changed.wait = waits  # type: ignore[method-assign,assignment]
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(there._search, FileIdentity("a", 1, "", ""), 20.0)
        waiting.wait()
        there.lose("silent")
        with pytest.raises(PoolError, match="is lost: silent"):
            asked.result()
    assert woken == [True], "it waited until its deadline"


def test_a_machine_is_sent_64_kib_at_a_time_and_must_read() -> None:
    there = machine("shelf", 1)
    there._unsent[:] = b"a" * (1 << 16) + b"b"
    assert there.unsent() == b"a" * (1 << 16)
    there.sent(1 << 16)
    assert there.unsent() == b"b"
    there._unsent[:] = bytes(MAX_UNSENT_BYTES)
    there.unsent()
    there._unsent += b"c"
    with pytest.raises(ProtocolError, match="it leaves 1048577 bytes unread"):
        there.unsent()


def write(path: Path, *values: float, name: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(4), "z": torch.tensor(values, dtype=torch.float32)}, path)
    return path


def test_a_copy_is_found_by_its_listed_name_or_anywhere_and_what_is_another_file_is_said(tmp_path: Path) -> None:
    ours = write(tmp_path / "ours" / "flux.safetensors", *range(600))
    identity = identify(ours, "sub/flux.safetensors")
    folders = [str(tmp_path / name) for name in ("first", "second")]
    place = f"{folders[0]}/sub/flux.safetensors"
    to = f"; copy ComfyUI's file to {place}"

    def problem() -> str:
        return find(7, identity, folders).problem

    assert problem() == f"sub/flux.safetensors is not in {', '.join(folders)}{to}"
    assert find(7, identity, []).problem == (
        "sub/flux.safetensors is not in no folder; copy ComfyUI's file to sub/flux.safetensors"
    )
    other, another = f"{place} is another file than beside ComfyUI: ", f"of the same {identity.size_bytes} bytes"
    longer = write(Path(place), *range(610)).stat().st_size
    assert problem() == f"{other}{longer} bytes, not {identity.size_bytes}{to}"
    write(Path(place), *range(600), name="v")
    assert problem() == f"{other}{another}, with another header{to}"
    write(Path(place), *[0.5] * 600)
    assert problem() == f"{other}{another} and header, with other weights{to}"
    deep = write(tmp_path / "second" / "x" / "y" / "flux.safetensors", *range(600))
    found, status = find(7, identity, folders), deep.stat()
    assert (found.number, found.path, found.problem) == (7, str(deep), "")
    assert (found.size_bytes, found.mtime_ns) == (status.st_size, status.st_mtime_ns)
    write(Path(place), *range(600))
    assert find(7, identity, folders).path == place
    for name in ("/flux.safetensors", "../flux.safetensors", "a/./../b", "", "a\0b"):
        assert "is no name within a model folder" in find(7, FileIdentity(name, 1, "", ""), folders).problem


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        (" [fd00::1]:0 ", ("fd00::1", 0)),
        ("shelf:7861", ("shelf", 7861)),
        ("10.0.0.1:65536", "is not HOST:PORT"),
        ("10.0.0.1:131071", "is not HOST:PORT"),
        ("10.0.0.1:", "is not HOST:PORT"),
        ("10.0.0.1:٣", "is not HOST:PORT"),
        (":1", "is not HOST:PORT"),
        ("fd00::1:1", "in brackets"),
        ("[fd00::1:1", "in brackets"),
        ("10.0.0..1:1", "is not HOST:PORT"),
        (f"{'x' * 64}:1", "is not HOST:PORT"),
        ("http://10.0.0.1:1", "is not HOST:PORT"),
        ("scheune.örtlich:1", ("scheune.örtlich", 1)),
        ("[fe80::1]:1", "is link-local"),
    ],
)
def test_an_address_is_read_or_refused(text: str, address: tuple[str, int] | str) -> None:
    if isinstance(address, str):
        with pytest.raises(ValueError, match=address):
            split_address(text)
        return
    assert split_address(text) == address == split_address(join_address(*address))


@pytest.mark.parametrize(
    ("text", "count"),
    [("", None), ("h:1", 1), ("h:1, 1", 1), ("h:1,7", 7), ("h:1,0", ""), ("h:1,8", ""), ("h:1,x", "")],
)
def test_an_offer_waits_for_one_machine_or_as_many_as_have_ranks(text: str, count: int | str | None) -> None:
    if count == "":
        with pytest.raises(ValueError, match=f"with N from 1 to {MAX_RANKS - 1}"):
            Offer.parse(text)
        return
    assert Offer.parse(text) == (None if count is None else Offer("h:1", int(count)))


@pytest.mark.parametrize(("length", "taken"), [(15, False), (16, True), (MAX_TOKEN_BYTES, True), (1025, False)])
def test_a_token_has_so_many_bytes_and_more_are_not_cut(tmp_path: Path, length: int, taken: bool) -> None:
    path = tmp_path / "token"
    path.write_text("x" * length)
    path.chmod(0o600)
    if taken:
        assert read_token(path) == b"x" * length
        return
    with pytest.raises(ValueError, match=f"holds {length} bytes, not 16 to 1024"):
        read_token(path)


def test_who_is_no_parallel_dit_or_of_another_version_is_refused_by_name_and_a_refusal_is_one() -> None:
    joining = MachineChallenge(TOKEN)
    with pytest.raises(ProtocolError, match="is no Parallel DiT; is this the right address and port"):
        joining.answer(GREETING.pack(b"PDiTjoiN", 1, bytes(32)))
    with pytest.raises(ProtocolError, match="speaks version 2 of the control connection, we 1"):
        joining.answer(GREETING.pack(b"PDiTjoin", 2, bytes(32)))
    joining.answer(GREETING.pack(b"PDiTjoin", 1, bytes(32)))
    for magic, version, said in ((b"PDiTjoiN", 1, "is no Parallel DiT"), (b"PDiTjoin", 2, "speaks version 2")):
        with pytest.raises(ProtocolError, match=said):
            ServerChallenge(TOKEN).session(ANSWER.pack(magic, version, bytes(32), bytes(32)))
    for verdict in (REFUSAL, VERDICT.pack(2, bytes(32))):
        with pytest.raises(TokenRefusedError, match="it refuses our token"):
            joining.session(verdict)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({}, ""),
        ({"torch": "2.9.0+cpu"}, ""),
        ({"comfyui": ""}, ""),
        ({"nccl": ""}, ""),
        ({"pack": ""}, "Parallel DiT is missing there and 1 beside ComfyUI; update this pack on both"),
        ({"torch": ""}, "torch is missing there and 2.9.0 beside ComfyUI; install the same torch"),
        ({"comfyui": "0.29"}, "ComfyUI is 0.29 there and 0.30 beside ComfyUI; update ComfyUI"),
        ({"nccl": "2.27"}, "NCCL is 2.27 there and 2.28 beside ComfyUI; install the same torch"),
    ],
)
def test_what_has_to_be_equal_on_two_machines(theirs: dict[str, str], said: str) -> None:
    ours = {"pack": "1", "torch": "2.9.0+cu130", "comfyui": "0.30", "nccl": "2.28"}
    found = difference(Versions(**ours), Versions(**{**ours, **theirs}))
    assert found.startswith(said) and bool(found) == bool(said)


class Socket:
    """Takes what is sent, at most `room` bytes at a time."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.room, self.sent, self.closed = room, b"", False

    def send(self, data: bytes) -> int:
        taken = data[: self.room]
        self.sent += taken
        return len(taken)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server without its thread, at second 100 by its clock `now_s`, whose machines may be silent for 8 s."""
    made: Any = MachineServer.__new__(MachineServer)
    made._versions, made.silence_s, made.host, made.now_s = Versions("1", "2"), 8.0, "10.0.0.1", 100.0
    made._connections, made._machines, made.refusals = [], (), deque()
    made._changed, made._selector = threading.Condition(), SimpleNamespace(unregister=lambda sock: None)
    made._wake = lambda: None
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


def come(beside: Any, name: str, *, pid: int = 1, host: str = "10.0.0.2", versions: Versions | None = None) -> Any:
    """A proven connection whose machine introduces itself."""
    made: Any = SimpleNamespace(sock=Socket(), host=host, address=f"{host}:1", machine=None)
    made.since_s = made.heard_s = made.beaten_s = beside.now_s
    challenge, joining = ServerChallenge(TOKEN), MachineChallenge(TOKEN)
    _, made.session = challenge.session(joining.answer(challenge.greeting))
    beside._connections.append(made)
    said = Introduction(name, ("cpu:0",), ("CPU",), versions or Versions("1", "2"), pid)
    beside._admit(made, said, made.session)
    return made


def test_machines_are_admitted_by_name_and_version_until_a_pool_is_full(beside: Any) -> None:
    first = come(beside, "shelf")
    assert [each.name for each in beside.machines()] == ["shelf"] and b"Welcome" in first.sock.sent
    for wrong, versions in (("shelf", None), ("attic", Versions("9", "2"))):
        refused = come(beside, wrong, pid=2, versions=versions)
        assert refused.sock.closed and b"Refused" in refused.sock.sent and refused not in beside._connections
    taken, other = beside.refusals
    assert taken.endswith("a machine called shelf has joined from 10.0.0.2; give this one another --name")
    assert other.startswith("10.0.0.2: attic: Parallel DiT is 9 there and 1 beside ComfyUI")
    with pytest.raises(ProtocolError, match="it did not introduce itself first"):
        beside._admit(first, FoundFile(1), first.session)
    for number in range(MAX_RANKS - 2):
        come(beside, f"machine {number}")
    assert len(beside.machines()) == MAX_RANKS - 1
    come(beside, "one more")
    assert beside.refusals[-1].endswith("7 machines have joined, and a pool has at most 8 ranks")


@pytest.mark.parametrize(
    ("pid", "host", "after_s", "replaced"),
    [
        (1, "10.0.0.2", 0.0, True),
        (2, "10.0.0.2", 3.9, False),
        (1, "10.0.0.3", 3.9, False),
        (2, "10.0.0.3", 4.0, True),
    ],
)
def test_a_machine_that_comes_back_or_has_been_silent_is_replaced_by_one_of_its_name(
    beside: Any, pid: int, host: str, after_s: float, replaced: bool
) -> None:
    before = come(beside, "shelf")
    beside.now_s += after_s
    now = come(beside, "shelf", pid=pid, host=host)
    assert (before.sock.closed, now.sock.closed) == (replaced, not replaced)
    assert (before.machine.lost is not None) == replaced
    assert [each.address for each in beside.machines()] == [f"{host if replaced else '10.0.0.2'}:1"]


def test_a_machine_is_shown_life_and_given_up_once_it_is_silent(beside: Any) -> None:
    there = come(beside, "shelf")
    for at_s, beats in ((102.0, False), (102.1, True), (104.1, False), (104.2, True)):
        beside.now_s, there.sock.sent = at_s, b""
        beside._tick(there)
        assert (b"Beat" in there.sock.sent) == beats
    there.sock.room, there.sock.sent = 1000, b""
    there.machine._unsent[:] = b"x" * 2500
    beside._tick(there)
    assert len(there.sock.sent) == 2500
    beside.now_s = 108.0
    beside._tick(there)
    beside.now_s = 108.1
    with pytest.raises(ProtocolError, match="nothing was heard of it for 8 s"):
        beside._tick(there)
    stranger = SimpleNamespace(machine=None, since_s=100.0)
    beside.now_s = 100.0 + server.CHALLENGE_S
    beside._tick(stranger)
    beside.now_s += 0.1
    with pytest.raises(ProtocolError, match="it did not prove itself within"):
        beside._tick(stranger)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "it closed the connection"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "it closed the connection"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "No route to host"),
        (BrokenPipeError("it takes no message"), "it takes no message"),
    ],
)
def test_why_a_machine_is_lost_is_said_in_words(beside: Any, error: OSError, said: str) -> None:
    there = come(beside, "shelf")
    beside._guarded(there, mock.Mock(side_effect=error))
    assert there.machine.lost == Lost(said)


def test_without_a_descriptor_for_a_machine_that_joins_the_server_waits(
    beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[float]()
    monkeypatch.setattr(server, "time", SimpleNamespace(sleep=waited.append))
    for number, times in ((errno.ECONNABORTED, 0), (errno.EMFILE, 1), (errno.ENFILE, 2)):
        beside._listener = mock.Mock(accept=mock.Mock(side_effect=OSError(number, os.strerror(number))))
        beside._accept(None)
        assert len(waited) == times and not beside._connections


def test_a_refusal_is_remembered_once_and_what_a_socket_does_not_take_whole_ends_a_connection(beside: Any) -> None:
    for name in ("shelf", "shelf"):
        come(beside, name, versions=Versions("9", "2"))
    assert len(beside.refusals) == 1
    come(beside, "attic", host="10.0.0.3")
    assert len(beside.refusals) == 1
    come(beside, "shelf")
    assert not beside.refusals, "it is there now"
    server._send_whole(Socket(3), b"abc")  # type: ignore[arg-type]
    with pytest.raises(BrokenPipeError, match="it takes no message"):
        server._send_whole(Socket(2), b"abc")  # type: ignore[arg-type]
