"""What ComfyUI needs: the only room that imports comfy."""
