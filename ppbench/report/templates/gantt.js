// A timeline with too many bars shows an overview. After zooming, the bars in view are taken from the
// packed columns (overview.py), or the overview is recomputed for the view.
"use strict";

// The columns of a timeline, as overview.py packs them into `bytes`; `layout` describes them.
function readColumns(detail, bytes) {
  const column = (layout, count, isRunning, factor = 1) => {
    const values = new Float64Array(count);
    let weight = 1;
    for (let plane = 0; plane < layout.planes; plane++, weight *= 256) {
      const at = layout.at + plane * count;
      for (let n = 0; n < count; n++) values[n] += bytes[at + n] * weight;
    }
    for (let n = 0; n < count; n++) values[n] = (values[n] + layout.least) * factor;
    return values;
  };
  return detail.traces.map((trace) => {
    const read = (layout, factor) => column(layout, trace.count, false, factor);
    const begin = read(trace.begin, 1);
    const width = read(trace.width, detail.quantumMs);
    const rows = trace.rows.map(([row, from], n) => ({ row, from, to: trace.rows[n + 1]?.[1] ?? trace.count }));
    for (const row of rows) {
      row.longest = 0;
      let running = 0; // whole quanta, so that a million differences add up exactly
      for (let n = row.from; n < row.to; n++) {
        running += begin[n];
        begin[n] = running * detail.quantumMs;
        if (width[n] > row.longest) row.longest = width[n];
      }
    }
    const lazy = new Map();
    // Columns that only hover texts need are read when bars are first drawn.
    const later = (key, layout, factor) => {
      if (!lazy.has(key)) lazy.set(key, read(layout, factor));
      return lazy.get(key);
    };
    return { ...trace, begin, width, rows, later };
  });
}

const firstAbove = (values, bound, from, to) => {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] > bound) to = middle;
    else from = middle + 1;
  }
  return from;
};

// Calls `take(n)` for every mark of a row between two times, until it returns false.
function eachBetween(trace, row, start, end, take) {
  for (let n = firstAbove(trace.begin, start - row.longest, row.from, row.to); n < row.to; n++) {
    if (trace.begin[n] >= end) return true;
    if (trace.begin[n] + trace.width[n] > start && !take(n)) return false;
  }
  return true;
}

// The index and y of the marks in view, by trace; null if there are more than `most`.
function marksInView(traces, view, most) {
  let total = 0;
  const byTrace = [];
  for (const trace of traces) {
    const places = [];
    byTrace.push(places);
    for (const row of trace.rows) {
      const y = row.row + trace.lane;
      if (y < view.top || y > view.bottom) continue;
      const isAll = eachBetween(trace, row, view.start, view.end, (n) => {
        places.push(n, y);
        return ++total <= most;
      });
      if (!isAll) return null;
    }
  }
  return byTrace;
}

const inMs = (ms) => ms.toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 });

// The legend has the colour of the first bar, which should be of a rank's first stage if possible.
function firstShadeFirst(trace, places) {
  const shade = trace.later("shade", trace.shade, 1);
  const sorted = { first: [], others: [] };
  for (let n = 0; n < places.length; n += 2) {
    const list = shade[places[n]] === 0 ? sorted.first : sorted.others;
    list.push(places[n], places[n + 1]);
  }
  return sorted.first.concat(sorted.others);
}

// The arrays with which plotly draws the marks at these places. Only marks of at least `least` ms have
// text, because measuring text that does not fit takes most of the time.
function barsOf(trace, inView, quantumMs, least) {
  const places = trace.colors ? firstShadeFirst(trace, inView) : inView;
  const count = places.length / 2;
  const at = (n) => places[2 * n];
  const taken = (values) => Float64Array.from({ length: count }, (_, n) => values[at(n)]);
  const numbers = trace.numbers.map((number) => trace.later(number.name, number, number.factor));
  const bars = {
    base: taken(trace.begin),
    x: taken(trace.width),
    y: Float64Array.from({ length: count }, (_, n) => places[2 * n + 1]),
    customdata: Array.from({ length: count }, (_, n) => [...numbers.map((values) => values[at(n)]), trace.width[at(n)]]),
  };
  if (trace.hasText) {
    const microbatch = numbers[trace.numbers.findIndex((number) => number.name === "microbatch")];
    bars.text = Array.from({ length: count }, (_, n) => (bars.x[n] < least ? "" : String(microbatch[at(n)])));
  }
  if (trace.phrases) {
    const codes = trace.later("codes", trace.phrases.codes, 1);
    const amounts = trace.later("amount", trace.phrases.amount, quantumMs);
    const phrase = (n) => trace.phrases.words[codes[n]].replace("{}", inMs(amounts[n]));
    bars.hovertext = Array.from({ length: count }, (_, n) => phrase(at(n)));
  }
  if (trace.colors) {
    const shade = trace.later("shade", trace.shade, 1);
    bars.colors = Array.from({ length: count }, (_, n) => trace.colors[shade[at(n)]]);
    bars.inks = Array.from({ length: count }, (_, n) => trace.inks[shade[at(n)]]);
  }
  return bars;
}

