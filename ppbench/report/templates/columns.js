// The columns of a timeline's kinds, as drawing.py packs them, and what is asked of them.

// Rows are compared; those of steps below others are fractions.
const rowKey = (row) => Math.round(row * 1e6) / 1e6;
const written = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const COMPUTATIONS = new Set(["F", "B", "I", "W"]);

// A column of integers of up to three bytes that needs no factor takes half the memory.
function readColumn(bytes, [place, planes, least], count, factor = 1) {
  const values = new (factor === 1 && planes < 4 ? Int32Array : Float64Array)(count);
  let weight = 1;
  for (let plane = 0; plane < planes; plane++, weight *= 256) {
    const at = place + plane * count;
    for (let n = 0; n < count; n++) values[n] += bytes[at + n] * weight;
  }
  for (let n = 0; n < count; n++) values[n] = (values[n] + least) * factor;
  return values;
}

// The kinds of a timeline with their columns; those that only texts and colours need are read when they are
// first asked for.
function readColumns(meta, bytes) {
  const { quantum, unit, size: [sizeUnit, sizeBytes] } = meta;
  const timed = (time) => `${written(time, 3)}${unit}`;
  return meta.kinds.map((kind) => {
    const { count, colors, inks, words, labels } = kind;
    const lazily = (layout, factor) => {
      let values = null;
      return () => (values ??= readColumn(bytes, layout, count, factor));
    };
    const rows = kind.rows.map(([row, from], n) => ({ row: rowKey(row), from, to: kind.rows[n + 1]?.[1] ?? count, longest: 0 }));
    const begin = new Float64Array(readColumn(bytes, kind.begin, count));
    const width = readColumn(bytes, kind.width, count, quantum);
    const total = kind.lane === "compute" ? new Float64Array(count + 1) : null; // times are summed there
    for (const row of rows) {
      let running = 0; // whole quanta, so that a million differences add up exactly
      for (let n = row.from; n < row.to; n++) {
        running += begin[n];
        begin[n] = running * quantum;
        if (total) total[n + 1] = total[n] + width[n];
        if (width[n] > row.longest) row.longest = width[n];
      }
    }
    const numbers = Object.fromEntries(Object.entries(kind.numbers).map(([name, layout]) => (
      [name, lazily(layout, name.endsWith("_ns") ? quantum : 1)])));
    const [shade, codes, amount] = [lazily(kind.shade), lazily(kind.codes), lazily(kind.amount, quantum)];
    const textOf = (name, n) => {
      if (name === "start") return timed(begin[n]);
      if (name === "duration") return timed(width[n]);
      if (name === "phrase") return words[codes()[n]].replace("{}", () => timed(amount()[n]));
      const value = numbers[name]()[n];
      if (name.endsWith("_ns")) return timed(value);
      return name === "num_bytes" ? `${written(value / sizeBytes, 1)} ${sizeUnit}` : String(value);
    };
    return {
      ...kind,
      rows,
      rowAt: new Map(rows.map((row) => [row.row, row])),
      begin,
      width,
      total,
      numbers,
      lane: meta.lanes[kind.lane].at,
      height: meta.lanes[kind.lane].height,
      isCompute: kind.lane === "compute",
      isComputation: COMPUTATIONS.has(kind.op),
      isWaiting: kind.name !== kind.group,
      color: colors.length > 1 ? (n) => colors[shade()[n]] : () => colors[0],
      ink: inks.length > 1 ? (n) => inks[shade()[n]] : () => inks[0],
      label: labels ? (n) => labels[n] : kind.hasText ? (n) => String(numbers.microbatch()[n]) : null,
      linesOf: (n) => kind.lines.map((line) => line.replace(/\{(\w+)\}/g, (_, name) => textOf(name, n))),
    };
  });
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

// Calls `take(n)` for every mark of a row between two times, until it returns false.
function eachBetween(kind, row, start, end, take) {
  for (let n = firstAtLeast(kind.begin, start - row.longest, row.from, row.to); n < row.to; n++) {
    if (kind.begin[n] >= end) return true;
    if (kind.begin[n] + kind.width[n] > start && !take(n)) return false;
  }
  return true;
}

// The marks in view, by kind, as n and y in turn; null if there are more than `most`.
function marksInView(kinds, view, most) {
  let total = 0;
  const byKind = [];
  for (const kind of kinds) {
    const places = [];
    byKind.push(places);
    for (const row of kind.rows) {
      const y = row.row + kind.lane;
      if (y < view.top || y > view.bottom) continue;
      const isAll = eachBetween(kind, row, view.start, view.end, (n) => {
        places.push(n, y);
        total += 1;
        return total <= most;
      });
      if (!isAll) return null;
    }
  }
  return byKind;
}

// The time that marks of a row take before `end`, from the row's first mark on; they do not overlap.
function takenBefore(kind, row, end, from = row.from) {
  const n = firstAtLeast(kind.begin, end, from, row.to);
  if (n === row.from) return { n, taken: 0 };
  const over = Math.max(0, kind.begin[n - 1] + kind.width[n - 1] - end);
  return { n, taken: kind.total[n] - kind.total[row.from] - over };
}

// The overview of one step between two times, as overview.py makes it: of each cell the busy share, the kind
// that takes most of it, and how many computations begin there. Of rows out of sight nothing is computed.
function overviewOf(kinds, step, start, end, slices, mostShare, isInSight = () => true) {
  const size = step.ranks * slices;
  const width = (end - start) / slices;
  const [busy, mostly, counts] = [new Float64Array(size), new Uint8Array(size), new Float64Array(size)];
  const spent = kinds.map((kind) => {
    const shares = new Float64Array(size);
    for (let rank = 0; rank < step.ranks; rank++) {
      const row = kind.rowAt.get(rowKey(step.firstRow + rank));
      if (!row || !isInSight(row.row)) continue;
      const first = rank * slices;
      let before = takenBefore(kind, row, start);
      for (let slice = 0; slice < slices; slice++) {
        const after = takenBefore(kind, row, start + (slice + 1) * width, before.n);
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
  return { busy, mostly, counts, start, end, slices };
}

// The overview that the page brings along, for the time before the columns are read.
function overviewOfCells(cells, step, slices) {
  const [busy, mostly] = [cells.busy, cells.mostly].map((text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
  return { busy: Float64Array.from(busy, (share) => share / 255), mostly, counts: null, start: step.start, end: step.end, slices };
}
