// A gap map: distance over sigma for every route, with intervals, margin and verdicts.

import * as chart from "./chart.mjs";

const { html, svg } = chart;
const LEFT = 52;
const RIGHT = 12;
const ROW = 17;
const FOOT = 17;
const PLOT = 130;
// Those that come first keep their number where there is no room for all.
const TICKS = [0, 2, 1, 0.5, -0.5, 0.2, -0.2, 0.1, -0.1, 0.05, -0.05, 0.02, -0.02];

export const HEIGHT = 320;

/** Draws a document of kind "map" into an element. */
export function draw(element, map, stopped = false) {
    const routes = map.arms.filter((arm) => arm.route);
    const others = map.arms.filter((arm) => !arm.route);
    const readout = html("div", { class: "readout", "aria-live": "polite" });
    const frame = html("div", { class: "chart" });
    const legend = routes.map((arm, index) => html("span", {}, chart.swatch(index), arm.title));
    if (others.length) {
        legend.push(
            html(
                "span",
                { class: "faint" },
                `dashed: ${others.map((arm) => arm.title).join(", ")}`,
            ),
        );
    }
    const said = map.running?.said ? map.running.said.split("\n") : [];
    element.replaceChildren(
        ...chart.head(title(map), map.running, stopped),
        ...said.map((line) => html("div", { class: "faint" }, line)),
        frame,
        html("div", { class: "legend" }, ...legend),
        readout,
        table(map),
    );
    readout.append(html("span", { class: "faint" }, hint(map)));
    frame.style.minHeight = `${PLOT + routes.length * ROW + FOOT}px`;
    frame.append(
        plot(map, routes, others, frame.clientWidth || 380, frame.clientHeight || 210, readout),
    );
}

const title = (map) => (map.so_far ? "Gap map so far" : "Gap map");

const hint = (map) => `${map.headline}. Point at a mark, or use Tab and the arrow keys.`;

/** What a mark says. */
export function sentence(map, arm, gap) {
    const where = `${arm.title}, ${chart.sigmaText(gap.bin)}`;
    if (gap.d === null) {
        return `${where}: ${gap.images ? gap.verdict : "nothing measured yet"}`;
    }
    const [low, high] = gap.interval.map(chart.number);
    const band = gap.band.map(chart.number);
    const wide = gap.band[0] === null ? "" : `, all bins at once ${band[0]} to ${band[1]}`;
    const judged = ["safe", "unsafe"].includes(gap.verdict)
        ? `${gap.verdict} at margin ${map.margin}${gap.look ? `, by planned look ${gap.look}` : ""}`
        : gap.verdict;
    const tokens = `${Math.round(gap.tokens)} of ${Math.round(gap.src_tokens)} tokens`;
    const decide = gap.decide ? `; ${gap.decide}` : "";
    return `${where}: distance ${chart.number(gap.d)}, 95 % ${low} to ${high}${wide}; ${judged}; ${gap.images} images; ${tokens}${decide}`;
}

function plot(map, routes, others, width, height, readout) {
    const shown = routes.length ? routes : map.arms;
    const bins = map.arms[0]?.gaps.map((gap) => gap.bin) ?? [];
    const across = chart.places(bins);
    const first = Math.min(...across.map(([low]) => low));
    const last = Math.max(...across.map(([, high]) => high));
    const bottom = height - FOOT - routes.length * ROW - 4;
    const x = chart.linear([first, last], [LEFT, width - RIGHT]);
    const range = distances(map, shown);
    const y = chart.stretched(range, [bottom, 8], 2 * map.margin);
    const drawing = svg("svg", {
        viewBox: `0 0 ${width} ${height}`,
        role: "group",
        "aria-label": `${title(map)}: gradient distance over sigma, ${map.headline}`,
    });
    const ground = svg("g", { "aria-hidden": "true" });
    const numbered = [];
    for (const value of TICKS.filter((tick) => tick > range[0] && tick < range[1])) {
        ground.append(
            svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        );
        if (numbered.every((other) => Math.abs(other - y(value)) > 12)) {
            numbered.push(y(value));
            ground.append(
                svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, String(value)),
            );
        }
    }
    ground.append(
        svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(0), y2: y(0) }),
        svg("line", {
            class: "margin",
            x1: LEFT,
            x2: width - RIGHT,
            y1: y(map.margin),
            y2: y(map.margin),
        }),
        svg(
            "text",
            { class: "ink halo", x: LEFT + 4, y: y(map.margin) - 4 },
            `margin ${map.margin}`,
        ),
        svg(
            "text",
            {
                x: 10,
                y: (8 + bottom) / 2,
                "text-anchor": "middle",
                transform: `rotate(-90 10 ${(8 + bottom) / 2})`,
            },
            "distance",
        ),
    );
    drawing.append(ground);
    for (const arm of others) {
        drawing.append(
            line(arm, across, x, y, {
                stroke: "var(--faint)",
                "stroke-dasharray": "4 3",
                opacity: 0.7,
            }),
        );
    }
    const marks = shown.map((arm, index) => {
        const shift = 0.5 * ((index + 0.5) / shown.length - 0.5);
        drawing.append(line(arm, across, x, y, { stroke: chart.routeColor(index) }, shift));
        return arm.gaps.map((gap, column) => {
            const mark = point(map, arm, gap, index, middle(across[column], shift), x, y);
            drawing.append(mark);
            return mark;
        });
    });
    routes.forEach((arm, row) => {
        const top = bottom + 6 + row * ROW;
        drawing.append(
            svg(
                "g",
                {
                    transform: `translate(${LEFT - 14} ${top + ROW / 2 - 1})`,
                    "aria-hidden": "true",
                },
                chart.marker(row),
            ),
        );
        for (const [column, gap] of arm.gaps.entries()) {
            const [left, right] = across[column].map(x);
            drawing.append(chart.verdictBox(gap.verdict, left, top, right - left, ROW - 3));
        }
    });
    const edges = [...new Set(bins.filter(([low, high]) => low < high).flat())].sort(
        (a, b) => a - b,
    );
    const names = edges.map((edge) => [edge, String(Number(edge.toFixed(3)))]);
    const end = bins.findIndex(([low, high]) => low === high);
    const labels = end < 0 ? names : [...names.slice(0, -1), [middle(across[end], 0), "= 1"]];
    drawing.append(
        chart.sigmaAxis(x, height - FOOT, labels),
        svg("text", { x: 2, y: height - FOOT + 13, "aria-hidden": "true" }, "sigma"),
    );
    chart.walk(marks);
    follow(drawing, marks.flat(), readout, hint(map));
    return drawing;
}

