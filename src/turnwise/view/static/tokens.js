// A conversation token by token. Sampled tokens are underlined; a colour shows one of their numbers.
import { Choice, diverging, harmless, html, number, sequential, signed, useEffect, useKeys, useMemo, useRef, useState } from "./ui.js";
import { useVirtual } from "./virtual.js";

const LONGEST_BLOCK = 240, SHORTEST_BLOCK = 80;

/** The tokens of all segments of a conversation, each with all that is known of it. */
export function tokensOf(conversation) {
  const used = conversation.turns.map(() => 0); // sampled tokens of each turn so far: the index into lists of advantages
  return conversation.segments.map((segment, place) => {
    const texts = conversation.token_texts?.[place] ?? [];
    return segment.token_ids.map((id, position) => {
      const turn = segment.turn[position];
      const token = { id, position, segment: place, text: texts[position] ?? null, turn, version: segment.version[position] };
      if (turn < 0) return token;
      const about = conversation.turns[turn] ?? {};
      const index = used[turn]++;
      const of = (value) => (Array.isArray(value) ? value[index] : value) ?? null;
      const trainer = conversation.exact_logprobs ? segment.trainer_logprobs?.[position] ?? null : null;
      const logprob = conversation.logprob_kind === "none" ? null : segment.logprobs[position]; // replayed and scripted answers have none
      return { ...token, logprob, weight: about.weight ?? 1, advantage: of(about.advantage), value: of(about.value), trainer, ratio: trainer === null || logprob === null ? null : trainer - logprob };
    });
  });
}

/** Parts of a segment that are laid out on their own: they end at a line break if there is one. */
function blocks(tokens) {
  const result = [];
  let start = 0;
  tokens.forEach((token, place) => {
    const length = place + 1 - start;
    if (length >= LONGEST_BLOCK || (length >= SHORTEST_BLOCK && (token.text ?? "").includes("\n"))) { result.push(tokens.slice(start, place + 1)); start = place + 1; }
  });
  if (start < tokens.length) result.push(tokens.slice(start));
  return result;
}

/** The log ratio of trainer and engine at which the colour is the strongest. */
const RATIO_BOUND = 0.1, RATIO_LOW = number(Math.exp(-RATIO_BOUND)), RATIO_HIGH = number(Math.exp(RATIO_BOUND));

/** The ends of the colours of a conversation. */
function scaleOf(segments) {
  const sampled = segments.flat().filter((token) => token.turn >= 0);
  const largest = (name) => sampled.reduce((high, token) => Math.max(high, Math.abs(token[name] ?? 0)), 0);
  const ends = (name) => sampled.reduce(([low, high], token) => (token[name] === null || token[name] === undefined ? [low, high] : [Math.min(low, token[name]), Math.max(high, token[name])]), [Infinity, -Infinity]);
  return { advantage: largest("advantage"), value: largest("value"), versions: ends("version"), ratios: ends("ratio") };
}

/** The scale on which the colours of several conversations mean the same; null for none. */
export function joined(scales) {
  if (!scales.length) return null;
  const ends = (name) => [Math.min(...scales.map((scale) => scale[name][0])), Math.max(...scales.map((scale) => scale[name][1]))];
  return { advantage: Math.max(...scales.map((scale) => scale.advantage)), value: Math.max(...scales.map((scale) => scale.value)), versions: ends("versions"), ratios: ends("ratios") };
}

const MODES = {
  mask: { label: "mask", legend: "underlined: sampled; dotted: sampled, weight 0; grey: context" },
  logprob: { label: "log-probability", legend: "0 … −5 nats or less", color: (token) => sequential(-token.logprob / 5), low: sequential(0), high: sequential(1) },
  advantage: { label: "advantage", legend: (most) => `${signed(-most.advantage)} … ${signed(most.advantage)}`, color: (token, most) => diverging(token.advantage / (most.advantage || 1)), low: diverging(-1), high: diverging(1) },
  value: { label: "value", legend: (most) => `${signed(-most.value)} … ${signed(most.value)}`, color: (token, most) => diverging(token.value / (most.value || 1)), low: diverging(-1), high: diverging(1) },
  ratio: { label: "trainer/engine", legend: (most) => `${RATIO_LOW} or less … ${RATIO_HIGH} or more; here ${number(Math.exp(most.ratios[0]))} … ${number(Math.exp(most.ratios[1]))}`, color: (token) => diverging(token.ratio / RATIO_BOUND), low: diverging(-1), high: diverging(1) },
  version: { label: "weight version", legend: (most) => `weights of step ${most.versions[0]} … ${most.versions[1]}`, color: (token, most) => sequential(most.versions[1] === most.versions[0] ? 0.3 : (token.version - most.versions[0]) / (most.versions[1] - most.versions[0])), low: sequential(0), high: sequential(1) },
};

