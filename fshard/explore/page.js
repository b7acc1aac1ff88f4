"use strict";
// Draws the document of page.py. `state` is all that a reader has chosen, and is in the URL's fragment.

const began = performance.now();
const get = (id) => document.getElementById(id);
const data = JSON.parse(get("data").textContent);
const { plans, fills } = data;
const state = { plan: 0, device: 0, leaf: -1, row: -1, zoom: [0, 1], filter: "" };
const [LANE, START, END, SECONDS, NAME, BYTES, FLOPS, CALLS, ROW, UNIT] = Array(10).keys(); // fields of an event
const INK = "#16191d"; // on fills
const MOST = 250; // rows of a table
const longest = Math.max(...plans.map((plan) => plan.numbers.seconds));
const chosen = () => plans[state.plan];
const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const product = (xs) => xs.reduce((a, b) => a * b, 1);

// -- text -------------------------------------------------------------------------------------------------------------
const integer = (x) => Math.round(x).toLocaleString("en-US");
const digits = (x) => (x < 9.995 ? x.toFixed(2) : x < 99.95 ? x.toFixed(1) : integer(x));
function scaled(x, unit) {
  const power = x < 999.5 ? 0 : Math.min(6, Math.floor(Math.log10(x * 1.0005) / 3));
  return `${power ? digits(x / 1000 ** power) : integer(x)} ${["", "k", "M", "G", "T", "P", "E"][power]}${unit}`;
}
const bytes = (x) => scaled(x, "B");
function seconds(x) {
  const [unit, factor] = x >= 0.9995 ? ["s", 1] : x >= 0.9995e-3 || !x ? ["ms", 1e3] : ["µs", 1e6];
  return `${digits(x * factor)} ${unit}`;
}
const escaped = (x) => String(x).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const code = (x) => `<code>${escaped(x)}</code>`;
const square = (colour) => `<i style="background:${colour}"></i>`;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const percent = (x) => `${(100 * x).toFixed(1)} %`;
const plural = (n, noun) => `${integer(n)} ${noun}${n === 1 ? "" : "s"}`;

// -- devices and shards -----------------------------------------------------------------------------------------------
const axisSize = (plan, axis) => plan.axes[axis][1];
const meshSize = (plan) => product(plan.axes.map(([, n]) => n));
function coordinates(plan, device) {
  const point = [];
  for (let axis = plan.axes.length - 1; axis >= 0; axis -= 1) {
    point[axis] = device % axisSize(plan, axis);
    device = Math.floor(device / axisSize(plan, axis));
  }
  return point;
}
const deviceOf = (plan, point) => point.reduce((device, c, axis) => device * axisSize(plan, axis) + c, 0);
const written = (plan, device) => coordinates(plan, device).map((c, axis) => `${plan.axes[axis][0]} ${c}`).join(" · ");
/** The device of the report that does what a device does. */
const representative = (plan, device) => plan.devices[plan.stage === null ? 0 : coordinates(plan, device)[plan.stage]];
/** The number of the shard of a leaf that the device at a point has; -1 if it has none, null without a layout. */
function shardAt(plan, leaf, point) {
  if (!leaf || leaf.layout < 0) return null;
  const { axes, place } = plan.layouts[leaf.layout];
  if (place.some(([axis, c]) => point[axis] !== c)) return -1;
  return axes.reduce((shard, axis) => shard * axisSize(plan, axis) + point[axis], 0);
}
function localShape(plan, leaf, device) {
  let shard = shardAt(plan, leaf, coordinates(plan, device));
  if (shard === null || shard < 0) return null;
  return plan.layouts[leaf.layout].shapes.find(([count]) => (shard -= count) < 0)[1];
}
const localBytes = (plan, leaf, device) => product(localShape(plan, leaf, device) || [0]) * leaf.item;

// -- the mesh ---------------------------------------------------------------------------------------------------------
function context(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height, canvas.style.height] = [width * ratio, height * ratio, `${height}px`];
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  [g.font, g.textBaseline] = ["11px system-ui, sans-serif", "middle"];
  return g;
}
/** Make axes columns and rows, so that the picture is about twice as wide as high; long axes are broken in two. */
function arrange(axes) {
  const steps = axes.flatMap(([, n], axis) => {
    let unit = n > 32 ? Math.min(32, Math.floor(Math.sqrt(2 * n))) : 1;
    while (n % unit) unit -= 1;
    return unit > 1 ? [{ axis, n: n / unit, unit }, { axis, n: unit, unit: 1 }] : [{ axis, n, unit }];
  });
  const divide = (_, mask) => [1, 0].map((bit) => steps.filter((_, i) => (mask >> i & 1) === bit));
  const count = (side) => product(side.map((s) => s.n));
  const error = ([x, y]) => Math.abs(Math.log(count(x) / count(y) / 2.1));
  const sides = Array.from({ length: 2 ** steps.length }, divide).reduce((a, b) => (error(b) < error(a) ? b : a));
  const extents = sides.map((side) => side.reduceRight((extent, step, i) => {
    const hasGap = i + 1 < side.length && side[i + 1].axis !== step.axis;
    step.stride = extent + (hasGap ? 0.25 + 0.05 * extent : 0);
    return extent + step.stride * (step.n - 1);
  }, 1));
  return { sides, extents };
}

