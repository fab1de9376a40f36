// Curves of the metrics, runs overlaid; the reward with its quantiles.
import uPlot from "uplot";
import { html, lineDash, LineSample, number, Problem, runColor, useEffect, useLoaded, useMemo, useRef, useState } from "./ui.js";
import * as data from "./data.js";
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
    if (step === null || reward === null) return;
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

function Plot({ title, meaning, x, series, bands, dark, unit }) {
  const ref = useRef();
  const plot = useRef();
  const signature = JSON.stringify([title, series.map((item) => [item.label, item.stroke, item.dash]), dark]);
  useEffect(() => {
    const element = ref.current;
    if (!element) return undefined; // already removed
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--muted").trim(), line = style.getPropertyValue("--line").trim();
    const axis = { stroke: text, grid: { stroke: line, width: 0.5 }, ticks: { stroke: line, width: 0.5 } };
    const options = {
      width: element.clientWidth, height: 190, scales: { x: { time: false }, y: { range: (_, low, high) => (low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : uPlot.rangeNum(low, high, 0.1, true)) } },
      axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: (_, texts) => Math.max(44, 18 + 8 * Math.max(0, ...(texts ?? []).map((text) => text.length))), values: (_, ticks) => ticks.map(number) }], cursor: { sync: { key: "steps" } },
      series: [{ label: "step" }, ...series.map(({ label, stroke, dash, width = 1.5 }) => ({ label, stroke, dash, width, spanGaps: true, points: { show: fewValues, size: 4 }, value: (_, value) => number(value) }))],
      bands, legend: { markers: { dash: (self, place) => { const [first] = self.series[place].dash ?? []; return first ? (first <= 2 ? "dotted" : "dashed") : "solid"; } } },
      hooks: { setCursor: [(self) => { if (self.cursor.idx === null || self.cursor.idx === undefined) latest(self); }] },
    };
    plot.current = new uPlot(options, [x, ...series.map((item) => item.values)], element);
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: 190 }));
    observer.observe(element);
    return () => { observer.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [signature]);
  useEffect(() => { plot.current?.setData([x, ...series.map((item) => item.values)]); if (plot.current) latest(plot.current); });
  const last = series.map((item) => `${item.label} ${number(item.values.findLast((value) => typeof value === "number") ?? null)}`).join(", ");
  return html`<section class="chart" aria-label=${title}>
    <h2>${title} <span class="muted">${unit}</span></h2>
    <p>${meaning}</p>
    <div ref=${ref} role="img" aria-label=${`${title}: ${last}`}></div>
  </section>`;
}

/** The values of one metric for all shown runs, on one axis of steps. */
function seriesOf(name, tables, shown, runs, weight) {
  const steps = new Set();
  for (const run of shown) (tables[run]?.columns.step || []).forEach((step) => steps.add(step));
  const x = [...steps].sort((a, b) => a - b);
  const series = shown.filter((run) => tables[run]?.columns[name]).map((run) => {
    const table = tables[run].columns;
    const values = new Map(table.step.map((step, place) => [step, table[name][place]]));
    const raw = x.map((step) => (typeof values.get(step) === "number" ? values.get(step) : null));
    return { label: runs[run].name, stroke: runColor(run), dash: lineDash(run), values: smooth(raw, weight) };
  });
  return { x, series };
}

