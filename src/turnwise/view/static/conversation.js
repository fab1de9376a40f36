// One conversation as chat or token by token; a group side by side; two conversations side by side.
import { Choice, contentParts, harmless, html, number, Problem, seconds as duration, signed, useKeys, useLoaded, useMemo, useReducer, useState } from "./ui.js";
import * as data from "./data.js";
import { conversationAt, Link, NO_FILTERS } from "./address.js";
import { useColumns } from "./columns.js";
import { byRow } from "./compare.js";
import { labelKey, Labels } from "./labels.js";
import { neighbour } from "./conversations.js";
import { joined, Tokens } from "./tokens.js";

function advantage(value) {
  if (value === null || value === undefined) return null;
  return Array.isArray(value) ? `per token, mean ${signed(value.reduce((a, b) => a + b, 0) / (value.length || 1))}` : signed(value);
}

function Fact({ name, value, bad }) {
  return value === null || value === undefined || value === "" ? null : html`<span class=${bad ? "bad" : ""}>${name} <b>${value}</b></span>`;
}

function Facts({ conversation }) {
  const parts = Object.entries(conversation.reward_parts);
  const columns = [...Object.entries(conversation.row || {}).filter(([name]) => name !== "id"), ...Object.entries(conversation.row_columns || {})];
  const short = (value) => { const text = typeof value === "string" ? value : JSON.stringify(value); return text.length > 160 ? `${text.slice(0, 160)}…` : text; };
  return html`<div class="facts">
    <${Fact} name="reward" value=${conversation.reward === null ? "none" : number(conversation.reward)} />
    ${parts.length > 1 && parts.map(([name, value]) => html`<${Fact} key=${name} name=${`reward/${name}`} value=${number(value)} />`)}
    ${Object.entries(conversation.metrics || {}).map(([name, value]) => html`<${Fact} key=${name} name=${name} value=${number(value)} />`)}
    <${Fact} name="stop" value=${conversation.stop} /><${Fact} name="turns" value=${conversation.turns.length} />
    <${Fact} name="segments" value=${conversation.segments.length > 1 ? conversation.segments.length : null} />
    <${Fact} name="time" value=${duration(conversation.seconds)} /><${Fact} name="step" value=${conversation.step} />
    ${columns.map(([name, value]) => html`<span key=${name} class="muted">${name} ${harmless(short(value))}</span>`)}
  </div>
  ${conversation.error && html`<${Problem} text=${`${conversation.error.kind}: ${conversation.error.message}\n${conversation.error.traceback || ""}`} />`}
  ${conversation.template_mismatch && html`<${Problem} text=${`template mismatch: ${conversation.template_mismatch}`} />`}`;
}

const LONGEST_TEXT = 6000, SHOWN = 3000; // characters

/** A text of a message: the middle of a long one is folded away until it is asked for. */
function Text({ text }) {
  const [open, setOpen] = useState(false);
  if (open || text.length <= LONGEST_TEXT) return html`<pre>${harmless(text)}</pre>`;
  return html`<pre>${harmless(text.slice(0, SHOWN))}</pre><button onClick=${() => setOpen(true)}>show ${(text.length - 2 * SHOWN).toLocaleString("en")} more characters</button><pre>${harmless(text.slice(-SHOWN))}</pre>`;
}

function Content({ content, run }) {
  return contentParts(content).map((part, place) => {
    if (part.type === "text") return html`<${Text} key=${place} text=${String(part.text)} />`;
    const reference = part[part.type];
    const url = part.type === "image" && typeof reference === "string" ? (reference.startsWith("sha256:") ? data.imageUrl(run, reference) : null) : null;
    return url ? html`<img key=${place} src=${url} alt="image in the message" />` : html`<pre key=${place} class="muted">[${part.type}: ${JSON.stringify(reference)}]</pre>`;
  });
}

function Turn({ turn, index, earned }) {
  const seconds = turn.seconds || {};
  return html`<span><b>turn ${index}</b></span><${Fact} name="reward" value=${earned ? number(turn.reward) : null} /><${Fact} name="advantage" value=${advantage(turn.advantage)} />
    <${Fact} name="value" value=${Array.isArray(turn.value) ? "per token" : number(turn.value)} /><${Fact} name="weight" value=${turn.weight === 1 ? null : number(turn.weight)} />
    <${Fact} name="engine" value=${seconds.engine ? duration(seconds.engine) : null} /><${Fact} name="environment" value=${seconds.environment ? duration(seconds.environment) : null} />
    <${Fact} name="finish" value=${turn.finish_reason === "stop" ? null : turn.finish_reason} bad /><${Fact} name="cut after" value=${turn.kept_tokens === null || turn.kept_tokens === undefined ? null : `${turn.kept_tokens} tokens`} />`;
}