let cells = null; // the mesh as drawn: { x, y, w, h }, with entries of x and y for each device
function drawMesh() {
  const [plan, leaf] = [chosen(), chosen().leaves[state.leaf]];
  const { sides, extents } = arrange(plan.axes);
  const width = get("mesh").clientWidth;
  const label = (side, i) => `${plan.axes[sides[side][0].axis][0]} ${i * sides[side][0].unit}`;
  const [left, top] = [sides[1].length ? 8 + 6.3 * label(1, sides[1][0].n).length : 0, sides[0].length ? 18 : 0];
  const h = Math.min(64, (innerWidth > 900 ? 322 : 262) / extents[1]);
  const w = Math.min(150, (width - left - 1) / extents[0], Math.max(h * 3, 8));
  const g = context(get("mesh"), width, Math.max(top + h * extents[1] + 2, 60));
  const gap = Math.min(w, h) > 12 ? 2 : Math.min(w, h) > 4 ? 1 : 0;
  const fillOf = colours(plan, leaf);
  cells = { x: [], y: [], w, h };
  for (let device = 0; device < meshSize(plan); device += 1) {
    const point = coordinates(plan, device);
    const [x, y] = sides.map((side) => sum(side.map((s) => (Math.floor(point[s.axis] / s.unit) % s.n) * s.stride)));
    [cells.x[device], cells.y[device]] = [left + x * w, top + y * h];
    const shard = shardAt(plan, leaf, point);
    g.fillStyle = fillOf(device, shard);
    g.fillRect(cells.x[device], cells.y[device], Math.max(w - gap, 0.7), Math.max(h - gap, 0.7));
    if (w < 52 || h < 30) continue;
    g.fillStyle = shard === -1 ? css("muted") : INK;
    const held = shard < 0 ? "none" : `shard ${integer(shard)}`;
    const lines = [integer(device), shard === null ? bytes(representative(plan, device).peak) : held];
    lines.forEach((line, i) => g.fillText(line, cells.x[device] + 5, cells.y[device] + 11 + 14 * i));
  }
  g.fillStyle = css("muted");
  sides.forEach(([step], side) => { // as many labels of the outermost axis as have room
    const room = step && [g.measureText(label(side, step.n)).width + 8, 13][side] / (step.stride * [w, h][side]);
    for (let i = 0; step && i < step.n; i += Math.ceil(room)) {
      const [x, y] = side ? [0, top + i * step.stride * h + h / 2] : [left + i * step.stride * w, 8];
      g.fillText(label(side, i), x, y);
    }
  });
  drawEdges(g, plan);
  [g.strokeStyle, g.lineWidth] = [css("text"), 2];
  g.strokeRect(cells.x[state.device], cells.y[state.device], Math.max(w - gap, 2), Math.max(h - gap, 2));
  const [across, down] = sides.map((side) => [...new Set(side.map((s) => plan.axes[s.axis].join(" ")))].join(" × "));
  const words = [plural(meshSize(plan), "device"), across && `across: ${across}`, down && `down: ${down}`];
  get("mesh-note").textContent = words.filter(Boolean).join(" · ");
}
/** Return the colours of devices: by the shard of a leaf, or by peak memory; and write the legend. */
function colours(plan, leaf) {
  const empty = css("empty");
  if (leaf && leaf.layout >= 0) {
    const { axes, place, shapes } = plan.layouts[leaf.layout];
    const shards = sum(shapes.map(([count]) => count));
    const owners = meshSize(plan) / product(place.map(([axis]) => axisSize(plan, axis)));
    const along = axes.length ? ` along ${axes.map((axis) => plan.axes[axis][0]).join(", ")}` : "";
    get("mesh-legend").innerHTML = `<span>${escaped(leaf.path)}: ${plural(shards, "shard")}${along}, each on `
      + `${plural(owners / shards, "device")}</span>${place.length ? `<span>${square(empty)}has none</span>` : ""}`;
    return (_, shard) => (shard < 0 ? empty : fills[shard % fills.length]);
  }
  const peaks = plan.devices.map((device) => device.peak);
  const [lowest, highest] = [Math.min(...peaks), Math.max(...peaks)];
  const range = [...new Set([lowest, highest])].map(bytes).join(" to ");
  const fraction = percent(highest / plan.capacity);
  get("mesh-legend").innerHTML = `<span>${square(fills[0])}peak ${range}, ${fraction} of a device's memory</span>`;
  const opacity = (peak) => Math.round(highest > lowest ? 140 + 115 * (peak - lowest) / (highest - lowest) : 255);
  return (device) => fills[0] + opacity(representative(plan, device).peak).toString(16);
}
/** Draw lines between neighbours of the groups that the chosen row is along; those of the chosen device are thick. */
function drawEdges(g, plan) {
  if (state.row < 0) return;
  const along = plan.axes.flatMap(([name], axis) => (plan.rows[state.row].axes.includes(name) ? [axis] : []));
  const here = coordinates(plan, state.device);
  const hasText = cells.w >= 52 && cells.h >= 30;
  const [dx, dy] = hasText ? [cells.w - 9, cells.h - 9] : [cells.w / 2, cells.h / 2];
  const end = (device) => [cells.x[device] + dx, cells.y[device] + dy];
  for (const isHere of cells.w > 5 && cells.h > 5 ? [false, true] : [true]) {
    [g.strokeStyle, g.lineWidth] = isHere ? ["#d9480f", cells.h > 12 ? 3 : 2] : [`${INK}40`, 1];
    g.beginPath();
    for (let device = 0; device < meshSize(plan); device += 1) {
      const point = coordinates(plan, device);
      if (point.every((c, axis) => along.includes(axis) || c === here[axis]) !== isHere) continue;
      for (const axis of along.filter((each) => point[each] + 1 < axisSize(plan, each))) {
        g.moveTo(...end(device));
        g.lineTo(...end(deviceOf(plan, point.map((c, i) => c + (i === axis)))));
      }
    }
    g.stroke();
  }
}
function deviceAt({ offsetX, offsetY }) {
  const { x, y, w, h } = cells;
  return x.findIndex((left, i) => offsetX >= left && offsetX < left + w && offsetY >= y[i] && offsetY < y[i] + h);
}
/** Choose the next device of a row or a column of the picture. */
function moveDevice([dx, dy]) {
  const [{ x, y }, here] = [cells, state.device];
  const ahead = (i) => (x[i] - x[here]) * dx + (y[i] - y[here]) * dy;
  const next = x.map((_, i) => i).filter((i) => ahead(i) > 0.1 && Math.abs(dx ? y[i] - y[here] : x[i] - x[here]) < 0.1);
  if (next.length) choose({ device: next.reduce((a, b) => (ahead(b) < ahead(a) ? b : a)) });
}

