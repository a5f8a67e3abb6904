// Draws a page's figures when they become visible, in its colours and width, for the selected cases.

const figures = (() => {
  const CONFIG = { responsive: true, displayModeBar: false };
  let selected = null; // ids of cases; null selects all

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
      },
      data: {
        bar: [{ marker: { line: { color: paper } }, error_x: { color: quiet }, error_y: { color: quiet } }],
        scatter: [{ marker: { color: ink, line: { color: paper } }, line: { color: ink } }],
      },
    };
  }

  // Small multiples are arranged in as many columns as fit, and a little closer on paper.
  const COLUMN_WIDTHS = [[4, 1000], [3, 760], [2, 500], [1, 0]];
  const CLOSER = 14;
  const isPrinting = () => document.documentElement.classList.contains("printing");

  function columnsFor({ titles, maxColumns }, width) {
    const [fitting] = COLUMN_WIDTHS.find(([, least]) => width >= least);
    return Math.max(1, Math.min(fitting, titles.length, maxColumns));
  }

  const NARROW = 640;
  const SMALL_LEGEND = { font: { size: 11 }, maxheight: 1000 };

  // The number of rows of a legend is known only after it is drawn; then the figure grows by the height
  // that is missing above its panels' titles or its first rank.
  const PANEL_TITLE = 34;
  const FIRST_RANK = 10;

  function withRoomForLegend(div) {
    const { layout, data } = div;
    const panels = layout.meta?.panels;
    const below = panels?.titles.some(Boolean) ? PANEL_TITLE + panels.moreTitlePx : FIRST_RANK;
    const missing = (div._fullLayout.legend?._height ?? 0) + below - layout.margin.t;
    if (missing <= 1) return;
    layout.margin = { ...layout.margin, t: layout.margin.t + missing };
    layout.height += missing;
    Plotly.react(div, data, layout, CONFIG);
  }

  function fitted(figure, div) {
    const panels = figure.layout.meta?.panels;
    if (panels) {
      if (isPrinting()) panels.gapPx -= CLOSER;
      div.dataset.columns = columnsFor(panels, div.clientWidth);
      arrange(figure.layout, Number(div.dataset.columns));
    }
    const isNarrow = div.clientWidth < NARROW;
    withFronts(figure);
    if (isNarrow) Object.assign(figure.layout.legend ??= {}, SMALL_LEGEND);
    div.dataset.narrow = isNarrow;
    figure.layout.template = template();
    // Otherwise plotly keeps the width of a figure that is drawn already.
    figure.layout.width = div.clientWidth;
    return figure;
  }

  // Names of points that would lie on another text, or beyond the figure, are left out: the pointer shows them.
  const FIXED_TEXTS = ".xtick text, .ytick text, .annotation-text, .legendtext, .xtitle, .ytitle";

  function hideOverlapping(div) {
    const frame = div.getBoundingClientRect();
    const boxOf = (node) => node.getBoundingClientRect();
    const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    const taken = [...div.querySelectorAll(FIXED_TEXTS)].map(boxOf);
    for (const label of [...div.querySelectorAll(".textpoint text")].reverse()) {
      const box = boxOf(label);
      const isFree = box.left >= frame.left && box.right <= frame.right && !taken.some((other) => meet(box, other));
      label.style.visibility = isFree ? "" : "hidden";
      if (isFree) taken.push(box);
    }
  }

  const isHidden = (div) => !div.checkVisibility(); // folded or filtered away
  const drawn = () => [...document.querySelectorAll(".chart[data-drawn]")];

  // Keeps the zoom and the hidden traces when a figure is redrawn for other colours or for paper.
  function keepView(div, data, layout) {
    if (!div.layout || !div._fullLayout?.xaxis || layout.meta?.panels) return;
    for (const axis of ["xaxis", "yaxis"]) {
      if (layout[axis]?.range) layout[axis].range = [...div._fullLayout[axis].range];
    }
    const visible = new Map(div.data.map((trace) => [trace.name, trace.visible]));
    for (const trace of data) {
      if (visible.get(trace.name) !== undefined) trace.visible = visible.get(trace.name);
    }
  }

  function drawText(div, text) {
    const whole = JSON.parse(text);
    div.toggleAttribute("data-has-cases", whole.data.some((trace) => trace.ids));
    const figure = figureOf(whole, selected);
    div.toggleAttribute("data-empty", figure === null);
    if (figure === null) return null; // hidden by the style sheet
    if (isHidden(div)) return wait(div);
    if (!globalThis.Plotly) return null; // the page says that it is missing
    const { data, layout } = fitted(figure, div);
    div.style.minHeight = "";
    keepView(div, data, layout);
    const isNew = !div.on;
    Plotly.react(div, data, layout, CONFIG);
    withRoomForLegend(div);
    if (isNew) div.on("plotly_afterplot", () => hideOverlapping(div));
    hideOverlapping(div);
    div.dispatchEvent(new Event("drawn", { bubbles: true }));
  }

  function draw(div) {
    div.dataset.drawn = "";
    if ("timeline" in div.dataset) drawTimeline(div);
    else drawText(div, div.nextElementSibling.textContent);
  }

  // A chart is drawn when it first comes near the screen, which a folded chart never does.
  const nearby = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      nearby.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "600px" });

  function wait(div) {
    delete div.dataset.drawn;
    nearby.observe(div);
  }

  const redraw = (div) => (isHidden(div) && !("empty" in div.dataset) ? wait(div) : draw(div));

  function refit(div) {
    if (isHidden(div) || div.timeline) return;
    const width = div.clientWidth;
    const panels = div.layout?.meta?.panels;
    const hasOtherColumns = panels && String(columnsFor(panels, width)) !== div.dataset.columns;
    if (hasOtherColumns || String(width < NARROW) !== div.dataset.narrow) draw(div);
  }

  return {
    watch: (within = document) => within.querySelectorAll(".chart").forEach((div) => nearby.observe(div)),
    prepareOpen: () => document.querySelectorAll("details[open] .chart[data-timeline]").forEach(prepareTimeline),
    redrawAll: () => drawn().forEach(redraw),
    refitAll: () => drawn().forEach(refit),
    drawVisible: () => document.querySelectorAll(".chart").forEach((div) => isHidden(div) || draw(div)),
    select(cases) {
      selected = cases;
      drawn().filter((div) => "hasCases" in div.dataset).forEach(redraw);
    },
  };
})();
