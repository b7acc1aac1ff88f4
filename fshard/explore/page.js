"use strict";
// The document is that of page.py. `state` is all that a reader has chosen: it is in the URL's fragment, and `draw` shows it.

const began = performance.now();
const data = JSON.parse(document.getElementById("data").textContent);
const plans = data.plans;
const state = { plan: 0, device: 0, leaf: -1, row: -1, zoom: [0, 1], filter: "" };
const get = (id) => document.getElementById(id);
const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const product = (xs) => xs.reduce((a, b) => a * b, 1);
const longest = Math.max(...plans.map((plan) => plan.numbers.seconds)) || 1;
const [LANE, START, END, SECONDS, NAME, BYTES, FLOPS, CALLS, ROW, UNIT] = Array(10).keys();
const chosen = () => plans[state.plan];

// -- text -------------------------------------------------------------------------------------------------------------

const whole = (x) => Math.round(x).toLocaleString("en-US");
function scaled(x, base, units) {
  let i = 0;
  while (Math.abs(x) >= 999.5 * base && i < units.length - 1) { x /= 1000; i += 1; }
  x /= base;
  return `${i && Math.abs(x) < 99.95 ? x.toFixed(Math.abs(x) < 9.995 ? 2 : 1) : whole(x)} ${units[i]}`;
}
const bytes = (x) => scaled(x, 1, ["B", "kB", "MB", "GB", "TB", "PB"]);
const flops = (x) => scaled(x, 1, ["", "k", "M", "G", "T", "P", "E"]) + "FLOP";
function seconds(x) {
  if (x >= 0.9995) return `${x < 99.95 ? x.toPrecision(3) : whole(x)} s`;
  if (!x) return "0 ms";
  return x >= 0.9995e-3 ? `${(x * 1e3).toPrecision(3)} ms` : `${(x * 1e6).toPrecision(3)} µs`;
}
const escaped = (x) => String(x).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const exact = (x, unit = "bytes") => `title="${whole(x)} ${unit}"`;
const square = (colour) => `<i style="background:${colour}"></i>`;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// -- devices and shards -----------------------------------------------------------------------------------------------

const size = (plan) => product(plan.axes.map(([, n]) => n));
function coordinates(plan, device) {
  const found = [];
  for (let i = plan.axes.length - 1; i >= 0; i -= 1) {
    found[i] = device % plan.axes[i][1];
    device = Math.floor(device / plan.axes[i][1]);
  }
  return found;
}
const index = (plan, point) => plan.axes.reduce((device, [, n], i) => device * n + point[i], 0);
const described = (plan, device) => coordinates(plan, device).map((c, i) => `${plan.axes[i][0]} ${c}`).join(" · ");
/** The device of the report that does what a device does. */
const representative = (plan, device) => plan.devices[plan.stage === null ? 0 : coordinates(plan, device)[plan.stage]];
/** The number of the shard that a device has, by its coordinates; -1 if it has none. */
function shardAt(plan, layout, point) {
  const [axes, place] = plan.layouts[layout];
  if (place.some(([axis, c]) => point[axis] !== c)) return -1;
  return axes.reduce((shard, axis) => shard * plan.axes[axis][1] + point[axis], 0);
}
function localShape(plan, leaf, point) {
  let shard = shardAt(plan, leaf[6], point);
  if (shard < 0) return null;
  for (const [count, shape] of plan.layouts[leaf[6]][2]) {
    if (shard < count) return shape;
    shard -= count;
  }
}
/** The arrays of a device, the largest first: [leaf, local shape, bytes]. */
function arraysOf(plan, device) {
  const point = coordinates(plan, device);
  const found = [];
  plan.leaves.forEach((leaf, number) => {
    const shape = leaf[6] < 0 ? null : localShape(plan, leaf, point);
    if (shape) found.push([number, shape, product(shape) * leaf[2]]);
  });
  return found.sort((a, b) => b[2] - a[2]);
}

// -- the mesh ---------------------------------------------------------------------------------------------------------

/** Axes become columns and rows so that the picture is nearest to twice as wide as high; long axes are broken. */
function arrange(axes) {
  const steps = axes.flatMap(([, n], axis) => {
    let inner = n;
    if (n > 32) for (inner = Math.min(32, Math.floor(Math.sqrt(2 * n))); n % inner; inner -= 1);
    return inner === n || inner === 1 ? [{ axis, n, unit: 1 }]
      : [{ axis, n: n / inner, unit: inner }, { axis, n: inner, unit: 1 }];
  });
  let best = null;
  for (let mask = 0; mask < 2 ** steps.length; mask += 1) {
    const [x, y] = [1, 0].map((bit) => steps.filter((_, i) => (mask >> i & 1) === bit));
    const score = Math.abs(Math.log(product(x.map((s) => s.n)) / product(y.map((s) => s.n)) / 2.1));
    if (!best || score < best.score - 1e-9) best = { score, sides: [x, y] };
  }
  const extents = best.sides.map((side) => {
    let extent = 1;
    [...side].reverse().forEach((step, i, inner) => {
      step.stride = extent + (i && inner[i - 1].axis !== step.axis ? 0.4 : 0);
      extent += step.stride * (step.n - 1);
    });
    return extent;
  });
  return { sides: best.sides, extents };
}

function context(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  g.font = "11px system-ui, sans-serif";
  g.textBaseline = "middle";
  return g;
}

let cells = null; // the mesh as drawn: { x, y, w, h } with an entry of x and y for each device