// -- the timeline -----------------------------------------------------------------------------------------------------
const [GUTTER, MEMORY] = [108, 112]; // the width of the names of lanes, the height of a memory curve
const purposeFill = (k) => fills[[0, 3, 4, 1, 2, 6, 8, 10][k]];
let lanes = []; // of the timeline as drawn: { y, h, plan, device, lane, name }, or { y, h, plan, device, title }
const allLanes = [...new Set(plans.flatMap((plan) => plan.devices.flatMap((device) => device.lanes)))].slice(1);
const networks = allLanes.filter((name) => name.startsWith("network"));
function layLanes() {
  lanes = [];
  let y = 2;
  const add = (row) => { lanes.push({ y, ...row }); y += row.h + 2; };
  plans.forEach((plan, p) => plan.devices.forEach((device, d) => {
    const titles = plans.length > 1 ? [`${"AB"[p]}  ${plan.mesh}`] : [];
    if (plan.devices.length > 1) titles.push(`${plan.axes[plan.stage][0]} ${d}`);
    if (titles.length) add({ h: 14, plan, device, title: titles.join(" · ") });
    const h = plan.devices.length > 2 ? 11 : 18;
    device.lanes.forEach((name, lane) => add({ h: lane ? h : 13, plan, device, lane, name }));
    y += 4;
  }));
  return y;
}
function laneColour(name, hasFlops) {
  if (name === "compute") return fills[hasFlops ? 0 : 6];
  const network = networks.indexOf(name);
  return fills[network < 0 ? (name === "messages" ? 8 : 10) : [1, 4, 9, 3, 5][network % 5]];
}
/** The number of the unit of the chosen leaf among the names of a plan; of the optimizer's state it is the update. */
function unitOf(plan) {
  const leaf = plan.leaves[state.leaf];
  return leaf ? plan.names.indexOf(leaf.path.startsWith("state") ? "update" : leaf.unit || "\0") : -1;
}
/** Return a function that is true for events of the chosen row or unit; null if none is chosen. */
function highlight(plan) {
  const unit = unitOf(plan);
  if (plan !== chosen() || (state.row < 0 && unit < 0)) return null;
  return state.row >= 0 ? (event) => event[ROW] === state.row : (event) => event[UNIT] === unit;
}
const timeWidth = () => get("timeline").clientWidth - GUTTER - 2;
const xOf = (t) => GUTTER + (t / longest - state.zoom[0]) / (state.zoom[1] - state.zoom[0]) * timeWidth();
function drawTimeline() {
  const width = get("timeline").clientWidth;
  const g = context(get("timeline"), width, layLanes());
  const [text, muted, accent, ...shades] = ["text", "muted", "accent", "unit-a", "unit-b"].map(css);
  for (const row of lanes) {
    const isChosen = row.plan === chosen() && row.device === representative(row.plan, state.device);
    g.fillStyle = row.title ? (isChosen ? accent : text) : muted;
    g.fillText(row.title || row.name.replace("network: ", "↔ "), 0, row.y + row.h / 2, row.title ? 600 : GUTTER - 8);
    if (!row.title) drawLane(g, row, width, text, shades);
  }
  drawRuler(width);
  drawMemory(width);
}
function clip(g, y, width, h) {
  g.save();
  g.beginPath();
  g.rect(GUTTER, y, width, h);
  g.clip();
}
/** Return a text, or as much of it as fits into a width; "" if nothing does, or if the width is negative. */
function shortened(g, text, width) {
  while (text && g.measureText(text).width > width) text = text.length > 3 ? `${text.slice(0, -2)}…` : "";
  return text;
}
function drawLane(g, { plan, device, lane, name, y, h }, width, text, shades) {
  const isChosen = highlight(plan);
  let edge = -1; // events that end in the last pixel are not drawn
  clip(g, y, width, h);
  device.events.filter((event) => event[LANE] === lane).forEach((event, i) => {
    const [a, b] = [xOf(event[START]), xOf(event[END])];
    const isLit = !isChosen || isChosen(event);
    if (b < GUTTER || a > width || (b < edge && !(isChosen && isLit))) return;
    edge = Math.ceil(b);
    const isFilled = lane || (isChosen && isLit);
    g.globalAlpha = isLit ? 1 : lane ? 0.16 : 0.6;
    g.fillStyle = isFilled ? laneColour(lane ? name : "compute", event[FLOPS]) : shades[i % 2];
    g.fillRect(a, y, Math.max(b - a - (b - a > 3 ? 0.7 : 0), 0.7), h);
    if (b - a < (lane ? 34 : 15)) return;
    g.fillStyle = isFilled && isLit ? INK : text;
    const from = Math.max(a, GUTTER) + 3;
    g.fillText(shortened(g, plan.names[event[NAME]], b - from - 3), from, y + h / 2 + 0.5);
  });
  g.restore();
}
/** Return 1, 2 or 5 times a power of ten, of which a range has at most a number. */
function tick(range, count) {
  const ten = 10 ** Math.floor(Math.log10(range / count));
  return ten * [1, 2, 5, 10].find((n) => n * ten >= range / count * 0.999);
}
function drawRuler(width) {
  const g = context(get("ruler"), width, 18);
  const [a, b] = state.zoom.map((x) => x * longest);
  const each = tick(b - a, Math.max(2, width / 120));
  const [unit, factor] = b - a >= 2 ? ["s", 1] : b - a >= 2e-3 ? ["ms", 1e3] : ["µs", 1e6];
  const decimals = Math.max(0, -Math.floor(Math.log10(each * factor) + 1e-9));
  g.fillStyle = css("muted");
  for (let t = Math.ceil(a / each) * each; t <= b; t += each) {
    g.fillRect(xOf(t), 12, 1, 6);
    g.fillText(`${(t * factor).toFixed(decimals)} ${unit}`, xOf(t) + 3, 8);
  }
}
const shown = () => plans.map((plan) => (plan === chosen() ? representative(plan, state.device) : plan.devices[0]));
function drawMemory(width) {
  const g = context(get("memory"), width, MEMORY * plans.length);
  const highest = Math.max(...shown().map((device) => device.peak)) * 1.04;
  const [line, muted, text] = ["line", "muted", "text"].map(css);
  shown().forEach((device, p) => {
    const y = (x) => MEMORY * (p + 1) - 6 - (MEMORY - 18) * x / highest;
    g.fillStyle = text;
    g.fillText(plans.length > 1 ? `${"AB"[p]} memory` : "memory", 0, y(highest) + 2, 50);
    for (let level = 0; level <= highest; level += tick(highest, 3)) {
      g.fillStyle = line;
      g.fillRect(GUTTER, y(level), width, 1);
      g.fillStyle = muted;
      g.fillText(bytes(level), GUTTER - 8 - g.measureText(bytes(level)).width, y(level));
    }
    clip(g, MEMORY * p, width, MEMORY);
    for (let k = data.purposes.length; k > 0; k -= 1) { // the sum of k purposes, over that of more
      g.beginPath();
      device.memory.forEach((sample, i) => { // what is in use after an operation is drawn before its end
        const [from, top] = [xOf(i ? device.memory[i - 1][0] : 0), y(sum(sample.slice(1, k + 1)))];
        g.rect(from, top, xOf(sample[0]) - from, y(0) - top);
      });
      g.fillStyle = purposeFill(k - 1);
      g.fill();
    }
    g.fillStyle = text;
    for (let x = GUTTER; x < width; x += 7) g.fillRect(x, y(device.peak), 4, 1);
    g.restore();
  });
}
function drawLegend() {
  const entry = (colour, name) => `<span>${square(colour)}${escaped(name)}</span>`;
  const samples = plans.flatMap((plan) => plan.devices.flatMap((device) => device.memory));
  const purposes = data.purposes.map((name, k) => samples.some((x) => x[k + 1]) && entry(purposeFill(k), name));
  get("time-legend").innerHTML = [entry(fills[0], "matrix products"), entry(fills[6], "other operations"),
    ...allLanes.filter((name) => name !== "compute").map((name) => entry(laneColour(name), name)),
    "<span>memory:</span>", ...purposes.filter(Boolean), "<span>┄ peak</span>"].join("");
}
function zoomTo(a, b) {
  const length = Math.min(1, Math.max(b - a, 1e-5));
  const start = Math.max(0, Math.min(a, 1 - length));
  choose({ zoom: [start, start + length] });
}
/** Zoom by a factor about a fraction of the width, and move by a fraction of it. */
function zoomBy(factor, centre = 0.5, move = 0) {
  const [a, b] = state.zoom;
  const [middle, by] = [a + (b - a) * centre, (b - a) * move];
  zoomTo(middle - (middle - a) * factor + by, middle + (b - middle) * factor + by);
}
const fractionAt = (event) => (event.clientX - get("time").getBoundingClientRect().left - GUTTER) / timeWidth();
/** Return what is below the pointer: its lane, its event, and words about it. */
function hovered(event) {
  const range = (state.zoom[1] - state.zoom[0]) * longest;
  const [t, slack] = [state.zoom[0] * longest + fractionAt(event) * range, 2 * range / timeWidth()];
  if (fractionAt(event) < 0) return null;
  if (event.target === get("memory")) {
    const [end, ...sizes] = shown()[Math.floor(event.offsetY / MEMORY)]?.memory.find((sample) => sample[0] >= t) || [];
    const words = sizes.map((x, k) => x && `${square(purposeFill(k))} ${data.purposes[k]} ${bytes(x)}`);
    return end && { text: `<b>${bytes(sum(sizes))} at ${seconds(t)}</b>${words.filter(Boolean).join("<br>")}` };
  }
  const row = lanes.find(({ y, h }) => event.offsetY >= y && event.offsetY < y + h + 2);
  if (event.target !== get("timeline") || !row || row.title) return null;
  const near = row.device.events.filter((e) => e[LANE] === row.lane && t >= e[START] - slack && t <= e[END] + slack);
  const longer = near.reduce((a, b) => (a && a[SECONDS] >= b[SECONDS] ? a : b), null);
  return longer && { row, event: longer, text: eventWords(row, longer) };
}
function eventWords({ plan, lane, name }, event) {
  const [title, unit] = [NAME, UNIT].map((field) => plan.names[event[field]]);
  const more = lane ? ` and ${integer(event[CALLS] - 1)} more` : `: ${plural(event[CALLS], "operation")}`;
  const amounts = [seconds(event[SECONDS]), bytes(event[BYTES])];
  if (event[FLOPS]) amounts.push(scaled(event[FLOPS], "FLOP"), scaled(event[FLOPS] / event[SECONDS], "FLOP/s"));
  const lines = [amounts.join(" · "), `from ${seconds(event[START])} · ${escaped(name)}`];
  if (lane && unit) lines.unshift(`unit ${escaped(unit)}`);
  if (event[ROW] >= 0) lines.push(code(plan.rows[event[ROW]].site));
  return `<b>${lane ? "" : "unit "}${escaped(title)}${event[CALLS] > 1 ? more : ""}</b>${lines.join("<br>")}`;
}
function tip(event, words) {
  const box = get("tip");
  box.hidden = !words;
  box.innerHTML = words || "";
  const below = event.clientY + 18 + box.offsetHeight < innerHeight;
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${below ? event.clientY + 18 : Math.max(4, event.clientY - box.offsetHeight - 12)}px`;
}

// -- numbers, details, tables -----------------------------------------------------------------------------------------
const TILES = { seconds: ["step", seconds], peak: ["peak memory", bytes], utilization: ["of peak FLOP/s", percent],
  sent: ["sent by a device", bytes], exposed: ["waits for network", seconds], idle: ["waits for stages", seconds],
  compute: ["computation", seconds] };
function drawNumbers() {
  const letter = (p) => (plans.length > 1 ? `<em>${"AB"[p]}</em> ` : "");
  get("numbers").innerHTML = Object.entries(TILES).map(([key, [title, format]]) => {
    const [a, b] = plans.map((plan) => plan.numbers[key]);
    const values = plans.map((plan, p) => {
      const isLimited = key === "peak" && plan.capacity !== plans[p - 1]?.capacity;
      const limit = isLimited ? ` <em>of ${bytes(plan.capacity).replace(".0 ", " ")}</em>` : "";
      const change = p && a ? ` <em>${b < a ? "−" : "+"}${percent(Math.abs(b / a - 1))}</em>` : "";
      const kind = key === "peak" && plan.numbers.peak > plan.capacity ? "over" : "";
      return `<b class="${kind}">${letter(p)}${format(plan.numbers[key])}${limit}${change}</b>`;
    });
    return key !== "idle" || a || b ? `<div><span>${title}</span>${values.join("")}</div>` : "";
  }).join("");
  const button = ({ mesh }, p) => (
    `<button data-plan="${p}" aria-pressed="${p === state.plan}">${letter(p)} ${escaped(mesh)}</button>`);
  get("plans").innerHTML = plans.length > 1 ? plans.map(button).join("") : `<small>${escaped(plans[0].mesh)}</small>`;
}
/** Return a table: a row is [attributes, cells...]; numbers, which are [text, exact], are aligned on the right. */
function table(head, rows) {
  const cell = (x) => (Array.isArray(x) ? `<td class="n" title="${x[1] ?? ""}">${x[0]}</td>` : `<td>${x}</td>`);
  const titles = head.map((x) => (Array.isArray(x) ? `<th class="n">${x[0]}</th>` : `<th>${x}</th>`)).join("");
  const body = rows.slice(0, MOST).map(([attributes, ...each]) => `<tr ${attributes}>${each.map(cell).join("")}</tr>`);
  const more = rows.length > MOST ? `<tr><td colspan="9">and ${integer(rows.length - MOST)} more</td></tr>` : "";
  return `<table><tr>${titles}</tr>${body.join("")}${more}</table>`;
}
const row = (name, number, isChosen) => `tabindex="0" data-${name}="${number}" aria-selected="${isChosen}"`;
const amount = (x) => [bytes(x), `${integer(x)} bytes`];
function drawDetails() {
  const plan = chosen();
  const [device, leaf] = [representative(plan, state.device), plan.leaves[state.leaf]];
  const local = plan.leaves.map((each, number) => ({ each, number, size: localBytes(plan, each, state.device) }));
  const arrays = local.filter(({ each }) => localShape(plan, each, state.device)).sort((a, b) => b.size - a.size);
  const holders = device.holders.map(([size, purpose, site]) => (
    ["", square(purposeFill(data.purposes.indexOf(purpose))) + purpose, amount(size), code(site)]));
  const rows = arrays.map(({ each, number, size }) => [row("leaf", number, number === state.leaf), escaped(each.path),
    code(`[${localShape(plan, each, state.device).join(", ")}]`), amount(size)]);
  get("details").innerHTML = `${leaf ? leafWords(plan, leaf) : ""}<h2>Device ${integer(state.device)} <small>`
    + `${written(plan, state.device)} · peak ${bytes(device.peak)}</small></h2>`
    + `<h3>At the peak</h3>${table(["for", ["bytes"], "source line"], holders)}`
    + `<h3>${plural(arrays.length, "array")}, ${bytes(sum(arrays.map(({ size }) => size)))}</h3>`
    + table(["array", "local shape", ["bytes"]], rows);
}
/** The chosen leaf: its type, its shard of the chosen device, and when its unit is gathered, used, reduced, updated. */
function leafWords(plan, leaf) {
  const shape = localShape(plan, leaf, state.device);
  const shard = shape ? `[${shape.join(", ")}], ${bytes(localBytes(plan, leaf, state.device))}` : "none";
  const held = leaf.layout < 0 ? "sharded by the step" : `${shard} on device ${integer(state.device)}`;
  const words = [`${bytes(leaf.bytes)} in all`, held];
  if (leaf.unit) words.push(`unit ${escaped(leaf.unit)}`);
  const life = lifeOf(plan, leaf).map(([verb, start, end]) => (
    [`tabindex="0" data-from="${start}" data-to="${end}"`, verb, [seconds(start)], [seconds(end - start)]]));
  const events = life.length ? `<h3>Life in the step</h3>${table(["event", ["from"], ["seconds"]], life)}` : "";
  return `<h2>${escaped(leaf.path)}</h2>${code(leaf.type)}<br>${words.join(" · ")}${events}<hr>`;
}
function lifeOf(plan, leaf) {
  const [unit, update] = [unitOf(plan), plan.names.indexOf("update")];
  const stage = plan.layouts[leaf.layout]?.place.find(([axis]) => axis === plan.stage);
  const device = stage ? plan.devices[stage[1]] : representative(plan, state.device);
  const verbs = { all_gather: "gathered", psum_scatter: "reduced", psum: "reduced" };
  return device.events.flatMap((event) => {
    const used = plan.rows[event[ROW]];
    const isUpdate = !event[LANE] && event[UNIT] === update && /^(params|state)/.test(leaf.path);
    const isUse = event[UNIT] === unit && (!event[LANE] || (used && verbs[used.collective]));
    const verb = isUpdate ? "updated" : used ? `${verbs[used.collective]} along ${used.axes.join(", ")}` : "used";
    return isUpdate || isUse ? [[verb, event[START], event[END]]] : [];
  }).sort((a, b) => a[1] - b[1]);
}
function drawLedger() {
  const plan = chosen();
  const spent = (device, number) => sum(device.events.map((event) => (event[ROW] === number ? event[SECONDS] : 0)));
  const rows = plan.rows.map(({ collective, axes, calls, sent, site }, number) => [
    row("row", number, number === state.row), collective, axes.join(", "), [integer(calls)], amount(sent),
    [seconds(Math.max(...plan.devices.map((device) => spent(device, number))))], code(site)]);
  get("ledger").innerHTML = table(["collective", "axis", ["calls"], ["bytes sent"], ["seconds"], "source line"], rows);
  const { collective, axes, sent } = plan.rows[state.row] || {};
  const members = integer(product(plan.axes.map(([name, n]) => (axes?.includes(name) ? n : 1))));
  const words = axes && `${collective} along ${axes.join(", ")}: ${bytes(sent)} from each device of ${members}`;
  get("ledger-note").textContent = words || `${bytes(plan.numbers.sent)} sent by a device`;
}
function drawLeaves() {
  const { leaves } = chosen();
  const words = state.filter.toLowerCase().split(/\s+/);
  const isShown = ({ path, type }) => words.every((word) => `${path} ${type}`.toLowerCase().includes(word));
  const rows = leaves.flatMap((leaf, number) => (isShown(leaf) ? [[row("leaf", number, number === state.leaf),
    escaped(leaf.path), code(leaf.type), escaped(leaf.unit), amount(leaf.bytes)]] : []));
  get("leaves").innerHTML = table(["path", "type", "unit", ["bytes in all"]], rows);
  get("leaves-note").textContent = `${integer(rows.length)} of ${integer(leaves.length)}`;
}

// -- exports ----------------------------------------------------------------------------------------------------------
function save(name, text) {
  const href = URL.createObjectURL(new Blob([text]));
  Object.assign(document.createElement("a"), { href, download: name }).click();
}
const quoted = (x) => (/[",\n]/.test(x) ? `"${String(x).replace(/"/g, '""')}"` : x);
const csv = (rows) => rows.map((each) => `${each.map(quoted).join(",")}\n`).join("");
const ledgerCsv = (plan) => csv([["collective", "axes", "calls", "bytes", "source line"],
  ...plan.rows.map((each) => [each.collective, each.axes.join("+"), each.calls, each.sent, each.site])]);
