"""What the pack's own widgets show and write: the live map, the gate's bands, the training view."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pages import ROOT, load_prompt, node, prompt_of, reload, rows, run_from_page, until, view

from demotion import draws, gate, gate_cost

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser
TIER, TARGET = 64, 48


PICTURES = 8


@pytest.fixture
def seed(renderer: str) -> int:
    """Each renderer measures by itself: what was measured before would not run again."""
    return int(renderer == "nodes_2")


def training_set(server: Any) -> dict[str, Any]:
    """The demo models and a few of the demo pictures, made small."""
    folder = server.base / "input" / "few"
    folder.mkdir(exist_ok=True)
    for path in sorted((ROOT / "demo" / "pictures" / "demotion_demo").glob("*.jpg"))[:PICTURES]:
        shutil.copy(path, folder)
    return {
        "1": node("UNETLoader", "Model", unet_name="demotion_nano_flux.safetensors"),
        "2": node("VAELoader", "VAE", vae_name="demotion_nano_vae.safetensors"),
        "3": node("DemotionLoadTrainingFolder", "Folder", folder=folder.name),
        "4": node(
            "DemotionTrainingSet",
            "Set",
            native_tier=TIER,
            model=["1", 0],
            images=["3", 0],
            vae=["2", 0],
            captions=["3", 1],
        ),
        "5": node("DemotionDemoteLatents", "Demote", training_set=["4", 0], target_tier=TARGET),
    }


def probe(**inputs: Any) -> dict[str, Any]:
    return node(
        "DemotionGradientProbe",
        "Probe",
        model=["1", 0],
        training_set=["5", 0],
        **{"bins": "3", "draws": 4, "rank": 2, "diagnostics": False, **inputs},
    )


def by_hand(**inputs: Any) -> dict[str, Any]:
    return node(
        "DemotionGateByHand",
        "Gate by Hand",
        **{
            "native_tier": TIER,
            "target_tier": TARGET,
            "sigma_low": 0.5,
            "sigma_high": 0.9,
            "span": "always",
            "span_fraction": 0.5,
            **inputs,
        },
    )


def train(**inputs: Any) -> dict[str, Any]:
    return node(
        "DemotionTrainLora",
        "Train",
        model=["1", 0],
        training_set=["5", 0],
        **{"rank": 2, "alpha": 2.0, "batch_size": 1, "name": "seen", **inputs},
    )


def a_map(*verdicts: str, title: str = "64 -> 48") -> dict[str, Any]:
    """A document of a finished map: as many equal bins as verdicts on one route."""
    distances = {"safe": 0.01, "undecided": 0.05, "unsafe": 0.3}
    gaps = [
        {
            "bin": [index / len(verdicts), (index + 1) / len(verdicts)],
            "d": distances[verdict],
            "interval": [distances[verdict] - 0.01, distances[verdict] + 0.01],
            "band": [distances[verdict] - 0.02, distances[verdict] + 0.02],
            "verdict": verdict,
            "images": 12,
            "tokens": 9,
            "src_tokens": 16,
            "decide": "",
        }
        for index, verdict in enumerate(verdicts)
    ]
    arm = {"name": "demote:48", "title": title, "route": True, "tier": TARGET, "rotary": None}
    return {
        "kind": "map",
        "so_far": False,
        "headline": "estimand ratio, margin 0.05",
        "margin": 0.05,
        "native_tier": TIER,
        "arms": [{**arm, "gaps": gaps}],
    }


def tell(page: Page, number: str, document: dict[str, Any]) -> None:
    """What the server sends while a node runs."""
    page.evaluate(
        """([node, document]) => app.api.dispatchEvent(new CustomEvent("demotion.live", {
            detail: {node, document, file: {filename: "none.json", subfolder: "demotion/live"}},
        }))""",
        [number, document],
    )


def test_the_map_fills_while_the_probe_runs_and_is_redrawn_after_a_reload(
    page: Page, server: Any, seed: int, screenshots: Path
) -> None:
    load_prompt(
        page,
        {
            **training_set(server),
            "6": probe(seed=seed),
            "7": node("DemotionDebiasedCosine", "Cosine", measurement=["6", 0]),
            "8": node("DemotionPlotGapMap", "Plot", gap_map=["7", 0], name="seen"),
            "9": node("DemotionGateFromGapMap", "Gate", gap_map=["7", 0]),
            "10": node("DemotionSaveGate", "Save", gate=["9", 0], name="seen"),
        },
    )
    page.evaluate(
        """() => {
            window.told = [];
            app.api.addEventListener("demotion.live", ({detail}) => told.push(detail.document));
        }"""
    )
    page.get_by_test_id("queue-button").click()
    until(page, lambda: page.evaluate("told.length") > 1, 120)
    running = view(page, "6")
    assert "Gap map so far" in running.inner_text() and "gradients" in running.inner_text()
    page.screenshot(path=screenshots / "running.png")
    until(page, lambda: page.evaluate("app.nodeOutputs['10']?.files?.length") == 1, 240)
    told = page.evaluate("told")
    measured = [sum(gap["images"] for gap in document["arms"][0]["gaps"]) for document in told]
    assert measured == sorted(measured) and measured[0] == 0 < measured[-1]
    assert all(document["so_far"] for document in told)

    plot = view(page, "8")
    assert "Gap map" in plot.inner_text() and "so far" not in plot.inner_text()
    before = rows(plot)
    assert [row[1] for row in before] == [
        f"sigma {low:.3g} to {high:.3g}" for low, high in draws.contiguous_bins(3)
    ]
    assert all(row[0] == "64 -> 48" and row[6] == str(PICTURES) for row in before)
    # The probe shows the same numbers: its margin is that of the map.
    assert rows(view(page, "6")) == before
    page.screenshot(path=screenshots / "finished.png")
    gate_shown = view(page, "9").inner_text()
    page.screenshot(path=screenshots / "gate.png")

    page.wait_for_timeout(1000)  # the page keeps a workflow half a second after it changed
    reload(page)
    until(page, lambda: page.evaluate("document.querySelectorAll('.demotion-view svg').length") > 2)
    again = view(page, "8")
    assert rows(again) == before
    assert view(page, "9").inner_text() == gate_shown
    view(page, "8")
    page.screenshot(path=screenshots / "reloaded.png")


def test_a_mark_tells_its_numbers_to_pointer_and_keyboard(page: Page, screenshots: Path) -> None:
    load_prompt(page, {"41": node("DemotionPlotGapMap", "Plot", name="seen")})
    tell(page, "41", a_map("unsafe", "undecided", "safe", "safe"))
    shown = view(page, "41")
    marks, readout = shown.locator(".mark"), shown.locator(".readout")
    assert marks.count() == 4
    marks.nth(2).hover()
    assert readout.inner_text() == marks.nth(2).get_attribute("aria-label")
    told = readout.inner_text()
    assert "sigma 0.5 to 0.75" in told and "distance 0.010" in told and "0.000 to 0.020" in told
    assert "safe at margin 0.05" in told and "9 of 16 tokens" in told
    page.screenshot(path=screenshots / "hover.png")
    marks.first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.dataset.bin") == "0.25-0.5"
    assert "undecided" in readout.inner_text()
    # A verdict is never a colour alone.
    signs = shown.locator("text.on-safe, text.on-unsafe, text.on-undecided").all_text_contents()
    assert [sign[0] for sign in signs] == ["\u2717", "?", "\u2713", "\u2713"]
    assert len(rows(shown)) == 4


def done(page: Page) -> int:
    """How far the run is that a widget shows, -1 before there is one."""
    return page.evaluate(
        "Number(document.querySelector('.demotion-view progress')?.getAttribute('value') ?? -1)"
    )


def reload_while_it_runs(page: Page, number: str) -> Locator:
    """Queue, load the page again, and see the node's widget go on."""
    page.get_by_test_id("queue-button").click()
    until(page, lambda: done(page) >= 0, 120)
    page.wait_for_timeout(1000)
    reload(page)
    until(page, lambda: done(page) >= 0)
    shown = view(page, number)
    assert "stopped" not in shown.inner_text()
    now = done(page)
    until(page, lambda: done(page) > now, 240)
    return shown


