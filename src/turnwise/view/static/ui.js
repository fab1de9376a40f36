// What all parts of the page share: HTML templates, formats, colours, hooks.
import { Component, h, render } from "preact";
import { useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "preact/hooks";
import htm from "htm";

export { Component, h, render, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState };
export const html = htm.bind(h);

/** A number in at most four significant digits; an empty text for null. */
export function number(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return (value + 0).toLocaleString("en"); // -0 + 0 is 0, which has no sign
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

/** A duration: below a hundredth of a second in milliseconds. */
export function seconds(value) {
  if (typeof value !== "number") return "";
  return value !== 0 && Math.abs(value) < 0.01 ? `${number(Number((1000 * value).toPrecision(2)))} ms` : `${number(Number(value.toPrecision(3)))} s`;
}

/** A text of the model or of a tool, in which control characters and those that change the direction of text are visible. */
export function harmless(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, "␦");
}

export function signed(value) {
  return (value > 0 ? "+" : "") + number(value);
}

/** Okabe and Ito's colours, which people without full colour vision can tell apart. */
export const RUN_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a00", "#7a5195"];
export const runColor = (run) => RUN_COLORS[run % RUN_COLORS.length];
/** Patterns of lines: they tell lines apart without colour. */
const DASHES = [[], [7, 3], [2, 2], [9, 3, 2, 3], [12, 4], [4, 2, 1, 2], [1, 3], [6, 6]];
export const lineDash = (place) => DASHES[place % DASHES.length];

/** A short piece of the line of a run. */
export function LineSample({ place }) {
  return html`<svg class="sample" width="26" height="10" aria-hidden="true"><line x1="0" x2="26" y1="5" y2="5" stroke=${runColor(place)} stroke-width="3" stroke-dasharray=${lineDash(place).join(" ")} /></svg>`;
}

/** Blue (negative) over grey to orange (positive): `share` from -1 to 1. */
export function diverging(share) {
  const t = Math.max(-1, Math.min(1, share));
  const strength = Math.round(Math.abs(t) * 45);
  return `color-mix(in srgb, ${t < 0 ? "var(--negative)" : "var(--positive)"} ${strength}%, transparent)`;
}

/** From transparent (0) to the accent colour (1). */
export function sequential(share) {
  return `color-mix(in srgb, var(--sequential) ${Math.round(Math.max(0, Math.min(1, share)) * 50)}%, transparent)`;
}

/** The value of a promise, loaded again when `key` changes: [value, error]. Meanwhile there is no value; with `like`, the previous
 *  value stays as long as `like` is the same. */
export function useLoaded(load, key, like = key) {
  const [state, setState] = useState([null, null, null]);
  useEffect(() => {
    let current = true;
    load().then(
      (value) => current && setState([value, null, like]),
      (error) => current && setState([null, String(error.message || error), like]),
    );
    return () => { current = false; };
  }, [key]);
  return state[2] === like ? state : [null, null, like];
}

/** The value that stood for a second: what is computed from a growing file follows it when it pauses. */
export function useSettled(value) {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), 1000);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}

/** Calls `handler(event)` for keys that are not typed into a field. The handler is always that of the last rendering.
 *  It listens as soon as it is rendered: an effect would begin after the next frame, and a key that is pressed before would be lost. */
export function useKeys(handler) {
  const latest = useRef(handler);
  useLayoutEffect(() => { latest.current = handler; });
  useLayoutEffect(() => {
    const listen = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (document.querySelector("dialog[open]")) return; // the keys are those of the dialog
      const field = event.target.closest("input, select, textarea"), moves = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", " "];
      // a checkbox takes the space bar, and a slider the arrows: other keys are those of the page
      const typed = field && !["checkbox", "radio", "range"].includes(field.type);
      if (event.key !== "Escape" && (typed || (field && moves.includes(event.key)))) return;
      latest.current(event);
    };
    window.addEventListener("keydown", listen);
    return () => window.removeEventListener("keydown", listen);
  }, []);
}

/** A group of buttons of which one is pressed. */
export function Choice({ label, options, value, onChange }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${options.map(([name, text]) => html`<button key=${name} aria-pressed=${String(name === value)} onClick=${() => onChange(name)}>${text}</button>`)}
  </div>`;
}

export function Problem({ text }) {
  return html`<p class="problem" role="alert">${harmless(text)}</p>`;
}

/** Text of a message: a list of parts has texts and images. */
export function contentParts(content) {
  if (content === null || content === undefined) return [];
  if (Array.isArray(content)) return content;
  return [{ type: "text", text: typeof content === "string" ? content : JSON.stringify(content, null, 1) }];
}
