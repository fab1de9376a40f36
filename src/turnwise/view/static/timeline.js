// The timeline of a step: when the trainer waited and trained, and when the engine, the tools and the environment worked on each
// conversation.
import { html, number, Problem, seconds as duration, useKeys, useLoaded, useMemo, useState } from "./ui.js";
import * as data from "./data.js";
import { useColumns } from "./columns.js";

const ROW = 14, LEFT = 190, TOP = 24;

export function Timeline({ runs, run, kind, address, go, link }) {
  const columns = useColumns(run, "train", runs);
  const steps = useMemo(() => [...new Set(columns?.step ?? [])].filter((step) => typeof step === "number").sort((a, b) => a - b), [columns]);
  const step = address.step && steps.includes(Number(address.step)) ? Number(address.step) : steps.at(-1);
  const [loaded, problem] = useLoaded(() => (step === undefined || kind !== "train" ? Promise.resolve(null) : data.timeline(run, step)), `${run} ${kind} ${step}`);
  const place = steps.indexOf(step);
  const recorded = runs[run].recorded;
  const move = (by) => { if (steps[place + by] !== undefined) go({ step: steps[place + by] }); };
  useKeys((event) => {
    if (event.key === "j" || event.key === "n") move(1);
    else if (event.key === "k" || event.key === "p") move(-1);
  });
  return html`
    <div class="bar"><label>Step <select value=${step} onChange=${(event) => go({ step: event.target.value })}>${steps.map((other) => html`<option key=${other}>${other}</option>`)}</select></label>
      <button disabled=${place <= 0} onClick=${() => move(-1)}>‹ Step</button><button disabled=${place >= steps.length - 1} onClick=${() => move(1)}>Step ›</button>
      <span class="legend"><${Key} name="engine" y=${1} height=${10} />engine <${Key} name="tools" y=${6} height=${5} />tools <${Key} name="environment" y=${1} height=${5} />environment <${Key} name="wait" y=${4} height=${4} />waiting <${Key} name="train" y=${1} height=${10} />training</span></div>
    ${problem && html`<${Problem} text=${problem} />`}
    ${kind !== "train" && html`<p class="loading">Only training steps have a timeline. Choose “training” above.</p>`}
    ${recorded?.best_and_worst && html`<p class="loading">The run records ${recorded.best_and_worst} best and ${recorded.best_and_worst} worst conversations of each group: the others are not shown.</p>`}
    ${loaded && html`<${Chart} key=${`${run} ${step}`} timeline=${loaded} step=${step} link=${link} />`}
    ${kind === "train" && columns && !steps.length && html`<p class="loading">No training steps yet.</p>`}`;
}

function Key({ name, y, height }) {
  return html`<svg width="14" height="12" aria-hidden="true"><rect class=${name} y=${y} width="14" height=${height} /></svg>`;
}

/** The parts of time that are covered by at least one of the intervals, joined. */
export function union(intervals) {
  const sorted = intervals.filter(([start, end]) => end > start).sort((a, b) => a[0] - b[0]);
  const joined = [];
  for (const [start, end] of sorted) {
    const last = joined.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end); else joined.push([start, end]);
  }
  return joined;
}

/** Marks from 0 to `length` at distances of 1, 2 or 5 times a power of ten. */
export function ticksUntil(length) {
  const power = 10 ** Math.floor(Math.log10(length / 5));
  const distance = power * [1, 2, 5, 10].find((factor) => length / (power * factor) <= 8);
  return Array.from({ length: Math.floor(length / distance) + 1 }, (_, place) => place * distance);
}

const seconds = (intervals) => intervals.reduce((sum, [start, end]) => sum + end - start, 0);

/** Start and end of all intervals in which `which` worked on a turn. A turn is [started, engine, environment, tools]. */
function working(entries, which) {
  return entries.flatMap((entry) => entry.turns.filter(([started]) => started).map(([started, engine, environment, tools]) => ({
    engine: [started, started + engine], tools: [started + engine, started + engine + (tools || 0)], environment: [started + engine + (tools || 0), started + engine + environment],
  })[which]));
}

/** One sentence on what the trainer waited for. */
function Waited({ line, entries }) {
  if (!line) return null;
  const waited = line.taken - line.asked, trained = line.trained - line.taken;
  const last = entries.filter((entry) => entry.group === line.waited_for).sort((a, b) => (b.started + b.seconds) - (a.started + a.seconds))[0];
  const parts = last && last.turns.reduce(([engine, tools, environment], turn) => [engine + turn[1], tools + (turn[3] || 0), environment + turn[2] - (turn[3] || 0)], [0, 0, 0]);
  const rest = last && Math.max(0, last.seconds - parts[0] - parts[1] - parts[2]);
  return html`<p class="facts"><span>The trainer waited <b>${duration(waited)}</b> for the conversations, and trained <b>${duration(trained)}</b>.</span>
    ${line.waited_for && html`<span>The last group to end was <b>${line.waited_for}</b>${last ? html`; its last conversation took <b>${duration(last.seconds)}</b>: engine ${duration(parts[0])}, tools ${duration(parts[1])}, environment ${duration(parts[2])}, waiting ${duration(rest)}` : ""}.</span>`}
    ${!line.waited_for && html`<span>All its groups had ended before.</span>`}
    ${line.running > 0 && html`<span>${line.running} further groups were running.</span>`}</p>`;
}

