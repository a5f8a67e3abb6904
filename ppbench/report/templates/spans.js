// What a timeline's marks are: their names and texts, the search, messages and busy times.
// A span is named by { kind, n }: the number of its kind, and of the mark in the kind's columns.

const ARRIVES_AS = { SEND_F: "RECV_F", SEND_B: "RECV_B" };
// The sends of what an action brings in, and of what it gives away.
const INPUT_OF = { F: "SEND_F", B: "SEND_B", I: "SEND_B", RECV_F: "SEND_F", RECV_B: "SEND_B" };
const OUTPUT_OF = { F: "SEND_F", B: "SEND_B", I: "SEND_B", SEND_F: "SEND_F", SEND_B: "SEND_B" };

// What a mark is, in lines; of replicas its last one says which.
function linesOf(kind, n) {
  const replica = kind.replicaOf ? [`replica ${kind.replicaOf(n)}`] : [];
  return [...kind.linesOf(n).filter(Boolean), ...replica];
}

const numberOf = (kind, name, n) => (name in kind.numbers ? kind.numbers[name]()[n] : null);

// An action as in torch's form, `2F7`; of what is none, its kind's name.
function actionOf(kind, n) {
  if (kind.hatch) return kind.label?.(n) || kind.name;
  const [stage, microbatch] = [numberOf(kind, "stage", n), numberOf(kind, "microbatch", n)];
  return kind.op && stage !== null ? `${stage}${kind.op}${microbatch ?? ""}` : kind.name; // of collectives `2UNSHARD`
}

const rowOf = (kind, n) => kind.rows.find(({ from, to }) => n >= from && n < to);
const stepAt = (steps, row) => steps.find(({ firstRow, ranks }) => row > firstRow - 0.5 && row < firstRow + ranks - 0.5);

// The search, in the step that is marked. Words that all have to fit a mark: `2F7`, `F7`, `2F`, `rank 1`, `stage 2`, `microbatch 7`, or a
// part of a kind's name.
const ACTION = /^(\d*)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|REDUCE_GRAD|OPT|F|B|I|W)(\d*)$/i;
const PLACES = { rank: "rank", r: "rank", stage: "stage", s: "stage", microbatch: "microbatch", mb: "microbatch", m: "microbatch" };

function termsOf(query) {
  const words = query.trim().toLowerCase().split(/[\s,]+/).filter(Boolean);
  const terms = [];
  while (words.length) {
    const word = words.shift();
    const joined = /^([a-z]+)(\d+)$/.exec(word);
    const action = ACTION.exec(word);
    if (word in PLACES && /^\d+$/.test(words[0] ?? "")) terms.push({ place: PLACES[word], is: Number(words.shift()) });
    else if (action) terms.push({ op: action[2].toUpperCase(), stage: action[1], microbatch: action[3] });
    else if (joined && joined[1] in PLACES) terms.push({ place: PLACES[joined[1]], is: Number(joined[2]) });
    else terms.push({ name: word });
  }
  return terms;
}

// Functions of n that a mark of this kind has to fulfil for a term; null if none of the kind can.
function testsOf(kind, term) {
  const isNumber = (name, is) => {
    const values = kind.numbers[name]?.();
    return values ? (n) => values[n] === is : null;
  };
  if (term.place) return [isNumber(term.place, term.is)];
  if (term.name) return kind.name.includes(term.name) ? [] : [null];
  if (kind.op !== term.op) return [null];
  return ["stage", "microbatch"].filter((name) => term[name] !== "").map((name) => isNumber(name, Number(term[name])));
}

const MOST_MATCHES = 100_000;

// The spans that match, in the order of time. Idle time only matches if its name is searched for.
function matchesOf(kinds, query) {
  const terms = termsOf(query);
  const isNamed = terms.some(({ name }) => name);
  const found = [];
  if (!terms.length) return found;
  kinds.forEach((kind, number) => {
    if (kind.beside || kind.isWaiting || (kind.isIdle && !isNamed)) return;
    const tests = terms.flatMap((term) => testsOf(kind, term));
    if (tests.includes(null)) return;
    for (const { from, to } of kind.rows) {
      for (let n = from; n < to && found.length < MOST_MATCHES; n++) {
        if (tests.every((fits) => fits(n))) found.push({ kind: number, n });
      }
    }
  });
  return found.sort((a, b) => kinds[a.kind].begin[a.n] - kinds[b.kind].begin[b.n]);
}

