// The windows of a gate as bands over sigma, with what they take of a run and what a map says.

import * as chart from "./chart.mjs";
import { armOf, cdf, densityText, judge, probability, spared } from "./gate.mjs";

const { html, svg } = chart;
const LEFT = 12;
const RIGHT = 12;
const ROW = 20;
const FOOT = 17;
const STEP = 0.01;
const CELLS = 100;
const DENSITY = 56;
const SIGNS = { safe: "\u2713", unsafe: "\u2717", open: "?" };

export const HEIGHT = 220;

/** Draws a gate into an element.
 *
 * rules      [{route, window, span, rotary}] in order
 * own        index of the rule whose window may be dragged, or -1
 * density    how training draws sigma, and `source`, who says so
 * map        a document of kind "map", or null, and `mapSource`, whose it is
 * move       called with "low" or "high" and a sigma when an edge is moved
 */
export function draw(element, gate) {
    const frame = html("div", { class: "chart" });
    element.replaceChildren(
        ...chart.head(gate.own < 0 ? "Gate" : "Gate, drag its edges"),
        frame,
        words(gate),
        table(gate),
    );
    const rows = Math.max(gate.rules.length, 1) + stripsOf(gate).length;
    frame.style.minHeight = `${DENSITY + rows * ROW + FOOT}px`;
    frame.append(plot(gate, frame.clientWidth || 380, frame.clientHeight || 140));
}

const title = ({ route, rotary }) => `${route[0]} -> ${route[1]}${rotary ? ` ${rotary}` : ""}`;

function plot(gate, width, height) {
    const { rules, map } = gate;
    const strips = stripsOf(gate);
    const rows = Math.max(rules.length, 1);
    const bottom = height - FOOT - (rows + strips.length) * ROW;
    const x = chart.linear([0, 1], [LEFT, width - RIGHT]);
    const drawing = svg("svg", {
        viewBox: `0 0 ${width} ${height}`,
        role: "group",
        "aria-label": "Windows of sigma",
    });
    drawing.append(density(gate, x, bottom));
    rules.forEach((rule, row) => drawing.append(band(gate, rule, row, x, bottom)));
    strips.forEach((arm, row) => {
        const top = bottom + (rows + row) * ROW + 1;
        for (const gap of arm.gaps) {
            const [left, right] = [x(gap.bin[0]), x(gap.bin[1])];
            drawing.append(
                chart.verdictBox(gap.verdict, left, top, Math.max(right - left, 4), ROW - 5),
            );
        }
    });
    const marks = [0, 0.2, 0.4, 0.6, 0.8, 1].map((value) => [
        value,
        value ? String(value) : "sigma 0",
    ]);
    drawing.append(chart.sigmaAxis(x, height - FOOT, marks));
    if (gate.own >= 0) {
        for (const edge of ["low", "high"]) {
            drawing.append(handle(gate, edge, x, bottom, drawing, width));
        }
    }
    return drawing;
}

/** The map's routes that the rules are on; all of them where there is no rule. */
function stripsOf({ rules, map }) {
    const routes = map?.arms.filter((arm) => arm.route) ?? [];
    return rules.length
        ? routes.filter((arm) => rules.some((rule) => armOf(map, rule) === arm))
        : routes;
}

/** The density of sigma in training, and in colour what lies in a window. */
function density({ rules, density: drawn }, x, bottom) {
    const cells = Array.from({ length: CELLS }, (_, cell) => {
        const [low, high] = [cell / CELLS, (cell + 1) / CELLS];
        return [low, high, cdf(drawn, high) - cdf(drawn, low)];
    });
    const y = chart.linear([0, Math.max(...cells.map(([, , mass]) => mass))], [bottom - 4, 4]);
    const area = svg("g", { "aria-hidden": "true" });
    const rowOf = ([low, high]) => {
        const at = (low + high) / 2;
        return rules.findIndex(({ window }) => window[0] <= at && at < window[1]);
    };
    // Each stretch of cells under one rule, or none, is one shape.
    for (let start = 0, end = 1; start < CELLS; start = end, end += 1) {
        const row = rowOf(cells[start]);
        while (end < CELLS && rowOf(cells[end]) === row) {
            end += 1;
        }
        const stretch = cells.slice(start, end);
        const [left, right] = [x(stretch[0][0]), x(stretch.at(-1)[1])];
        const top = stretch.map(([low, high, mass]) => `L${x((low + high) / 2)} ${y(mass)}`);
        const d = `M${left} ${bottom - 4}V${y(stretch[0][2])}${top.join("")}H${right}V${bottom - 4}z`;
        const look =
            row < 0 ? { class: "density" } : { fill: chart.routeColor(row), opacity: 0.55 };
        area.append(svg("path", { d, ...look }));
    }
    return area;
}

