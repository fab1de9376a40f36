// Labels and notes of conversations, which a person gives. The server keeps them in a file beside the record.
import { harmless, html, useEffect, useReducer, useState } from "./ui.js";
import * as data from "./data.js";

/** By run: the labels of all its conversations as a list, or undefined before they are loaded. */
const known = new Map();
const listeners = new Set();
const SECONDS = 5; // after which the labels that another page has written are read

export const labelKey = (id, step) => `${step} ${id}`;

function keep(run, entries) {
  if (JSON.stringify(entries) === JSON.stringify(known.get(run))) return;
  known.set(run, entries);
  for (const listener of listeners) listener();
}

const maps = new Map();

/** The labels of the conversations of one kind, by `labelKey`. */
export function useLabels(run, kind) {
  const [, rerender] = useReducer((x) => x + 1, 0);
  useEffect(() => {
    const load = () => data.labels(run).then((entries) => keep(run, entries), () => {});
    listeners.add(rerender);
    load();
    const timer = data.isExport ? null : setInterval(load, 1000 * SECONDS);
    return () => { listeners.delete(rerender); clearInterval(timer); };
  }, [run]);
  const entries = known.get(run), place = `${run} ${kind}`;
  if (maps.get(place)?.[0] !== entries || !maps.has(place)) maps.set(place, [entries, new Map((entries ?? []).filter((entry) => entry.kind === kind && !entry.replaced).map((entry) => [labelKey(entry.id, entry.step), entry]))]);
  return maps.get(place)[1];
}

/** The labels and the note of a conversation, to be read and changed. */
export function Labels({ run, kind, conversation }) {
  const all = useLabels(run, kind);
  const found = all.get(labelKey(conversation.id, conversation.step ?? null));
  const entry = found?.checksum === conversation.checksum ? found : { labels: [], note: "", revision: 0 };
  const replaced = (known.get(run) ?? []).filter((other) => other.replaced && other.kind === kind && other.id === conversation.id && other.step === (conversation.step ?? null));
  const [typed, setTyped] = useState(null), [problem, setProblem] = useState("");
  const names = [...new Set([...all.values()].flatMap((other) => other.labels))].sort();
  if (data.isExport) return (entry.labels.length > 0 || entry.note) && html`<div class="facts"><span>labels <b>${entry.labels.map(harmless).join(", ")}</b></span><span>${harmless(entry.note)}</span></div>`;
  const shown = typed ?? { labels: entry.labels.join(", "), note: entry.note, revision: entry.revision };
  const type = (name) => (event) => setTyped({ ...shown, [name]: event.target.value });
  const save = (event) => {
    event.preventDefault();
    data.setLabels(run, kind, conversation.number, { ...shown, checksum: conversation.checksum, labels: shown.labels.split(",") }).then(async () => {
      keep(run, await data.labels(run));
      setTyped(null); setProblem("");
    }, (error) => setProblem(error.message));
  };
  return html`<form class="facts" aria-label="Labels and note" onSubmit=${save}>
    <label>Labels <input list="labels" size="20" value=${shown.labels} onInput=${type("labels")} placeholder="good, check" /></label><datalist id="labels">${names.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    <label>Note <input size="40" value=${shown.note} onInput=${type("note")} /></label>
    ${typed && html`<button type="submit">Save</button><button type="button" onClick=${() => { setTyped(null); setProblem(""); }}>Undo</button>`}
    ${replaced.length > 0 && html`<span class="muted">labels of a text that a resumed run has replaced, which do not count: ${replaced.map((other) => harmless([...other.labels, other.note].filter(Boolean).join(", "))).join("; ")}</span>`}
    ${problem && html`<span class="bad" role="alert">${problem}</span>`}</form>`;
}
