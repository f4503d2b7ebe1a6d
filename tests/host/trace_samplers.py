"""Traces every sampler of a real ComfyUI and runs the programs found beside the samplers; prints JSON.

Owns: what is compared. Run as `python tests/host/trace_samplers.py COMFYUI`, in a process of its own, since ComfyUI's
modules read the command line and are named like others.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

PACK_ROOT = Path(__file__).resolve().parents[2]
NAME = "pack_in_a_comfyui"
CASES = {"simple 12": ("simple", 12, 1.0), "karras 6 of 10": ("karras", 10, 0.6), "beta 24": ("beta", 24, 1.0)}
SHAPE = (2, 4, 6, 10)


def load(comfyui: str) -> object:
    """ComfyUI's modules on the CPU, and our tracer."""
    sys.path.insert(0, comfyui)
    sys.argv = ["trace_samplers", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    spec = importlib.util.spec_from_file_location(NAME, PACK_ROOT / "__init__.py")
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
    return importlib.import_module(f"{NAME}.nodes.host.linear_program")


def main() -> None:
    """One line of JSON: for each sampler and case the relative error and the number of calls, or the reason."""
    tracer = load(sys.argv[1])
    import comfy.model_sampling
    import comfy.samplers
    import torch

    torch.set_num_threads(1)  # tensors of a few hundred numbers

    class Sampling(comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST):
        """Flux's own."""

    sampling = Sampling()

    class Guider(comfy.samplers.CFGGuider):
        """A guider without a model, with what samplers look at."""

        def __init__(self) -> None:
            self.model_options = {"transformer_options": {}}
            self.cfg = 1.0
            self.inner_model = type("Inner", (), {"model_sampling": sampling})()
            self.model_patcher = type("Patcher", (), {"get_model_object": lambda _, __: sampling})()

    mix = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)) * 0.3

    def denoise(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return torch.einsum("ij,bjhw->bihw", mix, torch.tanh(x)) + 0.1 * sigma

    class Model(comfy.samplers.KSamplerX0Inpaint):
        """What a sampler calls."""

        def __call__(self, x: torch.Tensor, sigma: torch.Tensor, **_: object) -> torch.Tensor:
            return denoise(x, float(sigma[0]))

    guider = Guider()
    found: dict[str, dict] = {}
    for name in comfy.samplers.SAMPLER_NAMES:
        for case, (scheduler, steps, part) in CASES.items():
            sampler = comfy.samplers.sampler_object(name)
            sigmas = comfy.samplers.calculate_sigmas(sampling, scheduler, steps)[-(round(steps * part) + 1) :]
            extra = {"model_options": guider.model_options, "seed": 5, "denoise_mask": None}
            run = tracer.SamplerRun(sampler=sampler, guider=guider, sigmas=sigmas, extra_args=extra)
            torch.manual_seed(77)
            state = torch.get_rng_state()
            try:
                program, sigmas_left = tracer.trace(run, sampling.timestep)
            except tracer.NotLinearError as error:
                found[f"{name}, {case}"] = {"reason": str(error)}
                continue
            x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))
            untouched = torch.equal(state, torch.get_rng_state())
            given = tracer.given_tensors(run, program, x)
            after = torch.get_rng_state()
            result = program.run(given.__getitem__, lambda e, latent, p=program: denoise(latent, p.states[e].sigma))
            torch.manual_seed(77)
            own_sigmas = sigmas.clone()
            wanted = sampler.sampler_function(
                Model(guider, own_sigmas),
                x.clone(),
                own_sigmas,
                extra_args=dict(extra),
                callback=lambda _: None,
                disable=True,
                **sampler.extra_options,
            )
            found[f"{name}, {case}"] = {
                "error": float((result - wanted).norm() / wanted.norm()),
                "calls": program.num_calls,
                "steps": len(program.step_ends),
                "json_bytes": len(json.dumps(program.to_dict())),
                "sigmas_as_sampler": torch.equal(sigmas_left, own_sigmas),
                "noisy": program.given != (0,),
                "random_state_kept": untouched,
                "random_state_as_sampler": torch.equal(after, torch.get_rng_state()),
            }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
