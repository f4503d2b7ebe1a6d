"""A machine joins with the token, runs what it is told, and leaves no process behind however it is parted from us."""

import ctypes
import errno
import gc
import itertools
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from descriptors import open_descriptors

from machines.member import OURS, ROOT, Member, marked, started, until
from machines.strangers import besiege
from parallel_runtime import VERSION
from parallel_runtime.cli import gpu_facts, join
from parallel_runtime.errors import PoolError
from parallel_runtime.machines import joined
from parallel_runtime.machines import server as of_machines
from parallel_runtime.machines.connection import (
    ANSWER,
    HEAD,
    MAX_FRAME_BYTES,
    VERDICT,
    MachineChallenge,
    ServerChallenge,
    TokenRefusedError,
    listen_address,
)
from parallel_runtime.machines.machine import Lost
from parallel_runtime.machines.messages import (
    MAX_LINES_CHARS,
    MAX_NAME_CHARS,
    Beat,
    FileIdentity,
    GenerationEnded,
    KillGeneration,
    Launch,
    Versions,
)
from parallel_runtime.machines.server import MAX_STRANGERS, MachineServer
from parallel_runtime.machines.versions import own_versions
from parallel_runtime.process.nccl_segments import segments_of
from parallel_runtime.wire.protocol import ProtocolError

SILENCE_S = 4.0
numbers = itertools.count(1)  # of generations, whose ends a machine remembers


def written_token(folder):
    path = folder / "token"
    path.write_text("0123456789abcdef" * 2)
    path.chmod(0o600)
    return path


def served(token_file):
    """A server for a test, or for some."""
    with_server = MachineServer("127.0.0.1:0", token_file.read_bytes(), versions=OURS, silence_s=SILENCE_S)
    yield with_server
    with_server.close()
    assert not with_server._thread.is_alive()


@pytest.fixture
def token_file(tmp_path):
    return written_token(tmp_path)


@pytest.fixture
def server(token_file):
    yield from served(token_file)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """The server and the process of a machine called shelf, for tests after which it is as it was."""
    folder = tmp_path_factory.mktemp("shelf")
    for server in served(written_token(folder)):
        with Member(server.address, folder / "token", folder / "log", name="shelf", models=[str(folder)]) as member:
            yield server, member


@pytest.fixture
def machine(shelf):
    """That machine; what it still runs is ended."""
    (machine,), before = shelf[0].wait_for(1, 120), next(numbers)
    yield machine
    for number in range(before, next(numbers)):
        machine.kill(number)


def not_told(sock):
    """No signal comes, as long as nobody connects to this socket."""
    return SimpleNamespace(fileno=sock.fileno, held=nullcontext)


def ended(machine, generation):
    """How it ended, once it has."""
    assert machine.wait_ended(generation, 120)
    return machine.ended(generation)


def running(machine, generation):
    """Start a generation; its ranks are there when this returns."""
    machine.start(started(generation, "sleep"))
    until(lambda: len(marked(generation)) == 2, f"two ranks, not {marked(generation)}")


def test_a_machine_joins_starts_and_ends_generations(shelf, machine):
    server, member = shelf
    one, other, never = (next(numbers) for _ in range(3))
    assert (machine.name, machine.devices, machine.versions) == ("shelf", ("cpu:0", "cpu:1"), OURS)
    running(machine, one)
    running(machine, other)  # of another pool
    machine.kill(one)
    assert ended(machine, one) == GenerationEnded(one, -signal.SIGKILL, "the launcher's words")
    assert (len(marked(one)), len(marked(other))) == (0, 2)
    machine.kill(never)
    assert ended(machine, never) == GenerationEnded(never, 0, "")
    time.sleep(1.5 * SILENCE_S)  # signs of life keep it
    assert server.machines() == (machine,)
    assert (len(marked(other)), machine.ended(other)) == (2, None)
    assert member.process.poll() is None


def test_a_machine_joins_over_ipv6_and_is_named_by_its_address_in_brackets(token_file, tmp_path):
    server = MachineServer("[::1]:0", token_file.read_bytes(), versions=OURS, silence_s=SILENCE_S)
    try:
        assert server.address == f"[::1]:{server.port}"
        with Member(server.address, token_file, tmp_path / "log", name="shelf"):
            (machine,) = server.wait_for(1, 120)
            assert re.fullmatch(r"machine shelf \(\[::1\]:\d+\)", str(machine))
            running(machine, 1)
            machine.kill(1)
            ended(machine, 1)
    finally:
        server.close()


