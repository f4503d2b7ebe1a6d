"""`make quality`: what plans that are not exact, and bf16, do to pictures: PSNR, SSIM and the classifier's verdict.

Owns: the cases, the figures, docs/quality.md. Does not own: the model and its prompts (words.py, models/), the pool.
The reference is one fp32 rank with the same noise; the prompts are those that training never saw. What was drawn is
kept in build/quality, so that a run which was cut goes on, and one over more prompts draws the others alone.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.in_worker_sampling import InWorkerRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.sampler_recurrence import RecurrenceStep, SamplerRecurrence

from . import networks
from .cached import FIRST_BLOCK, SIDE, STOCK, Drawing, StepCache, latents_of
from .evaluation import STEPS, THUMB, agreement, as_images, in_parts
from .graphs import MODELS, PACK_ROOT, TRANSFORMER
from .networks import CHANNELS, PATCH
from .trainer import numbers, show
from .words import Combination, combinations, encode

PAGE = PACK_ROOT / "docs" / "quality.md"
SHEET = PACK_ROOT / "docs" / "images" / "quality.jpg"
KEPT = PACK_ROOT / "build" / "quality"
SEED = 21
SKIPPED, FIGURES = "skipped.", "figures."  # before the numbers of prompts
SHOWN = 10  # prompts on the contact sheet
BATCHED = ("img", "txt", "y", "timesteps")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A plan and a compute dtype, in words for the table. `fp8`: the blocks' matrices are e4m3, without a scale."""

    plan: str
    dtype: str = "float32"
    exchange: bool = True
    fp8: bool = False
    cache: StepCache | None = None

    @property
    def name(self) -> str:
        """As the table has it."""
        words = [self.plan, *([] if self.dtype == "float32" else [self.dtype]), *(["fp8 weights"] if self.fp8 else [])]
        words += [] if self.cache is None else [f"{self.cache.name} {self.cache.threshold:g}"]
        return ", ".join(words if self.exchange else [*words, "exchange switched off"])


REFERENCE = Case("single")
CASES = (
    Case("ulysses=2"),
    Case("single", "bfloat16"),
    Case("ulysses=2", "bfloat16"),
    Case("single", "bfloat16", fp8=True),
    Case("ulysses=2", "bfloat16", fp8=True),
    *(Case(f"pipefusion=2,warmup_steps={warmup}") for warmup in (1, 2, 3, 4)),
    Case("pipefusion=2,patches=4"),
    Case("pipefusion=2,patches=8"),
    Case("pipefusion=3"),
    Case("pipefusion=3,warmup_steps=3"),
    *(Case("single", cache=StepCache(name, threshold)) for name in STOCK for threshold in (0.1, 0.2, 0.4)),
    *(Case("single", cache=StepCache(FIRST_BLOCK, threshold)) for threshold in (0.05, 0.1, 0.2)),
    Case("ulysses=2", cache=StepCache(FIRST_BLOCK, 0.1)),
    Case("ulysses=2", exchange=False),
)


def euler() -> SamplerRecurrence:
    """The sampler "euler" over the scheduler "simple", as ComfyUI takes it for this model."""
    sigmas = [1 - step / STEPS for step in range(STEPS + 1)]
    states = [RecurrenceStep(given=True, sigma=1.0, timestep=1.0)]
    for step in range(STEPS):
        kept = sigmas[step + 1] / sigmas[step]
        at = sigmas[step + 1] if step + 1 < STEPS else None
        inputs = ((step, kept),) if kept else ()
        states.append(RecurrenceStep(inputs=inputs, denoised=((step, 1 - kept),), sigma=at, timestep=at))
    return SamplerRecurrence(states=tuple(states), step_ends=tuple(range(STEPS)))


