// Behaviour of every page: drawing, following colour scheme and width, printing.

(() => {
  figures.watch();
  const ahead = globalThis.requestIdleCallback ?? setTimeout;
  addEventListener("load", () => ahead(figures.prepareOpen));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", figures.redrawAll);

  // The table of contents is a column beside the page where there is room, else folded; it shows which
  // section is being read.
  const contents = document.querySelector("#contents details");
  if (contents) {
    const wide = matchMedia("(width >= 1280px)");
    const fold = () => { contents.open = wide.matches; };
    wide.addEventListener("change", fold);
    fold();
    const links = [...document.querySelectorAll("#contents a")];
    const mark = () => {
      const read = links.filter((link) => document.querySelector(link.hash)?.checkVisibility())
        .findLast((link) => document.querySelector(link.hash).getBoundingClientRect().top < 160);
      for (const link of links) link.toggleAttribute("aria-current", link === read);
    };
    addEventListener("scroll", mark, { passive: true });
    mark();
  }

  // Paper is white, has its own width, and shows everything that is open, drawn before or not.
  const root = document.documentElement;
  const folded = [];
  addEventListener("beforeprint", () => {
    folded.push(...document.querySelectorAll("details.printed:not([open])"));
    folded.forEach((details) => { details.open = true; });
    root.classList.add("printing");
    figures.drawVisible();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    folded.splice(0).forEach((details) => { details.open = false; });
    figures.redrawAll();
  });
})();
