"""Files of Wan in every quantised format beside stock ComfyUI, under plans and with a LoRA; writes docs/formats.md.

`make formats` runs it. Owns: the graphs, what is compared, the page. Does not own: the files and the
least bounds (families/quantised.py).

`PYTHONPATH=tests python -m tools.formats [--only TEXT] [--write FILE]`
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from families.hosted import with_loras
from families.quantised import LORA, PLANS, ROUNDED, WAN, file_of, graph_of, rounds_inputs, write_files
from host.client import ComfyClient, Workflow
from host.formats import KERNEL_ALLOWANCE, allowed_by, stock_moves
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent
from host.quantised import FORMATS, KINDS, MIXED
from host.server import PACK_ROOT, ComfyServer
from parity.runner import switched_off

from .model_matrix import on_devices
from .tables import markdown

DOCUMENT = PACK_ROOT / "docs" / "formats.md"
VISIBLE = 3e-2  # what a run without exchange must differ by
LOOP = {"loop": "host"}  # the ranks' own loop adds up a sampler's steps in another order: 1e-6
Stock = Callable[[Workflow], torch.Tensor]


@dataclass
class Row:
    """Relative errors of one kind of file: by plan, the same with a LoRA; of no exchange; of stock itself."""

    kind: str
    plain: dict[str, float] = field(default_factory=dict)
    merged: dict[str, float] = field(default_factory=dict)
    control: float = 0.0
    format_moves: float = 0.0  # from the file in bf16
    lora_moves: float = 0.0
    stock_moves: float = 0.0  # with its other exact attention functions and numbers of threads, plain or with a LoRA
    taken_back: bool = True

    @property
    def bound(self) -> float:
        """What an error may be."""
        return allowed_by(self.stock_moves, least=ROUNDED) if rounds_inputs(self.kind) else TOLERANCE

    @property
    def wrong(self) -> list[str]:
        """What is."""
        found = [f"{plan}: {error:.1e}" for plan, error in self.plain.items() if not error <= self.bound]
        found += [f"LoRA, {plan}: {error:.1e}" for plan, error in self.merged.items() if not error <= self.bound]
        found += [] if self.taken_back else ["a LoRA is not taken back to the last bit"]
        seen = {"no exchange": self.control, "the LoRA": self.lora_moves}
        return found + [f"{name} is not seen: {moved:.1e}" for name, moved in seen.items() if not moved > VISIBLE]


def measure(client: ComfyClient, stock: Stock, kind: str, plans: Iterable[str] = tuple(PLANS)) -> Row:
    """One kind of file, plain and with a LoRA, under each plan."""
    row, graph = Row(kind), graph_of(file_of(kind))
    merged = with_loras(graph, (LORA, 0.7))
    right, right_merged = stock(graph), stock(merged)
    row.format_moves = relative_error(right, stock(graph_of(WAN.name)))
    row.lora_moves = relative_error(right_merged, right)
    row.stock_moves = max(stock_moves(client, graph, right), stock_moves(client, merged, right_merged))
    for plan in plans:
        plain = latent_of(client, parallel(graph, mode="manual", **LOOP, **PLANS[plan]))
        row.plain[plan] = relative_error(plain, right)
        with_lora = latent_of(client, parallel(merged, mode="manual", **LOOP, **PLANS[plan]))
        row.merged[plan] = relative_error(with_lora, right_merged)
        again = parallel(graph, mode="manual", **LOOP, **PLANS[plan])
        again["sampler"]["inputs"]["denoise"] = 0.9999999  # another cache key in ComfyUI, the same sigmas
        row.taken_back &= torch.equal(latent_of(client, again), plain)
    alone = switched_off(parallel(graph, mode="manual", **LOOP, **PLANS["ulysses 2"]))
    row.control = relative_error(latent_of(client, alone), right)
    return row


WIDENED = "ComfyUI widens the weights and rounds nothing else: a CPU has no product of such numbers"
NOTES = {
    "float8_e4m3fn": WIDENED,
    "float8_e5m2": WIDENED,
    "nvfp4": WIDENED,
    "mxfp8": WIDENED,
    "int8_tensorwise": "each token is rounded by a scale of its own before each product",
    "convrot_w4a4": "each token is rotated and rounded to 4 bits by a scale of its own before each product",
}
INTRODUCTION = f"""# Quantised files beside stock ComfyUI

Wan with 5 heads of 64, two blocks whose matrices are in the format named and all else in bf16, computed in fp32 on CPU
ranks: each graph once with Load Diffusion Model and once with our loader, in one ComfyUI. Compared: the saved latents
(relative error), plain and with a LoRA of rank 4 at 0.7, by ComfyUI's own loop (`loop` is `host`). ComfyUI merges a
LoRA and rounds the weight to its format again, by chance up or down with a seed of the weight's name; so do the ranks,
and take it back to the last bit. On NVIDIA GPUs it mostly has dynamic VRAM: there a layer merges in the dtype of its
call, with a seed of its own name, and so do the ranks, but for OFT and BOFT (`tests/models/test_deltas.py`). The first
call of such a layer, and all calls of one that does not stay on the card, take what is not rounded yet; ranks do not.
Every layer is ComfyUI's own. `make formats` writes this file.

