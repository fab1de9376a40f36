// The page: which view is shown, which runs it shows, and what all views have in common. The address holds the state.
import { Choice, Component, html, Problem, render, useEffect, useKeys, useLayoutEffect, useRef, useState } from "./ui.js";
import { addressOf, parse, withNumbers } from "./address.js";
import * as data from "./data.js";
import { Curves } from "./curves.js";
import { Conversations } from "./conversations.js";
import { ConversationPage, GroupPage, PairPage } from "./conversation.js";
import { Compare } from "./compare.js";
import { Evaluations } from "./evaluations.js";
import { RowPage } from "./row.js";
import { Search } from "./search.js";
import { Statistics } from "./statistics.js";
import { Timeline } from "./timeline.js";
import { Overview } from "./overview.js";
import { Runs } from "./runs.js";

const KEYS = [
  ["1 2 3 4 5 6 7 8 9", "overview, runs side by side, curves, conversations, timeline, the same rows of two runs, evaluations, statistics, search in all runs"], ["j k", "next and previous conversation, row of a comparison, or step of the timeline"],
  ["Enter", "open the conversation, or the two of a row"], ["Escape", "back to the list"], ["t", "chat or tokens"], ["g", "the group side by side"],
  ["n p", "next and previous conversation while one is open"], ["← →", "next and previous token"], ["s", "the first token of the next sampled turn"],
  ["m", "what the tokens' colour means"], ["/", "search"], ["d", "dark or light"], ["?", "this list"],
];

/** The address, and a function that changes it. */
function useHash() {
  const [address, setAddress] = useState(() => parse(location.hash));
  useLayoutEffect(() => { // before the first frame: a change of the address is not missed
    const listen = () => setAddress(parse(location.hash));
    window.addEventListener("hashchange", listen);
    return () => window.removeEventListener("hashchange", listen);
  }, []);
  const change = (hash) => {
    location.hash = hash;
    setAddress(parse(location.hash)); // at once: the event comes later
  };
  return [address, change];
}

/** Shows what went wrong in a view instead of an empty page. Another address is tried afresh. */
class Boundary extends Component {
  static getDerivedStateFromError(error) { return { error }; }
  componentDidUpdate(before) { if (before.at !== this.props.at && this.state.error) this.setState({ error: null }); }
  render() {
    const { error } = this.state;
    if (!error) return this.props.children;
    return html`<${Problem} text=${`This view has an error: ${error.message || error}\nThe other views are not affected. Please report it, with the address of the page.`} />`;
  }
}

/** The runs, asked for again every second and a half while the page is open, and more often until their first conversations are there. */
function useRuns() {
  const [state, setState] = useState({ runs: null, problem: null });
  useEffect(() => {
    let stopped = false;
    let last = "";
    const load = async () => {
      try {
        const runs = await data.runs();
        const text = JSON.stringify(runs);
        if (!stopped && text !== last) setState({ runs, problem: null });
        last = text;
      } catch (error) {
        if (!stopped) setState((before) => ({ ...before, problem: `The viewer's server does not answer: ${error.message}` }));
        last = "";
      }
      const waits = ({ indexed, lines }, kind) => !indexed[kind].ready || (indexed[kind].start === indexed[kind].stop && lines[kind] > 0);
      const ready = !JSON.parse(last || "[]").some((run) => waits(run, "train") || waits(run, "eval"));
      if (!stopped && !data.isExport) setTimeout(load, ready ? 1500 : 200);
    };
    load();
    return () => { stopped = true; };
  }, []);
  return state;
}

function Help({ open, onClose }) {
  const ref = useRef();
  useEffect(() => { if (open) ref.current.showModal(); else ref.current.close(); }, [open]);
  return html`<dialog ref=${ref} onClose=${onClose} aria-label="Keys">
    <h2>Keys</h2>
    <table>${KEYS.map(([keys, meaning]) => html`<tr key=${keys}><td>${keys.split(" ").map((key) => html`<kbd>${key}</kbd> `)}</td><td>${meaning}</td></tr>`)}</table>
    <p><button onClick=${onClose}>Close</button></p>
  </dialog>`;
}

function useTheme() {
  const [theme, setTheme] = useState(() => { try { return localStorage.getItem("theme") || ""; } catch { return ""; } });
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
    try { localStorage.setItem("theme", theme); } catch { /* an exported file may have no storage */ }
  }, [theme]);
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  return [dark, () => setTheme(dark ? "light" : "dark")];
}

