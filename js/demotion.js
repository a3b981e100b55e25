// Widgets that show what the pack's nodes measured, chose and trained. They display: what is
// measured lies in files that ComfyUI serves, a gate's window in the node's own widgets, and a
// node's properties name the file that it shows.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { html } from "./chart.mjs";
import { LOGIT_NORMAL } from "./gate.mjs";
import * as gateView from "./gate_view.mjs";
import * as mapView from "./map_view.mjs";
import * as trainingView from "./training_view.mjs";

const VIEWS = {
    DemotionGradientProbe: { kind: "map", height: mapView.HEIGHT, draw: drawMap },
    DemotionPlotGapMap: { kind: "map", height: mapView.HEIGHT, draw: drawMap },
    DemotionGateFromGapMap: { kind: "gate", height: gateView.HEIGHT, draw: drawGate },
    DemotionLoadGate: { kind: "gate", height: gateView.HEIGHT, draw: drawGate },
    DemotionGateByHand: { kind: "by hand", height: gateView.HEIGHT, draw: drawGate },
    DemotionTrainLora: { kind: "training", height: trainingView.HEIGHT, draw: drawTraining },
};
// Nodes whose widgets say how training draws sigma.
const DENSITY_NODES = ["DemotionTrainLora", "DemotionGateCost"];

/** What is shown on a node: {view, element, height, document, stopped}. */
const shown = new WeakMap();
// A new node is so wide; one of a saved workflow as wide as it was.
const WIDTH = 380;

// Each widget carries its style, so that the page around it is left alone.
const STYLE = await (await fetch(new URL("./demotion.css", import.meta.url))).text();

app.registerExtension({
    name: "comfyuidemotion.views",
    nodeCreated(node) {
        if (node.comfyClass?.startsWith("Demotion")) {
            // A display name is English in every language, and comes before the translation.
            for (const input of node.inputs ?? []) {
                delete input.label;
            }
        }
        const view = VIEWS[node.comfyClass];
        if (view) {
            attach(node, view);
        }
        if (view || DENSITY_NODES.includes(node.comfyClass)) {
            for (const widget of node.widgets ?? []) {
                chain(widget, "callback", () => redrawGates());
            }
        }
    },
    setup() {
        api.addEventListener("demotion.live", ({ detail }) => receive(detail));
        for (const event of ["execution_interrupted", "execution_error", "execution_success"]) {
            api.addEventListener(event, ({ detail }) => stop(detail.prompt_id));
        }
    },
});

function chain(object, name, after) {
    const before = object[name];
    object[name] = function (...given) {
        const result = before?.apply(this, given);
        after.apply(this, given);
        return result;
    };
}

function attach(node, view) {
    const element = html("div", { class: "demotion-view" });
    const frame = html("div", { class: "demotion-frame" }, html("style", {}, STYLE), element);
    const state = { view, element, height: view.height, document: null, stopped: false };
    shown.set(node, state);
    const widget = node.addDOMWidget("demotion_view", "demotion_view", frame, {
        serialize: false,
        hideOnZoom: false,
        margin: 6,
        getMinHeight: () => (element.hidden ? 0 : state.height),
    });
    // Neither a saved workflow nor a prompt has it.
    widget.serialize = false;
    element.hidden = view.kind !== "by hand";
    node.setSize([Math.max(node.size[0], WIDTH), node.size[1]]);
    fit(node);
    new ResizeObserver(() => redraw(node)).observe(element);
    element.addEventListener("wheel", (event) => {
        if (!LiteGraph.vueNodesMode) {
            app.canvas.processMouseWheel(event);
        }
    });
    chain(node, "onConfigure", () => load(node));
    chain(node, "onConnectionsChange", () => redrawGates());
    chain(node, "onExecuted", ({ demotion_live: files }) => {
        if (files) {
            remember(node, files[0]);
            load(node);
        }
    });
}

/** Make a node high enough for what it shows. */
function fit(node) {
    const { element, height } = shown.get(node);
    element.style.minHeight = element.hidden ? "0" : `${height}px`;
    // Nodes 2.0 sees to it by itself.
    if (!LiteGraph.vueNodesMode) {
        node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
    }
}

/** Keep the name of a node's file with the workflow, so that it is found after a reload. */
function remember(node, { filename, subfolder }) {
    const before = node.properties.demotion_live;
    if (before?.filename !== filename || before?.subfolder !== subfolder) {
        node.properties.demotion_live = { filename, subfolder };
        app.extensionManager.workflow.activeWorkflow?.changeTracker?.captureCanvasState();
    }
}

/** Where ComfyUI serves a file of its output folder. */
function address({ filename, subfolder }) {
    return `/view?${new URLSearchParams({ filename, subfolder, type: "output" })}`;
}

async function load(node) {
    const file = node.properties.demotion_live;
    if (!file) {
        redraw(node);
        return;
    }
    const answer = await api.fetchApi(address(file), { cache: "no-store" });
    if (answer.ok) {
        const document = await answer.json();
        show(node, document, document.running && !(await isRunning(document.running.prompt)));
    }
}

async function isRunning(prompt) {
    const queue = await (await api.fetchApi("/queue")).json();
    return queue.queue_running.some(([, name]) => name === prompt);
}

/** News of a running node; its id has a part for each subgraph that it lies in. */
function receive({ node: id, file, document }) {
    let [graph, node] = [app.rootGraph, null];
    for (const part of String(id).split(":")) {
        node = graph?.getNodeById(Number(part));
        graph = node?.subgraph;
    }
    if (node && shown.get(node)?.view.kind === document.kind) {
        show(node, document, false);
        remember(node, file);
    }
}