At most {TOLERANCE:.0e}. Where layers round what they are given (int8, w4a4, "mixed"), a last digit, which another order
of additions moves, sends a number to the other side of a step, and that others: "stock moves" is how far stock ComfyUI
itself is then from its own latent, plain or with the LoRA, with its other exact attention functions and with one thread
or two. Allowed is {KERNEL_ALLOWANCE:g} times that, or {ROUNDED:.0e}. Ulysses changes no order here; Ring does, and so
does the ranks' own loop. "No exchange" is the control, a run under ulysses 2 with ranks that exchange nothing; "the
format" is how far the file is from the same one in bf16.
"""
REST = """
## What rounds by all tokens at once

Of these formats nvfp4 alone, on GPUs that multiply in it (Blackwell), and where the file has no `input_scale`: ComfyUI
then rounds what a layer is given by the largest number in it, over all tokens of all images of a call. Ranks that share
the tokens take the largest of all of them, one number; so do the batch groups of cfg parallel that share the rows of a
call. Ranks without a token take part. `tests/models/test_quantised.py` has ComfyUI round so on a CPU: equal, where
scales of each rank's own are wrong by 5e-2. It still differs from stock

- with data parallel, where the rows of one batch are on several replicas, which exchange nothing: each has its own
  largest number. A list of latents is one call an image in stock too.
- where a batch group of cfg parallel runs a row of a call while the others run other calls, as with cfg parallel of 3
  or more.

## What was not run, and why

- nvfp4, mxfp8 and fp8 as GPUs multiply in them: a CPU has no such product. What they round is tested as said above.
- `svdquant_w4a4` and `awq_w4a16`: comfy_kitchen has layouts of them, this ComfyUI's loader does not read them; a file
  that says so is refused by its layer.
- `asym_w4a8_int8` and `w6a8_int8`: ComfyUI 0.30.0 does not know them. Newer ones do; there a file in them takes the
  same way, which this page does not show.
- Layers of experts (`MoEExperts`): in ComfyUI 0.30.0 only a text encoder has them.

## What is refused

When the file is read, in one sentence with the layer's name: a layer without its scales, in a format that this ComfyUI
does not know, with a mark or a header that is not JSON, or that holds int8 or uint8 and says no format. Some layers in
one format and others in another, or plain, are no mistake ("mixed").
"""


def document(rows: Iterable[Row]) -> str:
    """The text of docs/formats.md."""
    plans = [f"{plan}{lora}" for plan in PLANS for lora in ("", ", LoRA")]
    head = (
        "file",
        "`comfy_quant` format",
        "on a CPU in stock",
        *plans,
        "stock moves",
        "no exchange",
        "the format",
        "wrong",
    )
    table = []
    for row in rows:
        name = FORMATS[row.kind].name if row.kind in FORMATS else ("nvfp4" if row.kind != MIXED else "")
        errors = [f"{each[plan]:.1e}" for plan in PLANS for each in (row.plain, row.merged)]
        moved = (f"{row.stock_moves:.1e}", f"{row.control:.1e}", f"{row.format_moves:.1e}")
        note = "runs: fp8 e4m3, nvfp4, rotated int8 and bf16 in turn" if row.kind == MIXED else f"runs; {NOTES[name]}"
        table.append((row.kind, f"`{name}`" if name else "", note, *errors, *moved, "; ".join(row.wrong) or "0"))
    return f"{INTRODUCTION}\n{markdown(head, table)}{REST}{of_exchange()}"


def of_exchange() -> str:
    """The page's last part, which is exchange_errors.py's."""
    _, title, rest = DOCUMENT.read_text(encoding="utf-8").partition("\n## Heads that travel as fp8\n")
    return f"{title}{rest}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--devices", help="GPUs for the ranks (default: CPU ranks); one GPU may stand three times")
    parser.add_argument("--write", type=Path, help=f"default: {DOCUMENT}, when everything was run")
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if arguments.only in kind]
    rows, kept = [], {}
    if arguments.devices:
        PLANS.update({name: {**degrees, "devices": arguments.devices} for name, degrees in PLANS.items()})
    with tempfile.TemporaryDirectory(prefix="formats-") as folder:
        write_files(Path(folder), kinds)
        with ComfyServer(models=Path(folder), **on_devices(arguments.devices)) as server:
            client = ComfyClient(server.url)

            def stock(graph: Workflow) -> torch.Tensor:
                key = str(graph)
                if key not in kept:
                    kept[key] = saved_latent(client, client.queue(graph))
                return kept[key]

            for kind in kinds:
                rows.append(measure(client, stock, kind))
                print(rows[-1], rows[-1].wrong, flush=True)  # noqa: T201
    target = arguments.write or (DOCUMENT if len(kinds) == len(KINDS) else None)
    if target:
        target.write_text(document(rows), encoding="utf-8")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