def run_of(wanted: tuple[Combination, ...], noise: Tensor, *, exchange: bool) -> InWorkerRun:
    """The sampling run of some prompts from `noise` (B, S, C)."""
    encoded = [encode(each.prompt()) for each in wanted]
    text, pooled = (torch.stack(part) for part in zip(*encoded, strict=True))
    ids = torch.zeros(SIDE, SIDE, 3)
    ids[..., 1], ids[..., 2] = torch.arange(SIDE)[:, None], torch.arange(SIDE)
    tensors = {
        "img": noise, "txt": text, "y": pooled, "timesteps": torch.ones(len(wanted)),
        "img_ids": ids.view(-1, 3), "txt_ids": torch.zeros(text.shape[1], 3),
    }  # fmt: skip
    options = {} if exchange else {"local_attention": True}
    cond = ModelCall(tensors=tensors, options=options, out_shape=noise.shape, out_dtype=torch.float32)
    return InWorkerRun(recurrence=euler(), conds=(cond,), cfg=1.0, given={0: noise})


def draw(case: Case, wanted: Mapping[int, Combination], *, batch: int) -> Iterator[dict[str, Tensor]]:
    """Latents (S, 64) of a case by their prompts' numbers, some at a time; how many steps a cache skipped, beside."""
    plan = ParallelPlan() if case.plan == "single" else ParallelPlan.parse(case.plan)
    spec = ModelSpec.of(transformer(fp8=case.fp8), case.dtype)
    with Pool(parse_devices(f"cpu:{plan.ranks}").devices, threads_per_rank=1) as pool:
        for start in range(0, len(wanted), batch):
            some = list(wanted)[start : start + batch]
            noise = torch.stack([noise_of(number) for number in some])
            run = run_of(tuple(wanted[number] for number in some), noise, exchange=case.exchange)
            found = {}
            if case.cache is None:
                latents = pool.sample(spec, plan, run, on_step=lambda *_: None).out.clone()
                found = dict(zip(map(str, some), latents.unbind(), strict=True))
            for row, number in enumerate(some if case.cache else ()):
                (cond,) = run.conds
                one = {name: each[row : row + 1] if name in BATCHED else each for name, each in cond.tensors.items()}
                call = replace(cond, tensors=one, out_shape=(1, *cond.out_shape[1:]))
                drawing = Drawing(pool, plan, case.cache, call, number=number)
                found |= {str(number): drawing.draw(), f"{SKIPPED}{number}": torch.tensor(drawing.skipped)}
            yield found


def noise_of(number: int) -> Tensor:
    """The noise (S, 64) of a prompt, by its number among those that training never saw."""
    return torch.randn(SIDE**2, CHANNELS * PATCH**2, generator=numbers("quality", SEED, number, CPU))


@functools.cache
def model_id() -> str:
    """What names the files of this transformer."""
    return f"{zlib.crc32((MODELS / TRANSFORMER).read_bytes()):08x}"


def transformer(*, fp8: bool) -> Path:
    """The demo's transformer, or one whose blocks' matrices are rounded to e4m3, written once."""
    path = KEPT / f"{model_id()}-fp8.safetensors"
    if fp8 and not path.exists():
        weights = load_file(MODELS / TRANSFORMER)
        rounded = {name: each for name, each in weights.items() if "_blocks." in name and each.ndim == 2}
        save_file(weights | {name: each.to(torch.float8_e4m3fn) for name, each in rounded.items()}, path)
    return path if fp8 else MODELS / TRANSFORMER


def drawn(case: Case, wanted: Mapping[int, Combination], *, batch: int | None) -> Kept:
    """What is kept of a case, with latents (S, 64) of all these prompts: the missing are drawn and kept, `batch` at a
    time; None draws none."""
    kept = Kept(case.name)
    missing = {number: each for number, each in wanted.items() if str(number) not in kept.tensors}
    for found in draw(case, missing, batch=batch) if missing and batch else ():
        kept.add(found)
    return kept


