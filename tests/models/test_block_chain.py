"""The chain of functions around a block, and blocks that a model calls by other methods than `forward`.

Does not own: parity of classes that have such blocks (test_hosted_parity.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.models.block_chain import BEAT, ORDER, chain_at, entries_of, hook_entries
from parallel_runtime.models.hosted.hook_points import find_hook_points
from parallel_runtime.models.hosted.sites import name_site
from parallel_runtime.models.specs import SPECS, ShardingSpec
from parallel_runtime.weights.block_shards import BlockShards
from parallel_runtime.weights.unit_feed import UnitFeed

CPU, CUT = torch.device("cpu"), {"blocks.0:forward_pose": {"x": "x"}}


class Block(nn.Module):
    """Called by two methods, of which one calls the other when asked to, and by `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward_pose(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward_gen(self, x: Tensor, nested: bool = False) -> Tensor:
        made = self.forward_pose(x) if nested else x
        return made + self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            raise ValueError("nothing")
        return self.layer(x)


class Model(nn.Module):
    """Two blocks, each called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward_gen(block.forward_pose(x), nested=True)
        return x


class Own(Block):
    """A block whose own `forward` hands nothing on to the one that it stands for."""

    def forward(self, y: Tensor) -> Tensor:
        return self.layer(y)


class Alone:
    """A group of one rank."""

    size, index = 1, 0

    def start_all_gather(self, mine: Tensor, whole: Tensor) -> None:
        raise AssertionError("nobody is there")


def plan(**changed: object) -> ShardingSpec:
    """A plan of `Model`."""
    said = {
        "attention": {"blocks": "x"},
        "cut": {**CUT, "blocks.*:forward_gen": {"x": "x"}},
        "gather": {"blocks.-1:forward_gen": "x"},
    }
    return ShardingSpec(**{**said, **changed})  # type: ignore[arg-type]


def test_a_change_leaves_no_block_due_and_keeps_what_was_changed_before() -> None:
    block = nn.Linear(3, 3)
    shards = BlockShards({"blocks.0": block}, Alone(), rounded={}, device=torch.device("cpu"), offloaded=True)  # type: ignore[arg-type]
    list(shards.load())
    for name in ("weight", "bias"):
        shards.change({f"blocks.0.{name}": nn.Parameter(torch.full((3, 3) if name == "weight" else (3,), 2.0))})
        with pytest.raises(RuntimeError, match="'blocks.0' are asked for, but none is due"):
            shards._feed.take("blocks.0")
    shards.begin()
    assert block(torch.ones(1, 3)).tolist() == [[8.0] * 3]
    shards.end()


def test_host_memory_that_a_change_replaces_is_freed_once_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr("parallel_runtime.weights.block_shards.wait_for", lambda device: waited.append(device.type))
    for offloaded in (True, False):
        shards = BlockShards({"a": nn.Linear(3, 3)}, Alone(), rounded={}, device=CPU, offloaded=offloaded)  # type: ignore[arg-type]
        list(shards.load())
        assert not waited, "nothing is replaced yet"
        shards.change({"a.bias": nn.Parameter(torch.zeros(3))})
        assert waited == ["cpu"] * offloaded
        waited.clear()


def test_what_stands_around_a_block_runs_once_whichever_method_is_called() -> None:
    block, said = Block(), list[str]()
    hook_entries(block, entries_of(block), BEAT, before=lambda: said.append("in"), after=lambda: said.append("out"))
    assert entries_of(block) == ("forward", "forward_gen", "forward_pose")
    for called in (block, block.forward_pose, lambda x: block.forward_gen(x, nested=True)):
        said.clear()
        called(torch.ones(1, 4))
        assert said == ["in", "out"]
    said.clear()
    with pytest.raises(ValueError, match="nothing"):
        block(torch.ones(0, 4))
    with pytest.raises(RuntimeError):
        block.forward_gen(torch.ones(1, 3))
    assert said == ["in", "out"] * 2


@pytest.mark.parametrize("methods", [lambda _: ("forward_pose", "forward_gen"), None])
def test_weights_of_a_block_are_there_in_the_methods_that_are_named(
    methods: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Model(), torch.randn(3, 4)
    started = list[int]()
    start = UnitFeed._start
    monkeypatch.setattr(UnitFeed, "_start", lambda feed, at: (started.append(at), start(feed, at)))
    with torch.inference_mode():
        want = model(x)
        blocks = {f"blocks.{number}": block for number, block in enumerate(model.blocks)}
        shards = BlockShards(blocks, Alone(), rounded={}, device=CPU, offloaded=True, methods=methods)  # type: ignore[arg-type]
        list(shards.load())
        assert model.blocks[0].layer.weight is None
        for _ in range(3):
            started.clear()
            shards.begin()
            if methods is None:  # hooks on forward never fire
                with pytest.raises((RuntimeError, TypeError)):
                    model(x)
                return
            assert torch.equal(model(x), want)
            shards.end()
            assert len(started) == 2, "a block that runs again before any other is brought once"


def test_the_links_of_a_block_have_one_order_whichever_is_put_first() -> None:
    for names in (ORDER, ORDER[::-1]):
        block, said = Block(), list[str]()

        def around(inner: Callable[..., Tensor], name: str, said: list[str] = said) -> Callable[..., Tensor]:
            return lambda x: (said.append(name), inner(x))[1]

        links = {name: partial(around, name=name) for name in names}
        for name, link in links.items():
            chain_at(block).put(name, link)
        block(torch.ones(1, 4))
        assert said == ["beat", "gather", "share", "cache", "stage", "skip", "lora", "graph"]
        chain_at(block).take_off(links["share"])
        said.clear()
        block(torch.ones(1, 4))
        assert said == ["beat", "gather", "cache", "stage", "skip", "lora", "graph"]
        for link in links.values():
            chain_at(block).take_off(link)
        assert "forward" not in vars(block), "without links a block is as its class has it"


def test_a_function_that_is_set_past_a_chain_is_not_lost_without_a_word() -> None:
    block = Block()
    hook_entries(block, ("forward",), BEAT)
    block.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="Block.forward was set past its chain, which would lose that function"):
        hook_entries(block, ("forward",), BEAT)


def hooked(said: ShardingSpec, of: str = "name") -> dict[tuple[int, str], Sequence[object]]:
    """Which arguments are cut at which method, by block; or something else of them."""
    model = Model()
    number = {id(block): at for at, block in enumerate(model.blocks)}
    points = find_hook_points(model, said)
    return {(number[id(each.module)], each.method): [getattr(cut, of) for cut in each.arguments] for each in points}


@pytest.mark.parametrize(("cut", "keys"), [("0", [[None], []]), ("*", [[0], [0]])])
def test_what_two_modules_are_given_alike_is_cut_once(cut: str, keys: list[list[int | None]]) -> None:
    assert list(hooked(plan(cut={f"blocks.{cut}": {"x": "x"}}, gather={}), "key").values()) == keys


def test_a_path_with_a_colon_names_a_method() -> None:
    both = {(0, "forward_pose"): ["x"], (1, "forward_pose"): [], (0, "forward_gen"): ["x"], (1, "forward_gen"): ["x"]}
    assert hooked(plan()) == both
    assert plan().methods_of("blocks") == ("forward_pose", "forward_gen")
    assert SPECS["comfy.ldm.wan.model.WanModel"].methods_of("blocks") == ("forward",)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gather": {"blocks.-1:forward_all": "x"}}, "Model of this ComfyUI has no method 'blocks.1:forward_all'"),
        ({"gather": {"parts.*:forward": "x"}}, "Model of this ComfyUI has no module 'parts.*'"),
        ({"whole": {"middle": {"x": "x"}}}, "Model of this ComfyUI has no module 'middle'"),
        ({"attention": {"stages": "x"}}, "Model of this ComfyUI has no module 'stages.*'"),
        ({"attention": {"blocks": {"attention": "x"}}}, "Model of this ComfyUI has no module 'blocks.*.attention'"),
        ({"cut": {**CUT, "rear.*": {"e": "x"}}}, "Model of this ComfyUI has no module 'rear.*'"),
        ({"cut": {**CUT, "blocks.1": {"**pe": "x"}}}, "Model: blocks.1 of this ComfyUI takes no argument '**pe'"),
        (
            {"cut": {**CUT, "blocks.*:forward_gen": {"pe": "x"}}},
            "Model: blocks.0:forward_gen of this ComfyUI takes no argument 'pe'",
        ),
        ({"cut": {**CUT, "0": {"pe": "x"}}}, "Model: blocks of this ComfyUI takes no"),
        ({"attention": {"blocks": {"layer:forward_pose": "x"}}}, "no method 'blocks.*.layer:forward_pose'"),
    ],
)
def test_a_method_or_an_argument_that_the_class_lacks_is_named(changed: dict, said: str) -> None:
    with pytest.raises(ValueError) as error:
        hooked(plan(**changed))
    assert said in str(error.value)
    assert "use a ComfyUI that the plan was made for" in str(error.value)


def test_an_argument_of_a_method_that_another_one_stands_for_is_not_taken() -> None:
    model = Model()
    model.blocks[1] = Own()
    find_hook_points(model, plan(cut={**CUT, "blocks.0": {"x": "x"}, "blocks.1": {"y": "x"}}))
    with pytest.raises(ValueError, match=r"Model: blocks.1 of this ComfyUI takes no argument 'x'"):
        find_hook_points(model, plan(cut={**CUT, "blocks.1": {"x": "x"}}))


def test_a_site_is_named_once_and_around_a_function_that_an_instance_has() -> None:
    switch: Any = SimpleNamespace(site="")
    seen: list[str] = []

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(switch.site)
            return x

    patched = Attention()
    patched.forward = Attention().forward  # type: ignore[method-assign]
    for module in (Attention(), patched):
        assert name_site(switch, module, "forward", "attn")
        assert name_site(switch, module, "forward", "another") is False, "of another plan of the same class"
        module(torch.ones(1))
    assert seen == ["attn", "attn"] and switch.site == ""
