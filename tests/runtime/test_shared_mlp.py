"""Where ranks share a block's tokens, its MLP is computed while others' data travels, and comes out the same."""

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.models.flux.adapter import LAUNCH_FLOPS, Block, FluxAdapter, Mlp, Tokens
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.models.flux.sample import sample_config
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weights.branches import Branch
from parallel_runtime.weights.model_weights import ALL, BlockWeights

# fp32 sums in another order: what the design allows any plan
FP32_TOLERANCE = 1e-5
CONFIG = sample_config(heads=2, head_dim=32, depth=1, depth_single=1)
ROWS = 3 * CONFIG.hidden_size + CONFIG.mlp_hidden
BIG = Workload(width=512, height=512, text_tokens=16)


class Counting(BlockWeights):
    """Weights that remember how many rows of which layer were asked for."""

    def linear(self, name: str, x: torch.Tensor, *, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        out = super().linear(name, x, rows=rows, columns=columns)
        ASKED.append((name, out.shape[-1]))
        return out


ASKED: list[tuple[str, int]] = []


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    ASKED.clear()


def weights(*branches: Branch) -> Counting:
    torch.manual_seed(0)
    hidden, width = CONFIG.hidden_size, CONFIG.head_dim
    norms = {f"norm.{name}_norm.weight": torch.rand(width) + 0.5 for name in ("query", "key")}
    linear = {"linear1.weight": torch.randn(ROWS, hidden) / 8, "linear1.bias": torch.randn(ROWS)}
    columns = hidden + CONFIG.mlp_hidden
    linear |= {"linear2.weight": torch.randn(hidden, columns) / 16, "linear2.bias": torch.randn(hidden)}
    of = {
        name: [one for one in branches if one.down.shape[1] == linear[name].shape[1]]
        for name in ("linear1.weight", "linear2.weight")
    }
    return Counting({**norms, **linear}, of)


def branch(first_row: int, rows: int, *, columns: int = CONFIG.hidden_size) -> Branch:
    return Branch(torch.randn(rows, 4), torch.randn(4, columns), first_row, 1.0, 0.7)


def tokens(number: int) -> Tokens:
    rope = torch.polar(torch.ones(1, number, 1, CONFIG.head_dim // 2), torch.rand(1, number, 1, CONFIG.head_dim // 2))
    return Tokens(torch.randn(1, number, CONFIG.hidden_size), 2, torch.randn(1, 1, CONFIG.hidden_size), rope)


def big_enough() -> int:
    """Tokens whose MLP takes longer than a launch."""
    return int(LAUNCH_FLOPS / (2 * CONFIG.hidden_size * CONFIG.mlp_hidden)) + 1


@pytest.mark.parametrize("first_row", [0, 100, 3 * CONFIG.hidden_size, 3 * CONFIG.hidden_size + 10])
def test_keys_and_values_come_first_and_all_is_as_in_one_product(first_row: int) -> None:
    adapter, block, w = FluxAdapter(CONFIG), Block("single", 0, "single_blocks.0."), weights(branch(first_row, 150))
    some = tokens(big_enough())
    mod = tuple(torch.randn(1, 1, CONFIG.hidden_size) for _ in range(3))
    *whole, start_mlp = adapter.qkv(block, w, some, mod)
    whole.append(start_mlp().joined)
    assert [("linear1", ROWS)] == ASKED
    ASKED.clear()
    *apart, start_mlp = adapter.qkv(block, w, some, mod, shared=True)
    assert [("linear1", 3 * CONFIG.hidden_size)] == ASKED, "the MLP came before keys and values could leave"
    apart.append(start_mlp().joined)
    assert [("linear1", 3 * CONFIG.hidden_size), ("linear1", CONFIG.mlp_hidden)] == ASKED
    start = CONFIG.hidden_size  # before it there is room for the attention
    for one, other in zip([*whole[:3], whole[3][..., start:]], [*apart[:3], apart[3][..., start:]], strict=True):
        assert relative_error(other, one) < 1e-6
    *without, start_mlp = adapter.qkv(block, weights(), some, mod, shared=True)
    without.append(start_mlp().joined[..., start:])
    assert max(map(relative_error, without, [*whole[:3], whole[3][..., start:]])) > 1e-3, "the LoRA shows nowhere"


@pytest.mark.parametrize("heads_apart", [False, True], ids=["heads together", "heads by sender"])
def test_the_last_product_of_the_mlp_alone_and_then_of_the_attention_is_that_of_both(heads_apart: bool) -> None:
    adapter, block, hidden = FluxAdapter(CONFIG), Block("single", 0, "single_blocks.0."), CONFIG.hidden_size
    some, mod = tokens(big_enough()), tuple(torch.randn(1, 1, hidden) for _ in range(3))
    attn = torch.randn(1, some.x.shape[1], CONFIG.num_heads, CONFIG.head_dim)
    attn = attn.unflatten(2, (2, -1)) if heads_apart else attn
    joined = torch.randn(1, some.x.shape[1], hidden + CONFIG.mlp_hidden)

    def after(w: Counting, *, apart: bool) -> torch.Tensor:
        there = Tokens(some.x.clone(), some.num_text, some.vec, some.rope)
        mlp = Mlp(joined.clone())
        if apart:
            mlp = adapter.overlapped_mlp(block, w, mlp)
            assert ASKED == [("linear2", hidden)], "the MLP's part waits for the attention"
        adapter.finish(block, w, there, attn, mod, mlp=mlp, residual=None)
        return there.x - some.x

    beside = branch(10, 40, columns=hidden + CONFIG.mlp_hidden)
    expected = after(weights(beside), apart=False)
    ASKED.clear()
    assert relative_error(after(weights(beside), apart=True), expected) < 1e-6
    assert [("linear2", hidden)] == ASKED, "the attention's part went through the bias again"
    assert relative_error(after(weights(), apart=False), expected) > 1e-3, "the LoRA shows nowhere"


def test_a_product_that_is_done_before_its_launch_is_not_taken_apart() -> None:
    mod = tuple(torch.randn(1, 1, CONFIG.hidden_size) for _ in range(3))
    adapter, block, w = FluxAdapter(CONFIG), Block("single", 0, "single_blocks.0."), weights()
    *_, start_mlp = adapter.qkv(block, w, tokens(64), mod, shared=True)
    mlp = start_mlp()
    assert adapter.overlapped_mlp(block, w, mlp) is mlp
    assert [("linear1", ROWS)] == ASKED


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ulysses=2", "ring=2", "ulysses=2,ring=2"])
def test_ranks_with_big_parts_equal_one_process(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, plan: str
) -> None:
    config = FluxConfig.from_header(read_header(sample.path))
    tokens_of_rank = (BIG.image_tokens + BIG.text_tokens) // 2
    assert 2 * tokens_of_rank * config.hidden_size * config.mlp_hidden > LAUNCH_FLOPS, "small parts show nothing"
    tensors = BIG.tensors(config)
    expected = reference_model(tensors)
    assert relative_error(PlanRunner(eight_ranks, sample, ParallelPlan.parse(plan), options={})(tensors), expected) <= (
        FP32_TOLERANCE
    )
    control = PlanRunner(eight_ranks, sample, ParallelPlan.parse(plan), options={"local_attention": True})
    assert relative_error(control(tensors), expected) > 0.01
