"""Load Training Folder - Training Set - Demote, Repromote, Resample, Re-encode - Training Set to
Latents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import folder_paths
import numpy as np
import torch
from comfy_api.latest import io
from PIL import Image, ImageOps

from ..demotion import arms, grid
from ..host import families, session, text
from ..host import vae as host_vae
from . import files, rotary, wires
from .progress import Progress, tell
from .rotary import mode_of

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
TIER = {"min": 32, "max": 4096, "step": 16}


def set_folder(name: str) -> Path | None:
    """A training folder by name: in ComfyUI's input folder, or in a folder of ready-made sets; None
    if in neither."""
    for root in (folder_paths.get_input_directory(), *folder_paths.get_folder_paths(files.SETS)):
        path = Path(root) / name
        if name and path.is_dir() and folder_paths.is_within_directory(root, str(path)):
            return path
    return None


def folder_problem(name: str) -> str | None:
    """What is wrong with a folder name, or None."""
    path = set_folder(name)
    if path is None:
        return (
            f"folder '{name}' is not a sub-folder of ComfyUI's input folder: "
            "copy the pictures into one"
        )
    if not pictures_in(path):
        kinds = ", ".join(sorted(SUFFIXES))
        return f"folder '{name}' has no pictures ({kinds}): put some in or choose another"
    return None


def set_names() -> list[str]:
    """Folders that can be loaded: sub-folders of ComfyUI's input folder, then ready-made sets."""
    names = [Path(name).as_posix() for name in folder_paths.get_input_subfolders()]
    for root in folder_paths.get_folder_paths(files.SETS):
        names += sorted(path.name for path in Path(root).glob("*") if path.is_dir())
    return list(dict.fromkeys(names))


def pictures_in(folder: Path) -> list[Path]:
    """Picture files of a folder and its sub-folders, sorted by path."""
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()
    )


def repeats_of(path: Path, folder: Path) -> int:
    """Repeats from the nearest folder named N_name, 1 without one."""
    for parent in path.relative_to(folder.parent).parents:
        named = re.match(r"(\d+)_", parent.name)
        if named:
            return max(1, int(named[1]))
    return 1


