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

/** The numbers of the conversations that contain the query. */
export async function search(run, kind, query) {
  if (!exported) return get(`api/runs/${run}/search/${kind}?query=${encodeURIComponent(query)}`);
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return Object.entries(exported.runs[run].conversations[kind])
    .filter(([, found]) => {
      const text = JSON.stringify([found.messages, found.row, found.row_columns, found.turns.map((turn) => turn.text)]).toLowerCase();
      return words.every((word) => text.includes(word));
    })
    .map(([number]) => Number(number));
}

export async function timeline(run, step) {
  return exported ? exported.runs[run].timelines[step] || { conversations: [], steps: [] } : get(`api/runs/${run}/timeline/${step}`);
}

export function imageUrl(run, reference) {
  const name = reference.replace(/^sha256:/, "");
  if (exported) return exported.runs[run].images[name] || null;
  return `api/runs/${run}/media/${encodeURIComponent(name)}`;
}
