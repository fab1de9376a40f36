// Two runs, the same row beside the same row.
import { html, number, signed, useKeys, useMemo, useRef, useState } from "./ui.js";
import { Link } from "./address.js";
import { useColumns } from "./columns.js";
import { usePlace, useVirtual } from "./virtual.js";

/** The latest conversations of each row: {row: {reward: mean, numbers}}. Of an evaluation, only the last one counts. */
export function byRow(columns, step) {
  const rows = new Map();
  columns.row.forEach((row, n) => {
    // the agents that a row's environment opened have rewards of their own
    if (row === null || columns.agent?.[n] || (step !== null && columns.step[n] !== step)) return;
    const entry = rows.get(row);
    if (!entry || entry.step !== columns.step[n]) rows.set(row, { step: columns.step[n], numbers: [n] });
    else entry.numbers.push(n);
  });
  for (const entry of rows.values()) {
    const rewards = entry.numbers.map((n) => columns.reward[n]).filter((reward) => reward !== null);
    entry.reward = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  }
  return rows;
}

function mean(values) { return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null; }

/** Where the list was left, by its address: {scroll, picked}. */
const places = new Map();

export function Compare({ runs, address, go, link }) {
  const left = address.left ?? 0, right = address.right ?? Math.min(1, runs.length - 1);
  const evaluated = runs[left].conversations.eval && runs[right].conversations.eval;
  const kind = address.kind || (evaluated ? "eval" : "train");
  const a = useColumns(left, kind, runs), b = useColumns(right, kind, runs);
  const steps = (columns) => [...new Set(columns?.step ?? [])].filter((step) => typeof step === "number").sort((x, y) => x - y);
  const chosen = (name, columns) => (address[name] ? Number(address[name]) : kind === "eval" ? steps(columns).at(-1) ?? null : null);
  const from = chosen("from", a), to = chosen("to", b);
  const pairs = useMemo(() => {
    if (!a || !b) return [];
    const one = byRow(a, from), two = byRow(b, to);
    return [...one].filter(([row]) => two.has(row)).map(([row, x]) => {
      const y = two.get(row);
      return { row, x, y, change: x.reward === null || y.reward === null ? null : y.reward - x.reward };
    }).sort((p, q) => (p.change ?? 0) - (q.change ?? 0));
  }, [a, b, from, to]);
  const scroll = useRef();
  const virtual = useVirtual(scroll, pairs.length, 26);
  const [pickedPlace, setPicked] = useState(0);
  usePlace(scroll, places, JSON.stringify([left, right, kind, from, to]), pairs.length > 0, { picked: pickedPlace }, (place) => setPicked(place.picked));
  const picked = Math.min(pickedPlace, pairs.length - 1);
  const pick = (place) => { const next = Math.max(0, Math.min(pairs.length - 1, place)); setPicked(next); virtual.scrollToIndex(next); };
  const pairAt = (pair) => ({ view: "pair", kind, left, right, row: pair.row, from, to, a: null, b: null });
  useKeys((event) => {
    if (event.key === "j" || event.key === "ArrowDown") { event.preventDefault(); pick(picked + 1); }
    else if (event.key === "k" || event.key === "ArrowUp") { event.preventDefault(); pick(picked - 1); }
    else if (event.key === "Enter" && !event.target.closest("button, a, input") && pairs.length) go(pairAt(pairs[picked]));
  });
  const scored = pairs.filter((pair) => pair.change !== null);
  const select = (name, value, change) => html`<label>${name} <select value=${value} onChange=${(event) => go({ [change]: Number(event.target.value) })}>${runs.map((run, place) => html`<option key=${place} value=${place}>${run.name}</option>`)}</select></label>`;
  const stepSelect = (name, columns, value) => html`<label>step <select value=${value ?? ""} onChange=${(event) => go({ [name]: event.target.value })}><option value="">latest of each row</option>${steps(columns).map((step) => html`<option key=${step}>${step}</option>`)}</select></label>`;
  return html`
    <div class="bar">${select("Run", left, "left")}${stepSelect("from", a, from)} against ${select("run", right, "right")}${stepSelect("to", b, to)}
      <label>Conversations of <select value=${kind} onChange=${(event) => go({ kind: event.target.value, from: null, to: null })}><option value="train">training</option><option value="eval">evaluations</option></select></label>
      <span role="status">${scored.length} rows in both: mean reward <b>${number(mean(scored.map((pair) => pair.x.reward)))}</b> and <b>${number(mean(scored.map((pair) => pair.y.reward)))}</b>;${" "}
        ${scored.filter((pair) => pair.change > 0).length} better, ${scored.filter((pair) => pair.change < 0).length} worse</span></div>
    <div class="scroll" ref=${scroll} tabindex="0" aria-label="Rows in both runs">
      <div class="table pairs" role="grid" aria-label="Rows in both runs" aria-rowcount=${pairs.length + 1}>
        <div role="rowgroup"><div class="row head" role="row">${["row", "", runs[left].name, runs[right].name, "change"].map((text, place) => html`<span key=${place} role="columnheader" class=${place ? "num" : ""}>${text || "conversations"}</span>`)}</div></div>
        <div class="body" role="rowgroup" style=${{ height: `${virtual.getTotalSize()}px`, position: "relative" }}>${virtual.getVirtualItems().map((item) => {
          const pair = pairs[item.index];
          if (!pair) return null;
          return html`<div key=${pair.row} class="row" role="row" aria-rowindex=${item.index + 2} aria-selected=${item.index === picked} style=${{ transform: `translateY(${item.start}px)` }} onClick=${() => setPicked(item.index)}>
            <span role="gridcell"><${Link} class="whole" to=${link(pairAt(pair))} tabindex="-1">row ${pair.row}</${Link}></span>
            <span role="gridcell" class="num">${pair.x.numbers.length}, ${pair.y.numbers.length}</span><span role="gridcell" class="num">${number(pair.x.reward)}</span><span role="gridcell" class="num">${number(pair.y.reward)}</span>
            <span role="gridcell" class=${`num ${pair.change < 0 ? "bad" : ""}`}>${pair.change === null ? "" : signed(pair.change)}</span></div>`;
        })}</div>
      </div>
      ${a && b && !pairs.length && html`<p class="loading">No row is in both runs.</p>`}
    </div>`;
}
