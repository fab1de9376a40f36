// Statistics of a run: how rewards and lengths are distributed in each step, rewards of parts and turns, and tool calls.
import { harmless, html, lineDash, number, Problem, runColor, seconds as duration, useEffect, useLoaded, useSettled, useState } from "./ui.js";
import * as data from "./data.js";
import { Link, NO_FILTERS } from "./address.js";
import { useColumns } from "./columns.js";
import { ANY, partlyRecorded, ROWS } from "./conversations.js";
import { Plot } from "./curves.js";

const MOST_COLUMNS = 60, MOST_ROWS = 24, MOST_CURVES = 8;
const WIDTH = 420, HEIGHT = 218, LEFT = 56, BOTTOM = 22;

/** Values in parts of equal width; few different values have a part each. Returns the lowest value of each part, ascending. */
export function bins(values, most) {
  const different = new Set();
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (different.size <= most) different.add(value); // no more are needed: of 100,000 this would take long
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (different.size <= most) return [...different].sort((a, b) => a - b);
  return Array.from({ length: most }, (_, n) => low + (n * (high - low)) / most);
}

const place = (starts, value) => { // the last part that begins at or below the value
  let low = 0, high = starts.length - 1;
  while (low < high) { const middle = (low + high + 1) >> 1; if (starts[middle] <= value) low = middle; else high = middle - 1; }
  return low;
};

/** How often each value occurs in each step: {steps, values, cells}. A cell is {count, from, to, low, high}, with the first and last
 *  step and the lowest and highest value in it; where nothing is, it is undefined. `shares` are shares of all of its steps. */
export function histogram(columns, name) {
  const numbers = [];
  columns.step.forEach((step, n) => { if (typeof step === "number" && typeof columns[name][n] === "number" && !columns.agent[n]) numbers.push(n); });
  const steps = bins(numbers.map((n) => columns.step[n]), MOST_COLUMNS), values = bins(numbers.map((n) => columns[name][n]), MOST_ROWS);
  const cells = new Map(), totals = new Array(steps.length).fill(0);
  for (const n of numbers) {
    const step = columns.step[n], value = columns[name][n], column = place(steps, step), key = column * MOST_ROWS + place(values, value);
    const cell = cells.get(key) ?? { count: 0, from: step, to: step, low: value, high: value };
    if (!cell.count) cells.set(key, cell);
    cell.count += 1; totals[column] += 1;
    if (step < cell.from) cell.from = step; else if (step > cell.to) cell.to = step;
    if (value < cell.low) cell.low = value; else if (value > cell.high) cell.high = value;
  }
  return { steps, values, cells, totals };
}

