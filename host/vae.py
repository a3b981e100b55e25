"""ComfyUI's VAE as the arms need it: one picture at a time, 8 bits in, 8 bits out."""

from __future__ import annotations

import numpy as np
import torch

from .fingerprint import fingerprint


class VaeCodec:
    """Encode and decode single pictures. A video VAE takes a batch for frames, so there are no
    batches here."""

    def __init__(self, vae) -> None:
        self.vae = vae
        self.fingerprint = fingerprint(vae.first_stage_model)

    @property
    def factor(self) -> int:
        """Pixels on a latent cell's edge."""
        return int(self.vae.spacial_compression_encode())

    def encode(self, pixels: np.ndarray) -> torch.Tensor:
        """uint8 [H, W, 3] -> raw latent [C, ..., h, w]."""
        image = torch.from_numpy(np.array(pixels)).float() / 255
        with torch.no_grad():
            return self.vae.encode(image[None])[0].cpu().float()

    def decode(self, latent: torch.Tensor) -> np.ndarray:
        """Raw latent [C, ..., h, w] -> uint8 [H, W, 3]."""
        with torch.no_grad():
            image = self.vae.decode(latent[None])
        image = image.reshape(-1, *image.shape[-3:])[0]
        return (image * 255).round().clamp(0, 255).byte().cpu().numpy()


def check_fits(vae, model) -> None:
    """Raise ValueError when a VAE's latents are not what a model takes."""
    wanted = model.latent_format
    channels, axes = int(vae.latent_channels), int(vae.latent_dim)
    if channels != wanted.latent_channels or axes != wanted.latent_dimensions:
        raise ValueError(
            f"VAE makes latents of {channels} channels and {axes} axes, MODEL takes "
            f"{wanted.latent_channels} channels and {wanted.latent_dimensions} axes: "
            "load the VAE that belongs to the model"
        )