@pytest.mark.parametrize("address", ["[fe80::1%eth0]:7861", "[fe80::1]:7861", "[FEbf::1]:7861", "[fd00::1%eth0]:7861"])
def test_a_link_local_address_is_refused_with_the_remedy(address, token_file, tmp_path, capsys):
    from parallel_runtime.__main__ import main

    with pytest.raises(
        ValueError, match=r"is link-local, which .*; give both a private one, .*: ip address add fd00::1"
    ):
        MachineServer(address, b"x" * 32, versions=OURS)
    assert main(["join", address, "--token-file", str(token_file), "--models", str(tmp_path)]) == 2
    assert "is link-local" in capsys.readouterr().err


def test_whatever_a_launcher_does_none_of_its_processes_stays(shelf, machine):
    beside = next(numbers)
    running(machine, beside)
    for what in ("orphans", "exit", "flood"):
        number = next(numbers)
        machine.start(started(number, what))
        if what == "exit":
            assert ended(machine, number) == GenerationEnded(number, 3, "the launcher's words")
            shelf[1].wait_for_line("the ranks have ended; the launcher's words")  # errors tell people to look there
        else:
            until(lambda: len(marked(number)) == 3, f"ranks of {what}")  # noqa: B023
            machine.kill(number)
            assert ended(machine, number).code == -signal.SIGKILL
            said = "x" * MAX_LINES_CHARS if what == "flood" else "the launcher's words"
            assert ended(machine, number).last_lines == said
        assert (len(marked(beside)), len(marked(number))) == (2, 0), what


def test_what_a_shell_started_before_it_became_join_by_exec_is_left_alone(server, token_file, tmp_path):
    """As the first script of a container does, or what a login to it leaves behind."""
    later = "(until [ -e joined ]; do sleep 0.1; done; sleep 600 & echo $! > later) &"
    shell = ["sh", "-c", f'cd "$0"; sleep 600 & echo $! > before; {later} exec "$@"', str(tmp_path)]
    pids = []
    try:
        with Member(server.address, token_file, tmp_path / "log", inside=shell) as member:
            (machine,) = server.wait_for(1, 120)
            (tmp_path / "joined").touch()
            until(lambda: (tmp_path / "later").exists() and (tmp_path / "later").read_text(), "a daemon")
            pids = [int((tmp_path / name).read_text()) for name in ("before", "later")]
            until(lambda: all(psutil.Process(pid).ppid() == member.process.pid for pid in pids), "its children")
            machine.start(started(1, "exit"))
            assert ended(machine, 1).code == 3
            assert [psutil.Process(pid).status() for pid in pids] == [psutil.STATUS_SLEEPING] * 2
            assert marked(1) == []
    finally:
        for pid in filter(psutil.pid_exists, pids):
            os.kill(pid, signal.SIGKILL)


def test_what_was_printed_and_not_yet_read_is_said_of_a_launcher_that_is_killed(monkeypatch):
    monkeypatch.setattr(joined, "LAUNCHER", ("-c", "print('its last words'); import signal; signal.pause()"))
    ours = {child.pid for child in psutil.Process().children()}  # servers of other tests, which are no orphans of its
    process = joined._Process(Launch(started(1, "sleep"), "shelf", "127.0.0.1"))
    try:
        assert select.select([process.output], [], [], 120)[0]
        assert process.end(others=ours) == []
        assert (process.last_lines(), process.code) == ("its last words", -signal.SIGKILL)
    finally:
        process.close()


def test_a_process_that_does_not_end_is_waited_for_no_longer_than_the_limit(monkeypatch):
    """As one that is stuck in a driver."""
    monkeypatch.setattr(joined, "LAUNCHER", ("-c", "import signal; signal.pause()"))
    monkeypatch.setattr(joined, "END_S", 0.2)
    stuck, waits = SimpleNamespace(pid=1 << 30, is_running=lambda: True, kill=lambda: None), list[float]()

    def wait(left, timeout):
        waits.append(timeout)
        time.sleep(0.05)
        return [], left

    process = joined._Process(Launch(started(1, "sleep"), "shelf", "127.0.0.1"))
    monkeypatch.setattr(joined, "_orphans", lambda *_: [stuck])
    monkeypatch.setattr(joined.psutil, "wait_procs", wait)
    try:
        assert process.end(others=set()) == [1 << 30]
    finally:
        process.close()
    assert waits and all(0.0 <= seconds <= 0.2 for seconds in waits)


