// The evaluations of `turnwise eval`: a table of the models with confidence intervals, and their comparison.
import { Choice, html, number, Problem, signed, useLoaded } from "./ui.js";
import * as data from "./data.js";
import { NO_FILTERS } from "./address.js";

const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

/** A mean with its confidence interval as text. */
function interval(estimate, format = number) {
  if (!estimate || estimate.mean === null) return "–";
  return estimate.low === null ? format(estimate.mean) : `${format(estimate.mean)} (${format(estimate.low)} to ${format(estimate.high)})`;
}

/** A point with a line from the lower to the upper bound, on the scale from `low` to `high`. */
function Whisker({ estimate, low, high }) {
  if (!estimate || estimate.mean === null) return null;
  const x = (value) => 4 + (112 * (Math.min(high, Math.max(low, value)) - low)) / (high - low || 1);
  return html`<svg width="120" height="14" aria-hidden="true"><line class="axis" x1="4" x2="116" y1="7" y2="7" />
    ${estimate.low !== null && html`<line class="whisker" x1=${x(estimate.low)} x2=${x(estimate.high)} y1="7" y2="7" />`}<circle class="point" cx=${x(estimate.mean)} cy="7" r="4" /></svg>`;
}

function Models({ evaluation, link }) {
  const { models, runs } = evaluation;
  const bounds = models.flatMap(({ reward }) => [reward.low ?? reward.mean, reward.high ?? reward.mean]).filter((value) => value !== null);
  const low = Math.min(0, ...bounds), high = Math.max(1e-9, ...bounds);
  return html`<table class="pairs"><caption>Models: means over ${evaluation.rows} rows, with ${100 * evaluation.confidence} % confidence intervals</caption>
    <thead><tr><th>model</th><th>reward</th><td></td><th>pass rate</th><th>turns</th><th>failed</th><th>tokens</th><th>seconds</th></tr></thead>
    <tbody>${models.map((model) => html`<tr key=${model.name}>
      <td>${runs[model.name] === undefined ? model.name : html`<a href=${link({ ...NO_FILTERS, view: "conversations", run: runs[model.name], kind: null })}>${model.name}</a>`}${model.single_turn ? html` <span class="muted">one turn</span>` : ""}</td>
      <td>${interval(model.reward)}</td><td><${Whisker} estimate=${model.reward} low=${low} high=${high} /></td><td>${interval(model.pass_rate, percent)}</td>
      <td>${number(model.turns_mean)}</td><td class=${model.failed ? "bad" : ""}>${model.failed} of ${model.conversations}</td><td>${number(model.cost.tokens_per_conversation)}</td><td>${number(model.cost.seconds_per_conversation)}</td></tr>`)}</tbody></table>`;
}

/** pass@k: at least one of k conversations passes. pass^k: all of them do. */
function PassAt({ evaluation }) {
  const ks = Object.keys(evaluation.models[0]?.pass_at ?? {});
  if (ks.length < 2) return null;
  return html`<table class="pairs"><caption>pass@k (at least one of k conversations passes) and pass^k (all k pass)</caption>
    <thead><tr><th>model</th>${ks.map((k) => html`<th key=${k}>pass@${k}</th>`)}${ks.slice(1).map((k) => html`<th key=${`all${k}`}>pass^${k}</th>`)}</tr></thead>
    <tbody>${evaluation.models.map((model) => html`<tr key=${model.name}><td>${model.name}</td>${ks.map((k) => html`<td key=${k}>${percent(model.pass_at[k]?.mean)}</td>`)}${ks.slice(1).map((k) => html`<td key=${`all${k}`}>${percent(model.pass_all[k]?.mean)}</td>`)}</tr>`)}</tbody></table>`;
}

function verdict(test) {
  if (test.p_sign_flip === null) return "no rows";
  return test.p_sign_flip < 0.05 ? `${test.difference.mean > 0 ? "higher" : "lower"} (p < 0.05)` : "no clear difference";
}

