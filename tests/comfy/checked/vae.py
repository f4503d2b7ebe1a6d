"""Which weights of a VAE go to ranks: those of the VAE itself, whatever a copy of it last had in their place. And what
is said of a VAE that has none.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import importlib
import sys
import tempfile
from pathlib import Path

import torch
from trace_samplers import NAME, load

load(sys.argv[1])
sys.path.append(str(Path(__file__).resolve().parents[2]))
layouts, tiny = importlib.import_module("host.encoder_layouts"), importlib.import_module("host.tiny_models")
sd, management, utils = (importlib.import_module(f"comfy.{name}") for name in ("sd", "model_management", "utils"))
decode, decoding = (
    importlib.import_module(f"{NAME}.nodes.host.vae.{name}") for name in ("parallel_decode", "decoding")
)

file = tiny.write_layout(Path(tempfile.mkdtemp()) / "vae.safetensors", layouts.taesd(), seed=3)
vae = sd.VAE(sd=utils.load_torch_file(str(file)))
module = vae.first_stage_model
before = {name: weight.clone() for name, weight in module.state_dict().items()}
(weight, *_) = (name for name, value in before.items() if value.ndim == 4)
asked = []
decoding.refuse_off = asked.append
for over in ((), ("two", "devices")):  # of a checkpoint without one it is ComfyUI's words that are told
    try:
        decoding.decode(sd.VAE(sd={"of a model": torch.zeros(1)}), {"samples": torch.zeros(1, 16, 8, 8)}, over)
    except RuntimeError as error:
        assert "your checkpoint does not contain a valid VAE" in str(error)
    else:
        raise AssertionError
assert asked == ["clock"] * 2, "a ComfyUI without what the clock needs is refused"
changed = vae.patcher.clone()
changed.add_patches({weight: ("diff", (torch.ones_like(before[weight]),))})
management.load_models_gpu([changed])
assert not torch.equal(module.state_dict()[weight], before[weight]) and not vae.patcher.patches
sent = decode.weights_of(vae).tensors
assert all(torch.equal(sent[name], value) for name, value in before.items())
