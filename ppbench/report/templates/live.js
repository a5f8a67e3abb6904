// The page of a running sweep shows its next state by itself: a small file beside it says when there is
// one. Filters stay in the address; what was open, and the place on the page, are kept here.

(() => {
  const banner = document.getElementById("live");
  const { stamp, beside } = banner.dataset;
  const LOOK_MS = 2000;
  const KEY = `ppbench ${location.pathname}`;
  const read = () => { try { return JSON.parse(sessionStorage.getItem(KEY)) ?? {}; } catch { return {}; } };
  const keep = (state) => { try { sessionStorage.setItem(KEY, JSON.stringify(state)); } catch { /* none */ } };
  const nameOf = (details) => details.querySelector("summary")?.textContent.trim();

  let missing = "";
  function keepState() {
    keep({
      y: scrollY,
      details: [...document.querySelectorAll("details")].map((node) => [nameOf(node), node.open]),
      openers: [...document.querySelectorAll('.opener[aria-expanded="true"]')]
        .map((button) => button.getAttribute("aria-controls")),
      missing,
    });
  }

  function restore({ y, details = [], openers = [] }) {
    const isOpen = new Map(details);
    document.querySelectorAll("details").forEach((node) => {
      if (isOpen.has(nameOf(node))) node.open = isOpen.get(nameOf(node));
    });
    for (const id of openers) document.querySelector(`.opener[aria-controls="${CSS.escape(id)}"]`)?.click();
    if (y !== undefined) scrollTo(0, y);
  }

  // Without the file beside it the sweep has ended, and the page was written a last time; if it was not,
  // the sweep was killed.
  function lookedInVain() {
    clearInterval(timer);
    if (read().missing !== stamp) {
      missing = stamp;
      location.reload();
      return;
    }
    banner.textContent = `The sweep was stopped after ${banner.dataset.done}.`;
  }

  globalThis.ppbenchLive = (newest) => { if (newest !== stamp) location.reload(); };

  function look() {
    if (document.hidden) return;
    const script = document.createElement("script");
    script.onload = () => script.remove();
    script.onerror = () => { script.remove(); lookedInVain(); };
    script.src = `${encodeURIComponent(beside)}?${Date.now()}`;
    document.head.append(script);
  }

  history.scrollRestoration = "manual";
  addEventListener("load", () => restore(read()));
  addEventListener("pagehide", keepState);
  const timer = setInterval(look, LOOK_MS);
})();
