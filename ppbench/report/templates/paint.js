// Draws timelines on canvases. A canvas shows as many bars as fit on the screen without an element for any.
// A `plane` says where things lie: { left, width, start, end, top, rowPx, height, offset }, where `offset` is how
// far down the canvas begins.

const xAt = (plane, time) => plane.left + ((time - plane.start) / (plane.end - plane.start)) * plane.width;
const yAt = (plane, row) => (row - plane.top) * plane.rowPx - plane.offset;
const timeAt = (plane, x) => plane.start + ((x - plane.left) / plane.width) * (plane.end - plane.start);
const rowAtY = (plane, y) => (y + plane.offset) / plane.rowPx + plane.top;

// Makes a canvas as sharp as the screen, and clears it.
function cleared(canvas, width, height, scale = Math.min(globalThis.devicePixelRatio || 1, 3)) {
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) Object.assign(canvas, { width: across, height: down });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const areaOf = ({ left, width, height }) => ({ x: left, y: 0, width, height });

// Paints what `paint` does, as far as it lies in a box.
function clipped(context, { x, y, width, height }, paint) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  paint();
  context.restore();
}

// Round times between two others, at most so many.
function ticksOf(start, end, most) {
  const rough = (end - start) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.ceil(start / step - 1e-9);
  const count = Math.max(0, Math.floor(end / step + 1e-9) - first + 1);
  return { step, times: Array.from({ length: count }, (_, n) => (first + n) * step) };
}

const digitsFor = (resolution) => Math.min(6, Math.max(0, Math.ceil(-Math.log10(resolution) - 1e-9)));
const timeText = (time, resolution, unit) => `${(time || 0).toLocaleString("en-US", {
  minimumFractionDigits: digitsFor(resolution), maximumFractionDigits: digitsFor(resolution),
})}${unit}`;

const TICK_PX = 110;

// A label on the axis, on the middle of a range; returns its ends.
function paintLabel(context, plane, range, text, style, height) {
  const ends = endsOf(plane, range);
  if (!ends) return [0, 0];
  const half = context.measureText(text).width / 2 + 6;
  const middle = Math.min(Math.max((ends[0] + ends[1]) / 2, plane.left + half), plane.left + plane.width - half);
  context.fillStyle = style.link;
  context.fillRect(middle - half, 2, 2 * half, height - 4);
  context.fillStyle = style.paper;
  context.textAlign = "center";
  context.fillText(text, middle, height / 2);
  return [middle - half, middle + half];
}

// The times, except where the label of the measured range stands.
function paintAxis(canvas, plane, style, unit, range) {
  const height = 24;
  const context = cleared(canvas, plane.left + plane.width, height);
  const { step, times } = ticksOf(plane.start, plane.end, plane.width / TICK_PX);
  context.font = style.font(12);
  context.textBaseline = "middle";
  const [labelFrom, labelTo] = range ? paintLabel(context, plane, range, `${written(range.end - range.start, 3)}${unit}`, style, height) : [0, 0];
  const texts = [];
  let free = plane.left - 20;
  for (const time of times) {
    const text = timeText(time, step, unit);
    const half = context.measureText(text).width / 2;
    const x = Math.min(Math.max(xAt(plane, time), plane.left + half - 20), plane.left + plane.width - half);
    context.fillStyle = style.line;
    context.fillRect(xAt(plane, time), height - 5, 1, 5);
    if (x - half < free || (x - half < labelTo + 4 && x + half > labelFrom - 4)) continue;
    context.fillStyle = style.quiet;
    context.textAlign = "center";
    context.fillText(text, x, height / 2 - 2);
    texts.push(text);
    free = x + half + 12;
  }
  context.fillStyle = style.line;
  context.fillRect(plane.left, height - 1, plane.width, 1);
  return texts;
}

const TRACK = "rgba(128,128,128,0.09)";
const LEAST_LABELLED_PX = 72; // height from which a row has labels `send` and `recv`

function paintRows(context, plane, timeline, style) {
  const { times } = ticksOf(plane.start, plane.end, plane.width / TICK_PX);
  context.fillStyle = style.line;
  for (const time of times) context.fillRect(Math.round(xAt(plane, time)), 0, 1, plane.height);
  context.textBaseline = "middle";
  context.textAlign = "right";
  const { compute, ...thin } = timeline.lanes;
  for (const { firstRow, ranks, rowName = "rank" } of timeline.steps) {
    for (let rank = 0; rank < ranks; rank++) {
      const y = yAt(plane, firstRow + rank);
      if (y < -plane.rowPx || y > plane.height + plane.rowPx) continue;
      context.font = style.font(Math.min(12, plane.rowPx * 0.8));
      context.fillStyle = style.quiet;
      if (plane.rowPx >= 11 || rank % Math.ceil(11 / plane.rowPx) === 0) {
        context.fillText(`${rowName} ${rank}`, plane.left - 6, y + compute.at * plane.rowPx);
      }
      for (const [name, { at, height }] of Object.entries(thin)) {
        context.fillStyle = TRACK;
        context.fillRect(plane.left, y + (at - height / 2) * plane.rowPx, plane.width, height * plane.rowPx);
        if (plane.rowPx < LEAST_LABELLED_PX) continue;
        context.font = style.font(10);
        context.fillStyle = style.quiet;
        context.fillText(name, plane.left - 6, y + at * plane.rowPx);
      }
    }
  }
}

