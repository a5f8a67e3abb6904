// A chart: a small figure of plotly per panel, in a grid that the style sheet lays out, below one legend.

class Chart {
  static CONFIG = { displayModeBar: false };
  static GLYPHS = {
    circle: "●", "circle-open": "○", square: "■", diamond: "◆", "diamond-open": "◇", "triangle-up": "▲",
    cross: "✚", pentagon: "⬟", star: "★", hexagram: "✶", "x-thin-open": "✕", "/": "▨", x: "▩",
  };
  static FIXED_TEXTS = ".xtick text, .ytick text, .xtitle, .ytitle";

  constructor(div) {
    this.div = div;
    this.hidden = new Set();
    this.keys = element("div", "keys", "", { role: "group", "aria-label": "Legend" });
    this.grid = element("div", "grid");
    div.replaceChildren(this.keys, this.grid);
  }

  // Draws a chart, as parsed; returns whether anything of it is left.
  draw(chart, selected) {
    const traces = chart.panels.flatMap(({ data }) => data);
    const names = new Set(traces.filter((trace) => trace.showlegend).map(({ name }) => name));
    const panels = panelsOf(chart, selected);
    const isKey = ({ x }) => x?.length === 1 && x[0] === null;
    const drawn = panels.flatMap(({ data }) => data);
    const keys = [...names].map((name) => [...drawn, ...traces.filter(isKey)].find((trace) => trace.name === name));
    this.drawKeys(keys.filter(Boolean), new Set(drawn.filter((trace) => !isKey(trace)).map(({ name }) => name)));
    this.grid.style.setProperty("--least", `${chart.leastWidth}px`);
    while (this.grid.childElementCount > panels.length) {
      Plotly.purge(this.grid.lastChild.lastChild);
      this.grid.lastChild.remove();
    }
    while (this.grid.childElementCount < panels.length) {
      const part = element("div", "part");
      part.append(element("p"), element("div", "plot"));
      this.grid.append(part);
    }
    panels.forEach((panel, n) => this.drawPanel(panel, ...this.grid.children[n].children));
    return panels.length > 0;
  }

  drawPanel({ title, data, layout }, name, plot) {
    name.textContent = title;
    plot.style.height = `${layout.height}px`;
    const shown = data.filter((trace) => !this.hidden.has(trace.name));
    const isNew = !plot.layout;
    const own = { ...layout, template: this.template(), width: plot.clientWidth, showlegend: false, uirevision: true };
    Plotly.react(plot, shown, own, Chart.CONFIG);
    if (isNew) plot.on("plotly_afterplot", () => this.hideOverlapping(plot));
    this.hideOverlapping(plot);
  }

  // A click on a name hides what has it; some names only explain a symbol.
  drawKeys(traces, own) {
    this.keys.replaceChildren(...traces.map((trace) => {
      const { name, marker, line } = trace;
      const sign = element("i", "", this.glyph(trace), { "aria-hidden": true });
      sign.style.color = [marker?.color ?? line?.color].flat()[0];
      if (!own.has(name)) {
        const text = element("span");
        text.append(sign, plain(name));
        return text;
      }
      const key = element("button", "", "", { type: "button", "aria-pressed": !this.hidden.has(name) });
      key.append(sign, plain(name));
      key.addEventListener("click", () => {
        this.hidden[this.hidden.has(name) ? "delete" : "add"](name);
        this.div.dispatchEvent(new Event("redraw"));
        [...this.keys.children].find((other) => other.textContent === key.textContent)?.focus();
      });
      return key;
    }));
  }

  glyph({ type, mode, marker, line }) {
    if (mode === "lines") return line.dash ? "┅" : "━";
    const sign = type === "bar" ? marker.pattern?.shape : marker?.symbol;
    return Chart.GLYPHS[Array.isArray(sign) ? null : sign] ?? (type === "bar" ? "■" : "●");
  }

  // The figures leave these colours open; a template fills them in and never overrides.
  template() {
    const styles = getComputedStyle(document.documentElement);
    const [paper, ink, quiet, line] = ["--paper", "--ink", "--quiet", "--line"].map((name) => styles.getPropertyValue(name).trim());
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, color: quiet };
    return {
      layout: {
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        xaxis: axis,
        yaxis: axis,
        hoverlabel: { bgcolor: paper, bordercolor: quiet, font: { color: ink, size: 13 }, align: "left" },
      },
      data: {
        bar: [{ marker: { line: { color: paper } }, error_x: { color: quiet }, error_y: { color: quiet } }],
        scatter: [{ marker: { color: ink, line: { color: paper } }, line: { color: ink } }],
      },
    };
  }

  // Names of points that would lie on another text, or beyond the figure, are left out: the pointer shows them.
  hideOverlapping(plot) {
    const frame = plot.getBoundingClientRect();
    const boxOf = (node) => node.getBoundingClientRect();
    const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    const taken = [...plot.querySelectorAll(Chart.FIXED_TEXTS)].map(boxOf);
    for (const label of [...plot.querySelectorAll(".textpoint text")].reverse()) {
      const box = boxOf(label);
      const isFree = box.top >= frame.top && box.left >= frame.left && box.right <= frame.right && !taken.some((other) => meet(box, other));
      label.style.visibility = isFree ? "" : "hidden";
      if (isFree) taken.push(box);
    }
  }
}

// Names in figures are escaped for plotly.
function plain(text) {
  return new DOMParser().parseFromString(text, "text/html").body.textContent;
}
