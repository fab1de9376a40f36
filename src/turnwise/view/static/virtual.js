// Virtual scrolling: only the visible items of a long list are in the page.
import { useLayoutEffect, useReducer, useRef, useState } from "preact/hooks";
// the library asks for the name of the build, which a page without a build step does not have
globalThis.process ??= { env: { NODE_ENV: "production" } };
const { Virtualizer, elementScroll, observeElementOffset, observeElementRect } = await import("@tanstack/virtual-core");

/** A Virtualizer for `count` items of about `estimate` pixels in the scrolling element of `ref`. */
export function useVirtual(ref, count, estimate, overscan = 10) {
  const [, rerender] = useReducer((x) => x + 1, 0);
  const options = {
    count, overscan, estimateSize: () => estimate, getScrollElement: () => ref.current,
    observeElementRect, observeElementOffset, scrollToFn: elementScroll, onChange: () => rerender(),
  };
  const [virtualizer] = useState(() => new Virtualizer(options));
  virtualizer.setOptions(options);
  useLayoutEffect(() => virtualizer._didMount(), []);
  useLayoutEffect(() => virtualizer._willUpdate());
  return virtualizer;
}

/** Remembers in `places`, by `key`, where the list was left, and scrolls there when it is shown again. `ready` is whether its items
 *  are there; `more` is remembered too, and given to `restore`. */
export function usePlace(ref, places, key, ready, more, restore) {
  const restored = useRef(null), latest = useRef();
  latest.current = { key, more };
  useLayoutEffect(() => {
    if (!ready || restored.current === key) return;
    restored.current = key;
    const place = places.get(key);
    if (place) { ref.current.scrollTop = place.scroll; restore(place); }
  });
  useLayoutEffect(() => {
    const element = ref.current;
    let scroll = element.scrollTop; // when the list is left, the element may have been removed
    const remember = () => { if (restored.current === latest.current.key) places.set(latest.current.key, { scroll, ...latest.current.more }); };
    const moved = () => { scroll = element.scrollTop; };
    element.addEventListener("scroll", moved, { passive: true });
    return () => { remember(); element.removeEventListener("scroll", moved); };
  }, []);
}
