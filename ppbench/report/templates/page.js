// What a page does by itself: draws, follows the scheme and the width, prints, copies.

(() => {
  figures.watch();
  const ahead = globalThis.requestIdleCallback ?? setTimeout;
  addEventListener("load", () => ahead(figures.prepareOpen));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", figures.redrawAll);
  addEventListener("resize", figures.refitAll);

  // Paper is white, has its own width, and shows everything that is open, seen before or not.
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

  // A file that is opened offline may have no clipboard of its own; then the selection is copied,
  // or stays for the reader to copy.
  async function copied(source) {
    try {
      await navigator.clipboard.writeText(source.textContent);
      return true;
    } catch {
      getSelection().selectAllChildren(source);
      return document.execCommand("copy");
    }
  }

  async function copy(button) {
    const isDone = await copied(button.parentElement.querySelector("pre"));
    button.textContent = isDone ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  // Also those that are put on the page later.
  document.addEventListener("click", ({ target }) => {
    if (target.matches("button.copy")) copy(target);
  });
})();
