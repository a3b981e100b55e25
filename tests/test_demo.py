"""The shipped nano models and pictures are what they are said to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

DEMO = Path(__file__).resolve().parents[1] / "demo"
PICTURES = sorted((DEMO / "pictures" / "demotion_demo").glob("*.jpg"))
MODEL = DEMO / "models" / "diffusion_models" / "demotion_nano_flux.safetensors"
VAE = DEMO / "models" / "vae" / "demotion_nano_vae.safetensors"


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """The pictures at the native tier [12, 256, 256, 3]."""
    small = [Image.open(path).resize((256, 256), Image.Resampling.LANCZOS) for path in PICTURES]
    return torch.from_numpy(np.stack([np.array(image) for image in small])).float() / 255


@pytest.fixture(scope="module")
def model(comfy):
    return comfy.sd.load_diffusion_model(str(MODEL))


@pytest.fixture(scope="module")
def vae(comfy):
    import comfy.utils

    return comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(VAE)))


@pytest.fixture(scope="module")
def latents(model, vae, images) -> torch.Tensor:
    with torch.no_grad():
        return model.model.process_latent_in(torch.cat([vae.encode(i[None]) for i in images]))


def test_everything_fits_in_twenty_megabytes():
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 20e6


def test_twelve_square_pictures_with_captions_and_provenance():
    assert len(PICTURES) == 12
    provenance = (DEMO / "README.md").read_text()
    for path in PICTURES:
        width, height = Image.open(path).size
        assert width == height >= 256
        assert path.with_suffix(".txt").read_text().strip()
        assert f"| {path.stem} |" in provenance


def test_the_ordinary_loaders_detect_a_flow_model_and_a_vae_that_fits_it(model, vae):
    from pack.host import families
    from pack.host import vae as host_vae

    assert families.family_of(model.model).name == "Flux"
    host_vae.check_fits(vae, model.model)
    assert host_vae.VaeCodec(vae).factor == 8


def test_latents_are_about_standardised(latents):
    variances = latents.var((0, 2, 3))
    assert 0.8 < variances.mean() < 1.2
    assert variances.min() > 0.4 and variances.max() < 2
    assert latents.mean((0, 2, 3)).abs().max() < 0.5


def test_the_vae_gives_its_pictures_back(vae, images):
    with torch.no_grad():
        errors = [(vae.decode(vae.encode(i[None])) - i[None]).pow(2).mean() for i in images]
    assert -10 * torch.stack(errors).log10().mean() > 28


def test_the_model_denoises_better_than_channel_by_channel_linear_prediction(model, latents):
    from pack.host import session, text

    sigma, generator = 0.5, torch.Generator().manual_seed(0)
    noise = torch.randn(latents.shape, generator=generator)
    variance = latents.var((0, 2, 3))
    covariance = sigma - (1 - sigma) * variance
    linear = 1 + variance - covariance**2 / ((1 - sigma) ** 2 * variance + sigma**2)
    with session.open_session(model) as live, torch.no_grad():
        conditioning = text.zero_conditioning(model.model)
        z = (1 - sigma) * latents + sigma * noise
        velocity = torch.cat([live.velocity(one[None], [sigma], [conditioning]) for one in z])
    assert (velocity - (noise - latents)).pow(2).mean() < 0.6 * linear.mean()
