"use strict";
// One chart and one sortable table, by hand: a plotting library would be forty times as large as all of the rest.
const data = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg", W = 900, H = 380, M = { left: 60, right: 14, top: 10, bottom: 40 };
const chart = document.getElementById("chart"), tip = document.getElementById("tip"), which = document.getElementById("which");
const hidden = new Set();
let view = null, scale = null, cursor = 0;

function el(name, attributes, parent, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}
const shown = () => data.filter(run => !hidden.has(run.title) && run[which.value].length);
const colour = run => matchMedia("(prefers-color-scheme: dark)").matches && run.colour === "#000000" ? "#ffffff" : run.colour;

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(k => k * unit).find(s => s >= raw) || raw;
  const out = [];
  for (let t = Math.ceil(low / step) * step; t <= high + 1e-9 * step; t += step) out.push(t);
  return out;
}

function draw() {
  chart.replaceChildren();
  const points = shown().flatMap(run => run[which.value]).filter(p => Number.isFinite(p[1]));
  if (!points.length) { el("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, chart, "nothing to show"); scale = null; return; }
  const ys = points.map(p => p[1]), least = Math.min(...ys);
  const box = view || { x0: Math.min(...points.map(p => p[0])), x1: Math.max(...points.map(p => p[0])),
                        y0: least * 0.97, y1: Math.min(Math.max(...ys) * 1.03, least * 8) };
  scale = { box, x: v => M.left + (v - box.x0) / (box.x1 - box.x0 || 1) * (W - M.left - M.right),
            y: v => H - M.bottom - (v - box.y0) / (box.y1 - box.y0 || 1) * (H - M.top - M.bottom) };
  for (const t of ticks(box.x0, box.x1, 7)) el("text", { x: scale.x(t), y: H - M.bottom + 18, "text-anchor": "middle" }, chart, t.toLocaleString("en"));
  for (const t of ticks(box.y0, box.y1, 6)) {
    el("line", { class: "grid", x1: M.left, x2: W - M.right, y1: scale.y(t), y2: scale.y(t) }, chart);
    el("text", { x: M.left - 8, y: scale.y(t) + 4, "text-anchor": "end" }, chart, String(+t.toPrecision(4)));
  }
  el("text", { x: (W + M.left) / 2, y: H - 6, "text-anchor": "middle" }, chart, "step");
  const clip = el("clipPath", { id: "clip" }, el("defs", {}, chart));
  el("rect", { x: M.left, y: M.top, width: W - M.left - M.right, height: H - M.top - M.bottom }, clip);
  const lines = el("g", { "clip-path": "url(#clip)", fill: "none" }, chart);
  for (const run of shown()) {
    const path = run[which.value].filter(p => Number.isFinite(p[1])).map((p, i) => (i ? "L" : "M") + scale.x(p[0]).toFixed(1) + " " + scale.y(p[1]).toFixed(1)).join("");
    el("path", { d: path, stroke: colour(run), "stroke-width": 2, "stroke-dasharray": run.dash }, lines);
  }
  el("line", { id: "hair", class: "grid", y1: M.top, y2: H - M.bottom, visibility: "hidden" }, chart);
}

function read(step, left, top) {
  if (!scale) return;
  const lines = shown().map(run => {
    const near = run[which.value].reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
    return [near[0], run.title + "  " + (Number.isFinite(near[1]) ? near[1].toFixed(3) : "not finite")];
  });
  const hair = document.getElementById("hair"), at = scale.x(step);
  hair.setAttribute("x1", at); hair.setAttribute("x2", at); hair.setAttribute("visibility", "visible");
  tip.textContent = "step " + lines[0][0] + "\n" + lines.map(l => l[1]).join("\n");
  tip.style.display = "block";
  tip.style.left = Math.min(left + 14, innerWidth - tip.offsetWidth - 6) + "px";
  tip.style.top = Math.min(top + 14, innerHeight - tip.offsetHeight - 6) + "px";
}
function toData(event) {
  const r = chart.getBoundingClientRect(), x = (event.clientX - r.left) / r.width * W, y = (event.clientY - r.top) / r.height * H, b = scale.box;
  return { x: b.x0 + (x - M.left) / (W - M.left - M.right) * (b.x1 - b.x0), y: b.y0 + (H - M.bottom - y) / (H - M.top - M.bottom) * (b.y1 - b.y0) };
}
let start = null;
chart.addEventListener("pointerdown", e => { if (scale && e.pointerType === "mouse") start = toData(e); });
chart.addEventListener("pointermove", e => { if (scale) read(Math.min(Math.max(toData(e).x, scale.box.x0), scale.box.x1), e.clientX, e.clientY); });
chart.addEventListener("pointerup", e => {
  if (!start || !scale) return;
  const end = toData(e), b = scale.box;
  if (Math.abs(end.x - start.x) > 0.02 * (b.x1 - b.x0)) {
    view = { x0: Math.max(Math.min(start.x, end.x), b.x0), x1: Math.min(Math.max(start.x, end.x), b.x1), y0: Math.min(start.y, end.y), y1: Math.max(start.y, end.y) };
    if (view.y1 - view.y0 < 0.03 * (b.y1 - b.y0)) { view.y0 = b.y0; view.y1 = b.y1; }
    draw();
  }
  start = null;
});
function away() { tip.style.display = "none"; const hair = document.getElementById("hair"); if (hair) hair.setAttribute("visibility", "hidden"); }
function whole() { view = null; draw(); }
chart.addEventListener("pointerleave", away);
chart.addEventListener("blur", away);
chart.addEventListener("dblclick", whole);
document.getElementById("whole").addEventListener("click", whole);
chart.addEventListener("keydown", e => {
  if (!scale || !["ArrowLeft", "ArrowRight", "Escape"].includes(e.key)) return;
  e.preventDefault();
  if (e.key === "Escape") { away(); whole(); return; }
  const b = scale.box;
  cursor = Math.min(Math.max((cursor || b.x0) + (e.key === "ArrowRight" ? 1 : -1) * (b.x1 - b.x0) / 50, b.x0), b.x1);
  const r = chart.getBoundingClientRect();
  read(cursor, r.left + scale.x(cursor) / W * r.width, r.top + 20);
});
which.addEventListener("change", whole);

const legend = document.querySelector(".legend");
for (const run of data) {
  const button = document.createElement("button"), swatch = document.createElement("span");
  button.type = "button";
  button.setAttribute("aria-pressed", "true");
  swatch.className = "swatch";
  swatch.style.borderTopColor = colour(run);
  swatch.style.borderTopStyle = run.dash === "none" ? "solid" : "dashed";
  button.append(swatch, run.title);
  button.addEventListener("click", () => {
    hidden.has(run.title) ? hidden.delete(run.title) : hidden.add(run.title);
    button.setAttribute("aria-pressed", String(!hidden.has(run.title)));
    draw();
  });
  legend.appendChild(button);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();

const headline = document.getElementById("headline");
headline.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => {
  const head = button.parentElement, up = head.getAttribute("aria-sort") !== "ascending";
  headline.querySelectorAll("th").forEach(th => th.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => { const text = row.cells[column].textContent.trim(), number = parseFloat(text.replace(/,/g, "")); return text === "-" ? null : Number.isNaN(number) ? text : number; };
  const rows = [...headline.tBodies[0].rows].sort((a, b) => {
    const x = value(a), y = value(b);
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return up ? order : -order;
  });
  headline.tBodies[0].append(...rows);
}));
