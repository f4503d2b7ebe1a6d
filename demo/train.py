"""`python -m demo.train`: trains the demo's autoencoder, classifier and transformer, on a CPU or one GPU.

Owns: what each network learns from which pictures, in which order, and the command line. Does not own: the loop
(trainer.py), the figures at the end (evaluation.py). Needs torch, numpy, Pillow, safetensors, and the glyphs' file
(`python -m demo.glyphs`). Pictures are composed when they are needed; none is stored. A run that was cut goes on from
its last state.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import networks
from .evaluation import draw_curves, evaluate
from .glyphs import DEFAULT as GLYPHS
from .networks import CHANNELS, Autoencoder, Classifier, Flux
from .pictures import SIZE, Painter, as_indices
from .trainer import SHOWN_EVERY, Settings, Trainer, numbers, show
from .words import COLOURS, ORDERS, PLACES, THINGS, UNSEEN, combinations, encode

CROP = 64  # pixels of the autoencoder's training pictures: what is around is learnt from no more
LATENT_NOISE = 0.3  # at most, of latents with unit variance, so that the decoder forgives the transformer
NONE = torch.tensor((len(THINGS), len(COLOURS), len(PLACES)))


class Normalised(nn.Module):
    """The autoencoder while it learns: each latent channel is kept at mean 0 and variance 1 by a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.autoencoder, self.norm = Autoencoder(), nn.BatchNorm2d(CHANNELS, affine=False, momentum=0.02)

    def loss(self, pictures: Tensor, generator: torch.Generator) -> Tensor:
        """Mean absolute error of pictures and of their edges, through latents with noise."""
        latents = self.norm(self.autoencoder.encode(pictures))
        scale = LATENT_NOISE * torch.rand(len(latents), 1, 1, 1, device=latents.device, generator=generator)
        noise = torch.randn(latents.shape, device=latents.device, generator=generator)
        decoded = self.autoencoder.decode(latents + scale * noise)
        edges = sum((decoded.diff(dim=dim) - pictures.diff(dim=dim)).abs().mean() for dim in (2, 3))
        return (decoded - pictures).abs().mean() + edges

    def finished(self) -> Autoencoder:
        """A copy whose last convolution does what the batch norm did."""
        copy = Autoencoder().to(self.norm.running_mean.device)
        copy.load_state_dict(self.autoencoder.state_dict())
        last, deviation = copy.taesd_encoder[-1], (self.norm.running_var + self.norm.eps).sqrt()
        with torch.no_grad():
            last.weight /= deviation[:, None, None, None]
            last.bias.copy_((last.bias - self.norm.running_mean) / deviation)
        return copy.eval()


