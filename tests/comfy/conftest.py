"""Fixtures of the tests of the nodes: what the session's server is given once."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from host.client import ComfyClient
from host.server import ComfyServer


@pytest.fixture(scope="session")
def hint(comfy_server: ComfyServer) -> str:
    """An image in the server's input folder, its middle transparent."""
    picture = np.random.default_rng(0).integers(0, 255, (256, 256, 4), dtype=np.uint8)
    picture[:, :, 3] = 255
    picture[64:192, 64:192, 3] = 0
    return ComfyClient(comfy_server.url).upload_image(Image.fromarray(picture), "hint.png")
