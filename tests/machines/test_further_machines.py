"""How long prompts wait for machines, when SP Config runs again, which machine is meant, and when nobody may join."""

import importlib
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from comfy.conftest import imported_pack

from parallel_runtime.devices import Device
from parallel_runtime.machines.server import Offer

PORTS = itertools.count(40000)  # of connections
HERE, THERE = "127.0.0.1:1", "127.0.0.1:2"


class Server:
    """As `MachineServer`, with the machines that a test puts there."""

    def __init__(self, address: str, *_: object, **__: object) -> None:
        self.address, self.refusals = address, ()
        self.there: tuple[Any, ...] = ()
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def machines(self) -> tuple[Any, ...]:
        return self.there


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """nodes/host/panel/machines.py with nothing of ComfyUI but a folder, and a clock that waits put forward."""
    management = SimpleNamespace(throw_exception_if_processing_interrupted=lambda: None)
    comfy = ModuleType("comfy")
    comfy.model_management = management  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy", comfy)
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace(get_user_directory=lambda: str(tmp_path)))
    with imported_pack("pack_that_waits") as pack:
        found = importlib.import_module(f"{pack.__name__}.nodes.host.panel.machines")
        now_s = [0.0]
        clock = SimpleNamespace(
            monotonic=lambda: now_s[0],
            monotonic_ns=time.monotonic_ns,
            sleep=lambda seconds: now_s.append(now_s.pop() + seconds),
        )
        for name, value in {"MachineServer": Server, "time": clock}.items():
            monkeypatch.setattr(found, name, value)
        yield found


def shelf(device: str = "cpu:0") -> Any:
    return SimpleNamespace(name="shelf", devices=(device,), pid=7, address=f"10.0.0.2:{next(PORTS)}")


def test_after_a_wait_in_vain_the_next_prompts_wait_briefly_and_nothing_runs_again(module: Any) -> None:
    further, offer = module.FurtherMachines(), Offer(HERE, 1)
    assert further.devices_of(offer, say=None) == (), "nothing is opened"
    assert further.fingerprint(offer) != further.fingerprint(offer)
    first: list[str] = []
    assert further.devices_of(offer, say=first.append) == ()
    nobody = further.fingerprint(offer)
    assert further.fingerprint(offer) == nobody
    again: list[str] = []
    assert further.devices_of(offer, say=again.append) == ()
    assert 0 < len(again) < len(first)
    more = Offer(HERE, 2)
    assert further.fingerprint(more) != further.fingerprint(more)  # two have not been waited for
    further._servers[HERE].there = (shelf(),)
    somebody = further.fingerprint(offer)
    assert somebody == further.fingerprint(offer) != nobody


def test_of_an_offer_that_another_node_gives_any_machine_counts_and_nothing_runs_again_without(module: Any) -> None:
    further = module.FurtherMachines()
    assert further.fingerprint(None) == further.fingerprint(None)
    for address in (HERE, THERE):
        before = further.fingerprint(None)
        further._server(address).there = (shelf(),)
        assert further.fingerprint(None) == further.fingerprint(None) != before


def test_a_machine_that_comes_back_is_another_one(module: Any) -> None:
    further, offer, told = module.FurtherMachines(), Offer(HERE, 1), set[str]()
    server = further._server(HERE)
    for _ in range(9):
        server.there = ()  # the last one is gone, and its memory may be the next one's
        server.there = (shelf(),)
        told.add(further.fingerprint(offer))
    assert len(told) == 9


def test_a_prompt_that_waits_while_another_one_was_to_stop_listening_opens_the_address_again(module: Any) -> None:
    further, offer = module.FurtherMachines(), Offer(HERE, 1)
    first = further._server(HERE)

    def stop(_: str) -> None:
        if not first.closed:
            further.keep(())
        else:
            further._servers[HERE].there = (shelf(),)

    (device,) = further.devices_of(offer, say=stop)
    assert (device.machine, first.closed, further.offered()) == ("shelf", True, [HERE])


def test_a_cancel_ends_the_wait_for_machines(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class CancelledError(Exception):
        pass

    further, told = module.FurtherMachines(), list[str]()

    def say(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            further._server(HERE).there = (shelf(),)

    def cancelled() -> None:
        if len(told) == 1:
            raise CancelledError

    monkeypatch.setattr(module, "check_cancelled", cancelled)
    monkeypatch.setattr(module, "FIRST_WAIT_S", 600.0)
    with pytest.raises(CancelledError):
        further.devices_of(Offer(HERE, 1), say=say)
    assert len(told) == 1


def test_of_two_machines_of_a_name_the_one_at_the_address_that_was_offered_last_is_meant(module: Any) -> None:
    further = module.FurtherMachines()
    devices = {}
    for address in (HERE, THERE, HERE):
        further._server(address).there = (shelf(f"cpu:{address[-1]}"),)
        devices[address] = further.devices_of(Offer(address, 1), say=lambda _: None)
        (machine,) = further.named(devices[address])
        assert machine is further._servers[address].there[0]


def test_an_address_is_closed_with_its_workers_once_no_config_of_a_prompt_names_it(module: Any) -> None:
    further = module.FurtherMachines()
    ended: list[str] = []
    for address in (HERE, THERE):
        further._server(address).there = (SimpleNamespace(name=address, devices=("cpu:0",)),)
        further._joined(Offer(address, 1), lambda _: None)
        pool = SimpleNamespace(state="idle", close=lambda address=address: ended.append(address))
        module.POOLS._pools[(Device("cpu", 0, machine=address),)] = pool
    module.POOLS._pools[(Device("cpu", 0),)] = SimpleNamespace(state="idle", close=lambda: ended.append("here"))
    here, there = further._servers[HERE], further._servers[THERE]
    further.keep([f"{HERE}, 2", THERE, ""])
    further.keep([HERE, ["another node", 0]])  # which may say the other address
    further.keep([HERE, f"{THERE}, 2 machines", "192.168.1.10"])  # which somebody is still writing
    assert (further.offered(), ended) == ([HERE, THERE], [])
    further.keep(["", HERE])
    assert (further.offered(), ended, here.closed, there.closed) == ([HERE], [THERE], False, True)
    assert THERE not in further._most  # the next prompt that names it waits as the first one did
    further.keep([""])
    assert (further.offered(), list(dict.fromkeys(ended)), here.closed) == ([], [THERE, HERE], True)
