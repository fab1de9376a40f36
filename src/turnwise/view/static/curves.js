// Curves of the metrics, runs overlaid; the reward with its quantiles.
import uPlot from "uplot";
import { html, lineDash, LineSample, number, Problem, runColor, useEffect, useLoaded, useRef } from "./ui.js";
import * as data from "./data.js";
import { NO_FILTERS } from "./address.js";
import { useColumns } from "./columns.js";

const FIRST = ["reward/mean", "pass_rate", "turns/mean", "tool_calls/mean", "tool_errors/mean", "kl", "entropy", "loss", "grad_norm", "staleness/mean", "ratio/max_deviation", "failed"];
const STOPS = /^stop\//, SECONDS = /^seconds\//;
/** Charts of several metrics, which are shown if a single run is. A metric that is always 0 is left out. */
const TOGETHER = [
  { name: "stop reasons", unit: "share", meaning: "Why conversations ended (stop/…).", metrics: STOPS },
  { name: "time of a step", unit: "s", meaning: "seconds/…: waiting is the part of rollout in which the trainer waited.", metrics: /^seconds\/(step|rollout|waiting|train|checkpoint)$/ },
  { name: "time of a conversation", unit: "s", meaning: "Mean time in the engine, in the environment with its tools, and waiting for others.", metrics: /^seconds\/conversation\// },
];
const QUANTILES = ["reward/q90", "reward/q10", "reward/median"];

/** The least height of a chart, by unit: rounding errors of a KL divergence of 0 do not fill it. */
const LEAST_HEIGHT = { nats: 1e-3, ratio: 1e-3, share: 1e-2 };
const HEIGHT = 190;
/** What the curves are drawn over: its name, and the value of each line of the metrics. */
const AXES = {
  step: ["step", (table) => table.step],
  time: ["hours of training (sum of seconds/step)", (table) => cumulative(table["seconds/step"], 1 / 3600)],
  tokens: ["sampled tokens (sum of tokens/sampled)", (table) => cumulative(table["tokens/sampled"], 1)],
};

function cumulative(values, factor) {
  let sum = 0;
  return values?.map((value) => { sum += (typeof value === "number" ? value : 0) * factor; return sum; });
}

/** Distances of marks on the axis of steps. */
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000];
/** A text of the documentation without its marks: backticks and links. */
const plain = (text) => text?.replace(/\[([^\]]+)\]\([^)]*\)/g, "$1").replaceAll("`", "");

/** An exponential moving average, without the bias of its beginning; gaps stay gaps. */
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (typeof value !== "number") return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

/** Quantiles of the rewards of each step: {step: [10 %, 50 %, 90 %]}. */
export function rewardQuantiles(columns) {
  const steps = new Map();
  columns.step.forEach((step, place) => {
    const reward = columns.reward[place];
    if (step === null || reward === null || columns.agent?.[place]) return; // as reward/mean: without agents of environments
    if (!steps.has(step)) steps.set(step, []);
    steps.get(step).push(reward);
  });
  const result = new Map();
  for (const [step, rewards] of steps) {
    rewards.sort((a, b) => a - b);
    const at = (share) => rewards[Math.round(share * (rewards.length - 1))];
    result.set(step, [at(0.1), at(0.5), at(0.9)]);
  }
  return result;
}

/** The quantiles 90 %, 10 % and 50 % of the reward of each step of `x`, or null. */
function quantilesOf(table, x, columns) {
  if (table["reward/q10"]) {
    return QUANTILES.map((name) => { const values = new Map(table.step.map((step, place) => [step, table[name][place]])); return x.map((step) => values.get(step) ?? null); });
  }
  if (!columns) return null;
  const of = rewardQuantiles(columns);
  return [2, 0, 1].map((place) => x.map((step) => of.get(step)?.[place] ?? null));
}

/** Shows the last value of each line in the legend: while the pointer is elsewhere. */
function latest(plot) {
  const lastOf = (values) => { const place = values.findLastIndex((value) => typeof value === "number"); return place < 0 ? null : place; };
  if (plot.data[0].length) plot.setLegend({ idxs: plot.data.map(lastOf) });
}

/** Whether a line has so few values that each is marked with a point: a line of one value is visible only by its point. */
const fewValues = (plot, place) => plot.data[place].reduce((count, value) => count + (typeof value === "number"), 0) < 30;

/** The limits of the axis of values: all values, and at least the height below which differences mean nothing. */
export function heightOf(low, high, least) {
  if (low === null || high === null) return [0, 1];
  if (high - low < least) {
    const start = low >= 0 && low < least ? 0 : (low + high - least) / 2;
    return [start, start + least];
  }
  return low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : uPlot.rangeNum(low, high, 0.1, true);
}

