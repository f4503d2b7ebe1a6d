"""Further machines of this ComfyUI: the address where they may join, the token, and which machines are there.

Owns one server an address, made when a node first offers it and closed when a prompt has SP Configs and none of them
names it, and the token's file in ComfyUI's user folder. Nothing else listens. Does not own which ones are let in
(machines/server.py) nor what their ranks do (pool/remote_ranks.py).
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ....parallel_runtime.devices import Device
from ....parallel_runtime.errors import PoolError
from ....parallel_runtime.machines.connection import read_token
from ....parallel_runtime.machines.machine import Machine
from ....parallel_runtime.machines.server import JOIN, MachineServer, Offer
from ....parallel_runtime.machines.versions import own_versions
from ..contract.comfyui import check_cancelled, folder_paths
from ..contract.version import comfyui_version, refuse_off
from ..model.pools import POOLS

FIRST_WAIT_S = 60.0
AGAIN_WAIT_S = 8.0  # where as many had joined, or were waited for in vain: one that is well joins again within seconds
TICK_S = 0.1
TOKEN_BYTES = 32

_log = logging.getLogger(__name__)


class FurtherMachines:
    """The servers of this process by address. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, MachineServer] = {}  # the one that was offered last is the last; replaced, not changed
        self._most: dict[str, int] = {}  # how many were ever there at once, or waited for until the time was over

    def devices_of(self, offer: Offer, *, say: Callable[[str], None] | None) -> tuple[Device, ...]:
        """The devices of machines that are there, once as many have joined as are waited for, or after a while.

        `say` is told meanwhile what is waited for; without it nothing is opened and no machine is waited for. Raises
        `ValueError` for an address that is not this machine's, and ComfyUI's interrupt when the user cancels.
        """
        server = self._servers.get(offer.address) if say is None else self._joined(offer, say)
        if server is None:
            return ()
        devices = [Device.of_machine(text, machine.name) for machine in server.machines() for text in machine.devices]
        return tuple(devices)

    def _joined(self, offer: Offer, say: Callable[[str], None]) -> MachineServer:
        """The server of an address, once as many have joined there as are waited for, or after a while."""
        server = self._server(offer.address)
        until = time.monotonic() + (AGAIN_WAIT_S if self._most.get(offer.address, 0) >= offer.count else FIRST_WAIT_S)
        while len(server.machines()) < offer.count and time.monotonic() < until:
            check_cancelled()
            there = f"{len(server.machines())} of {offer.count} further machines are there"
            refused = f"\nrefused: {server.refusals[-1]}" if server.refusals else ""
            say(f"{there}; {JOIN.format(server.address)}\nthe token is in {token_file()}{refused}")
            time.sleep(TICK_S)
            server = self._server(offer.address)  # another one, where Stop listening has ended the prompt before this
        self._most[offer.address] = max(self._most.get(offer.address, 0), len(server.machines()), offer.count)
        return server

    def named(self, devices: tuple[Device, ...]) -> tuple[Machine, ...]:
        """The machines that have these devices, those of the address that was offered last before others.

        Raises PoolError for one that is not there any more.
        """
        joined = {machine.name: machine for server in self._servers.values() for machine in server.machines()}
        names = dict.fromkeys(device.machine for device in devices if device.machine)
        if missing := [name for name in names if name not in joined]:
            raise PoolError(
                f"machine {missing[0]} is not there any more",
                remedy="queue again to run without it, or have it join again",
            )
        return tuple(joined[name] for name in names)

    def keep(self, asked: Iterable[object]) -> None:
        """Close all addresses but those that are asked for, by SP Config's texts; what is no text may name any of them.

        The workers on the machines that joined there end first, with the rest of their pools.
        """
        texts = list(asked)
        if not all(isinstance(text, str) for text in texts):
            return
        kept = {Offer.address_in(text) for text in texts}  # also of a node that nothing needs, whatever stands there
        with self._lock:  # to the end: another offer of the address waits until it is closed
            closing = {address: server for address, server in self._servers.items() if address not in kept}
            staying = {address: server for address, server in self._servers.items() if address in kept}
            if closing:
                POOLS.close_without({machine.name for server in staying.values() for machine in server.machines()})
            for address, server in closing.items():
                server.close()
                del self._most[address]  # machines need a while to join again
                _log.info("further machines may not join at %s any more", address)
            self._servers = staying

    def fingerprint(self, offer: Offer | None) -> str:
        """Changes with every machine that comes or goes, and for as long as one has yet to be waited for.

        None: an offer that is not known yet, since another node gives it. Then it is all machines that count.
        """
        if offer is None:
            return " ".join(_told(server.machines()) for server in self._servers.values())
        server = self._servers.get(offer.address)
        machines = () if server is None else server.machines()
        if len(machines) < offer.count and self._most.get(offer.address, 0) < offer.count:
            return f"waiting at {time.monotonic_ns()}"
        return f"{len(machines)} of {offer.count}: {_told(machines)}"

    def offered(self) -> list[str]:
        """The addresses where machines may join now. Never waits."""
        return list(self._servers)

    def described(self) -> list[dict]:
        """The machines that are there, for the panel: devices, versions, files that were asked for. Never waits."""
        return [
            {
                "name": machine.name,
                "devices": list(machine.device_names),
                "versions": [f"torch {machine.versions.torch}", f"ComfyUI {machine.versions.comfyui or 'none'}"],
                "files": [{"name": name, "problem": problem} for name, problem in machine.files.items()],
            }
            for server in tuple(self._servers.values())
            for machine in server.machines()
        ]

    def _server(self, address: str) -> MachineServer:
        with self._lock:
            server = self._servers.get(address)
            if server is None:
                token = read_token(token_file())
                try:
                    server = MachineServer(address, token, versions=own_versions(comfyui_version() or ""))
                except OSError as error:
                    raise ValueError(f"machines={address}: {error.strerror}") from error
                self._most[address] = 0
            others = {key: other for key, other in self._servers.items() if key != address}
            self._servers = {**others, address: server}
            return server


def _told(machines: Iterable[Machine]) -> str:
    """Equal for no two of all that ever join: an object's `id` may be that of one that has gone."""
    return " ".join(f"{machine.name} {machine.pid} {machine.address}" for machine in machines)


def token_file() -> Path:
    """The file with the token, made when it is first asked for; no other user may read it.

    Raises `ValueError` where it cannot be written.
    """
    refuse_off("machines")
    path = Path(folder_paths.get_user_directory()) / "parallel_dit" / "join-token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(TOKEN_BYTES))
        except OSError:
            path.unlink()  # the next prompt would find it empty
            raise
    except FileExistsError:
        pass
    except OSError as error:
        raise ValueError(
            f"the token of further machines cannot be written to {path} ({error.strerror}); free space there, let this "
            "user write there, or start ComfyUI with --user-directory FOLDER"
        ) from error
    return path


MACHINES = FurtherMachines()  # the one of this process; never rebound