class Kept:
    """What is kept under a name in build/quality: tensors by the numbers of prompts, some with a word before it."""

    def __init__(self, name: str) -> None:
        self._path = KEPT / f"{model_id()}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.safetensors"
        self.tensors: dict[str, Tensor] = load_file(self._path) if self._path.exists() else {}

    def add(self, found: Mapping[str, Tensor]) -> None:
        """Keep these too."""
        self.tensors |= found
        partial = self._path.with_suffix(".partial")
        save_file(self.tensors, partial)
        partial.replace(self._path)

    def of(self, numbers: Iterable[int], word: str = "") -> dict[int, Tensor]:
        """Those of these prompts that there are."""
        return {number: self.tensors[f"{word}{number}"] for number in numbers if f"{word}{number}" in self.tensors}


class Judges:
    """The demo's networks that look at latents, and the reference's pictures, which are kept."""

    def __init__(self) -> None:
        loaded = [networks.load(MODELS / f"demo_{name}.safetensors", CPU) for name in ("autoencoder", "classifier")]
        self._autoencoder, self._classifier = loaded
        self._reference = Kept("pictures of the reference")

    def pictures(self, latents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Pictures (3, 128, 128) in 0..1 of latents (S, 64)."""
        stacked = latents_of(torch.stack(list(latents.values())))
        decoded = in_parts(self._autoencoder, "decode", stacked).clamp(0, 1)  # type: ignore[arg-type]
        return dict(zip(latents, decoded.unbind(), strict=True))

    def figures(self, kept: Kept, wanted: Mapping[int, Combination]) -> dict[int, Tensor]:
        """(PSNR, SSIM, whether it shows its prompt) of each picture of a case; judged once."""
        known = kept.of(wanted, FIGURES)
        latents = {number: each for number, each in kept.of(wanted).items() if number not in known}
        if latents:
            pictures, reference = self.pictures(latents), self._references(latents)
            stacked, right = torch.stack(list(pictures.values())), [wanted[number] for number in latents]
            shown = agreement(self._classifier, stacked, right).all(1).float()  # type: ignore[arg-type]
            found = torch.stack([psnr(stacked, reference), ssim(stacked, reference).float(), shown], 1)
            kept.add(dict(zip((f"{FIGURES}{number}" for number in latents), found.unbind(), strict=True)))
        return kept.of(wanted, FIGURES)

    def _references(self, numbers: Iterable[int]) -> Tensor:
        drawn, numbers = Kept(REFERENCE.name), list(numbers)
        missing = {
            number: each for number, each in drawn.of(numbers).items() if str(number) not in self._reference.tensors
        }
        if missing:
            self._reference.add({str(number): each for number, each in self.pictures(missing).items()})
        return torch.stack(list(self._reference.of(numbers).values()))


def psnr(pictures: Tensor, reference: Tensor) -> Tensor:
    """(N) dB of pictures in 0..1; infinite where they are equal."""
    return -10 * (pictures - reference).square().flatten(1).mean(1).log10()


def ssim(pictures: Tensor, reference: Tensor) -> Tensor:
    """(N) structural similarity (Wang et al. 2004) of pictures in 0..1: a Gaussian window of 11, sigma 1.5."""
    pictures, reference = pictures.double(), reference.double()  # spreads are small differences of large numbers
    axis = torch.exp(-((torch.arange(11).double() - 5) ** 2) / (2 * 1.5**2))
    window = (axis[:, None] * axis / axis.sum() ** 2).expand(3, 1, 11, 11)

    def mean(x: Tensor) -> Tensor:
        return F.conv2d(x, window, groups=3)

    a, b = mean(pictures), mean(reference)
    spread_a, spread_b = mean(pictures**2) - a**2, mean(reference**2) - b**2
    common = mean(pictures * reference) - a * b
    low, high = 0.01**2, 0.03**2
    whole = (2 * a * b + low) * (2 * common + high) / ((a**2 + b**2 + low) * (spread_a + spread_b + high))
    return whole.flatten(1).mean(1)


def row_of(case: Case, kept: Kept, figures: Mapping[int, Tensor]) -> str:
    """A row of the table; without a step cache its last cell is empty."""
    decibels, similar, right = torch.stack(list(figures.values())).unbind(1)
    middle, worst = (f"{value:.1f}" if value < 1e3 else "equal" for value in (decibels.median(), decibels.min()))
    skipped = kept.of(figures, SKIPPED)
    share = f"{sum(map(int, skipped.values())) / len(figures) / STEPS * 100:.0f} %" if skipped else ""
    cells = f"{len(figures)} | {middle} | {worst} | {similar.mean():.4f} | {right.mean() * 100:.1f} % | {share} |"
    return f"| `{case.name}` | {cells}"


def sheet_of(drawn: Mapping[str, Mapping[int, Tensor]]) -> Image.Image:
    """Pictures of every case, the same prompts', a row each, its name before it."""
    label = 260
    sheet = Image.new("RGB", (label + SHOWN * (THUMB + 4), len(drawn) * (THUMB + 4)), "white")
    for row, (name, pictures) in enumerate(drawn.items()):
        ImageDraw.Draw(sheet).text((4, row * (THUMB + 4) + 24), name, fill="black")
        for column, picture in enumerate(as_images(torch.stack(list(pictures.values())))):
            small = picture.resize((THUMB, THUMB), Image.Resampling.LANCZOS)
            sheet.paste(small, (label + column * (THUMB + 4), row * (THUMB + 4) + 2))
    return sheet


def main(arguments: argparse.Namespace) -> list[str]:
    """Draws every case, prints and writes the table; returns its rows."""
    KEPT.mkdir(parents=True, exist_ok=True)
    unseen = combinations()[1]
    order = torch.randperm(len(unseen), generator=numbers("prompts", SEED, 0, CPU)).tolist()
    wanted = {number: unseen[number] for number in sorted(order[: arguments.prompts])}
    judges, cases, rows = Judges(), dict[str, Kept](), []
    for case in (REFERENCE, *(each for each in CASES if not arguments.only or each.name in arguments.only)):
        started = time.monotonic()
        kept = drawn(case, wanted, batch=None if arguments.kept else arguments.batch)
        figures = judges.figures(kept, wanted)
        if figures:
            cases[case.name] = kept
            rows.append(row_of(case, kept, figures))
            show(f"{rows[-1]}  {time.monotonic() - started:.0f} s")
            write(rows, arguments.output)
    sheet = SHEET if arguments.output == PAGE else arguments.output.with_suffix(".jpg")
    common = sorted(set.intersection(*(set(kept.of(wanted)) for kept in cases.values())))
    chosen = common[:: max(len(common) // SHOWN, 1)][:SHOWN]
    sheet_of({name: judges.pictures(kept.of(chosen)) for name, kept in cases.items()}).save(
        sheet, quality=60, optimize=True
    )
    return rows


def write(rows: list[str], page: Path) -> None:
    """Puts the table between the page's marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- table -->")
    names = "plan, dtype, step cache and its threshold", "prompts", "median PSNR, dB", "lowest", "SSIM"
    head = f"| {' | '.join([*names, 'shows its prompt', 'steps skipped'])} |"
    table = "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- |", *rows])
    _, mark, after = rest.partition("<!-- end -->")
    page.write_text(f"{before}<!-- table -->\n{table}\n{mark}{after}", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What plans and dtypes do to the demo's pictures.")
    parser.add_argument("--prompts", type=int, default=200, help="of the 200 that training never saw")
    parser.add_argument("--only", nargs="+", help="cases beside the reference, as the table names them (default: all)")
    parser.add_argument("--kept", action="store_true", help="draw nothing: the table of what is kept already")
    parser.add_argument("--batch", type=int, default=20, help="prompts that are drawn at once")
    parser.add_argument("--output", type=Path, default=PAGE, help="a page with the marks that the table goes between")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_arguments())