/** The place in `x`, and the line, whose point is nearest to the pointer; null where there is no point of a run. */
function nearest(plot, series) {
  const { left, top } = plot.cursor;
  let best = null;
  series.forEach((item, n) => {
    if (!item.steps) return;
    plot.data[n + 1].forEach((value, place) => {
      if (typeof value !== "number") return;
      const distance = Math.hypot(plot.valToPos(plot.data[0][place], "x") - left, (plot.valToPos(value, "y") - top) / 4); // the step counts most
      if (!best || distance < best.distance) best = { distance, item, step: item.steps[place] };
    });
  });
  return best;
}

/** Vertical lines at the warnings of the run. */
function drawMarks(plot, marks, color) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = color; ctx.fillStyle = color; ctx.lineWidth = devicePixelRatio; ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const { x } of marks) {
    const at = Math.round(plot.valToPos(x, "x", true)), size = 5 * devicePixelRatio;
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
    ctx.beginPath(); ctx.moveTo(at - size, bbox.top); ctx.lineTo(at + size, bbox.top); ctx.lineTo(at, bbox.top + 1.6 * size); ctx.fill();
  }
  ctx.restore();
}

/** Whether a part of the curves was chosen with the pointer. */
const zoomed = (plot) => { const x = plot.data[0], { min, max } = plot.scales.x; return x.length > 1 && typeof min === "number" && typeof max === "number" && (min > x[0] || max < x.at(-1)); };

/** A chart. A line is {label, stroke, dash, values}; with `steps`, a click on it calls `onStep` with the line and its step. */
export function Plot({ title, meaning, x, xLabel = "step", series, bands, marks = [], dark, unit, log: wanted, onStep }) {
  const log = wanted && series.every((item) => item.values.every((value) => typeof value !== "number" || value > 0));
  const ref = useRef(), plot = useRef(), latestProps = useRef();
  latestProps.current = { series, onStep, marks };
  const drawn = [x, ...series.map((item) => item.values)];
  const signature = JSON.stringify([title, xLabel, log, series.map((item) => [item.label, item.stroke, item.dash]), dark]);
  useEffect(() => {
    const element = ref.current;
    if (!element) return undefined; // already removed
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const text = color("--muted"), line = color("--line"), bad = color("--bad");
    const axis = { stroke: text, grid: { stroke: line, width: 0.5 }, ticks: { stroke: line, width: 0.5 } };
    const y = log ? { distr: 3 } : { range: (_, low, high) => heightOf(low, high, LEAST_HEIGHT[unit] ?? 0) };
    const options = {
      width: element.clientWidth, height: HEIGHT, scales: { x: { time: false }, y },
      axes: [{ ...axis, ...(xLabel === "step" ? { incrs: WHOLE } : { values: (_, ticks) => ticks.map(number) }) }, { ...axis, size: (_, texts) => Math.max(44, 18 + 8 * Math.max(0, ...(texts ?? []).map((text) => text?.length ?? 0))), values: (_, ticks) => ticks.map((tick) => (tick === null ? null : number(tick))) }], cursor: { sync: { key: xLabel } },
      series: [{ label: xLabel.split(" (")[0], value: (_, value) => number(value) }, ...series.map(({ label, stroke, dash, width = 1.5 }) => ({ label, stroke, dash, width, spanGaps: true, points: { show: fewValues, size: 4 }, value: (_, value) => number(value) }))],
      bands, legend: { markers: { dash: (self, place) => { const [first] = self.series[place].dash ?? []; return first ? (first <= 2 ? "dotted" : "dashed") : "solid"; } } },
      hooks: {
        setCursor: [(self) => { if (self.cursor.idx === null || self.cursor.idx === undefined) latest(self); }],
        draw: [(self) => drawMarks(self, latestProps.current.marks, bad)],
      },
    };
    const chart = new uPlot(options, drawn, element);
    plot.current = chart;
    let pressed = null;
    chart.over.addEventListener("mousedown", (event) => { pressed = [event.clientX, event.clientY]; });
    chart.over.addEventListener("click", (event) => { // not the end of a drag, which chooses a part of the curves
      if (!pressed || Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]) > 4 || !latestProps.current.onStep) return;
      const found = nearest(chart, latestProps.current.series);
      if (found) latestProps.current.onStep(found.item, found.step, event);
    });
    chart.over.classList.toggle("opens", series.some((item) => item.steps));
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    return () => { observer.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [signature]);
  useEffect(() => {
    if (!plot.current) return;
    if (zoomed(plot.current)) { plot.current.setData(drawn, false); plot.current.redraw(); } // the chosen part stays in view
    else plot.current.setData(drawn);
    latest(plot.current);
  });
  const last = series.filter((item) => !item.derived).map((item) => `${item.label} ${number(item.values.findLast((value) => typeof value === "number") ?? null)}`).join(", ");
  return html`<section class="chart" aria-label=${title}>
    <h2>${title} <span class="muted">${unit}</span>${wanted && !log && html` <span class="muted">linear: there are values of 0 or less</span>`}</h2>
    <p>${meaning}</p>
    <div ref=${ref} role="img" aria-label=${`${title}: ${last}`}></div>
  </section>`;
}

