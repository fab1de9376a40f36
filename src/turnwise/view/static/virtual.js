// Virtual scrolling: only the visible items of a long list are in the page.
import { useLayoutEffect, useReducer, useState } from "preact/hooks";
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
