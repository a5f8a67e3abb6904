// Tables: a click on a heading sorts, a search hides rows without the words, a click on a row
// or its button opens the detail below it.

const tables = (() => {
  const rowsOf = (table) => [...table.tBodies[0].rows].filter((row) => !row.classList.contains("detail"));
  const detailOf = (row) => (row.nextElementSibling?.classList.contains("detail") ? [row.nextElementSibling] : []);

  function sortBy(header) {
    const table = header.closest("table");
    const index = [...header.parentNode.children].indexOf(header);
    const isNumber = rowsOf(table).some((row) => "number" in row.cells[index].dataset);
    const before = header.getAttribute("aria-sort");
    // Numbers are first sorted from the largest, words alphabetically.
    const ascending = before ? before === "descending" : !isNumber;
    const key = (row) => {
      const cell = row.cells[index];
      return isNumber ? Number(cell.dataset.number ?? NaN) : cell.textContent;
    };
    const compare = (a, b) => {
      if (isNumber && Number.isNaN(a)) return Number.isNaN(b) ? 0 : 1;
      if (isNumber && Number.isNaN(b)) return -1;
      const order = isNumber ? a - b : a.localeCompare(b);
      return ascending ? order : -order;
    };
    const rows = rowsOf(table).map((row) => [row, ...detailOf(row)]);
    rows.sort(([a], [b]) => compare(key(a), key(b)));
    table.querySelectorAll("th").forEach((th) => th.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    table.tBodies[0].append(...rows.flat());
  }

  // The search leaves the rows that have each of its words in some cell, and says how many these are.
  const finder = document.getElementById("find");
  const searched = finder?.closest(".tools").nextElementSibling.querySelector("table");

  function search() {
    const words = finder.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rowsOf(searched)) {
      const shown = [...row.cells].map((cell) => cell.textContent).join("\n").toLowerCase();
      row.classList.toggle("unmatched", !words.every((word) => shown.includes(word)));
    }
    count();
  }

  function count() {
    const rows = rowsOf(searched);
    const shown = rows.filter((row) => !row.matches(".unmatched, .unselected")).length;
    const what = `${rows.length} ${finder.placeholder.split(" ").at(-1)}`;
    document.getElementById("found").textContent = shown === rows.length ? what : `${shown} of ${what}`;
  }

  function toggle(button) {
    const detail = document.getElementById(button.getAttribute("aria-controls"));
    detail.hidden = !detail.hidden;
    button.setAttribute("aria-expanded", String(!detail.hidden));
  }

  document.querySelectorAll(".sortable thead th").forEach((header) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sortBy(header));
    header.append(button);
  });
  document.querySelectorAll("button.opener").forEach((button) => {
    button.addEventListener("click", () => toggle(button));
    // A click anywhere in a row opens its detail, unless it ends a selection of text or meets a control.
    button.closest("tr").addEventListener("click", ({ target }) => {
      if (!target.closest("a, button, input") && getSelection().isCollapsed) toggle(button);
    });
  });
  if (finder) {
    finder.addEventListener("input", search);
    count();
  }
  return { search, count };
})();
