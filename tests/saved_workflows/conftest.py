"""What the workflows need of a server: what it says of its nodes, asked once, and the image that they load."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from host.client import ComfyClient
from host.server import ComfyServer


@pytest.fixture(scope="package")
def info(comfy_server: ComfyServer) -> dict[str, Any]:
    """The server's /object_info; to be left as it is."""
    return ComfyClient(comfy_server.url).object_info()


@pytest.fixture(scope="package")
def version(comfy_server: ComfyServer) -> str:
    """The version that the server's ComfyUI says it has."""
    return str(ComfyClient(comfy_server.url).get("/system_stats")["system"]["comfyui_version"])


@pytest.fixture(scope="package", autouse=True)
def example_image(comfy_server: ComfyServer) -> None:
    """The image that every new ComfyUI has in its input folder; ours has a hole to fill."""
    picture = np.random.default_rng(0).integers(0, 255, (256, 256, 4), dtype=np.uint8)
    picture[:, :, 3] = 255
    picture[64:192, 64:192, 3] = 0
    ComfyClient(comfy_server.url).upload_image(Image.fromarray(picture), "example.png")