def test_a_reloaded_page_follows_a_running_probe_until_it_is_cancelled(
    page: Page, server: Any, seed: int, screenshots: Path
) -> None:
    load_prompt(page, {**training_set(server), "16": probe(draws=200, bins="2", seed=seed)})
    shown = reload_while_it_runs(page, "16")
    page.screenshot(path=screenshots / "attached.png")
    # The button beside Run cancels only what the page saw start; this one is shown while it runs.
    page.get_by_test_id("queue-overlay-toggle").hover()
    page.get_by_role("button", name="Interrupt all running jobs").click()
    until(page, lambda: "stopped at" in shown.inner_text(), 60)
    assert "queue again to continue" in shown.inner_text()
    page.screenshot(path=screenshots / "cancelled.png")
    reload(page)
    until(page, lambda: done(page) >= 0)
    again = view(page, "16")
    assert "stopped at" in again.inner_text()
    page.get_by_test_id("queue-button").click()
    until(page, lambda: "stopped at" not in again.inner_text(), 60)
    page.get_by_role("button", name="Cancel current run").click()
    until(page, lambda: "stopped at" in again.inner_text(), 60)


def test_a_reloaded_page_follows_a_training_to_its_end(
    page: Page, server: Any, seed: int, screenshots: Path
) -> None:
    steps = 200
    # Steps of eight samples, so that it outlasts a reload of the page.
    run = train(steps=steps, accumulation=8, seed=seed)
    load_prompt(page, {**training_set(server), "18": run})
    shown = reload_while_it_runs(page, "18")
    page.screenshot(path=screenshots / "attached.png")
    until(page, lambda: done(page) == -1, 240)
    assert f"of {steps} steps demoted" in shown.inner_text()
    assert [row[0] for row in rows(shown)] == [str(step) for step in range(1, steps + 1)]
    page.screenshot(path=screenshots / "finished.png")