const leavesCsv = (plan) => csv([["path", "type", "unit", "bytes", `bytes on device ${state.device}`],
  ...plan.leaves.map((leaf) => [leaf.path, leaf.type, leaf.unit, leaf.bytes, localBytes(plan, leaf, state.device)])]);
/** The timelines as trace events, which Perfetto reads. */
function traceJson() {
  const traceEvents = plans.flatMap((plan, p) => plan.devices.flatMap(({ number, lanes, events, memory }) => {
    const pid = p * 1e6 + number;
    const titles = [["process_name", `${plan.mesh} device ${number}`], ...lanes.map((lane) => ["thread_name", lane])];
    const words = (e) => ({ unit: plan.names[e[UNIT]], bytes: e[BYTES], flops: e[FLOPS], calls: e[CALLS] });
    const sizes = (values) => Object.fromEntries(data.purposes.map((name, k) => [name, values[k]]));
    return [
      ...titles.map(([name, title], i) => ({ ph: "M", pid, tid: Math.max(0, i - 1), name, args: { name: title } })),
      ...events.map((e) => ({
        ph: "X", pid, tid: e[LANE], name: plan.names[e[NAME]], ts: e[START] * 1e6, dur: (e[END] - e[START]) * 1e6,
        args: { ...words(e), line: plan.rows[e[ROW]]?.site },
      })),
      ...memory.map(([t, ...values]) => ({ ph: "C", pid, name: "memory", ts: t * 1e6, args: sizes(values) })),
    ];
  }));
  return JSON.stringify({ displayTimeUnit: "ms", traceEvents });
}

