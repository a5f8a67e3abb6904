// The controls of a timeline: its elements, and what mouse, wheel, touch and keys do.

const PARTS = `
  <div class="tl-tools">
    <div class="tl-find">
      <input type="search" data-part="search" placeholder="Find 2F7, F7, rank 1" autocomplete="off" spellcheck="false"
        aria-label="Find actions: 2F7 is the forward of microbatch 7 in stage 2">
      <button data-part="previous" aria-label="Previous match" title="Previous match">‹</button>
      <button data-part="next" aria-label="Next match" title="Next match">›</button>
      <span class="tl-count" data-part="count" aria-live="polite"></span>
    </div>
    <button data-button="in" aria-label="Zoom in" title="Zoom in (W)">+</button>
    <button data-button="out" aria-label="Zoom out" title="Zoom out (S)">−</button>
    <button data-button="whole" aria-label="Show the whole step" title="Show the whole step (0)">Whole step</button>
    <button data-button="measure" aria-label="Measure a range by dragging" aria-pressed="false"
      title="Measure a range by dragging; or drag with Shift">Measure</button>
    <button data-button="taller" aria-label="Taller rows" title="Taller rows">Taller</button>
    <button data-button="flatter" aria-label="Flatter rows" title="Flatter rows">Flatter</button>
  </div>
  <div class="tl-layers" data-part="layers" role="group" aria-label="Shown in the timeline"></div>
  <div class="tl-body">
    <div class="tl-plot">
      <div class="tl-head" data-part="head">
        <div class="tl-map" data-part="map">
          <canvas data-part="mapCanvas"></canvas>
          <div class="tl-shade" data-part="before" style="left: 0"></div>
          <div class="tl-shade" data-part="after" style="right: 0"></div>
          <div class="tl-window" data-part="pane" role="slider" tabindex="0" aria-label="Visible part of the step"
            aria-valuemin="0" aria-valuemax="100"></div>
        </div>
        <button class="tl-brief" data-part="brief" hidden></button>
        <canvas class="tl-axis" data-part="axis" aria-hidden="true"></canvas>
      </div>
      <div class="tl-rows" data-part="rows" role="application" tabindex="0" aria-roledescription="timeline">
        <canvas data-part="canvas"></canvas>
      </div>
      <div class="tl-tip" data-part="tip" hidden></div>
    </div>
    <aside class="tl-side" data-part="side" aria-label="Details"></aside>
  </div>
  <p class="note merged" data-part="noted" hidden></p>
  <p class="sr-only tl-live" data-part="live" aria-live="polite"></p>`;

// The elements of a timeline, in its div; the timeline has each by its name.
function build(timeline) {
  const { div } = timeline;
  div.classList.add("tl");
  div.innerHTML = PARTS;
  for (const node of div.querySelectorAll("[data-part]")) timeline[node.dataset.part] = node;
  const buttons = [...div.querySelectorAll("[data-button]")];
  timeline.buttons = Object.fromEntries(buttons.map((node) => [node.dataset.button, node]));
  for (const node of div.querySelectorAll("button")) node.type = "button";
  timeline.buttons.in.before(...replicaChoice(timeline));
  if (timeline.steps.some(({ windows }) => windows)) timeline.buttons.whole.title += "; once more: those beside it too";
  timeline.brief.addEventListener("click", () => timeline.side.scrollIntoView({ block: "nearest" }));
  const label = div.getAttribute("aria-label") ?? "Timeline";
  const keys = "Enter steps through its spans with the arrow keys; W, A, S, D zoom and move.";
  timeline.rows.setAttribute("aria-label", `${label}. ${namesOf(timeline)}${keys}`);
  timeline.titles = timeline.steps.map(({ title }) => element("div", "tl-title", title, { title }));
  timeline.rows.append(...timeline.titles);
  timeline.isFramed = Boolean(div.closest(".scroll"));
  buildLayers(timeline);
  fillSide(timeline);
  timeline.tellMatches();
}

// What is marked, and what is beside it, for those who do not see it.
function namesOf({ steps }) {
  return steps.filter(({ windows }) => windows).map(({ title, names }) => {
    const own = names.find((name) => name[3]);
    const others = names.filter((name) => name !== own).map(([name]) => name);
    return `${title ? `${title.split(" · ")[0]}: ` : ""}${own[0]} is marked, beside ${others.join(" and ")}. `;
  }).join("");
}