def test_who_waits_for_machines_sleeps_between_two_looks(server, monkeypatch):
    waits, wait = [], server._changed.wait
    monkeypatch.setattr(server._changed, "wait", lambda seconds: waits.append(seconds) or wait(seconds))
    with pytest.raises(PoolError, match=r"0 of 1 machines joined at .* within 0.3 s"):
        server.wait_for(1, 0.3)
    assert waits and all(0 < seconds <= of_machines.TICK_S for seconds in waits)


def test_a_search_that_goes_wrong_is_answered(machine):
    with pytest.raises(ValueError, match=r"the search for '\\ud800' failed: UnicodeEncodeError"):
        machine.find_file(FileIdentity("\ud800", 1, "", ""), str)


def test_what_nccl_keeps_in_memory_for_killed_ranks_goes_with_them(machine):
    segments = {}
    for generation in (first := next(numbers), second := next(numbers)):
        machine.start(started(generation, "nccl"))
        until(lambda: len(segments_of(marked(generation))) == 2, "two segments")  # noqa: B023
        segments[generation] = segments_of(marked(generation))
    machine.kill(first)
    ended(machine, first)
    assert [path for path in segments[first] if path.exists()] == []
    assert all(path.exists() for path in segments[second])
    machine.kill(second)
    ended(machine, second)
    assert [path for path in segments[second] if path.exists()] == []


@pytest.mark.parametrize("how", ["killed", "terminated", "stopped", "the server closes", "the server is silent"])
def test_a_connection_that_ends_ends_the_ranks_within_the_deadline(server, token_file, tmp_path, how):
    with Member(server.address, token_file, tmp_path / "log") as member:
        (machine,) = server.wait_for(1, 120)
        running(machine, 7)
        if how == "the server closes":
            server.close()
        elif how == "the server is silent":
            server._tick = lambda _: None  # it hears and says nothing any more
        else:
            sent = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "stopped": signal.SIGSTOP}[how]
            member.process.send_signal(sent)
        if how == "stopped":
            until(lambda: machine.lost, "lost")
            assert machine.lost == Lost(f"nothing was heard of it for {SILENCE_S:g} s")
            member.process.send_signal(signal.SIGCONT)
        until(lambda: not marked(7), f"left: {marked(7)}")
        if how in ("killed", "terminated"):
            until(lambda: machine.lost, "lost")
            assert server.machines() == ()
            with pytest.raises(PoolError, match=r"machine node \(127.0.0.1:\d+\) is lost: .*; look at what `join`"):
                machine.start(started(8, "sleep"))


def test_it_joins_again_when_comfyui_has_been_started_again(token_file, tmp_path):
    first = MachineServer("127.0.0.1:0", token_file.read_bytes(), versions=OURS, silence_s=SILENCE_S)
    with Member(first.address, token_file, tmp_path / "log") as member:
        (machine,) = first.wait_for(1, 120)
        running(machine, 1)
        first.close()
        member.wait_for_line("lost: it closed the connection")
        assert marked(1) == []
        second = MachineServer(first.address, token_file.read_bytes(), versions=OURS, silence_s=SILENCE_S)
        try:
            (machine,) = second.wait_for(1, 120)
            running(machine, 1)
        finally:
            second.close()
    until(lambda: not marked(1), "left")


def test_another_token_is_refused_on_both_sides(server, token_file, tmp_path):
    other = tmp_path / "other"
    other.write_text("fedcba9876543210" * 2)
    other.chmod(0o600)
    with Member(server.address, other, tmp_path / "log") as member:
        member.process.wait(120)
        assert "TokenRefusedError: it refuses our token; give both machines the same token file" in member.log
    with pytest.raises(PoolError) as raised:
        server.wait_for(1, 0.1)
    assert str(raised.value) == (
        f"0 of 1 machines joined at {server.address} within 0.1 s (refused: 127.0.0.1: it has another token; give both "
        f"machines the same token file); on each further machine run: python -m parallel_runtime join {server.address} "
        "--token-file FILE"
    )


@pytest.mark.parametrize(("built", "cards", "nccl"), [(True, True, "2.27.5"), (True, False, ""), (False, True, "")])
def test_a_machine_names_the_nccl_that_its_ranks_can_use(monkeypatch, built, cards, nccl):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert own_versions("0.30").nccl == nccl


