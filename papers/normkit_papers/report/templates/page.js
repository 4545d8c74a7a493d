"use strict";
// Tables that sort and filter, and sections of line charts that share one view, one reading and one legend.
let { runs, curves, statistics } = JSON.parse(document.getElementById("data").textContent);
const MARGIN = { left: 50, top: 10, bottom: 38 }, SKIP = 0.05, STEP = 1 / 60, LABELS = 460, ROOM = 15, MANY = 8;

function make(kind, attributes, parent, text) {
  const svg = kind.startsWith("svg:"), name = svg ? kind.slice(4) : kind;
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const look = run => `c${run.colour} d${run.dash}`;
const short = value => (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) && value ? value.toExponential().replace("+", "") : String(value);
const format = value => value === null ? "-" : short(+value.toPrecision(4));
function swatch(run, parent) {
  const icon = make("svg:svg", { class: `swatch ${look(run)}`, "aria-hidden": "true", viewBox: "0 0 24 10" }, parent);
  make("svg:line", { x1: 0, x2: 24, y1: 5, y2: 5 }, icon);
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(k => k * unit).find(s => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.8) return ticks(low, high, count);
  const parts = decades < 1.5 ? [1, 2, 3, 5] : decades < 3 ? [1, 3] : [1], found = [];
  const every = Math.max(1, Math.ceil(decades / count));
  for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e += every)
    for (const part of parts) if (part * 10 ** e >= low && part * 10 ** e <= high) found.push(part * 10 ** e);
  return found;
}

class Chart {
  constructor(section, parent, data) {
    const figure = make("figure", {}, parent), about = { tabindex: 0, role: "img", "aria-describedby": `${section.id}-hint` };
    make("figcaption", {}, figure, data.title);
    const svg = make("svg:svg", { class: "chart", "aria-label": `${data.title} over steps`, ...about }, figure);
    Object.assign(this, { section, figure, svg, title: data.title, lines: data.lines });
    this.tip = make("div", { class: "tip", hidden: "" }, figure);
    this.listen();
    this.observer = new ResizeObserver(([entry]) => this.draw(entry.contentRect));
    this.observer.observe(this.svg);
  }

  remove() {
    this.observer.disconnect();
    this.figure.remove();
  }

  shown() { return this.lines.filter(line => !this.section.hidden.has(line.run)); }

  scale(width, height) {
    const [x0, x1] = this.section.view, log = this.section.log, [y0, y1] = this.section.heights(this);
    if (y0 > y1) return null;
    const f = log ? Math.log : v => v;
    const pad = (f(y1) - f(y0)) * 0.04 || (log ? 0.05 : Math.abs(y0) * 0.05 || 0.05);  // wider than a number's precision
    const low = f(y0) - pad, high = f(y1) + pad, back = log ? Math.exp : v => v;
    const left = MARGIN.left, right = width - this.right, top = MARGIN.top, bottom = height - MARGIN.bottom;
    return { left, right, top, bottom, y0: back(low), y1: back(high),
             x: v => left + (v - x0) / (x1 - x0 || 1) * (right - left), step: px => x0 + (px - left) / (right - left) * (x1 - x0),
             y: v => bottom - ((log && v <= 0 ? low - 1 : f(v)) - low) / (high - low) * (bottom - top) };
  }