function Message({ message, turns, earned, run }) {
  const reasoning = turns.map(([, turn]) => turn.reasoning).find(Boolean) || message.reasoning_content;
  const calls = turns.flatMap(([, turn]) => turn.tool_calls || []);
  const role = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "";
  return html`<article class=${`message ${role}`}>
    <div class="who"><b>${message.role}${message.name ? ` ${message.name}` : ""}</b>${turns.map(([index, turn]) => html`<${Turn} key=${index} turn=${turn} index=${index} earned=${earned} />`)}</div>
    ${reasoning && html`<pre class="reasoning">${harmless(reasoning)}</pre>`}
    <${Content} content=${message.content} run=${run} />
    ${calls.map((call, place) => html`<div key=${place} class="call"><b>${call.name || "call"}</b> <code>${harmless(JSON.stringify(call.arguments))}</code>
      ${call.error && html` <span class="bad">${harmless(call.error)}${call.parse_error ? `: ${harmless(call.parse_error)}` : ""}</span>`}${call.reward ? html` <span>reward ${number(call.reward)}</span>` : null}${call.attempts > 1 ? html` <span>${call.attempts} attempts</span>` : null}</div>`)}
    ${!calls.length && (message.tool_calls || []).map((call, place) => html`<div key=${place} class="call"><b>${call.function?.name}</b> <code>${harmless(JSON.stringify(call.function?.arguments))}</code></div>`)}
  </article>`;
}

function Messages({ messages, conversation, history, run }) {
  // else the turns have no rewards: functions gave that of the conversation
  const earned = conversation.turns.some((turn) => turn.reward || Object.keys(turn.rewards || {}).length);
  return messages.map((message, place) => {
    const turns = conversation.turns.map((turn, index) => [index, turn]).filter(([, turn]) => (turn.history ?? 0) === history && turn.message_index === place);
    return html`<${Message} key=${place} message=${message} turns=${turns} earned=${earned} run=${run} />`;
  });
}

export function Chat({ conversation, run }) {
  const previous = conversation.previous_histories || [];
  return html`<div class="scroll" tabindex="0" role="group" aria-label=${`Messages of ${conversation.id}`}>
    <${Facts} conversation=${conversation} />
    ${conversation.tools?.length > 0 && html`<details><summary class="bar">Tools: ${conversation.tools.map((tool) => (tool.function ?? tool).name).join(", ")}</summary><pre class="message">${JSON.stringify(conversation.tools, null, 1)}</pre></details>`}
    ${previous.map((messages, history) => html`<details key=${history}><summary class="bar">history ${history}, replaced by the environment (${messages.length} messages)</summary><${Messages} messages=${messages} conversation=${conversation} history=${history} run=${run} /></details>`)}
    <${Messages} messages=${conversation.messages} conversation=${conversation} history=${previous.length} run=${run} />
  </div>`;
}

/** The number of the conversation that an address names, if its row is loaded. */
function numberAt(columns, { id, at, number: n }) {
  if (id === undefined) return Number(n) || 0;
  const step = at === undefined ? null : Number(at);
  const found = columns ? columns.id.findLastIndex((other, place) => other === id && (step === null || columns.step[place] === step)) : -1;
  return found < 0 ? undefined : found;
}

