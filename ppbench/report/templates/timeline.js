// A timeline in a page: what is in view is drawn on canvases, from the columns that drawing.py packs. Steps with too
// many bars begin as an overview; their columns are read from the page once the overview is on the screen.

const element = (name, className = "", text = "", attributes = {}) => {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  return made;
};

const button = (text, label, title = label) => element("button", "", text, { type: "button", title, "aria-label": label });

const parsed = new Promise((done) => {
  if (document.readyState !== "loading") done();
  else document.addEventListener("DOMContentLoaded", done, { once: true });
});

// The kinds of a timeline; its columns may stand at the end of the page.
async function kindsOf(name, meta) {
  await parsed;
  return readColumns(meta, await unpackBytes(document.getElementById(`${name}-columns`)));
}

const unpacked = new Map(); // name of a timeline -> its meta and, if it has no overview, its kinds

// Unpacks ahead of time, since printing cannot wait.
async function prepareTimeline({ dataset: { timeline: name } }) {
  if (unpacked.has(name)) return;
  const meta = JSON.parse(await unpackText(document.getElementById(name)));
  unpacked.set(name, { meta, kinds: meta.cells ? null : await kindsOf(name, meta) });
}

// Draws a timeline into its div; it is unpacked the first time, asynchronously.
function drawTimeline(div) {
  if (div.timeline) return div.timeline.restyle();
  if (!unpacked.has(div.dataset.timeline)) return prepareTimeline(div).then(() => drawTimeline(div));
  const { meta, kinds } = unpacked.get(div.dataset.timeline);
  div.style.minHeight = "";
  div.timeline = new Timeline(div, meta, kinds);
  return div.dispatchEvent(new Event("drawn", { bubbles: true }));
}

const PATH = "critical path";
const OVERSCAN_PX = 600;
const MOST_PX = 16_000; // of a printed canvas
const OUTLINED_MATCHES = 3000;
const DEEPEST = 2e-7; // the narrowest view, as a share of the whole

class Timeline {
  constructor(div, meta, kinds) {
    const { steps, lanes, rowPx, first, last, path, unit, rows } = meta;
    Object.assign(this, { div, meta, steps, lanes, rowPx, first, last, path, unit });
    [this.top, this.bottom] = [-0.52, rows - 0.48];
    this.view = { start: first, end: last };
    this.hidden = new Set([PATH]);
    this.matches = [];
    this.match = -1;
    this.kinds = null;
    if (kinds) this.know(kinds);
    else this.isReady = this.read();
    build(this);
    steer(this);
    this.watch();
    this.restyle();
  }

  // Reads the columns once the overview is on the screen.
  async read() {
    const ahead = globalThis.requestIdleCallback ?? setTimeout;
    await new Promise((done) => { ahead(done, { timeout: 500 }); });
    this.know(await kindsOf(this.div.dataset.timeline, this.meta));
    this.refresh();
  }

  know(kinds) {
    this.allKinds = kinds;
    this.kinds = this.meta.replicas ? kindsInRows(kinds, rowsShown(this), this.steps[0].firstRow) : kinds;
  }

  timed(time) { return `${written(time, 3)}${this.unit}`; }

  refresh() {
    this.mapGrid = this.lane = null;
    if (this.search.value) this.find(this.search.value);
    this.draw();
  }

  // Redraws when the size changes, and when the page scrolls far enough that other rows come into sight.
  watch() {
    const ended = new AbortController();
    const whenConnected = (act) => () => (this.div.isConnected ? act() : ended.abort());
    new ResizeObserver(whenConnected(() => this.schedule())).observe(this.rows);
    const { signal } = ended;
    addEventListener("scroll", whenConnected(() => this.stick()), { capture: true, passive: true, signal });
    addEventListener("resize", whenConnected(() => this.schedule()), { signal });
  }

  // The height of what covers the top of the page while it scrolls.
  get topPx() {
    const filters = document.getElementById("filters");
    return filters && getComputedStyle(filters).position === "sticky" ? filters.offsetHeight : 0;
  }

