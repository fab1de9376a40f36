// The table of conversations: filters, order, search, and the keyboard.
import { harmless, html, number, sequential, signed, useEffect, useKeys, useLayoutEffect, useLoaded, useMemo, useReducer, useRef, useState } from "./ui.js";
import * as data from "./data.js";
import { loadedCount, useColumns } from "./columns.js";
import { conversationAt, FILTERS, Link } from "./address.js";
import { labelKey, useLabels } from "./labels.js";
import { usePlace, useVirtual } from "./virtual.js";

const COLUMNS = [
  ["id", "conversation"], ["step", "step"], ["reward", "reward"], ["advantage", "advantage"], ["stop", "stop"], ["turns", "turns"], ["calls", "calls"],
  ["call_errors", "call errors"], ["sampled", "sampled"],
];
/** Columns of texts, which are loaded for the rows in view: they cannot be sorted. */
const EXCERPTS = ["reward parts", "question", "last answer, or failure"];
const TEXTS = new Set(["id", "stop"]);
const last = new Map();
/** Where the list was left, by its address: {scroll, chosen}. */
const places = new Map();
const ROW = 26; // pixels
/** The filter for conversations of rows, which have no agent. */
export const ROWS = "-";
/** The filter for tool calls with any error. */
export const ANY = "*";

/** What is to be said of a run that records a part of its conversations, or null. */
export function partlyRecorded({ recorded }, kind) {
  if (kind !== "train" || !recorded?.every) return null;
  return `a part of all conversations is recorded (record.every=${recorded.every}${recorded.best_and_worst ? `, record.best_and_worst=${recorded.best_and_worst}` : ""})`;
}

/** What is wrong with the text of a filter, or null. */
export function wrong(name, text) {
  if (!text) return null;
  if (name === "step") {
    const ends = text.trim().match(/^(\d+)(?:\s*-\s*(\d+))?$/);
    if (!ends) return `“${text}” is not a step such as 5, or steps such as 5-9`;
    return ends[2] !== undefined && Number(ends[2]) < Number(ends[1]) ? `“${text}”: the first step is after the last` : null;
  }
  return text.trim() !== "" && Number.isFinite(Number(text)) ? null : `“${text}” is not a number such as 0.5`;
}

/** The numbers of the conversations that pass the filters, in their order. `found` are the numbers that a search found, or null. */
export function select(columns, { stop, group, row, agent, failed, errors, label, sort, down, ...texts }, found, labels) {
  const [step, least, most, shortest, longest] = ["step", "least", "most", "shortest", "longest"].map((name) => (wrong(name, texts[name]) ? null : texts[name]));
  const wanted = found && new Set(found);
  const labelled = label && new Set([...labels.values()].filter((entry) => entry.labels.includes(label)).map((entry) => entry.id));
  const numbers = [];
  const from = step ? Number(step.split("-")[0]) : null, to = step ? Number(step.split("-").at(-1)) : null;
  for (let n = 0; n < columns.id.length; n += 1) {
    if (columns.turns[n] === undefined || (wanted && !wanted.has(n))) continue; // not loaded, or not found
    if (step && (columns.step[n] === null || columns.step[n] < from || columns.step[n] > to)) continue;
    if (stop && columns.stop[n] !== stop) continue;
    if (group && columns.group[n] !== group) continue;
    if (row && columns.row[n] !== row) continue;
    if (agent && (columns.agent[n] ?? "") !== (agent === ROWS ? "" : agent)) continue;
    if (failed && columns.error[n] === null) continue;
    if (errors && !columns.call_errors[n]) continue;
    if (least && !(columns.reward[n] !== null && columns.reward[n] >= Number(least))) continue;
    if (most && !(columns.reward[n] !== null && columns.reward[n] <= Number(most))) continue;
    if (label && !labelled.has(columns.id[n])) continue; // few are: the key of each would take long
    if (label && !labels.get(labelKey(columns.id[n], columns.step[n]))?.labels.includes(label)) continue;
    if (shortest && !(columns.sampled[n] >= Number(shortest))) continue;
    if (longest && !(columns.sampled[n] <= Number(longest))) continue;
    numbers.push(n);
  }
  if (!sort) return down === "0" ? numbers : numbers.reverse();
  const values = columns[sort], sign = down === "0" ? 1 : -1;
  return numbers.sort((a, b) => {
    const x = values[a], y = values[b];
    if (x === y) return a - b;
    if (x === null || y === null) return x === null ? 1 : -1; // empty values last
    return (x < y ? -1 : 1) * sign;
  });
}

