// The address of the page holds its state: the view, the runs by their paths, a conversation by its id, and the filters. So an
// address means the same after the viewer was started again, and in another tab.
import { html } from "./ui.js";

const ONE_RUN = ["run", "left", "right"];
/** The address of `shown` with no run: without the parameter, the first runs are shown. */
const NONE = "none";

/** The filters and the order of the list of conversations. */
export const FILTERS = ["step", "stop", "group", "row", "agent", "failed", "errors", "least", "most", "shortest", "longest", "tool", "error", "pattern", "label", "sort", "down", "query"];
/** The changes that leave nothing of another list, and no conversation, in the address: for links to a list. */
export const NO_FILTERS = Object.fromEntries([...FILTERS, "id", "at", "number"].map((name) => [name, null]));
/** Parameters whose empty text is a value: a call without a name, and an error without a message. */
const MAY_BE_EMPTY = new Set(["tool", "pattern"]);

/** The address as {view, ...parameters}: all values are texts. */
export function parse(hash) {
  const [view, query] = hash.replace(/^#\/?/, "").split("?");
  return { view, ...Object.fromEntries(new URLSearchParams(query || "")) };
}

function format({ view, ...rest }) {
  const query = new URLSearchParams(Object.entries(rest).filter(([name, value]) => value !== null && value !== undefined && (value !== "" || MAY_BE_EMPTY.has(name))));
  // readable: these characters need no escape behind the "#"
  return `#/${view}${String(query) ? `?${String(query).replaceAll("%2F", "/").replaceAll("%3A", ":").replaceAll("%2C", ",")}` : ""}`;
}

const inList = (path) => path.replace(/[%,]/g, encodeURIComponent);

/** The address with numbers of runs in place of their paths, and the paths of runs that are not shown. */
export function withNumbers(address, runs) {
  const numbers = new Map(runs.map((run, place) => [run.path, place])), missing = [];
  const numberOf = (path) => { if (!numbers.has(path)) missing.push(path); return numbers.get(path); };
  const result = { ...address };
  for (const name of ONE_RUN) if (address[name] !== undefined) result[name] = numberOf(address[name]);
  if (address.shown === NONE) result.shown = [];
  else if (address.shown !== undefined) result.shown = address.shown.split(",").map((path) => numberOf(decodeURIComponent(path))).filter((number) => number !== undefined);
  return [result, missing];
}

/** The address of the page with some parameters changed: runs are given by their numbers. Null removes a parameter. */
export function addressOf(address, changes, runs) {
  const all = { ...address, ...changes };
  for (const name of ONE_RUN) if (typeof all[name] === "number") all[name] = runs[all[name]]?.path;
  if (Array.isArray(all.shown)) all.shown = all.shown.length ? all.shown.map((run) => inList(runs[run].path)).join(",") : NONE;
  return format(all);
}

/** The parameters of a conversation: its id, and its step, since an evaluation has the same ids again. Damaged lines have no id. */
export function conversationAt(columns, n) {
  const id = columns?.id[n] ?? null;
  return id === null ? { id: null, at: null, number: n } : { id, at: columns.step[n], number: null };
}

/** A link within the page: Ctrl and the middle button open it in another tab, as they do everywhere. */
export function Link({ to, children, ...rest }) {
  return html`<a href=${to} ...${rest}>${children}</a>`;
}
