"""Adapters through PEFT: LoRA, DoRA, LoHa and LoKr - targets, initial values, injection, files.

Modules are named as in the diffusion model ("double_blocks.0.img_attn.qkv"); in files every key
carries the prefix that ComfyUI's loaders expect: diffusion_model.<module>.lora_A.weight,
.lora_B.weight, .alpha.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lokr.layer import factorization
from safetensors.torch import save
from torch.nn import Linear

from . import draws, measure

PREFIX = "diffusion_model."
PROBE_NORM = 0.01
KINDS = ("LoRA", "DoRA", "LoHa", "LoKr")
# Kinds that form Delta W in the forward and hold it for the backward.
DENSE = ("LoHa", "LoKr")

# Part of the adapter that a tensor belongs to, by its name in files, in the order of parameters.
PARTS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "dora_scale": "magnitude",
    "hada_w1_a": "w1",
    "hada_w1_b": "w1",
    "hada_w2_a": "w2",
    "hada_w2_b": "w2",
    "lokr_w1": "w1",
    "lokr_w1_a": "w1",
    "lokr_w1_b": "w1",
    "lokr_w2": "w2",
    "lokr_w2_a": "w2",
    "lokr_w2_b": "w2",
}
# What is 0 at the start of training, so that Delta W is.
ZERO = ("lora_B.weight", "hada_w2_b", "lokr_w1")


@dataclass(frozen=True)
class Factors:
    """What an adapter holds for one Linear of weight W [out, in]: tensors under their names in
    files.

    LoRA  lora_A.weight [rank, in], lora_B.weight [out, rank]: Delta W = alpha/rank B A
    DoRA  and dora_scale [out, 1]: the weight is dora_scale (W + Delta W)/||W||, row by row
    LoHa  hada_w1_a and hada_w2_a [out, rank], hada_w1_b and hada_w2_b [rank, in]:
          Delta W = alpha/rank (w1_a w1_b) * (w2_a w2_b), element by element
    LoKr  lokr_w1 and lokr_w2, each whole or as a product _a [., rank] _b [rank, .]:
          Delta W = scale kron(w1, w2), scale = alpha/rank where a factor is a product, else 1

    These are ComfyUI's formulas. Its DoRA divides by the rows of W, PEFT's and the paper's by those
    of W + Delta W; `Adapter` converts. mask [out, rank] says which entries of lora_B are trained,
    where the adapter is for slices of a fused weight; None: all.
    """

    tensors: dict[str, torch.Tensor]
    alpha: float
    mask: torch.Tensor | None = None

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if "dora_scale" in self.tensors:
            return "DoRA"
        prefix = next(iter(self.tensors)).partition("_")[0]
        return {"lora": "LoRA", "hada": "LoHa", "lokr": "LoKr"}[prefix]

    @property
    def rank(self) -> int | None:
        """Inner dimension of the products; None for a LoKr of two whole factors."""
        for name in ("lora_A.weight", "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
            if name in self.tensors:
                return self.tensors[name].shape[0]
        return None

    @property
    def scale(self) -> float:
        """What the products are multiplied with."""
        return 1.0 if self.rank is None else self.alpha / self.rank

    def delta(self) -> torch.Tensor:
        """Delta W [out, in]."""
        tensors = self.tensors
        if "lora_A.weight" in tensors:
            product = tensors["lora_B.weight"] @ tensors["lora_A.weight"]
        elif "hada_w1_a" in tensors:
            product = self._product("hada_w1") * self._product("hada_w2")
        else:
            product = torch.kron(self._product("lokr_w1"), self._product("lokr_w2"))
        return self.scale * product

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in) of the weights this fits."""
        on_meta = {name: tensor.to("meta") for name, tensor in self.tensors.items()}
        return tuple(Factors(on_meta, self.alpha).delta().shape)

    def _product(self, name: str) -> torch.Tensor:
        if name in self.tensors:
            return self.tensors[name]
        return self.tensors[f"{name}_a"] @ self.tensors[f"{name}_b"]