// A button for each kind, which is also the legend, one for all of several, and one for the critical path.
const SETS = [
  { name: "idle time", holds: ({ isIdle }) => isIdle },
  { name: "transfers", holds: ({ lane }) => ["send", "recv"].includes(lane) },
  { name: "collectives", holds: ({ lane }) => lane === "collective" },
];

function buildLayers(timeline) {
  const listed = timeline.meta.kinds.filter(({ isListed }) => isListed);
  const add = (groups, name, icon, className = "") => {
    const made = element("button", className, name, { type: "button", "data-groups": JSON.stringify(groups) });
    if (icon) made.prepend(icon);
    made.addEventListener("click", () => {
      const isShown = groups.some((group) => timeline.hidden.has(group));
      groups.forEach((group) => timeline.toggle(group, isShown));
    });
    timeline.layers.append(made);
  };
  const addKind = ({ group, name, colors }) => add([group], name, element("i", "", "", { style: `background: ${colors[0]}` }));
  if (timeline.path.length) add([PATH], PATH, element("i", "line"));
  listed.filter((kind) => !SETS.some(({ holds }) => holds(kind))).forEach(addKind);
  for (const { name, holds } of SETS) {
    const members = listed.filter(holds);
    if (members.length > 1) add(members.map(({ group }) => group), `all ${name}`, null, "tl-all");
    members.forEach(addKind);
  }
  updateLayers(timeline);
}

function updateLayers(timeline) {
  for (const made of timeline.layers.children) {
    const groups = JSON.parse(made.dataset.groups);
    const hidden = groups.filter((group) => timeline.hidden.has(group)).length;
    made.setAttribute("aria-pressed", hidden === 0 ? "true" : hidden === groups.length ? "false" : "mixed");
  }
}

// Beside the plot: the pinned span, the measured range, or how to move.
const HELP = [
  ["wheel, pinch", "zoom"], ["drag", "move"], ["double-click", "the whole step"], ["click", "pin a span"],
  ["Shift-drag", "measure"], ["W S A D", "zoom, move"], ["arrows", "move; or Enter, then span by span"],
  ["M", "measure the span or the view"], ["Esc", "unpin"],
];

function fillSide(timeline) {
  const { side, chosen, range } = timeline;
  side.replaceChildren();
  side.classList.toggle("filled", Boolean(chosen || range));
  if (chosen) side.append(...detailsOf(timeline, chosen));
  if (range) side.append(...measured(timeline, range));
  if (chosen || range) return;
  const list = element("dl");
  for (const [keys, effect] of HELP) list.append(element("dt", "", keys), element("dd", "", effect));
  side.append(list);
}

function detailsOf(timeline, span) {
  const kind = timeline.kinds[span.kind];
  const [first, ...lines] = linesOf(kind, span.n);
  const action = actionOf(kind, span.n);
  const parts = [element("h3", "", action === first ? first : `${action} ${first}`), ...lines.map((line) => element("p", "", line))];
  for (const { from, to, isInput } of timeline.messages) {
    const other = isInput ? from : to;
    const there = timeline.kinds[other.kind];
    const time = isInput ? there.begin[other.n] : there.begin[other.n] + there.width[other.n];
    const text = `${isInput ? "sent by" : "arrives at"} rank ${numberOf(there, "rank", other.n)} at ${timeline.timed(time)}`;
    const go = button(actionOf(there, other.n), `Go to ${actionOf(there, other.n)}`);
    go.addEventListener("click", () => timeline.choose(other, { isShown: true }));
    const line = element("p", "tl-message", `${text} `);
    line.append(go);
    parts.push(line);
  }
  const actions = element("div", "tl-actions");
  const closer = button("Zoom to it", "Zoom to the pinned span", "Zoom to it (F)");
  closer.addEventListener("click", () => timeline.reveal(span, true));
  const close = button("Unpin", "Unpin", "Unpin (Esc)");
  close.addEventListener("click", () => { timeline.choose(null); timeline.rows.focus(); });
  actions.append(closer, close);
  return [...parts, actions];
}

