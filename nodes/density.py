"""The widgets that say how training draws sigma and how fast it learns, the same wherever they
stand."""

from __future__ import annotations

from comfy_api.latest import io

from ..demotion import draws, train
from ..host import families

OWN = "model"


def density_inputs() -> list[io.Input]:
    """Widgets sigma_density, density_mean, density_std and density_shift."""
    return [
        io.Combo.Input(
            "sigma_density",
            options=[*draws.DENSITIES, OWN],
            default="logit_normal",
            tooltip="How sigma is drawn: uniform, logit_normal, shifted, dynamic_shift (by the "
            "tokens of each picture's native grid, as Flux's), or through the model's own "
            "schedule shift.",
        ),
        io.Float.Input(
            "density_mean",
            default=0.0,
            min=-10.0,
            max=10.0,
            step=0.1,
            advanced=True,
            tooltip="Mean of logit_normal.",
        ),
        io.Float.Input(
            "density_std",
            default=1.0,
            min=0.01,
            max=10.0,
            step=0.1,
            advanced=True,
            tooltip="Standard deviation of logit_normal.",
        ),
        io.Float.Input(
            "density_shift",
            default=3.0,
            min=0.01,
            max=100.0,
            step=0.1,
            advanced=True,
            tooltip="Shift of shifted; 1 is uniform, larger is noisier.",
        ),
    ]


def schedule_inputs() -> list[io.Input]:
    """Widgets schedule and warmup_steps."""
    return [
        io.Combo.Input(
            "schedule",
            options=list(train.SCHEDULES),
            default="constant",
            tooltip="Learning rate after the warm-up: constant, or a line or a cosine down to 0.",
        ),
        io.Int.Input(
            "warmup_steps",
            default=0,
            min=0,
            max=100000,
            advanced=True,
            tooltip="Steps over which the learning rate rises linearly.",
        ),
    ]


def density_of(
    model, sigma_density: str, density_mean: float, density_std: float, density_shift: float
) -> draws.SigmaDensity:
    """The density that the widgets of `density_inputs` name. Raises ValueError when it is the
    model's own and there is no MODEL."""
    if sigma_density != OWN:
        return draws.SigmaDensity(sigma_density, density_mean, density_std, density_shift)
    if model is None:
        raise ValueError(
            "sigma_density is that of the model, and no MODEL is connected: connect it or choose "
            "another density"
        )
    return families.own_density(model.model)