def test_a_dragged_edge_is_in_the_widget_and_in_the_next_prompt(
    page: Page, screenshots: Path
) -> None:
    load_prompt(
        page,
        {
            "51": node("DemotionPlotGapMap", "Plot", name="seen"),
            "52": by_hand(),
            "53": node("DemotionSaveGate", "Save", gate=["52", 0], name="seen"),
        },
    )
    tell(page, "51", a_map("unsafe", "unsafe", "safe", "safe"))
    shown = view(page, "52")
    low = shown.locator("[data-edge=low]")
    until(page, lambda: "Safe at margin 0.05 for sigma 0.5 to 0.9." in shown.inner_text())
    before = shown.inner_text()
    assert share(0.5, 0.9) in before

    axis = shown.locator(".chart svg").bounding_box()
    box = low.locator(".grip").bounding_box()
    at = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*at)
    page.mouse.down()
    page.mouse.move(at[0] - 0.2 * (axis["width"] - 24), at[1], steps=6)
    page.screenshot(path=screenshots / "dragging.png")
    page.mouse.up()
    value = prompt_of(page)["52"]["inputs"]["sigma_low"]
    assert value == pytest.approx(0.3, abs=0.02)
    assert low.get_attribute("aria-valuenow") == f"{value:.2f}"
    assert "UNSAFE at margin 0.05 for sigma" in shown.inner_text()
    assert share(value, 0.9) in shown.inner_text()
    # The gate was not dragged with the mouse up.
    page.mouse.move(at[0], at[1])
    assert prompt_of(page)["52"]["inputs"]["sigma_low"] == value

    low.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowLeft")
    moved = prompt_of(page)["52"]["inputs"]["sigma_low"]
    assert moved == pytest.approx(value + 0.01 - 0.1)
    page.keyboard.press("End")
    assert prompt_of(page)["52"]["inputs"]["sigma_low"] == pytest.approx(0.89)
    # The widget is not part of what is saved or queued.
    saved = page.evaluate("app.graph.serialize().nodes.find(node => node.id === 52)")
    assert len(saved["widgets_values"]) == 8
    assert "demotion_view" not in prompt_of(page)["52"]["inputs"]


