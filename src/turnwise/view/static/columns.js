// The columns of a run's conversations: the newest ones are loaded first, then the others in blocks; extended as the run goes on.
import { useEffect, useReducer } from "./ui.js";
import * as data from "./data.js";

const FIRST = 500, BLOCK = 10_000;
/** By run and kind: {columns, low, high, generation}. The numbers from `low` to `high - 1` are loaded. Before `low`, the columns are empty. */
const cache = new Map();
const waiting = new Map();

/** The next numbers to load, from start to stop - 1; null if all are loaded. */
export function nextBlock({ low, high }, { start, stop }) {
  if (high < stop) return [high === low ? Math.max(start, stop - FIRST) : high, high === low ? stop : Math.min(stop, high + BLOCK)];
  return low > start ? [Math.max(start, low - BLOCK), low] : null;
}

function extended(table, [start, stop], more) {
  const columns = {}; // a new object, so that what is computed from it is computed again
  for (const [name, values] of Object.entries(more)) {
    const column = table.columns?.[name] ?? new Array(stop);
    for (let place = 0; place < values.length; place += 1) column[start + place] = values[place];
    columns[name] = column;
  }
  const empty = table.high === table.low;
  return { ...table, columns, low: empty ? start : Math.min(table.low, start), high: empty ? stop : Math.max(table.high, stop) };
}

/** The columns of one file of conversations, or null while none are loaded. `wanted` false loads nothing. */
export function useColumns(run, kind, runs, wanted = true) {
  const key = `${run} ${kind}`;
  const indexed = runs[run]?.indexed[kind] ?? { start: 0, stop: 0, generation: 0, ready: false };
  const [loads, rerender] = useReducer((x) => x + 1, 0);
  useEffect(() => {
    if (!wanted || !(indexed.ready || indexed.stop)) return undefined;
    let stopped = false;
    let table = cache.get(key);
    if (!table || table.generation !== indexed.generation || table.high > indexed.stop) { // new, or the record was cut back
      table = { columns: null, low: 0, high: 0, generation: indexed.generation };
      cache.delete(key);
    }
    const block = table.columns || indexed.stop ? nextBlock(table, indexed) : [0, 0];
    if (!block) return undefined;
    const name = `${key} ${indexed.generation} ${block}`;
    if (!waiting.has(name)) {
      waiting.set(name, data.columns(run, kind, ...block).then((more) => {
        const complete = more.id.length === block[1] - block[0]; // else the record was written again meanwhile
        if (complete && cache.get(key) === (table.columns ? table : undefined)) cache.set(key, extended(table, block, more));
      }, () => {}).finally(() => waiting.delete(name)));
    }
    waiting.get(name).then(() => { if (!stopped && cache.get(key) !== table) rerender(); });
    return () => { stopped = true; };
  }, [key, indexed.start, indexed.stop, indexed.generation, indexed.ready, wanted, loads]);
  const table = cache.get(key);
  return wanted && table?.generation === indexed.generation ? table.columns : null;
}

/** How many conversations are loaded. */
export function loadedCount(run, kind) {
  const table = cache.get(`${run} ${kind}`);
  return table ? table.high - table.low : 0;
}