// Where each rank begins (0) or ends (1) a step in a row: a line from rank to rank, and up to the names.
function edgeOf(plane, step, at) {
  const { firstRow, windows } = step;
  const points = windows.flatMap((window, rank) => (
    [-0.5, 0.5].map((by) => [xAt(plane, window[at]), yAt(plane, firstRow + rank + by)])));
  return [[points[0][0], points[0][1] - roomAbove(plane, step)], ...points];
}

// The room above the rows of a step in a row, for names; less where rows were made flatter.
const roomAbove = ({ rowPx }, { abovePx = 0, aboveRows = 0 }) => Math.min(abovePx, aboveRows * rowPx);

function traced(context, points) {
  context.beginPath();
  points.forEach(([x, y]) => context.lineTo(x, y));
}

function paintWindows(context, plane, step, style) {
  clipped(context, areaOf(plane), () => {
    context.fillStyle = style.link;
    context.globalAlpha = 0.09;
    traced(context, [...edgeOf(plane, step, 0), ...edgeOf(plane, step, 1).reverse()]);
    context.fill();
  });
}

// Lines where each rank begins and ends the step, and the names of it and of those beside it.
function paintRowOf(context, plane, step, style) {
  const room = roomAbove(plane, step);
  clipped(context, areaOf(plane), () => {
    context.strokeStyle = style.link;
    context.lineWidth = 1.5;
    for (const at of [0, 1]) {
      traced(context, edgeOf(plane, step, at));
      context.stroke();
    }
    if (room < 9) return;
    context.textBaseline = "middle";
    context.textAlign = "center";
    const y = yAt(plane, step.firstRow - 0.5) - room / 2;
    for (const [name, begin, end, isOwn] of step.names) {
      context.font = `${isOwn ? "600 " : ""}${style.font(Math.min(12, room))}`;
      context.fillStyle = isOwn ? style.ink : style.quiet;
      const ends = endsOf(plane, { start: begin, end });
      const fitting = ends && [name, name.split(" · ")[0]].find((text) => context.measureText(text).width + 8 < ends[1] - ends[0]);
      if (fitting) context.fillText(fitting, (ends[0] + ends[1]) / 2, y);
    }
  });
}

const channelsOf = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
const FAINTEST = 0.08;
const MIXED = "#5B6472"; // as in display/colors.py

// The cells of an overview as a picture with a pixel for each; a cell is fainter the more its rank idles.
function pictureOf({ busy, mostly, slices }, kinds, isVisible) {
  const ranks = busy.length / slices;
  const picture = Object.assign(document.createElement("canvas"), { width: slices, height: ranks });
  const context = picture.getContext("2d");
  const image = context.createImageData(slices, ranks);
  const colors = [...kinds.map((kind) => (isVisible(kind) ? channelsOf(kind.colors[0]) : null)), channelsOf(MIXED), channelsOf(MIXED)];
  const opacities = kinds.map(({ opacity }) => opacity);
  opacities.push(1, Math.min(...opacities));
  for (let cell = 0; cell < busy.length; cell++) {
    const color = colors[mostly[cell]];
    if (busy[cell] > 0 && color) image.data.set([...color, 255 * opacities[mostly[cell]] * (FAINTEST + (1 - FAINTEST) * busy[cell])], 4 * cell);
  }
  context.putImageData(image, 0, 0);
  return picture;
}

// Draws an overview of a step; of ranks that are thinner than a pixel, one for each pixel.
function paintOverview(context, plane, step, overview, kinds, height, isVisible = () => true) {
  const picture = pictureOf(overview, kinds, isVisible);
  const from = xAt(plane, overview.start);
  const width = xAt(plane, overview.end) - from;
  const every = Math.max(1, Math.floor(1 / plane.rowPx));
  clipped(context, areaOf(plane), () => {
    context.imageSmoothingEnabled = false;
    for (let rank = 0; rank < step.ranks; rank += every) {
      const y = yAt(plane, step.firstRow + rank + height.at) - (height.size * plane.rowPx) / 2;
      if (y > plane.height || y < -plane.rowPx) continue;
      context.drawImage(picture, 0, rank, overview.slices, 1, from, y, width, Math.max(1, height.size * plane.rowPx));
    }
  });
}