  get isPrinting() { return document.documentElement.classList.contains("printing"); }
  get height() { return (this.bottom - this.top) * this.rowPx; }
  get gutter() { return this.lanes.collective ? 68 : this.rows.clientWidth < 480 ? 50 : 60; }
  isVisible = (kind) => !this.hidden.has(kind.group);

  // The colours of the page, for light, dark and paper.
  restyle() {
    const page = getComputedStyle(document.documentElement);
    const family = getComputedStyle(document.body).fontFamily;
    const colors = Object.fromEntries(["paper", "ink", "quiet", "line", "link"].map((name) => [name, page.getPropertyValue(`--${name}`).trim()]));
    this.style = { ...colors, font: (px) => `${px}px ${family}` };
    this.mapGrid = null;
    this.draw();
  }

  schedule() {
    this.pending ??= requestAnimationFrame(() => this.draw());
  }

  // Where the canvas lies in the rows: all of them, or what is near the screen if they are many.
  window() {
    const all = this.height;
    if (this.isPrinting) return { offset: 0, height: Math.min(all, MOST_PX) };
    const most = innerHeight + 2 * OVERSCAN_PX;
    if (all <= most) return { offset: 0, height: all };
    const hidden = -this.rows.getBoundingClientRect().top;
    return { offset: Math.min(Math.max(0, hidden - OVERSCAN_PX), all - most), height: most };
  }

  // Whether the drawn part of the rows still covers the screen; a table's frame keeps no axis in sight by itself.
  stick() {
    const box = this.rows.getBoundingClientRect();
    const [from, to] = [Math.max(0, -box.top), Math.min(box.height, innerHeight - box.top)];
    if (this.plane && to > from && (from < this.plane.offset || to > this.plane.offset + this.plane.height)) this.schedule();
    if (!this.isFramed) return;
    const covered = this.topPx - (box.top - this.head.offsetHeight);
    const by = (most) => `translateY(${Math.max(0, Math.min(covered, most))}px)`;
    this.head.style.transform = by(box.height - 60);
    const isBeside = this.side.offsetLeft > this.rows.offsetWidth / 2;
    this.side.style.transform = isBeside ? by(this.head.offsetHeight + box.height - this.side.offsetHeight) : "";
  }

  // Zooming by `factor` keeps the time at `anchor` where it is.
  zoom(factor, anchor = (this.view.start + this.view.end) / 2) {
    const whole = this.last - this.first;
    const width = Math.min(whole, Math.max(whole * DEEPEST, (this.view.end - this.view.start) * factor));
    const share = (anchor - this.view.start) / (this.view.end - this.view.start);
    this.show(anchor - share * width, anchor + (1 - share) * width);
  }

  pan(by) { this.show(this.view.start + by, this.view.end + by); }

  // Shows these times, moved so that they lie in the step.
  show(start, end) {
    const width = Math.min(this.last - this.first, end - start);
    const from = Math.min(Math.max(this.first, start), this.last - width);
    this.view = { start: from, end: from + width };
    this.schedule();
  }

  get viewText() {
    const resolution = (this.view.end - this.view.start) / 100;
    return `${timeText(this.view.start, resolution, "")} to ${timeText(this.view.end, resolution, this.unit)}`;
  }

  // The whole step; of one in a row, once more shows those beside it too.
  showWhole() {
    const windows = this.steps.flatMap(({ windows: own, end }) => own ?? [[0, end]]);
    const [start, end] = [Math.min(...windows.map(([from]) => from)), Math.max(...windows.map(([, to]) => to))];
    const isThere = Math.abs(this.view.start - start) + Math.abs(this.view.end - end) < 1e-6 * (end - start);
    if (isThere || !this.steps.some(({ windows: own }) => own)) this.show(this.first, this.last);
    else this.show(start, end);
  }

  get isWhole() { return this.view.end - this.view.start >= (this.last - this.first) * (1 - 1e-9); }

  setRowPx(rowPx) {
    this.rowPx = Math.min(160, Math.max(6, rowPx));
    this.placeTitles();
    this.schedule();
  }

  toggle(group, isShown = this.hidden.has(group)) {
    this.hidden[isShown ? "delete" : "add"](group);
    this.mapGrid = null;
    updateLayers(this);
    this.schedule();
  }