function drawMesh() {
  const plan = chosen();
  const canvas = get("mesh");
  const count = size(plan);
  const { sides, extents } = arrange(plan.axes);
  const labels = sides.map((side) => (side.length ? labelsOf(plan, side[0], side) : []));
  const width = canvas.clientWidth;
  const height = innerWidth <= 900 ? 280 : 340;
  const g = context(canvas, width, height);
  const left = Math.max(0, ...labels[1].map((label) => g.measureText(label).width + 8));
  const top = labels[0].length ? 18 : 0;
  const h = Math.min(52, (height - top - 1) / extents[1]);
  const w = Math.min(150, (width - left - 1) / extents[0], Math.max(h * 3, 8));
  cells = { x: new Float32Array(count), y: new Float32Array(count), w, h };
  const leaf = plan.leaves[state.leaf];
  const fills = colours(plan, leaf);
  const margin = w > 12 && h > 12 ? 2 : w > 4 && h > 4 ? 1 : 0;
  const hasText = w >= 62 && h >= 30;
  const box = (device) => [cells.x[device], cells.y[device], Math.max(w - margin, 0.7), Math.max(h - margin, 0.7)];
  for (let device = 0; device < count; device += 1) {
    const point = coordinates(plan, device);
    const [x, y] = sides.map((side) => sum(side.map((s) => (Math.floor(point[s.axis] / s.unit) % s.n) * s.stride)));
    cells.x[device] = left + x * w;
    cells.y[device] = top + y * h;
    const shard = leaf && leaf[6] >= 0 ? shardAt(plan, leaf[6], point) : null;
    g.fillStyle = fills(device, shard);
    g.fillRect(...box(device));
    if (hasText) {
      g.fillStyle = shard === -1 ? css("muted") : "#16191d";
      const held = shard === null ? bytes(representative(plan, device).peak)
        : shard < 0 ? "none" : `shard ${whole(shard)}`;
      g.fillText(whole(device), cells.x[device] + 6, cells.y[device] + h / 2 - 8);
      g.fillText(held, cells.x[device] + 6, cells.y[device] + h / 2 + 7);
    }
  }
  g.fillStyle = css("muted");
  labels.forEach((texts, side) => texts.forEach((text, i) => {
    const [step] = sides[side];
    const at = i * step.stride;
    if (side) g.fillText(text, 0, top + at * h + Math.min(h * step.stride, h) / 2);
    else if (g.measureText(text).width < step.stride * w - 4 || step.n === 1) g.fillText(text, left + at * w, 8);
    else if (!i) g.fillText(`${text} …`, left, 8);
  }));
  drawEdges(g, plan);
  g.strokeStyle = css("text");
  g.lineWidth = 2;
  g.strokeRect(...box(state.device));
  const words = sides.map((side) => [...new Set(side.map((s) => s.axis))].map((i) => plan.axes[i].join(" ")).join(" × "));
  get("mesh-note").textContent = `${whole(count)} devices${words[0] ? ` · across: ${words[0]}` : ""}`
    + `${words[1] ? ` · down: ${words[1]}` : ""}`;
}

/** Labels of the outermost axis of a side; none where they are too near to each other. */
function labelsOf(plan, step, side) {
  const name = plan.axes[step.axis][0];
  return product(side.map((s) => s.n)) / step.n > 3 || step.n <= 16
    ? Array.from({ length: step.n }, (_, i) => `${name} ${i * step.unit}`) : [];
}

/** A function from a device and its shard of the chosen leaf to a colour; without a leaf: its part of the memory. */
function colours(plan, leaf) {
  const legend = get("mesh-legend");
  const empty = css("empty");
  if (leaf && leaf[6] >= 0) {
    const [axes, place, runs] = plan.layouts[leaf[6]];
    const shards = sum(runs.map(([n]) => n));
    const holders = size(plan) / product(place.map(([axis]) => plan.axes[axis][1]));
    legend.innerHTML = `<span>${escaped(leaf[0])}: ${whole(shards)} ${shards === 1 ? "shard" : "shards"}`
      + `${axes.length ? ` along ${axes.map((axis) => plan.axes[axis][0]).join(", ")}` : ""}, each on `
      + `${whole(holders / shards)} ${holders === shards ? "device" : "devices"}</span>`
      + (place.length ? `<span>${square(empty)}has none</span>` : "");
    return (_, shard) => (shard < 0 ? empty : data.fills[shard % data.fills.length]);
  }
  const peaks = plan.devices.map((device) => device.peak);
  const highest = Math.max(...peaks);
  legend.innerHTML = `<span>${square(data.fills[0])}peak of ${bytes(Math.min(...peaks))}`
    + `${peaks.some((x) => x < highest) ? ` to ${bytes(highest)}` : ""} on each device, `
    + `${whole(100 * highest / plan.capacity)} % of its memory</span>`;
  const mixed = (peak) => `color-mix(in srgb, ${data.fills[0]} ${40 + 60 * peak / highest}%, #eef2f6)`;
  const shades = new Map(plan.devices.map((device) => [device, mixed(device.peak)]));
  return (device) => shades.get(representative(plan, device));
}

