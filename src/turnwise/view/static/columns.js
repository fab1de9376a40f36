// The columns of a run's conversations: loaded once, then extended as the run goes on.
import { useEffect, useState } from "./ui.js";
import * as data from "./data.js";

const cache = new Map();

function joined(before, more) {
  return Object.fromEntries(Object.keys(more).map((name) => [name, before ? before[name].concat(more[name]) : more[name]]));
}

/** The columns of one file of conversations, or null while they are loaded. `wanted` false loads nothing. */
export function useColumns(run, kind, runs, wanted = true) {
  const key = `${run} ${kind}`;
  const count = runs[run]?.conversations[kind] ?? 0;
  const [, setLoaded] = useState(0);
  useEffect(() => {
    if (!wanted) return undefined;
    let stopped = false;
    const before = cache.get(key);
    const have = before ? before.id.length : 0;
    if (before && have === count) return undefined;
    const start = count < have ? 0 : have; // the record was cut back
    data.columns(run, kind, start).then((more) => {
      if (stopped) return;
      cache.set(key, joined(start ? before : null, more));
      setLoaded((loaded) => loaded + 1);
    }, () => {});
    return () => { stopped = true; };
  }, [key, count, wanted]);
  return wanted ? cache.get(key) ?? null : null;
}
