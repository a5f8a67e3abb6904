// A timeline of replicas shows the ranks of one of them, the slowest at first, or one rank of all of them.

// The rows that are shown, from top to bottom, each with its step, its rank and its replica.
function rowsShown({ meta: { replicas }, choice = { replica: replicas.shown } }) {
  const { replica, rank } = choice;
  if (replica === undefined) return replicas.steps.map((step, n) => ({ step, rank, replica: n }));
  const step = replicas.steps[replica];
  return Array.from({ length: step.ranks }, (_, n) => ({ step, rank: n, replica }));
}

// The marks that lie in some rows, which are moved to the first one and those below it.
function kindsInRows(kinds, shown, first) {
  return kinds.map((kind) => {
    const rows = shown.flatMap(({ step, rank, replica }, n) => {
      const part = kind.rowAt.get(rowKey(step.firstRow + rank));
      return part ? [{ ...part, row: rowKey(first + n), replica }] : [];
    });
    const replicaOf = (n) => rowOf({ rows }, n).replica;
    return { ...kind, rows, replicaOf, rowAt: new Map(rows.map((part) => [part.row, part])) };
  });
}

function showRows(timeline, choice) {
  const { replicas, rowPx, path } = timeline.meta;
  timeline.choice = choice;
  timeline.choose(null);
  const shown = rowsShown(timeline);
  const [{ step }] = shown;
  const isOfAll = choice.replica === undefined;
  const px = isOfAll ? replicas.rowPx : rowPx;
  const firstRow = (step.abovePx ?? 0) / px;
  const windows = step.windows && shown.map((one) => one.step.windows[one.rank]);
  timeline.steps = [{ ...step, windows, firstRow, aboveRows: firstRow, ranks: shown.length, rowName: isOfAll ? "replica" : "rank" }];
  timeline.kinds = kindsInRows(timeline.allKinds, shown, firstRow);
  timeline.bottom = firstRow + shown.length - 0.48;
  timeline.setRowPx(px);
  timeline.path = choice.replica === replicas.shown ? path : []; // that of others is not known
  timeline.refresh();
}

// The choice among the replicas; nothing where there is one.
function replicaChoice(timeline) {
  const { replicas } = timeline.meta;
  if (!replicas) return [];
  const select = element("select", "tl-replicas", "", { "aria-label": "Shown: a replica, or a rank of all replicas" });
  const choices = [
    ...replicas.steps.map((_, replica) => ({ replica })),
    ...Array.from({ length: replicas.steps[0].ranks }, (_, rank) => ({ rank })),
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
