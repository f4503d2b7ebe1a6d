"""Weight patches as they travel: in messages of a size, none lost, and told from other strengths of the same ones."""

import math
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime import weight_delta
from parallel_runtime.pool.arena import lay_out
from parallel_runtime.weight_delta import WeightDelta, WeightDeltas, pack, unpack
from parallel_runtime.wire import protocol as wire_protocol
from parallel_runtime.wire.protocol import Message, Op, ProtocolError, encode
from parallel_runtime.wire.records import to_body
from parallel_runtime.wire.requests import ChangeWeights, SetStrengths


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def lora(key: str, rows: int, columns: int, *, seed: int = 1, **more: object) -> WeightDelta:
    up, down = noise(rows, 4, seed=seed, scale=0.3), noise(4, columns, seed=seed + 1, scale=columns**-0.5)
    values = (up, down, 2.0, None)
    return WeightDelta(**{"key": key, "kind": "lora", "strength": 0.8, "values": values, **more})


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'lorra' is unknown"):
        WeightDelta(key="w", kind="lorra", strength=1, values=())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strength": math.nan}, "w: a patch has strength=nan; use a finite number"),
        ({"strength_model": -math.inf}, "w: a patch has strength_model=-inf; use a finite number"),
        ({"values": (noise(3, 4), noise(4, 2), math.inf, None)}, "w: a patch has an alpha of inf; its file is damaged"),
    ],
)
def test_a_number_that_no_message_carries_is_refused_where_it_comes_in(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lora("w", 3, 2, **given)


def test_a_batch_ends_where_its_tensors_are_enough_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [WeightDelta(key=f"7/{name}", kind="hook_weight", strength=1, values=(noise(8, 8),)) for name in "abcde"]
    monkeypatch.setattr("parallel_runtime.weight_delta.ENOUGH_BYTES", 2 * 8 * 8 * 4)
    assert [len(batch.records) for batch in pack(weights)] == [2, 2, 1]


def test_patches_travel_in_batches_and_arrive_as_they_were() -> None:
    patches = [lora(f"w{index % 400}", 3, 2, seed=index) for index in range(800)]
    arrived: dict[str, list[WeightDelta]] = {}
    batches = list(pack(patches))
    assert len(batches) > 1
    for batch in batches:
        assert not arrived.keys() & unpack(batch.records, batch.tensors).keys(), "a weight's patches were torn apart"
        arrived |= unpack(batch.records, batch.tensors)
    assert [len(group) for group in arrived.values()] == [2] * 400
    for index in (0, 400):
        assert torch.equal(arrived["w0"][index // 400].values[0], patches[index].values[0])
        assert arrived["w0"][index // 400].values[2:] == patches[index].values[2:]


def in_diffusers_form(index: int) -> list[WeightDelta]:
    """What a LoRA of Flux.1 in diffusers' form changes of one weight: four parts of it, by an odd strength."""
    parts = [(0, 0, 3072), (0, 3072, 3072), (0, 6144, 3072), (0, 9216, 12288)]
    key, strength = "single_blocks.37.linear1.weight", 0.1 + 0.2 + index
    return [lora(key, 3, 2, seed=index, offset=part, strength=strength, where_used=True) for part in parts]


def test_a_hundred_loras_on_one_weight_travel_in_one_message() -> None:
    (batch,) = pack(delta for index in range(100) for delta in in_diffusers_form(index))
    assert len(batch.records) == 400 and len(batch.tensors) == 800


@pytest.mark.parametrize("of_tensors", [False, True])
def test_what_is_packed_fits_a_message_whatever_it_is(of_tensors: bool) -> None:
    """Filled to the brim, by text or by tensors."""
    more = {} if of_tensors else {"values": (None, None, math.pi * 1e-300, None)}
    keys = [f"{'block.' * (1 if of_tensors else 30)}{index}" for index in range(2000)]
    batches = list(pack(lora(key, 1, 1, **more) for key in keys))
    assert len(batches) > 1 and sum(len(batch.records) for batch in batches) == len(keys)
    for batch in batches:
        change = ChangeWeights(model=1 << 40, records=tuple(batch.records), side_branch=False, first=False, last=False)
        specs, _ = lay_out(batch.tensors, segment=1, start=0)
        encode(Message(Op.CHANGE, 0, 1, 1, to_body(change), specs))
    fullest = max(batches, key=lambda batch: len(batch.records))
    assert not of_tensors or len(fullest.tensors) == wire_protocol.MAX_TENSORS


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "w has 513 patches of 1026 tensors, more than 1024; stack fewer LoRAs"),
        ({"values": (1.0,)}, r"w has 1026 patches of \d+ bytes of text, more than 97280; stack fewer LoRAs"),
    ],
)
def test_more_patches_of_a_weight_than_a_message_carries_are_refused(given: dict[str, Any], said: str) -> None:
    delta = lora("w", 3, 2, **given)
    with pytest.raises(ValueError, match=said):
        list(pack([delta] * (1026 if given else 513)))


def test_strengths_of_more_loras_than_a_message_carries_are_told_apart() -> None:
    """They go with the tensors then: twelve LoRAs of 480 layers, by a slider's odd number."""
    for strength, fit in ((0.8, True), (0.1 + 0.2, False)):
        deltas = WeightDeltas("any", (lora("w", 3, 2, strength=strength),) * 5760, side_branch=True)
        assert deltas.strengths_fit is fit
        message = Message(Op.STRENGTHS, 0, 1, 1, to_body(SetStrengths(model=1, strengths=tuple(deltas.strengths))), ())
        with nullcontext() if fit else pytest.raises(ProtocolError, match="STRENGTHS: a body of 115"):
            encode(message)


def test_equal_tensors_are_the_same_change_and_others_never() -> None:
    first = lora("w", 3, 2)
    read_again = replace(first, values=tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in first.values))
    changes = {"strength": first.strength + 1, "offset": (0, 0, 3), "strength_model": 2.0, "swap": True, "key": "other"}
    others = [replace(first, values=(change, *first.values[1:])) for change in (first.values[0] + 1e-3, None)]
    others.append(replace(first, values=(first.values[0].double(), *first.values[1:])))
    others.append(replace(first, values=(first.values[0].reshape(-1, 1), *first.values[1:])))
    others.append(replace(first, values=(*first.values[:2], 3.0, None)))  # another alpha
    for side_branch in (True, False):

        def known(*deltas: WeightDelta, side_branch: bool = side_branch) -> WeightDeltas:
            return WeightDeltas("any", deltas, side_branch=side_branch).applied()

        held = known(first)
        assert known(read_again).same_as(held)
        stronger = known(replace(read_again, strength=9.0))
        assert not stronger.same_as(held) and stronger.differs_in_strength_alone(held) is side_branch
        for other in (*others, *(replace(first, **{name: value}) for name, value in changes.items())):
            assert not known(other).same_as(held)
            alone = side_branch and other.strength != first.strength
            assert known(other).differs_in_strength_alone(held) is alone, other
        assert not known(first, side_branch=not side_branch).same_as(held) and not known(first, first).same_as(held)