// The time of each kind in each slice of each rank between two times, as overview.py computes it.
function slicesOf(kinds, grid, start, end, numSlices) {
  const size = grid.ranks * numSlices;
  const spent = kinds.map(() => new Float64Array(size));
  const counts = new Float64Array(size);
  const width = (end - start) / numSlices;
  kinds.forEach((trace, kind) => {
    for (const row of trace.rows) {
      const rank = Math.round(row.row - grid.firstRow);
      if (rank < 0 || rank >= grid.ranks || Math.abs(row.row - grid.firstRow - rank) > 1e-6) continue;
      const first = rank * numSlices;
      eachBetween(trace, row, start, end, (n) => {
        const from = Math.max(0, (trace.begin[n] - start) / width);
        const to = Math.min(numSlices, (trace.begin[n] + trace.width[n] - start) / width);
        for (let slice = Math.floor(from); slice < to; slice++) {
          spent[kind][first + slice] += Math.min(to, slice + 1) - Math.max(from, slice);
        }
        if (trace.begin[n] >= start) counts[first + Math.min(numSlices - 1, Math.floor(from))]++;
        return true;
      });
    }
  });
  return { spent, counts };
}

// The overview of one step for what is in view, as plotly draws it.
function gridOf(kinds, grid, view, { slices: numSlices, mostShare, laneHeight }) {
  const { spent, counts } = slicesOf(kinds, grid, view.start, view.end, numSlices);
  const [z, customdata, text] = [[], [], []];
  for (let rank = 0; rank < grid.ranks; rank++) {
    const [codes, details, words] = [[], [], []];
    for (let n = rank * numSlices; n < (rank + 1) * numSlices; n++) {
      let [busy, mostly] = [0, 0];
      for (let kind = 0; kind < kinds.length; kind++) {
        busy += spent[kind][n];
        if (spent[kind][n] > spent[mostly][n]) mostly = kind;
      }
      if (spent[mostly][n] < mostShare * busy) mostly = kinds.length;
      codes.push(busy > 0 ? mostly + Math.min(0.999, Math.max(0.001, busy)) : null);
      details.push([Math.min(1, busy), counts[n]]);
      words.push(kinds[mostly]?.name ?? "several");
    }
    z.push(codes);
    customdata.push(details);
    text.push(words);
  }
  const dx = (view.end - view.start) / numSlices;
  const ygap = Math.max(1, Math.round(view.rowPx * (1 - laneHeight)));
  return { z, customdata, text, x0: view.start + dx / 2, dx, ygap };
}

const TEXT_PX = { width: 8, height: 11 };

function viewOf(div) {
  const { xaxis, yaxis } = div._fullLayout;
  const [start, end] = xaxis.range;
  const [top, bottom] = [...yaxis.range].sort((a, b) => a - b);
  const rowPx = yaxis._length / (bottom - top);
  const lanePx = rowPx * div.layout.meta.detail.laneHeight;
  const least = lanePx < TEXT_PX.height ? Infinity : ((end - start) / xaxis._length) * TEXT_PX.width;
  return { start, end, top, bottom, rowPx, least };
}

const NOTHING = { base: [null], x: [null], y: [null], customdata: null, text: null, hovertext: null };

function putBars(data, trace, bars) {
  const shown = data[trace.trace];
  const { colors, inks, ...arrays } = bars;
  Object.assign(shown, arrays);
  if (!colors) return;
  shown.marker.color = colors;
  shown.insidetextfont.color = inks;
}