def test_another_version_is_refused_on_both_sides_by_name(server, token_file, tmp_path):
    """Of what else has to be equal, and of a name that is taken, test_machines_of_a_pool.py has the words."""
    reason = f"Parallel DiT is 9.9.9 there and {VERSION} beside ComfyUI; update this pack on both"
    versions = {"pack": "9.9.9"}
    with Member(server.address, token_file, tmp_path / "log", name="attic", versions=versions) as member:
        member.process.wait(120)
        assert f"RefusedError: {reason}" in member.log
    until(lambda: list(server.refusals), "a refusal")
    (line,) = server.refusals
    assert line.startswith(f"127.0.0.1: attic: {reason}")
    assert server.machines() == ()


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0:0", "[::]:0", "[::ffff:0.0.0.0]:0", "[::ffff:224.0.0.1]:0", "*:0", ":0", "localhost:0"),
        *("127.0.0.1", "224.0.0.1:0"),
    ],
)
def test_it_listens_on_one_address_alone(address):
    with pytest.raises(ValueError, match="interface|HOST:PORT"):
        MachineServer(address, b"x" * 32, versions=OURS)


def test_an_address_that_workers_would_not_listen_on_is_refused_before_a_machine_joins_there(monkeypatch):
    there = [SimpleNamespace(family=socket.AF_INET, address=address) for address in ("10.0.0.5", "127.0.0.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": there})
    with pytest.raises(ValueError, match="^lo has the address 10.0.0.5 before 127.0.0.1"):
        MachineServer("127.0.0.1:0", b"x" * 32, versions=OURS)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EADDRINUSE, "Address already in use; give another port"),
        (errno.EACCES, "Permission denied; give a port from 1024 on"),
        (errno.EADDRNOTAVAIL, "Cannot assign requested address; give an address of this machine"),
    ],
)
def test_why_it_cannot_listen_has_its_own_remedy(number, remedy, monkeypatch):
    class Refusing(socket.socket):
        def bind(self, _):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(of_machines.socket, "socket", Refusing)
    with pytest.raises(OSError, match=f"machines cannot join at 127.0.0.1:80: {remedy}"):
        MachineServer("127.0.0.1:80", b"x" * 32, versions=OURS)


def test_who_says_nothing_may_be_another_program(monkeypatch):
    monkeypatch.setattr(joined, "CONNECT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as web:
        host, port = web.getsockname()
        joining = joined.Joining(host=host, port=port, token=b"x" * 32, introduction=None, models=())
        with pytest.raises(joined.ConnectionLostError, match="timed out.; is this the right address and port"):
            joined.serve(joining, print, not_told(web))


@pytest.mark.parametrize(
    ("status", "memory", "environ", "ours"),
    [
        ("running", 9, {joined.MARK: str(os.getpid())}, True),
        ("running", 9, {joined.MARK: "1"}, False),
        ("running", 9, {"PATH": "/bin"}, False),
        ("running", 9, {}, False),
        ("running", 0, {}, True),
        ("zombie", 0, {}, True),
    ],
    ids=[
        "a rank",
        "of another join",
        "other code's",
        "of no environment",
        "ending: its memory is gone, and with it the mark",
        "ended",
    ],
)
def test_a_process_that_has_no_memory_any_more_is_waited_for(status, memory, environ, ours):
    child = SimpleNamespace(
        status=lambda: status, memory_info=lambda: SimpleNamespace(vms=memory), environ=lambda: environ
    )
    assert joined._is_ours(child, laid_out=time.monotonic() - 1) is ours


def test_a_rank_whose_program_is_being_started_is_known_once_it_has_an_environment():
    """The system closes what is to be closed, by which its launcher goes on, before it has laid the environment out."""
    looks = iter([{}, {}, {joined.MARK: str(os.getpid())}])
    child = SimpleNamespace(
        status=lambda: "running", memory_info=lambda: SimpleNamespace(vms=9), environ=lambda: next(looks)
    )
    assert joined._is_ours(child, laid_out=time.monotonic() + 300)


def test_a_system_without_a_reaper_of_orphans_is_said(monkeypatch):
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *of: asked.append(of) or -1))
    with pytest.raises(OSError, match="this process cannot adopt orphans"):
        joined.adopt_orphans()
    assert asked == [(joined.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)]