  draw() {
    cancelAnimationFrame(this.pending);
    this.pending = null;
    const width = this.rows.clientWidth;
    if (!width) return;
    this.placeTitles();
    const left = this.gutter;
    this.div.style.setProperty("--tl-left", `${left}px`);
    this.div.style.setProperty("--tl-top", `${this.topPx}px`);
    this.plane = { left, width: width - left, ...this.view, top: this.top, rowPx: this.rowPx, ...this.window() };
    const scale = this.isPrinting ? 2 : undefined;
    const context = cleared(this.canvas, width, this.plane.height, scale);
    this.canvas.style.top = `${this.plane.offset}px`;
    this.ticks = paintAxis(this.axis, this.plane, this.style, this.unit, this.range);
    paintRows(context, this.plane, this, this.style);
    const inRow = this.steps.filter(({ windows }) => windows);
    for (const step of inRow) paintWindows(context, this.plane, step, this.style);
    this.paintMarks(context);
    for (const step of inRow) paintRowOf(context, this.plane, step, this.style);
    this.paintOver(context);
    this.drawMap();
    this.div.dispatchEvent(new Event("painted"));
  }

  paintMarks(context) {
    const { plane } = this;
    const shown = this.kinds?.filter(this.isVisible) ?? [];
    const rows = { top: rowAtY(plane, -plane.rowPx), bottom: rowAtY(plane, plane.height + plane.rowPx) };
    const marks = this.kinds && marksInView(shown, { ...this.view, ...rows }, this.meta.mostBars);
    this.drawn = marks && new Map(shown.map((kind, n) => [kind, marks[n]]));
    this.texts = [];
    this.cells = null;
    if (marks) shown.forEach((kind, n) => this.texts.push(...paintBars(context, plane, kind, marks[n], this.style)));
    else {
      const { at, height } = this.lanes.compute;
      const isInSight = (row) => Math.abs(yAt(plane, row) - plane.height / 2) < plane.height / 2 + this.rowPx;
      this.cells = this.grids(this.view.start, this.view.end, this.meta.slices, isInSight);
      this.steps.forEach((step, n) => {
        const { kinds, overview } = this.cells[n];
        paintOverview(context, plane, step, overview, kinds, { at, size: height }, this.isVisible);
      });
    }
    const count = marks?.reduce((sum, places) => sum + places.length / 2, 0);
    this.noted.textContent = marks ? `${written(count, 0)} bars in view, drawn one by one.` : this.meta.note;
    this.noted.hidden = !this.meta.note;
    if (!this.hidden.has(PATH)) paintPath(context, plane, this.path, this.style);
  }

  // The overview of each step between two times; before the columns are read, that which the page brings along.
  grids(start, end, slices, isInSight) {
    return this.steps.map((step, n) => {
      if (this.kinds) {
        const kinds = this.kinds.filter((kind) => kind.isComputation && this.isVisible(kind));
        return { kinds, overview: overviewOf(kinds, step, start, end, slices, this.meta.mostShare, isInSight) };
      }
      const cells = this.meta.cells[n];
      return { kinds: cells.kinds.map((at) => this.meta.kinds[at]), overview: overviewOfCells(cells, step, this.meta.slices) };
    });
  }

  // What lies over the bars: matches, the range that is measured, messages and the frame of the chosen span.
  paintOver(context) {
    const { plane, style } = this;
    if (this.range) paintRange(context, plane, this.range, style);
    if (!this.kinds) return;
    const { start: from, end: until } = this.view;
    const matches = this.matches.filter(({ kind, n }) => {
      const { begin, width } = this.kinds[kind];
      return begin[n] < until && begin[n] + width[n] > from;
    });
    if (matches.length <= OUTLINED_MATCHES) {
      for (const span of matches) paintFrame(context, this.boxOfSpan(span), style.link, 1.5);
    }
    if (!this.chosen) return;
    for (const message of this.messages) {
      const [send, receive] = [this.boxOfSpan(message.from, false), this.boxOfSpan(message.to, false)];
      const start = { x: send.x, y: send.y + send.height / 2 };
      const end = { x: receive.x + receive.width, y: receive.y + receive.height / 2 };
      if (Math.max(start.x, end.x) < plane.left || Math.min(start.x, end.x) > plane.left + plane.width) continue;
      clipped(context, areaOf(plane), () => paintArrow(context, start, end, style));
    }
    const box = this.boxOfSpan(this.chosen);
    if (box.width > 0) {
      paintFrame(context, box, style.paper, 5);
      paintFrame(context, box, style.ink, 2);
    }
  }

