// The page of a history: a click on a mark of a chart opens the row of its commit or change.

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

  // The search of the list leaves out the series themselves, too.
  document.getElementById("find")?.addEventListener("input", () => {
    for (const row of document.querySelectorAll("#list tbody tr")) {
      document.getElementById(row.dataset.cases).classList.toggle("unselected", row.matches(".unmatched"));
    }
  });
})();