  draw({ width, height }) {
    const svg = this.svg;
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const fit = this.lines.length * ROOM <= height - MARGIN.top - MARGIN.bottom;
    const direct = width > LABELS && this.lines.length > 1 && fit && this.lines.every(line => !line.name);
    this.right = direct ? 20 + 7 * Math.min(22, Math.max(...this.lines.map(line => runs[line.run].name.length))) : 12;
    const s = this.at = this.scale(width, height);
    if (!s) { make("svg:text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg, "nothing to show"); return; }
    for (const t of ticks(...this.section.view, Math.max(2, (s.right - s.left) / 90)))
      make("svg:text", { x: s.x(t), y: s.bottom + 16, "text-anchor": s.x(t) > width - 22 ? "end" : "middle" }, svg, t.toLocaleString("en"));
    make("svg:text", { x: s.right, y: s.bottom + 30, "text-anchor": "end" }, svg, "step");
    for (const t of (this.section.log ? logTicks : ticks)(s.y0, s.y1, Math.max(2, (s.bottom - s.top) / 45))) {
      make("svg:line", { class: "grid", x1: s.left, x2: s.right, y1: s.y(t), y2: s.y(t) }, svg);
      make("svg:text", { x: s.left - 7, y: s.y(t) + 4, "text-anchor": "end" }, svg, format(t));
    }
    const id = `clip-${this.section.id}-${this.section.charts.indexOf(this)}`;
    const clip = make("svg:clipPath", { id }, svg);
    make("svg:rect", { x: s.left, y: s.top - 2, width: Math.max(0, s.right - s.left + 2), height: s.bottom - s.top + 4 }, clip);
    const inside = make("svg:g", { "clip-path": `url(#${id})` }, svg);
    for (const line of this.shown()) {
      let path = "", pen = "M";
      line.x.forEach((x, i) => {
        if (line.y[i] === null) { pen = "M"; return; }
        path += `${pen}${s.x(x).toFixed(1)} ${s.y(line.y[i]).toFixed(1)}`;
        pen = "L";
      });
      line.path = make("svg:path", { d: path.replace(/M[^ML]+(?=M|$)/g, "$&h3"), class: `line ${look(runs[line.run])}${line.name && !line.main ? " side" : ""}` }, inside);
    }
    if (direct) this.names(s);
    this.over = make("svg:g", {}, svg);
    this.read();
  }

  names(s) {
    const ends = this.shown().map(line => {
      let i = line.y.length - 1;
      while (i > 0 && (line.y[i] === null || line.x[i] > this.section.view[1])) i--;
      return { run: runs[line.run], y: clamp(line.y[i] === null ? s.bottom : s.y(line.y[i]), s.top, s.bottom) };
    }).sort((a, b) => a.y - b.y);
    ends.forEach((end, i) => { if (i) end.y = Math.max(end.y, ends[i - 1].y + ROOM); });
    ends.reverse().forEach((end, i) => { end.y = Math.min(end.y, i ? ends[i - 1].y - ROOM : s.bottom); });
    for (const { run, y } of ends) {
      make("svg:line", { class: `line ${look(run)}`, x1: s.right + 4, x2: s.right + 16, y1: y, y2: y }, this.svg);
      const name = run.name.length > 22 ? run.name.slice(0, 21) + "\u2026" : run.name;
      make("svg:text", { class: "name", x: s.right + 20, y: y + 4 }, this.svg, name);
    }
  }

  /** Show the values at the section's cursor; `pixel` is the height that a pointer is at. */
  read(pixel) {
    const { cursor, view } = this.section, s = this.at;
    this.tip.hidden = true;
    if (!s || !this.over) return;
    this.over.replaceChildren();
    for (const line of this.shown()) line.path.classList.remove("near");
    if (cursor === null || cursor < view[0] || cursor > view[1]) return;
    const values = this.shown().map(line => {
      let best = 0;
      line.x.forEach((x, i) => { if (Math.abs(x - cursor) < Math.abs(line.x[best] - cursor)) best = i; });
      return { line, step: line.x[best], y: line.y[best] };
    }).filter(v => v.y !== null && (!this.section.log || v.y > 0));
    make("svg:line", { class: "hair", x1: s.x(cursor), x2: s.x(cursor), y1: s.top, y2: s.bottom }, this.over);
    let marked = values;
    if (values.some(v => v.line.main)) {
      const main = values.find(v => v.line.main), others = values.filter(v => v !== main);
      const near = pixel === undefined ? null : others.sort((a, b) => Math.abs(s.y(a.y) - pixel) - Math.abs(s.y(b.y) - pixel))[0];
      if (near) near.line.path.classList.add("near");
      marked = near ? [near, main] : [main];
    }
    marked.sort((a, b) => b.y - a.y);
    for (const v of marked)
      make("svg:circle", { class: look(runs[v.line.run]), cx: s.x(v.step), cy: clamp(s.y(v.y), s.top, s.bottom), r: 4 }, this.over);
    this.summary = `${this.title}, step ${Math.round(cursor)}: ` +
      marked.map(v => `${v.line.name || runs[v.line.run].name} ${format(v.y)}`).join(", ");
    if (this.section.active !== this) return;
    this.tip.replaceChildren();
    make("div", {}, this.tip, `step ${marked.length ? marked[0].step.toLocaleString("en") : "-"}`);
    for (const v of marked) {
      const row = make("div", {}, this.tip);
      swatch(runs[v.line.run], row);
      make("span", {}, row, v.line.name || runs[v.line.run].name);
      make("span", {}, row, format(v.y));
    }
    this.tip.hidden = false;
    const wide = this.figure.clientWidth, at = s.x(cursor), left = at + 14 + this.tip.offsetWidth > wide ? at - 14 - this.tip.offsetWidth : at + 14;
    this.tip.style.left = `${clamp(left, 0, Math.max(0, wide - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${this.svg.getBoundingClientRect().top - this.figure.getBoundingClientRect().top + s.top}px`;
  }

  listen() {
    const { svg, section } = this, px = event => event.clientX - svg.getBoundingClientRect().left;
    let start = null, brush = null;
    const move = event => {
      if (!this.at) return;
      section.active = this;
      section.cursor = clamp(this.at.step(px(event)), ...section.view);
      section.read(this, event.clientY - svg.getBoundingClientRect().top);
      if (start === null || event.pointerType === "touch") return;
      brush = brush || make("svg:rect", { class: "brush", y: this.at.top, height: this.at.bottom - this.at.top }, svg);
      const a = this.at.x(start), b = this.at.x(section.cursor);
      brush.setAttribute("x", Math.min(a, b));
      brush.setAttribute("width", Math.abs(a - b));
    };
    const stop = event => {
      const end = section.cursor, from = start;
      start = null;
      if (brush) brush.remove();
      brush = null;
      if (event.type === "pointerup" && from !== null && this.at && event.pointerType !== "touch" &&
          Math.abs(this.at.x(end) - this.at.x(from)) > 8) section.zoom(Math.min(from, end), Math.max(from, end));
    };
    svg.addEventListener("pointerdown", event => {
      if (event.button || !this.at) return;
      move(event);
      start = section.cursor;
      if (event.pointerType !== "touch") svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerup", stop);
    svg.addEventListener("pointercancel", stop);
    svg.addEventListener("dblclick", () => section.all());
    svg.addEventListener("pointerleave", event => { if (event.pointerType !== "touch" && start === null) section.leave(); });
    svg.addEventListener("blur", () => { if (section.active === this) section.leave(); });
    svg.addEventListener("keydown", event => {
      const [x0, x1] = section.view, wide = x1 - x0, now = section.cursor === null ? (x0 + x1) / 2 : section.cursor;
      const keys = { ArrowLeft: () => section.point(now - wide * STEP), ArrowRight: () => section.point(now + wide * STEP),
                     Home: () => section.point(section.whole[0]), End: () => section.point(section.whole[1]),
                     "+": () => section.magnify(0.5), "=": () => section.magnify(0.5), "-": () => section.magnify(2),
                     Escape: () => section.all() };
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      section.active = this;
      keys[event.key]();
      section.status.textContent = section.cursor === null ? "" : this.summary || "";
    });
  }
}

class Section {
  constructor(id, skip) {
    const element = document.getElementById(id);
    Object.assign(this, { id, skip, hidden: new Set(), cursor: null, active: null, log: true, charts: [], whole: null, view: null });
    this.status = element.querySelector("[role=status]");
    this.grid = element.querySelector(".charts");
    this.bar = element.querySelector(".tools");
    const label = this.first = make("label", {}, this.bar), box = make("input", { type: "checkbox", checked: "" }, label);
    label.append("logarithmic");
    box.addEventListener("change", () => { this.log = box.checked; this.draw(); });
    for (const [name, about, act] of [["+", "zoom in", () => this.magnify(0.5)], ["\u2212", "zoom out", () => this.magnify(2)],
                                      ["show all", "show all steps", () => this.all()]])
      make("button", { type: "button", "aria-label": about }, this.bar, name).addEventListener("click", act);
    this.toggles = make("span", { class: "toggles" }, this.bar);
  }

  /** A menu in front of the tools. */
  menu(about, act) {
    const label = make("label", {}, undefined, `${about} `), box = make("select", {}, label);
    this.bar.insertBefore(label, this.first);
    box.addEventListener("change", act);
    return box;
  }

  /** Show these charts; those of the same titles stay as they are seen: hidden lines, view, focus. */
  load(charts) {
    const steps = charts.flatMap(chart => chart.lines.flatMap(line => line.x)), was = this.whole;
    this.whole = [steps.reduce((a, b) => Math.min(a, b), Infinity), steps.reduce((a, b) => Math.max(a, b), -Infinity)];
    if (!this.view || this.view === was || this.view[0] >= this.whole[1]) this.view = this.whole;
    if (charts.length === this.charts.length && charts.every((chart, i) => chart.title === this.charts[i].title)) {
      charts.forEach((chart, i) => { this.charts[i].lines = chart.lines; });
    } else {
      for (const chart of this.charts) chart.remove();
      this.charts = [];
      for (const chart of charts) this.charts.push(new Chart(this, this.grid, chart));
    }
    this.legend(new Set(charts.flatMap(chart => chart.lines.map(line => line.run))));
    this.draw();
  }

  legend(used) {
    const names = runs.map((run, i) => used.has(i) ? run.name : "").join("\n");
    if (names === this.named) return;
    this.named = names;
    this.toggles.replaceChildren();
    const buttons = new Map(), press = () => {
      for (const [i, button] of buttons) button.setAttribute("aria-pressed", String(!this.hidden.has(i)));
      this.draw();
    };
    if (used.size >= MANY)
      make("button", { type: "button" }, this.toggles, "hide or show all").addEventListener("click", () => {
        const some = [...buttons.keys()].some(i => !this.hidden.has(i));
        for (const i of buttons.keys()) if (some) this.hidden.add(i); else this.hidden.delete(i);
        press();
      });
    runs.forEach((run, i) => {
      if (!used.has(i)) return;
      const button = make("button", { type: "button", "aria-pressed": String(!this.hidden.has(i)) }, this.toggles);
      swatch(run, button);
      button.append(run.name);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(i)) this.hidden.add(i);
        press();
      });
      buttons.set(i, button);
    });
  }

  /** Lowest and highest value in view: a chart's own or, where charts are compared, those of all, found once. */
  heights(chart) {
    if (this.shared) return this.shared;
    const [x0, x1] = this.view, skip = this.view === this.whole ? x0 + this.skip * (x1 - x0) : x0, found = [Infinity, -Infinity];
    for (const one of this.skip ? [chart] : this.charts) for (const line of one.shown()) line.x.forEach((x, i) => {
      const y = line.y[i];
      if (y === null || x < skip || x > x1 || (this.log && y <= 0)) return;
      found[0] = Math.min(found[0], y);
      found[1] = Math.max(found[1], y);
    });
    return this.skip ? found : this.shared = found;
  }
  draw() {
    this.shared = null;
    for (const chart of this.charts) chart.figure.hidden = !chart.shown().length && chart.lines.length > 0;
    const sizes = this.charts.map(chart => chart.svg.getBoundingClientRect());  // all before any change, which would cost a layout each
    this.charts.forEach((chart, i) => chart.draw(sizes[i]));
  }
  read(chart, pixel) { for (const other of this.charts) other.read(other === chart ? pixel : undefined); }
  leave() { this.cursor = null; this.active = null; this.read(); }
  all() { this.view = this.whole; this.cursor = null; this.draw(); }

  zoom(from, to) {
    const least = (this.whole[1] - this.whole[0]) / 500;
    if (to - from < least) return;
    from = Math.max(from, this.whole[0]);
    to = Math.min(to, this.whole[1]);
    this.view = from === this.whole[0] && to === this.whole[1] ? this.whole : [from, to];
    this.draw();
  }
  magnify(factor) {
    const [x0, x1] = this.view, middle = this.cursor === null ? (x0 + x1) / 2 : this.cursor;
    this.zoom(middle - (middle - x0) * factor, middle + (x1 - middle) * factor);
  }
  point(step) {
    const [x0, x1] = this.view;
    this.cursor = clamp(step, ...this.whole);
    const shift = this.cursor < x0 ? this.cursor - x0 : this.cursor > x1 ? this.cursor - x1 : 0;
    if (shift) this.zoom(x0 + shift, x1 + shift); else this.read();
  }
}

function sortable(table) {
  table.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => {
    const head = button.parentElement, up = head.getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1;
    table.querySelectorAll("th[aria-sort]").forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[column].dataset.value === "" ? null : Number(row.cells[column].dataset.value);
    const text = row => row.cells[column].textContent;
    const sorted = [...table.tBodies[0].rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (x !== null && y !== null) return sign * (x - y);
      return x === null && y === null ? sign * text(a).localeCompare(text(b)) : (x === null) - (y === null);
    });
    table.tBodies[0].append(...sorted);
  }));
}

