"""What calls with patches between the blocks exchange, and which tokens the patches are given: as a rank makes them.

Does not own which patches there are, nor that each is equal to stock's (test_block_patches.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import ROUNDING
from torch import Tensor, nn

from parallel_runtime.models.hosted.block_hooks import OPTION, ActsBehind, HookModules, OwnRows, at_every_so_many
from parallel_runtime.models.hosted.calls import forward_call
from parallel_runtime.plan import BatchSlice
from parallel_runtime.timing import RegionTimer
from parallel_runtime.worker.held_state import HeldState
from parallel_runtime.worker.hosted import HostedForward, HostedModel

from .cases_images import Z_IMAGE, described, lumina, picture, qwen
from .gloo_group import GlooGroup
from .ranks import in_ranks
from .test_block_patches import QWEN_SIZES, Z_SIZES, record_of, stock_patch
from .tiny import build, difference, noise, text_mask

CPU = torch.device("cpu")
LATER = {"ref_latents": [noise(2, 16, 1, 10, 14)]}  # as many tokens as the picture: a rank of three has no other


class Rank:
    """A rank that has a model, and the weights of modules that patches use."""

    def __init__(self, model: nn.Module, group: GlooGroup, inputs: dict[str, Any]) -> None:
        self.hooks, self._group, self._model, self._inputs = HookModules(), group, model, inputs
        weights: Any = SimpleNamespace(module=model, hook_modules=self.hooks, blocks={})
        timer = RegionTimer(CPU, on=False)
        self._forward = HostedForward(HostedModel(weights), group, timer, lambda: None, HeldState(CPU))
        self._forward._around = self._forward._scales = lambda *_, **__: torch.no_grad()  # type: ignore[method-assign]

    def call(self, kinds: list[str], *patches: Any) -> list[Any]:
        """What the model returns with these patches of stock's; of the exchanges, how many and how many bytes."""
        records = [record_of(self.hooks, patch, kinds, id(patch.model_patch.model)) for patch in patches]
        x, *others = self._inputs
        named = {name: self._inputs[name] for name in others} | {"transformer_options": {OPTION: records}}
        made = forward_call(self._model, self._inputs[x].shape[1], [self._inputs[x]], named)
        tensors = {**made.tensors, "out": torch.zeros(made.out_shape)}
        traffic, rows = self._group.axis.traffic, BatchSlice(0, 0, made.out_shape[0])
        before = traffic.calls, traffic.num_bytes
        out = self._forward.call(rows, tensors, made.options, sequence=self._group, over=None)
        return [out, traffic.calls - before[0], traffic.num_bytes - before[1]]


def stock(model: nn.Module, inputs: dict[str, Any], kinds: list[str], *patches: Any) -> Tensor:
    """What the model returns with the patches themselves, on one rank."""
    given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    out: Tensor = model(**given, transformer_options={"patches": {kind: list(patches) for kind in kinds}})
    return out


@contextmanager
def rows_given(module: nn.Module) -> Iterator[list[int]]:
    """Inside, how many rows an image each call of such a module in this process has."""
    found = list[int]()
    kind: Any = type(module)
    before = kind.forward

    def forward(self: nn.Module, x: Tensor, *others: Any) -> Tensor:
        found.append(x.shape[1])
        out: Tensor = before(self, x, *others)
        return out

    kind.forward = forward
    try:
        yield found
    finally:
        kind.forward = before


@pytest.mark.parametrize("ranks", [2, 3])
@in_ranks()
def test_diffsynth_patches_take_each_ranks_own_tokens_and_exchange_nothing(group: GlooGroup) -> None:
    modules = [build("comfy_extras.nodes_model_patch.QwenImageBlockWiseControlNet", **QWEN_SIZES) for _ in range(2)]
    patches = [stock_patch("DiffSynthCnetPatch", module) for module in modules]
    patches[1].strength, patches[1].encoded_image = 0.3, patches[1].encoded_image.flip(1)
    kinds, uneven = ["double_block"], GlooGroup(shares=(1, 3, 2), ring=True)
    for inputs in (picture(), picture(attention_mask=text_mask(2)), picture(**LATER)):
        for sharing in (group, uneven):
            model = qwen()
            plain, want = stock(model, inputs, kinds), stock(model, inputs, kinds, *patches)
            assert difference(plain, want) > 1e-3, "the patches change nothing"
            rank = Rank(model, sharing, inputs)
            with rows_given(modules[0].controlnet_blocks[0]) as given:
                out, *sent = rank.call(kinds, *patches)
            assert difference(out, want) <= ROUNDING
            plainly = rank.call(kinds)[1:]
            assert sent == plainly, f"patches cost exchanges and bytes: {sent}, without them {plainly}"
            rows = group.gather(torch.tensor([sum(given)]), dim=0, lengths=[1] * group.parts)
            assert int(rows.sum()) == 2 * 2 * 35, "each token of the picture once, in two blocks of two patches"
            assert difference(rank.call(kinds, *patches)[0], want) <= ROUNDING, "a call after another"


Z_KINDS = ["noise_refiner", "double_block"]
# Of how many layers the models are, of how many each patch, and behind how many of the model's tokens are made whole:
# the patches act behind 0, 3, 6; behind 0, 5 as well; and behind the last one, where all of them are made whole.
SOME_LAYERS = ((8, (10,), 3), (8, (10, 6), 4), (7, (10,), 6))


