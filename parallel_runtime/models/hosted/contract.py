"""The host contract: all that this pack relies on in ComfyUI, what of the pack needs it, and since when ComfyUI has it.

Data, a line for each attribute, signature and option; contract_check.py looks whether a ComfyUI has them. A feature
whose lines are not all there is off by its name, the others work; only `nodes` is the base of everything. What is not
in `nodes/host`, `nodes` or `models/hosted` uses no name of ComfyUI, and tests/comfy/test_contract.py fails for a name
that they use and that no line has.

A line is a full name, and may say what has to be there:

    comfy.sampler_helpers.convert_cond              it is there
    comfy.samplers.calc_cond_batch(model, conds)    and takes these arguments, by name
    comfy.samplers.CFGGuider:conds                  its instances have the attribute: code of the class names it
    comfy.[...].attention_pytorch:enable_gqa        the function knows the option: its code names it

`since` is the oldest of the ComfyUIs at hand in which it was found: 0.20.1, 0.24.0, 0.30.0, 0.33.0. It may be older.
"""

from collections.abc import Iterator
from dataclasses import dataclass

OLDEST = (0, 24, 0)
"""The oldest ComfyUI that passed the tests of the nodes; pyproject.toml's `requires-comfyui` says the same."""

NEWEST_TESTED = (0, 33, 0)
"""The newest ComfyUI that passed them. In newer ones all works that the contract finds, and plans prove themselves."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What a user may miss: its name in a sentence, and what happens instead where ComfyUI lacks something of it."""

    title: str
    instead: str


