"""Hunyuan3D 2 and 2.1, TripoSplat: 35 tokens of shape, 9 of the picture."""

from .tiny import Case, at, build, case, noise


@case("Hunyuan3D 2")
def _() -> Case:
    sizes = {"in_channels": 16, "context_in_dim": 48, "hidden_size": 96, "mlp_ratio": 2.0, "num_heads": 6, "depth": 2}
    given = {"x": noise(2, 16, 35), "timestep": at(0.7, 0.7), "context": noise(2, 9, 48), "guidance": at(5.0)}
    path = "comfy.ldm.hunyuan3d.model.Hunyuan3Dv2"
    return build(path, **sizes, depth_single_blocks=2, guidance_embed=True), given


@case("Hunyuan3D 2.1, experts, long skips")
def _() -> Case:
    sizes = {"in_channels": 16, "hidden_size": 96, "context_dim": 48, "depth": 5, "num_heads": 6, "num_moe_layers": 2}
    sizes |= {"num_experts": 4, "guidance_cond_proj_dim": None}
    given = {"x": noise(2, 16, 34), "t": at(0.7, 0.7), "context": noise(2, 9, 48)}
    return build("comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain", **sizes), given


@case("TripoSplat, reference")
def _() -> Case:
    sizes = {"q_token_length": 35, "model_channels": 96, "cond_channels": 48, "num_blocks": 2, "num_head_channels": 16}
    sizes |= {"num_refiner_blocks": 2, "cond2_channels": 24, "mlp_ratio": 2}
    given = {"x": [noise(2, 35, 16), noise(2, 1, 5)], "t": at(0.7, 0.7), "context": noise(2, 9, 48)}
    model = build("comfy.ldm.triposplat.model.LatentSeqMMFlowModel", **sizes)
    return model, given | {"ref_latents": [noise(2, 24, 2, 3)]}
