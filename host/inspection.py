"""A model in words: its family, its tokens, and the Linears that a pattern matches."""

from __future__ import annotations

import re
from collections import defaultdict

from ..demotion import adapter, grid
from . import families, memory, rotary


def report(model, pattern: str, rank: int, tier: int) -> str:
    """Family, latents, tokens, sigma range, rotary door, targets and memory of a MODEL.

    Raises ValueError for a model that the pack cannot train and a pattern that matches nothing.
    """
    family = families.family_of(model.model)
    latents = model.model.latent_format
    factor = latents.spacial_downscale_ratio
    low, high = families.sigma_range(model.model)
    linears = families.linears(model.model.diffusion_model)
    targets = adapter.match_targets(linears, families.targets_of(family, pattern))
    parameters = adapter.lora_size(linears, targets, rank)
    tokens = round(grid.nominal_tokens(tier, factor, family.patch))
    dtype = model.model.get_dtype_inference()
    need = [
        memory.activation_bytes(model.model.diffusion_model, family, tokens, dtype, lean)
        for lean in (False, True)
    ]
    lines = [
        f"Family: {family.name}",
        f"Latents: {latents.latent_channels} channels, {latents.latent_dimensions} axes, a cell of "
        f"{factor} pixels; a token is {family.patch}x{family.patch} cells",
        f"Tokens at {tier} px: {tokens}",
        f"Sigma range: {low:g} to {high:.5g}",
        f"Rotary table: {rotary.door(model.model)}",
        f"Compute precision: {str(dtype).removeprefix('torch.')}",
        f"Activations at {tier} px: about {need[0] / 2**30:.1f} GB, with checkpointing "
        f"{need[1] / 2**30:.1f} GB",
        f"LoRA: {len(targets)} of {len(linears)} Linears, {parameters:,} parameters at rank {rank}",
        *(f"  {line}" for line in _grouped(linears, targets)),
    ]
    return "\n".join(lines)


def _grouped(linears: dict, targets: list[str]) -> list[str]:
    """Targets that differ by their block's number only, on one line: name, count, in -> out."""
    groups = defaultdict(list)
    for name in targets:
        groups[re.sub(r"\b\d+\b", "*", name)].append(linears[name])
    return [
        f"{name}  x{len(found)}  {found[0].in_features} -> {found[0].out_features}"
        for name, found in groups.items()
    ]
