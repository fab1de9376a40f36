// The conversations of one row over the training steps, and how two of its answers differ.
import { diffArrays } from "diff";
import { Choice, harmless, html, number, Problem, sequential, useKeys, useLoaded, useMemo, useState } from "./ui.js";
import * as data from "./data.js";
import { conversationAt, Link } from "./address.js";
import { labelKey } from "./labels.js";
import { useColumns } from "./columns.js";

const LONGEST_SEARCH = 60; // milliseconds: a frame must not wait for the comparison of long texts

/** How two texts differ in words: a list of {value, added, removed}; null if they have too little in common. */
export function difference(before, after) {
  const words = (text) => text.match(/\S+\s*|\s+/g) ?? [];
  return diffArrays(words(before), words(after), { timeout: LONGEST_SEARCH })?.map(({ value, added, removed }) => ({ value: value.join(""), added, removed })) ?? null;
}

/** What the model wrote: its last turn, or all of them. */
function written(conversation, all) {
  const texts = conversation.turns.map((turn) => turn.text ?? "");
  return all ? texts.join("\n\n") : texts.at(-1) ?? "";
}

function Difference({ before, after }) {
  const parts = useMemo(() => difference(before, after), [before, after]);
  if (!parts) return html`<p class="muted">The answers have too little in common: both are shown in full.</p><pre class="message"><del>${harmless(before)}</del></pre><pre class="message"><ins>${harmless(after)}</ins></pre>`;
  if (parts.every(({ added, removed }) => !added && !removed)) return html`<p class="muted">The answers are equal.</p><pre class="message">${harmless(after)}</pre>`;
  return html`<pre class="message difference">${parts.map(({ value, added, removed }, n) => (added ? html`<ins key=${n}>${harmless(value)}</ins>` : removed ? html`<del key=${n}>${harmless(value)}</del>` : html`<span key=${n}>${harmless(value)}</span>`))}</pre>`;
}

export function RowPage({ runs, run, kind, address, go, link }) {
  const columns = useColumns(run, kind, runs);
  const [side, setSide] = useState("b");
  const steps = useMemo(() => {
    const found = new Map();
    columns?.row.forEach((row, n) => { if (row === address.row && !columns.agent[n]) found.set(columns.step[n], [...(found.get(columns.step[n]) ?? []), n]); });
    return [...found].sort(([a], [b]) => a - b);
  }, [columns, address.row]);
  const all = steps.flatMap(([, numbers]) => numbers);
  const nameOf = (n) => labelKey(columns.id[n], columns.step[n]); // the same after the record was written again
  const at = (name, other) => { return all.find((n) => nameOf(n) === address[name]) ?? other; };
  const a = at("a", all[0]), b = at("b", all.at(-1));
  const load = (n) => useLoaded(() => (n === undefined ? Promise.resolve(null) : data.conversation(run, kind, n)), `${run} ${kind} ${n}`);
  const [before, problem] = load(a), [after, otherProblem] = load(b);
  const parts = address.show === "all";
  useKeys((event) => { if (event.key === "Escape") go({ view: "conversations" }); });
  if (!columns) return html`<p class="loading">Loading…</p>`;
  if (!all.length) return html`<p class="loading">There is no conversation of this row.</p>`;
  const rewards = all.map((n) => columns.reward[n]).filter((value) => value !== null), low = Math.min(...rewards), high = Math.max(...rewards);
  const strength = (reward) => (reward === null || high === low ? 0 : (reward - low) / (high - low));
  const name = (n) => html`<${Link} to=${link({ view: "conversation", ...conversationAt(columns, n), a: null, b: null, show: null })}>${columns.id[n]}</${Link}> (step ${columns.step[n]}, reward ${columns.reward[n] === null ? "none" : number(columns.reward[n])})`;
  return html`
    <div class="bar"><${Link} class="button" to=${link({ view: "conversations" })}>← List</${Link}><b>row ${address.row}</b><span>${all.length} conversations in ${steps.length} ${steps.length === 1 ? "step" : "steps"}</span>
      <span>A click chooses</span><${Choice} label="A click chooses" value=${side} onChange=${setSide} options=${[["a", "the first answer"], ["b", "the second answer"]]} />
      <${Choice} label="Compare" value=${parts ? "all" : "last"} onChange=${(value) => go({ show: value === "all" ? "all" : null })} options=${[["last", "last turn"], ["all", "all turns"]]} /></div>
    <section class="strip" tabindex="0" aria-label="The row over the steps">${steps.map(([step, numbers]) => html`<div key=${step}><span class="muted">${step ?? "–"}</span>${numbers.map((n) => html`<button key=${n} class=${n === a ? "first" : n === b ? "second" : ""} aria-pressed=${String(n === a || n === b)} aria-label=${`step ${step}, reward ${columns.reward[n] === null ? "none" : number(columns.reward[n])}`} style=${{ background: sequential(strength(columns.reward[n])) }} onClick=${() => go({ [side]: nameOf(n) })}>${columns.reward[n] === null ? "–" : number(columns.reward[n])}</button>`)}</div>`)}</section>
    ${(problem || otherProblem) && html`<${Problem} text=${problem || otherProblem} />`}
    <div class="scroll" tabindex="0" role="region" aria-label="Difference"><p class="facts"><span><del>only in</del> ${name(a)}</span><span><ins>only in</ins> ${name(b)}</span></p>
      ${before && after && html`<${Difference} before=${written(before, parts)} after=${written(after, parts)} />`}</div>`;
}