/** Lines between devices that exchange bytes in the chosen row; those of the chosen device are thick. */
function drawEdges(g, plan) {
  const row = plan.rows[state.row];
  if (!row) return;
  const axes = row[1].map((name) => plan.axes.findIndex(([axis]) => axis === name));
  const middle = (device) => [cells.x[device] + cells.w / 2, cells.y[device] + cells.h / 2];
  const here = coordinates(plan, state.device);
  const lines = (isChosen) => {
    g.beginPath();
    for (let device = 0; device < size(plan); device += 1) {
      const point = coordinates(plan, device);
      const isMember = point.every((c, i) => axes.includes(i) || c === here[i]);
      if (isMember !== isChosen) continue;
      for (const axis of axes) {
        if (point[axis] + 1 === plan.axes[axis][1]) continue;
        const next = [...point];
        next[axis] += 1;
        g.moveTo(...middle(device));
        g.lineTo(...middle(index(plan, next)));
      }
    }
    g.stroke();
  };
  if (cells.w > 5 && cells.h > 5) {
    [g.strokeStyle, g.lineWidth] = ["#16191d33", 1];
    lines(false);
  }
  [g.strokeStyle, g.lineWidth] = ["#d9480f", cells.h > 12 ? 3 : 2];
  lines(true);
}

function deviceAt(event) {
  const box = get("mesh").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  return cells.x.findIndex((cx, i) => x >= cx && x < cx + cells.w && y >= cells.y[i] && y < cells.y[i] + cells.h);
}

/** Move the chosen device by a row or a column of the picture: to the nearest in that direction. */
function moveDevice(dx, dy) {
  const { x, y } = cells;
  let [best, distance] = [-1, Infinity];
  for (let i = 0; i < x.length; i += 1) {
    const [ahead, aside] = dx ? [(x[i] - x[state.device]) * dx, y[i] - y[state.device]]
      : [(y[i] - y[state.device]) * dy, x[i] - x[state.device]];
    const d = ahead + 100 * Math.abs(aside);
    if (ahead > 0.1 && d < distance) [best, distance] = [i, d];
  }
  if (best >= 0) choose({ device: best });
}

// -- the timeline -----------------------------------------------------------------------------------------------------

const GUTTER = 108;
let lanes = []; // of the timeline as drawn: { y, h, plan, device, lane } with lane -1 for units

function layLanes() {
  const rows = [];
  let y = 2;
  plans.forEach((plan, p) => plan.devices.forEach((device, d) => {
    const hasTitle = plan.devices.length > 1 || plans.length > 1;
    if (hasTitle) {
      const stage = plan.devices.length > 1 ? `${plan.axes[plan.stage][0]} ${d}` : "";
      const title = [plans.length > 1 && !d ? `${"AB"[p]}  ${plan.mesh}` : "", stage].filter(Boolean).join(" · ");
      rows.push({ y, h: 15, plan: p, device: d, title });
      y += 16;
    }
    const h = plan.devices.length > 2 ? 12 : 18;
    rows.push({ y, h: 14, plan: p, device: d, lane: -1 });
    y += 15;
    device.lanes.forEach((_, lane) => { rows.push({ y, h, plan: p, device: d, lane }); y += h + 2; });
    y += 5;
  }));
  return [rows, y];
}
const sameAxis = (name) => [...new Set(plans.flatMap((plan) => plan.devices.flatMap((d) => d.lanes)))]
  .filter((lane) => lane.startsWith("network")).indexOf(name);
function laneColour(name, hasFlops) {
  if (name === "compute") return data.fills[hasFlops ? 0 : 6];
  if (name === "messages") return data.fills[8];
  return name.startsWith("network") ? data.fills[[1, 4, 9, 3, 5][sameAxis(name) % 5]] : data.fills[10];
}

/** A function that is true for events of the chosen row or unit; null if nothing is chosen. */
function highlight(plan) {
  if (plan !== chosen()) return null;
  if (state.row >= 0) return (event) => event[ROW] === state.row;
  const unit = unitOf(plan);
  return unit < 0 ? null : (event) => event[UNIT] === unit;
}
/** The unit of the chosen leaf, by its number among the names of a plan. */
function unitOf(plan) {
  const leaf = plan.leaves[state.leaf];
  return leaf ? plan.names.indexOf(leaf[5] || (leaf[0].startsWith("state") ? "update" : "\0")) : -1;
}

const widthOfTime = () => get("timeline").clientWidth - GUTTER - 2;
function scale() {
  const [a, b] = state.zoom;
  const width = widthOfTime();
  return (t) => GUTTER + (t / longest - a) / (b - a) * width;
}

function drawTimeline() {
  let height;
  [lanes, height] = layLanes();
  const canvas = get("timeline");
  canvas.style.height = `${height}px`;
  const width = canvas.clientWidth;
  const g = context(canvas, width, height);
  const x = scale();
  const [text, muted, accent] = ["text", "muted", "accent"].map(css);
  const units = ["unit-a", "unit-b"].map(css);
  for (const row of lanes) {
    const plan = plans[row.plan];
    const device = plan.devices[row.device];
    const isChosen = plan === chosen() && device === representative(plan, state.device);
    g.fillStyle = row.title && isChosen ? accent : row.title ? text : muted;
    const label = row.title || (row.lane < 0 ? "units" : device.lanes[row.lane].replace("network: ", "↔ "));
    g.fillText(label, 0, row.y + row.h / 2 + 0.5, row.title ? width : GUTTER - 8);
    if (row.title) continue;
    g.save();
    g.beginPath();
    g.rect(GUTTER, row.y, width, row.h);
    g.clip();
    if (row.lane < 0) drawUnits(g, plan, device, row, x, units, text, accent);
    else drawLane(g, plan, device, row, x);
    g.restore();
  }
  drawRuler(width, x);
  drawMemory(width, x);
  drawLegend();
}

function drawUnits(g, plan, device, row, x, units, text, accent) {
  const unit = plan === chosen() ? unitOf(plan) : -1;
  device.units.forEach(([name, start, end], i) => {
    const [a, w] = [x(start), Math.max(x(end) - x(start), 0.6)];
    if (a > g.canvas.width || a + w < GUTTER) return;
    g.fillStyle = name === unit ? accent : units[i % 2];
    g.fillRect(a, row.y, w, row.h);
    if (w < 16) return;
    g.fillStyle = name === unit ? css("panel") : text;
    label(g, plan.names[name], Math.max(a, GUTTER) + 3, row, a + w);
  });
}