export function Curves({ runs, address, go, dark }) {
  const shown = useMemo(() => (address.shown ? address.shown.split(",").map(Number).filter((run) => run < runs.length) : runs.map((_, run) => run).slice(0, 8)), [address.shown, runs.length]);
  const weight = Number(address.smooth) || 0;
  const kind = address.kind === "eval" ? "eval" : "train";
  const counts = runs.map((run) => run.metrics[kind]).join();
  const [tables, setTables] = useState([]);
  const [loaded, problem] = useLoaded(() => Promise.all(runs.map((_, run) => (shown.includes(run) ? data.metrics(run, kind) : null))), `${kind} ${shown} ${counts}`);
  useEffect(() => { if (loaded) setTables(loaded); }, [loaded]);
  // runs from before the quantiles were metrics: from the conversations
  const columns = useColumns(shown[0] ?? 0, "train", runs, kind === "train" && shown.length === 1 && tables[shown[0]] && !tables[shown[0]].columns["reward/q10"]);
  if (problem) return html`<${Problem} text=${problem} />`;
  const names = [...new Set(tables.flatMap((table) => (table ? Object.keys(table.columns) : [])))].filter((name) => tables.some((table) => table?.columns[name]?.some((value) => typeof value === "number")) && name !== "step");
  const chosen = address.metrics ? address.metrics.split(",") : null;
  const single = shown.length === 1;
  const nonzero = (name) => tables.some((table) => table?.columns[name]?.some((value) => typeof value === "number" && value !== 0));
  const together = chosen || !single ? [] : TOGETHER.map((chart) => ({ ...chart, names: names.filter((name) => chart.metrics.test(name) && nonzero(name)) })).filter((chart) => chart.names.length);
  const separate = names.filter((name) => (STOPS.test(name) || SECONDS.test(name)) && nonzero(name) && !together.some((chart) => chart.names.includes(name)));
  const standard = [...FIRST.filter((name) => names.includes(name)), ...(single ? [] : separate)];
  const visible = chosen ?? (standard.length ? standard : names);
  const about = Object.assign({}, ...tables.map((table) => table?.about ?? {}));
  const toggle = (name) => go({ metrics: (visible.includes(name) ? visible.filter((other) => other !== name) : [...visible, name]).join(",") });
  return html`
    <div class="bar">
      ${runs.map((run, place) => html`<label key=${place}><input type="checkbox" checked=${shown.includes(place)} onChange=${() => go({ shown: (shown.includes(place) ? shown.filter((other) => other !== place) : [...shown, place].sort((a, b) => a - b)).join(",") })} />
        <${LineSample} place=${place} />${run.name}</label>`)}
      <label>Metrics of <select value=${kind} onChange=${(event) => go({ kind: event.target.value })}><option value="train">training</option><option value="eval">evaluations</option></select></label>
      <label>Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${weight} onInput=${(event) => go({ smooth: event.target.value })} /></label>
      <label>Charts <select value="" onChange=${(event) => toggle(event.target.value)}><option value="">add or remove…</option>
        ${names.map((name) => html`<option key=${name} value=${name}>${visible.includes(name) ? "✓ " : ""}${name}</option>`)}</select></label>
      ${chosen && html`<button onClick=${() => go({ metrics: null })}>Standard metrics</button>`}
    </div>
    <div class="scroll" tabindex="0" role="region" aria-label="Curves">
      ${names.length === 0 && html`<p class="loading">No metrics yet.</p>`}
      <div class="charts">${visible.filter((name) => names.includes(name)).map((name) => {
        const { x, series } = seriesOf(name, tables, shown, runs, weight);
        let bands;
        const parts = name === "reward/mean" && single && series.length === 1 ? quantilesOf(tables[shown[0]].columns, x, columns) : null;
        if (parts) {
          const thin = { width: 0.5, stroke: series[0].stroke };
          series.push({ ...thin, label: "90 %", values: smooth(parts[0], weight) }, { ...thin, label: "10 %", values: smooth(parts[1], weight) }, { label: "median", stroke: series[0].stroke, dash: [3, 3], width: 1, values: smooth(parts[2], weight) });
          bands = [{ series: [2, 3], fill: `${series[0].stroke}22` }];
        }
        return html`<${Plot} key=${name} title=${name} unit=${about[name]?.unit} meaning=${plain(about[name]?.meaning)} x=${x} series=${series} bands=${bands} dark=${dark} />`;
      })}${together.map((chart) => {
        const table = tables[shown[0]].columns;
        const series = chart.names.map((name, place) => ({ label: name.split("/").at(-1), stroke: runColor(place), dash: lineDash(place), values: smooth(table[name].map((value) => (typeof value === "number" ? value : null)), weight) }));
        return html`<${Plot} key=${chart.name} title=${chart.name} unit=${chart.unit} meaning=${chart.meaning} x=${table.step} series=${series} dark=${dark} />`;
      })}</div>
    </div>`;
}