// -- state ------------------------------------------------------------------------------------------------------------
/** Change the state, write it into the URL, and draw what depends on it. */
function choose(change) {
  if ("plan" in change && change.plan !== state.plan) {
    const [path, next] = [chosen().leaves[state.leaf]?.path, plans[change.plan]];
    const leaf = next.leaves.findIndex((each) => each.path === path);
    change = { device: Math.min(state.device, meshSize(next) - 1), leaf, row: -1, ...change };
  }
  Object.assign(state, change);
  const zoom = state.zoom[1] - state.zoom[0] < 1 && state.zoom.map((x) => +x.toFixed(6)).join("-");
  const parts = { ...state, leaf: chosen().leaves[state.leaf]?.path, row: state.row >= 0 && `${state.row}`, zoom };
  const fragment = new URLSearchParams(Object.entries(parts).filter(([, value]) => value));
  try { history.replaceState(null, "", `#${fragment}`); } catch { /* a page in a notebook's frame has no URL */ }
  if (Object.keys(change).every((key) => key === "zoom")) drawTimeline();
  else if (Object.keys(change).every((key) => key === "filter")) drawLeaves();
  else draw();
}
function read() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const bounded = (name, end) => Math.max(0, Math.min(parseInt(parts.get(name), 10) || 0, end - 1));
  state.plan = bounded("plan", plans.length);
  state.device = bounded("device", meshSize(chosen()));
  state.leaf = chosen().leaves.findIndex((leaf) => leaf.path === parts.get("leaf"));
  state.row = parts.has("row") ? bounded("row", chosen().rows.length) : -1;
  const [a, b] = (parts.get("zoom") || "").split("-").map(Number);
  state.zoom = a >= 0 && a < b && b <= 1 ? [a, b] : [0, 1];
  get("filter").value = state.filter = parts.get("filter") || "";
}
/** Draw all; the focused row of a table stays focused. */
function draw() {
  const focused = document.activeElement.closest("tr");
  const [box, number] = [focused?.closest("div, #details"), focused?.rowIndex];
  [drawNumbers, drawMesh, drawDetails, drawTimeline, drawLegend, drawLedger, drawLeaves].forEach((each) => each());
  box?.querySelector("table:last-of-type")?.rows[number]?.focus({ preventScroll: true });
}
function pick(element) {
  const target = element.closest("[data-row], [data-leaf], [data-from], [data-plan]");
  const { row: number, leaf, from, to, plan } = target?.dataset || {};
  if (plan) choose({ plan: +plan });
  if (number) choose({ row: +number === state.row ? -1 : +number, leaf: -1 });
  if (leaf) choose({ leaf: +leaf === state.leaf ? -1 : +leaf, row: -1 });
  if (from) zoomTo((3 * from - 2 * to) / longest - 1e-3, (3 * to - 2 * from) / longest + 1e-3);
}
function press(key, target) {
  const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key] || [0, 0];
  const [tr, isTime] = [target.closest("tr[tabindex]"), target === get("time")];
  if (key === "Escape") choose(state.leaf >= 0 || state.row >= 0 ? { leaf: -1, row: -1 } : { zoom: [0, 1] });
  else if (tr && (key === "Enter" || key === " ")) pick(tr);
  else if (tr && dy) (dy < 0 ? tr.previousElementSibling : tr.nextElementSibling)?.focus();
  else if (target === get("mesh") && (dx || dy)) moveDevice([dx, dy]);
  else if (isTime && dx) zoomBy(1, 0.5, 0.2 * dx);
  else if (isTime && "+=-".includes(key)) zoomBy(key === "-" ? 1 / 0.6 : 0.6);
  else if (isTime && (key === "0" || key === "Home")) zoomTo(0, 1);
  else return false;
  return true;
}

