"""ComfyUI-Demotion: where does a downscaled training step give the same LoRA gradient?"""

from .nodes import comfy_entrypoint

WEB_DIRECTORY = "./js"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