/** The lines of one metric in several runs over a common axis: the values, and with smoothing their moving average in front of them. */
function linesOf(values, weight, line) {
  if (!weight) return [{ ...line, values }];
  return [{ ...line, values, stroke: `${line.stroke}66`, width: 1 }, { ...line, label: `${line.label}, smoothed`, values: smooth(values, weight), derived: true, width: 2 }];
}

/** The values of one metric in each shown run, on one axis. */
export function seriesOf(name, tables, shown, runs, weight, over) {
  const chosen = shown.filter((run) => tables[run]?.columns[name] && over(tables[run].columns));
  const x = [...new Set(chosen.flatMap((run) => over(tables[run].columns)))].filter((value) => typeof value === "number").sort((a, b) => a - b);
  const place = new Map(x.map((value, n) => [value, n]));
  const series = chosen.flatMap((run) => {
    const table = tables[run].columns, at = over(table);
    const values = new Array(x.length).fill(null), steps = new Array(x.length).fill(null);
    at.forEach((value, n) => { if (typeof table[name][n] === "number") { values[place.get(value)] = table[name][n]; steps[place.get(value)] = table.step[n]; } });
    return linesOf(values, weight, { label: runs[run].name, stroke: runColor(run), dash: lineDash(run), steps, run });
  });
  return { x, series };
}

/** The metrics of an evaluation over the axis of training: where training was at its step. */
function overTraining(over, training) {
  return (table) => {
    const at = training && over(training);
    if (!at) return undefined;
    const known = new Map(training.step.map((step, n) => [step, at[n]]));
    return table.step?.map((step) => known.get(step) ?? (step === 0 ? 0 : null));
  };
}