def forecast(rules: list[gate.Rule], density: draws.SigmaDensity) -> gate_cost.Forecast:
    """What the rules do to a run of 1000 steps, on pictures of every route."""
    tiers = {TIER, *(rule.route[1] for rule in rules)}
    pictures = [gate_cost.Picture({tier: tier**2 for tier in tiers})]
    made = gate.Gate(tuple(rules), False, None, "by hand", TIER)
    return gate_cost.forecast(made, density, pictures, gate.Course(1000))


def share(low: float, high: float) -> str:
    """P(rule) of a window under the usual density, as the gate's widget writes it."""
    rule = gate.Rule((TIER, TARGET), (low, high))
    found = forecast([rule], draws.SigmaDensity("logit_normal"))
    return f"{100 * found.shares[0]:.1f} %"


def test_a_gate_follows_its_widgets_and_how_training_draws_sigma(page: Page) -> None:
    load_prompt(
        page,
        {
            "61": by_hand(),
            "62": by_hand(gate=["61", 0], sigma_low=0.1, sigma_high=0.6, span="late"),
            "63": node("DemotionTrainLora", "Train", gate=["62", 0], sigma_density="uniform"),
        },
    )
    shown = view(page, "62")
    # 0.4 of the samples go to the rule before it; of the other 0.4 half are late.
    until(page, lambda: "takes 40.0 % of the samples" in shown.inner_text())
    assert "takes 20.0 % of the samples" in shown.inner_text()
    assert "as in Train" in shown.inner_text()
    page.evaluate(
        """() => {
            const node = app.graph.getNodeById(63);
            const widget = node.widgets.find((widget) => widget.name === "sigma_density");
            widget.value = "logit_normal";
            widget.callback?.(widget.value, app.canvas, node);
        }"""
    )
    until(page, lambda: "logit-normal(0, 1)" in shown.inner_text())
    assert "No map is known here" in shown.inner_text()


def test_shares_and_saving_are_those_of_the_forecast(page: Page, server: Any) -> None:
    generator = random.Random(0)
    spans = ["always", "early:0.37", "late:0.29", "spread:0.07", "spread:0.5"]
    cases = []
    for _ in range(20):
        rules = []
        for _ in range(generator.randint(1, 4)):
            low, high = sorted(generator.sample(range(101), 2))
            rule = {"route": [TIER, generator.choice([32, 48])], "window": [low / 100, high / 100]}
            rules.append({**rule, "span": generator.choice(spans), "rotary": None})
        density = {
            "name": generator.choice(["uniform", "logit_normal", "shifted"]),
            "mean": generator.uniform(-2, 2),
            "std": generator.uniform(0.2, 3),
            "shift": generator.uniform(0.2, 6),
        }
        cases.append([rules, density])
    found = page.evaluate(
        f"""async (cases) => {{
            const gate = await import("/extensions/{server.name}/gate.mjs");
            return cases.map(([rules, density]) => {{
                const shares = gate.probability(rules, density);
                return [shares, rules.map((rule) => gate.spared(rule.route))];
            }});
        }}""",
        cases,
    )
    for (rules, density), (shares, spared) in zip(cases, found, strict=True):
        made = [
            gate.Rule(tuple(rule["route"]), tuple(rule["window"]), rule["span"]) for rule in rules
        ]
        wanted = forecast(made, draws.SigmaDensity(**density))
        assert shares == pytest.approx(wanted.shares, abs=1e-9)
        saving = sum(share * part for share, part in zip(shares, spared))
        assert saving == pytest.approx(wanted.saving, abs=1e-9)


