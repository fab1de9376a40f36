// A search in all conversations of all runs, of training and of evaluations.
import { harmless, html, number, Problem, useEffect, useKeys, useLoaded, useRef, useState } from "./ui.js";
import * as data from "./data.js";
import { Link, NO_FILTERS } from "./address.js";

export function Search({ runs, address, go, link }) {
  const query = address.query ?? "";
  const [typed, setTyped] = useState(query), field = useRef();
  useEffect(() => setTyped(query), [query]);
  useEffect(() => { const timer = setTimeout(() => typed !== query && go({ query: typed }), 250); return () => clearTimeout(timer); }, [typed]);
  const indexed = runs.reduce((sum, run) => sum + run.conversations.train + run.conversations.eval, 0);
  const [found, problem] = useLoaded(() => (query.trim() ? data.searchAll(query) : Promise.resolve([])), `${query} ${indexed}`, query);
  useKeys((event) => { if (event.key === "/") { event.preventDefault(); field.current.focus(); } else if (event.key === "Escape") event.target.blur?.(); });
  const hits = (found ?? []).filter(({ total }) => total > 0), total = hits.reduce((sum, hit) => sum + hit.total, 0);
  return html`
    <div class="bar" role="search"><label>Search in all runs <input ref=${field} type="search" size="34" value=${typed} onInput=${(event) => setTyped(event.target.value)} placeholder='words, "a phrase", or an id' /></label>
      <span class="muted" role="status">${!query.trim() ? `${indexed.toLocaleString("en")} conversations of ${runs.length} ${runs.length === 1 ? "run" : "runs"}` : found ? `${total.toLocaleString("en")} found in ${new Set(hits.map(({ run }) => run)).size} of ${runs.length} ${runs.length === 1 ? "run" : "runs"}` : "Searching…"}</span></div>
    ${problem && html`<${Problem} text=${problem} />`}
    <div class="scroll" tabindex="0" role="region" aria-label="Found conversations">${hits.map(({ run, kind, total: count, rows }) => html`<table key=${`${run} ${kind}`} class="pairs options found">
      <caption>${runs[run]?.name}, ${kind === "eval" ? "evaluations" : "training"}: <${Link} to=${link({ ...NO_FILTERS, view: "conversations", run, kind, query })}>${count.toLocaleString("en")} ${count === 1 ? "conversation" : "conversations"}</${Link}></caption>
      <thead><tr>${["conversation", "step", "reward", "stop", "question", "last answer, or failure"].map((text) => html`<th key=${text}>${text}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.number}><td><${Link} to=${link({ view: "conversation", run, kind, ...(row.id === null ? { id: null, at: null, number: row.number } : { id: row.id, at: row.step, number: null }) })}>${row.id ?? "(damaged)"}</${Link}></td><td>${number(row.step)}</td><td>${row.reward === null ? "–" : number(row.reward)}</td><td>${row.stop}</td><td>${harmless(row.question ?? "")}</td><td class=${row.error === null ? "" : "bad"}>${harmless(row.error === null ? row.answer ?? "" : row.failure ?? row.error)}</td></tr>`)}</tbody></table>`)}
      ${found && query.trim() && !hits.length && html`<p class="loading">No conversation of any run matches.</p>`}</div>`;
}
