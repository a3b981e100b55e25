// A training run: loss over steps, validation, demoted steps, samples, saving.

import * as chart from "./chart.mjs";

const { html, svg } = chart;
const LEFT = 46;
const RIGHT = 12;
const FOOT = 17;
const MARKS = 12;
const PLOT = 150;

export const HEIGHT = 260;

/** Draws a document of kind "training" into an element; `address` turns a file into a URL. */
export function draw(element, run, stopped, address) {
    const frame = html("div", { class: "chart" });
    const last = run.smoothed.at(-1)?.[1];
    const told = [
        last === undefined
            ? "no step yet"
            : `loss ${chart.number(last)}, the mean of the last steps`,
        ...run.validation
            .slice(-1)
            .map(([step, loss]) => `validation ${chart.number(loss)} after step ${step}`),
        `${run.demoted_steps} of ${run.done} steps demoted, ${run.tokens.toLocaleString("en")} tokens processed, ` +
            `${chart.percent(run.saving)} saved (${chart.percent(run.expected)} expected in all)`,
    ];
    const readout = html("div", { class: "readout faint", "aria-live": "polite" }, told.join("; "));
    const parts = [frame, legend(run), readout];
    if (run.pictures.length) {
        parts.push(
            html(
                "div",
                { class: "pictures", tabindex: 0, "aria-label": "samples" },
                ...run.pictures.map((picture) => sample(picture, address)),
            ),
        );
    }
    element.replaceChildren(...chart.head("Training", run.running, stopped), ...parts, table(run));
    const strip = element.querySelector(".pictures");
    strip?.scrollTo({ left: strip.scrollWidth });
    frame.style.minHeight = `${PLOT}px`;
    frame.append(
        plot(run, tiers(run), frame.clientWidth || 380, frame.clientHeight || 160, readout),
    );
}

/** Target tiers in descending order: the place of each is its colour. */
const tiers = (run) =>
    [...new Set(run.demoted.flatMap(([, counts]) => Object.keys(counts).map(Number)))].sort(
        (a, b) => b - a,
    );

function legend(run) {
    const stroke = (attributes) =>
        svg(
            "svg",
            { width: 18, height: 10, "aria-hidden": "true" },
            svg("path", { d: "M0 5H18", fill: "none", stroke: "var(--route-0)", ...attributes }),
        );
    const parts = [
        html("span", {}, stroke({ opacity: 0.4 }), "loss"),
        html("span", {}, stroke({ "stroke-width": 2.5 }), "mean of the last steps"),
    ];
    if (run.validation.length) {
        parts.push(html("span", {}, chart.swatch(2), "validation"));
    }
    for (const [index, tier] of tiers(run).entries()) {
        const mark = svg(
            "svg",
            { width: 8, height: 12, "aria-hidden": "true" },
            svg("path", {
                d: `M4 ${3 * index}V12`,
                stroke: chart.routeColor(index + 1),
                "stroke-width": 2,
            }),
        );
        parts.push(html("span", {}, mark, `demoted to ${tier}`));
    }
    return html("div", { class: "legend" }, ...parts);
}

function sample({ step, file }, address) {
    const name = `sample after step ${step}`;
    return html(
        "figure",
        {},
        html("img", { src: address(file), alt: name, title: name }),
        html("figcaption", { class: "faint" }, `step ${step}`),
    );
}

function plot(run, targets, width, height, readout) {
    const bottom = height - FOOT - MARKS;
    const x = chart.linear([0, Math.max(run.steps, 1)], [LEFT, width - RIGHT]);
    const [low, high] = range(run);
    const place = chart.linear([low, high], [bottom, 8]);
    const y = (loss) => place(Math.min(Math.max(loss, low), high));
    const drawing = svg("svg", {
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        tabindex: 0,
        "aria-label": `Loss over ${run.done} of ${run.steps} steps. ${readout.textContent}`,
    });
    for (const value of chart.ticks(low, high, 4)) {
        drawing.append(
            svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
            svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, String(value)),
        );
    }
    const steps = chart.ticks(0, run.steps, 5).filter(Number.isInteger);
    drawing.append(
        chart.sigmaAxis(
            x,
            height - FOOT,
            steps.map((step) => [step, step ? String(step) : "step 0"]),
        ),
    );
    const path = (points) =>
        points
            .map(([step, value], index) => `${index ? "L" : "M"}${x(step)} ${y(value)}`)
            .join("") || "M0 0";
    drawing.append(
        svg("path", { d: path(run.losses), fill: "none", stroke: "var(--route-0)", opacity: 0.35 }),
        svg("path", {
            d: path(run.smoothed),
            fill: "none",
            stroke: "var(--route-0)",
            "stroke-width": 2.2,
        }),
        svg("path", {
            d: path(run.validation),
            fill: "none",
            stroke: "var(--route-2)",
            "stroke-width": 1.4,
        }),
    );
    for (const [step, loss] of run.validation) {
        drawing.append(
            svg("g", { transform: `translate(${x(step)} ${y(loss)})` }, chart.marker(2, 4)),
        );
    }
    for (const [step, counts] of run.demoted) {
        for (const tier of Object.keys(counts).map(Number)) {
            const index = targets.indexOf(tier);
            const top = bottom + 2 + Math.min(3 * index, MARKS - 4);
            drawing.append(
                svg("path", {
                    class: "demoted",
                    d: `M${x(step)} ${top}V${bottom + MARKS}`,
                    stroke: chart.routeColor(index + 1),
                    "stroke-width": 1.5,
                }),
            );
        }
    }
    follow(drawing, run, x, y, width, bottom, readout);
    return drawing;
}