/** Whether an address has a filter of tool calls. */
const ofCalls = ({ tool, error, pattern }) => [tool, error, pattern].some((value) => value !== undefined);

/** The numbers of the conversations that the search and the filter of tool calls find, or null without them. */
async function foundBy(run, kind, { query, tool, error, pattern }) {
  const parts = await Promise.all([query ? data.search(run, kind, query) : null, ofCalls({ tool, error, pattern }) ? data.withCalls(run, kind, { tool, error, pattern }) : null]);
  const [one, other] = parts.filter(Boolean);
  if (!other) return one ?? null;
  const both = new Set(other);
  return one.filter((n) => both.has(n));
}

/** The order of the list that was shown last: the next and previous conversation while one is open. */
export function neighbour(run, kind, n, by) {
  const numbers = last.get(`${run} ${kind}`);
  if (!numbers) return n + by;
  const place = numbers.indexOf(n);
  return place < 0 ? n + by : numbers[place + by];
}

/** By run, kind and generation of the index: the texts of the conversations that were in view. */
const excerpts = new Map();

/** The texts of the conversations `numbers`, which are loaded when the list has stood still for a moment. */
function useExcerpts(run, kind, generation, numbers) {
  const [, rerender] = useReducer((x) => x + 1, 0);
  const key = `${run} ${kind} ${generation}`;
  if (!excerpts.has(key)) excerpts.set(key, new Map());
  const known = excerpts.get(key), missing = numbers.filter((n) => n !== undefined && !known.has(n));
  useEffect(() => {
    if (!missing.length) return undefined;
    let current = true;
    const timer = setTimeout(() => data.excerpts(run, kind, missing).then((found) => {
      for (const n of missing) if (found[n]) known.set(n, found[n]);
      if (current) rerender();
    }, () => {}), 60);
    return () => { current = false; clearTimeout(timer); };
  }, [key, missing.join()]);
  return known;
}

/** A live list gets rows at its beginning: the row under the pointer, or the first visible one of a list that was scrolled, stays
 *  where it is. */
function useSteadyRows(scroll, numbers, key) {
  const before = useRef({}), pointer = useRef(null);
  useLayoutEffect(() => {
    const element = scroll.current, { numbers: old, key: oldKey } = before.current;
    before.current = { numbers, key };
    if (!old || oldKey !== key || old === numbers || !old.length) return;
    const height = element.querySelector(".head").offsetHeight;
    const at = pointer.current === null ? (element.scrollTop > 0 ? element.scrollTop : null) : element.scrollTop + pointer.current - height;
    if (at === null) return;
    const place = Math.max(0, Math.min(old.length - 1, Math.floor(at / ROW))), now = numbers.indexOf(old[place]);
    if (now >= 0 && now !== place) element.scrollTop += (now - place) * ROW;
  }, [numbers, key]);
  return {
    onMouseMove: (event) => { pointer.current = event.clientY - scroll.current.getBoundingClientRect().top; },
    onMouseLeave: () => { pointer.current = null; },
  };
}

/** The rows of conversations as CSV, with all columns. A text that a spreadsheet would take for a formula begins with a quote. */
export function csv(columns, numbers) {
  const names = Object.keys(columns);
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [names, ...numbers.map((n) => names.map((name) => columns[name][n]))].map((row) => row.map(cell).join(",")).join("\r\n");
}