const on = (id, type, act, options) => get(id).addEventListener(type, act, options);
document.addEventListener("click", (event) => pick(event.target));
document.addEventListener("keydown", (event) => {
  if (!event.ctrlKey && !event.metaKey && !event.altKey && press(event.key, event.target)) event.preventDefault();
});
on("mesh", "click", (event) => deviceAt(event) >= 0 && choose({ device: deviceAt(event) }));
on("mesh", "mousemove", (event) => {
  const [plan, device] = [chosen(), deviceAt(event)];
  const peak = device >= 0 && bytes(representative(plan, device).peak);
  tip(event, peak && `<b>device ${integer(device)}</b>${written(plan, device)}<br>peak ${peak}`);
});
for (const id of ["mesh", "time"]) on(id, "mouseleave", (event) => { tip(event); get("cursor").hidden = true; });

let [drag, isDragged] = [null, false]; // { x, zoom } where a drag began
on("time", "pointerdown", ({ clientX: x }) => { [drag, isDragged] = [{ x, zoom: state.zoom }, false]; });
addEventListener("pointerup", () => { drag = null; });
on("time", "pointermove", (event) => {
  get("cursor").hidden = !(fractionAt(event) >= 0 && fractionAt(event) <= 1);
  get("cursor").style.left = `${event.clientX - get("time").getBoundingClientRect().left}px`;
  if (!drag) return tip(event, hovered(event)?.text);
  const by = (drag.x - event.clientX) / timeWidth() * (drag.zoom[1] - drag.zoom[0]);
  isDragged ||= Math.abs(drag.x - event.clientX) > 3;
  return isDragged && zoomTo(drag.zoom[0] + by, drag.zoom[1] + by);
});
on("time", "click", (event) => {
  const { row: lane, event: timed } = (!isDragged && hovered(event)) || {};
  if (!timed) return;
  const isHere = lane.plan === chosen() && lane.device === representative(lane.plan, state.device);
  const device = isHere ? state.device : lane.device.number;
  choose({ plan: plans.indexOf(lane.plan), device, row: timed[ROW], leaf: -1 });
});
on("time", "wheel", (event) => {
  if (event.ctrlKey || event.metaKey) zoomBy(event.deltaY < 0 ? 0.8 : 1.25, Math.max(0, fractionAt(event)));
  else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) zoomBy(1, 0.5, event.deltaX / timeWidth());
  else return;
  event.preventDefault();
}, { passive: false });
const actions = { "zoom-in": () => zoomBy(0.5), "zoom-out": () => zoomBy(2), "zoom-all": () => zoomTo(0, 1),
  "save-ledger": () => save("ledger.csv", ledgerCsv(chosen())),
  "save-leaves": () => save("leaves.csv", leavesCsv(chosen())),
  "save-trace": () => save("trace.json", traceJson()) };
for (const [id, action] of Object.entries(actions)) on(id, "click", action);
on("filter", "input", (event) => choose({ filter: event.target.value }));
addEventListener("hashchange", () => { read(); draw(); });
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

read();
draw();
document.documentElement.dataset.drawn = (performance.now() - began).toFixed(0);