class Training:
    """One run of the command: options, device, pictures of the training combinations alone."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.painter = Painter(options.glyphs, self.device)
        self.seen = as_indices(combinations()[0], self.device)
        self.cpu_s: dict[str, float] = {}
        self.curves: dict[str, list[float]] = {}

    def pick(self, count: int, generator: torch.Generator) -> Tensor:
        """Random training combinations, (count, 3)."""
        return self.seen[torch.randint(len(self.seen), (count,), device=self.device, generator=generator)]

    def fit(self, name: str, network: nn.Module, loss_of: object, on_save: object, *, data: str = "") -> None:
        """Trains one network by the options that begin with its name."""
        chosen = {kind: getattr(self.options, f"{name}_{kind}") for kind in ("steps", "batch", "lr")}
        settings = Settings(**chosen, seed=self.options.seed, data=data)
        trainer = Trainer(name, network, settings, self.options.state, self.device)
        trainer.run(loss_of, save_every=self.options.save_every, on_save=on_save)  # type: ignore[arg-type]
        self.cpu_s[name], self.curves[name] = trainer.cpu_s, trainer.curve

    def file(self, name: str) -> Path:
        """Where a network's bf16 file goes."""
        return self.options.output / f"demo_{name}.safetensors"

    def autoencoder(self) -> Autoencoder:
        """Trains it; the one of the written file, which all that follows uses."""
        torch.manual_seed(self.options.seed)
        network = Normalised().to(self.device, memory_format=torch.channels_last)

        def loss_of(generator: torch.Generator) -> Tensor:
            pictures = self.painter.paint(self.pick(self.options.autoencoder_batch, generator), generator)
            corners = (SIZE - CROP) // 8 + 1
            across, down = (8 * each for each in divmod(generator.initial_seed() % corners**2, corners))
            crops = pictures[:, :, down : down + CROP, across : across + CROP]
            return network.loss(crops.contiguous(memory_format=torch.channels_last), generator)

        self.fit("autoencoder", network, loss_of, lambda: networks.save(network.finished(), self.file("autoencoder")))
        return networks.load(self.file("autoencoder"), self.device).to(memory_format=torch.channels_last)  # type: ignore[return-value]

    @torch.no_grad()
    def latents(self, autoencoder: Autoencoder, variants: int) -> tuple[Tensor, Tensor]:
        """Latents (N, 16, 16, 16) bf16 of `variants` pictures of each training combination, and what they show."""
        generator = numbers("latents", self.options.seed, 0, self.device)
        chosen = self.seen.repeat(variants, 1)
        with torch.autocast(self.device.type, torch.bfloat16):
            parts = [autoencoder.encode(self.painter.paint(part, generator)).bfloat16() for part in chosen.split(100)]
        return torch.cat(parts), chosen

    @torch.no_grad()
    def decoded(self, autoencoder: Autoencoder, latents: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures (N, 3, 128, 128) uint8 of latents with little noise, which show it, and with much, which do not."""
        generator = numbers("decoded", self.options.seed, 0, self.device)
        t = torch.rand(len(latents), 1, 1, 1, device=self.device, generator=generator)
        drowned = torch.arange(len(latents), device=self.device) % 3 == 0
        t = torch.where(drowned[:, None, None, None], 0.75 + 0.25 * t, 0.2 * t)
        noise = torch.randn(latents.shape, device=self.device, generator=generator)
        mixed = (1 - t) * latents + t * noise
        with torch.autocast(self.device.type, torch.bfloat16):
            parts = [(autoencoder.decode(part).clamp(0, 1) * 255).byte() for part in mixed.split(100)]
        return torch.cat(parts), torch.where(drowned[:, None], NONE.to(self.device), chosen)

    def classifier(self, autoencoder: Autoencoder) -> Classifier:
        """Trains it on composed pictures, on decoded ones, and on pictures that show nothing."""
        torch.manual_seed(self.options.seed)
        network = Classifier().to(self.device)
        pictures, shown = self.decoded(autoencoder, *self.latents(autoencoder, 2))

        def loss_of(generator: torch.Generator) -> Tensor:
            quarter = self.options.classifier_batch // 4
            chosen = self.pick(quarter, generator)
            painted = self.painter.paint(chosen, generator)
            rows = torch.randint(len(pictures), (2 * quarter,), device=self.device, generator=generator)
            nothing, labels = self.nothing(chosen, painted, generator)
            batch = torch.cat((painted, pictures[rows].float() / 255, nothing))
            wanted = torch.cat((chosen, shown[rows], labels))
            batch = batch + 0.03 * torch.randn(batch.shape, device=self.device, generator=generator)
            logits = network(batch)
            return sum(F.cross_entropy(each, wanted[:, axis]) for axis, each in enumerate(logits))  # type: ignore[return-value]

        self.fit("classifier", network, loss_of, lambda: networks.save(network, self.file("classifier")))
        return networks.load(self.file("classifier"), self.device)  # type: ignore[return-value]

    def nothing(self, chosen: Tensor, painted: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pictures that show no thing, and their classes: noise, bare colours, shuffled tiles, two things at once."""
        labels = NONE.to(self.device).repeat(len(chosen), 1)
        labels[:, 1] = chosen[:, 1]
        noise, bare, shuffled, both = torch.arange(len(chosen), device=self.device).tensor_split(4)
        labels[noise] = NONE.to(self.device)
        labels[both, 2] = chosen[both, 2]
        grain = generator.initial_seed() % 6
        coarse = torch.rand((len(noise), 3, SIZE >> grain, SIZE >> grain), device=self.device, generator=generator)
        tiles = painted[shuffled].unflatten(2, (8, 16)).unflatten(4, (8, 16)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        order = torch.randperm(64, device=self.device, generator=generator)
        tiles = tiles[:, order].unflatten(1, (8, 8)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        second = chosen[both].clone()
        second[:, 0] = (
            second[:, 0] + 1 + torch.randint(len(THINGS) - 1, (len(both),), device=self.device, generator=generator)
        ) % len(THINGS)
        mixed = (painted[both] + self.painter.paint(second, generator)) / 2
        flat = self.painter.colours[chosen[bare, 1]][:, :, None, None].expand(-1, -1, SIZE, SIZE)
        return torch.cat((F.interpolate(coarse, SIZE, mode="bilinear"), flat, tiles, mixed)), labels

    def transformer(self, autoencoder: Autoencoder) -> Flux:
        """Trains it on latents of the training combinations, by rectified flow."""
        options = self.options
        torch.manual_seed(options.seed)
        network = Flux(options.width, options.depth, options.single).to(self.device)
        latents, chosen = self.latents(autoencoder, options.variants)
        encoded = [[encode(each.prompt(order)) for each in combinations()[0]] for order in range(len(ORDERS))]
        text = torch.stack([torch.stack([each[0] for each in order]) for order in encoded]).to(self.device)
        pooled = torch.stack([torch.stack([each[1] for each in order]) for order in encoded]).to(self.device)

        def loss_of(generator: torch.Generator) -> Tensor:
            count, drawn = options.transformer_batch, {"device": self.device, "generator": generator}
            rows = torch.randint(len(latents), (count,), **drawn)
            order, prompt = (torch.rand(count, **drawn) < 0.3).long(), rows % len(self.seen)
            kept = (torch.rand(count, **drawn) >= options.dropout).float()[:, None]
            t = torch.sigmoid(torch.randn(count, **drawn))
            clean = latents[rows].float()
            noise = torch.randn(clean.shape, **drawn)
            at = t[:, None, None, None]
            guess = network(
                (1 - at) * clean + at * noise, t, text[order, prompt] * kept[..., None], pooled[order, prompt] * kept
            )
            return F.mse_loss(guess, noise - clean)

        sizes = f"width {options.width}, {options.depth} + {options.single} blocks"
        data = f"{sizes}, {options.variants} variants, dropout {options.dropout}"
        self.fit("transformer", network, loss_of, lambda: networks.save(network, self.file("transformer")), data=data)
        return networks.load(self.file("transformer"), self.device)  # type: ignore[return-value]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--glyphs", type=Path, default=GLYPHS)
    parser.add_argument("--output", type=Path, default=Path("build/demo_model"), help="where the bf16 files go")
    parser.add_argument("--state", type=Path, default=Path("build/demo_training"), help="what a cut run goes on from")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--save-every", type=int, default=500, help="steps between states and files")
    for name, steps, batch, lr in (
        ("autoencoder", 6000, 16, 1e-3), ("classifier", 3000, 96, 1e-3), ("transformer", 16_000, 64, 1e-3)
    ):  # fmt: skip
        parser.add_argument(f"--{name}-steps", type=int, default=steps)
        parser.add_argument(f"--{name}-batch", type=int, default=batch)
        parser.add_argument(f"--{name}-lr", type=float, default=lr)
    parser.add_argument("--width", type=int, default=256, help="of the transformer; a multiple of 128")
    parser.add_argument("--depth", type=int, default=1, help="double blocks")
    parser.add_argument("--single", type=int, default=3, help="single blocks")
    parser.add_argument("--variants", type=int, default=8, help="pictures of each combination")
    parser.add_argument("--dropout", type=float, default=0.1, help="part of the pictures that go without a prompt")
    parser.add_argument("--judged", type=int, default=UNSEEN, help="unseen combinations that are drawn at the end")
    parser.add_argument("--cfg", type=float, nargs="+", default=[1.0, 2.0, 3.0], help="guidance at the evaluation")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> dict:
    """Trains what is not trained yet, evaluates, and returns the figures that are in evaluation.json."""
    if options.device == "cpu":
        torch.set_flush_denormal(True)
    else:
        torch.set_float32_matmul_precision("high")
    try:
        return _train(options)
    finally:
        torch.set_flush_denormal(False)  # of whoever else uses this thread


def _train(options: argparse.Namespace) -> dict:
    training = Training(options)
    autoencoder = training.autoencoder()
    classifier = training.classifier(autoencoder)
    transformer = training.transformer(autoencoder)
    draw_curves(training.curves, SHOWN_EVERY, options.output / "curves.png")
    figures = evaluate(training.painter, autoencoder, classifier, transformer, options)
    figures |= {"training_process_s": training.cpu_s, "curves": training.curves}
    figures["options"] = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    (options.output / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    show(json.dumps({name: value for name, value in figures.items() if name != "curves"}, indent=1))
    return figures


if __name__ == "__main__":
    main(parse_arguments())
