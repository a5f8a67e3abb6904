// Draws a page's charts and timelines when they become visible, in its colours and width, for the selected cases.

const figures = (() => {
  let selected = null; // ids of cases; null selects all

  const isHidden = (div) => !div.checkVisibility(); // folded or filtered away
  const drawn = () => [...document.querySelectorAll(".chart[data-drawn]")];

  function drawChart(div) {
    if (isHidden(div) && !("empty" in div.dataset)) return wait(div);
    if (!globalThis.Plotly) return; // the page says that it is missing
    if (!div.chart) {
      div.chart = new Chart(div);
      div.addEventListener("redraw", () => draw(div));
      resized.observe(div);
    }
    div.removeAttribute("data-empty"); // hidden by the style sheet: it would have no width
    const isLeft = div.chart.draw(JSON.parse(div.nextElementSibling.textContent), selected);
    div.toggleAttribute("data-empty", !isLeft);
    div.style.minHeight = "";
    div.dispatchEvent(new Event("drawn", { bubbles: true }));
  }

  function draw(div) {
    div.dataset.drawn = "";
    if ("timeline" in div.dataset) drawTimeline(div);
    else drawChart(div);
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

  const resized = new ResizeObserver((entries) => {
    for (const { target, contentRect: { width } } of entries) {
      if (!width || target.chart.width === width) continue;
      const isFirst = target.chart.width === undefined;
      target.chart.width = width;
      if (!isFirst) draw(target);
    }
  });

  return {
    watch: () => document.querySelectorAll(".chart").forEach((div) => nearby.observe(div)),
    prepareOpen: () => document.querySelectorAll("details[open] .chart[data-timeline]").forEach(prepareTimeline),
    redrawAll: () => drawn().forEach((div) => (isHidden(div) && "timeline" in div.dataset ? wait(div) : draw(div))),
    drawVisible: () => document.querySelectorAll(".chart").forEach((div) => isHidden(div) || draw(div)),
    select(cases) {
      selected = cases;
      drawn().filter((div) => div.chart).forEach(draw);
    },
  };
})();
