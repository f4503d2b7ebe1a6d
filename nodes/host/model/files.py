"""Model files as ComfyUI's folders name them.

A name comes with the workflow, and so from anywhere: it may lead to a file below the folders or, by links that the user
put there, wherever the user wants, and nowhere else.
"""

import os

from ..contract.comfyui import folder_paths

FOLDER = "diffusion_models"


def diffusion_models() -> list[str]:
    """Names a user can choose, relative to the folder."""
    return folder_paths.get_filename_list(FOLDER)


def diffusion_model_path(name: str) -> str:
    """The file behind a name. Raises `ValueError` when there is none, or the name is not one within the folder."""
    if is_missing(name):
        raise ValueError(f"models/{FOLDER}/{name} does not exist; get that file, or choose another one")
    path = folder_paths.get_full_path(FOLDER, name)
    if path is None:
        raise ValueError(f"models/{FOLDER}/{name} is no regular file; choose another file")
    return path


def is_missing(name: str) -> bool:
    """Whether nothing is there behind a name, as of a template whose files are not downloaded yet.

    Raises `ValueError` when the name is not one within the folder.
    """
    _refuse_outside(name)
    if folder_paths.get_full_path(FOLDER, name) is not None:
        return False
    return not any(os.path.exists(os.path.join(folder, name)) for folder in folder_paths.get_folder_paths(FOLDER))


def file_identity(name: str) -> tuple[int, int] | None:
    """Size and time of change of the file behind a name, or None when there is none."""
    path = folder_paths.get_full_path(FOLDER, name)
    if path is None:
        return None
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def _refuse_outside(name: str) -> None:
    """ComfyUI would read `../x` as `x`: a name that means another file than it says."""
    parts = name.replace("\\", "/").split("/")
    if "\0" in name or ".." in parts or parts[0] == "" or os.path.splitdrive(name)[0]:
        raise ValueError(f"{name!r} is no name within models/{FOLDER}; choose a file from the list")
