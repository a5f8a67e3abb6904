// What the scripts of tests call on a page.
const pause = (ms = 20) => new Promise((done) => setTimeout(done, ms));
const until = async (check) => {
  for (let n = 0; n < 250 && !check(); n++) await pause();
  return check();
};
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const texts = (selector, within) => all(selector, within).map((node) => node.textContent);
const seen = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
// Charts and timelines are drawn when they come near the screen.
const isDrawn = (div) => div?.querySelector(".main-svg, .tl-axis") != null;
const show = async (div) => { div.scrollIntoView(); await until(() => isDrawn(div)); };
const drawAll = async () => {
  for (const div of all(".chart")) if (div.checkVisibility()) await show(div);
  scrollTo(0, 0);
};
// Boxes of all texts, a little lower than their lines are high.
const textBoxes = () => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const boxes = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || /^(SCRIPT|STYLE)$/.test(parent.tagName) || !seen(parent)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const edge = parent.closest("pre, .tl-title")?.getBoundingClientRect().right ?? Infinity;  // it scrolls, or is cut
    for (const { left, right: end, top, bottom } of range.getClientRects()) {
      const [less, right] = [Math.min(4, (bottom - top) / 4), Math.min(end, edge)];
      if (right - left > 1 && bottom - top > 4) {
        const text = node.data.trim();
        const [upper, lower] = [top + less, bottom - less];
        boxes.push({ left: left + 1, right: right - 1, top: upper, bottom: lower, text, node });
      }
    }
  }
  return boxes;
};
const overlaps = () => {
  const boxes = textBoxes().sort((a, b) => a.top - b.top);
  const pairs = [];
  boxes.forEach((box, n) => {
    for (let m = n + 1; m < boxes.length && boxes[m].top < box.bottom; m++) {
      const [a, b] = [box, boxes[m]];
      const meet = b.left < a.right && a.left < b.right;
      if (meet && a.node !== b.node) pairs.push(`${a.text} | ${b.text}`);
    }
  });
  return [boxes.length, pairs];
};