function drawLane(g, plan, device, row, x) {
  const lit = highlight(plan);
  const name = device.lanes[row.lane];
  const [strong, light] = [laneColour(name, true), laneColour(name, false)];
  let edge = -1;
  for (const event of device.events) {
    if (event[LANE] !== row.lane) continue;
    const [a, b] = [x(event[START]), x(event[END])];
    if (b < GUTTER || a > g.canvas.width) continue;
    const isLit = !lit || lit(event);
    if (b < edge && !lit) continue;
    edge = Math.floor(b + 0.5);
    g.globalAlpha = isLit ? 1 : 0.16;
    g.fillStyle = event[FLOPS] ? strong : light;
    const w = b - a;
    g.fillRect(a, row.y, Math.max(w - (w > 3 ? 0.7 : 0), 0.7), row.h);
    if (w > 34) {
      g.fillStyle = isLit ? "#16191d" : css("text");
      label(g, plan.names[event[NAME]], Math.max(a, GUTTER) + 3, row, b);
    }
  }
  g.globalAlpha = 1;
}

/** Write a text from x, if it has room up to an end. */
function label(g, text, x, row, end) {
  const room = end - x - 3;
  while (text && g.measureText(text).width > room) text = text.length > 4 ? `${text.slice(0, -2).trimEnd()}…`.replace("……", "…") : "";
  if (text) g.fillText(text, x, row.y + row.h / 2 + 0.5);
}

/** Steps of 1, 2 or 5 times a power of ten, of which about so many are in a range. */
function step(range, count) {
  const raw = range / count;
  const ten = 10 ** Math.floor(Math.log10(raw));
  return ten * [1, 2, 5, 10].find((n) => n * ten >= raw);
}

function drawRuler(width, x) {
  const g = context(get("ruler"), width, 18);
  const [a, b] = state.zoom.map((part) => part * longest);
  const each = step(b - a, Math.max(2, width / 120));
  const [unit, factor] = b - a >= 2 ? ["s", 1] : b - a >= 2e-3 ? ["ms", 1e3] : ["µs", 1e6];
  const digits = Math.max(0, -Math.floor(Math.log10(each * factor) + 1e-9));
  [g.fillStyle, g.strokeStyle] = [css("muted"), css("line")];
  for (let t = Math.ceil(a / each - 1e-9) * each; t <= b; t += each) {
    g.fillRect(x(t), 12, 1, 6);
    g.fillText(`${(t * factor).toFixed(digits)} ${unit}`, x(t) + 3, 8);
  }
}

function drawMemory(width, x) {
  const height = 104;
  const g = context(get("memory"), width, (height + 8) * plans.length);
  const shown = plans.map((plan) => (plan === chosen() ? representative(plan, state.device) : plan.devices[0]));
  const highest = Math.max(...shown.map((device) => device.peak)) * 1.04;
  const [line, muted, text] = ["line", "muted", "text"].map(css);
  shown.forEach((device, p) => {
    const bottom = (height + 8) * p + height;
    const y = (x) => bottom - (height - 10) * x / highest;
    const each = step(highest, 3);
    for (let level = 0; level <= highest; level += each) {
      [g.fillStyle, g.strokeStyle] = [muted, line];
      g.fillRect(GUTTER, y(level), width, level ? 0.5 : 1);
      g.fillText(level ? bytes(level) : "0", GUTTER - 8 - g.measureText(level ? bytes(level) : "0").width, y(level));
    }
    g.fillStyle = text;
    g.fillText(`${plans.length > 1 ? "AB"[p] : ""} memory`.trim(), 0, bottom - height + 16, 50);
    g.save();
    g.beginPath();
    g.rect(GUTTER, bottom - height, width, height);
    g.clip();
    let base = device.memory.map(() => 0);
    data.purposes.forEach((_, k) => {
      const above = device.memory.map((sample, i) => base[i] + sample[k + 1]);
      g.beginPath();
      device.memory.forEach(([t], i) => { // a sample is in use from the one before
        const from = x(i ? device.memory[i - 1][0] : 0);
        g.rect(from, y(above[i]), x(t) - from + 0.3, y(base[i]) - y(above[i]));
      });
      g.fillStyle = data.fills[purposeFill(k)];
      g.fill();
      base = above;
    });
    g.setLineDash([4, 3]);
    [g.strokeStyle, g.lineWidth] = [css("text"), 1];
    g.beginPath();
    g.moveTo(GUTTER, y(device.peak));
    g.lineTo(width, y(device.peak));
    g.stroke();
    g.restore();
  });
}
const purposeFill = (k) => [0, 3, 4, 1, 2, 6, 10][k];

function drawLegend() {
  const names = [...new Set(plans.flatMap((plan) => plan.devices.flatMap((device) => device.lanes)))];
  const used = data.purposes.map((name, k) => [name, k])
    .filter(([, k]) => plans.some((plan) => plan.devices.some((device) => device.memory.some((m) => m[k + 1]))));
  const entry = (colour, name) => `<span>${square(colour)}${escaped(name)}</span>`;
  get("time-legend").innerHTML = entry(laneColour("compute", true), "matrix products")
    + entry(laneColour("compute", false), "other operations")
    + names.filter((name) => name !== "compute").map((name) => entry(laneColour(name), name)).join("")
    + `<span>memory:</span>${used.map(([name, k]) => entry(data.fills[purposeFill(k)], name)).join("")}<span>┄ peak</span>`;
}