def read_picture(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Pixels uint8 [H, W, 3] upright by EXIF, and alpha uint8 [H, W] or None. Raises ValueError if
    unreadable."""
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened)
            picture = picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(
            f"picture {path.name} cannot be read ({error}): repair it or take it out of the folder"
        ) from None
    pixels = np.asarray(picture)
    return pixels[..., :3], pixels[..., 3] if pixels.shape[-1] == 4 else None


class LoadTrainingFolder(io.ComfyNode):
    """Pictures, captions, masks and repeats from a folder on the server."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionLoadTrainingFolder",
            display_name="Load Training Folder",
            category=wires.CATEGORY,
            description="Loads every picture of a folder and its sub-folders, sorted, with .txt "
            "captions beside them.",
            search_aliases=["dataset", "load images", "captions", "lora training"],
            inputs=[
                io.Combo.Input(
                    "folder",
                    options=set_names(),
                    tooltip="A sub-folder of ComfyUI's input folder, or a set that comes with the "
                    "pack. Pictures in sub-folders named N_name are repeated N times.",
                )
            ],
            outputs=[
                io.Image.Output(
                    "images", is_output_list=True, tooltip="Pictures in their own sizes."
                ),
                io.String.Output(
                    "captions",
                    is_output_list=True,
                    tooltip="Text of the .txt file beside each picture, empty without one.",
                ),
                io.Mask.Output(
                    "masks",
                    is_output_list=True,
                    tooltip="Alpha of each picture, 1 where there is none: what is 1 is learned.",
                ),
                io.Int.Output(
                    "repeats",
                    is_output_list=True,
                    tooltip="How often an epoch of training shows each picture.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None = None) -> bool | str:
        # A linked folder is None here and is checked when it is known.
        return folder is None or folder_problem(folder) or True

    @classmethod
    def fingerprint_inputs(cls, folder: str) -> str:
        path = set_folder(folder)
        watched = [
            file for picture in pictures_in(path) for file in (picture, picture.with_suffix(".txt"))
        ]
        return "\n".join(files.stamp(file) for file in watched if file.exists())

    @classmethod
    def execute(cls, folder: str) -> io.NodeOutput:
        problem = folder_problem(folder)
        if problem:
            raise ValueError(problem)
        root = set_folder(folder)
        images, captions, masks, repeats = [], [], [], []
        for path in pictures_in(root):
            pixels, alpha = read_picture(path)
            caption = path.with_suffix(".txt")
            images.append(torch.from_numpy(pixels.astype(np.float32) / 255)[None])
            captions.append(caption.read_text(encoding="utf-8").strip() if caption.exists() else "")
            alpha = np.full(pixels.shape[:2], 255, np.uint8) if alpha is None else alpha
            masks.append(torch.from_numpy(alpha.astype(np.float32) / 255)[None])
            repeats.append(repeats_of(path, root))
        return io.NodeOutput(images, captions, masks, repeats)


class TrainingSet(io.ComfyNode):
    """Pictures on their native grids, with conditioning: what is measured and trained on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionTrainingSet",
            display_name="Training Set",
            category=wires.CATEGORY,
            is_input_list=True,
            description="Fits each picture to a grid of the native tier and encodes it. Without "
            "CLIP or CONDITIONING the model gets one zero token.",
            search_aliases=["dataset", "bucket", "lora training"],
            inputs=[
                io.Model.Input("model", tooltip="The flow-matching model to measure or train."),
                io.Image.Input("images", tooltip="Pictures, as a list or a batch."),
                io.Vae.Input("vae", tooltip="The VAE that belongs to the model."),
                io.Int.Input(
                    "native_tier",
                    default=1024,
                    **TIER,
                    tooltip="Nominal edge in pixels at which training would run without demotion.",
                ),
                io.String.Input(
                    "captions",
                    optional=True,
                    force_input=True,
                    tooltip="One caption per picture, or one for all. Needs CLIP to have an "
                    "effect.",
                ),
                io.Mask.Input(
                    "masks", optional=True, tooltip="One mask per picture: what is 1 is learned."
                ),
                io.Int.Input(
                    "repeats",
                    optional=True,
                    force_input=True,
                    tooltip="How often an epoch shows each picture. The map counts each picture "
                    "once.",
                ),
                io.Clip.Input("clip", optional=True, tooltip="Text encoder for the captions."),
                io.Conditioning.Input(
                    "conditioning",
                    optional=True,
                    tooltip="Ready conditioning instead of captions: one per picture, or one for "
                    "all.",
                ),
                io.Conditioning.Input(
                    "empty_conditioning",
                    optional=True,
                    tooltip="What a sample is trained with when its caption is dropped. Without "
                    "it: an empty caption through CLIP, or the zero token; with ready "
                    "conditioning there is none.",
                ),
            ],
            outputs=[
                wires.TrainingSet.Output(
                    "training_set", display_name="set", tooltip="The set, with its native latents."
                ),
                io.String.Output(
                    "report",
                    display_name="report",
                    tooltip="Grids, pictures that cannot be demoted, and what the text is.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model,
        images,
        vae,
        native_tier,
        captions=None,
        masks=None,
        repeats=None,
        clip=None,
        conditioning=None,
        empty_conditioning=None,
    ) -> io.NodeOutput:
        model, native_tier, node_id = model[0], native_tier[0], cls.hidden.unique_id
        family = families.family_of(model.model)
        session.check_loadable(model)
        host_vae.check_fits(vae[0], model.model)
        codec = host_vae.VaeCodec(vae[0])
        pictures = [picture for batch in images for picture in batch]
        count = len(pictures)
        if not count:
            raise ValueError("images is empty: connect at least one picture")
        captions = _one_each("captions", captions or [""], count)
        repeats = _one_each("repeats", repeats or [1], count)
        masks = _one_each(
            "masks", [mask for batch in masks for mask in batch] if masks else [None], count
        )
        given, empty, said = _texts(model, captions, clip, conditioning, empty_conditioning)
        cache = files.output_folder("cache")
        items = []
        for index, (picture, mask) in enumerate(zip(pictures, masks)):
            name = f"picture {index + 1}"
            text.check_plain(given[index], name)
            pixels = _to_bytes(picture[..., :3])
            size = pixels.shape[:2]
            native = grid.native_grid(
                size, native_tier, vae_factor=codec.factor, patch=family.patch
            )
            families.check_grid(model.model, native, name)
            items.append(
                arms.Item(
                    image=arms.content_hash(pixels),
                    name=name,
                    picture=arms.store_picture(pixels, cache),
                    mask=_store_mask(mask, size, name, cache),
                    size=size,
                    caption=captions[index],
                    repeats=repeats[index],
                    native=native,
                    conditioning=given[index],
                )
            )
        made = arms.TrainingSet(
            tuple(items), native_tier, codec.factor, family.patch, codec, cache, empty=empty
        )
        made = arms.add_arm(made, arms.SRC, Progress(count, node_id, "pictures"))
        report = _report(made, said)
        tell(node_id, report)
        return io.NodeOutput(made, report)


def _texts(
    model, captions: list[str], clip: list | None, conditioning: list | None, emptied: list | None
) -> tuple[list, list | None, str]:
    """Conditioning of each caption, that of an empty one or None where it is unknown, and what
    these are in words; clip, conditioning and emptied are as connected."""
    if conditioning:
        given, empty = _one_each("conditioning", conditioning, len(captions)), None
        said = "conditioning as connected"
    elif clip:
        *given, empty = text.encode_captions(clip[0], [*captions, ""])
        said = "captions through the text encoder"
    else:
        empty = text.zero_conditioning(model.model)
        given = [empty] * len(captions)
        said = f"no text encoder: one zero token of width {empty[0][0].shape[-1]}"
    if emptied:
        if len(emptied) > 1:
            raise ValueError(
                f"empty_conditioning has {len(emptied)} entries: connect a single one, which "
                "serves all pictures"
            )
        (empty,) = emptied
        text.check_plain(empty, "the empty caption")
    return given, empty, said


def _one_each(name: str, values: list, count: int) -> list:
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ValueError(
            f"{name} has {len(values)} entries for {count} pictures: give one per picture, or one "
            f"for all"
        )
    return values


def _to_bytes(values: torch.Tensor) -> np.ndarray:
    return (values * 255).round().clamp(0, 255).byte().cpu().numpy()


def _store_mask(
    mask: torch.Tensor | None, size: tuple[int, int], name: str, cache: Path
) -> Path | None:
    """Keep a mask; one that is 1 everywhere is none."""
    if mask is None or bool((mask >= 1).all()):
        return None
    if tuple(mask.shape) != size:
        raise ValueError(
            f"the mask of {name} is {mask.shape[1]}x{mask.shape[0]}, the picture "
            f"{size[1]}x{size[0]}: use masks of the pictures' sizes"
        )
    if not bool(mask.any()):
        raise ValueError(
            f"the mask of {name} is 0 everywhere, so nothing would be learned: correct or leave it "
            f"out"
        )
    return arms.store_picture(_to_bytes(mask), cache)


def _report(made: arms.TrainingSet, said: str) -> str:
    grids = {}
    for item in made.items:
        grids.setdefault(made.pixel_size(item.native), []).append(item.name)
    lines = [f"{len(made.items)} pictures at native tier {made.native_tier}; {said}."]
    lines += [f"{width}x{height}: {len(names)}" for (height, width), names in sorted(grids.items())]
    small = [
        item
        for item in made.items
        if not grid.in_tier(item.native, made.native_tier, made.vae_factor, made.patch)
    ]
    lines += [
        f"{item.name} ({item.size[1]}x{item.size[0]}) is too small for tier {made.native_tier} and "
        f"always trains at {made.pixel_size(item.native)[1]}x{made.pixel_size(item.native)[0]}."
        for item in small
    ]
    if any(item.repeats > 1 for item in made.items):
        lines.append("Repeats weigh training only: the map counts each picture once.")
    return "\n".join(lines)


def _with_arm(
    training_set: arms.TrainingSet,
    arm: arms.Arm,
    node_id: str,
    same_latents: Sequence[arms.Arm] = (),
) -> io.NodeOutput:
    """The set with an arm, and with others on the same latents; the pictures as the VAE was given
    them."""
    made = arms.add_arm(training_set, arm, Progress(len(training_set.items), node_id, "pictures"))
    for other in same_latents:
        made = arms.add_arm(made, other, lambda: None)
    seen = [
        arms.arm_pixels(made, item, arm)
        for item in made.items
        if made.grid_of(item, arm) is not None
    ]
    if arm.tier is not None:
        reasons = made.off_route(arm.tier)
        tell(
            node_id,
            "\n".join(
                [
                    f"{len(seen)} pictures on the route {made.native_tier} -> {arm.tier}",
                    *(f"{name} stays native: {reason}" for name, reason in reasons.items()),
                ]
            ),
        )
    return io.NodeOutput(
        made, [torch.from_numpy(pixels.astype(np.float32) / 255)[None] for pixels in seen]
    )


def _arm_outputs() -> list[io.Output]:
    return [
        wires.TrainingSet.Output(
            "training_set", display_name="set", tooltip="The set with one more arm."
        ),
        io.Image.Output(
            "images",
            display_name="images",
            is_output_list=True,
            tooltip="What the VAE was given for this arm, picture by picture.",
        ),
    ]


def _arm_schema(node_id: str, name: str, description: str, *inputs: io.Input) -> io.Schema:
    """Schema of a node that adds an arm to a set; inputs are those beside the set."""
    return io.Schema(
        node_id=node_id,
        display_name=name,
        category=wires.CATEGORY,
        description=description,
        inputs=[_set_input(), *inputs],
        outputs=_arm_outputs(),
        hidden=[io.Hidden.unique_id],
    )


def _set_input() -> io.Input:
    return wires.TrainingSet.Input("training_set", display_name="set", tooltip="A training set.")


class DemoteLatents(io.ComfyNode):
    """Adds the arm demote:E, and demote:E+MODE and shifted:E on request."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _arm_schema(
            "DemotionDemoteLatents",
            "Demote Latents",
            "Downscales each picture in pixel space to a lower tier and encodes it: "
            "what a demoted training "
            "step would see. Needed for every tier that is measured or trained at.",
            io.Int.Input(
                "target_tier",
                default=768,
                **TIER,
                tooltip="Nominal edge in pixels to demote to, at most .94 of the native tier.",
            ),
            rotary.choice(
                "Also measure this tier with its rotary positions aligned to the native grid: "
                "one more arm on the same latents."
            ),
            io.Boolean.Input(
                "shifted",
                default=False,
                optional=True,
                advanced=True,
                tooltip="Also measure this tier at the sigma where its low frequencies are as "
                "noisy as the native ones: a diagnostic on the same latents, not a route.",
            ),
        )

    @classmethod
    def execute(
        cls,
        training_set: arms.TrainingSet,
        target_tier: int,
        rotary=rotary.NONE,
        shifted: bool = False,
    ) -> io.NodeOutput:
        arm, mode = arms.Arm("demote", target_tier), mode_of(rotary)
        others = [replace(arm, rotary=mode)] if mode else []
        if shifted:
            others.append(replace(arm, kind="shifted"))
        return _with_arm(training_set, arm, cls.hidden.unique_id, others)


class RepromoteLatents(io.ComfyNode):
    """Adds the arm repromote:E."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _arm_schema(
            "DemotionRepromoteLatents",
            "Repromote Latents",
            "Downscales each picture to a lower tier and carries it back up to its "
            "native grid: what the lost detail alone costs, without the change of grid.",
            io.Int.Input(
                "from_tier",
                default=768,
                **TIER,
                tooltip="Nominal edge in pixels to come back from, at most .94 of the native tier.",
            ),
        )

    @classmethod
    def execute(cls, training_set: arms.TrainingSet, from_tier: int) -> io.NodeOutput:
        return _with_arm(training_set, arms.Arm("repromote", from_tier), cls.hidden.unique_id)


class ResampleControl(io.ComfyNode):
    """Adds the arm resample:E."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _arm_schema(
            "DemotionResampleControl",
            "Resample Control",
            "Enlarges each native picture by a route's edge ratio and brings it back: "
            "what resampling alone costs, with no detail lost and no change of grid.",
            io.Int.Input(
                "target_tier",
                default=768,
                **TIER,
                tooltip="Nominal edge in pixels of the route that it is a control for, at most "
                ".94 of the native tier.",
            ),
        )

    @classmethod
    def execute(cls, training_set: arms.TrainingSet, target_tier: int) -> io.NodeOutput:
        return _with_arm(training_set, arms.Arm("resample", target_tier), cls.hidden.unique_id)


class ReencodeControl(io.ComfyNode):
    """Adds the arm reenc."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _arm_schema(
            "DemotionReencodeControl",
            "Re-encode Control",
            "Decodes each native latent and encodes it again: what the VAE's round "
            "trip alone costs.",
        )

    @classmethod
    def execute(cls, training_set: arms.TrainingSet) -> io.NodeOutput:
        return _with_arm(training_set, arms.REENC, cls.hidden.unique_id)


class TrainingSetToLatents(io.ComfyNode):
    """One arm as the lists that ComfyUI's own trainer takes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionTrainingSetToLatents",
            display_name="Training Set to Latents",
            category=wires.CATEGORY,
            description="Gives one arm of a set as LATENT and CONDITIONING lists for ComfyUI's own "
            "Train LoRA.",
            inputs=[
                _set_input(),
                io.String.Input(
                    "arm",
                    default="src",
                    tooltip="src, reenc, demote:768 or resample:768, say; the set "
                    "must have the arm.",
                ),
            ],
            outputs=[
                io.Latent.Output(
                    "latents",
                    display_name="latents",
                    is_output_list=True,
                    tooltip="One raw VAE latent per picture that has the arm.",
                ),
                io.Conditioning.Output(
                    "conditioning",
                    display_name="conditioning",
                    is_output_list=True,
                    tooltip="The conditioning of the same pictures.",
                ),
            ],
        )

    @classmethod
    def execute(cls, training_set: arms.TrainingSet, arm: str) -> io.NodeOutput:
        chosen = next((known for known in training_set.arms if str(known) == arm.strip()), None)
        if chosen is None:
            raise ValueError(
                f"arm '{arm}' is not in the set, which has "
                f"{', '.join(map(str, training_set.arms))}: choose one of these or add it before"
            )
        items = [
            item for item in training_set.items if training_set.grid_of(item, chosen) is not None
        ]
        return io.NodeOutput(
            [{"samples": training_set.latent(item, chosen)[None]} for item in items],
            [item.conditioning for item in items],
        )


NODES = [
    LoadTrainingFolder,
    TrainingSet,
    DemoteLatents,
    RepromoteLatents,
    ResampleControl,
    ReencodeControl,
    TrainingSetToLatents,
]