def test_a_machine_that_can_start_no_process_or_does_not_offer_the_devices_has_no_generation(monkeypatch):
    def none(launch):
        raise OSError("no more processes")

    sent, introduction = [], SimpleNamespace(name="node", devices=("cpu:0",))
    monkeypatch.setattr(joined, "_Process", none)
    with socket.socket() as sock:
        connection = SimpleNamespace(sock=sock, send=sent.append)
        joining = SimpleNamespace(introduction=introduction, comfyui="", outdated=str)
        said: list[str] = []
        member = joined._Member(joining, connection, 2.0, said.append)
        asked = SimpleNamespace(generation=7, devices=("cpu:0",), world_size=2)
        member._start(asked)
        assert sent == [GenerationEnded(7, -1, "ranks cannot be started: no more processes")] and not member._running
        with pytest.raises(ProtocolError, match="it wants ranks on cpu:0, cpu:1, which this machine does not offer"):
            member._start(SimpleNamespace(generation=8, devices=("cpu:0", "cpu:1"), world_size=3))
        assert len(sent) == 1 and not member._running, "it was not tried"
        joining.outdated = lambda: "ComfyUI was updated"
        member._start(SimpleNamespace(generation=9, devices=("cpu:0",), world_size=2))
        assert sent[1:] == [GenerationEnded(9, -1, "ComfyUI was updated")] and not member._running
        assert said[-1] == "ComfyUI was updated"
        member.close()


def test_a_generation_that_ends_as_another_one_starts_is_not_taken_for_it(monkeypatch):
    """Its descriptors' numbers are the other one's by then."""

    class Process:
        def __init__(self, launch):
            self.generation, self.pid, self.code = launch.start.generation, 1, 0
            self.output, self.pidfd = os.eventfd(0), os.eventfd(0)

        def end(self, *, others):
            return []

        def last_lines(self):
            return "all is well"

        def close(self):
            os.close(self.output)
            os.close(self.pidfd)

    monkeypatch.setattr(joined, "_Process", Process)
    introduction, said = SimpleNamespace(name="node", devices=("cpu:0", "cpu:1")), []
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        asks = [KillGeneration(1), started(2, "sleep")]

        def take():
            if not sock.recv(1):
                raise joined.ConnectionLostError("it has said all")
            return asks

        connection = SimpleNamespace(sock=sock, send=lambda _: None, take=take, early=[])
        member = joined._Member(
            SimpleNamespace(introduction=introduction, comfyui="", outdated=str), connection, 9.0, said.append
        )
        member._start(started(1, "sleep"))
        with listener.accept()[0] as far:
            far.send(b"x")
            assert select.select([sock], [], [], 120)[0]
        os.eventfd_write(member._running[1].pidfd, 1)  # it ends by itself meanwhile
        with pytest.raises(joined.ConnectionLostError, match="it has said all"):
            member.run(not_told(listener))
        assert list(member._running) == [2]
        assert "the ranks have ended" in said, "the words of one that failed are told"
        member.close()