// A bar's box on the canvas, cut off at the edges of the plot; a transfer is at least a pixel wide.
function boxOf(plane, kind, n, y) {
  const right = plane.left + plane.width;
  const from = Math.max(plane.left, xAt(plane, kind.begin[n]));
  const least = kind.isIdle ? 0 : 1;
  const to = Math.min(right, Math.max(xAt(plane, kind.begin[n] + kind.width[n]), from + least));
  const height = kind.height * plane.rowPx;
  return { x: from, y: yAt(plane, y) - height / 2, width: Math.max(0, to - from), height };
}

const GAP_PX = 4; // between bars that are wide enough, there is a thin line

function paintBars(context, plane, kind, places, style) {
  const texts = [];
  context.textBaseline = "middle";
  for (let at = 0; at < places.length; at += 2) {
    const n = places[at];
    const box = boxOf(plane, kind, n, places[at + 1]);
    if (box.width <= 0 || box.y > plane.height || box.y + box.height < 0) continue;
    const line = !kind.isIdle && kind.isCompute && box.width > GAP_PX ? 0.6 : 0;
    context.globalAlpha = kind.opacity;
    context.fillStyle = kind.color(n);
    context.fillRect(box.x, box.y, box.width - line, box.height);
    context.globalAlpha = 1;
    if (kind.hatch) paintHatch(context, box, kind);
    const text = kind.label?.(n);
    if (!text || box.height < 9) continue;
    context.font = style.font(Math.min(12, Math.max(9, box.height - 2)));
    const width = context.measureText(text).width;
    if (width + 4 > box.width) continue;
    context.fillStyle = kind.beside ? style.quiet : kind.ink(n);
    context.textAlign = kind.hatch ? "left" : "center";
    context.fillText(text, kind.hatch ? box.x + 4 : box.x + box.width / 2, box.y + box.height / 2 + 0.5);
    texts.push(text);
  }
  return texts;
}

const HATCH_PX = 9;

// Lines over a bar, in one of the directions of plotly's patterns `/`, `\` and `x`.
function paintHatch(context, box, { hatch, hatchColor }) {
  const { x, y, width, height } = box;
  clipped(context, box, () => {
    context.strokeStyle = hatchColor;
    context.lineWidth = 1.4;
    context.beginPath();
    for (const direction of { "/": [1], "\\": [-1], x: [1, -1] }[hatch]) {
      for (let at = x - height; at < x + width + height; at += HATCH_PX) {
        context.moveTo(at, direction > 0 ? y + height : y);
        context.lineTo(at + height, direction > 0 ? y : y + height);
      }
    }
    context.stroke();
  });
}

// The critical path: points of time and row from bar to bar, with gaps between the steps.
function paintPath(context, plane, points, style) {
  clipped(context, areaOf(plane), () => {
    context.strokeStyle = style.ink;
    context.lineWidth = 2;
    context.beginPath();
    points.forEach((point, n) => {
      if (point) context[points[n - 1] ? "lineTo" : "moveTo"](xAt(plane, point[0]), yAt(plane, point[1]));
    });
    context.stroke();
  });
}

function paintFrame(context, box, color, width = 2) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.strokeRect(box.x - 1, box.y - 1, Math.max(2, box.width) + 2, box.height + 2);
}

// An arrow from where a message is sent to where it arrives, with a border so that it stands out.
function paintArrow(context, from, to, style) {
  const middle = (from.x + to.x) / 2;
  const angle = Math.atan2(to.y - from.y, Math.max(6, to.x - from.x));
  for (const [color, width] of [[style.paper, 5], [style.link, 2]]) {
    context.strokeStyle = color;
    context.fillStyle = color;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.bezierCurveTo(middle, from.y, middle, to.y, to.x, to.y);
    context.stroke();
    context.beginPath();
    context.moveTo(to.x, to.y);
    for (const side of [0.45, -0.45]) {
      context.lineTo(to.x - 10 * Math.cos(angle + side), to.y - 10 * Math.sin(angle + side));
    }
    context.closePath();
    context.fill();
  }
}

// Whether a range of time is in view; its ends on the canvas, cut off at the edges.
function endsOf(plane, { start, end }) {
  if (end < plane.start || start > plane.end) return null;
  const clamp = (x) => Math.min(plane.left + plane.width, Math.max(plane.left, x));
  return [clamp(xAt(plane, start)), clamp(xAt(plane, end))];
}

function paintRange(context, plane, range, style) {
  const ends = endsOf(plane, range);
  if (!ends) return;
  const [from, to] = ends;
  context.fillStyle = style.link;
  context.globalAlpha = 0.14;
  context.fillRect(from, 0, to - from, plane.height);
  context.globalAlpha = 1;
  context.fillRect(from, 0, 1, plane.height);
  context.fillRect(to - 1, 0, 1, plane.height);
}
