"""Nothing in a workflow leads to a file outside ComfyUI's model folders; links that the user put there work."""

import os

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
OUTSIDE = "../secret.safetensors sub/../../secret.safetensors /etc/passwd /good.safetensors ../good.safetensors .."
OUTSIDE = (*OUTSIDE.split(), "", "good.safetensors\0", "\0", "..\\secret.safetensors", "sub/../good.safetensors")
NO_FILES = ("fifo.safetensors", "device.safetensors", "sub")  # a FIFO would make the reader wait for ever
GONE = ("gone.safetensors", "broken.safetensors")
FOUND = ("good.safetensors", "sub/deep.safetensors", "link.safetensors", "linked_folder/secret.safetensors")


def test_a_models_name_leads_to_no_file_outside_its_folder_to_no_device_and_no_fifo(tmp_path):
    """Asked of ComfyUI's real folders. The user's own links are followed."""
    folder = tmp_path / "diffusion_models"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "secret.safetensors", folder / "good.safetensors", folder / "sub" / "deep.safetensors"):
        path.write_bytes(b"{}")
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "device.safetensors").symlink_to("/dev/zero")
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (folder / "linked_folder").symlink_to(tmp_path)
    (folder / "broken.safetensors").symlink_to(tmp_path / "gone")
    names = [*OUTSIDE, *NO_FILES, *GONE, *FOUND]
    program = PROGRAM.replace("COMFYUI", str(comfyui_path())).replace("FOLDER", str(folder))
    lines = run_program(program.replace("ROOT", str(ROOT)).replace("NAMES", repr(names)))
    said, inside = dict(zip(names, lines, strict=True)), "refused: models/diffusion_models"
    for name in OUTSIDE:
        assert said[name] == (
            f"refused: {name!r} is no name within models/diffusion_models; choose a file from the list"
        )
    for name in NO_FILES:
        assert said[name] == f"{inside}/{name} is no regular file; choose another file"
    for name in GONE:
        assert said[name].startswith(f"{inside}/{name} does not exist; get that file")
    assert [said[name] for name in FOUND] == [str(folder / name) for name in FOUND]