def test_a_connection_that_is_closed_before_all_is_read_is_said_to_be_closed():
    """The system then says that it was reset, and of what is sent later that its pipe is broken."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        connection = joined._Connection(sock, SimpleNamespace(frame=lambda _: b"a frame"))
        assert sock.gettimeout() == joined.CONNECT_S, "neither side is waited for without end"
        with listener.accept()[0] as far:
            connection.send(Beat())
            assert select.select([far], [], [], 120)[0]
        for what in (connection.take, lambda: connection.send(Beat()), lambda: connection.send(Beat())):
            with pytest.raises(joined.ConnectionLostError, match="^it closed the connection$"):
                what()
        connection.sock = mock.Mock(sendall=mock.Mock(side_effect=TimeoutError("timed out")))
        with pytest.raises(joined.ConnectionLostError, match="^it takes no message: timed out$"):
            connection.send(Beat())


def test_an_ipv4_address_that_is_written_as_ipv6_is_listened_on_as_what_it_is():
    assert listen_address("[::ffff:127.0.0.1]:7861") == ("127.0.0.1", 7861)


@pytest.mark.parametrize("how", ["changed", "repeated", "left out", "of another session", "too long"])
def test_a_message_that_somebody_changed_repeated_or_left_out_ends_the_connection(how):
    token = b"0123456789abcdef"

    def sessions():
        server, machine = ServerChallenge(token), MachineChallenge(token)
        verdict, theirs = server.session(machine.answer(server.greeting))
        return theirs, machine.session(verdict)

    server, machine = sessions()
    first, second = (machine.frame({"kind": "Beat", "body": {"n": n}}) for n in (1, 2))
    assert token not in first
    assert server.take(first[:9]) == []
    assert server.take(first[9:]) == [{"kind": "Beat", "body": {"n": 1}}]
    bad = {
        "changed": second[:-3] + b"7" + second[-2:],
        "repeated": first,
        "left out": machine.frame({"kind": "Beat", "body": {"n": 3}}),
        "of another session": sessions()[1].frame({"kind": "Beat", "body": {"n": 2}}),
        "too long": HEAD.pack(MAX_FRAME_BYTES + 1, bytes(32)),
    }[how]
    with pytest.raises(ProtocolError, match="bytes, at most" if how == "too long" else "was changed on its way"):
        server.take(bad)


def test_neither_side_believes_one_that_sends_its_own_proof_back():
    """Who has no token might give each side's words to the other, or to itself."""
    token = b"0123456789abcdef"
    machine, server = MachineChallenge(token), ServerChallenge(token)
    answer = machine.answer(server.greeting)
    _, _, _, proof = ANSWER.unpack(answer)
    with pytest.raises(TokenRefusedError, match="does not have our token"):
        machine.session(VERDICT.pack(1, proof))
    with pytest.raises(TokenRefusedError):
        ServerChallenge(token).session(answer)  # of another connection


def test_strangers_leave_the_server_alive_small_and_open_to_who_has_the_token():
    """`make machines-fuzz` tries a million."""
    assert besiege(3000, seed=1) == []


def test_a_stranger_who_says_nothing_is_let_go_in_time_and_never_keeps_a_machine_out(
    server, token_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(of_machines, "CHALLENGE_S", 2.5)
    idle = [socket.create_connection((server.host, server.port)) for _ in range(3 * MAX_STRANGERS)]
    try:
        with Member(server.address, token_file, tmp_path / "log"):
            assert len(server.wait_for(1, 120)) == 1
        until(lambda: not [each for each in server._connections if each.machine is None], "strangers let go")
    finally:
        for sock in idle:
            sock.close()


@pytest.mark.slow
def test_the_command_joins_and_ends_when_it_is_told(tmp_path, token_file):
    import torch

    server = MachineServer(
        "127.0.0.1:0", token_file.read_bytes(), versions=replace(own_versions(""), torch=torch.__version__)
    )
    command = [sys.executable, "-m", "parallel_runtime", "join", server.address, "--token-file", str(token_file)]
    command += ["--devices", "cpu:2", "--models", str(tmp_path), "--name", "real"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            (machine,) = server.wait_for(1, 60)
            assert (machine.name, machine.devices, machine.device_names) == ("real", ("cpu:0", "cpu:1"), ("CPU", "CPU"))
        finally:
            process.terminate()
            lines = process.communicate()[0].splitlines()
            server.close()
    assert re.fullmatch(rf"join [\d:]+: real offers CPU, CPU to {re.escape(server.address)}", lines[0])
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_ends_the_command_wherever_it_comes():
    """In `__del__` an exception of a handler's would be dropped, and the command would go on."""

    class Gone:
        def __init__(self, number):
            self.number = number

        def __del__(self):
            signal.raise_signal(self.number)

    def told_by(*numbers):
        told = joined.Told()
        for number in numbers:
            Gone(number)
        assert select.select([told], [], [], 0)[0]
        told.end()

    # Whatever what started this process has had ignored, as `nohup` does.
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            with pytest.raises(SystemExit) as ended:
                told_by(number, signal.SIGINT)
            assert ended.value.code == 128 + number, "of the first"
        with pytest.raises(KeyboardInterrupt):
            told_by(signal.SIGINT)
        told = joined.Told()
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)  # while nothing is there to end
        with told.held():
            signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
        with pytest.raises(SystemExit):
            told_by(signal.SIGHUP, signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_command_joins_where_its_lines_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # which was closed
    join._say("joined; waiting for work")
    full = open("/dev/full", "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", full)
    join._say("joined; waiting for work")
    with pytest.raises(OSError, match="No space left"):
        full.close()
    with (tmp_path / "out").open("w", encoding="latin-1") as out:
        monkeypatch.setattr(sys, "stdout", out)
        join._say("b\u00fcro \u5de5 offers CPU")
    assert (tmp_path / "out").read_text(encoding="latin-1").endswith(": b\u00fcro \\u5de5 offers CPU\n")


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("short", 0o600, "holds 5 bytes, not 16 to 1024"),
        ("x" * 32, 0o644, "has mode 0644, so others can read it; chmod 600"),
        (None, 0o600, "cannot be read: No such file or directory; make one"),
    ],
)
def test_a_token_file_that_is_no_secret_is_refused_before_anything_connects(tmp_path, capsys, text, mode, said):
    from parallel_runtime.__main__ import main

    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main(["join", address, "--token-file", str(path), "--models", str(tmp_path)]) == 2
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert said in capsys.readouterr().err