export function ConversationPage({ runs, run, kind, address, go, link }) {
  const key = `${run} ${kind} ${address.id} ${address.at} ${address.number}`;
  const columns = useColumns(run, kind, runs);
  const [conversation, problem] = useLoaded(() => data.conversationOf(run, kind, address), key);
  const n = useMemo(() => conversation?.number ?? numberAt(columns, address), [conversation, columns, key]);
  const count = runs[run].conversations[kind] && runs[run].lines[kind];
  const mode = address.show === "tokens" ? "tokens" : "chat";
  const move = (by) => {
    const next = n === undefined ? undefined : neighbour(run, kind, n, by);
    if (next === undefined || next < 0 || next >= count) return;
    if (columns?.id[next] !== undefined) go({ ...conversationAt(columns, next), segment: null });
    else data.conversation(run, kind, next).then((other) => go({ id: other.id, at: other.step, number: null, segment: null }), () => {});
  };
  useKeys((event) => {
    if (event.key === "t") go({ show: mode === "chat" ? "tokens" : "chat" });
    else if (event.key === "n" || event.key === "j") move(1);
    else if (event.key === "p" || event.key === "k") move(-1);
    else if (event.key === "g") go({ view: "group" });
    else if (event.key === "Escape") go({ view: "conversations" });
  });
  return html`
    <div class="bar">
      <${Link} class="button" to=${link({ view: "conversations" })}>← List</${Link}>
      <button onClick=${() => move(-1)} aria-label="Previous conversation">‹</button><button onClick=${() => move(1)} aria-label="Next conversation">›</button>
      <${Choice} label="Show as" value=${mode} onChange=${(value) => go({ show: value })} options=${[["chat", "Chat"], ["tokens", "Tokens"]]} />
      <${Link} class="button" to=${link({ view: "group" })}>Group</${Link}>
      ${conversation?.row?.id !== undefined && conversation?.row?.id !== null && html`<${Link} class="button" to=${link({ ...NO_FILTERS, view: "conversations", row: String(conversation.row.id), sort: "step", down: "0" })}>This row over time</${Link}>${/* the page of a row is without the agents */ ""}${!conversation.agent && html`<${Link} class="button" to=${link({ view: "row", row: String(conversation.row.id), id: null, at: null, a: null, b: labelKey(conversation.id, conversation.step ?? null), show: null })}>Answers compared</${Link}>`}`}
      <${Episode} columns=${columns} n=${n} link=${link} />
      <b>${conversation?.id}</b>
      ${conversation && html`<span>reward ${conversation.reward === null ? "none" : number(conversation.reward)}</span>`}
    </div>
    ${problem && html`<${Problem} text=${problem} />`}
    ${conversation && conversation.id !== undefined && html`<${Labels} key=${`labels ${key}`} run=${run} kind=${kind} conversation=${conversation} />`}
    ${conversation && (mode === "tokens" ? html`<${Tokens} key=${key} conversation=${conversation} address=${address} go=${go} />` : html`<${Chat} conversation=${conversation} run=${run} />`)}`;
}

/** Links to the other conversations of an episode: that of the row, and those of the agents that its environment opened. */
function Episode({ columns, n, link }) {
  if (columns?.id[n] === undefined || columns.episode[n] === null) return null;
  const of = (place) => columns.episode[place] === columns.episode[n] && columns.step[place] === columns.step[n];
  const numbers = columns.id.flatMap((_, place) => (of(place) ? [place] : []));
  if (numbers.length < 2) return null;
  const name = (place) => columns.agent[place] ?? "row";
  return html`<span class="muted">episode</span>${numbers.map((place) => html`<${Link} key=${place} class="button" aria-current=${place === n ? "page" : undefined} title=${columns.id[place]} to=${link({ view: "conversation", ...conversationAt(columns, place) })}>${name(place)}</${Link}>`)}`;
}

/** A conversation beside others. `scale` is that of the colours of all of them; `onScale` receives the conversation's own. */
function Pane({ run, kind, number: n, title, to, mode, address, go, scale, onScale, children }) {
  const [conversation, problem] = useLoaded(() => data.conversation(run, kind, n), `${run} ${kind} ${n}`);
  return html`<section class="pane" aria-label=${title}><h2>${to ? html`<${Link} to=${to}>${title}</${Link}>` : title} ${conversation && html`<span class="muted">reward ${conversation.reward === null ? "none" : number(conversation.reward)}, advantage ${[...new Set(conversation.turns.map((turn) => advantage(turn.advantage) ?? "none"))].join("; ")}</span>`}</h2>
    ${children}
    ${problem && html`<${Problem} text=${problem} />`}
    ${conversation && (mode === "tokens" ? html`<${Tokens} conversation=${conversation} address=${address} go=${go} scale=${scale} onScale=${onScale} />` : html`<${Chat} conversation=${conversation} run=${run} />`)}</section>`;
}

/** The common scale of the colours of several panes, and a function for each that takes its own. */
function useCommonScale(key) {
  const [scales, add] = useReducer((before, [of, name, scale]) => ({ of, scales: { ...(before.of === of ? before.scales : {}), [name]: scale } }), { of: key, scales: {} });
  const common = useMemo(() => joined(scales.of === key ? Object.values(scales.scales) : []), [scales, key]);
  return [common, (name) => (scale) => add([key, name, scale])];
}

const MOST_PANES = 32;