function measured(timeline, { start, end }) {
  const { unit } = timeline;
  const parts = [element("h4", "", `Measured: ${timeline.timed(end - start)}`), element("p", "", `${written(start, 3)} to ${timeline.timed(end)}`)];
  const steps = timeline.kinds ? busyTimes(timeline.kinds, timeline.steps, start, end) : [];
  for (const { title, duration, ranks, causes, rowName = "rank" } of steps) {
    if (title) parts.push(element("h4", "", title.split(" · ")[0]));
    const table = element("table");
    const addRow = (cells, name) => {
      const row = element("tr");
      row.append(...cells.map((text, n) => element(name, n ? "number" : "", text)));
      table.append(row);
    };
    addRow([rowName, `busy,${unit}`, `idle,${unit}`, "idle"], "th");
    ranks.forEach((busy, rank) => {
      const idle = Math.max(0, duration - busy);
      const share = duration > 0 ? `${((idle / duration) * 100).toFixed(1)}%` : "–";
      addRow([String(rank), written(busy, 3), written(idle, 3), share], "td");
    });
    parts.push(table, ...causes.map(({ name, time }) => element("p", "", `${name}: ${timeline.timed(time)} over all ranks`)));
  }
  const clear = button("Clear", "Clear the measured range");
  clear.addEventListener("click", () => timeline.measure(null));
  const actions = element("div", "tl-actions");
  actions.append(clear);
  return [...parts, actions];
}

// What mouse, wheel, touch and keys do.
const steer = (timeline) => [steerByButtons, steerByWheel, steerByPointer, steerByKeys, steerByMap].forEach((by) => by(timeline));

function steerByButtons(timeline) {
  const on = (name, act) => timeline.buttons[name].addEventListener("click", act);
  on("in", () => timeline.zoom(0.5));
  on("out", () => timeline.zoom(2));
  on("whole", () => timeline.showWhole());
  on("taller", () => timeline.setRowPx(timeline.rowPx * 1.4));
  on("flatter", () => timeline.setRowPx(timeline.rowPx / 1.4));
  on("measure", () => setMeasuring(timeline, !timeline.isMeasuring));
  timeline.previous.addEventListener("click", () => timeline.go(-1));
  timeline.next.addEventListener("click", () => timeline.go(1));
  let waiting = 0;
  const search = () => timeline.find(timeline.search.value);
  timeline.search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 150);
  });
  timeline.search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    clearTimeout(waiting);
    if (timeline.searched !== timeline.search.value) search();
    timeline.searched = timeline.search.value;
    timeline.go(event.shiftKey ? -1 : 1);
  });
}

function setMeasuring(timeline, isOn) {
  timeline.isMeasuring = isOn;
  timeline.buttons.measure.setAttribute("aria-pressed", String(isOn));
  timeline.rows.classList.toggle("measuring", isOn);
}

const placeIn = (timeline, event) => {
  const box = timeline.canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
};
const LINE_PX = 16;

// On a page with more than a timeline, the wheel scrolls until the timeline was clicked. A pinch on a trackpad
// is a wheel with Ctrl.
function steerByWheel(timeline) {
  const { rows, div } = timeline;
  const isAlone = Boolean(div.closest(".timeline-page"));
  rows.addEventListener("wheel", (event) => {
    if (!isAlone && !event.ctrlKey && !div.contains(document.activeElement)) return;
    const px = event.deltaMode === 1 ? LINE_PX : event.deltaMode === 2 ? innerHeight : 1;
    const across = (event.shiftKey ? event.deltaX || event.deltaY : event.deltaX) * px;
    const perPx = (timeline.view.end - timeline.view.start) / timeline.plane.width;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      timeline.pan(across * perPx);
      return;
    }
    if (event.deltaY > 0 && timeline.isWhole && !event.ctrlKey) return; // the page scrolls on
    event.preventDefault();
    const { x } = placeIn(timeline, event);
    const strength = event.ctrlKey && Math.abs(event.deltaY) < 50 ? 0.01 : 0.0022;
    timeline.zoom(Math.exp(event.deltaY * px * strength), timeAt(timeline.plane, Math.max(x, timeline.plane.left)));
  }, { passive: false });
}

const CLICK_PX = 4;

