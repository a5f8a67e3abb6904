// Filters the points of a figure, and removes the panels that are then empty.
// Pure: a parsed figure in, a new one out. The `ids` of a trace name the case of each point; a number
// after a slash distinguishes the points of a case.

const TYPED = {
  i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array,
  i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array,
};

// plotly's JSON holds typed arrays as base64; with two dimensions they become a list of rows.
function decoded({ dtype, bdata, shape }) {
  const bytes = Uint8Array.from(atob(bdata), (letter) => letter.charCodeAt(0));
  const values = new TYPED[dtype](bytes.buffer);
  const [rows, columns] = String(shape ?? values.length).split(",").map(Number);
  if (columns === undefined) return values;
  return Array.from({ length: rows }, (_, row) => values.subarray(row * columns, (row + 1) * columns));
}

const isTyped = (value) => typeof value.bdata === "string" && value.dtype in TYPED;

// A value of a trace with only the kept points: every array with an entry per point is thinned.
function thinned(value, keep) {
  if (value === null || typeof value !== "object") return value;
  if (isTyped(value)) return thinned(decoded(value), keep);
  if (ArrayBuffer.isView(value) || Array.isArray(value)) {
    if (value.length === keep.length) return value.filter((_, index) => keep[index]);
    return Array.isArray(value) ? value.map((inner) => thinned(inner, keep)) : value;
  }
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, thinned(inner, keep)]));
}

// The traces with the points of the `selected` cases; null selects all. A name remains in the legend as
// long as one trace of its group has points.
function tracesOf(data, selected) {
  if (selected === null) return data;
  const left = data.map((trace) => {
    if (!trace.ids) return trace;
    return thinned(trace, trace.ids.map((id) => selected.has(id.split("/")[0])));
  }).filter((trace) => !trace.ids || trace.ids.length > 0);
  const isNamed = (trace) => trace.showlegend !== false;
  const named = new Set(left.filter(isNamed).map((trace) => trace.legendgroup));
  for (const { legendgroup } of data.filter(isNamed)) {
    if (legendgroup === undefined || named.has(legendgroup)) continue;
    const heir = left.find((trace) => trace.legendgroup === legendgroup);
    if (heir) heir.showlegend = true;
    named.add(legendgroup);
  }
  return left;
}

const keyOf = (panel) => (panel === 0 ? "" : String(panel + 1));
const panelOf = (axis) => (axis.length === 1 ? 0 : Number(axis.slice(1)) - 1);

// The figure with only the panels that have points, renumbered from the first.
function withPanelsLeft(figure) {
  const panels = figure.layout.meta.panels;
  const used = new Set(figure.data.filter((trace) => trace.ids).map((trace) => panelOf(trace.xaxis ?? "x")));
  const kept = panels.titles.map((_, panel) => panel).filter((panel) => used.has(panel));
  const place = new Map(kept.map((panel, index) => [panel, index]));
  const moved = (reference) => {
    const [, letter, number, rest] = /^([xy])(\d*)(.*)$/.exec(reference);
    return `${letter}${keyOf(place.get(panelOf(letter + number)))}${rest}`;
  };
  const isLeft = (reference) => !/^[xy]\d*/.test(reference) || place.has(panelOf(reference.split(" ")[0]));
  const others = Object.entries(figure.layout).filter(([key]) => !/^[xy]axis\d*$/.test(key));
  const layout = Object.fromEntries(others);
  const isShared = (letter) => Object.keys(figure.layout).some((key) => (
    key.startsWith(`${letter}axis`) && figure.layout[key].matches));
  kept.forEach((panel, index) => {
    for (const letter of ["x", "y"]) {
      const axis = { ...figure.layout[`${letter}axis${keyOf(panel)}`] };
      axis.anchor = moved(axis.anchor);
      delete axis.matches;
      if (index > 0 && isShared(letter)) axis.matches = letter;
      layout[`${letter}axis${keyOf(index)}`] = axis;
    }
  });
  layout.annotations = (figure.layout.annotations ?? []).filter(({ xref }) => isLeft(xref ?? "paper"))
    .map((note) => (/^x/.test(note.xref) ? { ...note, xref: moved(note.xref), yref: moved(note.yref) } : note));
  layout.meta = { ...figure.layout.meta, panels: { ...panels, titles: kept.map((panel) => panels.titles[panel]) } };
  // A legend key has no points and no panel of its own.
  const isKey = (trace) => !trace.ids && [...numbers(trace.x)].every((x) => x === null);
  const data = figure.data.filter((trace) => isKey(trace) || isLeft(trace.xaxis ?? "x"))
    .map((trace) => (isKey(trace) ? { ...trace, xaxis: "x", yaxis: "y" }
      : { ...trace, xaxis: moved(trace.xaxis ?? "x"), yaxis: moved(trace.yaxis ?? "y") }));
  return { ...figure, data, layout };
}