def lora(down: torch.Tensor, up: torch.Tensor, alpha: float) -> Factors:
    """LoRA of A = down [rank, in] and B = up [out, rank]."""
    return Factors({"lora_A.weight": down, "lora_B.weight": up}, alpha)


@dataclass(frozen=True)
class Weights:
    """An adapter as plain tensors: module -> its factors. Kinds may differ between modules."""

    modules: dict[str, Factors]

    @property
    def kind(self) -> str:
        """Kinds of the modules, such as "LoRA" or "LoKr, LoRA"."""
        return ", ".join(sorted({factors.kind for factors in self.modules.values()}))

    @property
    def rank(self) -> int | None:
        """The largest rank of a module."""
        ranks = [factors.rank for factors in self.modules.values()]
        return max((rank for rank in ranks if rank is not None), default=None)

    @property
    def parts(self) -> list[str]:
        """Names of the parts that `Adapter.parts` has for these weights."""
        return _parts(name for factors in self.modules.values() for name in factors.tensors)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of names and values."""
        digest = hashlib.blake2b(digest_size=8)
        for name, factors in sorted(self.modules.items()):
            tensors = [factors.tensors[key] for key in PARTS if key in factors.tensors]
            shapes = " ".join(str(tuple(tensor.shape)) for tensor in tensors)
            digest.update(f"{name} {shapes} {factors.alpha}".encode())
            for tensor in tensors:
                digest.update(tensor.float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """State dict in the names that ComfyUI's loaders apply."""
        return {
            f"{PREFIX}{name}.{key}": tensor
            for name, factors in sorted(self.modules.items())
            for key, tensor in (
                *factors.tensors.items(),
                ("alpha", torch.tensor(float(factors.alpha))),
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


def lora_size(linears: Mapping[str, torch.nn.Module], targets: Sequence[str], rank: int) -> int:
    """Parameters of a LoRA of this rank on these Linears."""
    return rank * sum(sum(_shape(linears[name])) for name in targets)


def probe_weights(
    linears: Mapping[str, torch.nn.Module], targets: Sequence[str], rank: int, seed: int
) -> Weights:
    """Fresh LoRA for a probe: A as PEFT initialises it, B normal with ||Delta W||_F = .01
    ||W||_F, alpha = rank.

    With B = 0 the gradient of A would vanish, and half of the adapter would not be measured.
    """
    modules = {}
    for name in targets:
        out_features, in_features = _shape(linears[name])
        down = _kaiming(draws.stream("lora_A", seed, name), (rank, in_features))
        up = draws.standard_normal(draws.stream("lora_B", seed, name), (out_features, rank))
        up *= (
            PROBE_NORM
            * torch.linalg.norm(linears[name].weight.detach().float()).cpu()
            / torch.linalg.norm(up @ down)
        )
        modules[name] = lora(down, up, float(rank))
    return Weights(modules)


def zero_weights(
    linears: Mapping[str, torch.nn.Module],
    targets: Sequence[str],
    rank: int,
    alpha: float,
    seed: int,
    kind: str = "LoRA",
) -> Weights:
    """Ordinary start of training, as PEFT initialises each kind: Delta W = 0, so that the model
    starts as the base."""
    modules = {}
    for name in targets:
        tensors = {
            key: torch.zeros(shape)
            if key in ZERO
            else _kaiming(draws.stream(key.removesuffix(".weight"), seed, name), shape)
            for key, shape in _shapes(kind, rank, *_shape(linears[name])).items()
        }
        if kind == "DoRA":
            tensors["dora_scale"] = _row_norms(linears[name].weight)[:, None].cpu()
        modules[name] = Factors(tensors, float(alpha))
    return Weights(modules)


def _shapes(kind: str, rank: int, out: int, inner: int) -> dict[str, tuple[int, int]]:
    """Shapes of a fresh adapter's factors, by name, for a weight [out, inner]."""
    if kind == "LoHa":
        rows, columns = (out, rank), (rank, inner)
        return {
            "hada_w1_a": rows,
            "hada_w1_b": columns,
            "hada_w2_a": rows,
            "hada_w2_b": columns,
        }
    if kind == "LoKr":
        (out_1, out_2), (in_1, in_2) = factorization(out), factorization(inner)
        small = {"lokr_w1": (out_1, in_1)}
        # PEFT's rule: a product only where it has fewer numbers than the whole factor.
        if rank >= max(out_2, in_2) / 2:
            return small | {"lokr_w2": (out_2, in_2)}
        return small | {"lokr_w2_a": (out_2, rank), "lokr_w2_b": (rank, in_2)}
    return {"lora_A.weight": (rank, inner), "lora_B.weight": (out, rank)}


def _kaiming(generator, shape: tuple[int, int]) -> torch.Tensor:
    """Uniform in +-1/sqrt(columns): kaiming_uniform with a = sqrt(5), PEFT's default."""
    bound = 1 / math.sqrt(shape[1])
    return torch.from_numpy(generator.uniform(-bound, bound, shape).astype("float32"))


def _shape(linear: torch.nn.Module) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _row_norms(weight: torch.Tensor) -> torch.Tensor:
    """||row|| of a weight [out, in], in float32."""
    return torch.linalg.norm(weight.detach().float(), dim=1)


def _parts(names: Iterable[str]) -> list[str]:
    held = {PARTS[name] for name in names}
    return [part for part in dict.fromkeys(PARTS.values()) if part in held]


class Adapter:
    """An adapter injected into a model by PEFT, trainable in float32. The model must be the
    caller's own copy."""

    def __init__(
        self, model: torch.nn.Module, weights: Weights, device: torch.device | None = None
    ) -> None:
        """Inject, with the parameters on a device; None: where each base weight lies.

        A base is any module with in_features, out_features and a weight, quantised or not; it is
        never written to. Raises ValueError when a shape does not fit its module, and for a DoRA
        whose base weight lies elsewhere or is stored in a plain 8-bit type.
        """
        self.start = weights.modules
        bases = {name: model.get_submodule(name) for name in sorted(self.start)}
        for name, base in bases.items():
            _check(name, base, self.start[name], device)
            # PEFT is shown a plain Linear without storage, so that the base's class, precision and
            # place do not matter to it.
            stand_in = Linear(base.in_features, base.out_features, device="meta")
            model.set_submodule(name, stand_in)
        for kind in KINDS:
            names = [name for name in bases if self.start[name].kind == kind]
            if names:
                inject_adapter_in_model(_config(kind, names), model, low_cpu_mem_usage=True)
        self.layers = {name: model.get_submodule(name) for name in bases}
        self.tensors = {}
        for name, layer in self.layers.items():
            layer.base_layer = bases[name]
            layer.scaling["default"] = self.start[name].scale
            # Layers that drop out, if at rate 0, draw from torch's global generator in training.
            layer.eval()
            where = bases[name].weight.device if device is None else device
            self.tensors[name] = _fill(layer, self.start[name], where)

    @property
    def parts(self) -> dict[str, list[torch.nn.Parameter]]:
        """Trainable parameters in name order, by the part they belong to: "A" and "B" of a LoRA,
        with "magnitude" of a DoRA; "w1" and "w2" of a LoHa or LoKr."""
        return {
            part: [
                tensors[key]
                for tensors in self.tensors.values()
                for key in PARTS
                if PARTS[key] == part and key in tensors
            ]
            for part in _parts(key for tensors in self.tensors.values() for key in tensors)
        }

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for part in self.parts.values() for parameter in part]

    @property
    def size(self) -> int:
        """Trainable numbers, the length of a flattened gradient."""
        return sum(parameter.numel() for parameter in self.parameters)

    def weights(self) -> Weights:
        """A detached copy of the current values."""
        modules = {}
        for name, tensors in self.tensors.items():
            values = {key: tensor.detach() for key, tensor in tensors.items()}
            before = self.start[name]
            if before.kind == "DoRA":
                factor = _magnitude_factor(self.layers[name].base_layer.weight, values, before)
                values["dora_scale"] = (values["dora_scale"] / factor)[:, None]
            copies = {key: value.cpu().clone() for key, value in values.items()}
            modules[name] = Factors(copies, before.alpha, before.mask)
        return Weights(modules)


def _check(name: str, base: torch.nn.Module, factors: Factors, device: torch.device | None) -> None:
    expected = _shape(base)
    if factors.shape != expected:
        raise ValueError(
            f"the LoRA's {name} is for a weight of {'x'.join(map(str, factors.shape))}, the "
            f"model's is {expected[0]}x{expected[1]}: choose a LoRA made for this model"
        )
    if factors.kind != "DoRA":
        return
    # PEFT computes with the base's own weight and bias, which it leaves alone for other kinds.
    if device is not None and base.weight.device.type != device.type:
        raise ValueError(
            f"DoRA needs the weight of {name} on {device}, and it lies on {base.weight.device}, "
            "since the whole model does not fit: use LoRA, LoHa or LoKr"
        )
    if base.weight.dtype.itemsize == 1:
        raise ValueError(
            f"DoRA cannot compute with {name}, which is stored in {base.weight.dtype}: load the "
            "model in another precision, or use LoRA, LoHa or LoKr"
        )


def _config(kind: str, names: Sequence[str]) -> PeftConfig:
    """PEFT's configuration for exactly these modules. Rank and scale are set with the values."""
    targets = "|".join(map(re.escape, names))
    if kind == "LoHa":
        return LoHaConfig(target_modules=targets)
    if kind == "LoKr":
        return LoKrConfig(target_modules=targets)
    return LoraConfig(target_modules=targets, use_dora=kind == "DoRA")


def _fill(
    layer: torch.nn.Module, factors: Factors, device: torch.device
) -> dict[str, torch.nn.Parameter]:
    """Put the values into a PEFT layer; the parameters by name in files."""
    values = {
        key: value.detach().to(device, torch.float32, copy=True)
        for key, value in factors.tensors.items()
    }
    if factors.kind == "DoRA":
        factor = _magnitude_factor(layer.base_layer.weight, values, factors)
        values["dora_scale"] = values["dora_scale"][:, 0] * factor
    for attribute in layer.adapter_layer_names:
        holder = getattr(layer, attribute)
        # Which factors are whole is told by which are there.
        if isinstance(holder, torch.nn.ParameterDict):
            holder.clear()
    parameters = {key: torch.nn.Parameter(value) for key, value in values.items()}
    for key, parameter in parameters.items():
        attribute = "lora_magnitude_vector" if key == "dora_scale" else key.removesuffix(".weight")
        holder = getattr(layer, attribute)
        if isinstance(holder, torch.nn.ParameterDict):
            holder["default"] = parameter
        else:
            holder["default"].weight = parameter
    if factors.mask is not None:
        mask = factors.mask.to(device, torch.float32)
        parameters["lora_B.weight"].register_hook(lambda gradient: gradient * mask)
    return parameters


def _magnitude_factor(
    weight: torch.Tensor, values: Mapping[str, torch.Tensor], factors: Factors
) -> torch.Tensor:
    """||W + Delta W||/||W|| of each row [out]: PEFT's DoRA magnitude over ComfyUI's dora_scale."""
    down, up = values["lora_A.weight"], values["lora_B.weight"]
    return _row_norms(weight.detach().float() + factors.scale * (up @ down)) / _row_norms(weight)