/** Lowest and highest distance to show. */
function distances(map, arms) {
    const values = [-map.margin, 2 * map.margin];
    for (const gap of arms.flatMap((arm) => arm.gaps)) {
        if (gap.verdict !== "no signal") {
            values.push(gap.d, ...gap.interval, ...gap.band);
        }
    }
    const kept = values
        .filter((value) => value !== null)
        .map((value) => Math.min(Math.max(value, -0.5), 2));
    return [1.1 * Math.min(...kept), 1.12 * Math.max(...kept)];
}

const middle = ([low, high], shift) => (low + high) / 2 + shift * (high - low);

const seen = (gap) => gap.d !== null && gap.verdict !== "no signal";

/** The points of an arm, joined where neighbouring bins have one. */
function line(arm, across, x, y, style, shift = 0) {
    let path = "";
    let pen = false;
    for (const [column, gap] of arm.gaps.entries()) {
        const joined = pen && Math.abs(across[column - 1][1] - across[column][0]) < 1e-9;
        if (seen(gap)) {
            path += `${joined ? "L" : "M"}${x(middle(across[column], shift))} ${y(gap.d)}`;
        }
        pen = seen(gap);
    }
    return svg("path", { d: path || "M0 0", fill: "none", "stroke-width": 1.5, ...style });
}

/** One mark: band, interval, marker. What has no distance yet is a mark on the axis. */
function point(map, arm, gap, index, sigma, x, y) {
    const color = chart.routeColor(index);
    const at = x(sigma);
    const text = sentence(map, arm, gap);
    const mark = svg("g", {
        class: "mark",
        role: "img",
        "aria-label": text,
        "data-arm": arm.name,
        "data-bin": gap.bin.join("-"),
    });
    if (!seen(gap)) {
        mark.append(
            svg("circle", {
                cx: at,
                cy: y(0),
                r: 3,
                fill: "var(--paper)",
                stroke: color,
                "stroke-dasharray": "2 2",
            }),
            svg("circle", { class: "ring", cx: at, cy: y(0), r: 8 }),
        );
        return mark;
    }
    if (gap.band[0] !== null) {
        const [low, high] = gap.band.map(y);
        mark.append(
            svg("rect", {
                x: at - 6,
                width: 12,
                y: high,
                height: Math.max(low - high, 1),
                fill: color,
                opacity: 0.22,
                rx: 2,
            }),
        );
    }
    if (gap.interval[0] !== null) {
        const [low, high] = gap.interval.map(y);
        mark.append(
            svg("path", {
                d: `M${at} ${low}V${high}M${at - 4} ${low}h8M${at - 4} ${high}h8`,
                stroke: color,
                "stroke-width": 2,
                fill: "none",
            }),
        );
    }
    mark.append(
        svg(
            "g",
            { transform: `translate(${at} ${y(gap.d)})` },
            chart.marker(index),
            svg("circle", { class: "ring", r: 9 }),
        ),
    );
    return mark;
}

/** The nearest mark under the pointer, or the focused one, is told below the chart. */
function follow(drawing, marks, readout, otherwise) {
    const tell = (mark) => {
        marks.forEach((other) => other.classList.toggle("hover", other === mark));
        readout.textContent = mark?.getAttribute("aria-label") ?? otherwise;
        readout.classList.toggle("faint", !mark);
    };
    const distance = (mark, event) => {
        const box = mark.getBoundingClientRect();
        const [dx, dy] = [
            event.clientX - (box.left + box.right) / 2,
            event.clientY - (box.top + box.bottom) / 2,
        ];
        return dx * dx + 0.2 * dy * dy;
    };
    drawing.addEventListener("pointermove", (event) => {
        const near = marks.map((mark) => [distance(mark, event), mark]).sort((a, b) => a[0] - b[0]);
        tell(near[0]?.[1]);
    });
    drawing.addEventListener("pointerleave", () =>
        tell(marks.find((mark) => mark === document.activeElement)),
    );
    for (const mark of marks) {
        mark.addEventListener("focus", () => tell(mark));
        mark.addEventListener("blur", () => tell(undefined));
    }
}

function table(map) {
    const rows = map.arms.flatMap((arm) =>
        arm.gaps.map((gap) => [
            arm.title,
            chart.sigmaText(gap.bin),
            chart.number(gap.d),
            gap.interval.map(chart.number).join(" to "),
            gap.band.map(chart.number).join(" to "),
            arm.route ? gap.verdict : "",
            gap.images,
            gap.tokens === null ? "" : Math.round(gap.tokens),
        ]),
    );
    const columns = [
        "arm",
        "sigma",
        "distance",
        "95 %",
        "all bins at once",
        "verdict",
        "images",
        "tokens",
    ];
    return chart.table(`${title(map)}, ${map.headline}`, columns, rows);
}