function Comparisons({ evaluation, go }) {
  const { comparisons, models, runs } = evaluation;
  if (!comparisons.length) return html`<p class="loading">One model: nothing to compare.</p>`;
  const several = models.filter((model) => !model.single_turn).length;
  const allPairs = comparisons.length >= (several * (several - 1)) / 2; // of many models, each is compared with the first only
  return html`<table class="pairs"><caption>Comparisons on the same rows: the first model minus the second${allPairs ? "" : `; each model is compared with ${models[0].name} only`}</caption>
    <thead><tr><th>first</th><th>second</th><th>difference of the reward</th><th>p (sign flip)</th><th>p (t-test)</th><th>rows better, equal, worse</th><th>the first is</th><th>rows</th></tr></thead>
    <tbody>${comparisons.map(({ first, second, test }) => html`<tr key=${`${first} ${second}`}><td>${first}</td><td>${second}</td><td>${interval(test.difference, signed)}</td><td>${number(test.p_sign_flip)}</td><td>${number(test.p_t)}</td>
      <td>${test.better}, ${test.equal}, ${test.worse}</td><td>${verdict(test)}</td>
      <td>${runs[first] !== undefined && runs[second] !== undefined && html`<button onClick=${() => go({ view: "compare", left: runs[second], right: runs[first], kind: "train", from: null, to: null })} aria-label=${`row by row: ${first} and ${second}`}>row by row</button>`}</td></tr>`)}</tbody></table>`;
}

/** The rewards of all models by number of turns, or by data source. */
function Parts({ evaluation, part, title }) {
  const names = [...new Set(evaluation.models.flatMap((model) => Object.keys(model[part])))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  if (!names.length) return null;
  return html`<table class="pairs"><caption>${title}: mean reward (conversations)</caption>
    <thead><tr><th>model</th>${names.map((name) => html`<th key=${name}>${name}</th>`)}</tr></thead>
    <tbody>${evaluation.models.map((model) => html`<tr key=${model.name}><td>${model.name}</td>${names.map((name) => html`<td key=${name}>${model[part][name] ? `${number(model[part][name].reward.mean)} (${model[part][name].conversations})` : "–"}</td>`)}</tr>`)}</tbody></table>`;
}

export function Evaluations({ runs, address, go, link }) {
  const [evaluations, problem] = useLoaded(() => data.evaluations(), `evaluations of ${runs.length}`);
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!evaluations) return html`<p class="loading">Loading…</p>`;
  if (!evaluations.length) return html`<p class="loading">There is no evaluation among these runs. “turnwise eval RECIPE --model A --model B --out DIR” writes one; then open it with “turnwise view DIR”.</p>`;
  const chosen = Math.min(Number(address.evaluation) || 0, evaluations.length - 1), evaluation = evaluations[chosen];
  return html`
    <div class="bar">${evaluations.length > 1 && html`<${Choice} label="Evaluation" value=${chosen} onChange=${(value) => go({ evaluation: value })} options=${evaluations.map((one, place) => [place, one.name])} />`}
      <b>${evaluation.name}</b>${!evaluation.problem && html`<span>${evaluation.rows} rows of ${evaluation.data}, ${evaluation.samples_per_row} ${evaluation.samples_per_row === 1 ? "conversation" : "conversations"} on each row, seed ${evaluation.seed}, passed from reward ${number(evaluation.pass_reward)}</span>`}</div>
    <div class="scroll" tabindex="0" role="region" aria-label="Evaluation">
      ${evaluation.problem ? html`<${Problem} text=${evaluation.problem} />` : html`
        <${Models} evaluation=${evaluation} link=${link} /><${Comparisons} evaluation=${evaluation} go=${go} /><${PassAt} evaluation=${evaluation} />
        <${Parts} evaluation=${evaluation} part="turns" title="By number of turns" /><${Parts} evaluation=${evaluation} part="sources" title="By data source" />`}
    </div>`;
}