export function Curves({ runs, address, go, link, dark }) {
  const trained = runs.map((_, run) => run).filter((run) => !runs[run].evaluated && (runs[run].metrics.train || runs[run].metrics.eval || runs.length === 1));
  const shown = address.shown ?? trained.slice(0, 8);
  const weight = Number(address.smooth) || 0, log = address.scale === "log";
  const kind = address.kind === "eval" ? "eval" : "train";
  const axis = AXES[address.over] ? address.over : "step", [xLabel, over] = AXES[axis];
  const counts = shown.map((run) => runs[run].metrics[kind]).join();
  const key = `${kind} ${shown} ${axis !== "step"}`;
  const latestTables = useRef([null, []]);
  const [loaded, problem] = useLoaded(async () => {
    const tables = [];
    await Promise.all(shown.map(async (run) => {
      tables[run] = await data.metrics(run, kind);
      if (kind === "eval" && axis !== "step") tables[run].training = (await data.metrics(run, "train")).columns;
    }));
    return tables;
  }, `${key} ${counts}`);
  const [overview] = useLoaded(() => (shown.length === 1 ? data.overview(shown[0]) : Promise.resolve(null)), `${shown} ${counts}`, `${shown}`);
  if (loaded) latestTables.current = [key, loaded];
  const tables = latestTables.current[0] === key ? latestTables.current[1] : []; // those of another choice of runs have other runs
  const single = shown.length === 1 ? tables[shown[0]] : null;
  // runs from before the quantiles were metrics: from the conversations
  const columns = useColumns(shown[0] ?? 0, "train", runs, Boolean(kind === "train" && single && !single.columns["reward/q10"]));
  if (problem) return html`<${Problem} text=${problem} />`;
  const present = tables.filter(Boolean);
  const has = (name, test) => present.some((table) => table.columns[name]?.some((value) => typeof value === "number" && test(value)));
  const names = [...new Set(present.flatMap((table) => Object.keys(table.columns)))].filter((name) => name !== "step" && has(name, () => true));
  const nonzero = (name) => has(name, (value) => value !== 0);
  const chosen = address.metrics ? address.metrics.split(",") : null;
  const together = chosen || !single ? [] : TOGETHER.map((chart) => ({ ...chart, names: names.filter((name) => chart.metrics.test(name) && nonzero(name)) })).filter((chart) => chart.names.length);
  const separate = names.filter((name) => (STOPS.test(name) || SECONDS.test(name)) && nonzero(name) && !together.some((chart) => chart.names.includes(name)));
  const standard = [...FIRST.filter((name) => names.includes(name)), ...(single ? [] : separate)];
  const visible = chosen ?? (standard.length ? standard : names);
  const about = Object.assign({}, ...present.map((table) => table.about));
  const toggle = (name) => go({ metrics: (visible.includes(name) ? visible.filter((other) => other !== name) : [...visible, name]).join(",") });
  const ofTable = (table) => (kind === "eval" && axis !== "step" ? overTraining(over, tables.find((other) => other?.columns === table)?.training)(table) : over(table));
  const onStep = ({ run }, step, event) => {
    const to = { ...NO_FILTERS, view: "conversations", run, kind, step: String(step) };
    if (event.ctrlKey || event.metaKey) window.open(link(to)); else go(to);
  };
  const place = single && kind === "train" ? over(single.columns) : null; // the warnings of one run: marks of several could not be told apart
  const marks = place ? (overview?.warnings ?? []).map(({ step }) => ({ x: place[single.columns.step.indexOf(step)] })).filter(({ x }) => x !== undefined) : [];
  const common = { dark, log, xLabel, onStep, marks };
  return html`
    <div class="bar">
      ${trained.map((place) => html`<label key=${place}><input type="checkbox" checked=${shown.includes(place)} onChange=${() => go({ shown: shown.includes(place) ? shown.filter((other) => other !== place) : [...shown, place].sort((a, b) => a - b) })} />
        <${LineSample} place=${place} />${runs[place].name}</label>`)}
      <label>Metrics of <select value=${kind} onChange=${(event) => go({ kind: event.target.value })}><option value="train">training</option><option value="eval">evaluations</option></select></label>
      <label>Over <select value=${axis} onChange=${(event) => go({ over: event.target.value === "step" ? null : event.target.value })}><option value="step">steps</option><option value="time">time</option><option value="tokens">sampled tokens</option></select></label>
      <label>Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${weight} onInput=${(event) => go({ smooth: event.target.value === "0" ? null : event.target.value })} /></label>
      <label><input type="checkbox" checked=${log} onChange=${(event) => go({ scale: event.target.checked ? "log" : null })} />log scale</label>
      <label>Charts <select value="" onChange=${(event) => toggle(event.target.value)}><option value="">add or remove…</option>
        ${names.map((name) => html`<option key=${name} value=${name}>${visible.includes(name) ? "✓ " : ""}${name}</option>`)}</select></label>
      ${chosen && html`<button onClick=${() => go({ metrics: null })}>Standard metrics</button>`}
      <span class="muted">A click on a curve opens the conversations of the step; a drag zooms, a double click shows everything.</span>
    </div>
    <div class="scroll" tabindex="0" role="region" aria-label="Curves">
      ${names.length === 0 && html`<p class="loading">${!shown.length ? "No run is chosen." : loaded ? "No metrics yet." : "Loading…"}</p>`}
      <div class="charts">${visible.filter((name) => names.includes(name)).map((name) => {
        const { x, series } = seriesOf(name, tables, shown, runs, weight, ofTable);
        return html`<${Plot} key=${name} title=${name} unit=${about[name]?.unit} meaning=${plain(about[name]?.meaning)} x=${x} ...${withQuantiles(name === "reward/mean" && single, single?.columns, series, ofTable, columns)} ...${common} />`;
      })}${together.map((chart) => {
        const table = single.columns, at = ofTable(table);
        if (!at) return null;
        const series = chart.names.flatMap((name, place) => linesOf(table[name].map((value) => (typeof value === "number" ? value : null)), weight, { label: name.split("/").at(-1), stroke: runColor(place), dash: lineDash(place), steps: table.step, run: shown[0] }));
        return html`<${Plot} key=${chart.name} title=${chart.name} unit=${chart.unit} meaning=${chart.meaning} x=${at} series=${series} ...${common} />`;
      })}</div>
    </div>`;
}

/** The line of the reward with the quantiles of the rewards of each step, which are never smoothed. */
function withQuantiles(wanted, table, series, over, columns) {
  const parts = wanted && series.length ? quantilesOf(table, table.step, columns) : null;
  if (!parts || over(table)?.length !== series[0].values.length) return { series };
  const { stroke } = series.at(-1), thin = { width: 0.5, stroke };
  const first = series.length + 1; // the number of the next line: uPlot counts the axis as 0
  const more = [{ ...thin, label: "90 %", values: parts[0] }, { ...thin, label: "10 %", values: parts[1] }, { label: "median", stroke, dash: [3, 3], width: 1, values: parts[2] }];
  return { series: [...series, ...more], bands: [{ series: [first, first + 1], fill: `${stroke}22` }] };
}
