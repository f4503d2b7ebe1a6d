"""What a real ComfyUI rounds before its Flux sees it: writes a step's tensors as we would send them, by compute dtype.

Owns: the arguments of that step. Run as `python tests/host/trace_rounding.py COMFYUI FLUX_FILE OUT_FILE`, in a process
of its own, since ComfyUI's modules read the command line and are named like others. The Flux file has Fill's channels.

OUT_FILE holds, by DTYPE, `DTYPE.NAME` of each tensor of the step, and `DTYPE.embedding.NAME`: what ComfyUI's own model
makes of timesteps and guidance.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from trace_samplers import NAME, load

DTYPES = ("float32", "bfloat16", "float16")
GUIDANCE = (0.0, 1.0, 2.77, 3.5, 30.0, 65.4, 10_000.0)
BATCH = len(GUIDANCE)
FILL_CHANNELS, LATENT_CHANNELS = 80, 16  # what is concatenated to a latent, and the latent's


def arguments() -> dict[str, Any]:
    """Of ComfyUI's `apply_model`, in fp32: no value in them fits a half."""
    import torch

    generator = torch.Generator().manual_seed(21)

    def noise(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    tokens = 5 + 6 + 4  # text, the latent's and a reference's
    return {
        "x": noise(BATCH, LATENT_CHANNELS, 4, 6),
        "t": torch.rand(BATCH, generator=generator),
        "c_concat": noise(BATCH, FILL_CHANNELS, 4, 6),
        "c_crossattn": noise(BATCH, 5, 64),
        "y": noise(BATCH, 32),
        "guidance": torch.tensor(GUIDANCE),
        "ref_latents": [noise(BATCH, LATENT_CHANNELS + FILL_CHANNELS, 4, 4)],
        "attention_mask": noise(1, tokens, tokens),
        "control": {"input": [noise(BATCH, 6, 256)], "output": []},
    }


class Recorder:
    """Stands where ComfyUI's Flux has its body, and keeps what our nodes would send for the same arguments."""

    def __init__(self, path: str) -> None:
        runtime = f"{NAME}.parallel_runtime"
        header = importlib.import_module(f"{runtime}.checkpoint").read_header(path)
        self._config = importlib.import_module(f"{runtime}.models.flux.config").FluxConfig.from_header(header)
        self._conditioning = importlib.import_module(f"{runtime}.models.flux.inputs")
        self.dtype = ""
        self.found: dict[str, Any] = {}

    def __call__(self, *values: Any, attn_mask: Any, **_: Any) -> Any:
        import torch
        from comfy.ldm.flux.layers import timestep_embedding

        names = ("img", "img_ids", "txt", "txt_ids", "timesteps", "y", "guidance", "control")
        given = dict(zip(names, values, strict=True)) | {"mask": attn_mask}
        rows = BATCH - 1 if self.dtype == "float16" else BATCH  # the last guidance is more than fp16 holds
        given |= {name: given[name][:rows] for name in names[:-1]}
        given["control"] = {side: [each[:rows] for each in all_] for side, all_ in given["control"].items()}
        tensors, _options = self._conditioning.step_tensors(self._conditioning.ForwardArguments(**given), self._config)
        for name in ("timesteps", "guidance"):
            tensors[f"embedding.{name}"] = timestep_embedding(given[name], 256).to(given["img"].dtype)
        self.found |= {f"{self.dtype}.{name}": tensor.clone().contiguous() for name, tensor in tensors.items()}
        return torch.zeros_like(values[0][..., :64])


def traced(path: str) -> dict[str, Any]:
    """Every tensor of OUT_FILE."""
    import comfy.sd
    import comfy.utils
    import torch

    model = comfy.sd.load_diffusion_model_state_dict(comfy.utils.load_torch_file(path)).model
    model.diffusion_model.forward_orig = recorder = Recorder(path)
    for dtype in DTYPES:
        recorder.dtype, model.manual_cast_dtype = dtype, getattr(torch, dtype)
        model.apply_model(**arguments(), transformer_options={})
    return recorder.found


def main() -> None:
    """Command line."""
    comfyui, path, out = sys.argv[1:]
    load(comfyui)
    from safetensors.torch import save_file

    save_file(traced(path), out)


if __name__ == "__main__":
    main()
