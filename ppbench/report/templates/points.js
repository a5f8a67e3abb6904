// What is drawn of a chart: the points of the selected cases, at the places that are left, on one scale.
// Pure but for the chart that is passed, which is changed. The `ids` of a trace name the case of each
// point; a number after a slash distinguishes the points of a case.

// A value of a trace with only the kept points: every array with an entry per point is thinned.
function thinned(value, keep) {
  if (value === null || typeof value !== "object") return value;
  if (!Array.isArray(value)) {
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, thinned(inner, keep)]));
  }
  if (value.length === keep.length) return value.filter((_, n) => keep[n]);
  return value.map((inner) => thinned(inner, keep));
}

// Indices of the Pareto-optimal points {x, y} (small x, large y), ordered by x; as `pareto_front` in pareto.py.
function paretoFront(points) {
  const order = points.map((_, index) => index).sort((a, b) =>
    points[a].x - points[b].x || points[b].y - points[a].y || a - b);
  const front = [];
  for (const index of order) {
    if (!front.length || points[index].y > points[front.at(-1)].y) front.push(index);
  }
  return front;
}

// Recomputes the front of a panel, if it has one, from the points that are left.
function drawFront({ data }, middle) {
  const front = data.find((trace) => trace.meta?.mostLabels);
  if (!front) return;
  const points = data.filter((trace) => trace.meta?.isSound).flatMap(({ x, y, text, meta }) => (
    x.map((_, n) => ({ x: x[n], y: y[n], text: text[n], isSound: meta.isSound[n], isFinite: meta.isFinite[n] }))));
  const finite = points.filter((point) => point.isFinite);
  const sound = finite.filter((point) => point.isSound);
  const pool = sound.length ? sound : finite;
  const drawn = paretoFront(pool).map((index) => pool[index]);
  const hasLabels = drawn.length <= front.meta.mostLabels;
  Object.assign(front, {
    x: drawn.map((point) => point.x),
    y: drawn.map((point) => point.y),
    text: hasLabels ? drawn.map((point) => point.text) : [],
    textposition: drawn.map((point) => (point.x < middle ? "top right" : "top left")),
    mode: hasLabels ? "lines+markers+text" : "lines+markers",
  });
}

// Places and slots that no case is left in give their room to the others; as `Canvas` in canvas.py.
const GROUP_WIDTH = 0.78;
const LEAST_PLACES = 3;

function closeUp({ along, rowPx }, panels, numSlots) {
  const traces = panels.flatMap((panel) => panel.data).filter((trace) => trace.meta?.place);
  const left = (key) => [...new Set(traces.flatMap((trace) => trace.meta[key]))].sort((a, b) => a - b);
  const [places, slots] = [left("place"), left("slot")];
  for (const trace of traces) {
    const { place, slot, within } = trace.meta;
    trace[along] = place.map((at, n) => places.indexOf(at)
      + (slots.indexOf(slot[n]) - (slots.length - 1) / 2 + within[n]) * GROUP_WIDTH / slots.length);
    if (trace.width) trace.width *= numSlots / slots.length;
  }
  const half = (rowPx ? places.length + 0.1 : Math.max(places.length + 0.1, LEAST_PLACES)) / 2;
  const range = [-half, half].map((end) => (places.length - 1) / 2 + end);
  for (const { layout } of panels) {
    const { ticktext, ...axis } = layout[`${along}axis`];
    layout[`${along}axis`] = {
      ...axis,
      tickvals: places.map((_, index) => index),
      ticktext: places.map((place) => ticktext[place]),
      range: rowPx ? range.toReversed() : range,
    };
    layout.height -= rowPx * (Math.max(ticktext.length, LEAST_PLACES) - Math.max(places.length, LEAST_PLACES));
  }
}

// The range of an axis with the values of all panels.
const ROOM = 0.06;

function commonRange(panels, letter) {
  const ends = [];
  for (const { data, layout } of panels) {
    const stacks = new Map();
    for (const trace of data) {
      const error = trace[`error_${letter}`];
      const other = trace[letter === "x" ? "y" : "x"];
      trace[letter].forEach((value, n) => {
        if (value === null) return;
        const stack = `${other[n]} ${value < 0}`;
        const end = value + (layout.barmode === "relative" ? stacks.get(stack) ?? 0 : 0);
        stacks.set(stack, end);
        ends.push(end - (error?.arrayminus[n] ?? 0), end + (error?.array[n] ?? 0));
      });
    }
  }
  if (!ends.length) return undefined;
  if (panels[0].layout[`${letter}axis`].rangemode === "tozero") ends.push(0);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const room = ROOM * (high - low || Math.abs(high) || 1);
  return [low === 0 ? 0 : low - room, high === 0 ? 0 : high + room];
}

// Leaves in a chart the points of the selected cases (null selects all), and returns the panels that have
// any; of a chart that is not about cases, all.
function panelsOf(chart, selected) {
  const hasCases = chart.panels.some(({ data }) => data.some((trace) => trace.ids));
  const numSlots = new Set(chart.panels.flatMap(({ data }) => data.flatMap(({ meta }) => meta?.slot ?? []))).size;
  const isIn = (id) => selected.has(id.split("/")[0]);
  for (const panel of chart.panels) {
    if (selected) panel.data = panel.data.map((trace) => (trace.ids ? thinned(trace, trace.ids.map(isIn)) : trace));
    panel.data = panel.data.filter((trace) => !trace.ids || trace.ids.length > 0);
  }
  const panels = chart.panels.filter(({ data }) => !hasCases || data.some((trace) => trace.ids));
  const largest = Math.max(...panels.flatMap(({ data }) => data.flatMap(({ x, meta }) => (meta?.isSound ? x : []))));
  if (chart.along && panels.length) closeUp(chart, panels, numSlots);
  panels.forEach((panel) => drawFront(panel, largest / 2));
  for (const letter of panels.length ? chart.shared : []) {
    const range = commonRange(panels, letter);
    for (const { layout } of panels) layout[`${letter}axis`].range = range;
  }
  return panels;
}