def test_a_server_holds_no_descriptor_after_it_is_closed(token_file, tmp_path):
    """Its own sockets: a machine of this file's other server may be lost meanwhile, and join again."""
    gc.collect()  # of tests before this one

    def others():
        return Counter({name: count for name, count in open_descriptors().items() if not name.startswith("socket:")})

    before = others()
    server = MachineServer("127.0.0.1:0", token_file.read_bytes(), versions=OURS)
    with Member(server.address, token_file, tmp_path / "log"):
        server.wait_for(1, 120)
        server.close()
    port = int(server.address.rpartition(":")[2])
    del server
    gc.collect()
    assert not others() - before
    assert not [each for each in psutil.Process().net_connections("tcp") if each.laddr and each.laddr.port == port]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        ({"models": None}, "no model folder is named; give --models FOLDER"),
        ({"models": ["/nowhere"]}, "--models /nowhere is no folder"),
        ({"comfyui": "/nowhere"}, "/nowhere has no comfy/model_base.py"),
        ({"torch": ""}, "torch cannot be imported with"),
    ],
)
def test_what_a_machine_offers_is_what_it_has(given, words, token_file, tmp_path, monkeypatch):
    gpus = tuple(gpu_facts.Gpu(index=index, name="L40", capability=(8, 9), total_bytes=1) for index in range(2))
    facts = gpu_facts.GpuFacts(torch=given.get("torch", "2.9"), nccl="2.27", gpus=gpus, error="a reason")
    monkeypatch.setattr(gpu_facts, "look", lambda: facts)
    told = {"address": "127.0.0.1:99", "token_file": str(token_file), "comfyui": None, "models": [str(tmp_path)]}
    arguments = SimpleNamespace(**{**told, "devices": "cuda:1", "name": "n" * 999, **given})
    if words:
        with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
            join._joining(arguments)
        return
    joining = join._joining(arguments)
    assert (joining.host, joining.port, joining.models, joining.comfyui) == ("127.0.0.1", 99, (str(tmp_path),), "")
    introduction = joining.introduction
    assert (introduction.devices, introduction.device_names) == (("cuda:1",), ("L40",))
    assert introduction.name == "n" * MAX_NAME_CHARS and introduction.pid == os.getpid()
    assert introduction.versions == Versions(pack=VERSION, torch="2.9", comfyui="", nccl="2.27")
    arguments.name, arguments.devices = "", "cpu:1"
    assert join._joining(arguments).introduction.name == socket.gethostname()[:MAX_NAME_CHARS]
    assert join._joining(arguments).introduction.device_names == ("CPU",)
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "model_base.py").write_text("")
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.9"')
    arguments.models, arguments.comfyui = None, str(tmp_path)
    with_comfyui = join._joining(arguments)
    assert (with_comfyui.models, with_comfyui.comfyui) == ((str(tmp_path / "models"),), str(tmp_path))
    assert with_comfyui.introduction.versions.comfyui == "0.9"
    assert (with_comfyui.outdated(), joining.outdated()) == ("", "")
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.10"')
    updated = "is 0.10 there now and was 0.9 when `join` began; start `join` again"
    assert (with_comfyui.outdated(), joining.outdated()) == (f"ComfyUI {updated}", "")
    (tmp_path / "comfy" / "model_base.py").unlink()
    assert with_comfyui.outdated().startswith(f"{tmp_path} has no comfy/model_base.py")
    monkeypatch.setattr(join, "installed_version", lambda: "99")
    assert joining.outdated().startswith(f"this pack is 99 there now and was {VERSION} when")
