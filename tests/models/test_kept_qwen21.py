"""What Qwen-Image 2.1 keeps between the calls of a run, where ComfyUI has it; of any such class: test_kept_state.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from host.fetch import comfyui_says
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.hosted.kept_state import FreeMemory, KeptState, alike_over, kept_state
from parallel_runtime.models.specs import spec_of
from parallel_runtime.parallel.shard import split_lengths

from .cases_qwen21 import CLASS, TWO, picture, qwen21
from .gloo_group import GlooGroup, OwnTokensOnly
from .ranks import in_ranks
from .tiny import at, call, difference, noise

CPU = torch.device("cpu")
ERROR, CONTROL = 1e-5, 1e-3
PREFIX, TARGET = 9 + 24 + 15, 35  # tokens: text and references, the picture
Step = tuple[str, dict[str, Any]]  # what a call is expected to do with what is kept, and its inputs


def steps(stored: str, device: str = "gpu") -> list[Step]:
    """Two steps of a prompt, two of another, the first again, and a picture of another size."""
    kept = {"qwen_image21_cache": {"device": device, "dtype": stored}}
    other = {"context": noise(1, 7, 48)}
    calls = [
        ("fills", picture(**TWO)),
        ("finds", picture(**TWO, timestep=at(0.4))),
        ("fills", picture(**TWO | other)),
        ("finds", picture(**TWO | other, timestep=at(0.4))),
        ("finds", picture(**TWO, timestep=at(0.2))),
        ("fills", picture(**TWO, x=noise(1, 16, 6, 4))),
    ]
    does = (lambda each: "none") if device == "off" else str
    return [(does(each), inputs | {"transformer_options": dict(kept)}) for each, inputs in calls]


@contextmanager
def keeping(model: nn.Module, run: object = "run") -> Iterator[KeptState]:
    """The module with a run begun."""
    kept = kept_state(model)
    assert kept is not None
    kept.begin(run)
    yield kept
    kept.end()


def rows_of(does: str, inputs: dict[str, Any], group: GlooGroup) -> int:
    """Tokens that this rank's first block computes."""
    prefix = inputs["context"].shape[1] + 24 + 15
    mine = split_lengths(inputs["x"].shape[-1] * inputs["x"].shape[-2], group.parts)
    # of the streams of a call the first has its longer runs on the last ranks, the next ones on the first
    return (0 if does == "finds" else prefix) + mine[group.index]


def alike_over_one(number: int) -> bool:
    """One process agrees with itself."""
    return True


class One:
    """One process."""

    parts, index = 1, 0


ONE = One()


if comfyui_says(*CLASS):

    @in_ranks(2)
    def test_what_is_kept_is_found_by_shared_calls(group: GlooGroup) -> None:
        """As one process with the same options, and the picture's rows alone where it is found."""
        for stored, device in (
            ("default", "gpu"),
            ("default", "cpu"),
            ("int8", "gpu"),
            ("int4", "gpu"),
            ("default", "off"),
        ):
            alone, model = (qwen21(64, (16, 24, 24)) for _ in range(2))  # int4 is in groups of 64
            shared = SharedModel(model, spec_of(type(model)), group)
            alike = alike_over(group, CPU)
            with keeping(alone) as once, keeping(model) as kept:
                for number, (does, inputs) in enumerate(steps(stored, device)):
                    said = f"{stored} on {device}, call {number}"
                    with once.calling(alike_over_one):
                        want = call(alone, inputs)
                    with kept.calling(alike):
                        got = call(model, inputs)
                    assert difference(got, want) <= ERROR, said
                    counted, whole = kept.take_counted(), once.take_counted()
                    assert counted.found == whole.found == (does == "finds"), said
                    assert counted.rows == rows_of(does, inputs, group), f"{said}: {counted.rows} rows"
                    assert whole.rows == rows_of(does, inputs, ONE), f"{said}: {whole.rows} rows in one process"
                shared.group = OwnTokensOnly()
                with kept.calling(alike):
                    assert difference(call(model, inputs), want) > CONTROL, (
                        f"{stored} on {device}: nothing was exchanged"
                    )
                assert kept.take_counted().found == (device != "off"), "the control is of what was kept"

    @in_ranks(2)
    def test_memory_of_the_host_is_shared_by_its_ranks(group: GlooGroup) -> None:
        import comfy.model_management

        memory, free = FreeMemory(), comfy.model_management.get_free_memory
        model, asked = qwen21(), list[int]()
        budget = comfy.model_management.ensure_pin_budget
        comfy.model_management.ensure_pin_budget = lambda size, **_: asked.append(size) or True
        SharedModel(model, spec_of(type(model)), group)
        (_, inputs), *_ = steps("default", "auto")
        kept = kept_state(model)
        assert kept is not None
        model.current_patcher.get_free_memory = lambda device: 0
        try:
            for number in (1, 4):
                kept.begin(number, ranks=number)
                with kept.calling(alike_over(group, CPU)):
                    call(model, inputs)
                kept.end()
        finally:
            comfy.model_management.ensure_pin_budget = budget
        assert asked[1] == 4 * asked[0] > 0
        comfy.model_management.get_free_memory = lambda device: 1000
        try:
            memory.ranks = 4
            assert memory.get_free_memory(CPU) == 250
            assert memory.get_free_memory(torch.device("meta")) == 1000
        finally:
            comfy.model_management.get_free_memory = free
