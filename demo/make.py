#!/usr/bin/env python3
"""Make the nano models of the embedded demo from photographs, and evaluate them.

`python demo/make.py --comfyui DIR` downloads the Debian packages named in PACKAGES, takes their
photographs, trains a nano VAE and a nano DiT and writes both into demo/models. Every stage is
kept in the work folder, so that a run that was stopped goes on where it was.
`python demo/make.py --comfyui DIR --evaluate` prints the tables of demo/README.md from the files
that are shipped, loaded through ComfyUI's ordinary loaders. `--pictures` cuts the demo pictures.

The models are made of ComfyUI's own classes, so the weights fit by construction:

* VAE: comfy.taesd with 16 channels. Its encoder is not learned: it holds the 16 leading principal
  components of 8x8 patches exactly (see pca_encoder). Latents are therefore linear in the pixels,
  known before any training, and standardised per channel. The decoder is learned.
* DiT: comfy.ldm.flux without the guidance key, which ComfyUI detects as Flux schnell: flow
  matching, v = eps - x. Conditioning is one zero token and a zero pooled vector.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
DIT_FILE = HERE / "models" / "diffusion_models" / "demotion_nano_flux.safetensors"
VAE_FILE = HERE / "models" / "vae" / "demotion_nano_vae.safetensors"
PICTURES = HERE / "pictures" / "demotion_demo"

# --- photographs ---------------------------------------------------------------------------------

PACKAGES = (
    "gcompris-qt-data",
    "gnome-backgrounds",
    "lomiri-wallpapers-16.04",
    "lomiri-wallpapers-20.04",
    "mate-backgrounds",
    "plasma-workspace-wallpapers",
    "ukui-wallpapers",
)
# gcompris packs its pictures into Qt resource files; these hold photographs and paintings.
RESOURCES = (
    "details",
    "erase",
    "explore_farm_animals",
    "explore_monuments",
    "explore_world_animals",
    "explore_world_music",
)
# Flat or transparent artwork, which says nothing about natural pictures, and the two photographs
# that are demo pictures and therefore must not be seen in training.
LEFT_OUT = (
    "mate/desktop/",
    "mate/abstract/Arc-Colors",
    "mate/abstract/Flow",
    "mate/abstract/Gulp",
    "mate/abstract/Silk",
    "mate/abstract/Waves",
    "gnome/symbolic",
    "firstgeneration",
    "seeding_by_Clements_Engelhardt",
    "explore_world_animals/resource/animals/moose",
)
SHORT_SIDE = 1024  # photographs are kept no larger: crops span 256 to 1000 pixels
HOLD_OUT = 9  # one picture in so many is held out


def download(packages: Path) -> None:
    """Fetch the packages that are missing with apt-get, which verifies them."""
    packages.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        if not list(packages.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", name], cwd=packages, check=True)


def unpack(packages: Path, target: Path) -> None:
    """Extract each package once."""
    for name in PACKAGES:
        if not (target / name).exists():
            deb = sorted(packages.glob(f"{name}_*.deb"))[-1]
            subprocess.run(["dpkg-deb", "-x", deb, target / name], check=True)


def resource_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of a Qt binary resource file, the format rcc writes."""
    blob = path.read_bytes()
    magic, version, tree, data, names = struct.unpack(">4s4I", blob[:20])
    if magic != b"qres":
        raise ValueError(f"{path.name} is not a Qt resource file")
    size = 22 if version >= 2 else 14  # later versions append a time stamp to each node

    def walk(node: int, folder: str) -> Iterator[tuple[str, bytes]]:
        at = tree + node * size
        name_at, flags = struct.unpack(">IH", blob[at : at + 6])
        name_at += names
        length = struct.unpack(">H", blob[name_at : name_at + 2])[0]
        name = blob[name_at + 6 : name_at + 6 + 2 * length].decode("utf-16-be") if node else ""
        if flags & 2:  # a folder
            count, first = struct.unpack(">II", blob[at + 6 : at + 14])
            for child in range(first, first + count):
                yield from walk(child, f"{folder}{name}/" if node else "")
            return
        start = data + struct.unpack(">I", blob[at + 10 : at + 14])[0]
        end = start + 4 + struct.unpack(">I", blob[start : start + 4])[0]
        content = blob[start + 4 : end]
        # A compressed entry starts with its unpacked length.
        yield folder + name, zlib.decompress(content[4:]) if flags & 1 else content

    yield from walk(0, "")


def sources(unpacked: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, encoded picture) of every candidate.

    Wallpapers below 150 kB are gradients, thumbnails or small copies; links are second names.
    """
    for package in PACKAGES:
        for path in sorted((unpacked / package / "usr" / "share").rglob("*")):
            name = path.relative_to(unpacked).as_posix()
            if path.suffix == ".rcc" and path.stem in RESOURCES:
                for inner, content in resource_files(path):
                    if inner.endswith(".webp"):
                        yield f"{package}/{inner.partition('activities/')[2]}", content
            elif (
                path.suffix in {".jpg", ".png", ".webp"}
                and "/share/doc/" not in name
                and not path.is_symlink()
                and path.stat().st_size > 150_000
            ):
                yield name, path.read_bytes()


def same_picture(name: str) -> str:
    """Name without what tells sizes and dark variants of one picture apart."""
    if "/contents/images" in name:  # Plasma: one folder per picture, one file per size
        return name.partition("/contents/images")[0]
    stem = name.rpartition(".")[0]
    head, _, tail = stem.rpartition("_")
    if tail.replace("x", "").isdigit():
        stem = head
    return stem.removesuffix("-l").removesuffix("-d")


def photographs(unpacked: Path, kept: Path) -> None:
    """Keep one copy of each distinct picture, at most SHORT_SIDE on its short side."""
    if (kept / "done").exists():
        return
    kept.mkdir(parents=True, exist_ok=True)
    best: dict[str, tuple[int, bytes]] = {}
    for name, content in sources(unpacked):
        if any(part in name for part in LEFT_OUT):
            continue
        picture = Image.open(io.BytesIO(content))
        # gcompris: pictures with transparency are puzzle pieces, small ones are icons.
        if min(picture.size) < 256 or picture.mode not in {"RGB", "L", "P"} and "gcompris" in name:
            continue
        key, area = same_picture(name), picture.width * picture.height
        if area > best.get(key, (0, b""))[0]:
            best[key] = (area, content)
    thumbnails: list[np.ndarray] = []
    for key, (_, content) in sorted(best.items()):
        picture = Image.open(io.BytesIO(content)).convert("RGB")
        small = np.asarray(picture.convert("L").resize((16, 16)), np.float64)
        small = (small - small.mean()) / (small.std() + 1e-6)
        if any((small * other).mean() > 0.97 for other in thumbnails):
            continue  # the same photograph under a second name
        thumbnails.append(small)
        ratio = SHORT_SIDE / min(picture.size)
        if ratio < 1:
            size = (round(picture.width * ratio), round(picture.height * ratio))
            picture = picture.resize(size, Image.Resampling.LANCZOS)
        picture.save(kept / (key.replace("/", "~") + ".png"), compress_level=1)
    (kept / "done").touch()


def split(kept: Path) -> tuple[list[Path], list[Path]]:
    """Training and held-out pictures, by a hash of the name: no order, no seed, no choice."""
    training, held_out = [], []
    for path in sorted(kept.glob("*.png")):
        number = int(hashlib.sha256(path.stem.encode()).hexdigest(), 16)
        (training if number % HOLD_OUT else held_out).append(path)
    return training, held_out


# --- crops ---------------------------------------------------------------------------------------

TIER = 256  # pixels: the side of the square that the crops of this tier have in area
LONGEST = 1000  # pixels of the photograph that such a crop may span
# Token grids (height, width) of training and their share; a token is 16 pixels wide. Base models
# are trained over mixed sizes and aspects: so is this one.
GRIDS = {
    (16, 16): 0.28,
    (15, 15): 0.08,
    (14, 14): 0.09,
    (12, 12): 0.09,
    (10, 10): 0.07,
    (8, 8): 0.07,
    (18, 14): 0.08,
    (14, 18): 0.08,
    (20, 12): 0.05,
    (12, 20): 0.05,
    (15, 11): 0.03,
    (11, 15): 0.03,
}


def crop(
    picture: Image.Image, height: int, width: int, tier: int, rng: np.random.Generator
) -> np.ndarray:
    """A random crop of the picture, scaled down to height x width pixels.

    The region depends on the aspect and the tier alone, never on the pixels asked for: a small
    grid sees the same content as a large one, as a demoted training picture does.
    """
    aspect = width / height
    furthest = LONGEST * tier / TIER / math.sqrt(aspect)
    largest = min(picture.height, picture.width / aspect, furthest)
    smallest = min(largest, tier / math.sqrt(aspect))
    rows = math.exp(rng.uniform(math.log(smallest), math.log(largest)))
    columns = rows * aspect
    left = rng.uniform(0, picture.width - columns)
    top = rng.uniform(0, picture.height - rows)
    box = (left, top, left + columns, top + rows)
    small = picture.resize((width, height), Image.Resampling.LANCZOS, box, reducing_gap=3.0)
    pixels = np.asarray(small)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def crops(
    paths: list[Path], grids: list[tuple[int, int]], tier: int, seed: int
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """One crop per entry of grids (in pixels), cycling through the pictures.

    Works through one picture after the other, because opening one costs more than cropping it.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(grids))
    for start, path in enumerate(paths):
        picture = Image.open(path).convert("RGB")
        for index in order[start :: len(paths)]:
            yield grids[index], crop(picture, *grids[index], tier, rng)


# --- VAE -----------------------------------------------------------------------------------------

CHANNELS = 16
PATCH = 8
CELL = 4
SHIFT, SCALE = 0.1159, 0.3611  # comfy.latent_formats.Flux
# The decoder starts with 3 tanh(x / 3). Unit-variance latents have tails well beyond 3; divided by
# this they stay in its nearly linear part. vae_scale undoes it, so nothing outside sees it.
HEADROOM = 4.0
# Channels of the decoder that are trained at 1/8, 1/4, 1/2 and full size, and the blocks of three
# there that are. The others stay zero, which is the identity: on two cores the full width would
# see a tenth of the steps.
WIDTHS = (64, 64, 32, 16)
BLOCKS = (3, 3, 1, 1)
VAE_CROP = 128
VAE_CROPS = 4000
VAE_BATCH = 6


def patches(pixels: Tensor) -> Tensor:
    """[B, 3, H, W] -> [B, 192, H/8, W/8], channel major: (colour, row, column)."""
    return nn.functional.pixel_unshuffle(pixels, PATCH)


def principal_components(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """(components [192, 192] by rows, mean [192]) of the patches of uint8 pixels [N, 3, H, W].

    Rows are scaled to unit variance of their coefficient. Their signs are fixed, so that a second
    run gives the same latents.
    """
    total = torch.zeros(3 * PATCH**2, dtype=torch.float64)
    second = torch.zeros(3 * PATCH**2, 3 * PATCH**2, dtype=torch.float64)
    count = 0
    for chunk in pixels.split(64):
        rows = patches(chunk.double() / 255).movedim(1, -1).flatten(0, -2)
        total += rows.sum(0)
        second += rows.T @ rows
        count += len(rows)
    mean = total / count
    values, vectors = torch.linalg.eigh(second / count - torch.outer(mean, mean))
    vectors = vectors * torch.where(vectors.sum(0) < 0, -1.0, 1.0)
    return (vectors / values.sqrt()).T.flip(0).float(), mean.float()


def pca_reconstruction(pixels: Tensor, components: Tensor, mean: Tensor) -> Tensor:
    """What the 16 leading components keep of the pixels: the yardstick for the VAE."""
    unit = nn.functional.normalize(components[:CHANNELS])
    rows = patches(pixels).movedim(1, -1) - mean
    return nn.functional.pixel_shuffle((rows @ unit.T @ unit + mean).movedim(-1, 1), PATCH)


class EncoderTail(nn.Module):
    """The trained part of the encoder, on pixels sorted by place in 4x4 cells, not negative.

    comfy.taesd's Encoder from its last strided convolution on. It starts as the 16 leading
    principal components of 8x8 patches: rectified pairs of signed parts pass the blocks, whose
    residual branches start at zero, and the last convolution takes the difference of each pair.
    Its input has the 48 channels that sorting fills; the other 16 of 64 stay empty.
    """

    def __init__(self, components: Tensor) -> None:
        super().__init__()
        from comfy.taesd.taesd import Block, conv

        down = conv(3 * CELL**2, 64, stride=2, bias=False)
        self.layers = nn.Sequential(down, *(Block(64, 64) for _ in range(3)), conv(64, CHANNELS))
        initialise(self.layers)
        # What standardises the output; folded into the last convolution when it is written.
        self.register_buffer("mean", torch.zeros(CHANNELS))
        self.register_buffer("scale", torch.ones(CHANNELS))
        with torch.no_grad():
            for block in list(self.layers)[1:4]:
                block.conv[-1].weight.zero_()
            down.weight.zero_()
            # [32, 3 * 64] -> [32, (colour, row and column in the cell), row, column of the cell]
            kernel = components.view(-1, 3, 2, CELL, 2, CELL).permute(0, 1, 3, 5, 2, 4)
            kernel = kernel.reshape(len(components), 3 * CELL**2, 2, 2)
            # The strided convolution sees cells 2i - 1 .. 2i + 1; the patch is the last two.
            down.weight[0::2, :, 1:, 1:] = kernel
            down.weight[1::2, :, 1:, 1:] = -kernel
            self.layers[-1].weight.zero_()
            for channel in range(CHANNELS):
                self.layers[-1].weight[channel, 2 * channel, 1, 1] = 1
                self.layers[-1].weight[channel, 2 * channel + 1, 1, 1] = -1

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels in 0..1 -> standardised latents."""
        raw = self.layers(nn.functional.pixel_unshuffle(pixels, CELL))
        return (raw - self.mean[:, None, None]) / self.scale[:, None, None]

    @torch.no_grad()
    def standardise(self, raw: Tensor, weight: float) -> None:
        """Move the running statistics towards those of a batch of latents, standardised or not."""
        values = (raw * self.scale[:, None, None] + self.mean[:, None, None]).movedim(1, 0)
        values = values.flatten(1)
        variance = self.scale**2 + self.mean**2  # the second moment, which averages linearly
        variance.lerp_(values.pow(2).mean(1), weight)
        self.mean.lerp_(values.mean(1), weight)
        self.scale.copy_((variance - self.mean**2).clamp(min=1e-6).sqrt())


def whole_encoder(tail: EncoderTail) -> dict[str, Tensor]:
    """Weights of comfy.taesd's Encoder that compute what the tail computes.

    Pixels are not negative, so ReLUs pass them unchanged and, with empty residual branches, the
    first two strided convolutions only sort them: 3 channels, then 12, then 48.
    """
    import comfy.taesd.taesd

    encoder = comfy.taesd.taesd.Encoder(CHANNELS)
    state = {name: torch.zeros_like(value) for name, value in encoder.state_dict().items()}
    for colour in range(3):
        state["0.weight"][colour, colour, 1, 1] = 1
        # A strided convolution sees rows 2i - 1 .. 2i + 1; its taps 1 and 2 are those of cell i.
        for row in range(CELL):
            for column in range(CELL):
                half = colour * 4 + row % 2 * 2 + column % 2
                state["2.weight"][half, colour, 1 + row % 2, 1 + column % 2] = 1
                quarter = colour * CELL**2 + row * CELL + column
                state["6.weight"][quarter, half, 1 + row // 2, 1 + column // 2] = 1
    for name, value in tail.layers.state_dict().items():
        place, _, rest = name.partition(".")
        target = state[f"{int(place) + 10}.{rest}"]
        target[tuple(slice(size) for size in value.shape)] = value
    state["14.weight"] /= tail.scale[:, None, None, None] * HEADROOM
    state["14.bias"] = (state["14.bias"] - tail.mean) / (tail.scale * HEADROOM)
    return state


def initialise(modules: nn.Sequential) -> None:
    """He initialisation; ComfyUI's layers leave their memory as it was."""
    for module in modules.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def narrow_decoder() -> nn.Sequential:
    """comfy.taesd's Decoder, narrower, with the same places in the sequence."""
    from comfy.taesd.taesd import Block, Clamp, conv

    def blocks(stage: int, places: int) -> list[nn.Module]:
        real = [Block(WIDTHS[stage], WIDTHS[stage]) for _ in range(BLOCKS[stage])]
        return real + [nn.Identity() for _ in range(places - len(real))]

    def up(stage: int) -> list[nn.Module]:
        grow = conv(WIDTHS[stage - 1], WIDTHS[stage], bias=False)
        return [nn.Upsample(scale_factor=2), grow]

    modules = [Clamp(), conv(CHANNELS, WIDTHS[0]), nn.ReLU(), *blocks(0, 3)]
    modules += up(1) + blocks(1, 3) + up(2) + blocks(2, 3) + up(3) + blocks(3, 1)
    decoder = nn.Sequential(*modules, conv(WIDTHS[3], 3))
    start_decoder(decoder)
    return decoder


def start_decoder(decoder: nn.Sequential) -> None:
    """Start from smooth interpolation: latents pass as pairs of parts, residuals start small."""
    initialise(decoder)
    tent = torch.tensor([0.25, 0.5, 0.25])
    for previous, module in zip(decoder, list(decoder)[1:], strict=False):
        if isinstance(previous, nn.Upsample):
            mix = torch.empty(module.weight.shape[:2])
            nn.init.orthogonal_(mix)
            module.weight.data = mix[:, :, None, None] * torch.outer(tent, tent)
        elif hasattr(module, "conv"):
            module.conv[-1].weight.data *= 0.1
    with torch.no_grad():
        decoder[1].weight[: 2 * CHANNELS] = 0
        for channel in range(CHANNELS):
            decoder[1].weight[channel, channel, 1, 1] = HEADROOM
            decoder[1].weight[CHANNELS + channel, channel, 1, 1] = -HEADROOM
        decoder[-1].weight *= 0.1
        decoder[-1].bias += 0.5


def widen(narrow: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the trained channels into comfy.taesd's Decoder; what was not trained is zero."""
    import comfy.taesd.taesd

    wide = comfy.taesd.taesd.Decoder(CHANNELS).state_dict()
    for name, value in wide.items():
        value.zero_()
        if name in narrow:
            value[tuple(slice(size) for size in narrow[name].shape)] = narrow[name]
    return wide


class Average:
    """Exponential moving average of a module's weights, warmed up over its first steps."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.shadow = {name: value.clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move towards the module's present weights."""
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 10))
        for name, value in module.state_dict().items():
            self.shadow[name].lerp_(value, 1 - decay)


def schedule(done: float) -> float:
    """Learning rate factor at a fraction of the time: constant, then linear to 2 %."""
    return min(1.0, 0.02 + 0.98 * (1 - done) / 0.4)


class Clock:
    """Training time over all runs of one stage, so that a resumed stage keeps its schedule."""

    def __init__(self, minutes: float, spent: float) -> None:
        self.minutes, self.spent, self.start = minutes, spent, time.monotonic()

    def seconds(self) -> float:
        """Seconds spent so far."""
        return self.spent + time.monotonic() - self.start

    def done(self) -> float:
        """Fraction of the time that is used up."""
        return self.seconds() / (60 * self.minutes)


def save_state(path: Path, **state: object) -> None:
    """Write a checkpoint so that a stop in between leaves the previous one."""
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def vae_pixels(training: list[Path], work: Path) -> Tensor:
    """uint8 [N, 3, 128, 128] at the scale of the tier, made once."""
    path = work / "vae_crops.safetensors"
    if not path.exists():
        grids = [(VAE_CROP, VAE_CROP)] * VAE_CROPS
        found = [pixels for _, pixels in crops(training, grids, VAE_CROP, seed=1)]
        rng = np.random.default_rng(2)
        stacked = torch.from_numpy(np.stack(found))[torch.from_numpy(rng.permutation(len(found)))]
        save_file({"pixels": stacked.movedim(-1, 1).contiguous()}, path)
    return load_file(path)["pixels"]


def train_vae(pixels: Tensor, work: Path, minutes: float) -> None:
    """Train tail and narrow decoder together on squared error; averages go to work/vae.pt."""
    path = work / "vae.pt"
    torch.manual_seed(3)
    components, _ = principal_components(pixels)
    model = nn.ModuleDict({"tail": EncoderTail(components[:32]), "decoder": narrow_decoder()})
    tail, decoder = model["tail"], model["decoder"]
    with torch.no_grad():
        tail.standardise(tail(pixels[:256].float() / 255), 1.0)
    model = model.to(memory_format=torch.channels_last)
    average = Average(model, 0.995)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    step, clock = 0, Clock(minutes, 0.0)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        average.shadow, average.steps = saved["average"], saved["step"]
        step, clock = saved["step"], Clock(minutes, saved["seconds"])
    running = None
    while clock.done() < 1:
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * schedule(clock.done()) * min(1.0, (step + 1) / 50)
        picked = torch.randint(len(pixels), (VAE_BATCH,))
        target = pixels[picked].float() / 255
        # Patches may start anywhere: shift by up to seven pixels and drop the rest.
        top, left = (int(n) for n in torch.randint(PATCH, (2,)))
        side = VAE_CROP - PATCH
        target = target[:, :, top : top + side, left : left + side]
        latents = tail(target.contiguous(memory_format=torch.channels_last))
        # Noise keeps the latents from hiding what matters in small amplitudes.
        guess = decoder((latents + 0.05 * torch.randn_like(latents)) / HEADROOM)
        loss = nn.functional.mse_loss(guess, target)
        optimiser.zero_grad()
        loss.backward()
        tail.standardise(latents, 0.01)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        average.update(model)
        step += 1
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        if step % 100 == 0:
            psnr = -10 * math.log10(running)
            print(f"VAE step {step}, {clock.seconds():.0f} s, {psnr:.2f} dB", flush=True)
        if step % 200 == 0 or clock.done() >= 1:
            save_state(
                path,
                model=model.state_dict(),
                optimiser=optimiser.state_dict(),
                average=average.shadow,
                step=step,
                seconds=clock.seconds(),
            )


def write_vae(pixels: Tensor, work: Path) -> None:
    """Standardise the averaged encoder exactly and write the single-file VAE in half precision."""
    components, _ = principal_components(pixels)
    model = nn.ModuleDict({"tail": EncoderTail(components[:32]), "decoder": narrow_decoder()})
    model.load_state_dict(torch.load(work / "vae.pt", weights_only=True)["average"])
    with torch.no_grad():
        latents = torch.cat([model["tail"](chunk.float() / 255) for chunk in pixels.split(64)])
        model["tail"].standardise(latents, 1.0)
    encoder, decoder = whole_encoder(model["tail"]), widen(model["decoder"].state_dict())
    state = {f"taesd_encoder.{k}": v.half() for k, v in encoder.items()}
    state |= {f"taesd_decoder.{k}": v.half() for k, v in decoder.items()}
    # process_latent_in of the Flux latent format undoes these two, up to HEADROOM.
    state["vae_scale"] = torch.tensor(SCALE / HEADROOM)
    state["vae_shift"] = torch.tensor(SHIFT)
    VAE_FILE.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().contiguous() for k, v in state.items()}, VAE_FILE)
