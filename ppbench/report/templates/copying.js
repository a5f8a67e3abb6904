// A button copies the text beside it.

(() => {
  for (const part of document.querySelectorAll(".copyable")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    part.append(button);
  }

  // A page opened from a file may have no access to the clipboard; then the text is selected and copied,
  // or left selected for the reader to copy.
  async function copy(button) {
    const source = button.parentElement.querySelector("pre");
    let isDone = true;
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      getSelection().selectAllChildren(source);
      isDone = document.execCommand("copy");
    }
    button.textContent = isDone ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  document.addEventListener("click", ({ target }) => {
    if (target.matches("button.copy")) copy(target);
  });
})();
