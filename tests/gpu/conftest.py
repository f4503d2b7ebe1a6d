"""What these tests share: a model that up to four stages can split, written once."""

import pytest

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.models.flux.sample import sample_config, write_sample


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Two double and two single blocks, six heads, which two and three ranks can share."""
    path = tmp_path_factory.mktemp("deep") / "deep.safetensors"
    write_sample(path, sample_config(heads=6, depth=2, depth_single=2))
    return ModelSpec.of(path)
