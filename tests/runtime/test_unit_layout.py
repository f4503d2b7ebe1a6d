"""Where the weights of a block lie in the bytes that ranks share out."""

import pytest
import torch

from parallel_runtime.weights.unit_layout import ALIGNMENT, UnitLayout

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("shards", "shares"),
    [*((shards, ()) for shards in (1, 2, 3, 5, 8)), (2, (5, 1)), (3, (1, 999, 1)), (4, (4, 3, 2, 1))],
)
def test_the_parts_of_a_unit_are_each_element_once_and_begin_between_elements(
    shards: int, shares: tuple[int, ...]
) -> None:
    weights = {
        "matrix": (torch.bfloat16, (37, 11)),
        "scalar": (torch.float32, ()),
        "fp8": (FP8, (129,)),
        "empty": (torch.float32, (0, 4)),
        "vector": (torch.float32, (1008,)),  # with it 80 times 64 bytes, which three ranks cannot cut evenly
    }
    layout = UnitLayout(weights, shards=shards, shares=shares)
    whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, (dtype, shape) in weights.items():
        count = torch.Size(shape).numel()
        values = torch.arange(count, dtype=torch.float32).to(dtype)
        reached = 0
        for index in range(shards):
            shard = whole[sum(layout.lengths[:index]) :][: layout.lengths[index]]
            elements, mine = layout.part(name, shard, index)
            if mine.numel():
                assert elements.start == reached
                reached = elements.stop
            mine.copy_(values[elements])
        assert reached == count
        view = layout.views(whole)[name]
        assert view.data_ptr() % ALIGNMENT == whole.data_ptr() % ALIGNMENT
        assert view.shape == shape
        assert torch.equal(view.float().flatten(), values.float())
    for length, share in zip(layout.lengths, shares or (1,) * shards, strict=True):
        assert abs(length - layout.num_bytes * share / sum(shares or (1,) * shards)) <= ALIGNMENT