export function GroupPage({ runs, run, kind, address, go, link }) {
  const columns = useColumns(run, kind, runs);
  const n = useMemo(() => numberAt(columns, address), [columns, address.id, address.at, address.number]);
  const mode = address.show === "tokens" ? "tokens" : "chat";
  const [scale, onScale] = useCommonScale(`${run} ${kind} ${n}`);
  useKeys((event) => {
    if (event.key === "Escape" || event.key === "g") go({ view: "conversation" });
    else if (event.key === "t") go({ show: mode === "chat" ? "tokens" : "chat" });
  });
  if (!columns || n === undefined || columns.id[n] === undefined) return html`<p class="loading">Loading…</p>`;
  const group = columns.group[n], step = columns.step[n];
  const numbers = columns.group.flatMap((other, place) => (other === group && columns.step[place] === step ? [place] : []));
  const rewards = numbers.map((place) => columns.reward[place]).filter((value) => value !== null);
  const mean = rewards.length ? number(rewards.reduce((a, b) => a + b, 0) / rewards.length) : "none";
  numbers.sort((a, b) => (columns.reward[b] ?? -Infinity) - (columns.reward[a] ?? -Infinity) || a - b);
  return html`
    <div class="bar"><${Link} class="button" to=${link({ view: "conversation" })}>← Conversation</${Link}>
      <${Choice} label="Show as" value=${mode} onChange=${(value) => go({ show: value })} options=${[["chat", "Chat"], ["tokens", "Tokens"]]} />
      <b>group ${group}</b><span>${numbers.length} conversations, mean reward ${mean}, highest first${numbers.length > MOST_PANES ? `; the first ${MOST_PANES} are shown` : ""}</span>
      ${runs[run].recorded?.best_and_worst && html`<span class="muted">the run records a part of each group (record.best_and_worst=${runs[run].recorded.best_and_worst}), so this is not the mean of the group</span>`}</div>
    <div class="columns" tabindex="0" role="region" aria-label="Group">${numbers.slice(0, MOST_PANES).map((place) => html`<${Pane} key=${place} run=${run} kind=${kind} number=${place} title=${columns.id[place]} to=${link({ view: "conversation", ...conversationAt(columns, place) })} mode=${mode} address=${address} go=${go} scale=${scale} onScale=${onScale(place)} />`)}</div>`;
}

/** The same row in two runs: a conversation of each, of which all samples can be chosen. */
export function PairPage({ runs, kind, address, go, link }) {
  const left = address.left ?? 0, right = address.right ?? Math.min(1, runs.length - 1);
  const a = useColumns(left, kind, runs), b = useColumns(right, kind, runs);
  const mode = address.show === "tokens" ? "tokens" : "chat";
  const [scale, onScale] = useCommonScale(`${left} ${right} ${address.row} ${address.a} ${address.b}`);
  useKeys((event) => {
    if (event.key === "Escape") go({ view: "compare" });
    else if (event.key === "t") go({ show: mode === "chat" ? "tokens" : "chat" });
  });
  const stepOf = (text) => (text === undefined ? null : Number(text));
  const sides = useMemo(() => [[left, a, stepOf(address.from), "a"], [right, b, stepOf(address.to), "b"]].map(([run, columns, step, name]) => ({ run, columns, name, entry: columns && byRow(columns, step).get(address.row) })), [left, right, a, b, address.from, address.to, address.row]);
  if (sides.some(({ columns }) => !columns)) return html`<p class="loading">Loading…</p>`;
  return html`<div class="bar"><${Link} class="button" to=${link({ view: "compare" })}>← Comparison</${Link}>
      <${Choice} label="Show as" value=${mode} onChange=${(value) => go({ show: value })} options=${[["chat", "Chat"], ["tokens", "Tokens"]]} /><b>row ${address.row}</b></div>
    <div class="columns">${sides.map(({ run, columns, name, entry }) => {
      if (!entry) return html`<section key=${name} class="pane" aria-label=${runs[run].name}><h2>${runs[run].name}</h2><p class="loading">There is no conversation of this row.</p></section>`;
      const sample = Math.min(Number(address[name]) || 0, entry.numbers.length - 1), n = entry.numbers[sample];
      return html`<${Pane} key=${`${name} ${run} ${n}`} run=${run} kind=${kind} number=${n} title=${runs[run].name} to=${link({ view: "conversation", run, ...conversationAt(columns, n) })} mode=${mode} address=${address} go=${go} scale=${scale} onScale=${onScale(name)}>
        ${entry.numbers.length > 1 && html`<div class="bar"><${Choice} label=${`Sample of ${runs[run].name}`} value=${sample} onChange=${(value) => go({ [name]: value })} options=${entry.numbers.map((other, place) => [place, `${place + 1}: ${columns.reward[other] === null ? "none" : number(columns.reward[other])}`])} /><span class="muted">samples with their rewards</span></div>`}</${Pane}>`;
    })}</div>`;
}
