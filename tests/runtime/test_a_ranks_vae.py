"""A rank's VAE, in this process: how it is built, which tiles it decodes, and when its weights are on the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.wire.requests import ChangeWeights, DecodeTiles, HoldVae
from parallel_runtime.worker import vae as rank_vae
from parallel_runtime.worker.engine import Engine

from .test_a_ranks_calls import CPU, CUDA, table


class Network(torch.nn.Module):
    """Decodes a latent to ten times of it, or as its numbers say to something that no tile may be."""

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        if float(x[0]) == -1.0:
            torch.rand(1)
        if float(x[0]) == -3.0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x[:1] if float(x[0]) == -2.0 else x * 10


def test_a_rank_decodes_its_own_tiles_and_refuses_what_no_tile_can_be() -> None:
    said, beats = list[tuple[int, int]](), list[int]()
    vae: Any = Engine(rank=1, device=CPU, segments=table()).vae
    vae._held, vae._handle = (7, Network(), {}), 7

    def decode(*latents: float, handle: int = 7, method: str = "decode") -> tuple[Any, list[list[float]]]:
        tensors = {f"in{number}": torch.tensor([value, 1.0]) for number, value in enumerate(latents)}
        rooms = {f"out{number}": torch.zeros(2) for number in range(len(latents))}
        vae._segments = SimpleNamespace(tensor=lambda spec: {**tensors, **rooms}[spec.name])
        specs = [SimpleNamespace(name=name) for name in (*tensors, *rooms)]
        request = DecodeTiles(vae=handle, method=method, tiles=((0,), tuple(range(1, len(latents)))), last=True)
        tell = {"progress": lambda told: said.append((told.done, told.total)), "cancelled": lambda: False}
        return vae.answer(request, specs, **tell, beat=lambda: beats.append(1)), [
            room.tolist() for room in rooms.values()
        ]

    reply, rooms = decode(5.0, 2.0, 3.0)
    assert (reply.num_tiles, reply.refused, said, beats) == (2, "", [(1, 2), (2, 2)], [1, 1])
    assert rooms == [[0.0, 0.0], [20.0, 10.0], [30.0, 10.0]], "the first tile is another rank's"
    drew, rooms = decode(5.0, -1.0, 3.0)
    assert (drew.refused, rooms[1:]) == (
        "it draws random numbers as it decodes, others for each tile",
        [[0.0, 0.0]] * 2,
    )
    shape, rooms = decode(5.0, -2.0, 3.0)
    assert shape.refused == "of (2,) it makes (1,), where ComfyUI's tiles have (2,)" and not any(map(any, rooms))
    full, rooms = decode(5.0, 2.0, -3.0)
    assert (full.refused, rooms) == ("cpu has no memory left for a tile", [[0.0, 0.0], [20.0, 10.0], [0.0, 0.0]])
    for wrong in ({"handle": 8}, {"method": "encode"}):
        with pytest.raises(ValueError, match=r"rank 1 was asked for \w+ of VAE \d, which it lacks"):
            decode(5.0, 2.0, **wrong)
    vae.drop(8)
    assert vae._held is not None
    vae.drop(7)
    assert vae._held is None


def test_a_vae_is_built_once_all_of_it_came_and_each_of_its_layers_is_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, flags, said, freed = list[object](), list[object](), list[str](), list[int]()
    network = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Identity()), torch.nn.Identity())
    network.decode = network.forward  # type: ignore[assignment]

    def build(comfyui: str, parts: dict[str, torch.Tensor], **how: Any) -> torch.nn.Module:
        built.append((comfyui, {name: part.tolist() for name, part in parts.items()}, how))
        return network

    monkeypatch.setattr(rank_vae, "build_vae", build)
    monkeypatch.setattr(rank_vae, "set_flags", flags.append)
    vae: Any = Engine(rank=0, device=CPU, segments=table()).vae
    vae.leave_device = lambda: freed.append(len(said))
    rooms = {name: torch.full((2,), float(number)) for number, name in enumerate(("w0", "w1", "in0", "out0"))}
    vae._segments = SimpleNamespace(tensor=lambda spec: rooms[spec.name])
    vae.drop(7)  # of which nothing has come
    tell: dict[str, Any] = {"progress": lambda _: said.append("tile"), "beat": lambda: said.append("beat")}

    def ask(request: object, *, after: int = 99) -> Any:
        specs = [SimpleNamespace(name=name) for name in rooms]
        return vae.answer(request, specs, **tell, cancelled=lambda: len(said) > after)

    of: Any = {"vae": 7, "comfyui": "/c", "dtype": "float16", "metadata": {"a": "b"}, "flags": {"c": True}}
    for old in ("none", "old"):
        assert ask(HoldVae(**of, names=(old, "mine"), first=old == "none", last=False)).memory.resident_bytes > 0
    assert (built, vae._held) == ([], None)
    ask(HoldVae(**of, names=("x", "y"), first=True, last=False))
    ask(HoldVae(**of, names=("z",), first=False, last=True))
    how = {"dtype": torch.float16, "metadata": {"a": "b"}, "device": CPU}
    assert built == [("/c", {"x": [0.0, 0.0], "y": [1.0, 1.0], "z": [0.0, 0.0]}, how)] and flags == []
    decode = {"vae": 7, "method": "decode", "tiles": ((0,),)}
    assert ask(DecodeTiles(**decode, last=False)).decode_s < 60 and not freed
    assert (rooms["out0"].tolist(), said) == ([2.0, 2.0], ["beat"] * 3 + ["tile"]), "before the tile, in two layers"
    ask(DecodeTiles(**decode, last=True))
    assert freed == [8] and flags == [{"c": True}] * 2, "whatever a model had set meanwhile"
    said.clear()
    with pytest.raises(RequestCancelledError):
        ask(DecodeTiles(**decode, last=False), after=1)
    assert (said, freed) == (["beat"] * 2, [8, 2])


class Doubling(torch.nn.Module):
    """A network whose weight and buffer beside it are where they are asked to be, and which says where it decodes."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.tensor([2.0])), seen
        self.register_buffer("beside", torch.tensor(3.0), persistent=False)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """What a tile becomes has the wrong shape, so that the decode ends there."""
        self.seen.append(f"{self.weight.device} {self.beside.device}")
        return x[:0]


