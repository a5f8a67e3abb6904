// Behaviour of every page: drawing, following colour scheme and width, printing, copying.

(() => {
  figures.watch();
  const ahead = globalThis.requestIdleCallback ?? setTimeout;
  addEventListener("load", () => ahead(figures.prepareOpen));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", figures.redrawAll);
  addEventListener("resize", figures.refitAll);

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

  // A page opened from a file may have no access to the clipboard; then the text is selected and copied,
  // or left selected for the reader to copy.
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

  // Delegated, so that it also works for buttons added later.
  document.addEventListener("click", ({ target }) => {
    if (target.matches("button.copy")) copy(target);
  });
})();
