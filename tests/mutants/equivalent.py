"""Mistakes that no test can tell from the code as it is: the operator, the line, the mistaken line, and the reason."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "axis swapped",
        "k, v = (torch.cat(each, 2) if each[0].shape[2] else each[1] for each in zip(common, others, strict=True))",
        "k, v = (torch.cat(each, 2) if each[0].shape[1] else each[1] for each in zip(common, others, strict=True))",
    ): "a tensor without tokens put before others changes no value; the condition saves a copy",
}
