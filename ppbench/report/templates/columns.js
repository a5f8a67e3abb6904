// The marks of timelines as columns: read from packed bytes (overview.py), or from the bars of a figure.
"use strict";

// Rows are compared; those of steps below others are fractions.
const rowKey = (row) => Math.round(row * 1e6) / 1e6;

// A column of integers of up to three bytes that needs no factor takes half the memory.
const isSmall = (layout, factor) => factor === 1 && layout.planes < 4;

function readColumn(bytes, layout, count, factor = 1) {
  const values = new (isSmall(layout, factor) ? Int32Array : Float64Array)(count);
  let weight = 1;
  for (let plane = 0; plane < layout.planes; plane++, weight *= 256) {
    const at = layout.at + plane * count;
    for (let n = 0; n < count; n++) values[n] += bytes[at + n] * weight;
  }
  for (let n = 0; n < count; n++) values[n] = (values[n] + layout.least) * factor;
  return values;
}

// Values that are read when they are first asked for.
function lazily() {
  const read = new Map();
  return (key, reader) => {
    if (!read.has(key)) read.set(key, reader());
    return read.get(key);
  };
}

// The columns of every trace that overview.py packs into `bytes`; `detail` describes them.
function readColumns(detail, bytes) {
  return detail.traces.map((trace) => {
    const { count } = trace;
    const rows = trace.rows.map(([row, from], n) => ({ row: rowKey(row), from, to: trace.rows[n + 1]?.[1] ?? count }));
    const begin = new Float64Array(readColumn(bytes, trace.begin, count));
    const width = readColumn(bytes, trace.width, count, detail.quantumMs);
    for (const row of rows) {
      let running = 0; // whole quanta, so that a million differences add up exactly
      for (let n = row.from; n < row.to; n++) {
        running += begin[n];
        begin[n] = running * detail.quantumMs;
      }
    }
    const later = lazily();
    const shade = () => later("shade", () => readColumn(bytes, trace.shade, count));
    const numbers = Object.fromEntries(trace.numbers.map((number) => [number.name, () => (
      later(number.name, () => readColumn(bytes, number, count, number.factor)))]));
    const phrase = (n) => {
      const codes = later("codes", () => readColumn(bytes, trace.phrases.codes, count));
      const amounts = later("amount", () => readColumn(bytes, trace.phrases.amount, count, detail.quantumMs));
      return trace.phrases.words[codes[n]].replace("{}", inMs(amounts[n]));
    };
    return {
      trace: trace.trace,
      rows,
      begin,
      width,
      numbers,
      color: trace.colors && ((n) => trace.colors[shade()[n]]),
      ink: trace.colors && ((n) => trace.inks[shade()[n]]),
      label: trace.hasText ? (n) => String(numbers.microbatch()[n]) : null,
      phrase: trace.phrases ? phrase : () => "",
    };
  });
}

const inMs = (ms) => ms.toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 });

// The same columns of a trace that has all bars in itself.
function barColumns(trace, number, lane) {
  const [base, x, y, custom] = ["base", "x", "y", "customdata"].map((key) => numbers(trace[key]));
  const order = [...base.keys()].filter((n) => base[n] !== null).sort((a, b) => y[a] - y[b] || base[a] - base[b]);
  const rows = [];
  order.forEach((at, n) => {
    const row = rowKey(y[at] - lane);
    if (rows.at(-1)?.row !== row) rows.push({ row, from: n, to: n });
    rows.at(-1).to = n + 1;
  });
  const taken = (values) => Float64Array.from(order, (at) => values[at]);
  const later = lazily();
  const columns = trace.meta.numbers.map((name, column) => [name, () => (
    later(name, () => taken(custom.map((row) => row[column]))))]);
  const one = (values) => (Array.isArray(values) ? (n) => values[order[n]] : null);
  return {
    trace: number,
    rows,
    begin: taken(base),
    width: taken(x),
    numbers: Object.fromEntries(columns),
    color: one(trace.marker.color),
    ink: one(trace.insidetextfont?.color),
    label: one(trace.text),
    phrase: one(trace.hovertext) ?? (() => ""),
  };
}

