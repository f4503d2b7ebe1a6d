"""The matrix's graphs, as a table. Does not own: what an edit does (parity/edits.py), the runs (graph_matrix.py)."""

from __future__ import annotations

from parity.edits import (
    FILES,
    HERE,
    INSTANTX,
    LONG,
    add,
    controlnet,
    custom_sampling,
    from_picture,
    guided,
    in_two_parts,
    lora,
    on,
    on_model,
    on_positive,
    painted_anew,
    picture,
    prompt,
    reference,
    set_inputs,
    then_base_model,
)
from parity.graphs import CACHE, CANNY, Graph, area, in_halves, of

SAMPLERS = (
    "euler euler_cfg_pp euler_ancestral euler_ancestral_cfg_pp heun heunpp2 exp_heun_2_x0 exp_heun_2_x0_sde dpm_2 "
    "dpm_2_ancestral lms dpm_fast dpm_adaptive dpmpp_2s_ancestral dpmpp_2s_ancestral_cfg_pp dpmpp_sde dpmpp_sde_gpu "
    "dpmpp_2m dpmpp_2m_cfg_pp dpmpp_2m_sde dpmpp_2m_sde_gpu dpmpp_2m_sde_heun dpmpp_2m_sde_heun_gpu dpmpp_3m_sde "
    "dpmpp_3m_sde_gpu ddpm lcm ipndm ipndm_v deis res_multistep res_multistep_cfg_pp res_multistep_ancestral "
    "res_multistep_ancestral_cfg_pp gradient_estimation gradient_estimation_cfg_pp er_sde seeds_2 seeds_3 sa_solver "
    "sa_solver_pece ddim uni_pc uni_pc_bh2"
).split()
SCHEDULERS = "simple sgm_uniform karras exponential ddim_uniform beta normal linear_quadratic kl_optimal".split()
METHODS = ("offset", "index", "uxo/uno")
NO_SHIFT = {f"shift_{axis}": 0.0 for axis in "xyt"}


def method(name: str, *pictures: str, **settings: object) -> Graph:
    """Kontext: references, put where `name` says."""
    edits = [reference(each) for each in pictures]
    edits.append(on_positive("FluxKontextMultiReferenceLatentMethod", reference_latents_method=name))
    return of("kontext", f"{name}, {len(pictures)} reference(s)", *edits, **settings)