// Follows a pointer from where it is pressed to where it is let go: `begin` returns what `move` and `end` are given,
// with `x`, `y` and whether it `isMoved`. Two fingers are not followed but pinch.
function followPointer(node, { begin, move, end, pinch = () => {} }) {
  const pointers = new Map();
  let drag = null;
  node.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    node.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event.clientX);
    drag = pointers.size > 1 ? null : { ...begin(event), x: event.clientX, y: event.clientY, isMoved: false };
  });
  node.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const [other] = [...pointers.keys()].filter((id) => id !== event.pointerId);
    if (pointers.size === 2) pinch(pointers.get(other), pointers.get(event.pointerId), event.clientX);
    pointers.set(event.pointerId, event.clientX);
    if (!drag) return;
    drag.isMoved ||= Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > CLICK_PX;
    if (drag.isMoved) move(event, drag);
  });
  for (const type of ["pointerup", "pointercancel"]) {
    node.addEventListener(type, (event) => {
      pointers.delete(event.pointerId);
      if (drag) end(drag, type === "pointerup" && !drag.isMoved);
      drag = null;
    });
  }
  node.addEventListener("dragstart", (event) => event.preventDefault()); // of text that was selected before
}

// One pointer moves the view or measures, two zoom. A finger that moves up or down scrolls the page.
function steerByPointer(timeline) {
  const { rows } = timeline;
  const timeOf = ({ left, width }, x) => timeAt(timeline.plane, Math.min(Math.max(x, left), left + width));
  followPointer(rows, {
    begin(event) {
      const place = placeIn(timeline, event);
      const isMeasuring = event.shiftKey || timeline.isMeasuring;
      return { place, view: timeline.view, scrolledAt: event.clientY, time: timeAt(timeline.plane, place.x), isMeasuring };
    },
    move(event, drag) {
      const { x } = placeIn(timeline, event);
      timeline.tip.hidden = true;
      if (drag.isMeasuring) {
        const time = timeOf(timeline.plane, x);
        timeline.measure({ start: Math.min(time, drag.time), end: Math.max(time, drag.time) });
        return;
      }
      rows.classList.add("panning");
      const by = (drag.place.x - x) * (drag.view.end - drag.view.start) / timeline.plane.width;
      timeline.show(drag.view.start + by, drag.view.end + by);
      if (event.pointerType === "mouse") scrollBy(0, drag.scrolledAt - event.clientY);
      drag.scrolledAt = event.clientY;
    },
    end(drag, isClick) {
      rows.classList.remove("panning");
      if (isClick) timeline.choose(timeline.spanAt(drag.place.x, drag.place.y));
      if (drag.isMeasuring && drag.isMoved) setMeasuring(timeline, false);
    },
    pinch(other, before, now) {
      const { plane } = timeline;
      const { left } = timeline.canvas.getBoundingClientRect();
      timeline.zoom(Math.max(8, Math.abs(before - other)) / Math.max(8, Math.abs(now - other)), timeAt(plane, other - left));
      timeline.plane = { ...plane, ...timeline.view }; // for moves before the next drawing
    },
  });
  rows.addEventListener("pointermove", (event) => {
    if (!event.buttons && event.pointerType === "mouse") showTip(timeline, placeIn(timeline, event));
  });
  rows.addEventListener("pointerleave", () => { timeline.tip.hidden = true; });
  rows.addEventListener("dblclick", () => timeline.showWhole());
}

// The text of what is under the mouse, beside it and inside the plot.
function showTip(timeline, { x, y }) {
  const lines = timeline.plane ? timeline.linesAt(x, y) : null;
  timeline.tip.hidden = !lines;
  if (!lines) return;
  const [first, ...others] = lines;
  timeline.tip.replaceChildren(element("b", "", first), ...others.map((line) => element("span", "", line)));
  const width = timeline.rows.clientWidth;
  const top = timeline.rows.offsetTop + timeline.plane.offset + y;
  const left = x + 14 + timeline.tip.offsetWidth > width ? Math.max(0, x - 14 - timeline.tip.offsetWidth) : x + 14;
  const seen = timeline.rows.getBoundingClientRect().top - timeline.rows.offsetTop;
  const isLow = seen + top + 18 + timeline.tip.offsetHeight > innerHeight;
  Object.assign(timeline.tip.style, { left: `${left}px`, top: `${isLow ? top - 14 - timeline.tip.offsetHeight : top + 18}px` });
}

const STEP = 0.15; // of the view, per key
const FACTOR = 0.75;