/** How far the index of the conversations is. */
function Indexing({ runs }) {
  const sum = (what) => runs.reduce((total, run) => total + run[what].train + run[what].eval, 0);
  const lines = sum("lines"), indexed = sum("conversations");
  return indexed < lines && html`<span class="muted" role="status">indexed ${indexed.toLocaleString("en")} of ${lines.toLocaleString("en")} conversations</span>`;
}

const VIEWS = [["overview", "Overview"], ["runs", "Runs"], ["curves", "Curves"], ["conversations", "Conversations"], ["timeline", "Timeline"], ["compare", "Compare"], ["evaluations", "Evaluations"], ["statistics", "Statistics"], ["search", "Search"]];
const SECTION = { conversation: "conversations", group: "conversations", pair: "compare", row: "conversations" };
const VIEW = { overview: Overview, runs: Runs, curves: Curves, conversations: Conversations, conversation: ConversationPage, group: GroupPage, timeline: Timeline, statistics: Statistics, search: Search, row: RowPage, compare: Compare, evaluations: Evaluations, pair: PairPage };

/** The title of the tab: what is shown first, since a narrow tab shows no more. */
function title(view, address, run) {
  const what = ["conversation", "group"].includes(view) && address.id ? address.id : view;
  return [what, run?.name, "turnwise"].filter(Boolean).join(" · ");
}

function App() {
  const [raw, change] = useHash();
  const { runs, problem } = useRuns();
  const [help, setHelp] = useState(false);
  const [dark, toggleTheme] = useTheme();
  // of the present address, not of the one that was rendered: keys may follow each other within a frame
  const link = (changes) => addressOf(withNumbers(parse(location.hash), runs)[0], changes, runs);
  const go = (changes) => change(link(changes));
  useKeys((event) => {
    if (event.key === "?") setHelp(true);
    else if (event.key === "d") toggleTheme();
    else if (VIEWS[Number(event.key) - 1]) go({ view: VIEWS[Number(event.key) - 1][0] });
  });
  const [address, missing] = runs ? withNumbers(raw, runs) : [raw, []];
  const run = address.run ?? 0;
  const view = VIEW[address.view] ? address.view : runs?.length > 1 ? "runs" : "overview";
  useEffect(() => { document.title = title(view, address, runs?.[run]); });
  if (!runs) return problem ? html`<${Problem} text=${problem} />` : html`<p class="loading">Loading…</p>`;
  const kind = address.kind === "eval" ? "eval" : "train";
  const section = SECTION[view] || view;
  const shared = { runs, run, kind, address: { ...address, view }, go, link, dark };
  return html`
    <header>
      <h1>turnwise</h1>
      <nav aria-label="Views">${VIEWS.map(([name, text]) => html`<a key=${name} href=${link({ view: name, id: null, at: null, number: null })} data-view=${name} aria-current=${section === name ? "page" : undefined}>${text}</a>`)}</nav>
      ${["overview", "conversations", "timeline", "statistics"].includes(section) && html`
        <label>Run <select value=${run} onChange=${(event) => go({ run: Number(event.target.value), number: null, id: null, at: null, view: section })}>
          ${runs.map((item, place) => html`<option key=${place} value=${place}>${item.name}</option>`)}</select></label>
        ${section !== "overview" && html`<${Choice} label="Conversations of" value=${kind} onChange=${(value) => go({ kind: value, view: section, number: null, id: null, at: null })} options=${[["train", "training"], ["eval", "evaluations"]]} />`}`}
      <span class="spacer"></span>
      <${Indexing} runs=${runs} />
      ${runs.filter((item) => item.problem).map((item) => html`<span key=${item.path} class="bad" role="alert" title=${item.problem}>${item.name}: a file cannot be read</span>`)}
      ${problem && html`<span class="bad" role="alert">${problem}</span>`}
      ${data.isExport && html`<span class="muted">exported</span>`}
      <button onClick=${toggleTheme}>${dark ? "Light" : "Dark"}</button>
      <button onClick=${() => setHelp(true)} aria-label="Keys">?</button>
    </header>
    <main>${missing.length
      ? html`<${Problem} text=${`The address names a run that is not shown here: ${missing.join(", ")}\nStart the viewer with it (turnwise view ${missing[0]}), or choose one of the runs above.`} />`
      : html`<${Boundary} at=${location.hash}><${VIEW[view]} ...${shared} /></${Boundary}>`}</main>
    <${Help} open=${help} onClose=${() => setHelp(false)} />`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
