"""LoRA through PEFT: targets, injection, initial values, names, files.

Modules are named as in the diffusion model ("double_blocks.0.img_attn.qkv"); in files every key
carries the prefix that ComfyUI's loaders expect: diffusion_model.<module>.lora_A.weight,
.lora_B.weight, .alpha.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save

from . import draws, measure

PREFIX = "diffusion_model."
PROBE_NORM = 0.01


@dataclass(frozen=True)
class Weights:
    """A LoRA as plain tensors: module -> (A [rank, in], B [out, rank], alpha). Delta W = alpha/rank
    B A."""

    modules: dict[str, tuple[torch.Tensor, torch.Tensor, float]]

    @property
    def fingerprint(self) -> str:
        """16 hex digits of names and values."""
        digest = hashlib.blake2b(digest_size=8)
        for name, (down, up, alpha) in sorted(self.modules.items()):
            digest.update(f"{name} {tuple(down.shape)} {tuple(up.shape)} {alpha}".encode())
            digest.update(down.float().cpu().contiguous().numpy().tobytes())
            digest.update(up.float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """State dict in the names that ComfyUI's loaders apply."""
        return {
            f"{PREFIX}{name}.{key}": tensor
            for name, (down, up, alpha) in sorted(self.modules.items())
            for key, tensor in (
                ("lora_A.weight", down),
                ("lora_B.weight", up),
                ("alpha", torch.tensor(float(alpha))),
            )
        }

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write a safetensors file atomically; the same content gives the same bytes."""
        data = save(self.tensors(), metadata=dict(metadata))
        # The library writes metadata in a random order, so the header is written again, sorted.
        size = int.from_bytes(data[:8], "little")
        header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True).encode()
        header += b" " * (-len(header) % 8)
        data = len(header).to_bytes(8, "little") + header + data[8 + size :]
        measure.write_atomically(path, data)


def match_targets(linears: Mapping[str, torch.nn.Module], pattern: str) -> list[str]:
    """Names of the Linears that a pattern matches anywhere, sorted.

    Raises ValueError when the pattern is no regular expression or matches nothing.
    """
    try:
        found = sorted(name for name in linears if re.search(pattern, name))
    except re.error as error:
        raise ValueError(
            f"targets '{pattern}' is not a regular expression ({error}): correct it"
        ) from None
    if not found:
        raise ValueError(
            f"targets '{pattern}' matches none of the model's {len(linears)} Linears, "
            f"such as {', '.join(sorted(linears)[:3])}: change the pattern"
        )
    return found


def probe_weights(
    linears: Mapping[str, torch.nn.Module], targets: Sequence[str], rank: int, seed: int
) -> Weights:
    """Fresh adapter for a probe: A as PEFT initialises it, B normal with ||Delta W||_F = .01
    ||W||_F, alpha = rank.

    With B = 0 the gradient of A would vanish, and half of the adapter would not be measured.
    """
    modules = {}
    for name in targets:
        weight = linears[name].weight
        down = _kaiming(draws.stream("lora_A", seed, name), rank, weight.shape[1])
        up = draws.standard_normal(draws.stream("lora_B", seed, name), (weight.shape[0], rank))
        up *= (
            PROBE_NORM
            * torch.linalg.norm(weight.detach().float()).cpu()
            / torch.linalg.norm(up @ down)
        )
        modules[name] = (down, up, float(rank))
    return Weights(modules)


def zero_weights(
    linears: Mapping[str, torch.nn.Module],
    targets: Sequence[str],
    rank: int,
    alpha: float,
    seed: int,
) -> Weights:
    """Ordinary start of training: A as PEFT initialises it, B = 0, so that the model starts as the
    base."""
    return Weights(
        {
            name: (
                _kaiming(draws.stream("lora_A", seed, name), rank, linears[name].weight.shape[1]),
                torch.zeros(linears[name].weight.shape[0], rank),
                float(alpha),
            )
            for name in targets
        }
    )


def _kaiming(generator, rank: int, features: int) -> torch.Tensor:
    """Uniform in +-1/sqrt(in): kaiming_uniform with a = sqrt(5), which is PEFT's default for A."""
    bound = 1 / math.sqrt(features)
    return torch.from_numpy(generator.uniform(-bound, bound, (rank, features)).astype("float32"))


class Adapter:
    """A LoRA injected into a model by PEFT, trainable in float32. The model must be the caller's
    own copy."""

    def __init__(self, model: torch.nn.Module, weights: Weights) -> None:
        """Inject. Raises ValueError when a shape does not fit its module."""
        for name, (down, up, _) in weights.modules.items():
            expected = tuple(model.get_submodule(name).weight.shape)
            if (up.shape[0], down.shape[1]) != expected:
                raise ValueError(
                    f"the LoRA's {name} is for a weight of {up.shape[0]}x{down.shape[1]}, the "
                    f"model's is {expected[0]}x{expected[1]}: choose a LoRA made for this model"
                )
        ranks = {name: down.shape[0] for name, (down, _, _) in weights.modules.items()}
        alphas = {name: alpha for name, (_, _, alpha) in weights.modules.items()}
        config = LoraConfig(
            r=next(iter(ranks.values())),
            lora_alpha=next(iter(alphas.values())),
            target_modules="|".join(map(re.escape, ranks)),
            init_lora_weights=False,
            rank_pattern={f"^{re.escape(name)}": rank for name, rank in ranks.items()},
            alpha_pattern={f"^{re.escape(name)}": alpha for name, alpha in alphas.items()},
        )
        inject_adapter_in_model(config, model)
        self.alphas = alphas
        self.layers = {name: model.get_submodule(name) for name in sorted(ranks)}
        for name, layer in self.layers.items():
            down, up, _ = weights.modules[name]
            device = layer.base_layer.weight.device
            for linear, value in ((layer.lora_A["default"], down), (layer.lora_B["default"], up)):
                linear.weight = torch.nn.Parameter(value.to(device, torch.float32, copy=True))

    @property
    def parts(self) -> dict[str, list[torch.nn.Parameter]]:
        """Trainable parameters in name order, the A and the B matrices apart."""
        return {
            "A": [layer.lora_A["default"].weight for layer in self.layers.values()],
            "B": [layer.lora_B["default"].weight for layer in self.layers.values()],
        }

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for part in self.parts.values() for parameter in part]

    def weights(self) -> Weights:
        """A detached copy of the current values."""
        return Weights(
            {
                name: (
                    layer.lora_A["default"].weight.detach().cpu().clone(),
                    layer.lora_B["default"].weight.detach().cpu().clone(),
                    self.alphas[name],
                )
                for name, layer in self.layers.items()
            }
        )