// Arranges the panels in so many columns, as `arrangement` of panels.py does.
function arrange(layout, columns) {
  const { titles, yTitle, panelPx, gapPx, topPx, bottomPx, gapX } = layout.meta.panels;
  const rows = Math.ceil(titles.length / columns);
  const plotPx = rows * panelPx + (rows - 1) * gapPx;
  const width = (1 - (columns - 1) * gapX) / columns;
  layout.height = plotPx + topPx + bottomPx;
  titles.forEach((_, panel) => {
    const [row, column] = [Math.floor(panel / columns), panel % columns];
    const left = column * (width + gapX);
    const top = 1 - row * (panelPx + gapPx) / plotPx;
    const [x, y] = [layout[`xaxis${keyOf(panel)}`], layout[`yaxis${keyOf(panel)}`]];
    x.domain = [left, Math.min(1, left + width)];
    Object.assign(y, { domain: [Math.max(0, top - panelPx / plotPx), top], showticklabels: column === 0 });
    y.title = { ...y.title, text: column === 0 ? yTitle : "" };
  });
}

const numbers = (value) => (value && isTyped(value) ? decoded(value) : value ?? []);
const rounded = (number) => Math.round(number * 1e6) / 1e6;
const offsetOf = (place) => rounded(place - Math.round(place));
const offsetsOf = (data, letter) => {
  const bars = data.filter((trace) => ["bar", "box"].includes(trace.type) && trace.ids);
  return [...new Set(bars.flatMap((trace) => [...numbers(trace[letter])].map(offsetOf)))].sort((a, b) => a - b);
};

// The letter of the axis with names for 0, 1, 2, ... and only cases on it, if there is one.
function casesAxisOf(figure) {
  return ["x", "y"].find((letter) => {
    const { tickvals, ticktext } = figure.layout[`${letter}axis`] ?? {};
    const isCounted = ticktext && [...numbers(tickvals)].every((value, index) => value === index);
    const isFree = figure.data.every((trace) => trace.ids || [...numbers(trace[letter])].every((at) => at === null));
    return isCounted && isFree && !figure.layout.shapes?.length;
  });
}

// Returns a function that moves a mark when only `places` and the bar offsets `after` are left.
function moverOf(places, before, after) {
  if (!after.length) return (at) => places.indexOf(Math.round(at)) + offsetOf(at);
  const wider = before.length / after.length;
  const slot = before.length > 1 ? (before[1] - before[0]) * wider : 0;
  return (at) => {
    const offset = offsetOf(at);
    const near = after.reduce((a, b) => (Math.abs(b - offset) < Math.abs(a - offset) ? b : a));
    const middle = (after.indexOf(near) - (after.length - 1) / 2) * slot;
    return places.indexOf(Math.round(at)) + middle + (offset - near) * wider;
  };
}

// Removes places and bars without cases, so that the others get their space.
function withPlacesLeft(figure, all, letter) {
  const taken = figure.data.filter((trace) => trace.ids).flatMap((trace) => [...numbers(trace[letter])]);
  const places = [...new Set(taken.map(Math.round))].sort((a, b) => a - b);
  const [before, after] = [offsetsOf(all, letter), offsetsOf(figure.data, letter)];
  const moved = moverOf(places, before, after);
  const wider = after.length ? before.length / after.length : 1;
  const data = figure.data.map((trace) => {
    if (!trace.ids) return trace;
    const wide = typeof trace.width === "number" ? { width: trace.width * wider } : {};
    return { ...trace, [letter]: [...numbers(trace[letter])].map(moved), ...wide };
  });
  const layout = { ...figure.layout };
  const names = layout[`${letter}axis`].ticktext;
  const room = Math.max(places.length + 0.1, letter === "x" ? 3 : 0) / 2;
  const middle = (places.length - 1) / 2;
  const isFalling = layout[`${letter}axis`].range[0] > layout[`${letter}axis`].range[1];
  const range = [middle - room, middle + room];
  for (const key of Object.keys(layout).filter((name) => name.startsWith(`${letter}axis`))) {
    layout[key] = {
      ...layout[key],
      tickvals: places.map((_, index) => index),
      ticktext: places.map((place) => layout[key].ticktext[place]),
      range: isFalling ? range.toReversed() : range,
    };
  }
  if (letter === "y" && layout.meta?.panels) {
    const { panels } = layout.meta;
    const panelPx = panels.panelPx * Math.max(places.length, 3) / Math.max(names.length, 3);
    layout.meta = { ...layout.meta, panels: { ...panels, panelPx } };
  }
  return { ...figure, data, layout };
}

// The figure of the selected cases, or null if it has none of them; `selected` null selects all.
function figureOf(figure, selected) {
  const hasCases = figure.data.some((trace) => trace.ids);
  if (!hasCases) return figure;
  if (selected === null) return { ...figure, data: figure.data.map((trace) => thinned(trace, [])) };
  const data = tracesOf(figure.data, selected);
  if (!data.some((trace) => trace.ids)) return null;
  const left = figure.layout.meta?.panels ? withPanelsLeft({ ...figure, data }) : { ...figure, data };
  const letter = casesAxisOf(left);
  return letter ? withPlacesLeft(left, figure.data, letter) : left;
}