GRAPHS: tuple[Graph, ...] = (
    of("ksampler", "cfg 1"),
    of("ksampler", "one step", steps=1),
    of("ksampler", "begins with a picture", from_picture("picture_b.png"), denoise=0.6, steps=3),
    of("ksampler", "KSampler (Advanced), in two parts", in_two_parts, steps=4),
    of("cfg", "cfg 3, prompts of equal length", guided(3.0)),
    of("cfg", "cfg 3, unequal prompts", guided(3.0, negative=LONG)),
    of("cfg", "cfg 3, long prompt, short negative", guided(3.0), prompt=LONG),
    of("batch", "batch 2", batch=2),
    of("batch", "batch 3, cfg 3", guided(3.0), batch=3),
    of("batch", "batch 4", batch=4),
    of("batch", "batch 2, cfg 3, unequal prompts", guided(3.0, negative=LONG), batch=2),
    of("size", "72 x 104", width=72, height=104),
    of("size", "200 x 136, cfg 3", guided(3.0), width=200, height=136),
    of("size", "16 x 16, one image token", width=16, height=16),
    of("size", "16 x 32, fewer image tokens than ranks", width=16, height=32),
    of("schnell", "schnell", set_inputs("model", unet_name=FILES.schnell)),
    of("schnell", "schnell, cfg 2", set_inputs("model", unet_name=FILES.schnell), guided(2.0)),
    of("saved by comfyui", "norm keys as ComfyUI saves them", set_inputs("model", unet_name=FILES.dev_saved)),
    of("fill", "fill", painted_anew("picture_a.png", noise_mask=False)),
    of("fill", "fill, noise mask, cfg 2", painted_anew("picture_b.png", noise_mask=True), guided(2.0)),
    of(
        "noise mask",
        "noise mask",
        from_picture("picture_a.png"),
        on("latent_image", "SetLatentNoiseMask", samples=HERE, mask=["picture_a.png", 1]),
    ),
    of(
        "noise mask",
        "differential diffusion",
        from_picture("picture_a.png"),
        on("latent_image", "SetLatentNoiseMask", samples=HERE, mask=["picture_a.png", 1]),
        on_model("DifferentialDiffusion", strength=1.0),
        steps=3,
    ),
    of("guider", "BasicGuider", custom_sampling("BasicGuider", conditioning=["guidance", 0])),
    of("guider", "CFGGuider", guided(3.0), custom_sampling("CFGGuider", positive=HERE, negative=HERE, cfg=HERE)),
    of(
        "guider",
        "DualCFGGuider",
        guided(3.0),
        prompt("third", "a market in the sun"),
        custom_sampling(
            "DualCFGGuider",
            **{"cond1": ["guidance", 0], "cond2": ["third", 0], "negative": HERE},
            **{"cfg_conds": 2.0, "cfg_cond2_negative": 3.0, "style": "regular"},
        ),
    ),
    of(
        "guider",
        "PerpNegGuider",
        guided(3.0),
        custom_sampling(
            "PerpNegGuider",
            **{"positive": HERE, "negative": HERE, "cfg": HERE},
            **{"empty_conditioning": ["negative", 0], "neg_scale": 1.0},
        ),
    ),
    of(
        "guider",
        "DualModelGuider, LoRA on the positive side",
        guided(3.0),
        lora(FILES.lora_fused, 0.8),
        custom_sampling("DualModelGuider", positive=HERE, negative=HERE, cfg=HERE, model_negative=["model", 0]),
    ),
    *(of("sampler", f"sampler {each}", sampler=each, steps=3) for each in SAMPLERS),
    *(of("scheduler", f"scheduler {each}", scheduler=each, steps=3) for each in SCHEDULERS),
    of(
        "model sampling",
        "ModelSamplingFlux",
        on_model("ModelSamplingFlux", max_shift=1.3, base_shift=0.7, width=256, height=384),
    ),
    of("model sampling", "ModelSamplingSD3", on_model("ModelSamplingSD3", shift=2.0)),
    of("cfg patch", "RescaleCFG", guided(3.0), on_model("RescaleCFG", multiplier=0.7)),
    of("cfg patch", "CFGZeroStar", guided(3.0), on_model("CFGZeroStar")),
    of("cfg patch", "TCFG", guided(3.0), on_model("TCFG")),
    of("cfg patch", "Mahiro", guided(3.0), on_model("Mahiro")),
    of("position", "ScaleROPE", on_model("ScaleROPE", **{f"scale_{axis}": 1.5 for axis in "xyt"}, **NO_SHIFT)),
    of("guidance", "FluxDisableGuidance", on_positive("FluxDisableGuidance")),
    of("guidance", "guidance 1 against 3.5", on_positive("FluxGuidance", guidance=1.0)),
    of("area", "ConditioningSetArea", *in_halves("ConditioningSetArea", left=area(0), right=area(64)), width=128),
    of(
        "area",
        "ConditioningSetArea, cfg 3",
        *in_halves("ConditioningSetArea", left=area(0), right=area(64)),
        guided(3.0),
        width=128,
    ),
    of(
        "area",
        "ConditioningCombine",
        prompt("region", "a market in the sun"),
        on("positive", "ConditioningCombine", conditioning_1=HERE, conditioning_2=["region", 0]),
    ),
    of(
        "area",
        "ConditioningSetMask",
        picture("picture_a.png"),
        prompt("region", "a market in the sun"),
        on_positive("ConditioningSetMask", mask=["picture_a.png", 1], strength=1.0, set_cond_area="default"),
        on("positive", "ConditioningCombine", conditioning_1=HERE, conditioning_2=["region", 0]),
    ),
    of(
        "area",
        "ConditioningSetMask to its bounds",
        picture("picture_a.png"),
        prompt("region", "a market in the sun"),
        on_positive("ConditioningSetMask", mask=["picture_a.png", 1], strength=1.0, set_cond_area="mask bounds"),
        on("positive", "ConditioningCombine", conditioning_1=HERE, conditioning_2=["region", 0]),
    ),
    of(
        "area",
        "ConditioningSetTimestepRange",
        prompt("region", "a market in the sun"),
        add("late", "ConditioningSetTimestepRange", conditioning=["region", 0], start=0.3, end=1.0),
        on("positive", "ConditioningCombine", conditioning_1=HERE, conditioning_2=["late", 0]),
        steps=3,
    ),
    *(method(each, "picture_b.png") for each in METHODS),
    *(method(each, "picture_b.png", "picture_a.png") for each in METHODS),
    of("kontext", "no method named, cfg 2, batch 2", reference("picture_a.png"), guided(2.0), batch=2),
    of(
        "long conditioning",
        "ConditioningConcat",
        prompt("more", "a market in the sun"),
        on("positive", "ConditioningConcat", conditioning_to=HERE, conditioning_from=["more", 0]),
    ),
    of(
        "long conditioning",
        "StyleModelApply (Redux), multiply",
        add("style", "TinyStyle", width=64, tokens=29),
        on_positive(
            "StyleModelApply",
            **{"style_model": ["style", 0], "clip_vision_output": ["style", 1]},
            **{"strength": 0.8, "strength_type": "multiply"},
        ),
    ),
    of("controlnet", "XLabs", controlnet(FILES.controlnet_xlabs)),
    of("controlnet", "XLabs, cfg 2, batch 2", controlnet(FILES.controlnet_xlabs), guided(2.0), batch=2),
    of("controlnet", "InstantX", controlnet(INSTANTX)),
    of("controlnet", "Union", controlnet(FILES.controlnet_union, union_type=CANNY)),
    of("controlnet", "Union, first half only", controlnet(FILES.controlnet_union, union_type=CANNY, end_percent=0.4)),
    of("controlnet", "XLabs and InstantX", controlnet(FILES.controlnet_xlabs), controlnet(INSTANTX, strength=0.3)),
    of("cache", "EasyCache", on_model("EasyCache", **CACHE), steps=6),
    of("cache", "EasyCache, cfg 2", guided(2.0), on_model("EasyCache", **CACHE), steps=6),
    of("cache", "LazyCache", on_model("LazyCache", **CACHE), steps=6),
    of("cache", "every second call skipped", on_model("SkipEverySecondCall"), steps=4),
    of(
        "attention mask",
        "StyleModelApply (Redux), attn_bias",
        add("style", "TinyStyle", width=64, tokens=29),
        on_positive(
            "StyleModelApply",
            **{"style_model": ["style", 0], "clip_vision_output": ["style", 1]},
            **{"strength": 0.3, "strength_type": "attn_bias"},
        ),
    ),
    *(
        of("attention mask", f"attention mask, {kind}", on_positive("SetAttentionMask", kind=kind, width=64, height=96))
        for kind in ("halves", "halves as bias", "random bias")
    ),
    of(
        "attention mask",
        "attention mask of another size, batch 2, cfg 2",
        on_positive("SetAttentionMask", kind="random bias", width=32, height=32),
        guided(2.0),
        batch=2,
    ),
    of("lora", "LoRA, fused names", lora(FILES.lora_fused, 1.0)),
    of("lora", "LoRA, diffusers names", lora(FILES.lora_diffusers, 0.7)),
    of("lora", "two LoRAs", lora(FILES.lora_fused, 0.6), lora(FILES.lora_diffusers, 0.5)),
    of("lora", "LoRA, negative strength", lora(FILES.lora_fused, -0.5)),
    of("lora", "LoRA, strength 0", lora(FILES.lora_fused, 0.0)),
    of("lora", "LoRA, then the base model", lora(FILES.lora_diffusers, 0.8), then_base_model),
    of("lora", "LoRA, cfg 2, reference", lora(FILES.lora_fused, 0.8), guided(2.0), reference("picture_b.png")),
)
# ComfyUI's own Flux.1 cannot run these either: its blocks modulate every row alike (only Flux.2's take two timesteps).
NOT_IN_STOCK = tuple(
    method("index_timestep_zero", *pictures) for pictures in (["picture_b.png"], ["picture_b.png", "picture_a.png"])
)
KINDS = tuple(dict.fromkeys(graph.kind for graph in GRAPHS))
BY_NAME = {graph.name: graph for graph in GRAPHS}