@pytest.mark.parametrize("ranks", [2, 3])
@in_ranks()
def test_fun_controlnets_of_z_image_have_tokens_made_whole_behind_the_layers_where_they_act(group: GlooGroup) -> None:
    model: Any = None
    for layers, own, more in SOME_LAYERS:
        sizes = [Z_SIZES | {"n_control_layers": number} for number in own]
        modules = [build("comfy.ldm.lumina.controlnet.ZImage_Control", **each) for each in sizes]
        inputs = described(context=noise(2, 9, 48) * 2)
        for sharing in (group, GlooGroup(shares=(1, 3, 2), ring=True)):
            model = lumina(**Z_IMAGE | {"n_layers": layers})
            patches = [stock_patch("ZImageControlPatch", module) for module in modules]
            plain, want = stock(model, inputs, Z_KINDS), stock(model, inputs, Z_KINDS, *patches)
            assert difference(plain, want) > 1e-3, "the patches change nothing"
            rank = Rank(model, sharing, inputs)
            _, before, _ = rank.call(Z_KINDS)
            for _ in range(2):
                out, calls, _ = rank.call(Z_KINDS, *patches)
                assert difference(out, want) <= ROUNDING
                assert calls == before + 1 + more, f"{calls} exchanges, {before} without patches"
            assert difference(rank.call(Z_KINDS)[0], plain) <= ROUNDING


@in_ranks(2)
def test_patches_that_act_behind_other_layers_take_turns_in_one_model(group: GlooGroup) -> None:
    model, inputs = lumina(**Z_IMAGE | {"n_layers": 4}), described()
    sizes = [Z_SIZES | {"n_control_layers": number} for number in (10, 15)]
    patches = [
        stock_patch("ZImageControlPatch", build("comfy.ldm.lumina.controlnet.ZImage_Control", **each)) for each in sizes
    ]
    wanted = [stock(model, inputs, Z_KINDS), *(stock(model, inputs, Z_KINDS, patch) for patch in patches)]
    rank = Rank(model, group, inputs)
    for number in (1, 2, 0, 1, 0, 2):
        out, *_ = rank.call(Z_KINDS, *([patches[number - 1]] if number else []))
        assert difference(out, wanted[number]) <= ROUNDING, number


@in_ranks(1)
def test_layers_behind_which_a_fun_controlnet_acts_are_those_of_its_class_in_this_comfyui(group: GlooGroup) -> None:
    """Asked of the class itself: where it calls its module, or changes a token."""
    import comfy_extras.nodes_model_patch as extras

    called = list[int]()

    class Module(SimpleNamespace):
        def __call__(self, *_: object) -> Tensor:
            called.append(index)
            return torch.zeros(1, 1, 1)

        def forward_control_block(self, *_: object) -> tuple[Tensor, Tensor]:
            called.append(index)
            return torch.ones(1, 1, 1), torch.zeros(1, 1, 1)

    for own in range(1, 60):
        patch = extras.ZImageControlPatch.__new__(extras.ZImageControlPatch)
        picture = torch.zeros(1, 1, 2, 2)
        module = Module(n_control_layers=own)
        vars(patch).update(model_patch=SimpleNamespace(model=module), strength=1.0, temp_data=None, image=None)
        vars(patch).update(encoded_image=picture, encoded_image_size=(16, 16), inpaint_image=None, mask=None)
        patch.vae = SimpleNamespace(spacial_compression_encode=lambda: 8)
        expected, found = at_every_so_many({"n_control_layers": own}, 30), set[int]()
        rebuilt = ActsBehind(patch, expected)
        for index in range(30):
            img = torch.zeros(1, 1, 1)
            given = dict.fromkeys(("img_input", "txt", "pe"), torch.zeros(1, 1, 1)) | {"img": img, "vec": None}
            del called[:]
            out = rebuilt(given | {"x": picture, "block_index": index, "block_type": "double"})
            assert "img" not in out and "txt" not in out, "the class writes to what it is given"
            found |= {index} if called or img.any() else set()
        assert found == expected, own
    assert at_every_so_many({}, 3) == at_every_so_many({"n_control_layers": 60}, 3) == {0, 1, 2}, "it is not known"


def test_a_patch_that_looks_at_tokens_behind_other_layers_than_it_is_known_to_fails() -> None:
    patch = ActsBehind(lambda kwargs: {"img": kwargs["img"][:, :1]}, frozenset({1}))
    assert patch({"img": torch.ones(1, 3), "block_index": 1})["img"].shape == (1, 1)
    with pytest.raises(TypeError):
        patch({"img": torch.ones(1, 3), "block_index": 2})


def test_a_row_wise_patch_has_its_whole_picture_back_after_a_call_and_after_an_error() -> None:
    whole, seen = torch.arange(5.0).view(1, 5, 1), list[list[float]]()

    class Patch:
        encoded_image = whole

        def __call__(self, kwargs: dict[str, Any]) -> dict[str, Any]:
            seen.append(self.encoded_image.flatten().tolist())
            if "fails" in kwargs:
                raise ArithmeticError
            return kwargs

    own = Patch()
    call: Any = SimpleNamespace(start=lambda _: 3, streams={"img": (3, 3, 2)}, index=1)
    rows = OwnRows(own, "img", lambda: call)
    rows({})
    with pytest.raises(ArithmeticError):
        rows({"fails": True})
    assert own.encoded_image is whole
    assert seen == [[3.0, 4.0]] * 2, "the last rows of the picture, and a reference"
    call.start, said = lambda _: 5, {"img": 1}
    assert rows(said) is said and len(seen) == 2, "a rank that has none of the picture's tokens"
    call = None
    rows({})
    assert seen[-1] == whole.flatten().tolist(), "a call that is not shared"
