// What a gate takes of a run: what demotion/gate_cost.py forecasts for pictures on every route, by the
// formulas of demotion/gate.py and demotion/draws.py, for a chart that follows a dragged edge.

// Steps that spans are laid over, at a constant learning rate.
const STEPS = 1000;
const PARTS = 1e6;

export const LOGIT_NORMAL = { name: "logit_normal", mean: 0, std: 1, shift: 3 };

/** P(X <= x) of a standard normal, by its Taylor series around the density. */
function normalCdf(x) {
    if (Math.abs(x) > 8) {
        return x > 0 ? 1 : 0;
    }
    let [term, sum] = [x, x];
    for (let k = 3; Math.abs(term) > 1e-17; k += 2) {
        term *= (x * x) / k;
        sum += term;
    }
    return 0.5 + (sum * Math.exp((-x * x) / 2)) / Math.sqrt(2 * Math.PI);
}

/** Fraction of a run's samples below sigma. */
export function cdf({ name, mean, std, shift }, sigma) {
    if (!(sigma > 0 && sigma < 1)) {
        return sigma >= 1 ? 1 : 0;
    }
    if (name === "logit_normal") {
        return normalCdf((Math.log(sigma / (1 - sigma)) - mean) / std);
    }
    const factor = name === "shifted" ? shift : 1;
    return sigma / (factor - (factor - 1) * sigma);
}

export function densityText({ name, mean, std, shift }) {
    return {
        logit_normal: `logit-normal(${mean}, ${std})`,
        uniform: "uniform",
        shifted: `shifted by ${shift}`,
    }[name];
}

/** Whether a span such as "late:0.5" holds a step of the course, in whole numbers. */
function spanOpen(span, step) {
    const [kind, text = "1"] = span.split(":");
    const part = Math.round(parseFloat(text) * PARTS);
    if (kind === "late") {
        return step * PARTS >= (PARTS - part) * STEPS;
    }
    if (kind === "spread") {
        return Math.floor(((step + 1) * part) / PARTS) > Math.floor((step * part) / PARTS);
    }
    return step * PARTS < part * STEPS;
}

/** P(rule) of each rule, for pictures on every route: the first rule that fits decides. */
export function probability(rules, density) {
    const edges = [...new Set(rules.flatMap((rule) => rule.window))].sort((a, b) => a - b);
    const shares = rules.map(() => 0);
    for (let index = 0; index + 1 < edges.length; index++) {
        const [low, high] = [edges[index], edges[index + 1]];
        const here = rules
            .map((rule, number) => [rule, number])
            .filter(([{ window }]) => window[0] <= low && high <= window[1]);
        const mass = here.length ? cdf(density, high) - cdf(density, low) : 0;
        for (let step = 0; step < STEPS && mass; step++) {
            const chosen = here.find(([{ span }]) => spanOpen(span, step));
            if (chosen) {
                shares[chosen[1]] += mass / STEPS;
            }
        }
    }
    return shares;
}

/** Share of the tokens that a sample on a route saves: tokens go with the square of the edge. */
export const spared = ([native, target]) => 1 - (target / native) ** 2;

/** The arm of a map that a rule's samples are. */
export const armOf = (map, rule) =>
    map.arms.find(
        (arm) =>
            arm.route &&
            arm.tier === rule.route[1] &&
            (arm.rotary ?? null) === (rule.rotary ?? null),
    );

/** What a map says of a window on its route: {level, text}; level is safe, unsafe or open. */
export function judge(map, rule) {
    const route = `${rule.route[0]} -> ${rule.route[1]}${rule.rotary ? ` ${rule.rotary}` : ""}`;
    if (map.native_tier !== rule.route[0]) {
        return {
            level: "open",
            text: `Not measured: the map's native tier is ${map.native_tier}.`,
        };
    }
    const arm = armOf(map, rule);
    if (!arm) {
        return { level: "open", text: `Not measured: the map has no route ${route}.` };
    }
    const [low, high] = rule.window;
    const parts = { unsafe: [], open: [], safe: [] };
    let covered = low;
    for (const gap of arm.gaps.filter(({ bin }) => bin[0] < high && low < bin[1])) {
        const [from, to] = [Math.max(low, gap.bin[0]), Math.min(high, gap.bin[1])];
        if (from > covered + 1e-9) {
            parts.open.push([[covered, from], "not measured"]);
        }
        covered = to;
        parts[gap.verdict in parts && gap.verdict !== "open" ? gap.verdict : "open"].push([
            [from, to],
            gap.verdict,
        ]);
    }
    if (covered < high - 1e-9) {
        parts.open.push([[covered, high], "not measured"]);
    }
    const told = [];
    if (parts.unsafe.length) {
        told.push(
            `UNSAFE at margin ${map.margin} for ${windows(parts.unsafe)}: training there follows another gradient.`,
        );
    }
    for (const word of new Set(parts.open.map(([, word]) => word))) {
        told.push(
            `${capital(word)} for ${windows(parts.open.filter(([, other]) => other === word))}.`,
        );
    }
    if (parts.safe.length) {
        told.push(`Safe at margin ${map.margin} for ${windows(parts.safe)}.`);
    }
    const level = parts.unsafe.length ? "unsafe" : parts.open.length ? "open" : "safe";
    return { level, text: told.join(" ") };
}

const capital = (word) => word[0].toUpperCase() + word.slice(1);

const short = (value) => String(Number(value.toFixed(3)));

/** Neighbouring stretches of sigma, joined, in words. */
function windows(parts) {
    const joined = [];
    for (const [[low, high]] of parts) {
        const last = joined.at(-1);
        if (last && Math.abs(last[1] - low) < 1e-9) {
            last[1] = high;
        } else {
            joined.push([low, high]);
        }
    }
    return `sigma ${joined.map(([low, high]) => `${short(low)} to ${short(high)}`).join(", ")}`;
}
