"""Keys and values of attention that are kept from call to call, and what else a pipeline keeps of all tokens.

A call brings those of some tokens. Its queries see these and, of the other tokens, what earlier calls brought. Letters:
`B` batch, `H` heads, `T` key tokens of the call, `A` of all calls, `D` head size. Source: PipeFusion (arXiv
2405.14430).

Does not own which keys a rank is given (attention.py), nor where a call's tokens are among all
(models/hosted/pass_call.py).
"""

from dataclasses import dataclass

import torch


class HeldRows:
    """Tensors by name, kept from call to call: of each, rows of the chunk that runs are new, the others older."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.dtypes: tuple[torch.dtype, ...] = ()  # of what comes from the stage before

    def put(self, name: str, rows: torch.Tensor, places: torch.Tensor | slice, *, dim: int, total: int) -> torch.Tensor:
        """Keep `rows` at `places` of `total` along `dim`; returns all there are."""
        held = self._tensors.get(name)
        if held is None:
            held = self._tensors[name] = rows.new_zeros((*rows.shape[:dim], total, *rows.shape[dim + 1 :]))
        held[(slice(None),) * dim + (places,)] = rows
        return held

    def get(self, name: str) -> torch.Tensor:
        """One that was put."""
        return self._tensors[name]

    def count(self, prefix: str) -> int:
        """How many tensors have names that begin so."""
        return sum(name.startswith(prefix) for name in self._tensors)


@dataclass(frozen=True, kw_only=True)
class KeptKeys:
    """Where one attention call keeps its keys and values: as `site` in `rows`, at `places` of `total` tokens.

    `fresh`: the call has all tokens, so its queries see its own keys, in the order in which they came.
    """

    rows: HeldRows
    site: str
    places: torch.Tensor | slice
    total: int
    fresh: bool

    def seen(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep these (B, H, T, D); returns the keys and values (B, H, A, D) that the call's queries see."""
        keys, values = (
            self.rows.put(f"{self.site}.{name}", each, self.places, dim=2, total=self.total)
            for name, each in (("k", k), ("v", v))
        )
        return (k, v) if self.fresh else (keys, values)