// The keys that move and zoom the view, over the rows and over the small overview.
function keysOfView(timeline) {
  const by = (share) => timeline.pan(share * (timeline.view.end - timeline.view.start));
  return {
    ArrowLeft: () => by(-STEP), ArrowRight: () => by(STEP),
    ArrowUp: () => timeline.zoom(FACTOR), ArrowDown: () => timeline.zoom(1 / FACTOR),
    Home: () => timeline.pan(timeline.first - timeline.last), End: () => timeline.pan(timeline.last - timeline.first),
  };
}

function steerByKeys(timeline) {
  const choose = (span) => span && timeline.choose(span, { isShown: true });
  const laneOf = ({ kind, n }) => ({ row: rowOf(timeline.kinds[kind], n).row, lane: timeline.kinds[kind].lane });
  const nearest = (lane, time) => {
    const away = ({ kind, n }) => awayFrom(time, timeline.kinds[kind], n);
    return timeline.marksOf(lane).reduce((best, span) => (away(span) < away(best) ? span : best));
  };
  const beside = (by) => {
    const { kind, n } = timeline.chosen;
    const marks = timeline.marksOf(laneOf(timeline.chosen));
    choose(marks[marks.findIndex((span) => span.kind === kind && span.n === n) + by]);
  };
  const cross = (by) => {
    const { begin, width } = timeline.kinds[timeline.chosen.kind];
    const own = laneOf(timeline.chosen);
    const lanes = lanesOf(timeline.kinds, timeline.isVisible);
    const next = lanes[lanes.findIndex(({ row, lane }) => row === own.row && lane === own.lane) + by];
    if (next) choose(nearest(next, begin[timeline.chosen.n] + width[timeline.chosen.n] / 2));
  };
  const enter = () => {
    const [first] = timeline.kinds ? lanesOf(timeline.kinds, timeline.isVisible) : [];
    if (first && !timeline.chosen) choose(nearest(first, timeline.view.start));
  };
  const edge = (at) => choose(timeline.marksOf(laneOf(timeline.chosen)).at(at));
  const measureIt = () => {
    if (!timeline.chosen) return timeline.measure({ ...timeline.view });
    const { kind, n } = timeline.chosen;
    const { begin, width } = timeline.kinds[kind];
    return timeline.measure({ start: begin[n], end: begin[n] + width[n] });
  };
  const keysOfSpan = {
    ArrowLeft: () => beside(-1), ArrowRight: () => beside(1), ArrowUp: () => cross(-1), ArrowDown: () => cross(1),
    Home: () => edge(0), End: () => edge(-1),
  };
  const view = keysOfView(timeline);
  const keys = {
    ...view, w: view.ArrowUp, s: view.ArrowDown, a: view.ArrowLeft, d: view.ArrowRight, "+": view.ArrowUp, "-": view.ArrowDown,
    Enter: enter, " ": enter,
    Escape: () => { timeline.choose(null); timeline.measure(null); },
    f: () => timeline.chosen && timeline.reveal(timeline.chosen, true),
    m: measureIt,
    0: () => timeline.showWhole(),
    "/": () => timeline.search.focus(),
  };
  timeline.rows.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const act = (timeline.chosen && keysOfSpan[key]) ?? keys[key];
    if (!act) return;
    event.preventDefault();
    timeline.tip.hidden = true;
    act();
    if (!timeline.chosen) timeline.say(timeline.viewText);
  });
}

// The small overview: its window is dragged; a drag beside it chooses a new one, a click moves it there.
function steerByMap(timeline) {
  const { map, pane } = timeline;
  const timeOf = (event) => {
    const box = map.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    return timeline.first + Math.min(1, Math.max(0, share)) * (timeline.last - timeline.first);
  };
  followPointer(map, {
    begin: (event) => ({ from: timeOf(event), view: timeline.view, isPane: event.target === pane && !timeline.isWhole }),
    move(event, { from, view, isPane }) {
      const time = timeOf(event);
      if (isPane) timeline.show(view.start + time - from, view.end + time - from);
      else if (time !== from) timeline.show(Math.min(time, from), Math.max(time, from));
    },
    end({ from, isPane }, isClick) {
      if (!isClick || isPane || timeline.isWhole) return;
      const half = (timeline.view.end - timeline.view.start) / 2;
      timeline.show(from - half, from + half);
    },
  });
  const keys = keysOfView(timeline);
  pane.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
}