/** Losses shown: a single peak does not flatten the rest. */
function range(run) {
    const losses = run.losses.map(([, loss]) => loss).sort((a, b) => a - b);
    const most = losses[Math.floor(0.98 * (losses.length - 1))] ?? 1;
    const shown = [...run.smoothed, ...run.validation].map(([, value]) => value);
    const values = [losses[0] ?? 0, most, ...shown].filter((value) => value !== null);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = 0.08 * (high - low || Math.abs(high) || 1);
    return [low - room, high + room];
}

/** The step under the pointer, or that the arrow keys chose, is told below the chart. */
function follow(drawing, run, x, y, width, bottom, readout) {
    if (!run.losses.length) {
        return;
    }
    const summary = readout.textContent;
    const cursor = svg(
        "g",
        { visibility: "hidden" },
        svg("line", { class: "axis", y1: 8, y2: bottom }),
        svg("circle", { r: 4, fill: "var(--route-0)" }),
    );
    drawing.append(cursor);
    // The drawing is made anew when a run goes on and when what is told takes another height; the
    // element around it stays, and keeps the chosen step.
    const { dataset } = readout.parentElement;
    const chosen = () => run.losses.findIndex(([step]) => String(step) === dataset.step);
    const tell = (index) => {
        const at = Math.min(Math.max(index, 0), run.losses.length - 1);
        const [[step, loss], [, mean]] = [run.losses[at], run.smoothed[at]];
        dataset.step = step;
        const counts = run.demoted.find(([other]) => other === step)?.[1] ?? {};
        const demoted = Object.entries(counts).map(
            ([tier, count]) => `, ${count} demoted to ${tier}`,
        );
        readout.textContent = `step ${step}: loss ${chart.number(loss)}, mean of the last ${chart.number(mean)}${demoted.join("")}`;
        cursor.setAttribute("visibility", "visible");
        cursor.setAttribute("transform", `translate(${x(step)} 0)`);
        cursor.lastChild.setAttribute("cy", y(mean));
    };
    const hide = () => {
        delete dataset.step;
        readout.textContent = summary;
        cursor.setAttribute("visibility", "hidden");
    };
    drawing.addEventListener("pointermove", (event) => {
        const box = drawing.getBoundingClientRect();
        const place = ((event.clientX - box.left) / box.width) * width;
        const away = run.losses.map(([step]) => Math.abs(x(step) - place));
        tell(away.indexOf(Math.min(...away)));
    });
    drawing.addEventListener("pointerleave", hide);
    // A drawing that is taken away to be made anew loses the focus as well, but chooses nothing else.
    drawing.addEventListener("blur", () => queueMicrotask(() => drawing.isConnected && hide()));
    drawing.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
        if (by) {
            event.preventDefault();
            event.stopPropagation();
            tell((chosen() < 0 ? run.losses.length - 1 : chosen()) + by);
        }
    });
    if (chosen() >= 0) {
        tell(chosen());
    }
}

function table(run) {
    const demoted = new Map(run.demoted);
    const rows = run.losses.map(([step, loss], index) => [
        step,
        chart.number(loss),
        chart.number(run.smoothed[index][1]),
        Object.entries(demoted.get(step) ?? {})
            .map(([tier, count]) => `${count} to ${tier}`)
            .join(", "),
    ]);
    return chart.table("Loss by step", ["step", "loss", "mean of the last steps", "demoted"], rows);
}