/** A field above the tables: rows stay that have all of its words. */
function filterable(section) {
  const field = section.querySelector("input[type=search]"), status = section.querySelector("[role=status]");
  const rows = () => [...section.querySelectorAll("table.sortable tbody tr")];
  const filter = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows()) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
    status.textContent = words.length ? `${rows().filter(row => !row.hidden).length} of ${rows().length} rows` : "";
  };
  if (field) field.addEventListener("input", filter);
}

/** The charts that the statistics' menus select: one a run with a line a place, or one a place with a line a run. */
function panels(quantity, by) {
  const found = statistics.find(one => one.name === quantity).panels;
  if (by === "run") return found.map(panel => {
    const places = Object.entries(panel.sites), lines = places.map(([name, y]) => ({ run: panel.run, name: name || "model", x: panel.x, y }));
    if (lines.length > 1) lines.push({ run: panel.run, name: "median", x: panel.x, main: true, y: panel.x.map((_, i) => median(lines.map(line => line.y[i]))) });
    return { title: runs[panel.run].name, lines };
  });
  const places = [...new Set(found.flatMap(panel => Object.keys(panel.sites)))];
  return places.map(place => ({ title: place || "model", lines: found.filter(panel => place in panel.sites)
    .map(panel => ({ run: panel.run, name: "", x: panel.x, y: panel.sites[place] })) }));
}
function median(values) {
  const known = values.filter(value => value !== null).sort((a, b) => a - b), half = known.length >> 1;
  return !known.length ? null : known.length % 2 ? known[half] : (known[half - 1] + known[half]) / 2;
}

const shown = {};
function show() {
  if (curves.length) (shown.curves ||= new Section("curves", SKIP)).load(curves);
  if (!statistics.length) return;
  if (!shown.statistics) {
    const section = shown.statistics = new Section("statistics", 0), again = () => show();
    section.quantity = section.menu("quantity", again);
    section.by = section.menu("a chart for each", again);
    for (const [value, name] of [["run", "run"], ["place", "place in the model"]]) make("option", { value }, section.by, name);
  }
  const section = shown.statistics, names = statistics.map(one => one.name), old = section.quantity.value;
  if ([...section.quantity.options].map(option => option.value).join() !== names.join()) {
    section.quantity.replaceChildren();
    for (const name of names) make("option", { value: name }, section.quantity, name);
    section.quantity.value = names.includes(old) ? old : names[0];
  }
  document.getElementById("about").textContent = statistics.find(one => one.name === section.quantity.value).about;
  section.load(panels(section.quantity.value, section.by.value));
}

document.querySelectorAll("table.sortable").forEach(sortable);
filterable(document.getElementById("table"));
show();