function zoomTo(a, b) {
  const length = Math.min(1, Math.max(b - a, 1e-5));
  const start = Math.max(0, Math.min(a, 1 - length));
  choose({ zoom: [start, start + length] });
}
function zoomBy(factor, part = 0.5) {
  const [a, b] = state.zoom;
  const middle = a + (b - a) * part;
  zoomTo(middle - (middle - a) * factor, middle + (b - middle) * factor);
}
function pan(part) {
  const [a, b] = state.zoom;
  zoomTo(a + (b - a) * part, b + (b - a) * part);
}
const partAt = (event) => (event.clientX - get("time").getBoundingClientRect().left - GUTTER) / widthOfTime();

/** The words for what is below the pointer, and the lane. */
function hovered(event) {
  const [a, b] = state.zoom;
  const part = partAt(event);
  const t = (a + part * (b - a)) * longest;
  const slack = 1.5 * (b - a) * longest / widthOfTime();
  if (part < 0) return null;
  if (event.target === get("memory")) return memoryWords(event, t);
  const y = event.clientY - get("timeline").getBoundingClientRect().top;
  const row = lanes.find((each) => !each.title && y >= each.y && y < each.y + each.h + 2);
  if (!row || event.target !== get("timeline")) return null;
  const plan = plans[row.plan];
  const device = plan.devices[row.device];
  if (row.lane < 0) {
    const span = device.units.find(([, start, end]) => t >= start - slack && t <= end + slack);
    return span && { row, text: `<b>unit ${escaped(plan.names[span[0]])}</b>${seconds(span[2] - span[1])}` };
  }
  let found = null;
  for (const each of device.events) {
    const isNear = each[LANE] === row.lane && t >= each[START] - slack && t <= each[END] + slack;
    if (isNear && (!found || each[END] - each[START] > found[END] - found[START])) found = each;
  }
  return found && { row, event: found, text: eventWords(plan, device, found) };
}
function eventWords(plan, device, event) {
  const row = plan.rows[event[ROW]];
  const lines = [`<b>${escaped(plan.names[event[NAME]])}${event[CALLS] > 1 ? ` and ${whole(event[CALLS] - 1)} more` : ""}</b>`];
  if (plan.names[event[UNIT]]) lines.push(`unit ${escaped(plan.names[event[UNIT]])}`);
  const amounts = [seconds(event[SECONDS]), bytes(event[BYTES])];
  if (event[FLOPS]) amounts.push(flops(event[FLOPS]), `${scaled(event[FLOPS] / event[SECONDS], 1, ["", "k", "M", "G", "T", "P"])}FLOP/s`);
  lines.push(amounts.join(" · "), `from ${seconds(event[START])} · ${escaped(device.lanes[event[LANE]])}`);
  if (row) lines.push(`<code>${escaped(row[4])}</code>`);
  return lines.join("<br>");
}
function memoryWords(event, t) {
  const p = Math.min(plans.length - 1, Math.floor(event.offsetY / 112));
  const plan = plans[p];
  const device = plan === chosen() ? representative(plan, state.device) : plan.devices[0];
  const sample = device.memory.find(([end]) => end >= t);
  if (!sample) return null;
  const parts = data.purposes.map((name, k) => [name, sample[k + 1], k]).filter(([, x]) => x);
  return { text: `<b>${bytes(sum(parts.map(([, x]) => x)))} at ${seconds(t)}</b>`
    + parts.map(([name, x, k]) => `${square(data.fills[purposeFill(k)])} ${name} ${bytes(x)}`).join("<br>") };
}

