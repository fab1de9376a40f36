// Where the page's data comes from: the viewer's server, or the data inside an exported file.
const element = document.getElementById("export");
const exported = element ? JSON.parse(element.textContent) : null;

export const isExport = exported !== null;

async function get(path) {
  const answer = await fetch(path);
  const body = await answer.json().catch(() => ({ error: `${path}: status ${answer.status}` }));
  if (!answer.ok) throw new Error(body.error || `${path}: status ${answer.status}`);
  return body;
}

export async function runs() {
  return exported ? exported.runs.map((run) => run.summary) : get("api/runs");
}

/** The evaluations of `turnwise eval` that are among the runs. */
export async function evaluations() {
  return exported ? exported.evaluations : get("api/evaluations");
}

export async function overview(run) {
  return exported ? exported.runs[run].overview : get(`api/runs/${run}/overview`);
}

/** All runs with their values and the options in which they differ. */
export async function sideBySide() {
  return exported ? exported.side_by_side : get("api/side_by_side");
}

/** Question, last answer, parts of the reward and failure of some conversations, by their numbers. */
export async function excerpts(run, kind, numbers) {
  return exported ? exported.runs[run].excerpts[kind] : get(`api/runs/${run}/excerpts/${kind}?numbers=${numbers}`);
}

export async function metrics(run, kind) {
  return exported ? exported.runs[run].metrics[kind] : get(`api/runs/${run}/metrics/${kind}`);
}

/** The columns of the conversations from number `start` to `stop - 1`. */
export async function columns(run, kind, start, stop) {
  if (!exported) return get(`api/runs/${run}/columns/${kind}?start=${start}&stop=${stop}`);
  return Object.fromEntries(Object.entries(exported.runs[run].columns[kind]).map(([name, values]) => [name, values.slice(start, stop)]));
}

export async function conversation(run, kind, number) {
  if (!exported) return get(`api/runs/${run}/conversations/${kind}/${number}`);
  const found = exported.runs[run].conversations[kind][number];
  if (!found) throw new Error("this conversation is not in the exported file");
  return found;
}

/** The conversation with an id: of an evaluation, that of a step. */
export async function conversationOf(run, kind, { id, at, number }) {
  if (id === null || id === undefined) return conversation(run, kind, Number(number) || 0);
  if (!exported) return get(`api/runs/${run}/conversation/${kind}?id=${encodeURIComponent(id)}${at === undefined || at === null ? "" : `&step=${at}`}`);
  const columns = exported.runs[run].columns[kind];
  const found = columns.id.findLastIndex((other, n) => other === id && (at === undefined || at === null || columns.step[n] === Number(at)));
  return conversation(run, kind, found);
}

/** The words of a text as the full-text index of the server takes them: letters and digits, without case and diacritics. */
const wordsOf = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase().match(/[\p{L}\p{N}\p{Co}]+/gu) ?? [];

/** All texts in a value, as the index takes them. */
function* textsIn(value, depth = 0) {
  if (typeof value === "string") yield value;
  else if (depth < 8 && value && typeof value === "object") for (const item of Object.values(value)) yield* textsIn(item, depth + 1);
}

/** Whether the words contain a phrase: its words one behind the other, of which the last may be the beginning of a word. */
function contains(words, phrase, beginning) {
  const same = (word, wanted, n) => (beginning && n === phrase.length - 1 ? word?.startsWith(wanted) : word === wanted);
  return phrase.length > 0 && words.some((_, place) => phrase.every((wanted, n) => same(words[place + n], wanted, n)));
}

/** The numbers of the conversations that contain all words and "phrases" of the query. */
export async function search(run, kind, query) {
  if (!exported) return get(`api/runs/${run}/search/${kind}?query=${encodeURIComponent(query)}`);
  const parts = query.split('"'), phrases = [];
  parts.forEach((part, place) => {
    if (place % 2) { phrases.push([wordsOf(part), false]); return; }
    const words = part.split(/\s+/).filter(Boolean);
    words.forEach((word, n) => phrases.push([wordsOf(word), place === parts.length - 1 && n === words.length - 1 && !query.endsWith(" ")]));
  });
  const wanted = phrases.filter(([words]) => words.length);
  if (!wanted.length) return [];
  return Object.entries(exported.runs[run].conversations[kind])
    .filter(([, found]) => {
      const words = wordsOf([...textsIn([found.id, found.messages, found.row, found.row_columns, found.error]), ...found.turns.map((turn) => turn.text ?? "")].join(" \n "));
      return wanted.every(([phrase, beginning]) => contains(words, phrase, beginning));
    })
    .map(([number]) => Number(number));
}

/** What a query finds in all runs: for each run and kind {run, kind, total, rows}, with the newest rows. */
export async function searchAll(query) {
  if (!exported) return get(`api/search?query=${encodeURIComponent(query)}`);
  return Promise.all(exported.runs.flatMap((_, run) => ["train", "eval"].map(async (kind) => {
    const found = (await search(run, kind, query)).reverse(), columns = exported.runs[run].columns[kind];
    const rows = found.slice(0, 20).map((number) => ({ number, id: columns.id[number], step: columns.step[number], reward: columns.reward[number], stop: columns.stop[number], error: columns.error[number], ...exported.runs[run].excerpts[kind][number] }));
    return { run, kind, total: found.length, rows };
  })));
}

/** Mean rewards of parts and turns, and the tool calls, over the steps: of the whole run, also in an exported file. */
export async function statistics(run, kind) {
  return exported ? exported.runs[run].statistics[kind] : get(`api/runs/${run}/statistics/${kind}`);
}

/** The numbers of the conversations with a call of a tool; with `error` ("*": any) and `pattern`, one that failed in this way. */
export async function withCalls(run, kind, { tool, error, pattern }) {
  if (!exported) return get(`api/runs/${run}/calls/${kind}?${new URLSearchParams(Object.entries({ tool, error, pattern }).filter(([, value]) => value !== undefined && value !== null))}`);
  const known = exported.runs[run].calls[kind].filter((call) => (tool === undefined || call.tool === tool) && (!error || (error === "*" ? call.error !== null : call.error === error)) && (pattern === undefined || call.pattern === pattern));
  return [...new Set(known.map((call) => call.number))];
}

/** The labels and notes of a run: a list of {kind, id, step, checksum, labels, note, revision, replaced}. */
export async function labels(run) {
  return exported ? exported.runs[run].labels : get(`api/runs/${run}/labels`);
}

async function post(path, body) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw new Error(error || `${path}: status ${answer.status}`);
}

/** Gives labels and a note to a conversation; `checksum` and `revision` are those of what was shown. */
export async function setLabels(run, kind, number, entry) {
  return (await post(`api/runs/${run}/labels/${kind}/${number}`, entry)).json();
}

/** Conversations as a file of JSON lines: {blob, lines, leftOut}, with the number of those left out by reason. */
export async function selection(run, kind, numbers, form) {
  const answer = await post(`api/runs/${run}/selection/${kind}`, { numbers, form });
  return { blob: await answer.blob(), lines: Number(answer.headers.get("X-Lines")), leftOut: JSON.parse(answer.headers.get("X-Left-Out")) };
}

export async function timeline(run, step) {
  return exported ? exported.runs[run].timelines[step] || { conversations: [], steps: [] } : get(`api/runs/${run}/timeline/${step}`);
}

export function imageUrl(run, reference) {
  const name = reference.replace(/^sha256:/, "");
  if (exported) return exported.runs[run].images[name] || null;
  return `api/runs/${run}/media/${encodeURIComponent(name)}`;
}
