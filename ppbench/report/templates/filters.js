// Filters over the grid's axes: the chosen values apply to every chart, table and list of the page. The
// address keeps them (#schedule=1f1b&world_size=2), so a link or a reload shows the same.

(() => {
  const block = document.getElementById("cases");
  if (!block) return;
  const cases = JSON.parse(block.textContent);
  const axes = Object.keys(cases[0]?.axes ?? {});
  const boxes = [...document.querySelectorAll("#filters input[type=checkbox]")];
  const finder = document.getElementById("find");
  const chosen = new Map(axes.map((axis) => [axis, new Set()])); // an empty set selects everything

  const passes = ({ axes: values }, except) => axes.every((axis) => (
    axis === except || chosen.get(axis).size === 0 || chosen.get(axis).has(values[axis])
  ));
  const chosenTexts = (axis) => boxes.filter((box) => box.dataset.axis === axis && chosen.get(axis).has(box.value))
    .map((box) => box.value);
  const isFiltered = () => [...chosen.values()].some((values) => values.size > 0);

  function read() {
    const params = new URLSearchParams(location.hash.slice(1));
    for (const axis of axes) {
      const known = new Set(cases.map((item) => item.axes[axis]));
      chosen.set(axis, new Set(params.getAll(axis).filter((value) => known.has(value))));
    }
    finder.value = params.get("find") ?? "";
  }

  function write() {
    const params = new URLSearchParams();
    axes.forEach((axis) => chosenTexts(axis).forEach((value) => params.append(axis, value)));
    if (finder.value.trim()) params.set("find", finder.value.trim());
    const bare = location.href.split("#")[0];
    history.replaceState(null, "", params.size ? `${bare}#${params}` : bare);
  }

  // A value's count is the number of cases that choosing it would leave, other axes unchanged.
  function showChoices() {
    for (const box of boxes) {
      const { axis } = box.dataset;
      const count = cases.filter((item) => passes(item, axis) && item.axes[axis] === box.value).length;
      const label = box.closest("label");
      box.checked = chosen.get(axis).has(box.value);
      label.querySelector(".count").textContent = count;
      label.classList.toggle("none", count === 0);
    }
    for (const button of document.querySelectorAll("#filters button.all")) {
      button.setAttribute("aria-pressed", String(chosen.get(button.dataset.axis).size === 0));
    }
    for (const shown of document.querySelectorAll("#filters .chosen")) {
      const values = chosenTexts(shown.dataset.axis);
      shown.textContent = values.length ? values.join(", ") : shown.dataset.all;
    }
  }

  function showSentence(selected) {
    const heading = (axis) => document.querySelector(`[data-heading="${CSS.escape(axis)}"]`).textContent;
    const parts = axes.filter((axis) => chosen.get(axis).size)
      .map((axis) => `${heading(axis)} ${chosenTexts(axis).join(" or ")}`);
    const many = cases.length === 1 ? "case" : "cases";
    document.getElementById("shown").textContent = selected
      ? `${selected.size} of ${cases.length} ${many} · ${parts.join(" · ")}` : `all ${cases.length} ${many}`;
    document.getElementById("clear").hidden = !selected;
    document.getElementById("nothing").hidden = !(selected && selected.size === 0);
    document.getElementById("hidden-answer").hidden = !selected || selected.size === 0;
    document.body.classList.toggle("nothing-selected", selected?.size === 0);
    document.body.classList.toggle("filtered", selected !== null);
  }

  function showEntries(selected) {
    const isOut = (id) => selected !== null && !selected.has(id);
    for (const entry of document.querySelectorAll("[data-cases]")) {
      entry.classList.toggle("unselected", entry.dataset.cases.split(" ").every(isOut));
    }
    for (const holder of document.querySelectorAll(".holder")) {
      holder.classList.toggle("unselected", !holder.querySelector("[data-cases]:not(.unselected)"));
    }
    // A caution is counted where its cases are listed, and beside each chart that it concerns.
    const counts = new Map([...document.querySelectorAll(".caution")].map((caution) => (
      [caution.dataset.caution, caution.querySelectorAll("li:not(.unselected)").length])));
    for (const entry of document.querySelectorAll("[data-caution]")) {
      const count = counts.get(entry.dataset.caution);
      entry.querySelector(".carriers").textContent = count;
      entry.querySelector(".total").textContent = selected ? selected.size : cases.length;
      entry.classList.toggle("unselected", count === 0);
    }
    for (const link of document.querySelectorAll("#contents a")) {
      link.parentNode.hidden = !document.querySelector(link.hash)?.checkVisibility();
    }
    // The name of a chart says what it shows of all cases; of some, it says how many they are.
    for (const [div, name] of names) {
      const heading = div.closest("section").querySelector("h2").textContent;
      div.setAttribute("aria-label", selected ? `${heading}, ${selected.size} of ${cases.length} cases` : name);
    }
  }

  const names = new Map([...document.querySelectorAll("section.figure > .chart")].map((div) => (
    [div, div.getAttribute("aria-label")])));

  function apply() {
    const selected = isFiltered() ? new Set(cases.filter((item) => passes(item)).map((item) => item.case_id)) : null;
    showChoices();
    showSentence(selected);
    showEntries(selected);
    tables.count();
    figures.select(selected);
  }

  // The answer comes and goes above the filters: what is being read stays where it is on the screen. The
  // browser's own anchor may be far below, among what comes and goes.
  const bar = document.getElementById("filters");
  const place = (node) => node.getBoundingClientRect();
  function applyInPlace() {
    const { style } = document.documentElement;
    style.overflowAnchor = "none";
    // What is in sight is the bar itself, unless it is stuck to the top, or else the section below it.
    const isNothing = document.body.classList.contains("nothing-selected");
    const isSeen = (node) => node.checkVisibility() && place(node).bottom > place(bar).bottom;
    const sections = isNothing ? [] : [...document.querySelectorAll("#filters ~ section")];
    const kept = place(bar).top > 0 ? bar : sections.find(isSeen);
    const before = kept && place(kept).top;
    apply();
    if (kept?.checkVisibility()) scrollBy(0, place(kept).top - before);
    else document.getElementById("above-filters").scrollIntoView();
    requestAnimationFrame(() => requestAnimationFrame(() => { style.overflowAnchor = ""; }));
  }

  for (const box of boxes) {
    box.addEventListener("change", () => {
      chosen.get(box.dataset.axis)[box.checked ? "add" : "delete"](box.value);
      write();
      applyInPlace();
    });
  }
  const clear = (names) => {
    names.forEach((axis) => chosen.get(axis).clear());
    write();
    applyInPlace();
  };
  document.querySelectorAll("#filters button.all").forEach((button) => {
    button.addEventListener("click", () => clear([button.dataset.axis]));
  });
  document.querySelectorAll("#clear, #nothing button, #hidden-answer button").forEach((button) => {
    button.addEventListener("click", () => clear(axes));
  });
  finder.addEventListener("input", write);
  const restore = () => { read(); tables.search(); apply(); };
  addEventListener("hashchange", restore);

  // A list of many values opens over the page, and closes on a click elsewhere or Escape.
  const lists = [...document.querySelectorAll("#filters details.many")];
  addEventListener("click", ({ target }) => {
    lists.filter((list) => !list.contains(target)).forEach((list) => { list.open = false; });
  });
  addEventListener("keydown", ({ key }) => {
    if (key === "Escape") lists.forEach((list) => { list.open = false; });
  });
  // On a phone an open bar would cover half the screen.
  if (innerWidth <= 640) document.querySelector("#filters > details").open = false;
  restore();
})();
