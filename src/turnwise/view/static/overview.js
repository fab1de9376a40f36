// The first page of a run: how it ended, its warnings, what it reached, its options, its failures, and three conversations.
import { harmless, html, number, Problem, runColor, signed, useLoaded } from "./ui.js";
import * as data from "./data.js";
import { Link, NO_FILTERS } from "./address.js";
import { Plot } from "./curves.js";

const STATES = { running: "Running", finished: "Finished", stopped: "Stopped", failed: "Failed", killed: "Ended without a word: the process was killed, or the machine stopped" };
/** The curves that say most: title, unit, and the metrics in it. */
const CHARTS = [
  ["Reward", "reward", /^reward\/mean$/], ["Sampled tokens of a step", "tokens", /^tokens\/sampled$/], ["Loss", "", /^loss$/, true],
  ["Groups without reward differences", "share", /^groups\/zero_std$/], ["Entropy", "nats", /^entropy$/],
  ["Trainer and engine: largest deviation of the ratio from 1", "ratio", /^ratio\/max_deviation$/],
  ["Time of a step", "s", /^seconds\/(step|waiting|train)$/],
];

/** How a run ended, in a line. */
export function stateText({ state, reason, step, steps }) {
  const done = step === null ? "" : steps === null ? `after ${step} steps` : state === "running" ? `step ${step} of ${steps}` : step === steps ? `all ${steps} steps` : `after ${step} of ${steps} steps`;
  return [STATES[state] ?? state, done, reason && harmless(reason)].filter(Boolean).join(" · ");
}

export const bad = (state) => ["failed", "killed"].includes(state);

const shortValue = (value) => { const text = typeof value === "string" ? value : JSON.stringify(value); return harmless(text.length > 120 ? `${text.slice(0, 120)}…` : text); };

function estimate({ mean, low, high }) {
  return low === null ? number(mean) : `${number(mean)} (${number(low)} to ${number(high)})`;
}

function HeldOut({ change, link }) {
  if (!change) return html`<p class="muted">There are not two evaluations on held-out rows: data.eval and eval.every in the recipe, or turnwise eval.</p>`;
  const { test } = change, p = test.p_sign_flip, clear = p !== null && p < 0.05;
  const at = (step) => link({ ...NO_FILTERS, view: "conversations", kind: "eval", step: String(step) });
  return html`<table class="pairs"><caption>Mean reward on ${change.before.rows} held-out rows, with 95 % intervals</caption><tbody>
      <tr><td><${Link} to=${at(change.first_step)}>step ${change.first_step}</${Link}></td><td>${estimate(change.before)}</td></tr>
      <tr><td><${Link} to=${at(change.last_step)}>step ${change.last_step}</${Link}></td><td>${estimate(change.after)}</td></tr>
      <tr><td>change</td><td><b class=${clear && test.difference.mean < 0 ? "bad" : ""}>${signed(test.difference.mean)}</b>${test.difference.low === null ? "" : ` (${signed(test.difference.low)} to ${signed(test.difference.high)})`}</td></tr></tbody></table>
    <p>${clear ? (test.difference.mean > 0 ? "Better" : "Worse") : "No clear difference"} on the same rows (sign-flip test, p = ${number(p)}): ${test.better} rows better, ${test.worse} worse, ${test.equal} equal.</p>`;
}

function Example({ name, entry, link }) {
  return html`<${Link} class="card example" to=${link({ view: "conversation", kind: "train", id: entry.id, at: entry.step })}>
    <span class="muted">${name}: reward <b>${number(entry.reward)}</b>, ${entry.turns} ${entry.turns === 1 ? "turn" : "turns"}, stop ${entry.stop}</span>
    <span>${harmless(entry.question ?? "")}</span><span class="answer">${harmless(entry.answer ?? "")}</span></${Link}>`;
}

