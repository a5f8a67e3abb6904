// A timeline of replicas shows the ranks of one of them, the slowest at first, or one rank of all of them.
"use strict";

// The rows of a choice, from top to bottom, each with its replica; `firstRows` are those of the replicas.
function rowsOf({ firstRows }, ranks, { replica = null, rank = null }) {
  if (rank !== null) return firstRows.map((first, n) => ({ row: first + rank, replica: n }));
  return Array.from({ length: ranks }, (_, n) => ({ row: firstRows[replica] + n, replica }));
}

// The marks that lie in some rows, which are moved to the first one and those below it.
function kindsInRows(kinds, shown, first) {
  return kinds.map((kind) => {
    const rows = shown.flatMap(({ row, replica }, n) => {
      const part = kind.rowAt.get(rowKey(row));
      return part ? [{ ...part, row: rowKey(first + n), replica }] : [];
    });
    const replicaOf = (n) => rowOf({ rows }, n).replica;
    return { ...kind, rows, replicaOf, rowAt: new Map(rows.map((part) => [part.row, part])) };
  });
}

const [TALL_PX, SHORT_PX, MOST_ROWS_PX] = [96, 18, 1200]; // as in gantt.py

function showRows(timeline, choice) {
  const shown = rowsOf(timeline.replicas, timeline.replicas.ranks, choice);
  timeline.choose(null);
  const rowPx = Math.min(TALL_PX, Math.max(SHORT_PX, MOST_ROWS_PX / shown.length));
  const { rows, firstRows } = timeline.replicas;
  const firstRow = rows ? timeline.steps[0].abovePx / rowPx : 0;
  const windows = rows && shown.map((one) => rows[one.replica].windows[Math.round(one.row - firstRows[one.replica])]);
  const row = rows && { ...rows[choice.replica ?? 0], windows };
  timeline.kinds = kindsInRows(timeline.allKinds, shown, firstRow);
  timeline.steps = [{ ...timeline.steps[0], row, firstRow, aboveRows: firstRow, ranks: shown.length, rowName: choice.rank === undefined ? "rank" : "replica" }];
  timeline.bottom = firstRow + shown.length - 0.48;
  timeline.setRowPx(rowPx);
  timeline.path = choice.replica === timeline.replicas.shown ? timeline.ownPath : null; // that of others is not known
  timeline.refresh();
}

// The choice among the replicas; nothing where there is one.
function replicaChoice(timeline) {
  const { replicas } = timeline;
  if (!replicas) return [];
  Object.assign(replicas, { ranks: timeline.steps[0].ranks });
  timeline.ownPath = timeline.path;
  const select = element("select", "tl-replicas", "", { "aria-label": "Shown: a replica, or a rank of all replicas" });
  const choices = [
    ...replicas.firstRows.map((_, replica) => ({ replica })),
    ...Array.from({ length: replicas.ranks }, (_, rank) => ({ rank })),
  ];
  const textOf = ({ replica, rank }) => {
    if (replica === undefined) return `rank ${rank} of all replicas`;
    return `replica ${replica}${replica === replicas.shown ? ", the slowest" : ""}`;
  };
  choices.forEach((choice, n) => select.append(new Option(textOf(choice), String(n), false, choice.replica === replicas.shown)));
  select.disabled = !timeline.kinds;
  timeline.isReady?.then(() => { select.disabled = false; });
  select.addEventListener("change", () => showRows(timeline, choices[Number(select.value)]));
  return [select];
}