def samples(page: Page, shown: Locator) -> list[str]:
    """What is written below the samples of a training, once all are loaded."""
    pictures = shown.locator("figure img")
    widths = "images => images.map(image => image.naturalWidth)"
    until(page, lambda: all(width == TIER for width in pictures.evaluate_all(widths)))
    return shown.locator("figcaption").all_inner_texts()


def test_a_training_run_is_shown_and_redrawn_after_a_reload(
    page: Page, server: Any, seed: int, screenshots: Path
) -> None:
    load_prompt(
        page,
        {
            **training_set(server),
            "73": node("EmptyImage", "Blank", width=TIER, height=TIER, batch_size=1, color=0),
            "74": node(
                "DemotionTrainingSet",
                "Set of one",
                native_tier=TIER,
                model=["1", 0],
                images=["73", 0],
                vae=["2", 0],
            ),
            # The conditioning that the model knows, without a text encoder.
            "75": node("DemotionTrainingSetToLatents", "Prompt", training_set=["74", 0], arm="src"),
            "77": by_hand(sigma_low=0.0, sigma_high=1.0, span="late"),
            "78": train(
                gate=["77", 0],
                steps=12,
                held_out=2,
                validate_every=4,
                sample_prompt=["75", 1],
                sample_every=6,
                sample_steps=2,
                seed=seed,
            ),
        },
    )
    entry = run_from_page(page, server, 240)
    assert entry["status"]["status_str"] == "success"
    until(page, lambda: page.evaluate("app.nodeOutputs['78']?.demotion_live?.length") == 1)
    shown = view(page, "78")
    until(page, lambda: "6 of 12 steps demoted" in shown.inner_text())
    table = rows(shown)
    assert [row[0] for row in table] == [str(step) for step in range(1, 13)]
    # The last half of the steps lies in the span.
    assert [row[3] for row in table] == [""] * 6 + [f"1 to {TARGET}"] * 6
    assert shown.locator("path.demoted").count() == 6
    assert re.search(r"validation \d\.\d+ after step 12", shown.inner_text())
    assert samples(page, shown) == ["step 0", "step 6", "step 12"]
    page.screenshot(path=screenshots / "trained.png")
    page.wait_for_timeout(1000)
    reload(page)
    until(page, lambda: page.evaluate("document.querySelectorAll('.demotion-view svg').length") > 1)
    again = view(page, "78")
    assert rows(again) == table
    assert samples(page, again) == ["step 0", "step 6", "step 12"]


def test_text_never_becomes_markup(page: Page, screenshots: Path) -> None:
    markup = "<img src=x onerror='window.harmed = true'><b>bold</b>"
    load_prompt(
        page,
        {
            "81": node("DemotionPlotGapMap", markup, name="seen"),
            "82": by_hand(),
            "83": node("DemotionTrainLora", markup, gate=["82", 0], name="seen"),
        },
    )
    document = a_map("unsafe", "safe", title=markup)
    document["headline"] = markup
    document["arms"][0]["gaps"][0]["decide"] = markup
    tell(page, "81", document)
    run = {
        "kind": "training",
        "steps": 4,
        "done": 2,
        "losses": [[1, 0.5], [2, 0.4]],
        "smoothed": [[1, 0.5], [2, 0.45]],
        "validation": [],
        "demoted": [[2, {markup: 1}]],
        "demoted_steps": 1,
        "tokens": 100,
        "saving": 0.1,
        "expected": 0.2,
        "pictures": [{"step": markup, "file": {"filename": markup, "subfolder": "../.."}}],
    }
    tell(page, "83", run)
    for number in ("81", "82", "83"):
        shown = view(page, number)
        page.wait_for_timeout(300)
        assert shown.locator("b, img:not(figure > img)").count() == 0
        page.screenshot(path=screenshots / f"markup_{number}.png")
    assert markup in view(page, "81").inner_text() and markup in view(page, "82").inner_text()
    assert page.evaluate("window.harmed") is None
    source = view(page, "83").locator("figure img").get_attribute("src")
    assert source.startswith(("/view?", "/api/view?")) and "<" not in source