// The first n in a row's part of ascending values that is not below the bound.
function firstAtLeast(values, bound, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] >= bound) to = middle;
    else from = middle + 1;
  }
  return from;
}

// A trace with what is found out about it once: the longest mark of each row and, where times are
// summed, running totals.
function completed(trace, isSummed) {
  const total = isSummed ? new Float64Array(trace.begin.length + 1) : null;
  for (const row of trace.rows) {
    row.longest = 0;
    for (let n = row.from; n < row.to; n++) {
      if (isSummed) total[n + 1] = total[n] + trace.width[n];
      if (trace.width[n] > row.longest) row.longest = trace.width[n];
    }
  }
  return { ...trace, total, rowAt: new Map(trace.rows.map((row) => [row.row, row])) };
}

// Calls `take(n)` for every mark of a row between two times, until it returns false.
function eachBetween(trace, row, start, end, take) {
  for (let n = firstAtLeast(trace.begin, start - row.longest, row.from, row.to); n < row.to; n++) {
    if (trace.begin[n] >= end) return true;
    if (trace.begin[n] + trace.width[n] > start && !take(n)) return false;
  }
  return true;
}

// The marks in view, by trace, as n and y in turn; null if there are more than `most`.
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

// The time that marks of a row take before `end`, from the row's first mark on; they do not overlap.
function takenBefore(trace, row, end, from = row.from) {
  const n = firstAtLeast(trace.begin, end, from, row.to);
  if (n === row.from) return { n, taken: 0 };
  const over = Math.max(0, trace.begin[n - 1] + trace.width[n - 1] - end);
  return { n, taken: trace.total[n] - trace.total[row.from] - over };
}

// The overview of one step between two times: of each cell the busy share, the kind that takes at least
// `mostShare` of it (else the number of kinds, or one more if it is beside the step), and how many computations begin there. Of rows out of sight
// nothing is computed.
function overviewOf(kinds, grid, start, end, numSlices, mostShare, isInSight = () => true) {
  const size = grid.ranks * numSlices;
  const width = (end - start) / numSlices;
  const [busy, mostly, counts] = [new Float64Array(size), new Uint8Array(size), new Float64Array(size)];
  // The share of each kind in each slice of each rank, as overview.py computes it.
  const spent = kinds.map((trace) => {
    const shares = new Float64Array(size);
    for (let rank = 0; rank < grid.ranks; rank++) {
      const row = trace.rowAt.get(rowKey(grid.firstRow + rank));
      if (!row || !isInSight(row.row)) continue;
      const first = rank * numSlices;
      let before = takenBefore(trace, row, start);
      for (let slice = 0; slice < numSlices; slice++) {
        const after = takenBefore(trace, row, start + (slice + 1) * width, before.n);
        shares[first + slice] = (after.taken - before.taken) / width;
        counts[first + slice] += after.n - before.n;
        before = after;
      }
    }
    return shares;
  });
  for (let cell = 0; cell < size; cell++) {
    let main = 0;
    for (let kind = 0; kind < kinds.length; kind++) {
      busy[cell] += spent[kind][cell];
      if (spent[kind][cell] > spent[main][cell]) main = kind;
    }
    mostly[cell] = spent[main]?.[cell] < mostShare * busy[cell] ? kinds.length + Math.abs(kinds[main].beside) : main;
    busy[cell] = Math.min(1, busy[cell]);
  }
  return { busy, mostly, counts, start, end, slices: numSlices };
}

// The overview that the figure brings along, for the time before its columns are read.
function overviewOfHeatmap(heatmap, numSlices) {
  const z = numbers(heatmap.z);
  const codes = Array.from(z, (row) => [...row]).flat();
  const isIdle = (code) => code === null || Number.isNaN(code);
  return {
    busy: Float64Array.from(codes, (code) => (isIdle(code) ? 0 : code - Math.floor(code))),
    mostly: Uint8Array.from(codes, (code) => (isIdle(code) ? 0 : Math.floor(code))),
    counts: null, // not known yet
    start: heatmap.x0 - heatmap.dx / 2,
    end: heatmap.x0 + heatmap.dx * (numSlices - 0.5),
    slices: numSlices,
  };
}
