"""ComfyUI's own velocity, which the pack's is held against."""

from __future__ import annotations

import torch


def native_velocity(comfy, model, z, sigma, conditioning):
    """ComfyUI's own forward, as its sampler calls it."""
    import comfy.model_sampling
    import comfy.sampler_helpers
    import comfy.samplers

    with torch.inference_mode():
        comfy.model_management.load_models_gpu([model])
        model.pre_run()
        conds = comfy.samplers.process_conds(
            model.model,
            torch.zeros_like(z),
            {"positive": comfy.sampler_helpers.convert_cond(conditioning)},
            model.load_device,
            latent_image=torch.zeros_like(z),
            seed=0,
            latent_shapes=[z.shape],
        )
        rescaled = isinstance(model.model.model_sampling, comfy.model_sampling.COSMOS_RFLOW)
        level = torch.tensor([sigma])
        state, level = (z / (1 - sigma), level / (1 - level)) if rescaled else (z.clone(), level)
        options = comfy.model_patcher.create_model_options_clone(model.model_options)
        options["transformer_options"]["sample_sigmas"] = level.repeat(2)
        denoised = comfy.samplers.calc_cond_batch(
            model.model, [conds["positive"]], state, level, options
        )[0]
        return (z - denoised) / sigma