function show(node, document, stopped) {
    const state = shown.get(node);
    if (document.kind !== state.view.kind) {
        return;
    }
    Object.assign(state, { document, stopped: Boolean(stopped) });
    if (state.element.hidden) {
        state.element.hidden = false;
        fit(node);
    }
    redraw(node);
    if (document.kind !== "training") {
        redrawGates();
    }
}

function stop(prompt) {
    for (const node of nodes()) {
        const state = shown.get(node);
        if (state?.document?.running?.prompt === prompt && !state.stopped) {
            state.stopped = true;
            redraw(node);
        }
    }
}

function nodes() {
    return [app.rootGraph, ...app.rootGraph.subgraphs.values()].flatMap((graph) => graph.nodes);
}

function redraw(node) {
    const state = shown.get(node);
    if (state.element.hidden) {
        return;
    }
    // What had the focus has it again after the view is made anew.
    const stops = () => [...state.element.querySelectorAll("[tabindex]")];
    const focused = stops().indexOf(document.activeElement);
    state.view.draw(node, state);
    stops()[focused]?.focus();
    const { scrollHeight, clientHeight } = state.element;
    if (scrollHeight > Math.max(clientHeight, state.height)) {
        state.height = scrollHeight;
        fit(node);
    }
}

let waiting = false;

/** Draw every gate anew, once however many changes there are in one turn. */
function redrawGates() {
    if (!waiting) {
        waiting = true;
        requestAnimationFrame(() => {
            waiting = false;
            nodes()
                .filter((node) => shown.get(node)?.view.draw === drawGate)
                .forEach(redraw);
        });
    }
}

function drawMap(node, { element, document, stopped }) {
    mapView.draw(element, document, stopped);
}

function drawTraining(node, { element, document, stopped }) {
    trainingView.draw(element, document, stopped, (file) => api.apiURL(address(file)));
}

function drawGate(node, { element, view }) {
    const rules = rulesOf(node);
    const byHand = view.kind === "by hand";
    const linked = byHand && ["sigma_low", "sigma_high"].some((name) => isLinked(node, name));
    gateView.draw(element, {
        rules,
        own: byHand && !linked ? rules.length - 1 : -1,
        density: densityFor(node),
        ...mapFor(node, rules),
        move: (edge, sigma) => setValue(node, `sigma_${edge}`, sigma),
    });
}

const widgetOf = (node, name) => node.widgets.find((widget) => widget.name === name);

const valueOf = (node, name) => widgetOf(node, name).value;

const isLinked = (node, name) =>
    node.inputs.some((input) => input.widget?.name === name && input.link !== null);

function setValue(node, name, value) {
    const widget = widgetOf(node, name);
    widget.value = value;
    widget.callback?.(value, app.canvas, node);
    app.canvas.setDirty(true, true);
}

/** The rules of the gate that a node gives, as far as they are known. */
function rulesOf(node) {
    if (node.comfyClass !== "DemotionGateByHand") {
        return shown.get(node)?.document?.rules ?? [];
    }
    const before = upstream(node, "gate");
    const [span, fraction, by] = ["span", "span_fraction", "span_by"].map((name) =>
        valueOf(node, name),
    );
    const rotary = valueOf(node, "rotary");
    const own = {
        route: [valueOf(node, "native_tier"), valueOf(node, "target_tier")],
        window: [valueOf(node, "sigma_low"), valueOf(node, "sigma_high")],
        span: span === "always" ? span : `${span}:${fraction}${by === "steps" ? "" : " by mass"}`,
        rotary: rotary === "none" ? null : rotary,
    };
    return [...(before ? rulesOf(before) : []), own];
}

function upstream(node, name) {
    const slot = node.inputs.findIndex((input) => input.name === name);
    return slot < 0 ? null : node.getInputNode(slot);
}

/** How the training that a gate goes to draws sigma. */
function densityFor(gate) {
    const [seen, todo] = [new Set(), [gate]];
    for (let node = todo.shift(); node; node = todo.shift()) {
        if (DENSITY_NODES.includes(node.comfyClass)) {
            const [name, mean, std, shift] = [
                "sigma_density",
                "density_mean",
                "density_std",
                "density_shift",
            ].map((widget) => valueOf(node, widget));
            if (["logit_normal", "uniform", "shifted"].includes(name)) {
                return { name, mean, std, shift, source: `as in ${node.title}` };
            }
            return {
                ...LOGIT_NORMAL,
                source: `since ${node.title} takes it from the model or its pictures`,
            };
        }
        for (const slot of node.outputs.keys()) {
            todo.push(
                ...(node.getOutputNodes(slot) ?? []).filter(
                    (next) => !seen.has(next) && seen.add(next),
                ),
            );
        }
    }
    return { ...LOGIT_NORMAL, source: "the usual one" };
}

/** A finished map to judge a gate by: its own, that of a gate before it, or another of the graph. */
function mapFor(gate, rules) {
    const native = rules.at(-1)?.route[0];
    const candidates = [gate, upstream(gate, "gate"), ...nodes()];
    for (const node of candidates.filter(Boolean)) {
        const document = shown.get(node)?.document;
        const map = document?.kind === "map" ? document : document?.map;
        if (map && !map.so_far && (native === undefined || map.native_tier === native)) {
            return { map, mapSource: `${node.title}, ${map.headline}` };
        }
    }
    return { map: null, mapSource: "" };
}
