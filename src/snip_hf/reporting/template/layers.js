// ------------------------------------------------------------------------------------------------ layers over steps

// Layers are rows and steps go to the right. The scroll bars of the box move what is shown; the canvas stays in place.
class Layers {
  constructor(figure, source) {
    this.source = source;
    this.rowScale = this.stepScale = 1;
    this.tools = make("div", figure, "", { class: "tools" });
    this.select = make("select", this.tools, "", { "aria-label": "What is shown" });
    source.panels.forEach((panel, index) => make("option", this.select, panel.name, { value: index }));
    this.select.hidden = source.panels.length < 2;
    this.filter = make("input", this.tools, "", { type: "search", placeholder: "filter layers, e.g. .7. or down", "aria-label": "Filter layers" });
    button(this.tools, "Rows +", () => this.zoom(1.6, 1), "Higher rows, with their names");
    button(this.tools, "Rows −", () => this.zoom(1 / 1.6, 1), "Lower rows");
    button(this.tools, "Steps +", () => this.zoom(1, 1.6), "Wider steps");
    button(this.tools, "Steps −", () => this.zoom(1, 1 / 1.6), "Narrower steps");
    button(this.tools, "Fit", () => { this.rowScale = this.stepScale = 1; this.resize(); }, "All layers and steps");
    this.key = make("div", figure, "", { class: "tools" });
    this.box = make("div", figure, "", { class: "scroll", tabindex: "0" });
    this.space = make("div", this.box);
    this.canvas = make("canvas", this.space, "", { role: "img", "aria-label": source.title });
    // A few layers need less than the usual height.
    this.box.style.maxHeight = `${Math.max(...source.panels.map((panel) => panel.rows.length)) * 32 + AXIS + 2}px`;
    saveTools(this.tools, this.canvas, () => this.source.csv(), source.title);
    this.listen();
    this.choose();
    onSize(this.box, () => this.resize());
  }

