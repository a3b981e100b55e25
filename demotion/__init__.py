"""The method: torch, numpy and scipy; nothing from ComfyUI."""