// Puts the marks in view into `data`; returns a note on what was merged.
function showView(data, detail, traces, view) {
  const marks = marksInView(traces, view, detail.mostBars);
  for (const grid of detail.grids) data[grid.trace].visible = marks === null;
  traces.forEach((trace, n) => {
    const isShown = marks !== null && marks[n].length > 0;
    putBars(data, trace, isShown ? barsOf(trace, marks[n], detail.quantumMs, view.least) : NOTHING);
  });
  if (marks !== null) {
    const total = marks.reduce((sum, places) => sum + places.length / 2, 0);
    return `${total.toLocaleString("en-US")} bars in view, drawn one by one.`;
  }
  const isHidden = (trace) => data[trace.trace].visible === "legendonly";
  const kinds = traces.map((trace) => ({ ...trace, name: data[trace.trace].name, rows: isHidden(trace) ? [] : trace.rows }));
  for (const grid of detail.grids) {
    const own = grid.kinds.map((name) => kinds.find((kind) => kind.name === name));
    Object.assign(data[grid.trace], gridOf(own, grid, view, detail));
  }
  return detail.note;
}

// The end of a step's title matters least; a narrow figure leaves it out.
const TITLE_CHARACTER = 7.5; // px

function fitTitles(div, layout) {
  const room = (div.clientWidth - layout.margin.l - layout.margin.r) / TITLE_CHARACTER;
  for (const title of (layout.annotations ?? []).filter(({ name }) => name === "title")) {
    const parts = title.text.replace(/<\/?b>/g, "").split(" · ");
    while (parts.length > 1 && parts.join(" · ").length > room) parts.pop();
    const shown = parts.join(" · ");
    title.text = `<b>${shown.length > room ? `${shown.slice(0, Math.max(1, room - 1))}…` : shown}</b>`;
  }
}

// The note on what was merged moves above the figure, where its text wraps.
function placeNote(div, layout) {
  const note = layout.annotations?.find(({ name }) => name === "note");
  if (!note) return;
  layout.annotations = layout.annotations.filter((other) => other !== note);
  layout.height -= layout.meta.notePx;
  layout.margin.b -= layout.meta.notePx;
  noteOf(div).textContent = note.text.replaceAll("<br>", " ");
}

function noteOf(div) {
  if (!div.previousElementSibling?.matches(".merged")) {
    div.insertAdjacentHTML("beforebegin", '<p class="note merged" aria-live="polite"></p>');
  }
  return div.previousElementSibling;
}

const columnsOf = new WeakMap();

// Lets a drawn figure with `layout.meta.detail` show single bars after zooming in.
function attachDetail(div, config) {
  const { detail } = div.layout.meta;
  detail.note = noteOf(div).textContent;
  if (columnsOf.has(div)) {
    showInView(div, config);
    return;
  }
  // Once the columns at the end of the page are parsed and the overview is on the screen.
  const ahead = globalThis.requestIdleCallback ?? setTimeout;
  const idle = parsed().then(() => new Promise((done) => ahead(done, { timeout: 500 })));
  const bytes = idle.then(() => unpackBytes(document.getElementById(detail.columns)));
  columnsOf.set(div, bytes.then((unpacked) => readColumns(detail, unpacked)));
  div.on("plotly_relayout", (change) => {
    if (Object.keys(change).some((key) => /^[xy]axis\b/.test(key))) showInView(div, config);
  });
  div.on("plotly_restyle", () => showInView(div, config));  // a name was clicked in the legend
}

// Keeps the zoom and the hidden traces when a figure is redrawn for other colours or for paper.
function keepView(div, data, layout) {
  if (!div.layout || !div._fullLayout?.xaxis || layout.meta?.panels) return;
  for (const axis of ["xaxis", "yaxis"]) {
    if (layout[axis]?.range) layout[axis].range = [...div._fullLayout[axis].range];
  }
  const visible = new Map(div.data.filter((trace) => trace.type !== "heatmap").map((trace) => [trace.name, trace.visible]));
  for (const trace of data) {
    if (visible.get(trace.name) !== undefined) trace.visible = visible.get(trace.name);
  }
}

async function parsed() {
  if (document.readyState !== "loading") return;
  await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
}

async function showInView(div, config) {
  const traces = await columnsOf.get(div);
  const { detail } = div.layout.meta;
  noteOf(div).textContent = showView(div.data, detail, traces, viewOf(div));
  await Plotly.react(div, div.data, div.layout, config);
  div.dispatchEvent(new Event("detailed"));
}
