"""Model files as ComfyUI's folders name them."""

import os

import folder_paths

FOLDER = "diffusion_models"


def diffusion_models() -> list[str]:
    """Names a user can choose, relative to the folder."""
    return folder_paths.get_filename_list(FOLDER)


def diffusion_model_path(name: str) -> str:
    """The file behind a name. Raises `ValueError` when it is no longer there."""
    path = folder_paths.get_full_path(FOLDER, name)
    if path is None:
        raise ValueError(f"models/{FOLDER}/{name} does not exist; put it back, or choose another file")
    return path


def file_identity(name: str) -> tuple[int, int] | None:
    """Size and time of change of the file behind a name, or None when there is none."""
    path = folder_paths.get_full_path(FOLDER, name)
    if path is None:
        return None
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns
