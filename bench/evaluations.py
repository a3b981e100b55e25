#!/usr/bin/env python3
"""Gradient evaluations to the published protocol's resolution, on the nano model.

Published protocol: 40 images, two sets of 12 draws, arms with sigma and noise of their own, a
control arm, each image's cosine, the mean over images. Here: one set, sigma and noise shared as far
as grids allow, no control, the estimand "ratio". For every way between the two the standard error
of the distance at every draw count, the resolution (the smallest margin at which a distance of 0
would be called safe), and the evaluations; so the saving splits into estimator, estimand, control
and pairing. What stopping adds depends on the distances that a user has; it is simulated on
resamples of the images, for the route (far from native) and for the control in its place (near it).
Run with the Python that runs ComfyUI:

    .comfyui/venv/bin/python bench/evaluations.py .comfyui/ComfyUI
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

ROUTE, CONTROL = "demote:192", "reenc"
BINS = ((0.3, 0.5), (0.7, 0.9))
PUBLISHED_DRAWS, PUBLISHED_IMAGES, PUBLISHED_EVALUATIONS = 24, 40, 115_200
PUBLISHED_BINS = 15
# Which random numbers the arms of a draw have in common, and how many draws are taken.
MODES = {"independent": PUBLISHED_DRAWS, "shared sigma": 12, "shared noise": 12}
TILE = 256


def tiles(count: int) -> Iterator[np.ndarray]:
    """Pictures uint8 [256, 256, 3]: what of the demo's pictures fits side by side."""
    from PIL import Image

    pictures = sorted((common.ROOT / "demo" / "pictures" / "demotion_demo").glob("*.jpg"))
    for picture in pictures:
        pixels = np.asarray(Image.open(picture).convert("RGB"))
        for top in range(0, pixels.shape[0] - TILE + 1, TILE):
            for left in range(0, pixels.shape[1] - TILE + 1, TILE):
                if count:
                    count -= 1
                    yield pixels[top : top + TILE, left : left + TILE]


def training_set(model: Any, vae: Any, count: int, folder: Path) -> Any:
    """The tiles with the route and the control encoded."""
    from pack.host import text
    from pack.host import vae as host_vae

    from demotion import arms, grid

    codec = host_vae.VaeCodec(vae)
    zero = text.zero_conditioning(model.model)
    items = [
        arms.Item(
            image=arms.content_hash(pixels),
            name=f"tile {index}",
            picture=arms.store_picture(pixels, folder),
            mask=None,
            size=(TILE, TILE),
            native=grid.native_grid((TILE, TILE), TILE),
            caption="",
            repeats=1,
            conditioning=zero,
        )
        for index, pixels in enumerate(tiles(count))
    ]
    made = arms.TrainingSet(tuple(items), TILE, 8, 2, codec, folder)
    for name in ("src", CONTROL, ROUTE):
        made = arms.add_arm(made, arms.Arm.parse(name), lambda: None)
    return made


def grams(model: Any, made: Any) -> dict[tuple[str, int], np.ndarray]:
    """(mode, bin) -> [N, A, D, A, D] inner products of all gradients of an image, arms src, control
    and route."""
    import torch
    from pack.host import families, session

    from demotion import adapter, arms, probe

    names = ("src", CONTROL, ROUTE)
    found: dict[tuple[str, int], list[np.ndarray]] = {}
    with session.open_session(model) as live:
        linears = families.linears(live.network)
        targets = adapter.match_targets(linears, live.family.targets)
        weights = adapter.probe_weights(linears, targets, rank=8, seed=0)
        parameters = live.adapt(weights).parameters
        size = sum(parameter.numel() for parameter in parameters)
        for index, item in enumerate(made.items):
            latents = {name: live.load_arm(made, item, arms.Arm.parse(name))[0] for name in names}
            subject = probe.Subject(item.image, latents, dict.fromkeys(names), item.conditioning)
            if index == 0:
                live.check_additions(latents["src"], item.conditioning)
            for mode, draws in MODES.items():
                for which, sigma_bin in enumerate(BINS):
                    rows = torch.empty(len(names), draws, size)
                    for arm, name in enumerate(names):
                        # A draw's number names its sigma and its noise.
                        first = 1000 * arm if mode == "independent" else 0
                        for draw in range(draws):
                            probe.draw_gradient(
                                subject,
                                name,
                                sigma_bin,
                                [first + draw],
                                0,
                                mode == "shared noise",
                                live.velocity,
                                parameters,
                                rows[arm, draw],
                            )
                    products = probe.inner_products(rows.flatten(0, 1))
                    shape = (len(names), draws, len(names), draws)
                    found.setdefault((mode, which), []).append(products.reshape(shape))
            print(f"{index + 1} of {len(made.items)} images", flush=True)
    return {key: np.stack(value) for key, value in found.items()}


def measurement(gram: dict[tuple[str, int], np.ndarray], mode: str, draws: int) -> Any:
    """What the probe would have kept of the first draws of each cell."""
    from demotion import measure

    names = ("src", CONTROL, ROUTE)
    cells = []
    for which, sigma_bin in enumerate(BINS):
        for image, products in enumerate(gram[mode, which]):
            halves = [slice(0, draws, 2), slice(1, draws, 2)]
            blocks = [
                [products[:, a][:, :, :, b].sum(axis=(1, 3)) for b in halves] for a in halves
            ]
            inside = [
                np.einsum("adbd->ab", products[:, half][:, :, :, half]) for half in halves
            ]
            cells.append(
                measure.Cell(
                    image=f"{image:04d}",
                    bin=sigma_bin,
                    arms=names,
                    gram=np.array(blocks).transpose(0, 2, 1, 3)[None],
                    products=np.array(inside)[None],
                    counts=((draws + 1) // 2, draws // 2),
                    grids=((32, 32), (32, 32), (24, 24)),
                    losses=(0.0,) * len(names),
                )
            )
    settings = {
        "arms": list(names),
        "bins": [list(edges) for edges in BINS],
        "draws": draws,
        "seed": 0,
        "native_tier": TILE,
        "patch": 2,
        "parts": ["all"],
        "noise": "independent" if mode == "independent" else "shared",
        "model": {"fingerprint": "nano"},
        "adapter": {"kind": "fresh"},
        "environment": {"dtype": "float32"},
    }
    return measure.Measurement(settings, cells)


def errors(made: Any, **choices: Any) -> list[tuple[float, float, float]]:
    """Per bin distance, standard error and resolution of the route."""
    from demotion import gap_map

    return [
        (gap.d, gap.se, gap.resolution) for gap in gap_map.gap_map(made, **choices).of(ROUTE)
    ]


def table(gram: dict[tuple[str, int], np.ndarray]) -> None:
    """Print the ladder from the published protocol to this one, and the evaluations it takes."""
    images = len(gram["independent", 0])
    published = {"estimand": "per_image", "estimator": "two_set", "control": CONTROL}
    ladder = [
        ("published protocol", "independent", published, 3),
        ("one set", "independent", published | {"estimator": "one_set"}, 3),
        ("ratio", "independent", {"control": CONTROL}, 3),
        ("no control", "independent", {}, 2),
        ("shared sigma", "shared sigma", {}, 2),
        ("shared noise", "shared noise", {}, 2),
    ]
    reference = errors(measurement(gram, "independent", PUBLISHED_DRAWS), **published)
    goals = [error for _, error, _ in reference]
    print(f"\n{images} images, route {ROUTE}, bins {BINS}; distance (standard error) per bin, and")
    print("the evaluations a bin to the published protocol's standard error, images by need\n")
    cost = {}
    for label, mode, choices, arms in ladder:
        for draws in (2, 4, 6, 8, 12, 24):
            if draws > MODES[mode]:
                continue
            found = errors(measurement(gram, mode, draws), **choices)
            # The squared error falls as 1 / images; the bin that needs most decides.
            need = max((error / goal) ** 2 for (_, error, _), goal in zip(found, goals))
            evaluations = arms * images * draws * need
            cost[label] = min(cost.get(label, np.inf), evaluations)
            cells = "  ".join(f"{d:7.3f} ({error:.3f})" for d, error, _ in found)
            print(f"{label:<20}{draws:>4} draws  {cells}  {images * need:6.0f} images "
                  f"{evaluations:8.0f} evaluations")
    full = 3 * images * PUBLISHED_DRAWS
    print("\ncheapest, over the published protocol's 24 draws of three arms")
    for label, *_ in ladder:
        print(f"{label:<20}{cost[label]:>8.0f}  {cost[label] / full:.3f}")
    ours = cost["shared noise"]
    whole = ours / images * PUBLISHED_IMAGES * PUBLISHED_BINS
    print(
        f"\n(b) the same route, bins and control: {ours / full:.3f} of the evaluations"
        f"\n(a) one route on {PUBLISHED_BINS} bins, to the resolution of {PUBLISHED_IMAGES} "
        f"images, against the full published run of {PUBLISHED_EVALUATIONS:,}: "
        f"{whole / PUBLISHED_EVALUATIONS:.3f}"
    )


def pairing(gram: dict[tuple[str, int], np.ndarray], draws: int = 12) -> None:
    """Print the variance of each arm's distance by what arms share, one set, ratio, no control."""
    from demotion import gap_map

    print(f"\nvariance of the distance x 1e4, {draws} draws, by what the arms of a draw share")
    for mode in MODES:
        found = gap_map.gap_map(measurement(gram, mode, draws))
        cells = "  ".join(
            f"{arm} {' '.join(f'{1e4 * gap.se**2:8.2f}' for gap in found.of(arm))}"
            for arm in (CONTROL, ROUTE)
        )
        print(f"{mode:<14}{cells}")


def stopping(gram: dict[tuple[str, int], np.ndarray], draws: int = 4, runs: int = 20) -> None:
    """Print the share of evaluations that four planned looks take until each bin is decided."""
    from demotion import gap_map, measure

    made = measurement(gram, "shared noise", draws)
    images = len(gram["shared noise", 0])
    looks = [images * look // 4 for look in (1, 2, 3, 4)]
    random = np.random.default_rng(0)
    print(f"\nplanned looks at {looks} images, {draws} draws, margin .05: share of the evaluations")
    for arm in (ROUTE, CONTROL):
        spent = np.zeros((runs, len(BINS)))
        for run in range(runs):
            order = random.integers(0, images, images)
            open_bins = set(BINS)
            for before, after in zip([0, *looks], looks):
                spent[run] += [(after - before) / images if b in open_bins else 0 for b in BINS]
                cells = [
                    one_arm(made.cells[which * images + int(i)], arm, place)
                    for which, b in enumerate(BINS)
                    if b in open_bins
                    for place, i in enumerate(order[:after])
                ]
                seen = measure.Measurement(
                    made.settings
                    | {"arms": ["src", ROUTE], "bins": sorted(open_bins), "seed": run},
                    cells,
                )
                found = gap_map.gap_map(seen, looks=4)
                open_bins -= {b for _, b in gap_map.decided(found)}
                if not open_bins:
                    break
        name = "route" if arm == ROUTE else f"{arm} in its place"
        print(f"{name:<20}{'  '.join(f'{value:.2f}' for value in spent.mean(axis=0))} per bin")


def one_arm(cell: Any, arm: str, place: int) -> Any:
    """A cell of src and one other arm, under the route's name, as a picture of its own."""
    from dataclasses import replace

    kept = [0, cell.arms.index(arm)]
    return replace(
        cell,
        image=f"{place:04d}",
        arms=("src", ROUTE),
        gram=cell.gram[:, :, kept][:, :, :, :, kept],
        products=cell.products[:, :, kept][:, :, :, kept],
        grids=(cell.grids[0], cell.grids[-1]),
        losses=(0.0, 0.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("comfyui", help="folder of ComfyUI")
    parser.add_argument("--images", type=int, default=PUBLISHED_IMAGES)
    parser.add_argument("--keep", type=Path, help="file for the inner products; used if there")
    options = parser.parse_args()
    common.start(options.comfyui)
    if options.keep and options.keep.exists():
        stored = np.load(options.keep)
        gram = {(mode, i): stored[f"{mode} {i}"] for mode in MODES for i in range(len(BINS))}
    else:
        gram = measured(options.images)
        if options.keep:
            np.savez(options.keep, **{f"{mode} {i}": value for (mode, i), value in gram.items()})
    table(gram)
    pairing(gram)
    stopping(gram)


def measured(images: int) -> dict[tuple[str, int], np.ndarray]:
    import tempfile

    import comfy.sd
    import comfy.utils
    import torch

    models = common.ROOT / "demo" / "models"
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = comfy.sd.load_diffusion_model(
            str(models / "diffusion_models" / "demotion_nano_flux.safetensors")
        )
        vae = comfy.sd.VAE(
            sd=comfy.utils.load_torch_file(
                str(models / "vae" / "demotion_nano_vae.safetensors")
            )
        )
        return grams(model, training_set(model, vae, images, Path(folder)))


if __name__ == "__main__":
    main()