FEATURES = {
    "nodes": Feature(title="every node of Parallel DiT", instead="each says so where it is run"),
    "parallel": Feature(title="every parallel MODEL", instead="load it with Load Diffusion Model"),
    "loop": Feature(title="the loop in the workers", instead="the loop stays in ComfyUI"),
    "cfg": Feature(title="prompt and negative at once", instead="they run one after the other"),
    "choice": Feature(title="auto's choice for each run", instead="all runs have the plan of their MODEL"),
    "listed": Feature(title="Unload Models after a cancelled run", instead="Release in the panel frees them"),
    "room": Feature(title="room on further GPUs that ComfyUI uses", instead="choose one GPU for its own models"),
    "loras": Feature(title="the merging of LoRAs in the workers", instead="take them out, or use Load Diffusion Model"),
    "parallelize": Feature(title="Parallelize Model", instead="use Parallel Model Loader"),
    "list": Feature(title="Parallel Flux List Sampler", instead="use Parallel Sampler"),
    "benchmark": Feature(title="Parallel Benchmark", instead="read the report of Parallel Sampler"),
    "decode": Feature(title="decoding over the workers", instead="VAE Decode runs in ComfyUI"),
    "clock": Feature(title="Timed VAE Decode", instead="use VAE Decode"),
    "files": Feature(title="the writing of charts and traces", instead="read the report of the node"),
    "machines": Feature(title="the use of further machines", instead="name devices of this one"),
    "texts": Feature(title="the text on nodes while they run", instead="ComfyUI's log has it"),
    "panel": Feature(title="the panel", instead="reports are on the nodes"),
    "renames": Feature(title="the offer of new nodes for old ones", instead="old ones work as they are"),
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing of ComfyUI's that is relied on.

    `name` in full; the `arguments` that it has to take; the `attribute` that its instances have, or the option that it
    knows.
    """

    feature: str
    name: str
    arguments: tuple[str, ...] = ()
    attribute: str = ""

    @property
    def text(self) -> str:
        """The line as it is written below."""
        arguments = ", ".join(self.arguments)
        return self.name + (f"({arguments})" if arguments else "") + (f":{self.attribute}" if self.attribute else "")


def _read(feature: str, text: str) -> Iterator[Line]:
    for written in filter(None, map(str.strip, text.splitlines())):
        called, _, attribute = written.partition(":")
        name, _, arguments = called.partition("(")
        names = tuple(each.strip() for each in arguments.strip(")").split(",") if each.strip())
        yield Line(feature=feature, name=name, arguments=names, attribute=attribute)


NODES = """
    comfy_api.latest.ComfyExtension
    comfy_api.latest.io.AnyType.Input
    comfy_api.latest.io.AnyType.Output
    comfy_api.latest.io.Boolean.Input(default, tooltip)
    comfy_api.latest.io.Combo.Input(options, default, optional, tooltip, advanced)
    comfy_api.latest.io.ComfyNode
    comfy_api.latest.io.Conditioning.Input
    comfy_api.latest.io.Custom
    comfy_api.latest.io.Float.Input(default, min, max, step, round, optional, tooltip)
    comfy_api.latest.io.Image.Output
    comfy_api.latest.io.Input
    comfy_api.latest.io.Int.Input(default, min, max, optional, tooltip, control_after_generate)
    comfy_api.latest.io.Latent.Input
    comfy_api.latest.io.Latent.Output
    comfy_api.latest.io.Model.Input
    comfy_api.latest.io.Model.Output
    comfy_api.latest.io.Model.Type
    comfy_api.latest.io.NodeOutput(ui)
    comfy_api.latest.io.Output
    comfy_api.latest.io.Schema(node_id, display_name, category, description, inputs, outputs, is_deprecated)
    comfy_api.latest.io.Schema(is_output_node, hidden, not_idempotent)
    comfy_api.latest.io.String.Input(default, multiline, optional, tooltip)
    comfy_api.latest.io.Vae.Input
    comfy_api.latest.io.Vae.Type
    comfy.samplers.KSampler.SAMPLERS
    comfy.samplers.KSampler.SCHEDULERS
    folder_paths.get_filename_list(folder_name)
"""
PARALLEL = """
    comfy.cli_args.args
    comfy.cli_args.parser
    comfy.model_base.BaseModel
    comfy.model_base.BaseModel.apply_model(x, t, c_concat, c_crossattn, control, transformer_options)
    comfy.model_base.BaseModel.memory_required(input_shape, cond_shapes)
    comfy.model_base.BaseModel:current_patcher
    comfy.model_base.BaseModel:diffusion_model
    comfy.model_base.BaseModel:latent_format
    comfy.model_base.BaseModel:model_sampling
    comfy.model_management.get_torch_device
    comfy.model_management.throw_exception_if_processing_interrupted
    comfy.model_management.unet_offload_device
    comfy.model_patcher.ModelPatcher(model, load_device, offload_device)
    comfy.model_patcher.ModelPatcher.add_hook_patches(hook, patches, strength_patch, strength_model)
    comfy.model_patcher.ModelPatcher.add_object_patch(name, obj)
    comfy.model_patcher.ModelPatcher.add_patches(patches, strength_patch, strength_model)
    comfy.model_patcher.ModelPatcher.add_weight_wrapper(name, function)
    comfy.model_patcher.ModelPatcher.add_wrapper_with_key(wrapper_type, key, wrapper)
    comfy.model_patcher.ModelPatcher.cleanup
    comfy.model_patcher.ModelPatcher.clone
    comfy.model_patcher.ModelPatcher.current_loaded_device
    comfy.model_patcher.ModelPatcher.get_all_callbacks
    comfy.model_patcher.ModelPatcher.get_key_patches(filter_prefix)
    comfy.model_patcher.ModelPatcher.get_model_object
    comfy.model_patcher.ModelPatcher.load(device_to, lowvram_model_memory, force_patch_weights, full_load)
    comfy.model_patcher.ModelPatcher.loaded_size
    comfy.model_patcher.ModelPatcher.model_dtype
    comfy.model_patcher.ModelPatcher.model_patches_models
    comfy.model_patcher.ModelPatcher.model_size
    comfy.model_patcher.ModelPatcher.partially_load(device_to, extra_memory, force_patch_weights)
    comfy.model_patcher.ModelPatcher.partially_unload(device_to, memory_to_free)
    comfy.model_patcher.ModelPatcher.patch_model(load_weights)
    comfy.model_patcher.ModelPatcher.pre_run
    comfy.model_patcher.ModelPatcher.set_additional_models(key, models)
    comfy.model_patcher.ModelPatcher.set_injections(key, injections)
    comfy.model_patcher.ModelPatcher.set_model_compute_dtype(dtype)
    comfy.model_patcher.ModelPatcher.set_model_patch(patch, name)
    comfy.model_patcher.ModelPatcher.set_model_patch_replace(patch, name, block_name, number, transformer_index)
    comfy.model_patcher.ModelPatcher.unpatch_model(device_to, unpatch_weights)
    comfy.model_patcher.ModelPatcher:additional_models
    comfy.model_patcher.ModelPatcher:attachments
    comfy.model_patcher.ModelPatcher:callbacks
    comfy.model_patcher.ModelPatcher:injections
    comfy.model_patcher.ModelPatcher:load_device
    comfy.model_patcher.ModelPatcher:model
    comfy.model_patcher.ModelPatcher:model_options
    comfy.model_patcher.ModelPatcher:object_patches
    comfy.model_patcher.ModelPatcher:offload_device
    comfy.model_patcher.ModelPatcher:parent
    comfy.model_patcher.ModelPatcher:patches
    comfy.model_patcher.ModelPatcher:patches_uuid
    comfy.model_patcher.ModelPatcher:weight_wrapper_patches
    comfy.model_patcher.ModelPatcher:wrappers
    comfy.hooks.WeightHook
    comfy.ops.disable_weight_init
    comfy.patcher_extension.CallbacksMP.ON_LOAD
    comfy.patcher_extension.CallbacksMP.ON_PRE_RUN
    comfy.patcher_extension.WrapperExecutor
    comfy.patcher_extension.WrapperExecutor:class_obj
    comfy.patcher_extension.WrapperExecutor:idx
    comfy.patcher_extension.WrapperExecutor:original
    comfy.patcher_extension.WrapperExecutor:wrappers
    comfy.patcher_extension.WrappersMP.CALC_COND_BATCH
    comfy.patcher_extension.WrappersMP.OUTER_SAMPLE
    comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE
    comfy.samplers.CFGGuider
    comfy.samplers.CFGGuider.outer_sample(noise, latent_image, sampler, sigmas)
    comfy.samplers.CFGGuider:cfg
    comfy.samplers.CFGGuider:conds
    comfy.samplers.CFGGuider:inner_model
    comfy.samplers.CFGGuider:model_options
    comfy.samplers.CFGGuider:model_patcher
    comfy.samplers.Sampler
    folder_paths.get_folder_paths(folder_name)
    folder_paths.get_full_path(folder_name, filename)
    nodes.common_ksampler(model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent, denoise)
"""
# How heads and tokens lie in what a class hands to attention, and what it may ask of it.
OPTIONS = """
    comfy.ldm.modules.attention.attention_pytorch:enable_gqa
    comfy.ldm.modules.attention.attention_pytorch:scale
    comfy.ldm.modules.attention.attention_pytorch:skip_output_reshape
    comfy.ldm.modules.attention.attention_pytorch:skip_reshape
"""
HOSTED = """
    comfy.ldm.modules.attention.optimized_attention
    comfy.ldm.modules.attention.optimized_attention_for_device
    comfy.ldm.modules.attention.optimized_attention_masked
    comfy.model_base.BaseModel.extra_conds
    comfy.model_detection.convert_diffusers_mmdit
    comfy.model_detection.model_config_from_diffusers_unet
    comfy.model_detection.model_config_from_unet(metadata)
    comfy.model_detection.unet_prefix_from_state_dict
    comfy.model_management.get_free_memory
    comfy.model_management.unet_dtype(device, model_params, supported_dtypes, weight_dtype)
    comfy.model_management.unet_manual_cast
    comfy.ops.manual_cast
    comfy.ops.fp8_ops
    comfy.ops.pick_operations(weight_dtype, compute_dtype, fp8_optimizations, model_config)
    comfy.options.enable_args_parsing
    comfy.patcher_extension.WrapperExecutor.new_class_executor(original, class_obj, wrappers)
    comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
    comfy.patcher_extension.get_all_wrappers(wrapper_type, transformer_options)
    comfy.quant_ops.QUANT_ALGOS
    comfy.quant_ops.QuantizedTensor
    comfy.supported_models_base.BASE
    comfy.supported_models_base.BASE.get_model
    comfy.supported_models_base.BASE.set_inference_dtype
    comfy.supported_models_base.BASE:unet_config
    comfy.utils.calculate_parameters
    comfy.utils.convert_old_quants(metadata)
    comfy.utils.pack_latents
    comfy.utils.state_dict_prefix_replace(filter_keys)
    comfy.utils.unet_to_diffusers
    comfy.utils.weight_dtype
    comfy.samplers.calculate_sigmas
    comfy.samplers.encode_model_conds
"""
LOOP = """
    comfy.patcher_extension.WrappersMP.APPLY_MODEL
    comfy.patcher_extension.WrappersMP.PREDICT_NOISE
    comfy.patcher_extension.WrappersMP.PREPARE_SAMPLING
    comfy.samplers.KSAMPLER(sampler_function, extra_options, inpaint_options)
    comfy.samplers.KSAMPLER.sample(sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)
    comfy.samplers.KSAMPLER:extra_options
    comfy.samplers.KSAMPLER:inpaint_options
    comfy.samplers.KSAMPLER:sampler_function
    comfy.samplers.KSamplerX0Inpaint(model, sigmas)
    comfy.samplers.KSamplerX0Inpaint:inner_model
    comfy.samplers.KSamplerX0Inpaint:latent_image
    comfy.samplers.KSamplerX0Inpaint:noise
    comfy.model_base.BaseModel.scale_latent_inpaint(sigma, noise, latent_image)
    comfy.samplers.calc_cond_batch(model, conds, x_in, timestep, model_options)
    comfy.samplers.cfg_function
    comfy.samplers.sampling_function
"""
CFG = """
    comfy.patcher_extension.CallbacksMP.ON_APPLY_HOOKS
    comfy.patcher_extension.CallbacksMP.ON_PREPARE_STATE
    comfy.patcher_extension.WrapperExecutor.new_executor(original, wrappers)
    comfy.patcher_extension.WrappersMP.APPLY_MODEL
    comfy.sampler_helpers.cond_has_hooks
    comfy.samplers.can_concat_cond
    comfy.samplers.get_area_and_mult
"""
CHOICE = """
    comfy.sample.fix_empty_latent_channels(model, latent_image)
    comfy.sampler_helpers.convert_cond
"""
LISTED = """
    comfy.model_management.LoadedModel(model)
    comfy.model_management.LoadedModel:model
    comfy.model_management.LoadedModel:model_finalizer
    comfy.model_management.LoadedModel:real_model
    comfy.model_management.cleanup_models
    comfy.model_management.current_loaded_models
    comfy.model_patcher.ModelPatcher.is_clone(other)
"""
ROOM = """
    comfy.model_management.LoadedModel:device
    comfy.model_management.LoadedModel:model
    comfy.model_management.current_loaded_models
    comfy.model_management.free_memory(memory_required, device)
    comfy.model_management.get_torch_device
    comfy.model_management.minimum_inference_memory
    comfy.model_management.soft_empty_cache
"""
LORAS = """
    comfy.float.stochastic_rounding(value, dtype, seed)
    comfy.lora.calculate_weight(patches, weight, key, intermediate_dtype)
    comfy.memory_management.aimdo_enabled
    comfy.model_base.BaseModel.get_dtype_inference
    comfy.model_management.lora_compute_dtype(device)
    comfy.model_management.module_size(module)
    comfy.model_patcher.ModelPatcher.patch_weight_to_device(device_to)
    comfy.utils.string_to_seed(data)
    comfy.utils.swap_scale_shift
    comfy.weight_adapter.LoRAAdapter
    comfy.weight_adapter.adapters
    comfy.weight_adapter.lora.LoRAAdapter
"""
PARALLELIZE = """
    comfy.model_patcher.ModelPatcher:cached_patcher_init
    comfy.model_patcher.ModelPatcher:hook_patches
    comfy.model_patcher.ModelPatcher:object_patches_backup
    comfy.patcher_extension.WrappersMP.APPLY_MODEL
    comfy.sd.load_checkpoint_guess_config
    comfy.sd.load_diffusion_model
    comfy.utils.deepcopy_list_dict
"""
LIST = """
    comfy.controlnet.ControlBase.set_previous_controlnet
    comfy.controlnet.ControlBase:previous_controlnet
    comfy.nested_tensor.NestedTensor
    comfy.sampler_helpers.get_additional_models(conds, dtype)
    comfy.utils.ProgressBar
    comfy.utils.unpack_latents(combined_latent, latent_shapes)
    latent_preview.get_previewer
"""
BENCHMARK = """
    comfy.model_management.pytorch_attention_enabled
    comfy.nested_tensor.NestedTensor
    comfy.sample.fix_empty_latent_channels(model, latent_image)
    comfy.sd.load_checkpoint_guess_config(ckpt_path, output_vae, output_clip, model_options)
    comfy.sd.load_diffusion_model(unet_path, model_options)
    comfy.utils.ProgressBar
"""
DECODE = """
    comfy.model_management.free_memory(memory_required, device)
    comfy.sd.VAE:first_stage_model
    comfy.sd.VAE:latent_dim
    comfy.sd.VAE:memory_used_decode
    comfy.sd.VAE:output_channels
    comfy.sd.VAE:output_device
    comfy.sd.VAE:upscale_ratio
    comfy.utils.PROGRESS_BAR_HOOK
    comfy.utils.set_progress_bar_global_hook
    nodes.VAEDecodeTiled.INPUT_TYPES
    nodes.VAEDecodeTiled.decode
"""
CLOCK = """
    comfy.model_management.load_models_gpu(models, memory_required, force_full_load)
    comfy.sd.VAE
    comfy.sd.VAE.throw_exception_if_invalid
    comfy.sd.VAE:device
    comfy.sd.VAE:disable_offload
    comfy.sd.VAE:patcher
    comfy.sd.VAE:vae_dtype
    nodes.VAEDecode.decode(vae, samples)
"""
FILES = """
    folder_paths.get_output_directory
    folder_paths.get_save_image_path(filename_prefix, output_dir)
"""
TEXTS = """
    comfy_api.latest.get_executing_context
    comfy_api.latest.get_progress_state
    comfy_execution.graph.DynamicPrompt.get_display_node_id
    comfy_execution.graph.DynamicPrompt.get_node
    comfy_execution.graph.DynamicPrompt.has_node
    comfy_execution.progress.ProgressRegistry:dynprompt
    comfy_execution.progress.ProgressRegistry:nodes
    comfy_execution.utils.ExecutionContext:node_id
    comfy_execution.utils.ExecutionContext:prompt_id
    nodes.NODE_CLASS_MAPPINGS
    nodes.NODE_DISPLAY_NAME_MAPPINGS
    server.PromptServer.send_progress_text(text, node_id)
"""
PANEL = """
    server.PromptServer.send_sync(event, data, sid)
    server.PromptServer:client_id
    server.PromptServer:instance
    comfy.cli_args.args.listen
    comfy_execution.progress.NodeState.Running
    comfy_execution.progress.ProgressRegistry:prompt_id
    nodes.interrupt_processing
    server.PromptServer.add_on_prompt_handler(handler)
    server.PromptServer:app
    server.PromptServer:loop
    server.PromptServer:prompt_queue
    server.PromptServer:routes
    execution.PromptQueue:currently_running
"""
RENAMES = """
    comfy_api.latest.ComfyAPI:node_replacement
    comfy_api.latest.io.NodeReplace(new_node_id, old_node_id, old_widget_ids, input_mapping, output_mapping)
    comfy_api.latest.io.WidgetInput
"""

LINES: tuple[Line, ...] = (
    *_read("nodes", NODES),
    *_read("parallel", PARALLEL),
    *_read("parallel", HOSTED),
    *_read("parallel", OPTIONS),
    *_read("loop", LOOP),
    *_read("cfg", CFG),
    *_read("choice", CHOICE),
    *_read("listed", LISTED),
    *_read("room", ROOM),
    *_read("loras", LORAS),
    *_read("parallelize", PARALLELIZE),
    *_read("list", LIST),
    *_read("benchmark", BENCHMARK),
    *_read("decode", DECODE),
    *_read("clock", CLOCK),
    *_read("files", FILES),
    *_read("machines", "folder_paths.get_user_directory"),
    *_read("texts", TEXTS),
    *_read("panel", PANEL),
    *_read("renames", RENAMES),
)

# Used where they are there: kinds of ControlNet to refuse, the version, the names in a file that a class changes, and
# what only some versions have of attention and of ModelPatcher, and what a class calls to keep keys between steps.
WHERE_THERE = (
    "comfy.controlnet.ControlLora",
    "comfy.controlnet.QwenFunControlNet",
    "comfy.k_diffusion.sampling.tqdm",
    "comfy.model_base.BaseModel._apply_model",
    "comfy.model_base.BaseModel.process_timestep",
    "comfy.samplers._calc_cond_batch",
    "comfy.samplers._calc_cond_batch_outer",
    "comfy.ldm.modules.attention.AttentionTensorContainer",
    "comfy.ldm.modules.attention.ComfyAttention",
    "comfy.ldm.modules.attention.REGISTERED_ATTENTION_FUNCTIONS",
    "comfy.ldm.qwen_image21.model.QwenImage21Transformer2DModel.reset_prefix_cache",
    "comfy.ldm.qwen_image21.model.QwenImage21Transformer2DModel.select_prefix_cache",
    "comfy.model_management.ensure_pin_budget",
    "comfy.model_prefetch.cleanup_malloc_graph",
    "comfy.model_prefetch.malloc_graph_enabled",
    "comfy.model_prefetch.pause_malloc_graph",
    "comfy.model_patcher.ModelPatcher.deepclone_multigpu",
    "comfy.model_patcher.ModelPatcher.get_free_memory",
    "comfy.model_patcher.ModelPatcher.model_state_dict_for_saving",
    "comfy.model_patcher.ModelPatcher.set_model_optimized_attention",
    "comfy.ops.linear_input_act",
    "comfy.supported_models_base.BASE.process_unet_state_dict",
    "comfyui_version.__version__",
)
