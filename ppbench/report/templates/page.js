// Draws the charts when they can be seen, in the page's colours and width; sorts the tables.
"use strict";

(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The figures leave these colours open; a template fills them in and never overrides.
  function template() {
    const [paper, ink, quiet, line] = ["--paper", "--ink", "--quiet", "--line"].map(color);
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, color: quiet };
    return {
      layout: {
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        xaxis: axis,
        yaxis: axis,
        hoverlabel: { bgcolor: paper, bordercolor: quiet, font: { color: ink, size: 13 }, align: "left" },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: ink },
      },
      data: {
        bar: [{ marker: { line: { color: paper } } }],
        scatter: [{ marker: { color: ink, line: { color: paper } }, line: { color: ink } }],
      },
    };
  }

  // Small multiples come with a layout for each number of columns; take the most that fit.
  const COLUMN_WIDTHS = [[4, 1000], [3, 760], [2, 500], [1, 0]];

  function columnsFor(offered, width) {
    const fits = COLUMN_WIDTHS.find(([columns, least]) => width >= least && String(columns) in offered);
    return fits ? fits[0] : 1;
  }

  function withColumns(layout, columns) {
    for (const [path, value] of Object.entries(layout.meta.arrangements[columns])) {
      const keys = path.split(".");
      const last = keys.pop();
      let inner = layout;
      for (const key of keys) inner = inner[key] ??= {};
      inner[last] = value;
    }
  }

  // On a phone the legend takes more rows, and the figure grows by them. Panels toggle by groups,
  // which plotly cannot align in columns: about three of their short names fit in a row.
  const NARROW = 640;
  const LEGEND_ROW = 20;

  function withNarrowLegend(figure) {
    const { layout } = figure;
    const items = figure.data.filter((trace) => trace.showlegend !== false).length;
    const perRow = layout.meta?.arrangements ? 3 : 2;
    const extra = (Math.ceil(items / perRow) - 1) * LEGEND_ROW;
    Object.assign(layout.legend, { font: { size: 11 }, maxheight: 1000 });
    if (perRow === 2) Object.assign(layout.legend, { entrywidthmode: "fraction", entrywidth: 0.5 });
    layout.margin.t += extra;
    layout.height += extra;
  }

  function draw(div) {
    const figure = JSON.parse(div.nextElementSibling.textContent);
    figure.layout.template = template();
    const offered = figure.layout.meta?.arrangements;
    if (offered) {
      div.dataset.columns = columnsFor(offered, div.clientWidth);
      withColumns(figure.layout, div.dataset.columns);
    }
    const isNarrow = div.clientWidth < NARROW;
    if (isNarrow) withNarrowLegend(figure);
    div.dataset.narrow = isNarrow;
    div.style.minHeight = "";
    div.dataset.drawn = "";
    placeNote(div, figure.layout);
    const react = Plotly.react(div, figure.data, figure.layout, CONFIG);
    if (figure.layout.meta?.detail) attachDetail(div, CONFIG);
    return react;
  }

  const isFolded = (div) => div.closest("details:not([open])") !== null;
  const drawn = () => document.querySelectorAll(".chart[data-drawn]");

  function rearrange(div) {
    if (isFolded(div)) return;
    const width = div.clientWidth;
    const offered = div.layout.meta?.arrangements;
    const hasOtherColumns = offered && String(columnsFor(offered, width)) !== div.dataset.columns;
    if (hasOtherColumns || String(width < NARROW) !== div.dataset.narrow) draw(div);
  }

  // A chart is drawn when it first comes near the screen; inside a closed <details> it never does.
  const nearby = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      nearby.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "600px" });

  document.querySelectorAll(".chart").forEach((div) => nearby.observe(div));
  dark.addEventListener("change", () => drawn().forEach(draw));
  addEventListener("resize", () => drawn().forEach(rearrange));

  // Paper is white and shows everything that is open, seen before or not.
  addEventListener("beforeprint", () => {
    document.querySelectorAll(".chart").forEach((div) => {
      if (!isFolded(div)) draw(div);
    });
  });
  addEventListener("afterprint", () => drawn().forEach(draw));

  function sortBy(header) {
    const table = header.closest("table");
    const index = [...header.parentNode.children].indexOf(header);
    const isNumber = header.classList.contains("number");
    const before = header.getAttribute("aria-sort");
    // Figures start with the largest, words with the first.
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
    const rows = [...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b)));
    table.querySelectorAll("th").forEach((th) => th.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    table.tBodies[0].append(...rows);
  }

  document.querySelectorAll(".sortable th button").forEach((button) => {
    button.addEventListener("click", () => sortBy(button.closest("th")));
  });
})();
