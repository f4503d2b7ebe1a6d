"""Changes to one weight: LoRA and its relatives, merged by the arithmetic ComfyUI merges them with.

Letters: `O` rows and `I` columns of the weight, `r` rank of a low-rank pair, `b` block size.

Owns one function a kind, from a weight and a patch to the change it makes. A weight is always computed from its
pristine rows and all its patches, never from a sum that ran on. Knows no file and no model. Sources: LoRA (arXiv
2106.09685), LoHa and LoKr (LyCORIS, arXiv 2309.14859), OFT (arXiv 2306.07280), BOFT (arXiv 2311.06243), DoRA (arXiv
2402.09353); the order of operations and the meaning of alpha and strength follow ComfyUI's `weight_adapter`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from ..weight_patch import Value, WeightPatch

RUN_BYTES = 1 << 20  # of fp32 rows, with their change: what a core's own cache holds
DEVICE_RUN_BYTES = 64 << 20


def merge(
    pristine: torch.Tensor,
    patches: Sequence[WeightPatch],
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    first: int = 0,
    device: torch.device | None = None,
) -> None:
    """Write the weight `pristine` times `scale` with `patches` to `out`, which may be of another dtype and device.

    `out` is contiguous and holds the weight's elements from number `first` on: all of them or, flat, a run of them.
    `device` computes, by default that of `out`. Raises `ValueError` when a patch does not fit the weight.

    LoRAs go through in runs of rows that stay in the processor's cache, several times faster than whole matrices of
    fp32, and only the runs that `out` has a part in; other kinds need the whole weight. The runs are the same whatever
    part is asked for, so that parts are the whole cut up, to the last bit.
    """
    device, flat = device or out.device, out.view(-1)
    if not all(_goes_by_rows(patch, pristine) for patch in patches):
        if flat.numel():
            whole = patched(pristine.to(device), patches, scale=scale).flatten()
            flat.copy_(whole[first : first + flat.numel()])
        return
    for patch in patches:
        _check_lora(pristine, patch)
    like = torch.empty(0, device=device)
    factors = [tuple(_tensor(value, like, torch.float32).flatten(1) for value in patch.values[:2]) for patch in patches]
    columns, last = pristine.shape[1], first + flat.numel()
    step = max(1, (RUN_BYTES if device.type == "cpu" else DEVICE_RUN_BYTES) // (4 * columns))
    for start in range(first // columns // step * step, -(-last // columns) if flat.numel() else 0, step):
        rows = _fp32(pristine[start : start + step].to(device), scale)
        for patch, (up, down) in zip(patches, factors, strict=True):
            _add_lora(rows, patch, up, down, start=start, of=pristine.shape[0])
        low, high = max(first, start * columns), min(last, (start + rows.shape[0]) * columns)
        flat[low - first : high - first].copy_(rows.view(-1)[low - start * columns : high - start * columns])


def _add_lora(
    rows: torch.Tensor, patch: WeightPatch, up: torch.Tensor, down: torch.Tensor, *, start: int, of: int
) -> None:
    """Add a LoRA to a run of rows that begins at row `start` of a weight of `of` rows, in place."""
    first, length = (0, of) if patch.offset is None else patch.offset[1:]
    low, high = max(start, first), min(start + rows.shape[0], first + length)
    if low < high:
        target = rows[low - start : high - start]
        target *= patch.strength_model
        target.addmm_(up[low - first : high - first], down, alpha=patch.strength * _lora_scale(patch))


def _fp32(weight: torch.Tensor, scale: float) -> torch.Tensor:
    weight = weight.to(torch.float32, copy=True)
    return weight if scale == 1.0 else weight.mul_(scale)


def patched(pristine: torch.Tensor, patches: Sequence[WeightPatch], *, scale: float = 1.0) -> torch.Tensor:
    """The weight (O, I) or (O,) times `scale` in fp32 with all `patches`, in order; `pristine` is left alone.

    Raises `ValueError` when a patch does not fit the weight.
    """
    weight = _fp32(pristine, scale)
    for patch in patches:
        target = weight if patch.offset is None else weight.narrow(*patch.offset)
        if patch.strength_model != 1.0:
            target *= patch.strength_model
        try:
            KINDS[patch.kind](target, patch)
        except RuntimeError as error:
            raise _misfit(patch, list(target.shape)) from error
    return weight


def _goes_by_rows(patch: WeightPatch, weight: torch.Tensor) -> bool:
    along_rows = patch.offset is None or patch.offset[0] == 0
    return patch.kind == "lora" and patch.values[3] is None and not patch.swap and along_rows and weight.ndim == 2


def _check_lora(weight: torch.Tensor, patch: WeightPatch) -> None:
    up, down = (_tensor(value, weight, torch.float32).flatten(1) for value in patch.values[:2])
    rows = weight.shape[0] if patch.offset is None else patch.offset[2]
    if (up.shape[0], down.shape[1]) != (rows, weight.shape[1]) or up.shape[1] != down.shape[0]:
        raise _misfit(patch, [rows, weight.shape[1]])


def _misfit(patch: WeightPatch, shape: list[int]) -> ValueError:
    shapes = [list(value.shape) for value in patch.values if isinstance(value, torch.Tensor)]
    return ValueError(
        f"a {patch.kind} patch of shapes {shapes} does not fit a weight of {shape}; use one made for this model"
    )


def _lora_scale(patch: WeightPatch) -> float:
    _, down, alpha, _ = patch.values
    return _scale(alpha, down.shape[0] if isinstance(down, torch.Tensor) else 1)


def _diff(target: torch.Tensor, patch: WeightPatch) -> None:
    if patch.strength != 0.0:
        target += _swapped(patch, patch.strength * _tensor(patch.values[0], target))


def _set(target: torch.Tensor, patch: WeightPatch) -> None:
    target.copy_(_tensor(patch.values[0], target))


def _lora(target: torch.Tensor, patch: WeightPatch) -> None:
    up, down, _, dora = patch.values
    first, second = _tensor(up, target).flatten(1), _tensor(down, target).flatten(1)
    _add(target, (first @ second).reshape(target.shape), patch, scale=_lora_scale(patch), dora=dora)


def _loha(target: torch.Tensor, patch: WeightPatch) -> None:
    first_a, first_b, alpha, second_a, second_b, first_core, second_core, dora = patch.values
    first = _product(first_a, first_b, first_core, target)
    second = _product(second_a, second_b, second_core, target)
    rank = _tensor(first_b, target).shape[0]
    _add(target, (first * second).reshape(target.shape), patch, scale=_scale(alpha, rank), dora=dora)


def _lokr(target: torch.Tensor, patch: WeightPatch) -> None:
    whole_1, whole_2, alpha, a_1, b_1, a_2, b_2, core, dora = patch.values
    rank = None
    if whole_1 is None:
        rank = _tensor(b_1, target).shape[0]
    if whole_2 is None:
        rank = _tensor(b_2, target).shape[0]
    first = _product(a_1, b_1, None, target) if whole_1 is None else _tensor(whole_1, target)
    second = _product(a_2, b_2, core, target) if whole_2 is None else _tensor(whole_2, target)
    if second.ndim == 4:
        first = first[:, :, None, None]
    scale = 1.0 if rank is None else _scale(alpha, rank)
    _add(target, torch.kron(first, second).reshape(target.shape), patch, scale=scale, dora=dora)


def _glora(target: torch.Tensor, patch: WeightPatch) -> None:
    a_1, a_2, b_1, b_2 = (_tensor(value, target).flatten(1) for value in patch.values[:4])
    alpha, dora = patch.values[4:6]
    old = b_2.shape[1] == b_1.shape[0] == a_1.shape[0] == a_2.shape[1]
    new = b_2.shape[0] == b_1.shape[1] == a_1.shape[1] == a_2.shape[0]
    if old and new:  # both readings fit; ComfyUI takes the old one for square weights alone
        old = a_2.shape[0] == target.shape[0] == target.shape[1]
    if old:
        rank, change = a_1.shape[0], b_2 @ b_1 + (target @ a_2) @ a_1
    else:
        rank, change = a_2.shape[0], (target @ a_1) @ a_2 + b_1 @ b_2
    _add(target, change.reshape(target.shape), patch, scale=_scale(alpha, rank), dora=dora)


def _oft(target: torch.Tensor, patch: WeightPatch) -> None:
    blocks, _, alpha, dora = patch.values
    limit = 0.0 if alpha is None else _number(alpha)
    rotation = _cayley(_tensor(blocks, target), limit)  # (number of blocks, b, b)
    count, size = rotation.shape[:2]
    identity = torch.eye(size, dtype=target.dtype, device=target.device)
    rows = target.reshape(count, size, *target.shape[1:])
    # strength stands here and again below, as it does in ComfyUI
    turned = torch.einsum("knm,kn...->km...", (rotation - identity) * patch.strength, rows)
    _add(target, turned.reshape(target.shape), patch, scale=limit if dora is not None else 1.0, dora=dora)


def _boft(target: torch.Tensor, patch: WeightPatch) -> None:
    blocks, rescale, alpha, dora = patch.values
    limit = 0.0 if alpha is None else _number(alpha)
    rotations = _cayley(_tensor(blocks, target), limit)  # (factors, number of blocks, b, b)
    size = rotations.shape[-1]
    identity = torch.eye(size, dtype=target.dtype, device=target.device)
    rows = target
    for factor, rotation in enumerate(rotations):
        if patch.strength != 1:
            rotation = rotation * patch.strength + (1 - patch.strength) * identity
        stride = 2**factor * (size // 2)
        rows = rows.unflatten(0, (-1, 2, stride)).transpose(1, 2).flatten(0, 2).unflatten(0, (-1, size))
        rows = torch.einsum("bij,bj...->bi...", rotation, rows)
        rows = rows.flatten(0, 1).unflatten(0, (-1, stride, 2)).transpose(1, 2).flatten(0, 2)
    if rescale is not None:
        rows = rows * _tensor(rescale, target)
    _add(target, rows - target, patch, scale=limit if dora is not None else 1.0, dora=dora)


KINDS: Mapping[str, Callable[[torch.Tensor, WeightPatch], None]] = {
    "diff": _diff,
    "set": _set,
    "lora": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "glora": _glora,
    "oft": _oft,
    "boft": _boft,
}


def _add(target: torch.Tensor, change: torch.Tensor, patch: WeightPatch, *, scale: float, dora: Value) -> None:
    """Add the change, or with DoRA add it and give every row (or column) its learnt length."""
    if dora is None:
        target += _swapped(patch, (patch.strength * scale) * change)
        return
    moved = target + _swapped(patch, scale * change)
    lengths = _tensor(dora, target)
    if lengths.shape[0] == moved.shape[0]:
        norm = target.flatten(1).norm(dim=1, keepdim=True)
    else:
        norm = moved.transpose(0, 1).flatten(1).norm(dim=1, keepdim=True).transpose(0, 1)
    moved *= lengths / (norm + torch.finfo(target.dtype).eps)
    target += patch.strength * (moved - target)


def _cayley(blocks: torch.Tensor, limit: float) -> torch.Tensor:
    """Orthogonal matrices from skew-symmetric ones: (1 + Q)(1 - Q)^-1, Q cut to length `limit` if that is above 0."""
    skew = blocks - blocks.transpose(-1, -2)
    norm = float(torch.norm(skew)) + 1e-8
    if 0 < limit < norm:
        skew = skew * (limit / norm)
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    return (identity + skew) @ (identity - skew).inverse()


def _product(a: Value, b: Value, core: Value, like: torch.Tensor) -> torch.Tensor:
    """a (O, r) @ b (r, I); with a core (r, r, h, w), Tucker's product of the three."""
    left, right = _tensor(a, like), _tensor(b, like)
    if core is None:
        return left @ right
    return torch.einsum("ij...,jr,ip->pr...", _tensor(core, like), right, left)


def _swapped(patch: WeightPatch, change: torch.Tensor) -> torch.Tensor:
    if not patch.swap:
        return change
    first, second = change.chunk(2, dim=0)
    return torch.cat((second, first))


def _scale(alpha: Value, rank: int) -> float:
    return 1.0 if alpha is None else _number(alpha) / rank


def _number(value: Value) -> float:
    if isinstance(value, torch.Tensor) or value is None:
        raise ValueError(f"alpha is {value!r}, not a number; use a file whose alphas are scalars")
    return float(value)


def _tensor(value: Value, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{value!r} stands where a tensor must; use a complete file")
    return value.to(like.device, dtype or like.dtype)