  listen() {
    this.select.addEventListener("change", () => this.choose());
    this.filter.addEventListener("input", () => this.choose());
    this.box.addEventListener("scroll", () => { tip.hidden = true; this.draw(); });
    this.box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const factor = event.deltaY < 0 ? 1.25 : 0.8;
      this.zoom(event.shiftKey ? 1 : factor, event.shiftKey ? factor : 1, event);
    }, { passive: false });
    for (const name of ["pointermove", "pointerdown"]) {
      this.canvas.addEventListener(name, (event) => showTip(event, this.describe(event)));
    }
    this.canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
  }

  choose() {
    this.panel = this.source.panels[Number(this.select.value) || 0];
    const wanted = this.filter.value.toLowerCase();
    this.rows = this.panel.rows.filter((row) => row.name.toLowerCase().includes(wanted));
    this.key.replaceChildren();
    this.panel.key(this.key);
    this.image = null;
    this.resize();
  }

  // Zooms about a pointer, or about the middle of what is shown.
  zoom(rows, steps, event) {
    const box = this.box.getBoundingClientRect();
    const atY = event ? event.clientY - box.top : this.box.clientHeight / 2;
    const atX = event ? event.clientX - box.left - this.left : (this.box.clientWidth - this.left) / 2;
    const row = (this.box.scrollTop + atY) / this.rowHeight;
    const part = (this.box.scrollLeft + atX) / this.plotWidth;
    const fit = this.fitHeight();
    this.rowScale = clamp(this.rowScale * rows, 1, Math.max(1, 32 / fit));
    this.stepScale = clamp(this.stepScale * steps, 1, Math.max(4, this.panel.starts.length / 2));
    this.resize(false);
    this.box.scrollTop = row * this.rowHeight - atY;
    this.box.scrollLeft = part * this.plotWidth - atX;
    this.draw();
  }

  fitHeight() { return Math.max((this.box.clientHeight - AXIS) / Math.max(this.rows.length, 1), 0.1); }

  resize(draw = true) {
    if (!this.box.clientWidth) return;
    this.rowHeight = Math.min(this.fitHeight(), 32) * this.rowScale;
    const ctx = this.canvas.getContext("2d");
    ctx.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    this.prefix = commonPrefix(this.rows.map((row) => row.name));
    this.names = this.rows.map((row) => row.name.slice(this.prefix.length));
    const longest = this.names.reduce((a, b) => (b.length > a.length ? b : a), "");
    this.left = Math.min(ctx.measureText(longest).width + 12, this.box.clientWidth * 0.45);
    this.plotWidth = (this.box.clientWidth - this.left - 8) * this.stepScale;
    this.space.style.width = `${this.left + this.plotWidth + 8}px`;
    this.space.style.height = `${Math.max(this.rows.length * this.rowHeight + AXIS, this.box.clientHeight)}px`;
    if (draw) this.draw();
  }

  paint() {
    const { starts } = this.panel;
    const image = document.createElement("canvas");
    image.width = starts.length;
    image.height = Math.max(this.rows.length, 1);
    const pixels = new ImageData(image.width, image.height);
    this.rows.forEach((row, y) => starts.forEach((_, x) => {
      const colour = this.panel.colour(row, x);
      if (colour) pixels.data.set([...colour, 255], 4 * (y * image.width + x));
    }));
    image.getContext("2d").putImageData(pixels, 0, 0);
    return image;
  }

  draw() {
    const [width, height] = [this.box.clientWidth, this.box.clientHeight];
    if (!width) return;
    const ctx = context(this.canvas, width, height);
    this.image ??= this.paint();
    const { starts, begin, last } = this.panel;
    const span = Math.max(last - begin, 1);
    const px = (step) => this.left + ((step - begin) / span) * this.plotWidth - this.box.scrollLeft;
    const [top, bottom] = [this.box.scrollTop, Math.min(height - AXIS, this.rows.length * this.rowHeight - this.box.scrollTop)];
    const first = Math.floor(top / this.rowHeight);
    const count = Math.min(this.rows.length, Math.ceil((top + height - AXIS) / this.rowHeight)) - first;
    ctx.save();
    ctx.beginPath();
    ctx.rect(this.left, 0, width - this.left, bottom);
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    starts.forEach((start, x) => {
      const [from, to] = [px(start), px(starts[x + 1] ?? last)];
      if (to < this.left || from > width || count < 1) return;
      const y = first * this.rowHeight - top;
      ctx.drawImage(this.image, x, first, 1, count, from, y, Math.max(to - from, 0.5), count * this.rowHeight);
    });
    ctx.restore();
    this.labels(ctx, first, count, top, bottom);
    const view = [begin + (this.box.scrollLeft / this.plotWidth) * span,
      begin + ((this.box.scrollLeft + width - this.left - 8) / this.plotWidth) * span];
    stepAxis(ctx, view, px, bottom, width - this.left, width);
    Object.assign(this, { px, top, bottom });
  }

  labels(ctx, first, count, top, bottom) {
    ctx.fillStyle = css("--text");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    // Of low rows those names that have room: of the first row of a block, as far as blocks have room.
    const firsts = this.rows.map((row, index) => index).filter((index) => !index || blockOf(this.rows[index].name) !== blockOf(this.rows[index - 1].name));
    const areNamed = this.rowHeight >= 11;
    const candidates = areNamed ? this.rows.map((row, index) => index) : firsts;
    let free = -Infinity;
    for (const index of candidates) {
      const y = (index + 0.5) * this.rowHeight - top;
      if (index < first - 1 || index > first + count || y < -1 || y > bottom - 4 || y < free) continue;
      const text = areNamed ? this.names[index] : blockOf(this.rows[index].name);
      const at = Math.max(y, 6);
      const cut = this.rowHeight >= 24 && ctx.measureText(text).width > this.left - 8 ? text.lastIndexOf(" ") : -1;
      // The GEMM goes into a second line where there is no room beside the layer.
      const lines = cut < 0 ? [text] : [text.slice(0, cut), text.slice(cut + 1)];
      lines.forEach((one, number) => {
        ctx.fillText(fitted(ctx, one, this.left - 8), this.left - 6, at + 11 * (number - (lines.length - 1) / 2));
      });
      free = at + 12;
    }
  }

  describe(event) {
    const box = this.canvas.getBoundingClientRect();
    const index = Math.floor((event.clientY - box.top + this.top) / this.rowHeight);
    const row = this.rows[index];
    const x = event.clientX - box.left;
    if (!row || event.clientY - box.top > this.bottom) return "";
    if (x < this.left) return row.name;
    const { starts, last } = this.panel;
    const column = starts.findLastIndex((start) => this.px(start) <= x);
    if (column < 0) return row.name;
    const until = starts[column + 1] ?? last;
    return `${row.name}\n${this.panel.text(row, column)}\nfrom step ${shown(starts[column])} to ${shown(until)}`;
  }
}

// Up to a dot, so that names stay whole words.
function commonPrefix(names) {
  if (names.length < 2) return "";
  const [first, last] = [names.reduce((a, b) => (a < b ? a : b)), names.reduce((a, b) => (a > b ? a : b))];
  let length = 0;
  while (length < first.length && first[length] === last[length]) length += 1;
  return first.slice(0, first.lastIndexOf(".", length - 1) + 1);
}

function blockOf(name) { return (/^(.*?\.\d+)\./.exec(name) ?? [name, name])[1]; }

// Leaves out the middle of a text that is too wide: blocks differ at the front of names, GEMMs at their end.
function fitted(ctx, text, width) {
  let shownText = text;
  for (let length = text.length - 1; length > 3 && ctx.measureText(shownText).width > width; length -= 1) {
    shownText = `${text.slice(0, Math.ceil(length / 2))}…${text.slice(-Math.floor(length / 2))}`;
  }
  return shownText;
}

function rgb(hex) { return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); }

