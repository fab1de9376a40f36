// The timeline of a step: for each conversation, when the engine and the environment worked on it.
import { html, number, Problem, useLoaded, useMemo, useRef, useState } from "./ui.js";
import * as data from "./data.js";
import { useColumns } from "./columns.js";

const ROW = 14, LEFT = 150;

export function Timeline({ runs, run, kind, address, go }) {
  const columns = useColumns(run, kind, runs);
  const steps = useMemo(() => [...new Set(columns?.step ?? [])].filter((step) => step !== null).sort((a, b) => a - b), [columns]);
  const step = address.step && steps.includes(Number(address.step)) ? Number(address.step) : steps.at(-1);
  const [entries, problem] = useLoaded(() => (step === undefined || kind !== "train" ? Promise.resolve([]) : data.timeline(run, step)), `${run} ${kind} ${step}`);
  const place = steps.indexOf(step);
  return html`
    <div class="bar"><label>Step <select value=${step} onChange=${(event) => go({ step: event.target.value })}>${steps.map((other) => html`<option key=${other}>${other}</option>`)}</select></label>
      <button disabled=${place <= 0} onClick=${() => go({ step: steps[place - 1] })}>‹ Step</button><button disabled=${place >= steps.length - 1} onClick=${() => go({ step: steps[place + 1] })}>Step ›</button>
      <span class="legend"><svg width="12" height="12"><rect class="engine" width="12" height="12" /></svg>engine <svg width="12" height="12"><rect class="environment" y="3" width="12" height="6" /></svg>environment and tools <svg width="12" height="12"><rect class="wait" width="12" height="12" /></svg>waiting</span></div>
    ${problem && html`<${Problem} text=${problem} />`}
    ${kind !== "train" && html`<p class="loading">Timelines are of training steps.</p>`}
    ${entries?.length > 0 && html`<${Chart} key=${`${run} ${step}`} entries=${entries} go=${go} />`}
    ${entries?.length === 0 && kind === "train" && html`<p class="loading">${steps.length ? "No times were recorded." : "No steps yet."}</p>`}`;
}

function Chart({ entries, go }) {
  const ref = useRef();
  const [width] = useState(() => Math.max(600, window.innerWidth - 40));
  const timed = entries.filter((entry) => entry.started !== null && entry.started !== undefined).sort((a, b) => a.started - b.started);
  if (!timed.length) return html`<p class="loading">No times were recorded.</p>`;
  const begin = Math.min(...timed.map((entry) => entry.started)), end = Math.max(...timed.map((entry) => entry.started + (entry.seconds || 0)), begin + 1e-3);
  const x = (time) => LEFT + ((time - begin) / (end - begin)) * (width - LEFT - 20);
  const ticks = Array.from({ length: 6 }, (_, part) => begin + ((end - begin) * part) / 5);
  const total = (which) => timed.reduce((sum, entry) => sum + entry.turns.reduce((inner, turn) => inner + turn[which], 0), 0);
  const all = timed.reduce((sum, entry) => sum + (entry.seconds || 0), 0) || 1;
  const share = (value) => `${Math.round((100 * value) / all)} %`;
  return html`<div class="scroll" ref=${ref} tabindex="0" role="region" aria-label="Timeline">
    <p class="facts"><span>${timed.length} conversations in <b>${number(end - begin)} s</b></span><span>engine <b>${share(total(1))}</b></span><span>environment and tools <b>${share(total(2))}</b></span><span>waiting <b>${share(all - total(1) - total(2))}</b></span>
      <span class="muted">Longest: ${[...timed].sort((a, b) => b.seconds - a.seconds).slice(0, 3).map((entry) => `${entry.id} (${number(entry.seconds)} s)`).join(", ")}</span></p>
    <svg width=${width} height=${timed.length * ROW + 30} role="group" aria-label="When the engine and the environment worked on each conversation">
      ${ticks.map((tick) => html`<g key=${tick}><line class="grid" x1=${x(tick)} x2=${x(tick)} y1="18" y2=${timed.length * ROW + 24} /><text x=${x(tick)} y="12" text-anchor="middle">${number(tick - begin)} s</text></g>`)}
      ${timed.map((entry, place) => html`<a key=${entry.number} href=${`#/conversation?number=${entry.number}`} onClick=${(event) => { event.preventDefault(); go({ view: "conversation", number: entry.number }); }} aria-label=${entry.id}>
        <title>${entry.id}: ${number(entry.seconds)} s, ${entry.turns.length} turns, stop ${entry.stop}, reward ${number(entry.reward)}</title>
        <text x="4" y=${24 + place * ROW + 10}>${entry.id.slice(0, 22)}</text>
        <rect class="wait" x=${x(entry.started)} y=${24 + place * ROW + 4} width=${Math.max(1, x(entry.started + (entry.seconds || 0)) - x(entry.started))} height="4" />
        ${entry.turns.map(([started, engine, environment], turn) => started && html`<rect key=${turn} class="engine" x=${x(started)} y=${24 + place * ROW + 1} width=${Math.max(0.5, x(started + engine) - x(started))} height="10" /><rect class="environment" x=${x(started + engine)} y=${24 + place * ROW + 3} width=${Math.max(0, x(started + engine + environment) - x(started + engine))} height="6" />`)}
      </a>`)}
    </svg>
  </div>`;
}
