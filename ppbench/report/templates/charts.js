// The Pareto front of the visible points; ppbench/report/charts/memory.py computes that of all.
"use strict";

// Indices of the Pareto-optimal points {x, y} (small x, large y), ordered by x.
function paretoFront(points) {
  const order = points.map((_, index) => index).sort((a, b) =>
    points[a].x - points[b].x || points[b].y - points[a].y || a - b);
  const front = [];
  for (const index of order) {
    if (!front.length || points[index].y > points[front.at(-1)].y) front.push(index);
  }
  return front;
}

// Recomputes each front of a filtered figure (with plain or typed arrays) from the points left in its
// panel. Changes the figure in place and returns it.
function withFronts(figure) {
  for (const front of figure.data) {
    if (!front.meta?.isFront) continue;
    const shown = figure.data
      .filter((trace) => trace.meta?.isSound && (trace.xaxis ?? "x") === (front.xaxis ?? "x"))
      .flatMap((trace) => [...trace.ids].map((_, n) => (
        { x: trace.x[n], y: trace.y[n], isSound: trace.meta.isSound[n],
          isFinite: trace.meta.isFinite?.[n] ?? true, text: trace.text[n] })))
      .filter((point) => point.isFinite);
    const sound = shown.filter((point) => point.isSound);
    const pool = sound.length ? sound : shown;
    const points = paretoFront(pool).map((index) => pool[index]);
    const hasLabels = points.length <= figure.layout.meta.mostLabels;
    front.x = points.map((point) => point.x);
    front.y = points.map((point) => point.y);
    const largest = Math.max(...figure.data.flatMap((trace) => (trace.meta?.isSound ? [...trace.x] : [])));
    front.textposition = points.map((point) => (point.x < largest / 2 ? "top right" : "top left"));
    front.text = hasLabels ? points.map((point) => point.text) : [];
    front.mode = hasLabels ? "lines+markers+text" : "lines+markers";
  }
  return figure;
}