function plan(run) {
  const { gemms, formats, steps, codes, mixed } = run.plan;
  const known = formats.map((name) => data.formats[name]);
  const colours = known.map((format) => rgb(format.colour));
  const at = (row, column) => data.letters.indexOf(codes[column][row.cell]);
  const key = (parent) => known.forEach((format) => {
    const node = make("span", parent, "", { class: "key" });
    make("span", node, "", { class: "swatch" }).style.background = format.colour;
    node.append(format.label);
  });
  const rows = (indices) => run.layers.flatMap((layer, index) => indices.map((gemm) => ({
    name: indices.length > 1 ? `${layer} ${gemms[gemm]}` : layer, layer, gemm, cell: index * gemms.length + gemm,
  })));
  const panel = (name, indices) => ({
    name, key, rows: rows(indices), starts: steps, begin: steps[0], last: run.last,
    colour: (row, column) => colours[at(row, column)],
    text: (row, column) => known[at(row, column)]?.label ?? "has no such GEMM",
  });
  const every = gemms.map((_, index) => index);
  const panels = mixed ? [panel("each GEMM", every), ...every.map((one) => panel(gemms[one], [one]))] : [panel("all three GEMMs", [0])];
  return { title: `plan ${run.name}`, panels, csv: () => planRows(run, rows(every), at) };
}

// One line for each stretch of steps in which a GEMM kept its format.
function planRows(run, rows, at) {
  const { steps, formats, gemms } = run.plan;
  const lines = [["layer", "gemm", "from step", "to step", "format"]];
  for (const row of rows) {
    let from = 0;
    steps.forEach((_, x) => {
      if (x + 1 < steps.length && at(row, x + 1) === at(row, x)) return;
      const format = formats[at(row, x)];
      if (format) lines.push([row.layer, gemms[row.gemm], steps[from], steps[x + 1] ?? run.last, format]);
      from = x + 1;
    });
  }
  return lines;
}

function divergence(run) {
  const { steps, last, panels } = run.divergence;
  const base = data.letters.length;
  const part = (panel, row, x) => {
    const [first, second] = [0, 1].map((at) => data.letters.indexOf(panel.codes[x][2 * row.index + at]));
    return first < 0 ? null : (first * base + second) / (base * base - 1);
  };
  const value = (panel, row, x) => {
    const at = part(panel, row, x);
    return at === null ? null : panel.low * (panel.high / panel.low) ** at;
  };
  const rows = run.layers.map((name, index) => ({ name, index }));
  const shownPanels = panels.map((panel) => ({
    name: panel.name, rows, starts: steps, begin: Math.min(run.plan.steps[0], steps[0]), last: Math.max(run.last, last),
    key: (parent) => scale(parent, panel),
    colour: (row, x) => { const at = part(panel, row, x); return at === null ? null : viridis(at); },
    text: (row, x) => { const own = value(panel, row, x); return `${panel.name}: ${own === null ? "zero or not measured" : own.toExponential(2)}`; },
  }));
  const csv = () => [["quantity", "layer", "step", "divergence"], ...panels.flatMap((panel) => rows.flatMap((row) =>
    steps.map((step, x) => [panel.name, row.name, step, value(panel, row, x)]).filter((cells) => cells[3] !== null)
      .map((cells) => [...cells.slice(0, 3), cells[3].toPrecision(3)])))];
  return { title: `divergences ${run.name}`, panels: shownPanels, csv };
}

function viridis(part) {
  const at = part * (VIRIDIS.length - 1);
  const low = VIRIDIS[Math.floor(at)];
  const high = VIRIDIS[Math.ceil(at)];
  return low.map((one, index) => Math.round(one + (high[index] - one) * (at % 1)));
}

function scale(parent, panel) {
  make("span", parent, panel.low.toExponential(1));
  const canvas = make("canvas", parent, "", { width: 160, height: 12 });
  const ctx = canvas.getContext("2d");
  for (let x = 0; x < 160; x += 1) {
    ctx.fillStyle = `rgb(${viridis(x / 159).join()})`;
    ctx.fillRect(x, 0, 1, 12);
  }
  make("span", parent, `${panel.high.toExponential(1)} (logarithmic; empty: zero or not measured)`);
}

// ------------------------------------------------------------------------------------------------ start

function startTheme() {
  const select = document.getElementById("theme");
  const read = () => { try { return localStorage.getItem("snip-theme") ?? ""; } catch { return ""; } };
  const apply = (theme) => {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    select.value = theme;
    drawings.forEach((draw) => draw());
  };
  select.addEventListener("change", () => {
    try { localStorage.setItem("snip-theme", select.value); } catch { /* a page from a file may not store */ }
    apply(select.value);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawings.forEach((draw) => draw()));
  const asked = new URLSearchParams(location.search).get("theme");
  apply(["light", "dark"].includes(asked) ? asked : read());
}

function start() {
  document.querySelectorAll("figure").forEach((figure) => {
    const { run, chart, plan: ofPlan, divergence: ofDivergence } = figure.dataset;
    if (chart !== undefined) new Curves(figure, (run === undefined ? data : data.runs[run]).charts[chart]);
    if (ofPlan !== undefined) new Layers(figure, plan(data.runs[ofPlan]));
    if (ofDivergence !== undefined) new Layers(figure, divergence(data.runs[ofDivergence]));
  });
  startTheme();
  // For whoever measures: milliseconds from the request to the drawn page.
  root.dataset.drawn = String(Math.round(performance.now()));
}

start();