  // The box of a span on the canvas; `isCut` where it would reach beyond the plot.
  boxOfSpan({ kind, n }, isCut = true) {
    const marks = this.kinds[kind];
    const { row } = rowOf(marks, n);
    const box = boxOf(this.plane, marks, n, row + marks.lane);
    if (isCut) return box;
    const x = xAt(this.plane, marks.begin[n]);
    return { ...box, x, width: xAt(this.plane, marks.begin[n] + marks.width[n]) - x };
  }

  // The span at a point of the canvas; of thin bars, one that is at most two pixels away.
  spanAt(x, y) {
    if (!this.kinds || x < this.plane.left) return null;
    const [time, at] = [timeAt(this.plane, x), rowAtY(this.plane, y)];
    const near = timeAt(this.plane, x + 2) - time;
    for (let number = this.kinds.length - 1; number >= 0; number--) {
      const kind = this.kinds[number];
      if (!this.isVisible(kind)) continue;
      const row = kind.rows.find((one) => Math.abs(one.row + kind.lane - at) <= kind.height / 2 + 1 / this.rowPx);
      if (!row) continue;
      let [best, least] = [null, Infinity];
      eachBetween(kind, row, time - near, time + near, (n) => {
        const far = awayFrom(time, kind, n);
        if (far < least) [best, least] = [n, far];
        return true;
      });
      if (best !== null) return { kind: number, n: best };
    }
    return null;
  }

  // The visible marks of a lane by time; the last lane that was asked for is kept.
  marksOf({ row, lane }) {
    const key = [row, lane, ...this.hidden].join();
    if (this.lane?.key !== key) this.lane = { key, marks: marksOfLane(this.kinds, this.isVisible, { row, lane }) };
    return this.lane.marks;
  }

  // What a pointer at a point of the canvas is told, as lines.
  linesAt(x, y) {
    const span = this.drawn || !this.cells ? this.spanAt(x, y) : null;
    if (span) return linesOf(this.kinds[span.kind], span.n);
    if (!this.cells || x < this.plane.left) return null;
    const at = rowAtY(this.plane, y) - this.lanes.compute.at;
    const n = this.steps.findIndex(({ firstRow, ranks }) => Math.round(at - firstRow) >= 0 && Math.round(at - firstRow) < ranks);
    if (n < 0) return null;
    const { kinds, overview } = this.cells[n];
    const time = timeAt(this.plane, x);
    const slice = Math.floor(((time - overview.start) / (overview.end - overview.start)) * overview.slices);
    const rank = Math.round(at - this.steps[n].firstRow);
    const cell = rank * overview.slices + slice;
    if (!(overview.busy[cell] > 0)) return null;
    const begins = overview.counts ? [`${written(overview.counts[cell], 0)} computations begin here`] : [];
    return [
      `${Math.round(overview.busy[cell] * 100)}% computing`,
      `mostly ${kinds[overview.mostly[cell]]?.name ?? "several"}`,
      `${this.steps[n].rowName ?? "rank"} ${rank}, around ${timeText(time, (overview.end - overview.start) / overview.slices, this.unit)}`,
      ...begins,
    ];
  }

  // Pins a span: its details stay beside the plot, and its messages are drawn.
  choose(span, { isShown = false } = {}) {
    this.chosen = span;
    this.messages = span ? messagesOf(this.kinds, this.steps, span) : [];
    if (span && isShown) this.reveal(span);
    fillSide(this);
    this.brief.textContent = span ? `${actionOf(this.kinds[span.kind], span.n)}, ${this.timed(this.kinds[span.kind].width[span.n])}: details below` : "";
    this.brief.hidden = !span;
    this.say(span ? linesOf(this.kinds[span.kind], span.n).join(", ") : "");
    this.schedule();
  }

