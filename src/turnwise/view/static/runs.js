// All runs side by side: how they ended, the last and best values of their metrics, and the options in which they differ.
import { harmless, html, LineSample, number, Problem, useLoaded, useState } from "./ui.js";
import * as data from "./data.js";
import { Link } from "./address.js";
import { bad, stateText } from "./overview.js";

/** The metrics that are shown first: those of fine-tuning where there are no rewards. */
const FIRST = ["eval/reward/mean", "eval/pass_rate", "reward/mean"], OF_TUNING = ["eval/loss", "loss"];

/** The value of a metric in four digits, or of an option as the recipe has it. */
function Value({ value, metric, text }) {
  const kind = text ? "text" : "num";
  if (value === undefined || value === null) return html`<td class=${kind}>–</td>`;
  const shown = metric ? number(value) : harmless(typeof value === "string" ? value : JSON.stringify(value));
  return html`<td class=${kind} title=${shown}><div>${text ? shown.split(/(?<=[./:,])/).flatMap((part, place) => (place ? [html`<wbr />`, part] : [part])) : shown}</div></td>`; // names are broken between their parts
}

/** Whether a column has something other than numbers: it is read from the left. */
const isText = (values) => values.some((value) => value !== undefined && value !== null && typeof value !== "number");

/** The rows by a column; runs without a value are last. */
export function sorted(rows, valueOf, down) {
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const x = valueOf(a) ?? null, y = valueOf(b) ?? null;
    if (x === y) return a.run - b.run;
    if (x === null || y === null) return x === null ? 1 : -1;
    return (typeof x === typeof y ? x < y : String(x) < String(y)) ? -sign : sign;
  });
}

/** The groups of finished runs that differ in their seed only, as `show --over-seeds` has them. */
function OverSeeds({ table, metrics, texts }) {
  if (!table.seeds.some((group) => group.runs.length > 1)) return null;
  const options = table.options.filter((name) => name !== "seed"), rows = new Map(table.rows.map((row) => [row.run, row]));
  const shown = ([mean, deviation]) => (mean === null ? "–" : `${number(mean)}${deviation === null ? "" : ` ± ${number(deviation)}`}`);
  return html`<table class="pairs seeds"><caption>Over the seeds: mean ± standard deviation of the last values of finished runs</caption>
    <thead><tr><th>runs</th>${metrics.map((name) => html`<th key=${name}>${name}</th>`)}${options.map((name) => html`<th key=${name} class=${texts.has(name) ? "text" : "num"}>${name}</th>`)}</tr></thead>
    <tbody>${table.seeds.map(({ runs, values }) => html`<tr key=${runs[0]}><td>${runs.length}</td>
      ${metrics.map((name) => html`<td key=${name} class="num">${shown(values[name] ?? [null, null])}</td>`)}
      ${options.map((name) => html`<${Value} key=${name} value=${rows.get(runs[0]).options?.[name]} text=${texts.has(name)} />`)}</tr>`)}</tbody></table>`;
}

export function Runs({ runs, address, go, link }) {
  const counts = JSON.stringify(runs.map((run) => run.metrics));
  const [table, problem] = useLoaded(() => data.sideBySide(), counts, "runs");
  const [marked, setMarked] = useState([]);
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!table) return html`<p class="loading">Loading…</p>`;
  const all = [...new Set(table.rows.flatMap((row) => Object.keys(row.values ?? {})))];
  const chosen = address.columns ? address.columns.split(",") : [FIRST, OF_TUNING].map((names) => names.filter((name) => all.includes(name))).find((names) => names.length) ?? [];
  const toggle = (name) => go({ columns: (chosen.includes(name) ? chosen.filter((other) => other !== name) : [...chosen, name]).join(",") });
  const columns = [
    ["state", "state", (row) => row.state], ["steps", "steps", (row) => row.step], ["warnings", "warnings", (row) => row.warnings],
    ...chosen.flatMap((name) => [[`${name} last`, `${name}, last`, (row) => row.values?.[name]?.last, true], [`${name} best`, "best", (row) => row.values?.[name]?.best, true]]),
    ...table.options.map((name) => [name, name, (row) => row.options?.[name]]),
  ];
  const texts = new Set(columns.filter(([, , valueOf, metric], place) => !place || (place > 2 && !metric && isText(table.rows.map(valueOf)))).map(([key]) => key));
  const by = columns.find(([key]) => key === address.by), down = address.order !== "up";
  const rows = by ? sorted(table.rows, by[2], down) : table.rows;
  const sortBy = (key) => go(address.by === key ? { order: down ? "up" : null } : { by: key, order: null });
  const overlaid = marked.length ? marked : table.rows.filter((row) => !runs[row.run]?.evaluated).map((row) => row.run).slice(0, 8);
  return html`
    <div class="bar"><label>Metrics <select value="" onChange=${(event) => toggle(event.target.value)}><option value="">add or remove…</option>${all.map((name) => html`<option key=${name} value=${name}>${chosen.includes(name) ? "✓ " : ""}${name}</option>`)}</select></label>
      <${Link} class="button" to=${link({ view: "curves", shown: overlaid })}>Curves overlaid</${Link}>
      <${Link} class="button" to=${link({ view: "curves", shown: overlaid, kind: "eval", over: "tokens" })}>Held-out curves by sampled tokens</${Link}>
      ${marked.length === 2 && html`<${Link} class="button" to=${link({ view: "compare", left: marked[0], right: marked[1], kind: null, from: null, to: null })}>The same rows</${Link}>`}
      <span class="muted">${marked.length ? `${marked.length} of ${table.rows.length} runs are marked` : `${table.rows.length} runs; mark some to compare only these`}${table.options.length ? `; they differ in ${table.options.length} options` : ""}</span></div>
    <div class="scroll" tabindex="0" role="region" aria-label="Runs"><table class="pairs runs"><thead><tr><th>run</th>
        ${columns.map(([key, text]) => html`<th key=${key} class=${texts.has(key) ? "text" : "num"} aria-sort=${address.by === key ? (down ? "descending" : "ascending") : "none"}><button onClick=${() => sortBy(key)}>${text}${address.by === key ? (down ? " ▼" : " ▲") : ""}</button></th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.run}>
        <td><label><input type="checkbox" aria-label=${`mark ${runs[row.run]?.name}`} checked=${marked.includes(row.run)} onChange=${() => setMarked(marked.includes(row.run) ? marked.filter((other) => other !== row.run) : [...marked, row.run])} /><${LineSample} place=${row.run} /></label><${Link} to=${link({ view: "overview", run: row.run, kind: null })}>${runs[row.run]?.name}</${Link}></td>
        ${row.problem ? html`<td class="bad" colspan=${columns.length}>${row.problem}</td>` : html`<td class=${`text ${bad(row.state) ? "bad" : ""}`} title=${stateText(row)}>${row.state}</td><td class="num">${row.step ?? "–"}${row.steps === null || row.step === null ? "" : ` of ${row.steps}`}</td><td class=${`num ${row.warnings ? "bad" : ""}`}>${row.warnings}</td>
          ${columns.slice(3).map(([key, , valueOf, metric]) => html`<${Value} key=${key} value=${valueOf(row)} metric=${metric} text=${texts.has(key)} />`)}`}</tr>`)}</tbody></table>
      <${OverSeeds} table=${table} metrics=${chosen} texts=${texts} /></div>`;
}
