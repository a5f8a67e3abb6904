// The page of a history: a click on a commit or a change opens a panel of details; the list of series
// can be searched and filtered.

(() => {
  const panelOf = (section) => section.querySelector(":scope > .panel");

  function fillPairs(list, pairs, wrap) {
    list.replaceChildren(...pairs.map(([name, text]) => {
      const item = element("div");
      const content = element("dd");
      content.append(wrap(text));
      item.append(element("dt", "", name), content);
      return item;
    }));
    list.hidden = pairs.length === 0;
  }

  function copyable(text) {
    const block = element("div", "copyable");
    block.append(element("pre", "", text), element("button", "copy", "Copy", { type: "button" }));
    return block;
  }

  // Commits are numbered along the axis; a change has a name instead and no neighbours.
  function neighbour(button, key, panels, by) {
    const next = String(Number(key) + by);
    button.hidden = Number.isNaN(Number(key));
    button.disabled = !(next in panels);
    button.dataset.opens = next;
  }

  function fill(panel, content, key, panels) {
    panel.replaceChildren(document.getElementById("panel").content.cloneNode(true));
    const find = (selector) => panel.querySelector(selector);
    panel.setAttribute("aria-label", content.title);
    find("h3").textContent = content.title;
    find(".subject").textContent = content.subject;
    find(".sentences").replaceChildren(...content.sentences.map((text) => element("p", "", text)));
    fillPairs(find(".facts"), content.facts, (text) => document.createTextNode(text));
    fillPairs(find(".commands"), content.commands, copyable);
    find(".drawn").replaceChildren();
    if (content.figure) {
      find(".drawn").append(element("div", "chart", "", {
        role: "figure", "aria-label": `Timelines, ${content.title}`, "data-timeline": content.figure, style: `min-height: ${content.height}px`,
      }));
    }
    neighbour(find(".older"), key, panels, -1);
    neighbour(find(".newer"), key, panels, 1);
  }

  // A line through the chart marks the open commit.
  function mark(section, key) {
    const div = section.querySelector(":scope > .chart .plot");
    if (!div?.layout) return;
    const shapes = (div.layout.shapes ?? []).filter(({ name }) => name !== "open");
    const trace = div.data.find(({ customdata }) => [...(customdata ?? [])].some((id) => String(id) === key));
    if (trace) {
      const x = trace.x[[...trace.customdata].findIndex((id) => String(id) === key)];
      const color = getComputedStyle(document.documentElement).getPropertyValue("--quiet").trim();
      shapes.push({ name: "open", type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color, width: 1 }, layer: "below" });
    }
    Plotly.relayout(div, { shapes });
  }

  function clear(panel) {
    panel.replaceChildren();
  }

  const texts = new Map(); // section -> its panels
  function open(section, key) {
    const panel = panelOf(section);
    if (!texts.has(section)) texts.set(section, JSON.parse(section.querySelector("script.panels").textContent));
    const panels = texts.get(section);
    clear(panel);
    fill(panel, panels[key], key, panels);
    panel.hidden = false;
    panel.dataset.key = key;
    mark(section, key);
    figures.watch(panel);
  }

  function close(section) {
    const panel = panelOf(section);
    const { key } = panel.dataset;
    clear(panel);
    panel.hidden = true;
    mark(section, null);
    const opener = section.querySelector(`.openers [data-opens="${key}"]`) ?? section.querySelector(".openers button");
    opener?.focus();
  }

  document.addEventListener("click", ({ target }) => {
    const section = target.closest(".series");
    const button = target.closest("button");
    if (!section || !button) return;
    if (button.matches(".close")) close(section);
    if (!("opens" in button.dataset)) return;
    const role = button.matches(".older") ? ".older" : button.matches(".newer") ? ".newer" : null;
    open(section, button.dataset.opens);
    const panel = panelOf(section);
    const again = role && panel.querySelector(`${role}:not(:disabled)`);
    (again || panel).focus({ preventScroll: Boolean(role) });
  });

  document.addEventListener("keydown", ({ key, target }) => {
    const panel = target.closest?.(".panel");
    if (key === "Escape" && panel) close(panel.closest(".series"));
  });

  document.addEventListener("drawn", ({ target }) => {
    const section = target.parentElement;
    if (!section.matches(".series")) return;
    if (!panelOf(section).hidden) mark(section, panelOf(section).dataset.key);
    const plot = target.querySelector(".plot");
    if ("listens" in plot.dataset) return;
    plot.dataset.listens = "";
    plot.on("plotly_click", ({ points: [point] }) => {
      if (point.customdata === undefined) return;
      open(section, String(point.customdata));
      panelOf(section).scrollIntoView({ block: "nearest" });
    });
  });

  const finder = document.getElementById("find");
  const boxes = [...document.querySelectorAll("#list input[type=checkbox]")];
  const rows = [...document.querySelectorAll("#list tbody tr")];

  function filter() {
    const states = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    if (finder) tables.search(document.querySelector("#list table"), finder.value);
    for (const row of rows) {
      row.classList.toggle("unselected", states.size > 0 && !states.has(row.dataset.state));
      const isOut = row.matches(".unselected, .unmatched");
      document.getElementById(row.dataset.series).classList.toggle("unselected", isOut);
    }
    const num = rows.filter((row) => !row.matches(".unselected, .unmatched")).length;
    document.getElementById("num-series").textContent = num === rows.length ? "" : `${num} of ${rows.length} series`;
    document.getElementById("nothing").hidden = num > 0 || rows.length === 0;
  }

  finder?.addEventListener("input", filter);
  boxes.forEach((box) => box.addEventListener("change", filter));
  document.querySelector("#nothing button").addEventListener("click", () => {
    if (finder) finder.value = "";
    boxes.forEach((box) => { box.checked = false; });
    filter();
  });
})();