/** A heat map: steps from left to right, values from below, the share of the step's conversations as strength of the colour. */
function HeatMap({ title, unit, columns, name, onCell }) {
  const [map, setMap] = useState(null), [at, setAt] = useState(null);
  useEffect(() => { // each in a task of its own: no frame waits for two
    const timer = setTimeout(() => setMap(histogram(columns, name)), 0);
    return () => clearTimeout(timer);
  }, [columns, name]);
  if (!map) return html`<section class="chart heat" aria-label=${title}><h2>${title}</h2></section>`;
  const { steps, values, cells, totals } = map;
  if (!steps.length) return null;
  const width = (WIDTH - LEFT) / steps.length, height = (HEIGHT - BOTTOM) / values.length;
  const text = (cell) => `${cell.from === cell.to ? `step ${cell.from}` : `steps ${cell.from} to ${cell.to}`}, ${cell.low === cell.high ? number(cell.low) : `${number(cell.low)} to ${number(cell.high)}`} ${unit}: ${cell.count} ${cell.count === 1 ? "conversation" : "conversations"}`;
  const cellAt = (event) => {
    const box = event.currentTarget.getBoundingClientRect(), x = ((event.clientX - box.left) * WIDTH) / box.width - LEFT, y = ((event.clientY - box.top) * HEIGHT) / box.height;
    const column = Math.floor(x / width), row = values.length - 1 - Math.floor(y / height);
    return column < 0 || column >= steps.length || row < 0 ? undefined : cells.get(column * MOST_ROWS + row);
  };
  const every = Math.ceil(steps.length / 8), each = Math.ceil(values.length / 8);
  const all = [...cells.values()], low = Math.min(...all.map((cell) => cell.low)), high = Math.max(...all.map((cell) => cell.high)), last = Math.max(...all.map((cell) => cell.to));
  return html`<section class="chart heat" aria-label=${title}><h2>${title} <span class="muted">${unit}</span></h2>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${title}: ${number(low)} to ${number(high)} over steps ${steps[0]} to ${last}`} onMouseMove=${(event) => setAt(cellAt(event) ?? null)} onMouseLeave=${() => setAt(null)} onClick=${(event) => { const cell = cellAt(event); if (cell) onCell(cell, event); }}>
      ${[...cells].map(([key, cell]) => { const column = Math.floor(key / MOST_ROWS), row = key % MOST_ROWS; return html`<rect key=${key} class="cell" x=${LEFT + column * width} y=${(values.length - 1 - row) * height} width=${width} height=${height} opacity=${0.12 + (0.88 * cell.count) / totals[column]} />`; })}
      ${values.map((value, row) => row % each === 0 && html`<text key=${row} x=${LEFT - 6} y=${(values.length - row) * height - Math.max(0, height / 2 - 4)} text-anchor="end">${number(value)}</text>`)}
      ${steps.map((step, column) => column % every === 0 && html`<text key=${column} x=${LEFT + (column + 0.5) * width} y=${HEIGHT - 6} text-anchor="middle">${number(Math.ceil(step))}</text>`)}
    </svg>
    ${/* below the map, which must not move under the pointer */ ""}<p>${at ? text(at) : "The darker, the more conversations of the step. A click opens them."}</p></section>`;
}

const nameOf = ({ tool }) => harmless(tool || "(without a name)");

/** The tools of a run, and the errors of their calls by message. */
function Tools({ tools, others, messages, link, kind }) {
  const at = (more) => link({ ...NO_FILTERS, view: "conversations", kind, ...more });
  if (!tools.length) return html`<h2>Tools</h2><p class="muted">There were no tool calls.</p>`;
  return html`<h2>Tools</h2>
    <table class="pairs tools"><thead><tr>${["tool", "calls", "errors", "share", "mean time", "longest", "conversations"].map((text) => html`<th key=${text}>${text}</th>`)}</tr></thead>
      <tbody>${tools.map((tool) => html`<tr key=${tool.tool}><td>${nameOf(tool)}</td><td>${number(tool.calls)}</td><td>${number(tool.errors)}</td><td>${number(tool.errors / tool.calls)}</td><td>${duration(tool.seconds)}</td><td>${duration(tool.longest)}</td><td><${Link} to=${at({ tool: tool.tool })}>${number(tool.conversations)}</${Link}></td></tr>`)}
        ${others && html`<tr key="others"><td class="muted">${number(others.tools)} other tools</td><td>${number(others.calls)}</td><td>${number(others.errors)}</td><td>${number(others.errors / others.calls)}</td><td>${duration(others.seconds)}</td><td>${duration(others.longest)}</td><td>${number(others.conversations)}</td></tr>`}</tbody></table>
    ${messages.length > 0 && html`<table class="pairs options"><caption>Errors of tool calls by message, the most frequent first</caption><thead><tr>${["calls", "tool", "error", "latest message", "conversations"].map((text) => html`<th key=${text}>${text}</th>`)}</tr></thead>
      <tbody>${messages.map((one, n) => html`<tr key=${n}><td>${number(one.calls)}</td><td>${nameOf(one)}</td><td class="bad">${harmless(one.error)}</td><td>${harmless(one.message ?? "")}</td><td><${Link} to=${at({ tool: one.tool, error: one.error, pattern: one.pattern })}>${number(one.conversations)}</${Link}>${one.id !== null && html`, <${Link} to=${link({ view: "conversation", kind, id: one.id, at: one.step })}>latest</${Link}>`}</td></tr>`)}</tbody></table>`}`;
}

export function Statistics({ runs, run, kind, go, link, dark }) {
  const columns = useColumns(run, kind, runs);
  const { indexed, lines, metrics, left_out } = runs[run];
  const leftOut = left_out?.[kind] > 0, part = partlyRecorded(runs[run], kind);
  const complete = indexed[kind].stop - indexed[kind].start >= lines[kind];
  // of a live run once in a step and when it pauses, not with each conversation
  const settled = useSettled(lines[kind]);
  const [found, problem] = useLoaded(() => data.statistics(run, kind), JSON.stringify([run, kind, metrics[kind], indexed[kind].generation, complete, settled, lines[kind] > 0]), `${run} ${kind}`);
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!columns || !found) return html`<p class="loading">Loading…</p>`;
  if (!found.steps.length) return html`<p class="loading">No conversations with a step yet.</p>`;
  const open = (filters, event) => {
    const to = { ...NO_FILTERS, view: "conversations", run, kind, ...filters };
    if (event.ctrlKey || event.metaKey) window.open(link(to)); else go(to);
  };
  const rows = columns.agent.some((agent) => agent) ? { agent: ROWS } : {};
  const steps = ({ from, to }) => ({ ...rows, step: from === to ? String(from) : `${from}-${to}` });
  const seriesFor = (curves) => curves.map(([label, values, filters], n) => ({ label, values, filters, stroke: runColor(n), dash: lineDash(n), steps: found.steps }));
  const plot = (title, unit, meaning, curves, shown) => curves.length > 0 && html`<${Plot} key=${title} title=${title} unit=${unit} meaning=${shown ? `${meaning} ${shown}` : meaning} x=${found.steps} series=${seriesFor(curves.slice(0, MOST_CURVES))} dark=${dark} onStep=${(line, step, event) => (!leftOut || columns.step.includes(step)) && open({ step: String(step), ...line.filters }, event)} />`;
  const parts = Object.entries(found.parts).map(([name, values]) => [harmless(name), values, rows]), turns = Object.entries(found.turns).map(([n, values]) => [`turn ${n}`, values, rows]);
  const toolCount = found.tools.length + (found.other_tools?.tools ?? 0);
  const some = (count, text) => count > MOST_CURVES && `Drawn are ${MOST_CURVES} of ${number(count)}: ${text}.`;
  const ofTools = (name) => found.tools.filter((tool) => tool.by_step).map((tool) => [nameOf(tool), name === "share" ? tool.by_step.calls.map((calls, n) => (calls ? tool.by_step.errors[n] / calls : null)) : tool.by_step[name], { tool: tool.tool, ...(name === "share" && { error: ANY }) }]);
  return html`<div class="scroll overview" tabindex="0" role="region" aria-label="Statistics">
    <div class="charts">
      <${HeatMap} title="Rewards" unit="reward" columns=${columns} name="reward" onCell=${(cell, event) => open({ ...steps(cell), least: String(cell.low), most: String(cell.high) }, event)} />
      <${HeatMap} title="Lengths" unit="sampled tokens" columns=${columns} name="sampled" onCell=${(cell, event) => open({ ...steps(cell), shortest: String(cell.low), longest: String(cell.high) }, event)} />
      ${plot("Reward by part", "reward", "Mean over the conversations of a step.", parts.length > 1 ? parts : [], some(parts.length, "the first by their names"))}
      ${plot("Reward by turn", "reward", "Mean over the conversations that have the turn.", turns.length > 1 ? turns : [], some(found.turn_count, "the first turns and the last"))}
      ${plot("Tool calls", "calls", "All calls of a step, by tool.", ofTools("calls"), some(toolCount, "the tools with the most calls"))}
      ${plot("Failed tool calls", "share", "Share of the calls of a step.", ofTools("share"), some(toolCount, "the tools with the most calls"))}
      ${plot("Time of a tool call", "s", "Mean of a step.", ofTools("seconds"), some(toolCount, "the tools with the most calls"))}
    </div>
    ${leftOut && html`<p class="muted">The two maps show the ${number(columns.id.length)} conversations of this file; the curves and tables are of all ${number(columns.id.length + left_out[kind])} of the run. A click on a step of which none is in this file opens nothing.</p>`}
    ${part && html`<p class="muted">The statistics are of the recorded conversations only: ${part}.</p>`}
    ${!complete && html`<p class="muted">These are the conversations that are indexed so far.</p>`}
    <${Tools} tools=${found.tools} others=${found.other_tools} messages=${found.messages} link=${link} kind=${kind} />
  </div>`;
}
