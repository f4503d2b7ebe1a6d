"""Quantised files beside stock ComfyUI in a real server, under every kind of plan, and quantised Flux.1.

Owns: which of them `make test` runs. Does not own: the graphs and the bounds (quantised.py), the formats by themselves
and the rounding of inputs that a CPU does not do (models/test_quantised.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from host.client import ComfyClient
from host.formats import same_picture
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error
from host.quantised import KINDS, MIXED, quantised

from .conftest import Stock
from .hosted import VISIBLE, parallelized, with_loras
from .quantised import LORA, PLANS, ROUNDED, file_of, graph_of, measure, rounds_inputs, write_files
from .variants import BY_NAME

FLUX_1 = BY_NAME["flux.1 t2i"]
IN_FLUX = ("nvfp4", "int8, a scale a row")


@contextmanager
def file_of_kind(kind: str, models: Path) -> Iterator[None]:
    """A file of that kind and what it is compared with in a server's models folder."""
    written = write_files(models, [kind])
    yield
    for path in written:
        path.unlink()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_each_kind_equals_stock_under_every_plan(
    kind: str, hosted_client: ComfyClient, stock: Stock, family_models: Path
) -> None:
    with file_of_kind(kind, family_models):
        row = measure(hosted_client, stock, kind)
    assert not row.wrong, row


@pytest.mark.full
def test_a_quantised_model_of_a_stock_loader_behind_parallelize_model_equals_stock(
    hosted_client: ComfyClient, stock: Stock, family_models: Path
) -> None:
    with file_of_kind(MIXED, family_models):
        graph = with_loras(graph_of(file_of(MIXED)), (LORA, 0.7))
        found = latent_of(hosted_client, parallelized(graph))
        right, allowed = same_picture(hosted_client, graph, least=ROUNDED)
        assert relative_error(found, right) <= allowed


@pytest.mark.parametrize("kind", [IN_FLUX[0], pytest.param(IN_FLUX[1], marks=pytest.mark.full)])
def test_a_flux_in_a_format_that_our_blocks_do_not_read_is_computed_by_comfyuis_own(
    kind: str, hosted_client: ComfyClient, stock: Stock, family_models: Path
) -> None:
    folder = family_models / "diffusion_models"
    with safe_open(folder / FLUX_1.file, framework="pt") as file:
        tensors, said = quantised({name: file.get_tensor(name) for name in file.keys()}, kind)
    path = folder / f"flux_1_{file_of(kind)}"  # a name of its own: equal graphs of stock run once
    save_file(tensors, path, metadata=said)
    graph = FLUX_1.graph(cfg=1.0, steps=2)
    plain = stock(graph)
    graph["model"]["inputs"]["unet_name"] = path.name
    right = stock(graph)
    assert relative_error(right, plain) > VISIBLE, "the format changes nothing"
    found = latent_of(hosted_client, parallel(graph, mode="manual", **PLANS["sharded"]))
    allowed = same_picture(hosted_client, graph)[1] if rounds_inputs(kind) else TOLERANCE
    assert relative_error(found, right) <= allowed, allowed
    path.unlink()