@pytest.mark.parametrize(("device", "there"), [(CPU, "cpu cpu"), (torch.device("meta"), "meta meta")])
def test_a_vae_is_on_its_device_while_tiles_are_decoded(
    device: torch.device, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the device "meta" have no values: what is back is what host memory had, and was not copied."""
    vae: Any = Engine(rank=0, device=CPU, segments=table()).vae
    vae._device, vae._random_state = device, lambda: b""
    seen, emptied = list[str](), list[int]()
    network = Doubling(seen)
    where = network.weight.data_ptr()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(network, "to", lambda to: _moved(network, to))
    vae._segments = SimpleNamespace(tensor=lambda spec: torch.zeros(2))
    vae._held = (7, network, {})
    specs = [SimpleNamespace(name=name) for name in ("in0", "out0")]
    tell: dict[str, Any] = {"progress": None, "cancelled": lambda: False, "beat": lambda: None}
    for tiles in ((), (0,), (0,)):
        vae.answer(DecodeTiles(vae=7, method="decode", tiles=(tiles,), last=False), specs, **tell)
        assert network.weight.tolist() == [2.0] and network.weight.data_ptr() == where and not vae._on_host
    assert seen == [there] * 2 and emptied == ([] if there == "cpu cpu" else [1, 1])


def _moved(network: Doubling, to: torch.device) -> None:
    """As `Module.to`, whose meta tensors have values again on the CPU: else a buffer beside the weights could not."""
    network.beside = torch.tensor(3.0) if to == CPU else network.beside.to(to)
    network.weight = torch.nn.Parameter(network.weight.to(to))


def test_weights_of_a_vae_leave_a_gpu_once_and_before_any_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, put, emptied = list[torch.device](), list[object](), list[int]()
    engine: Any = Engine(rank=0, device=CUDA, segments=table())
    network = SimpleNamespace(to=moved.append, load_state_dict=lambda weights, assign: put.append((weights, assign)))
    engine.vae._held, kept = (7, network, {}), {"weight": torch.ones(1)}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    engine.vae.leave_device()
    assert (moved, put, emptied) == ([], [], [])
    engine.vae.on_device, engine.vae._on_host = True, kept
    tell = {"progress": lambda _: None, "cancelled": lambda: False, "beat": lambda: None}
    change = ChangeWeights(model=1, records=(), side_branch=False, first=True, last=True)
    for _ in range(2):
        engine.handle(change, (), **tell)
    assert (moved, put, emptied, engine.vae.on_device) == ([CPU], [(kept, True)], [1], False)
    engine.vae.on_device, engine.vae._on_host = True, kept
    of: Any = {"vae": 8, "comfyui": "/c", "dtype": "float16", "metadata": {}, "flags": {}}
    engine.vae._hold(HoldVae(**of, names=(), first=True, last=False), {})
    assert not engine.vae.on_device and not engine.vae._on_host, "another VAE has nothing there"
