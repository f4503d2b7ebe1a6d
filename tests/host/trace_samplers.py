"""Traces every sampler of a real ComfyUI and runs the recurrences found beside the samplers; prints JSON.

Owns: what is compared. Run as `python tests/host/trace_samplers.py COMFYUI`, in a process of its own, since ComfyUI's
modules read the command line and are named like others. With `--bent`, what is said of samplers that are not linear;
with `--shown`, of those that show something else than the denoised latent; with `--options`, of what only the options
that a sampler is called with have.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PACK_ROOT = Path(__file__).resolve().parents[2]
NAME = "pack_in_a_comfyui"
CASES = {"simple 12": ("simple", 12, 1.0), "karras 6 of 10": ("karras", 10, 0.6), "beta 24": ("beta", 24, 1.0)}
SHAPE = (2, 4, 6, 10)


def load(comfyui: str) -> Any:
    """ComfyUI's modules on the CPU, and our tracer."""
    sys.path.insert(0, comfyui)
    sys.argv = ["trace_samplers", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    spec = importlib.util.spec_from_file_location(NAME, PACK_ROOT / "__init__.py")
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
    return importlib.import_module(f"{NAME}.nodes.host.sampling.trace_recurrence")


class Bench:
    """ComfyUI's samplers, a guider with what they look at, and a small model to sample with."""

    def __init__(self, tracer: Any) -> None:
        import comfy.model_sampling
        import comfy.samplers
        import torch

        torch.set_num_threads(1)  # tensors of a few hundred numbers
        self.tracer, self.samplers, self.torch = tracer, comfy.samplers, torch
        self.records = importlib.import_module(f"{NAME}.parallel_runtime.wire.records")
        kinds = (comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST)
        self.sampling = sampling = type("Sampling", kinds, {})()
        self.guider = guider = object.__new__(comfy.samplers.CFGGuider)
        guider.model_options, guider.cfg = {"transformer_options": {}}, 1.0
        guider.conds = {"positive": [{}], "negative": [{}]}
        guider.inner_model = SimpleNamespace(model_sampling=sampling)
        guider.model_patcher = SimpleNamespace(get_model_object=lambda _: sampling)
        self.mix = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)) * 0.3

    def denoise(self, x: Any, sigma: float) -> Any:
        """What the model makes of a latent."""
        return self.torch.einsum("ij,bjhw->bihw", self.mix, self.torch.tanh(x)) + 0.1 * sigma

    def sampled(self, run: Any, x: Any) -> tuple[Any, Any]:
        """What the sampler itself makes of `x`, and of its sigmas."""
        sigmas, denoise = run.sigmas.clone(), self.denoise

        class Model(self.samplers.KSamplerX0Inpaint):
            """What a sampler calls."""

            def __call__(self, x: Any, sigma: Any, **_: object) -> Any:
                return denoise(x, float(sigma[0]))

        function, extra = run.sampler.sampler_function, dict(run.extra_args)
        settings = {"callback": lambda _: None, "disable": True, **run.sampler.extra_options}
        return function(Model(self.guider, sigmas), x.clone(), sigmas, extra_args=extra, **settings), sigmas

    def run_of(self, sampler: Any, scheduler: str, steps: int, part: float) -> Any:
        """A sampler with all that it is called with."""
        sigmas = self.samplers.calculate_sigmas(self.sampling, scheduler, steps)[-(round(steps * part) + 1) :]
        return self.tracer.SamplerRun(
            sampler=sampler,
            guider=self.guider,
            sigmas=sigmas,
            extra_args={"model_options": self.guider.model_options, "seed": 5, "denoise_mask": None},
        )

    def bent(self, bend: float, *, hidden: bool, shown: float = 0.0) -> str:
        """What is said of an Euler sampler whose latents are bent by so much; "" when it becomes a recurrence.

        `hidden`: what is bent is not in the result, but only in what the model is given. `shown`: how far towards that
        the denoised latent is off which its steps show.
        """

        def euler(
            model: Any, x: Any, sigmas: Any, extra_args: Any = None, callback: Any = None, disable: Any = None
        ) -> Any:
            for step in range(len(sigmas) - 1):
                given = x if step == 0 else x + bend * x * x.abs()
                denoised = model(given, sigmas[step] * x.new_ones([x.shape[0]]), **(extra_args or {}))
                told = {"x": x, "i": step, "sigma": sigmas[step], "sigma_hat": sigmas[step]}
                callback(told | {"denoised": denoised + shown * (given - denoised)})
                x = denoised + ((x if hidden else given) - denoised) * (sigmas[step + 1] / sigmas[step])
            return x

        run = self.run_of(self.samplers.KSAMPLER(euler), *CASES["simple 12"])
        try:
            self.tracer.trace(run, self.sampling.timestep)
        except self.tracer.NotLinearError as error:
            return str(error)
        return ""

    def refused(self, model_options: dict[str, Any]) -> list[str]:
        """Why the loop in the workers refuses a run with these options of the sampler, and what it asks the model."""
        worker_loop = importlib.import_module(f"{NAME}.nodes.host.sampling.worker_loop")
        asked = list(worker_loop.cond_names(self.guider, model_options))
        try:
            worker_loop._refuse_guider(self.guider, model_options)
        except worker_loop.HostLoopError as error:
            return [str(error), *asked]
        return ["", *asked]

    def compare(self, name: str, scheduler: str, steps: int, part: float) -> dict[str, Any]:
        """A sampler beside its recurrence: the relative error and what else must agree; or the reason for none."""
        torch = self.torch
        run = self.run_of(self.samplers.sampler_object(name), scheduler, steps, part)
        torch.manual_seed(77)
        state = torch.get_rng_state()
        try:
            recurrence, _, sigmas_left = self.tracer.trace(run, self.sampling.timestep)
        except self.tracer.NotLinearError as error:
            return {"reason": str(error)}
        kept = torch.equal(state, torch.get_rng_state())
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))
        given = self.tracer.given_tensors(run, recurrence, x, lambda: None)
        after = torch.get_rng_state()
        result = recurrence.run(given.__getitem__, lambda e, latent: self.denoise(latent, recurrence.states[e].sigma))
        torch.manual_seed(77)
        wanted, own_sigmas = self.sampled(run, x)
        return {
            "error": float((result - wanted).norm() / wanted.norm()),
            "calls": recurrence.num_calls,
            "steps": len(recurrence.step_ends),
            "json_bytes": len(json.dumps(self.records.to_body(recurrence))),
            "sigmas_as_sampler": torch.equal(sigmas_left, own_sigmas),
            "noisy": recurrence.given != (0,),
            "random_state_kept": kept,
            "random_state_as_sampler": torch.equal(after, torch.get_rng_state()),
        }


def main() -> None:
    """One line of JSON: for each sampler and case what `Bench.compare` finds."""
    comfyui, *asked = sys.argv[1:]
    bench = Bench(load(comfyui))
    if asked == ["--bent"]:
        bends = [(bend, hidden) for bend in (0.0, 1e-6, 1e-4) for hidden in (False, True)]
        print(json.dumps([[*case, bench.bent(case[0], hidden=case[1])] for case in bends]))  # noqa: T201
        return
    if asked == ["--shown"]:
        print(json.dumps([bench.bent(0.0, hidden=False, shown=each) for each in (0.04, 0.2)]))  # noqa: T201
        return
    if asked == ["--options"]:
        given = ({}, {"sampler_post_cfg_function": [print]}, {"disable_cfg1_optimization": True})
        print(json.dumps([bench.refused(options) for options in given]))  # noqa: T201
        return
    found = {
        f"{name}, {case}": bench.compare(name, *settings)
        for name in bench.samplers.SAMPLER_NAMES
        for case, settings in CASES.items()
    }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
