"use strict";
// Draws the figures of the page from the data in it. Texts go in as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const tip = document.getElementById("tip");
const drawings = [];
const AXIS = 26;
const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129],
  [92, 200, 99], [170, 220, 50], [253, 231, 37]];

// ------------------------------------------------------------------------------------------------ small pieces

function make(tag, parent, text, attributes = {}) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent.append(node);
  return node;
}

function button(parent, text, action, label) {
  const node = make("button", parent, text, { type: "button" });
  if (label) { node.title = label; node.setAttribute("aria-label", label); }
  node.addEventListener("click", action);
  return node;
}

function css(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }
function runColour(index) { return css(`--c${index % 8}`); }
function clamp(value, low, high) { return Math.min(Math.max(value, low), high); }

function shown(value) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e6 ? String(Number(value.toPrecision(5))) : value.toExponential(2);
}

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step || 0);
  return found;
}

function context(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.fillStyle = css("--panel");
  ctx.fillRect(0, 0, width, height);
  ctx.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return ctx;
}

function showTip(event, text) {
  if (!text) { tip.hidden = true; return; }
  tip.textContent = text;
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${clamp(event.clientX + 14, 4, Math.max(4, innerWidth - width - 4))}px`;
  const below = event.clientY + 16;
  tip.style.top = `${below + height > innerHeight ? Math.max(4, event.clientY - height - 12) : below}px`;
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function saveCsv(rows, name) {
  // A cell that a spreadsheet would take for a formula gets an apostrophe.
  const cell = (value) => {
    const text = typeof value === "string" ? value.replace(/^[=+\-@]/, "'$&") : String(value ?? "");
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  save(new Blob([rows.map((row) => row.map(cell).join(",")).join("\n") + "\n"], { type: "text/csv" }), `${name}.csv`);
}

function saveTools(tools, canvas, rows, title) {
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  button(tools, "PNG", () => canvas.toBlob((blob) => save(blob, `${name}.png`)), "Save what is shown as PNG");
  button(tools, "CSV", () => saveCsv(rows(), name), "Save all data of this figure as CSV");
}

function onSize(node, draw) {
  drawings.push(draw);
  new ResizeObserver(draw).observe(node);
}

// ------------------------------------------------------------------------------------------------ curves

class Curves {
  constructor(figure, chart) {
    this.chart = chart;
    this.hidden = new Set();
    const all = [...chart.series.flatMap((one) => one.x), ...chart.marks.flatMap((one) => one.steps)];
    this.whole = [Math.min(...all), Math.max(...all, Math.min(...all) + 1)];
    this.view = this.whole;
    this.legend(make("div", figure, "", { class: "tools" }));
    this.canvas = make("canvas", make("div", figure), "", { role: "img", "aria-label": chart.title });
    const tools = make("div", figure, "", { class: "tools" });
    button(tools, "+", () => this.zoom(0.5), "Zoom in");
    button(tools, "−", () => this.zoom(2), "Zoom out");
    button(tools, "All", () => this.show(this.whole), "Show all steps");
    saveTools(tools, this.canvas, () => this.rows(), chart.title);
    this.listen();
    onSize(this.canvas.parentNode, () => this.draw());
  }

  legend(parent) {
    const entries = [...this.chart.series, ...this.chart.marks];
    this.swatches = entries.map((entry) => {
      const node = button(parent, "", () => {
        if (!this.hidden.delete(entry)) this.hidden.add(entry);
        node.setAttribute("aria-pressed", String(!this.hidden.has(entry)));
        this.draw();
      });
      node.setAttribute("aria-pressed", "true");
      const swatch = make("span", node, "", { class: "swatch" });
      node.append(entry.steps ? `${entry.name} (${entry.kept ? "cross" : "tick"})` : entry.name);
      return [swatch, entry];
    });
  }

  zoom(factor) {
    const [low, high] = this.view;
    const middle = (low + high) / 2;
    const half = Math.max((high - low) * factor, 2) / 2;
    this.show([Math.max(this.whole[0], middle - half), Math.min(this.whole[1], middle + half)]);
  }

  show(view) {
    if (view[1] > view[0]) this.view = view;
    this.draw();
  }

  step(event) {
    const box = this.canvas.getBoundingClientRect();
    const part = clamp((event.clientX - box.left - this.left) / (box.width - this.left - 10), 0, 1);
    return this.view[0] + part * (this.view[1] - this.view[0]);
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (event) => { this.from = this.step(event); });
    canvas.addEventListener("pointermove", (event) => {
      this.at = this.step(event);
      showTip(event, this.describe());
      this.draw();
    });
    canvas.addEventListener("pointerup", () => {
      const range = [this.from, this.at].sort((a, b) => a - b);
      const isDrag = this.from !== undefined && range[1] - range[0] > (this.view[1] - this.view[0]) / 50;
      this.from = undefined;
      if (isDrag) this.show(range);
    });
    canvas.addEventListener("pointerleave", (event) => {
      this.at = this.from = undefined;
      showTip(event, "");
      this.draw();
    });
    canvas.addEventListener("dblclick", () => this.show(this.whole));
  }

  // The index of the last point up to a step, or of the nearest one.
  index(series, step) {
    let low = 0;
    let high = series.x.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (series.x[middle] <= step) low = middle; else high = middle - 1;
    }
    const next = series.x[low + 1];
    return !series.step && next !== undefined && next - step < step - series.x[low] ? low + 1 : low;
  }

  describe() {
    const lines = this.chart.series.filter((one) => !this.hidden.has(one)).map((one) => {
      const index = this.index(one, this.at);
      return `${one.name}: ${shown(one.y[index])}${one.step ? "" : ` (step ${shown(one.x[index])})`}`;
    });
    return [`step ${shown(Math.round(this.at))}`, ...lines].join("\n");
  }

  rows() {
    const points = this.chart.series.flatMap((one) => one.x.map((x, index) => [one.name, x, one.y[index]]));
    const marks = this.chart.marks.flatMap((one) => one.steps.map((x) => [one.name, x, ""]));
    return [["series", "step", "value"], ...points, ...marks];
  }

  range() {
    let [low, high] = [Infinity, -Infinity];
    for (const one of this.chart.series) {
      if (this.hidden.has(one)) continue;
      one.x.forEach((x, index) => {
        const y = one.y[index];
        if (y === null || x < this.view[0] || x > this.view[1]) return;
        low = Math.min(low, y);
        high = Math.max(high, y);
      });
    }
    if (low > high) return [0, 1];
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    const runs = new Set(this.chart.marks.map((one) => one.colour)).size;  // whose marks lie below the curves
    return [low - pad * (1 + runs), high + pad];
  }

  draw() {
    const width = this.canvas.parentNode.clientWidth;
    if (!width) return;
    const height = width < 500 ? 220 : 280;
    const ctx = context(this.canvas, width, height);
    const [low, high] = this.range();
    const labels = ticks(low, high, 5);
    this.left = Math.max(...labels.map((y) => ctx.measureText(shown(y)).width)) + 12;
    const [left, right, top, bottom] = [this.left, width - 10, 18, height - AXIS];
    const px = (x) => left + ((x - this.view[0]) / (this.view[1] - this.view[0])) * (right - left);
    const py = (y) => bottom - ((y - low) / (high - low)) * (bottom - top);
    ctx.strokeStyle = css("--line");
    ctx.fillStyle = css("--soft");
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    for (const y of labels) {
      line(ctx, [[left, py(y)], [right, py(y)]]);
      ctx.fillText(shown(y), left - 6, py(y));
    }
    ctx.textAlign = "left";
    ctx.fillText(this.chart.unit, 4, 7);
    stepAxis(ctx, this.view, px, bottom, right - left, right);
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top - 6, right - left, bottom - top + 12);
    ctx.clip();
    for (const one of this.chart.series) if (!this.hidden.has(one)) this.curve(ctx, one, px, py);
    for (const one of this.chart.marks) if (!this.hidden.has(one)) marks(ctx, one, px, bottom);
    this.cursor(ctx, px, top, bottom);
    ctx.restore();
    for (const [swatch, entry] of this.swatches) {
      swatch.style.background = runColour(entry.colour);
      swatch.style.opacity = entry.faint || entry.dashed ? "0.5" : "1";
    }
  }

  curve(ctx, one, px, py) {
    ctx.strokeStyle = ctx.fillStyle = runColour(one.colour);
    ctx.globalAlpha = one.faint ? 0.55 : 1;
    ctx.lineWidth = one.faint || one.dashed ? 1.2 : 2;
    ctx.setLineDash(one.dashed ? [6, 4] : []);
    let points = [];
    one.x.forEach((x, index) => {
      if (one.y[index] === null) { line(ctx, points); points = []; return; }
      const y = py(one.y[index]);
      if (one.step && points.length) points.push([px(x), points[points.length - 1][1]]);
      points.push([px(x), y]);
      if (one.x.length <= 60 && !one.step) { ctx.beginPath(); ctx.arc(px(x), y, 2.5, 0, 7); ctx.fill(); }
    });
    line(ctx, points);
    ctx.setLineDash([]);
    ctx.globalAlpha = ctx.lineWidth = 1;
  }

  cursor(ctx, px, top, bottom) {
    if (this.at === undefined) return;
    ctx.strokeStyle = ctx.fillStyle = css("--soft");
    line(ctx, [[px(this.at), top], [px(this.at), bottom]]);
    if (this.from === undefined) return;
    ctx.globalAlpha = 0.2;
    ctx.fillRect(px(this.from), top, px(this.at) - px(this.from), bottom - top);
    ctx.globalAlpha = 1;
  }
}

function line(ctx, points) {
  ctx.beginPath();
  points.forEach(([x, y], index) => (index ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
  ctx.stroke();
}

function marks(ctx, one, px, bottom) {
  ctx.strokeStyle = runColour(one.colour);
  bottom -= 11 * (one.colour % 8);  // runs above each other
  for (const step of one.steps) {
    const x = px(step);
    if (one.kept) {
      line(ctx, [[x - 3, bottom - 3], [x + 3, bottom + 3]]);
      line(ctx, [[x - 3, bottom + 3], [x + 3, bottom - 3]]);
    } else line(ctx, [[x, bottom - 5], [x, bottom + 5]]);
  }
}

function stepAxis(ctx, view, px, bottom, width, right) {
  ctx.fillStyle = css("--soft");
  ctx.textBaseline = "top";
  ctx.textAlign = "center";
  for (const x of ticks(view[0], view[1], Math.max(2, width / 110))) {
    const text = shown(x);
    const half = ctx.measureText(text).width / 2;
    ctx.fillText(text, Math.min(px(x), right - half), bottom + 8);
  }
}
