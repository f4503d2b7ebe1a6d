"""What the runtime's tests share: eight CPU ranks, a small model that every plan can split, and its reference model."""

from collections.abc import Iterator

import pytest
import torch

from host.tiny_hosted import OneProcess
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.pool.pool import Pool


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A model of 24 heads, so that ulysses 2, 3, 4, 6 and 8 divide them."""
    path = tmp_path_factory.mktemp("sample") / "sample.safetensors"
    write_sample(path, sample_config())
    return ModelSpec.of(path)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A model of two double and two single blocks: up to four stages."""
    path = tmp_path_factory.mktemp("deep") / "deep.safetensors"
    write_sample(path, sample_config(heads=12, depth=2, depth_single=2))
    return ModelSpec.of(path)


@pytest.fixture(scope="session")
def config(sample: ModelSpec) -> FluxConfig:
    """The sizes of `sample`."""
    return FluxConfig.from_header(read_header(sample.path))


@pytest.fixture(scope="session")
def deep_config(deep: ModelSpec) -> FluxConfig:
    """The sizes of `deep`."""
    return FluxConfig.from_header(read_header(deep.path))


@pytest.fixture(scope="session")
def reference_model(sample: ModelSpec) -> ReferenceModel:
    """The unmodified diffusers model of the same file."""
    return ReferenceModel(sample.path, dtype=torch.float32)


@pytest.fixture(scope="session")
def one_process(tiny_hosted: ModelSpec) -> Iterator[OneProcess]:
    """ComfyUI's bare module of `tiny_hosted`."""
    with OneProcess(tiny_hosted) as process:
        yield process


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[Pool]:
    """One set of workers for every plan of up to eight ranks."""
    pool = Pool(parse_devices("cpu:8").devices, threads_per_rank=1)
    yield pool
    pool.close()
