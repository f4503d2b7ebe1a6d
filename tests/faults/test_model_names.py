"""Nothing in a workflow leads to a file outside ComfyUI's model folders; links that the user put there work."""

import pytest

from faults.programs import ROOT, run_program
from host.fetch import comfyui_path

PROGRAM = """
    import sys, types
    sys.argv = ["main.py", "--cpu"]
    sys.path.insert(0, "COMFYUI")
    import comfy.options
    comfy.options.enable_args_parsing()
    import folder_paths
    folder_paths.add_model_folder_path("diffusion_models", "FOLDER", is_default=True)
    pack = sys.modules["pack"] = types.ModuleType("pack")
    pack.__path__ = ["ROOT"]
    comfyui = sys.modules["pack.nodes.host.contract.comfyui"] = types.ModuleType("comfyui")
    comfyui.folder_paths = folder_paths  # all of ComfyUI that is needed here
    from pack.nodes.host.model.files import diffusion_model_path, diffusion_models
    for name in NAMES:
        try:
            print(diffusion_model_path(name))
        except ValueError as error:
            print(f"refused: {error}")
"""
OUTSIDE = (
    *(
        "../secret.safetensors",
        "sub/../../secret.safetensors",
        "/etc/passwd",
        "/good.safetensors",
        "../good.safetensors",
    ),
    *("..", "", "good.safetensors\0", "\0", "..\\secret.safetensors", "sub/../good.safetensors"),
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each name leads to, asked of ComfyUI's real folders in one process."""
    import os

    base = tmp_path_factory.mktemp("models")
    folder = base / "diffusion_models"
    (folder / "sub").mkdir(parents=True)
    for path in (base / "secret.safetensors", folder / "good.safetensors", folder / "sub" / "deep.safetensors"):
        path.write_bytes(b"{}")
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "device.safetensors").symlink_to("/dev/zero")
    (folder / "link.safetensors").symlink_to(base / "secret.safetensors")
    (folder / "linked_folder").symlink_to(base)
    (folder / "broken.safetensors").symlink_to(base / "gone")
    names = [*OUTSIDE, "fifo.safetensors", "device.safetensors", "sub", "broken.safetensors", "gone.safetensors"]
    names += ["good.safetensors", "sub/deep.safetensors", "link.safetensors", "linked_folder/secret.safetensors"]
    program = PROGRAM.replace("COMFYUI", str(comfyui_path())).replace("FOLDER", str(folder))
    lines = run_program(program.replace("ROOT", str(ROOT)).replace("NAMES", repr(names)))
    return folder, dict(zip(names, lines, strict=True))


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_is_none_within_the_folder_is_refused(name, answers):
    assert answers[1][name] == (
        f"refused: {name!r} is no name within models/diffusion_models; choose a file from the list"
    )


@pytest.mark.parametrize("name", ["fifo.safetensors", "device.safetensors", "sub"])
def test_what_is_no_file_is_never_opened(name, answers):
    """A FIFO would make the reader wait for ever."""
    assert answers[1][name] == f"refused: models/diffusion_models/{name} is no regular file; choose another file"


@pytest.mark.parametrize("name", ["gone.safetensors", "broken.safetensors"])
def test_what_is_not_there_is_said_to_be_not_there(name, answers):
    assert answers[1][name].startswith(f"refused: models/diffusion_models/{name} does not exist; get that file")


@pytest.mark.parametrize(
    "name", ["good.safetensors", "sub/deep.safetensors", "link.safetensors", "linked_folder/secret.safetensors"]
)
def test_files_and_the_users_own_links_are_found(name, answers):
    folder, found = answers
    assert found[name] == str(folder / name)