/** The curves of the run, the reward with its quantiles and the held-out rewards, with marks at the steps of the warnings. */
function Charts({ run, tables, warnings, dark, go, link }) {
  const [train, held] = tables.map((table) => table.columns);
  if (!train.step) return null;
  const x = [...new Set([...train.step, ...(held.step ?? [])])].sort((a, b) => a - b), place = new Map(x.map((step, n) => [step, n]));
  const spread = (table, name) => { const values = new Array(x.length).fill(null); table[name].forEach((value, n) => { if (typeof value === "number") values[place.get(table.step[n])] = value; }); return values; };
  const marks = warnings.map(({ step }) => ({ x: step }));
  const onStep = ({ kind }, step) => go({ ...NO_FILTERS, view: "conversations", run, kind, step: String(step) });
  const line = (label, color, values, kind, more) => ({ label, stroke: runColor(color), values, steps: x, kind, ...more });
  return CHARTS.map(([title, unit, metrics, lossOnly]) => {
    const names = Object.keys(train).filter((name) => metrics.test(name) && train[name].some((value) => typeof value === "number"));
    if (!names.length || (lossOnly && train["reward/mean"])) return null;
    const series = names.map((name, n) => line(names.length === 1 ? title.split(":")[0].toLowerCase() : name.split("/").at(-1), n, spread(train, name), "train"));
    let bands;
    if (names[0] === "reward/mean") {
      if (train["reward/q10"]) {
        const thin = { stroke: runColor(0), width: 0.5 };
        bands = [{ series: [2, 3], fill: `${runColor(0)}22` }];
        series.push({ label: "90 %", values: spread(train, "reward/q90"), ...thin }, { label: "10 %", values: spread(train, "reward/q10"), ...thin });
      }
      if (held["reward/mean"]) series.push(line("held out", 1, spread(held, "reward/mean"), "eval", { dash: [6, 3], width: 2 }));
    } else if (names[0] === "loss" && held.loss) series.push(line("held out", 1, spread(held, "loss"), "eval", { dash: [6, 3], width: 2 }));
    return html`<${Plot} key=${title} title=${title} unit=${unit} x=${x} series=${series} bands=${bands} marks=${marks} dark=${dark} onStep=${onStep} />`;
  });
}

export function Overview({ runs, run, go, link, dark }) {
  const counts = JSON.stringify([runs[run].metrics, runs[run].conversations]);
  const [overview, problem] = useLoaded(() => data.overview(run), `${run} ${counts}`, `${run}`);
  const [tables] = useLoaded(() => Promise.all(["train", "eval"].map((kind) => data.metrics(run, kind))), `${run} ${counts}`, `${run}`);
  if (problem || overview?.problem) return html`<${Problem} text=${problem || overview.problem} />`;
  if (!overview) return html`<p class="loading">Loading…</p>`;
  const { warnings, failures, options, examples } = overview;
  const ofStep = (step) => link({ ...NO_FILTERS, view: "conversations", kind: "train", step: String(step) });
  return html`<div class="scroll overview" tabindex="0" role="region" aria-label="Overview">
    <p class=${`state ${bad(overview.state) ? "bad" : ""}`}><b>${runs[run].name}</b> ${stateText(overview)}</p>
    <div class="cards">
      <section class="card" aria-label="Warnings"><h2>Warnings</h2>
        ${warnings.length ? html`<ul>${warnings.map((warning, n) => html`<li key=${n}><${Link} to=${ofStep(warning.step)}>step ${warning.step}</${Link}> <b>${warning.name}</b> ${harmless(warning.text)}</li>`)}</ul>` : html`<p class="muted">The health monitors recorded none.</p>`}</section>
      <section class="card" aria-label="Held-out rows"><h2>Held-out rows</h2><${HeldOut} change=${overview.held_out} link=${link} /></section>
      <section class="card" aria-label="Latest failures"><h2>Latest failures</h2>
        ${failures.length ? html`<ul>${failures.map((group, n) => html`<li key=${n}><b>${group.count} ×</b> ${group.kind}: ${harmless(group.message)}${group.differ ? " (others differ in numbers or quoted texts)" : ""} <${Link} to=${link({ view: "conversation", kind: "train", id: group.id, at: group.step })}>latest${group.step === null ? "" : ` (step ${group.step})`}</${Link}></li>`)}</ul>
          <p><${Link} to=${link({ ...NO_FILTERS, view: "conversations", kind: "train", failed: "1" })}>all failed conversations</${Link}></p>` : html`<p class="muted">No conversation failed.</p>`}</section>
    </div>
    ${tables && html`<div class="charts"><${Charts} run=${run} tables=${tables} warnings=${warnings} dark=${dark} go=${go} link=${link} /></div>`}
    ${Object.keys(examples).length > 0 && html`<h2>Conversations of the last step</h2><div class="cards">${["best", "median", "worst"].filter((name) => examples[name]).map((name) => html`<${Example} key=${name} name=${name} entry=${examples[name]} link=${link} />`)}</div>`}
    <h2>Options that differ from the defaults</h2>
    ${options.length ? html`<table class="pairs options"><thead><tr><th>option</th><th>value</th><th>default</th></tr></thead><tbody>${options.map(([name, value, usual]) => html`<tr key=${name}><td>${name}</td><td>${shortValue(value)}</td><td class="muted">${shortValue(usual)}</td></tr>`)}</tbody></table>` : html`<p class="muted">None, or the recipe was not recorded.</p>`}
  </div>`;
}