function band({ own }, rule, row, x, bottom) {
    const [left, right] = rule.window.map(x);
    const top = bottom + row * ROW;
    const text = `${title(rule)}${rule.span === "always" ? "" : `, ${rule.span}`}`;
    const room = right - left > 6 * text.length + 12;
    const spot = room
        ? [(left + right) / 2, "middle"]
        : x(1) - right > left - x(0)
          ? [right + 10, "start"]
          : [left - 10, "end"];
    return svg(
        "g",
        {},
        svg("rect", {
            x: left,
            width: Math.max(right - left, 1),
            y: top + 1,
            height: ROW - 5,
            rx: 3,
            fill: chart.routeColor(row),
            opacity: row === own ? 0.6 : 0.4,
        }),
        svg(
            "text",
            { class: "ink", x: spot[0], y: top + ROW / 2 + 2, "text-anchor": spot[1] },
            text,
        ),
    );
}

/** An edge that pointer and arrow keys move. */
function handle({ rules, own, move }, edge, x, bottom, drawing, width) {
    const [low, high] = rules[own].window;
    const value = edge === "low" ? low : high;
    const [least, most] = edge === "low" ? [0, high - STEP] : [low + STEP, 1];
    const top = bottom + own * ROW;
    const grip = svg(
        "g",
        {
            class: "edge",
            role: "slider",
            tabindex: 0,
            "data-edge": edge,
            "aria-label": `${edge === "low" ? "lower" : "upper"} edge of the window, sigma`,
            "aria-valuemin": least.toFixed(2),
            "aria-valuemax": most.toFixed(2),
            "aria-valuenow": value.toFixed(2),
            transform: `translate(${x(value)} 0)`,
        },
        svg("line", { class: "axis", y1: 4, y2: top + ROW - 4, "stroke-dasharray": "2 2" }),
        svg("rect", { x: -9, width: 18, y: 0, height: top + ROW, fill: "transparent" }),
        svg("rect", { class: "grip", x: -4, width: 8, y: top - 2, height: ROW, rx: 3 }),
        svg("rect", { class: "ring", x: -7, width: 14, y: top - 5, height: ROW + 6, rx: 5 }),
    );
    const set = (sigma) => {
        const kept = Math.round(Math.min(Math.max(sigma, least), most) / STEP) * STEP;
        move(edge, Number(kept.toFixed(2)));
    };
    grip.addEventListener("pointerdown", (down) => {
        down.preventDefault();
        down.stopPropagation();
        grip.focus();
        // The drawing is made anew while the edge moves; the element around it stays.
        const stays = drawing.closest(".demotion-view");
        const box = drawing.getBoundingClientRect();
        const drag = (event) =>
            set((((event.clientX - box.left) / box.width) * width - LEFT) / (width - LEFT - RIGHT));
        const stop = () => stays.removeEventListener("pointermove", drag);
        stays.setPointerCapture(down.pointerId);
        stays.addEventListener("pointermove", drag);
        stays.addEventListener("lostpointercapture", stop, { once: true });
    });
    grip.addEventListener("keydown", (event) => {
        const by = event.shiftKey ? 10 * STEP : STEP;
        const to = {
            ArrowLeft: value - by,
            ArrowDown: value - by,
            ArrowRight: value + by,
            ArrowUp: value + by,
            Home: least,
            End: most,
        }[event.key];
        if (to !== undefined) {
            event.preventDefault();
            event.stopPropagation();
            set(to);
        }
    });
    return grip;
}

/** P(rule), saving and verdict in words. */
function words({ rules, density: drawn, map, mapSource }) {
    const lines = html("div", { class: "readout", "aria-live": "polite" });
    const say = (text, look = "") => lines.append(html("div", { class: look }, text));
    const shares = probability(rules, drawn);
    const saved = shares.map((share, index) => share * spared(rules[index].route));
    const takes = (share, saving) =>
        `takes ${chart.percent(share)} of the samples, saves ${chart.percent(saving)} of the tokens.`;
    for (const [index, rule] of rules.entries()) {
        const name = rules.length > 1 ? `Rule ${index + 1}, ${title(rule)},` : "P(rule):";
        say(`${name} ${takes(shares[index], saved[index])}`);
        if (map) {
            const { level, text } = judge(map, rule);
            say(`${SIGNS[level]} ${text}`, level === "unsafe" ? "warning" : "");
        }
    }
    const total = (values) => values.reduce((sum, value) => sum + value, 0);
    if (rules.length > 1) {
        say(`The gate ${takes(total(shares), total(saved))}`);
    } else if (!rules.length) {
        say("No rule: every step trains native.");
    }
    if (!map) {
        say("No map is known here: nothing says that a window is safe on this model.", "faint");
    }
    const basis = map ? ` Map: ${mapSource}.` : "";
    say(`Sigma drawn ${densityText(drawn)}, ${drawn.source}.${basis}`, "faint");
    return lines;
}

function table({ rules, density: drawn, map }) {
    const shares = probability(rules, drawn);
    const rows = rules.map((rule, index) => [
        title(rule),
        chart.sigmaText(rule.window),
        rule.span,
        chart.percent(shares[index]),
        chart.percent(shares[index] * spared(rule.route)),
        map ? judge(map, rule).text : "no map",
    ]);
    return chart.table(
        "Rules of the gate",
        ["route", "window", "span", "P(rule)", "tokens saved", "verdict"],
        rows,
    );
}