// The mark of a transfer's moving part.
function transferOf(kinds, step, beside, op, stage, microbatch) {
  const number = kinds.findIndex((kind) => kind.op === op && kind.beside === beside && !kind.isWaiting);
  if (number < 0) return null;
  const kind = kinds[number];
  const [stages, microbatches] = [kind.numbers.stage(), kind.numbers.microbatch()];
  for (let rank = 0; rank < step.ranks; rank++) {
    const row = kind.rowAt.get(rowKey(step.firstRow + rank));
    if (!row) continue;
    for (let n = row.from; n < row.to; n++) {
      if (microbatches[n] === microbatch && stages[n] === stage) return { kind: number, n };
    }
  }
  return null;
}

// The messages of a span, as pairs of send and receive: those of a transfer, or the inputs and outputs
// of a computation.
function messagesOf(kinds, steps, span) {
  const kind = kinds[span.kind];
  const [stage, microbatch] = [numberOf(kind, "stage", span.n), numberOf(kind, "microbatch", span.n)];
  const step = stepAt(steps, rowOf(kind, span.n).row);
  if (!kind.op || stage === null || !step) return [];
  const messages = [];
  for (const [sendOp, isInput] of [[INPUT_OF[kind.op], true], [OUTPUT_OF[kind.op], false]]) {
    if (!sendOp) continue;
    const next = sendOp === "SEND_F" ? 1 : -1;
    const sender = isInput ? stage - next : stage;
    const from = transferOf(kinds, step, kind.beside, sendOp, sender, microbatch);
    const to = transferOf(kinds, step, kind.beside, ARRIVES_AS[sendOp], sender + next, microbatch);
    if (from && to) messages.push({ from, to, isInput });
  }
  return messages;
}

// For each step, how long each rank was busy between two times, and the idle time by cause; a step
// ends where it ends.
function busyTimes(kinds, steps, start, end) {
  const working = kinds.filter((kind) => kind.isCompute && !kind.isIdle && !kind.hatch);
  const idle = kinds.filter((kind) => kind.isIdle);
  return steps.map((step) => {
    const [from, to] = [Math.max(start, step.start), Math.min(end, step.end)];
    const sum = (kind, rank) => {
      const row = kind.rowAt.get(rowKey(step.firstRow + rank));
      return row ? Math.max(0, takenBefore(kind, row, to).taken - takenBefore(kind, row, from).taken) : 0;
    };
    const ranks = Array.from({ length: step.ranks }, (_, rank) => (
      working.reduce((total, kind) => total + sum(kind, rank), 0)));
    const byName = new Map();
    for (const kind of idle) {
      const time = ranks.reduce((total, _, rank) => total + sum(kind, rank), 0);
      if (time > 0) byName.set(kind.name, (byName.get(kind.name) ?? 0) + time);
    }
    const causes = [...byName].map(([name, time]) => ({ name, time }));
    return { title: step.title, rowName: step.rowName, duration: Math.max(0, to - from), ranks, causes };
  });
}

// The visible marks of a lane by time; those that begin together are in the order of their kinds.
function marksOfLane(kinds, isVisible, { row, lane }) {
  const spans = [];
  kinds.forEach((kind, number) => {
    const part = kind.lane === lane && isVisible(kind) && kind.rowAt.get(row);
    if (part) for (let n = part.from; n < part.to; n++) spans.push({ kind: number, n });
  });
  return spans.sort((a, b) => kinds[a.kind].begin[a.n] - kinds[b.kind].begin[b.n]);
}

// The visible lanes from top to bottom, each as { row, lane }.
function lanesOf(kinds, isVisible) {
  const lanes = new Map();
  for (const kind of kinds.filter(isVisible)) {
    for (const { row } of kind.rows) lanes.set(row + kind.lane, { row, lane: kind.lane });
  }
  return [...lanes.keys()].sort((a, b) => a - b).map((y) => lanes.get(y));
}

// How far a mark is from a time; 0 if it is there.
const awayFrom = (time, { begin, width }, n) => Math.max(begin[n] - time, time - begin[n] - width[n], 0);