function tip(event, words) {
  const box = get("tip");
  box.hidden = !words;
  if (!words) return;
  box.innerHTML = words;
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8))}px`;
  const below = event.clientY + 18;
  box.style.top = `${below + box.offsetHeight > innerHeight ? Math.max(4, event.clientY - box.offsetHeight - 12) : below}px`;
}

// -- numbers, details, tables -----------------------------------------------------------------------------------------

function drawNumbers() {
  const tiles = [
    ["step", "seconds", seconds], ["peak memory", "peak", bytes], ["of peak FLOP/s", "utilization", (x) => `${(100 * x).toFixed(1)} %`],
    ["sent by a device", "sent", bytes], ["waits for network", "exposed", seconds], ["waits for stages", "idle", seconds],
    ["computation", "compute", seconds],
  ];
  const isUsed = ([, key]) => key !== "idle" || plans.some((plan) => plan.numbers.idle);
  get("numbers").innerHTML = tiles.filter(isUsed).map(([name, key, format]) => {
    const [a, b] = plans.map((plan) => plan.numbers[key]);
    const isOver = (plan) => key === "peak" && plan.numbers.peak > plan.capacity;
    const value = (plan, mark) => `<b${isOver(plan) ? ' class="over"' : ""} title="${plan.numbers[key]}">`
      + `${mark}${format(plan.numbers[key])}${key === "peak" ? ` <em>of ${bytes(plan.capacity)}</em>` : ""}</b>`;
    const change = plans.length > 1 && a ? `<em>${b >= a ? "+" : "−"}${Math.abs(100 * (b / a - 1)).toFixed(1)} %</em>` : "";
    return `<div data-number="${key}"><span>${name} ${change}</span>`
      + `${plans.map((plan, p) => value(plan, plans.length > 1 ? `<em>${"AB"[p]}</em> ` : "")).join("")}</div>`;
  }).join("");
  get("plans").innerHTML = plans.map((plan, p) => (plans.length > 1
    ? `<button data-plan="${p}" aria-pressed="${p === state.plan}">${"AB"[p]} &nbsp;${escaped(plan.mesh)}</button>`
    : `<small>${escaped(plan.mesh)}</small>`)).join("");
}

function table(head, rows) {
  const cell = (tag, [text, kind = "", attributes = ""]) => `<${tag}${kind ? ` class="${kind}"` : ""} ${attributes}>${text}</${tag}>`;
  return `<table><tr>${head.map((each) => cell("th", each)).join("")}</tr>${rows.map(([attributes, ...each]) => (
    `<tr ${attributes}>${each.map((x) => cell("td", x)).join("")}</tr>`)).join("")}</table>`;
}
const MOST = 250;
const more = (count) => (count > MOST ? `<small>${whole(count - MOST)} more: use the filter</small>` : "");

function drawDetails() {
  const plan = chosen();
  const device = representative(plan, state.device);
  const arrays = arraysOf(plan, state.device);
  const total = sum(arrays.map(([, , x]) => x));
  const leaf = plan.leaves[state.leaf];
  const holders = device.holders.map(([x, purpose, site]) => ["", [square(data.fills[purposeFill(data.purposes.indexOf(purpose))])
    + purpose], [bytes(x), "n", exact(x)], [`<code>${escaped(site)}</code>`]]);
  const rows = arrays.slice(0, MOST).map(([number, shape, x]) => [
    `tabindex="0" data-leaf="${number}" aria-selected="${number === state.leaf}"`,
    [escaped(plan.leaves[number][0])], [`<code>[${shape.join(", ")}]</code>`], [bytes(x), "n", exact(x)]]);
  get("details").innerHTML = (leaf ? leafWords(plan, leaf) : "")
    + `<h2>Device ${whole(state.device)} <small>${described(plan, state.device)} · peak ${bytes(device.peak)}</small></h2>`
    + `<h3>At the peak</h3>${table([["for"], ["bytes", "n"], ["source line"]], holders)}`
    + `<h3>${whole(arrays.length)} arrays, ${bytes(total)}</h3>`
    + table([["array"], ["local shape"], ["bytes", "n"]], rows) + more(arrays.length);
}

/** The chosen leaf: its type, its shard on the chosen device, and the times at which its unit is used. */
function leafWords(plan, leaf) {
  const [path, type, item, elements, memory, unit, layout] = leaf;
  const shape = layout < 0 ? null : localShape(plan, leaf, coordinates(plan, state.device));
  const local = layout < 0 ? "the step shards it" : shape ? `[${shape.join(", ")}], ${bytes(product(shape) * item)} on device `
    + `${whole(state.device)}` : `none on device ${whole(state.device)}`;
  const life = lifeOf(plan, leaf).map(([what, start, end]) => [
    `tabindex="0" data-from="${start}" data-to="${end}"`, [what], [seconds(start), "n"], [seconds(end - start), "n"]]);
  return `<h2>${escaped(path)}</h2><code>${escaped(type)}</code><br>${bytes(elements * item)} in all · ${local}`
    + `${memory && memory !== "device" ? ` · in ${memory} memory` : ""}${unit ? ` · unit ${escaped(unit)}` : ""}`
    + (life.length ? `<h3>Life in the step</h3>${table([["event"], ["from", "n"], ["seconds", "n"]], life.slice(0, MOST))}` : "");
}
/** When the unit of a leaf is gathered, used, reduced and updated: [event, start, end]. */
function lifeOf(plan, leaf) {
  const unit = unitOf(plan);
  const stage = plan.stage === null || leaf[6] < 0 ? null : plan.layouts[leaf[6]][1].find(([axis]) => axis === plan.stage);
  const device = stage ? plan.devices[stage[1]] : representative(plan, state.device);
  if (unit < 0) return [];
  const life = device.units.filter(([name]) => name === unit)
    .map(([, start, end]) => [plan.names[unit] === "update" ? "updated" : "used", start, end]);
  for (const event of device.events) {
    if (event[UNIT] !== unit || event[ROW] < 0) continue;
    const row = plan.rows[event[ROW]];
    const kind = { all_gather: "gathered", psum_scatter: "reduced", psum: "reduced" }[row[0]];
    if (kind) life.push([`${kind} along ${row[1].join(", ")}`, event[START], event[END]]);
  }
  if (leaf[0].startsWith("params")) {
    device.units.filter(([name]) => plan.names[name] === "update").forEach(([, start, end]) => life.push(["updated", start, end]));
  }
  return life.sort((a, b) => a[1] - b[1]);
}

function secondsOfRow(plan, number) {
  return Math.max(...plan.devices.map((device) => sum(device.events.filter((e) => e[ROW] === number).map((e) => e[SECONDS]))));
}
function drawLedger() {
  const plan = chosen();
  get("ledger").outerHTML = table(
    [["collective"], ["axis"], ["calls", "n"], ["bytes sent", "n"], ["seconds", "n"], ["source line"]],
    plan.rows.map(([collective, axes, calls, sent, site], number) => [
      `tabindex="0" data-row="${number}" aria-selected="${number === state.row}"`, [collective], [escaped(axes.join(", "))],
      [whole(calls), "n"], [bytes(sent), "n", exact(sent)], [seconds(secondsOfRow(plan, number)), "n"],
      [`<code>${escaped(site)}</code>`]])).replace("<table", '<table id="ledger"');
  const row = plan.rows[state.row];
  get("ledger-note").textContent = row ? `${row[0]} along ${row[1].join(", ")}: ${bytes(row[3])} from each device of a group of `
    + `${whole(product(row[1].map((axis) => plan.axes.find(([name]) => name === axis)[1])))}` : `${bytes(plan.numbers.sent)} sent by a device`;
}

const matching = (plan) => plan.leaves.map((leaf, number) => [leaf, number])
  .filter(([leaf]) => state.filter.toLowerCase().split(/\s+/).every((word) => `${leaf[0]} ${leaf[1]}`.toLowerCase().includes(word)));
function drawLeaves() {
  const plan = chosen();
  const found = matching(plan);
  get("leaves").outerHTML = table([["path"], ["type"], ["unit"], ["bytes in all", "n"]], found.slice(0, MOST).map(([leaf, number]) => [
    `tabindex="0" data-leaf="${number}" aria-selected="${number === state.leaf}"`, [escaped(leaf[0])],
    [`<code>${escaped(leaf[1])}</code>`], [escaped(leaf[5])], [bytes(leaf[2] * leaf[3]), "n", exact(leaf[2] * leaf[3])],
  ])).replace("<table", '<table id="leaves"') + more(found.length);
  get("leaves").parentElement.querySelectorAll("#leaves ~ small:not(:last-of-type)").forEach((each) => each.remove());
  get("leaves-note").textContent = `${whole(found.length)} of ${whole(plan.leaves.length)}`;
}

// -- exports ----------------------------------------------------------------------------------------------------------

function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text]));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
const csv = (rows) => rows.map((row) => row.map((x) => (/[",\n]/.test(x) ? `"${String(x).replace(/"/g, '""')}"` : x)).join(",")).join("\n") + "\n";
const ledgerCsv = (plan) => csv([["collective", "axes", "calls", "bytes", "source line"],
  ...plan.rows.map(([name, axes, ...rest]) => [name, axes.join("+"), ...rest])]);