function visible(text) {
  return harmless(text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t"));
}

function Block({ tokens, previous, mode, most, picked, top, index, measure }) {
  let before = previous;
  return html`<div class="block" data-index=${index} ref=${measure} style=${{ transform: `translateY(${top}px)` }}>${tokens.map((token) => {
    const kind = token.turn < 0 ? "context" : token.weight === 0 ? "sampled off" : "sampled";
    const shown = MODES[mode];
    const color = token.turn >= 0 && shown.color && token[mode] !== null && token[mode] !== undefined ? shown.color(token, most) : undefined;
    const mark = token.turn >= 0 && token.turn !== before ? html`<span class="mark">turn ${token.turn} </span>` : null;
    before = token.turn;
    return html`${mark}<span key=${token.position} class=${`token ${kind}${token === picked ? " picked" : ""}`} data-at=${token.position} style=${color ? { background: color } : undefined}>${token.text === null ? `⟨${token.id}⟩` : visible(token.text) || "∅"}</span>`;
  })}</div>`;
}

function Detail({ token }) {
  if (!token) return html`<div class="detail muted">Point at a token, or move with ← and →; s: to the next tokens that the model sampled.</div>`;
  const fact = (name, value) => value !== null && value !== undefined && html`<span>${name} <b>${value}</b></span> `;
  return html`<div class="detail" role="status"><code>${JSON.stringify(token.text ?? "")}</code> ${fact("id", token.id)}${fact("position", token.position)}
    ${token.turn < 0 ? html`<span>context: not sampled, not trained on</span>` : html`${fact("turn", token.turn)}${fact("weight", number(token.weight))}${fact("log-probability", token.logprob === null ? null : number(token.logprob))}${fact("probability", token.logprob === null ? null : number(Math.exp(token.logprob)))}${fact("advantage", token.advantage === null ? "none" : signed(token.advantage))}${fact("value", token.value === null ? null : number(token.value))}${fact("trainer/engine", token.ratio === null ? null : number(Math.exp(token.ratio)))}${fact("weights of step", token.version)}`}</div>`;
}

/** `scale` has the ends of the colours, if they are common to several conversations; `onScale` receives the conversation's own. */
export function Tokens({ conversation, address, go, scale = null, onScale }) {
  const segments = useMemo(() => tokensOf(conversation), [conversation]);
  const segment = Math.min(Number(address.segment) || 0, Math.max(0, segments.length - 1));
  const tokens = segments[segment] ?? [];
  const parts = useMemo(() => blocks(tokens), [tokens]);
  const own = useMemo(() => scaleOf(segments), [segments]);
  useEffect(() => { onScale?.(own); }, [own]);
  const most = scale ?? own;
  const modes = useMemo(() => {
    const has = (name) => segments.some((part) => part.some((token) => token.turn >= 0 && token[name] !== null && token[name] !== undefined));
    return Object.keys(MODES).filter((mode) => mode === "mask" || has(mode));
  }, [segments]);
  const mode = modes.includes(address.color) ? address.color : "mask";
  const scroll = useRef();
  const virtual = useVirtual(scroll, parts.length, 200, 3);
  const [at, setAt] = useState(null);
  const picked = at === null ? null : tokens[at];
  const point = (event) => { const target = event.target.closest?.("[data-at]"); if (target) setAt(Number(target.dataset.at)); };
  useKeys((event) => {
    if (["ArrowRight", "ArrowLeft", "s"].includes(event.key)) {
      event.preventDefault();
      const by = event.key === "ArrowLeft" ? -1 : 1, sampled = event.key === "s" ? tokens.findIndex((token, place) => place > (at ?? -1) && token.turn >= 0 && (tokens[place - 1]?.turn ?? -1) !== token.turn) : null;
      if (sampled === -1) return; // there is no further turn
      const next = sampled ?? Math.max(0, Math.min(tokens.length - 1, (at ?? -1) + by));
      setAt(next);
      let start = 0;
      virtual.scrollToIndex(parts.findIndex((part) => (start += part.length) > next), { align: "auto" });
    } else if (event.key === "m") go({ color: modes[(modes.indexOf(mode) + 1) % modes.length] });
  });
  const shown = MODES[mode];
  return html`
    <div class="bar">
      <${Choice} label="Colour" value=${mode} onChange=${(value) => go({ color: value })} options=${modes.map((name) => [name, MODES[name].label])} />
      <span class="legend">${shown.color && html`<i style=${{ background: `linear-gradient(90deg, ${shown.low}, ${shown.high})` }}></i>`}${typeof shown.legend === "string" ? shown.legend : shown.legend(most)}</span>
      ${segments.length > 1 && html`<${Choice} label="Segment" value=${segment} onChange=${(value) => { setAt(null); go({ segment: value }); }} options=${segments.map((part, place) => [place, `segment ${place} (${part.length})`])} />`}
    </div>
    <div class="scroll tokens" ref=${scroll} tabindex="0" role="region" aria-label=${`Tokens of ${conversation.id}`} onMouseOver=${point} onClick=${point}>
      <div style=${{ height: `${virtual.getTotalSize()}px`, position: "relative" }}>
        ${virtual.getVirtualItems().map((item) => html`<${Block} key=${`${segment} ${item.index}`} index=${item.index} measure=${(element) => element && virtual.measureElement(element)} top=${item.start} tokens=${parts[item.index] ?? []} previous=${parts[item.index - 1]?.at(-1).turn ?? null} mode=${mode} most=${most} picked=${picked} />`)}
      </div>
      ${!tokens.length && html`<p class="loading">This conversation has no tokens.</p>`}
    </div>
    <${Detail} token=${picked} />`;
}