function Chart({ timeline, step, link }) {
  const [width] = useState(() => Math.max(600, window.innerWidth - 30));
  const entries = timeline.conversations.filter((entry) => entry.started !== null && entry.started !== undefined).sort((a, b) => a.started - b.started);
  const steps = timeline.steps ?? [];
  const line = steps.find((other) => other.step === step);
  if (!entries.length && !line) return html`<p class="loading">No times were recorded.</p>`;
  const begin = Math.min(...entries.map((entry) => entry.started), ...(line ? [line.asked] : []));
  const end = Math.max(...entries.map((entry) => entry.started + (entry.seconds || 0)), ...(line ? [line.trained] : []), begin + 1e-3);
  const x = (time) => LEFT + ((Math.min(end, Math.max(begin, time)) - begin) / (end - begin)) * (width - LEFT - 30);
  const bar = (name, [start, stop], y, height, key) => html`<rect key=${key} class=${name} x=${x(start)} y=${y} width=${Math.max(0.5, x(stop) - x(start))} height=${height} />`;
  const ticks = ticksUntil(end - begin).map((tick) => begin + tick);
  const busy = Object.fromEntries(["engine", "tools", "environment"].map((which) => [which, union(working(entries, which))]));
  const tracks = [["engine", "engine", busy.engine], ["tools", "tools", busy.tools], ["environment", "environment", busy.environment]].filter(([name, , intervals]) => name === "engine" || intervals.length);
  const first = TOP + (steps.length ? 22 : 0) + tracks.length * 16 + 12;
  const height = first + entries.length * ROW + 8;
  const share = (intervals) => `${Math.round((100 * seconds(intervals)) / (end - begin))} %`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Timeline">
    <${Waited} line=${line} entries=${entries} />
    <p class="facts muted"><span>${entries.length} conversations in ${duration(end - begin)}. At least one of them was:</span>${tracks.map(([name, text, intervals]) => html`<span key=${name}>${name === "engine" ? "in the" : "in"} ${text} <b>${share(intervals)}</b></span>`)}<span>of the time. Click a conversation to open it.</span></p>
    <svg width=${width} height=${height} role="group" aria-label="When the trainer, the engine, the tools and the environment worked">
      ${ticks.map((tick) => html`<g key=${tick}><line class="grid" x1=${x(tick)} x2=${x(tick)} y1="16" y2=${height} /><text x=${x(tick)} y="12" text-anchor="middle">${duration(tick - begin)}</text></g>`)}
      ${steps.length > 0 && html`<text x="4" y=${TOP + 12}>trainer</text>${steps.map((other) => html`<g key=${other.step}>
        <title>step ${other.step}: waited ${duration(other.taken - other.asked)}, trained ${duration(other.trained - other.taken)}</title>
        ${bar("wait", [other.asked, other.taken], TOP + 6, 4)}${bar("train", [other.taken, other.trained], TOP + 1, 14)}
        ${x(other.trained) - x(other.taken) > 46 && html`<text class="inside" x=${(x(other.taken) + x(other.trained)) / 2} y=${TOP + 12} text-anchor="middle">step ${other.step}</text>`}</g>`)}`}
      ${tracks.map(([name, text, intervals], place) => { const y = TOP + (steps.length ? 22 : 0) + place * 16; return html`<g key=${name}><text x="4" y=${y + 11}>${text} busy</text>${intervals.map((interval, n) => bar(name, interval, y + 2, 10, n))}</g>`; })}
      <line class="axis" x1="0" x2=${width} y1=${first - 6} y2=${first - 6} />
      ${entries.map((entry, place) => { const y = first + place * ROW; return html`<a key=${entry.id} href=${entry.number === null ? undefined : link({ view: "conversation", kind: "train", id: entry.id, at: step, number: null })} aria-label=${`${entry.id}: ${number(entry.seconds)} seconds`}>
        <title>${entry.id}${entry.number === null ? " (not in this file)" : ""}: ${duration(entry.seconds)}, ${entry.turns.length} turns, stop ${entry.stop}, reward ${number(entry.reward)}</title>
        <text x="4" y=${y + 10}>${entry.id.length > 26 ? `${entry.id.slice(0, 25)}…` : entry.id}</text>
        ${bar("wait", [entry.started, entry.started + (entry.seconds || 0)], y + 4, 4)}
        ${entry.turns.map(([started, engine, environment, tools = 0], turn) => started && html`<g key=${turn}>${bar("engine", [started, started + engine], y + 1, 10)}${tools > 0 && bar("tools", [started + engine, started + engine + tools], y + 6, 5)}${environment > tools && bar("environment", [started + engine + tools, started + engine + environment], y + 1, 5)}</g>`)}
      </a>`; })}
    </svg>
  </div>`;
}