const leavesCsv = (plan) => csv([["path", "type", "bytes", "unit", "bytes on the chosen device"], ...plan.leaves.map((leaf) => {
  const shape = leaf[6] < 0 ? null : localShape(plan, leaf, coordinates(plan, state.device));
  return [leaf[0], leaf[1], leaf[2] * leaf[3], leaf[5], shape ? product(shape) * leaf[2] : 0];
})]);
function traceJson() {
  const events = [];
  plans.forEach((plan, p) => plan.devices.forEach((device) => {
    const pid = p * 1e6 + device.number;
    const named = (name, value, tid = 0) => events.push({ ph: "M", pid, tid, name, args: { name: value } });
    named("process_name", `${plan.mesh} device ${device.number}`);
    ["units", ...device.lanes].forEach((lane, tid) => named("thread_name", lane, tid));
    for (const [unit, start, end] of device.units) {
      events.push({ ph: "X", pid, tid: 0, name: plan.names[unit], ts: start * 1e6, dur: (end - start) * 1e6 });
    }
    for (const e of device.events) {
      const args = { unit: plan.names[e[UNIT]], bytes: e[BYTES], flops: e[FLOPS], calls: e[CALLS], line: (plan.rows[e[ROW]] || [])[4] };
      events.push({ ph: "X", pid, tid: e[LANE] + 1, name: plan.names[e[NAME]], ts: e[START] * 1e6, dur: (e[END] - e[START]) * 1e6, args });
    }
    for (const [t, ...values] of device.memory) {
      const args = Object.fromEntries(data.purposes.map((name, k) => [name, values[k]]));
      events.push({ ph: "C", pid, name: "memory", ts: t * 1e6, args });
    }
  }));
  return JSON.stringify({ displayTimeUnit: "ms", traceEvents: events });
}

// -- state ------------------------------------------------------------------------------------------------------------

/** Change the state, write it into the URL, and draw what depends on it. */
function choose(change) {
  if ("plan" in change && change.plan !== state.plan) {
    const path = (chosen().leaves[state.leaf] || [])[0];
    const leaf = plans[change.plan].leaves.findIndex(([each]) => each === path);
    change = { device: Math.min(state.device, size(plans[change.plan]) - 1), leaf, row: -1, ...change };
  }
  Object.assign(state, change);
  const leaf = chosen().leaves[state.leaf];
  const parts = { plan: state.plan || "", device: state.device || "", leaf: leaf ? leaf[0] : "", row: state.row < 0 ? "" : state.row,
    zoom: state.zoom[1] - state.zoom[0] < 1 ? state.zoom.map((x) => +x.toFixed(6)).join("-") : "", filter: state.filter };
  const used = Object.entries(parts).filter(([, value]) => value !== "");
  const fragment = `#${new URLSearchParams(used)}`;
  try { history.replaceState(null, "", fragment); } catch { /* a page in a frame has no URL of its own */ }
  const keys = Object.keys(change);
  const isTime = keys.every((key) => key === "zoom");
  if (isTime) drawTimeline();
  else if (keys.every((key) => key === "filter")) drawLeaves();
  else draw();
}
function read() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const bounded = (name, end) => Math.max(0, Math.min(+parts.get(name) || 0, end - 1));
  state.plan = bounded("plan", plans.length);
  state.device = bounded("device", size(chosen()));
  state.leaf = chosen().leaves.findIndex(([path]) => path === parts.get("leaf"));
  state.row = parts.has("row") ? bounded("row", chosen().rows.length) : -1;
  const zoom = (parts.get("zoom") || "").split("-").map(Number);
  state.zoom = zoom.length === 2 && zoom[0] >= 0 && zoom[0] < zoom[1] && zoom[1] <= 1 ? zoom : [0, 1];
  get("filter").value = state.filter = parts.get("filter") || "";
}
function draw() {
  const focused = document.activeElement.closest("tr[tabindex]");
  const place = focused && [focused.closest(".table, .scrolled").firstElementChild.id, focused.rowIndex];
  const scrolls = [...document.querySelectorAll(".table")].map((each) => each.scrollTop);
  drawNumbers();
  drawMesh();
  drawDetails();
  drawTimeline();
  drawLedger();
  drawLeaves();
  document.querySelectorAll(".table").forEach((each, i) => { each.scrollTop = scrolls[i]; });
  if (place && get(place[0])) get(place[0]).rows[place[1]]?.focus({ preventScroll: true });
}

