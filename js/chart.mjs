// Parts of charts. Text is set as text, so that a name or a caption is never markup.

const SVG = "http://www.w3.org/2000/svg";

export const ROUTES = 5;
// Five colours and seven markers, as in the figures.
const MARKERS = [
    (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
    (r) => `M${-r} ${-r}H${r}V${r}H${-r}z`,
    (r) => `M0 ${-1.2 * r}L${1.15 * r} ${0.9 * r}H${-1.15 * r}z`,
    (r) => `M0 ${-1.3 * r}L${1.3 * r} 0L0 ${1.3 * r}L${-1.3 * r} 0z`,
    (r) => `M0 ${1.2 * r}L${1.15 * r} ${-0.9 * r}H${-1.15 * r}z`,
    (r) =>
        `M${-r / 2} ${-r}h${r}v${r / 2}h${r / 2}v${r}h${-r / 2}v${r / 2}h${-r}v${-r / 2}h${-r / 2}v${-r}h${r / 2}z`,
    (r) => `M${-r} ${-r}L${r} ${r}M${-r} ${r}L${r} ${-r}`,
];
const SIGNS = {
    safe: "\u2713",
    unsafe: "\u2717",
    undecided: "?",
    "no signal": "\u2205",
    "not yet": "\u2026",
};
const NO_VERDICT = "\u2013";

/** An HTML element; strings among the children become text. */
export function html(tag, attributes = {}, ...children) {
    return fill(document.createElement(tag), attributes, children);
}

/** An SVG element; strings among the children become text. */
export function svg(tag, attributes = {}, ...children) {
    return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
        element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
}

/** A linear scale from [low, high] to [start, end]. */
export function linear([low, high], [start, end]) {
    return (value) => start + ((value - low) / (high - low || 1)) * (end - start);
}

/** Linear near 0, where verdicts fall, and logarithmic beyond `width`. */
export function stretched([low, high], [start, end], width) {
    const scale = linear([Math.asinh(low / width), Math.asinh(high / width)], [start, end]);
    return (value) => scale(Math.asinh(Math.min(Math.max(value, low), high) / width));
}

/** Round numbers from low to high, at most so many. */
export function ticks(low, high, most) {
    const rough = (high - low || 1) / most;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) {
        found.push(Number((k * step).toPrecision(12)));
    }
    return found;
}

export const routeColor = (index) => `var(--route-${index % ROUTES})`;

/** The marker of a route, by its place among the routes. */
export function marker(index, r = 4.5) {
    const open = index % MARKERS.length === MARKERS.length - 1;
    return svg("path", {
        d: MARKERS[index % MARKERS.length](r),
        fill: routeColor(index),
        stroke: open ? routeColor(index) : "var(--paper)",
        "stroke-width": open ? 2.5 : 1,
    });
}

/** A marker in a line of text. */
export function swatch(index) {
    return svg(
        "svg",
        { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" },
        marker(index),
    );
}

/** "safe", "unsafe", "undecided", or "open" for every reason to have no verdict. */
const verdictClass = (word) => (["safe", "unsafe", "undecided"].includes(word) ? word : "open");

/** A box of a strip: fill, sign, and the word where it fits. A verdict is never a colour alone. */
export function verdictBox(word, x, y, width, height) {
    const sign = SIGNS[word] ?? NO_VERDICT;
    const kind = verdictClass(word);
    const text = width > 7 * word.length + 18 ? `${sign} ${word}` : sign;
    return svg(
        "g",
        {},
        svg("rect", {
            class: `verdict-${kind}`,
            x: x + 0.5,
            y,
            width: Math.max(width - 1, 1),
            height,
            rx: 2,
        }),
        svg(
            "text",
            {
                class: `on-${kind}`,
                x: x + width / 2,
                y: y + height / 2 + 4,
                "text-anchor": "middle",
            },
            width > 9 ? text : "",
        ),
    );
}

/** Where each bin lies across: at its edges, but the endpoint, which has no width, beyond 1. */
export function places(bins) {
    const span = 1 - Math.min(...bins.map(([low]) => low)) || 1;
    return bins.map(([low, high]) =>
        low < high ? [low, high] : [1 + 0.025 * span, 1 + 0.1 * span],
    );
}

/** Labelled ticks below a chart. */
export function sigmaAxis(x, bottom, values) {
    const axis = svg("g", { "aria-hidden": "true" });
    let last = -Infinity;
    for (const [value, name] of values) {
        if (x(value) - last > 30) {
            last = x(value);
            axis.append(svg("text", { x: last, y: bottom + 13, "text-anchor": "middle" }, name));
        }
    }
    return axis;
}

/** A table that only screen readers see. */
export function table(caption, columns, rows) {
    const head = html("tr", {}, ...columns.map((name) => html("th", { scope: "col" }, name)));
    const body = rows.map((row) =>
        html("tr", {}, ...row.map((cell) => html("td", {}, String(cell)))),
    );
    return html(
        "div",
        { class: "for-readers" },
        html(
            "table",
            {},
            html("caption", {}, caption),
            html("thead", {}, head),
            html("tbody", {}, ...body),
        ),
    );
}

/** A number of three digits after the point, or a dash. */
export const number = (value) =>
    Number.isFinite(value) ? (Math.round(value * 1000) / 1000 + 0).toFixed(3) : NO_VERDICT;

export const percent = (value) => `${(100 * value).toFixed(1)} %`;

/** A bin or window in words. */
export function sigmaText([low, high]) {
    const short = (value) => String(Number(value.toFixed(3)));
    return low < high ? `sigma ${short(low)} to ${short(high)}` : `sigma = ${short(high)}`;
}

/** Seconds in words. */
export function duration(seconds) {
    const minutes = Math.floor(Math.round(seconds) / 60);
    const hours = Math.floor(minutes / 60);
    if (hours) {
        return `${hours} h ${minutes % 60} min`;
    }
    return minutes ? `${minutes} min ${Math.round(seconds) % 60} s` : `${Math.round(seconds)} s`;
}

/** The head of a view: a title, what goes with it, and while a run lasts how far it is. */
export function head(title, running, stopped) {
    if (!running) {
        return [html("div", { class: "head" }, html("strong", {}, title))];
    }
    const { done, total, unit, seconds_left: left } = running;
    const far = `${done} of ${total} ${unit}`;
    const now = left === null ? far : `${far}, ${duration(left)} left`;
    const text = stopped ? `stopped at ${far}: queue again to continue` : now;
    const bar = html("progress", { max: Math.max(total, 1), value: done, "aria-label": text });
    bar.classList.toggle("stopped", stopped);
    return [html("div", { class: "head" }, html("strong", {}, title), html("span", {}, text)), bar];
}

/** Arrow keys walk over elements in columns: left and right change the column, up and down the row.
 * One element at a time takes part in the order of tabs. */
export function walk(cells) {
    const all = cells.flat();
    all.forEach((cell, index) => cell.setAttribute("tabindex", index ? -1 : 0));
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    for (const [row, line] of cells.entries()) {
        for (const [column, cell] of line.entries()) {
            cell.addEventListener("keydown", (event) => {
                const [down, across] = steps[event.key] ?? [0, 0];
                const to = cells[row + down]?.[column + across];
                if (event.key in steps) {
                    event.preventDefault();
                    event.stopPropagation();
                }
                if (to && to !== cell) {
                    all.forEach((other) => other.setAttribute("tabindex", other === to ? 0 : -1));
                    to.focus();
                }
            });
        }
    }
}
