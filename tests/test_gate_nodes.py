"""Gates and training sets through the nodes, on a live server and in this process."""

from __future__ import annotations

import urllib.parse
import urllib.request

import numpy as np
import pytest
import torch
from PIL import Image
from test_runs import FLUX, toy  # noqa: F401
from test_server import TIER, files, graph, node, only, pictures

import run
from demotion import gate, measure, train

DENSITY = {"density_mean": 0.0, "density_std": 1.0, "density_shift": 3.0}


def by_hand(native: int, target: int, low: float, high: float, **more) -> dict:
    return node(
        "DemotionGateByHand",
        native_tier=native,
        target_tier=target,
        sigma_low=low,
        sigma_high=high,
        **({"span": "always", "span_fraction": 0.5} | more),
    )


def cost_of(server, native: int = TIER, **inputs) -> dict:
    """A chain of two rules, and its cost on a set that is not demoted."""
    job = only(graph(pictures(server.base, "cost")), "set")
    late = {"span": "late", "span_by": "learning-rate mass"}
    return job | {
        "first": by_hand(TIER, 48, 0.5, 1.0, **late),
        "second": by_hand(native, 32, 0.5, 0.8, gate=["first", 0]),
        "cost": node(
            "DemotionGateCost",
            gate=["second", 0],
            training_set=["set", 0],
            steps=200,
            batch_size=2,
            schedule="cosine",
            warmup_steps=20,
            theme="dark",
            **(DENSITY | {"sigma_density": "uniform"} | inputs),
        ),
        "text": node("PreviewAny", source=["second", 1]),
    }


@pytest.mark.server
def test_rules_are_chained_and_their_cost_is_told_and_drawn(server) -> None:
    entry = run.queue(server.url, cost_of(server))
    (text,), (report,) = (entry["outputs"][name]["text"] for name in ("text", "cost"))
    for part in (
        "1. 64 -> 48 for sigma 0.5 to 1, late:0.5 by mass",
        "2. 64 -> 32 for sigma 0.5 to 0.8",
        "Rules 1 and 2 overlap for sigma 0.5 to 0.8: where both fit a sample, rule 1 wins.",
    ):
        assert part in text and part in report
    course = train.Settings(200, 1.0, schedule="cosine", warmup_steps=20).course
    late = [gate.span_open("late:0.5 by mass", step, course) for step in range(200)]
    assert f"Rule 1 takes {0.5 * sum(late) / 200:.1%} of the samples" in report
    assert 0.6 < sum(late) / 200 < 0.75
    (image,) = entry["outputs"]["cost"]["images"]
    with urllib.request.urlopen(f"{server.url}/view?{urllib.parse.urlencode(image)}") as shown:
        assert Image.open(shown).size == (1200, 900)


@pytest.mark.server
def test_a_gate_that_does_not_fit_and_a_density_without_its_model_are_refused(server) -> None:
    with pytest.raises(run.Stop, match="starts at tier 96, and the gate at 64"):
        run.queue(server.url, cost_of(server, native=96))
    with pytest.raises(run.Stop, match="no MODEL is connected"):
        run.queue(server.url, cost_of(server, sigma_density="model"))
    prompt = cost_of(server, sigma_density="dynamic_shift")
    prompt["set"]["inputs"]["native_tier"] = 48
    with pytest.raises(run.Stop, match="the set's native tier is 48"):
        run.queue(server.url, prompt)


@pytest.mark.server
def test_the_alpha_of_a_picture_reaches_the_loss_as_its_mask(server) -> None:
    name = pictures(server.base, "alpha", count=2)
    for number, path in enumerate(sorted((server.base / "input" / name).glob("*.png"))):
        alpha = np.full((96, 96), 255, np.uint8)
        alpha[:48] = 0
        picture = Image.open(path)
        picture.load()
        if number:
            picture.putalpha(Image.fromarray(alpha))
        picture.save(path)
    job = only(graph(name, probe={"draws": 2}), "probe")
    entry = run.queue(server.url, job)
    measured = measure.Measurement.load(files(server, entry)["measurement"])
    masks = {image["name"]: image["mask"] for image in measured.settings["images"].values()}
    assert masks["picture 1"] is None and masks["picture 2"] is not None


class Encoder:
    """A text encoder whose conditioning is the caption's length."""

    def tokenize(self, caption: str) -> int:
        return len(caption)

    def encode_from_tokens_scheduled(self, tokens: int) -> list:
        return [[torch.full((1, 1, 2), float(tokens)), {}]]


@FLUX
def test_the_empty_text_is_that_of_the_encoder_the_zero_token_or_as_connected(toy) -> None:  # noqa: F811
    from pack.nodes import training_set as nodes

    model, ready, given = toy[0], [[torch.ones(1, 1, 2), {}]], ["a", "caption"]
    texts, empty, _ = nodes._texts(model, given, [Encoder()], None, None)
    assert [float(text[0][0].mean()) for text in (*texts, empty)] == [1, 7, 0]
    texts, empty, _ = nodes._texts(model, given, None, None, None)
    assert texts == [empty, empty] and not empty[0][0].any()
    assert nodes._texts(model, given, None, [ready], None)[1] is None
    assert nodes._texts(model, given, [Encoder()], [ready], [ready])[1] is ready
    with pytest.raises(ValueError, match="empty_conditioning has 2 entries"):
        nodes._texts(model, given, None, None, [ready, ready])
    areas = [[torch.ones(1, 1, 2), {"area": (1, 1, 0, 0)}]]
    with pytest.raises(ValueError, match="CONDITIONING of the empty caption carries area"):
        nodes._texts(model, given, None, None, [areas])