  say(text) { this.live.textContent = text; }

  // Brings a span into view: the times around it if it is out of view or too thin to see, and its row.
  reveal(span, isClose = false) {
    const kind = this.kinds[span.kind];
    const [begin, width] = [kind.begin[span.n], kind.width[span.n]];
    const now = this.view.end - this.view.start;
    const isInView = begin >= this.view.start && begin + width <= this.view.end;
    const isThin = (width / now) * this.plane.width < 3;
    if (isClose || (isThin && !(this.drawn && isInView && kind.height < 0.2))) {
      const shown = Math.max(width * 14, (this.last - this.first) * DEEPEST);
      this.show(begin + width / 2 - shown / 2, begin + width / 2 + shown / 2);
    } else if (!isInView) {
      const middle = begin + width / 2;
      this.show(middle - now / 2, middle + now / 2);
    }
    const { row } = rowOf(kind, span.n);
    const y = this.rows.getBoundingClientRect().top + (row - this.top) * this.rowPx;
    const least = this.topPx + this.head.offsetHeight + this.rowPx;
    if (y < least) scrollBy(0, y - least);
    if (y > innerHeight - this.rowPx) scrollBy(0, y - innerHeight + this.rowPx);
  }

  find(query) {
    this.matches = this.kinds ? matchesOf(this.kinds, query) : [];
    this.match = -1;
    this.tellMatches(query);
    this.schedule();
  }

  tellMatches(query = this.search.value) {
    const total = `${written(this.matches.length, 0)}${this.matches.length < MOST_MATCHES ? "" : " or more"}`;
    const at = this.match < 0 ? "" : `${written(this.match + 1, 0)} of `;
    this.count.textContent = query.trim() ? (this.matches.length ? `${at}${total}` : "no match") : "";
    for (const step of [this.previous, this.next]) step.disabled = !this.matches.length;
  }

  // The next match, from the view if none was shown yet.
  go(by) {
    if (!this.matches.length) return;
    const count = this.matches.length;
    if (this.match < 0) {
      const first = this.matches.findIndex(({ kind, n }) => this.kinds[kind].begin[n] >= this.view.start);
      this.match = by > 0 ? Math.max(0, first) : count - 1;
    } else this.match = (this.match + by + count) % count;
    this.choose(this.matches[this.match], { isShown: true });
    this.tellMatches();
  }

  measure(range) {
    this.range = range && range.end > range.start ? range : null;
    fillSide(this);
    this.schedule();
  }

  placeTitles() {
    this.rows.style.height = `${this.height}px`;
    this.titles.forEach((title, n) => {
      const above = 22 + roomAbove(this, this.steps[n]);
      title.style.top = `${(this.steps[n].firstRow - 0.5 - this.top) * this.rowPx - above}px`;
    });
  }

  drawMap() {
    const [width, height] = [this.map.clientWidth, this.map.clientHeight];
    if (!width) return;
    const key = `${width} ${this.kinds !== null} ${this.isPrinting}`;
    if (!this.mapGrid || this.mapKey !== key) {
      this.mapGrid = this.grids(this.first, this.last, this.kinds ? Math.min(600, Math.max(60, Math.round(width / 2))) : this.meta.slices);
      this.mapKey = key;
      const plane = { left: 0, width, start: this.first, end: this.last, top: this.top, rowPx: height / (this.bottom - this.top), offset: 0, height };
      const context = cleared(this.mapCanvas, width, height);
      this.steps.forEach((step, n) => paintOverview(context, plane, step, this.mapGrid[n].overview, this.mapGrid[n].kinds, { at: -0.14, size: 0.9 }));
    }
    const part = (time) => ((time - this.first) / (this.last - this.first)) * 100;
    const [from, to] = [part(this.view.start), part(this.view.end)];
    Object.assign(this.pane.style, { left: `min(${from}%, 100% - 8px)`, width: `${to - from}%` });
    this.before.style.width = `${from}%`;
    this.after.style.left = `${to}%`;
    this.pane.setAttribute("aria-valuetext", this.viewText);
    this.pane.setAttribute("aria-valuenow", String(Math.round((from + to) / 2)));
  }
}
