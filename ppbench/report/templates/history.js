// The page of a history: a click on a mark of a chart opens the row of its commit or change; the list of
// series can be searched.

(() => {
  // A line through the chart marks what was opened last.
  function mark(plot, x) {
    plot.dataset.open = x;
    const shapes = (plot.layout.shapes ?? []).filter(({ name }) => name !== "open");
    const color = getComputedStyle(document.documentElement).getPropertyValue("--quiet").trim();
    shapes.push({ name: "open", type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color, width: 1 }, layer: "below" });
    Plotly.relayout(plot, { shapes });
  }

  function open(section, key) {
    const detail = document.getElementById(`${section.id}-${key.replace(" ", "-")}`);
    const opener = document.querySelector(`[aria-controls="${detail.id}"]`);
    const fold = detail.closest("details");
    if (fold) fold.open = true;
    if (detail.hidden) opener.click();
    opener.focus({ preventScroll: true });
    opener.scrollIntoView({ block: "start", behavior: "instant" });
  }

  document.addEventListener("drawn", ({ target }) => {
    const plot = target.querySelector(".plot");
    if (!plot) return;
    if ("open" in plot.dataset) mark(plot, Number(plot.dataset.open));
    if ("listens" in plot.dataset) return;
    plot.dataset.listens = "";
    plot.on("plotly_click", ({ points: [point] }) => {
      if (point.customdata === undefined) return;
      mark(plot, point.x);
      open(target.closest("section"), String(point.customdata));
    });
  });

  const finder = document.getElementById("find");
  const rows = [...document.querySelectorAll("#list tbody tr")];
  finder?.addEventListener("input", () => {
    tables.search(document.querySelector("#list table"), finder.value);
    for (const row of rows) {
      document.getElementById(row.dataset.cases).classList.toggle("unselected", row.matches(".unmatched"));
    }
    const num = rows.filter((row) => !row.matches(".unmatched")).length;
    document.getElementById("num-series").textContent = num === rows.length ? "" : `${num} of ${rows.length} series`;
    document.getElementById("nothing").hidden = num > 0;
  });
  document.querySelector("#nothing button")?.addEventListener("click", () => {
    finder.value = "";
    finder.dispatchEvent(new Event("input"));
  });
})();