function pick(element) {
  const row = element.closest("[data-row], [data-leaf], [data-from], [data-plan]");
  if (!row) return;
  const { row: number, leaf, from, to, plan } = row.dataset;
  if (plan) choose({ plan: +plan });
  if (number) choose({ row: +number === state.row ? -1 : +number, leaf: -1 });
  if (leaf) choose({ leaf: +leaf === state.leaf ? -1 : +leaf, row: -1 });
  if (from) {
    const length = Math.max(to - from, longest * 1e-3);
    zoomTo((+from - 2 * length) / longest, (+to + 2 * length) / longest);
  }
}

document.addEventListener("click", (event) => pick(event.target));
document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  const row = target.closest("tr[tabindex]");
  const arrow = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (key === "Escape") {
    tip(event, "");
    choose(state.leaf >= 0 || state.row >= 0 ? { leaf: -1, row: -1 } : { zoom: [0, 1], filter: "" });
    get("filter").value = state.filter;
  } else if (row && (key === "Enter" || key === " ")) pick(row);
  else if (row && arrow && arrow[1]) (arrow[1] < 0 ? row.previousElementSibling : row.nextElementSibling)?.focus();
  else if (target === get("mesh") && arrow) moveDevice(...arrow);
  else if (target === get("time") && arrow && arrow[0]) pan(0.2 * arrow[0]);
  else if (target === get("time") && arrow) moveStage(arrow[1]);
  else if (target === get("time") && "+=-_".includes(key)) zoomBy("+=".includes(key) ? 0.6 : 1 / 0.6);
  else if (target === get("time") && (key === "0" || key === "Home")) zoomTo(0, 1);
  else return;
  event.preventDefault();
});
/** Choose the device of the next stage, or the other plan. */
function moveStage(by) {
  const plan = chosen();
  const at = plan.devices.indexOf(representative(plan, state.device)) + by;
  if (plan.devices[at]) choose({ device: plan.devices[at].number });
  else if (plans[state.plan + by]) choose({ plan: state.plan + by });
}

get("mesh").addEventListener("click", (event) => {
  const device = deviceAt(event);
  if (device >= 0) choose({ device });
});
get("mesh").addEventListener("mousemove", (event) => {
  const device = deviceAt(event);
  const plan = chosen();
  tip(event, device < 0 ? "" : `<b>device ${whole(device)}</b>${described(plan, device)}<br>peak ${bytes(representative(plan, device).peak)}`);
});
for (const id of ["mesh", "time"]) get(id).addEventListener("mouseleave", (event) => { tip(event, ""); get("cursor").style.display = "none"; });

let dragged = null; // the pointer's x and the zoom where a drag began
get("time").addEventListener("pointerdown", (event) => { dragged = { x: event.clientX, zoom: [...state.zoom], isMoved: false }; });
addEventListener("pointerup", () => { setTimeout(() => { dragged = null; }); });
get("time").addEventListener("pointermove", (event) => {
  const cursor = get("cursor");
  cursor.style.display = partAt(event) >= 0 && partAt(event) <= 1 ? "block" : "none";
  cursor.style.left = `${event.clientX - get("time").getBoundingClientRect().left}px`;
  if (!dragged || !event.buttons) return tip(event, hovered(event)?.text);
  const [a, b] = dragged.zoom;
  const by = (dragged.x - event.clientX) / widthOfTime() * (b - a);
  dragged.isMoved ||= Math.abs(dragged.x - event.clientX) > 3;
  if (dragged.isMoved) zoomTo(a + by, b + by);
});
get("time").addEventListener("click", (event) => {
  if (dragged?.isMoved) return;
  const found = hovered(event);
  const row = found?.row;
  if (!row) return;
  const plan = plans[row.plan];
  const isSame = plan === chosen() && plan.devices[row.device] === representative(plan, state.device);
  const device = isSame ? state.device : plan.devices[row.device].number;
  choose({ plan: row.plan, device, row: found.event ? found.event[ROW] : -1, leaf: -1 });
});
get("time").addEventListener("dblclick", () => zoomTo(0, 1));
get("time").addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) zoomBy(event.deltaY < 0 ? 0.8 : 1.25, Math.max(0, Math.min(1, partAt(event))));
  else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / widthOfTime());
  else return;
  event.preventDefault();
}, { passive: false });
get("zoom-in").onclick = () => zoomBy(0.5);
get("zoom-out").onclick = () => zoomBy(2);
get("zoom-all").onclick = () => zoomTo(0, 1);
get("filter").oninput = (event) => choose({ filter: event.target.value });
get("save-ledger").onclick = () => save("ledger.csv", ledgerCsv(chosen()));
get("save-leaves").onclick = () => save("leaves.csv", leavesCsv(chosen()));
get("save-trace").onclick = () => save("trace.json", traceJson());
addEventListener("hashchange", () => { read(); draw(); });
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

read();
draw();
document.documentElement.dataset.drawn = (performance.now() - began).toFixed(0);