def test_tensors_whose_file_is_written_over_are_others(tmp_path: Path) -> None:
    """They are mapped, so all that were read of the file have its new numbers; the weights have the old ones."""
    file, shorter = tmp_path / "lora.safetensors", tmp_path / "other.safetensors"
    save_file({"a": noise(64, 64), "b": noise(64, 64)}, file)
    save_file({"a": noise(64, 64, seed=5), "b": noise(64, 64, seed=6)}, shorter)

    def read() -> WeightDeltas:
        return WeightDeltas("", (WeightDelta(key="w", kind="diff", strength=1.0, values=(load_file(file)["a"],)),))

    given = read()
    held, again = given.applied(), read().applied()
    assert again.same_as(held)
    shutil.copyfile(shorter, file)  # in place
    assert not read().applied().same_as(held) and not given.applied().same_as(held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_tensors_of_any_dtype_and_shape_are_known_by_a_hash(dtype: torch.dtype) -> None:
    for tensor in (noise(4, 6).to(dtype), noise(4, 6).to(dtype).T, noise(1).to(dtype)[0], noise(0, 3).to(dtype)):
        (delta,) = (
            WeightDeltas("", (WeightDelta(key="w", kind="diff", strength=1.0, values=(tensor,)),)).applied().deltas
        )
        assert isinstance(delta.values[0], str) and delta.num_bytes == 0


def test_a_look_at_cancel_is_taken_between_the_tensors_that_are_hashed() -> None:
    deltas = WeightDeltas("", tuple(lora(f"w{index}", 3, 2, seed=index) for index in range(20)))
    looks = list[int]()

    def check() -> None:
        looks.append(1)
        if len(looks) == 7:
            raise InterruptedError("cancelled")

    with pytest.raises(InterruptedError):
        deltas.applied(check)
    assert len(looks) == 7
    looks.clear()
    assert deltas.applied(lambda: looks.append(1)) == deltas.applied() and len(looks) == 40


def test_tensors_are_hashed_in_several_threads_and_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other one."""
    meet, hashed = threading.Barrier(2, timeout=60), weight_delta._hash
    monkeypatch.setattr(weight_delta.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(weight_delta, "_hash", lambda tensor: (meet.wait(), hashed(tensor))[1])
    one, other = noise(3), noise(3, seed=1)
    deltas = WeightDeltas("", (WeightDelta(key="w", kind="loha", strength=1.0, values=(one, 0.5, other, None)),))
    (delta,) = deltas.applied().deltas
    assert delta.values == (hashed(one), 0.5, hashed(other), None)