function download(name, blob) {
  const url = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Saves the listed conversations: their columns, what was recorded, or rows for supervised fine-tuning. */
function Save({ run, kind, name, columns, numbers }) {
  const [said, setSaid] = useState("");
  const lines = (form) => {
    setSaid("Saving…");
    data.selection(run, kind, numbers, form).then(({ blob, lines, leftOut }) => {
      const without = Object.entries(leftOut).map(([reason, count]) => `${count} that ${reason}`).join(", ");
      setSaid(form === "sft" ? `${lines} rows${without ? `; left out: ${without}` : ""}` : "");
      if (lines) download(`${name}${form === "sft" ? "-sft" : ""}.jsonl`, blob);
    }, (error) => setSaid(error.message));
  };
  return html`<span class="choice" role="group" aria-label="Save the listed conversations"><button onClick=${() => download(`${name}.csv`, new Blob([csv(columns, numbers)], { type: "text/csv" }))} title="the listed conversations, with all columns">CSV</button>
    ${!data.isExport && html`<button onClick=${() => lines("jsonl")} title="the listed conversations as they were recorded">JSON lines</button><button onClick=${() => lines("sft")} title="the listed conversations as rows for turnwise sft">SFT</button>`}</span>${said && html`<span class="muted" role="status">${said}</span>`}`;
}

export function Conversations({ runs, run, kind, address, go, link }) {
  const columns = useColumns(run, kind, runs);
  const [typed, setTyped] = useState(address.query || "");
  useEffect(() => setTyped(address.query || ""), [address.query]); // the address was changed elsewhere
  useEffect(() => { const timer = setTimeout(() => typed !== (address.query || "") && go({ query: typed }), 250); return () => clearTimeout(timer); }, [typed]);
  const query = JSON.stringify([run, kind, address.query, address.tool, address.error, address.pattern]);
  const [fresh] = useLoaded(() => foundBy(run, kind, address), `${query} ${runs[run].conversations[kind]}`);
  const searched = Boolean(address.query || ofCalls(address)), lastFound = useRef([]);
  if (fresh) lastFound.current = [query, fresh];
  const found = searched && lastFound.current[0] === query ? lastFound.current[1] : null; // of the last search, while the next is under way
  const total = runs[run].lines[kind], loaded = loadedCount(run, kind);
  const labels = useLabels(run, kind);
  const key = JSON.stringify(FILTERS.map((name) => address[name]));
  const numbers = useMemo(() => (columns && !(searched && !found) ? select(columns, address, found, labels) : []), [columns, key, found, labels]);
  const names = [...new Set([...labels.values()].flatMap((entry) => entry.labels))].sort();
  const rewards = useMemo(() => {
    let low = 0, high = 1e-9;
    for (const value of columns?.reward ?? []) { if (value < low) low = value; if (value > high) high = value; } // null is neither
    return [low, high];
  }, [columns]);
  const stops = useMemo(() => [...new Set(columns?.stop ?? [])].filter(Boolean).sort(), [columns]);
  const agents = useMemo(() => [...new Set(columns ? columns.agent : [])].filter((name) => name).sort(), [columns]);
  last.set(`${run} ${kind}`, numbers);
  const scroll = useRef(), search = useRef();
  const virtual = useVirtual(scroll, numbers.length, ROW);
  const listed = `${run} ${kind} ${key}`;
  const [chosen, setChosen] = useState(null);
  const picked = useMemo(() => Math.max(0, numbers.indexOf(chosen)), [numbers, chosen]);
  usePlace(scroll, places, listed, numbers.length > 0, { chosen }, (place) => setChosen(place.chosen));
  const steady = useSteadyRows(scroll, numbers, listed);
  useEffect(() => { // the conversation that was open, also if others were opened from it
    const place = address.id === undefined ? -1 : numbers.findIndex((n) => columns.id[n] === address.id && (address.at === undefined || columns.step[n] === Number(address.at)));
    if (place < 0) return;
    setChosen(numbers[place]);
    const { scrollTop, clientHeight } = scroll.current, top = place * ROW;
    if (top < scrollTop || top > scrollTop + clientHeight - 2 * ROW) virtual.scrollToIndex(place, { align: "center" });
  }, [listed, numbers.length > 0]);
  const items = virtual.getVirtualItems();
  const texts = useExcerpts(run, kind, runs[run].indexed[kind].generation, items.map((item) => numbers[item.index]));
  const at = (n) => ({ view: "conversation", ...conversationAt(columns, n) });
  const pick = (place) => { const next = Math.max(0, Math.min(numbers.length - 1, place)); setChosen(numbers[next]); virtual.scrollToIndex(next); };
  useKeys((event) => {
    if (event.key === "j" || event.key === "ArrowDown") { event.preventDefault(); pick(picked + 1); }
    else if (event.key === "k" || event.key === "ArrowUp") { event.preventDefault(); pick(picked - 1); }
    else if (event.key === "PageDown") { event.preventDefault(); pick(picked + 20); }
    else if (event.key === "PageUp") { event.preventDefault(); pick(picked - 20); }
    else if (event.key === "Enter" && !event.target.closest("button, a, input") && numbers.length) go(at(numbers[picked]));
    else if (event.key === "/") { event.preventDefault(); search.current.focus(); }
    else if (event.key === "Escape") event.target.blur?.();
    else if (event.key === "g" && numbers.length) go({ ...at(numbers[picked]), view: "group" });
  });
  const sortBy = (name) => go(address.sort === name ? { down: address.down === "0" ? null : "0" } : { sort: name, down: TEXTS.has(name) ? "0" : null });
  const field = (name, label, extra) => html`<${Field} label=${label} value=${address[name] || ""} problem=${wrong(name, address[name])} onDone=${(text) => go({ [name]: text })} ...${extra} />`;
  const check = (name, label) => html`<label><input type="checkbox" checked=${address[name] === "1"} onChange=${(event) => go({ [name]: event.target.checked ? "1" : null })} />${label}</label>`;
  return html`
    <div class="bar" role="search">
      <label>Search <input ref=${search} type="search" size="22" value=${typed} onInput=${(event) => setTyped(event.target.value)} placeholder='words or "a phrase"' /></label>
      ${field("step", "Step", { placeholder: "5 or 5-9" })} ${field("least", "Reward from")} ${field("most", "to")}
      <label>Stop <select value=${address.stop || ""} onChange=${(event) => go({ stop: event.target.value })}><option value="">all</option>${stops.map((stop) => html`<option key=${stop}>${stop}</option>`)}</select></label>
      ${agents.length > 0 && html`<label>Agent <select value=${address.agent || ""} onChange=${(event) => go({ agent: event.target.value })}><option value="">all</option><option value=${ROWS}>rows</option>${agents.map((name) => html`<option key=${name}>${name}</option>`)}</select></label>`}
      ${(names.length > 0 || address.label) && html`<label>Label <select value=${address.label || ""} onChange=${(event) => go({ label: event.target.value })}><option value="">all</option>${names.map((name) => html`<option key=${name}>${name}</option>`)}</select></label>`}
      ${check("failed", "failed")} ${check("errors", "tool errors")}
      ${address.row && html`<button onClick=${() => go({ row: null })}>row ${address.row} ✕</button>`}
      ${address.group && html`<button onClick=${() => go({ group: null })}>group ${address.group} ✕</button>`}
      ${(address.shortest || address.longest) && html`<button onClick=${() => go({ shortest: null, longest: null })}>${number(Number(address.shortest ?? 0))} to ${address.longest ? number(Number(address.longest)) : "any"} sampled tokens ✕</button>`}
      ${ofCalls(address) && html`<button onClick=${() => go({ tool: null, error: null, pattern: null })} title=${address.pattern}>calls${address.tool === undefined ? "" : ` of ${address.tool ? harmless(address.tool) : "a tool without a name"}`}${address.error ? ` with ${address.error === ANY ? "any error" : harmless(address.error)}` : ""}${address.pattern === "" ? " without a message" : ""} ✕</button>`}
      <span class="muted" role="status">${numbers.length.toLocaleString("en")} of ${total.toLocaleString("en")}${columns && loaded < total ? `; the newest ${loaded.toLocaleString("en")} are loaded so far` : ""}</span>
      ${runs[run].left_out?.[kind] > 0 && html`<span class="muted">this file has ${total.toLocaleString("en")} of the ${(total + runs[run].left_out[kind]).toLocaleString("en")} conversations of the run</span>`}
      ${partlyRecorded(runs[run], kind) && html`<span class="muted">${partlyRecorded(runs[run], kind)}</span>`}
      ${numbers.length > 0 && html`<${Save} run=${run} kind=${kind} name=${`${runs[run].name.replaceAll("/", "-")}-${kind}`} columns=${columns} numbers=${numbers} />`}
      ${FILTERS.some((name) => address[name] !== undefined) && html`<button onClick=${() => { setTyped(""); go(Object.fromEntries(FILTERS.map((name) => [name, null]))); }}>Reset</button>`}
    </div>
    <div class="scroll" ref=${scroll} tabindex="0" role="region" aria-label="Conversations" ...${steady}>
      <div class="table" role="grid" aria-label="Conversations" aria-rowcount=${numbers.length + 1}>
        <div role="rowgroup"><div class="row head" role="row">${COLUMNS.map(([name, text]) => html`<span key=${name} role="columnheader" class=${TEXTS.has(name) ? "" : "num"}
          aria-sort=${address.sort === name ? (address.down === "0" ? "ascending" : "descending") : "none"}><button onClick=${() => sortBy(name)}>${text}${address.sort === name ? (address.down === "0" ? " ▲" : " ▼") : ""}</button></span>`)}${EXCERPTS.map((text) => html`<span key=${text} role="columnheader" class="text">${text}</span>`)}</div></div>
        ${columns && html`<div class="body" role="rowgroup" style=${{ height: `${virtual.getTotalSize()}px`, position: "relative" }}>
          ${items.map((item) => html`<${Row} key=${numbers[item.index]} n=${numbers[item.index]} columns=${columns} top=${item.start} place=${item.index} label=${labels.get(labelKey(columns.id[numbers[item.index]], columns.step[numbers[item.index]]))} selected=${item.index === picked} rewards=${rewards} texts=${texts.get(numbers[item.index])} to=${link(at(numbers[item.index]))} onPick=${setChosen} />`)}
        </div>`}
      </div>
      ${!columns && html`<p class="loading">Loading…</p>`}
      ${columns && !numbers.length && html`<p class="loading">${columns.id.length ? (loaded < total ? "None of the conversations that are loaded so far matches." : "No conversation matches.") : "No conversations yet."}</p>`}
    </div>`;
}

/** A filter that takes effect when its field is left or with Enter. What is typed until then outlasts the drawing of a live page. */
function Field({ label, value, problem, onDone, ...extra }) {
  const [typed, setTyped] = useState(null); // null: the text is that of the address
  useEffect(() => setTyped(null), [value]);
  const done = (text) => (text === value ? setTyped(null) : onDone(text));
  return html`<label class=${problem ? "wrong" : ""}>${label} <input size="6" value=${typed ?? value} aria-invalid=${problem ? "true" : undefined} onInput=${(event) => setTyped(event.target.value)} onChange=${(event) => done(event.target.value.trim())} ...${extra} />${problem && html`<span class="bad" role="alert">${problem}</span>`}</label>`;
}

function Row({ n, columns, label, top, place, selected, rewards, texts, to, onPick }) {
  if (n === undefined || columns.id[n] === undefined) return null;
  const reward = columns.reward[n];
  const parts = Object.keys(texts?.parts ?? {}).length > 1 ? Object.entries(texts.parts).map(([name, value]) => `${harmless(name)} ${number(value)}`).join(", ") : "";
  const share = reward === null ? 0 : (reward - rewards[0]) / (rewards[1] - rewards[0]);
  return html`<div class="row" role="row" aria-rowindex=${place + 2} aria-selected=${selected} style=${{ transform: `translateY(${top}px)` }} onClick=${() => onPick(n)}>
    <span role="gridcell"><${Link} class="whole" to=${to} tabindex="-1">${columns.id[n] ?? "(damaged)"}</${Link}>${columns.agent[n] !== null && html` <i class="muted" title=${`an agent of the episode ${columns.episode[n]}`}>agent ${columns.agent[n]}</i>`}${label && html` <b class="label" title=${label.note}>${label.labels.map(harmless).join(", ") || "note"}</b>`}</span>
    <span role="gridcell" class="num">${number(columns.step[n])}</span>
    <span role="gridcell" class="num"><i class="meter" style=${{ width: `${Math.round(share * 34)}px`, background: sequential(1) }}></i>${reward === null ? "–" : number(reward)}</span>
    <span role="gridcell" class="num">${columns.advantage[n] === null ? "–" : signed(columns.advantage[n])}</span>
    <span role="gridcell" class=${columns.error[n] === null ? "" : "bad"}>${columns.stop[n]}</span>
    ${["turns", "calls", "call_errors", "sampled"].map((name) => html`<span key=${name} role="gridcell" class="num">${number(columns[name][n])}</span>`)}
    <span role="gridcell" class="text" title=${parts}>${parts}</span><span role="gridcell" class="text" title=${texts?.question}>${harmless(texts?.question ?? "")}</span>
    ${columns.error[n] === null ? html`<span role="gridcell" class="text" title=${texts?.answer}>${columns.mismatch[n] ? html`<b class="bad">mismatch</b> ` : ""}${harmless(texts?.answer ?? "")}</span>`
      : html`<span role="gridcell" class="text bad" title=${texts?.failure}>${columns.error[n]}${texts?.failure ? `: ${harmless(texts.failure)}` : ""}</span>`}
  </div>`;
}
