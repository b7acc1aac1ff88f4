// Draws the document of page.py into a root: the document of a window, or a shadow root.
//
// `open` returns a `page`: { root, box, get, data, plans, state, onChoose, ... }. `page.state` is
// all that a reader has chosen: `choose` changes it, and draws what depends on it. `show` replaces
// the document. Nothing else is kept, so several pages may be in one window.

/** The panels of a page, by name: a page has all, in an order of its own. */
export const PANELS = {
  numbers: `<section id="numbers" aria-label="numbers"></section>`,
  facts: `<section class="panel" id="facts-panel"><h2 id="facts-title"></h2><div id="facts"></div></section>`,
  why: `<section class="panel" id="why-panel"><h2 id="why-title"></h2><div class="table" id="why"></div></section>`,
  mesh: `<section class="panel" id="mesh-panel">
    <h2>Mesh <small id="mesh-note"></small></h2>
    <nav id="trail" aria-label="zoom of the mesh"></nav>
    <canvas id="mesh" tabindex="0" role="application"
      aria-label="devices of the mesh: arrows choose one, Enter zooms in, Backspace out"></canvas>
    <p class="legend" id="mesh-legend"></p>
  </section>`,
  details: `<section class="panel scrolled" id="details"></section>`,
  timeline: `<section class="panel wide" id="time-panel">
    <h2>Timeline <small id="time-note"></small>
      <small>drag or arrows pan, Ctrl and wheel or + − zoom, 0 shows all</small><span class="space"></span>
      <button id="zoom-in" aria-label="zoom in">+</button><button id="zoom-out" aria-label="zoom out">−</button>
      <button id="zoom-all">All</button></h2>
    <div id="time" tabindex="0" role="application" aria-label="timeline: arrows pan, plus and minus zoom">
      <canvas id="ruler"></canvas>
      <div id="rows"><canvas id="timeline"></canvas></div>
      <canvas id="memory"></canvas><i id="cursor" hidden></i>
    </div>
    <p class="legend" id="time-legend"></p>
  </section>`,
  ledger: `<section class="panel" id="ledger-panel">
    <h2>Ledger <small id="ledger-note"></small></h2><div class="table" id="ledger"></div></section>`,
  leaves: `<section class="panel" id="leaves-panel">
    <h2>Leaves <small id="leaves-note"></small><span class="space"></span>
      <input id="filter" type="search" placeholder="filter" aria-label="filter leaves"></h2>
    <div class="table" id="leaves"></div>
  </section>`,
  files: `<button id="save-ledger">Ledger CSV</button>
    <button id="save-leaves">Leaves CSV</button>
    <button id="save-trace">Perfetto JSON</button>`,
  tip: `<div id="tip" hidden></div>`,
};

// The fields of an event, as `DrawnEvent` of page.py writes them.
export const [LANE, START, END, SECONDS, NAME, BYTES, FLOPS, CALLS, ROW, UNIT] = Array(10).keys();
const INK = "#16191d"; // on fills
const WHITE = "#ffffff"; // on dark fills
const MOST = 250; // rows of a table
const CELLS = 512; // of the mesh at once; of more devices a cell is a group
const lengthOf = (plan) => plan.length ?? plan.numbers.seconds;
export const chosen = (page) => page.plans[page.state.plan];
const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const product = (xs) => xs.reduce((a, b) => a * b, 1);

// -- text -----------------------------------------------------------------------------------------
const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];
export const integer = (x) => Math.round(x).toLocaleString("en-US");
/** Return a number with three digits: 1.23, 12.3, 123; the bounds are those of rounded numbers. */
export function digits(x) {
  if (x < 9.995) return x.toFixed(2);
  if (x < 99.95) return x.toFixed(1);
  return integer(x);
}
export function scaled(x, unit) {
  if (x < 999.5) return `${integer(x)} ${unit}`;
  // The factor lets 999,600 be 1.00 M, as its digits are rounded, and not 1,000 k.
  const power = Math.min(6, Math.floor(Math.log10(x * 1.0005) / 3));
  return `${digits(x / 1000 ** power)} ${PREFIXES[power]}${unit}`;
}
export const bytes = (x) => scaled(x, "B");
export function seconds(x) {
  if (x >= 0.9995) return `${digits(x)} s`;
  if (x >= 0.9995e-3 || !x) return `${digits(x * 1e3)} ms`;
  return `${digits(x * 1e6)} µs`;
}
export const escaped = (x) => String(x).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const code = (x) => `<code>${escaped(x)}</code>`;
const square = (colour) => `<i style="background:${colour}"></i>`;
export const percent = (x) => `${(100 * x).toFixed(1)} %`;
export const plural = (n, noun) => `${integer(n)} ${noun}${n === 1 ? "" : "s"}`;
/** Return the colour of words on a fill: dark ones on light fills. */
function inkOn(fill) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(fill.slice(i, i + 2), 16) / 255);
  return 0.2126 * r ** 2.2 + 0.7152 * g ** 2.2 + 0.0722 * b ** 2.2 > 0.19 ? INK : WHITE;
}
export function css(page, name) {
  return getComputedStyle(hostOf(page.root)).getPropertyValue(`--${name}`).trim();
}

// -- devices and shards ---------------------------------------------------------------------------
const axisSize = (plan, axis) => plan.axes[axis][1];
const meshSize = (plan) => product(plan.axes.map(([, n]) => n));
export function coordinates(plan, device) {
  const point = [];
  for (let axis = plan.axes.length - 1; axis >= 0; axis -= 1) {
    point[axis] = device % axisSize(plan, axis);
    device = Math.floor(device / axisSize(plan, axis));
  }
  return point;
}
function deviceOf(plan, point) {
  return point.reduce((device, c, axis) => device * axisSize(plan, axis) + c, 0);
}
function written(plan, device) {
  const texts = coordinates(plan, device).map((c, axis) => `${plan.axes[axis][0]} ${c}`);
  return texts.join(" · ");
}
/** The device of the report that does what a device does. A recording has all. */
function representative(page, plan, device) {
  if (page.inCalls) return plan.devices[device];
  const stage = plan.stage === null ? 0 : coordinates(plan, device)[plan.stage];
  return plan.devices[stage];
}
/** The number of a leaf's shard on the device at a point: -1 for none, null without a layout. */
function shardAt(plan, leaf, point) {
  if (!leaf || leaf.layout < 0) return null;
  const { axes, place } = plan.layouts[leaf.layout];
  const isElsewhere = place.some(([axis, c]) => point[axis] !== c);
  if (isElsewhere) return -1;
  return axes.reduce((shard, axis) => shard * axisSize(plan, axis) + point[axis], 0);
}
function localShape(plan, leaf, device) {
  let shard = shardAt(plan, leaf, coordinates(plan, device));
  if (shard === null || shard < 0) return null;
  for (const [count, shape] of plan.layouts[leaf.layout].shapes) { // runs of equal shapes
    shard -= count;
    if (shard < 0) return shape;
  }
  throw new Error(`${leaf.path} has fewer shards than devices`);
}
function localBytes(plan, leaf, device) {
  const shape = localShape(plan, leaf, device);
  return shape ? product(shape) * leaf.item : 0;
}

// -- the mesh -------------------------------------------------------------------------------------
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
/**
 * Return the steps of the picture along an axis: { axis, n, unit }, where a coordinate c is in step
 * floor(c / unit) % n. A long axis is broken in two, of which the inner one has at most 32 steps.
 */
function stepsOf([, n], axis) {
  if (n <= 32) return [{ axis, n, unit: 1 }];
  let unit = Math.min(32, Math.floor(Math.sqrt(2 * n)));
  while (n % unit) unit -= 1;
  if (unit === 1) return [{ axis, n, unit }]; // a prime
  return [{ axis, n: n / unit, unit }, { axis, n: unit, unit: 1 }];
}
/**
 * Return which devices are drawn: `fixed` steps have the coordinates of `state.within`; each cell is
 * a coordinate of the steps that are `shown`, as many as make at most CELLS cells; the devices of a
 * cell differ in the steps `inside`.
 */
function viewOf(page, plan, depth = page.state.within.length) {
  const steps = plan.axes.flatMap(stepsOf);
  let end = depth;
  let count = 1;
  while (end < steps.length && (end === depth || count * steps[end].n <= CELLS)) {
    count *= steps[end].n;
    end += 1;
  }
  const shown = steps.slice(depth, end);
  const inside = steps.slice(end);
  const devices = product(inside.map((step) => step.n));
  return { steps, fixed: steps.slice(0, depth), shown, inside, count, devices };
}
/** The coordinates of a device in steps. */
function digitsOf(plan, steps, device) {
  const point = coordinates(plan, device);
  return steps.map(({ axis, n, unit }) => Math.floor(point[axis] / unit) % n);
}
/** The point of the first device of a group, by its coordinates in the first steps. */
function pointOf(plan, steps, digits) {
  const point = plan.axes.map(() => 0);
  digits.forEach((digit, i) => { point[steps[i].axis] += digit * steps[i].unit; });
  return point;
}
/** Write a group by its coordinates in the first steps: "pipe 3 · data 16–31". */
function writtenGroup(plan, steps, digits) {
  const point = pointOf(plan, steps, digits);
  const units = new Map();
  digits.forEach((_, i) => units.set(steps[i].axis, steps[i].unit));
  const texts = [...units].map(([axis, unit]) => {
    const range = unit > 1 ? `–${point[axis] + unit - 1}` : "";
    return `${plan.axes[axis][0]} ${point[axis]}${range}`;
  });
  return texts.join(" · ");
}
/** Make steps columns and rows, so that the picture is about twice as wide as high. */
function arrange(steps) {
  const count = (side) => product(side.map((step) => step.n));
  const error = ([x, y]) => Math.abs(Math.log(count(x) / count(y) / 2.1));
  let sides = null;
  for (let mask = 0; mask < 2 ** steps.length; mask += 1) { // its bits are the columns
    const isColumn = (i) => (mask >> i) % 2 === 1;
    const divided = [steps.filter((_, i) => isColumn(i)), steps.filter((_, i) => !isColumn(i))];
    if (!sides || error(divided) < error(sides)) sides = divided;
  }
  return { sides, extents: sides.map(setStrides) };
}
/** Set the stride of each step of a side, in cells; return its extent, with gaps between axes. */
function setStrides(side) {
  let extent = 1;
  for (let i = side.length - 1; i >= 0; i -= 1) {
    const step = side[i];
    const hasGap = i + 1 < side.length && side[i + 1].axis !== step.axis;
    step.stride = extent + (hasGap ? 0.25 + 0.05 * extent : 0);
    extent += step.stride * (step.n - 1);
  }
  return extent;
}
/** Return the offset of a point along a side, in cells. */
function offsetOn(side, point) {
  const offsets = side.map(({ axis, n, unit, stride }) => (
    (Math.floor(point[axis] / unit) % n) * stride));
  return sum(offsets);
}

// `page.cells`: the mesh as drawn, { view, w, h, x, y, device, digits }, where the last four have an
// entry for each cell: its place, its first device and its coordinates in steps.
function layCells(page, plan, view, sides, left, top, w, h) {
  const { steps, shown, count } = view;
  page.cells = { view, w, h, x: [], y: [], device: [], digits: [] };
  for (let cell = 0; cell < count; cell += 1) {
    let rest = cell;
    const digits = [];
    for (let i = shown.length - 1; i >= 0; i -= 1) {
      digits[i] = rest % shown[i].n;
      rest = Math.floor(rest / shown[i].n);
    }
    const all = [...page.state.within, ...digits];
    const point = pointOf(plan, steps, all);
    page.cells.x.push(left + offsetOn(sides[0], point) * w);
    page.cells.y.push(top + offsetOn(sides[1], point) * h);
    page.cells.device.push(deviceOf(plan, point));
    page.cells.digits.push(all);
  }
}
/** The cell of the chosen device; those outside of what is zoomed in on have none. */
function cellHere(page, plan) {
  const { steps, fixed, shown } = page.cells.view;
  const here = digitsOf(plan, steps, page.state.device).slice(0, fixed.length + shown.length);
  return page.cells.digits.findIndex((digits) => digits.every((digit, i) => digit === here[i]));
}
function drawMesh(page) {
  const plan = chosen(page);
  const leaf = plan.leaves[page.state.leaf];
  keepInside(page, plan);
  const view = viewOf(page, plan);
  const { sides, extents } = arrange(view.shown);
  const [columns, rows] = sides;
  const first = pointOf(plan, view.steps, page.state.within);
  const label = (side, i) => {
    const { axis, unit } = side[0];
    // The inner step of a long axis begins where the outer one is.
    return `${plan.axes[axis][0]} ${first[axis] + i * unit}`;
  };

  // Room for the labels of rows and columns, then cells as large as fit.
  const width = page.get("mesh").clientWidth;
  const left = rows.length ? 8 + 6.3 * label(rows, rows[0].n).length : 0;
  const top = columns.length ? 18 : 0;
  const most = page.box.clientWidth > 900 ? 322 : 262;
  const h = Math.min(64, most / extents[1]);
  const w = Math.min(150, (width - left - 1) / extents[0], Math.max(h * 3, 8));
  const g = context(page.get("mesh"), width, Math.max(top + h * extents[1] + 2, 60));
  const smallest = Math.min(w, h);
  let gap = 0;
  if (smallest > 12) gap = 2;
  else if (smallest > 4) gap = 1;

  layCells(page, plan, view, sides, left, top, w, h);
  const fillOf = colours(page, plan, leaf, view);
  page.cells.device.forEach((device, cell) => {
    const shard = shardAt(plan, leaf, coordinates(plan, device));
    const [x, y] = [page.cells.x[cell], page.cells.y[cell]];
    const fill = fillOf(device, shard);
    g.fillStyle = fill;
    g.fillRect(x, y, Math.max(w - gap, 0.7), Math.max(h - gap, 0.7));
    if (w < 52 || h < 30) return; // no room for words
    g.fillStyle = shard === -1 ? css(page, "muted") : INK;
    const title = view.devices > 1 ? `${integer(view.devices)} devices` : integer(device);
    g.fillText(shortened(g, title, w - 8), x + 5, y + 11);
    const words = wordsOfCell(page, plan, device, shard, shardsInside(plan, leaf, view));
    g.fillText(words, x + 5, y + 25);
  });

  g.fillStyle = css(page, "muted");
  // As many labels of the outermost axis of each side as have room.
  if (columns.length) {
    const [{ n, stride }] = columns;
    const each = Math.ceil((g.measureText(label(columns, n)).width + 8) / (stride * w));
    for (let i = 0; i < n; i += each) g.fillText(label(columns, i), left + i * stride * w, 8);
  }
  if (rows.length) {
    const [{ n, stride }] = rows;
    const each = Math.ceil(13 / (stride * h));
    for (let i = 0; i < n; i += each) g.fillText(label(rows, i), 0, top + i * stride * h + h / 2);
  }
  drawEdges(page, g, plan);
  g.strokeStyle = css(page, "text");
  g.lineWidth = 2;
  const here = cellHere(page, plan);
  g.strokeRect(page.cells.x[here], page.cells.y[here], Math.max(w - gap, 2), Math.max(h - gap, 2));
  page.get("mesh-note").textContent = wordsOfMesh(page, plan, columns, rows, view);
  drawTrail(page, plan);
}
/** Zoom out as far as the chosen device is not inside. */
function keepInside(page, plan) {
  const digits = digitsOf(plan, plan.axes.flatMap(stepsOf), page.state.device);
  const levels = levelsOf(page, plan);
  const { within } = page.state;
  const isInside = (depth) => within.slice(0, depth).every((digit, i) => digit === digits[i]);
  const depth = levels.filter(isInside).at(-1) ?? 0;
  page.state.within = within.slice(0, depth);
}
/** The numbers of steps that are fixed from the outermost view to the one that is shown. */
function levelsOf(page, plan) {
  const levels = [0];
  while (levels.at(-1) < page.state.within.length) {
    const depth = levels.at(-1);
    levels.push(depth + viewOf(page, plan, depth).shown.length);
  }
  return levels.filter((depth) => depth <= page.state.within.length);
}
/** Write the groups that are zoomed in on; each is a button that goes there. */
function drawTrail(page, plan) {
  const { steps, devices } = viewOf(page, plan, 0);
  page.get("trail").hidden = devices === 1;
  const buttons = levelsOf(page, plan).map((depth) => {
    const digits = page.state.within.slice(0, depth);
    const words = depth ? writtenGroup(plan, steps, digits) : "all devices";
    const isHere = depth === page.state.within.length;
    return `<button data-within="${digits.join(".")}" aria-pressed="${isHere}">${escaped(words)}</button>`;
  });
  const hint = page.cells.view.devices > 1 ? " <small>click a group to zoom in</small>" : "";
  page.get("trail").innerHTML = buttons.join(" › ") + hint;
}
/** The number of shards of a leaf in each group. */
function shardsInside(plan, leaf, { inside }) {
  if (!leaf || leaf.layout < 0) return 1;
  const { axes } = plan.layouts[leaf.layout];
  return product(inside.filter(({ axis }) => axes.includes(axis)).map(({ n }) => n));
}
/** Choose the device of a cell; of a group, zoom in. */
function enter(page, cell) {
  if (cell < 0) return;
  const change = { device: page.cells.device[cell] };
  if (page.cells.view.devices > 1) change.within = page.cells.digits[cell];
  choose(page, change);
}
/** Zoom out of the mesh by one view. */
function leave(page) {
  const levels = levelsOf(page, chosen(page));
  choose(page, { within: page.state.within.slice(0, levels.at(-2) ?? 0) });
}
function wordsOfCell(page, plan, device, shard, shards) {
  if (shard === null) return bytes(amountOf(page, plan, device));
  if (shard < 0) return "none";
  return shards > 1 ? plural(shards, "shard") : `shard ${integer(shard)}`;
}
/** What colours the devices of a mesh: their peaks of memory; in a recording the bytes they send. */
function amountOf(page, plan, device) {
  const { peak, sent } = representative(page, plan, device);
  return page.inCalls ? sent : peak;
}
function wordsOfMesh(page, plan, columns, rows, { fixed, steps, count, devices }) {
  // An axis that is broken in two has two steps.
  const axesOf = (side) => [...new Set(side.map((step) => plan.axes[step.axis].join(" ")))];
  const words = [plural(meshSize(plan), page.inCalls ? "rank" : "device")];
  if (fixed.length) words.push(writtenGroup(plan, steps, page.state.within));
  if (devices > 1) words.push(`${integer(count)} groups of ${integer(devices)}`);
  if (columns.length) words.push(`across: ${axesOf(columns).join(" × ")}`);
  if (rows.length) words.push(`down: ${axesOf(rows).join(" × ")}`);
  return words.join(" · ");
}
/** Return the colours of devices, and write the legend: by shard of a leaf, or by peak memory. */
function colours(page, plan, leaf, view) {
  const hasShards = leaf && leaf.layout >= 0;
  return hasShards ? coloursOfShards(page, plan, leaf, view) : coloursOfPeaks(page, plan);
}
function coloursOfShards(page, plan, leaf, view) {
  const empty = css(page, "empty");
  const { axes, place, shapes } = plan.layouts[leaf.layout];
  const shards = sum(shapes.map(([count]) => count));
  const owners = meshSize(plan) / product(place.map(([axis]) => axisSize(plan, axis)));
  const names = axes.map((axis) => plan.axes[axis][0]);
  const along = names.length ? ` along ${names.join(", ")}` : "";
  const devices = plural(owners / shards, "device");
  const without = place.length ? `<span>${square(empty)}has none</span>` : "";
  page.get("mesh-legend").innerHTML = `<span>${escaped(leaf.path)}: ${plural(shards, "shard")}${along}, `
    + `each on ${devices}</span>${without}`;
  const isMixed = shardsInside(plan, leaf, view) > 1; // each group has several, of many colours
  return (_, shard) => {
    if (shard < 0) return empty;
    return isMixed ? page.data.fills.at(-1) : page.data.fills[shard % page.data.fills.length];
  };
}
function coloursOfPeaks(page, plan) {
  const amounts = plan.devices.map((device) => (page.inCalls ? device.sent : device.peak));
  const lowest = Math.min(...amounts);
  const highest = Math.max(...amounts);
  const range = [...new Set([lowest, highest])].map(bytes).join(" to ");
  const fraction = percent(highest / plan.capacity);
  const words = page.inCalls
    ? `${range} sent by a rank` : `peak ${range}, ${fraction} of a device's memory`;
  page.get("mesh-legend").innerHTML = `<span>${square(page.data.fills[0])}${words}</span>`;
  return (device) => {
    if (highest === lowest) return page.data.fills[0];
    const share = (amountOf(page, plan, device) - lowest) / (highest - lowest);
    return mixed(page.data.fills[0], "#e9ecf0", share);
  };
}
/** Return a colour between two: of share 0 the second, but for a fifth. */
function mixed(full, pale, share) {
  const part = 0.2 + 0.8 * share;
  const channel = (i) => {
    const [a, b] = [full, pale].map((x) => parseInt(x.slice(i, i + 2), 16));
    return Math.round(a * part + b * (1 - part)).toString(16).padStart(2, "0");
  };
  return `#${channel(1)}${channel(3)}${channel(5)}`;
}
/**
 * Draw lines between neighbours of the groups that the chosen row is along; those of the chosen
 * device are thick.
 */
function drawEdges(page, g, plan) {
  if (page.state.row < 0) return;
  const names = plan.rows[page.state.row].axes;
  const along = [...plan.axes.keys()].filter((axis) => names.includes(plan.axes[axis][0]));
  const here = coordinates(plan, page.state.device);
  // Of an axis that is drawn, the unit of its innermost step: neighbours differ by it.
  const units = new Map();
  for (const { axis, unit } of page.cells.view.shown) units.set(axis, unit);
  const isOfGroup = (point) => [...units].every(([axis, unit]) => (
    along.includes(axis) || Math.floor(point[axis] / unit) === Math.floor(here[axis] / unit)));
  const cellOf = new Map(page.cells.device.map((device, cell) => [device, cell]));

  // The lines are in the middle of cells, or in a corner where these have words.
  const hasText = page.cells.w >= 52 && page.cells.h >= 30;
  const dx = hasText ? page.cells.w - 9 : page.cells.w / 2;
  const dy = hasText ? page.cells.h - 9 : page.cells.h / 2;
  const end = (cell) => [page.cells.x[cell] + dx, page.cells.y[cell] + dy];

  const hasRoom = page.cells.w > 5 && page.cells.h > 5; // else only the group of the device is drawn
  for (const isHere of hasRoom ? [false, true] : [true]) {
    g.strokeStyle = isHere ? "#d9480f" : `${INK}40`;
    const thick = page.cells.h > 12 ? 3 : 2;
    g.lineWidth = isHere ? thick : 1;
    g.beginPath();
    page.cells.device.forEach((device, cell) => {
      const point = coordinates(plan, device);
      if (isOfGroup(point) !== isHere) return;
      for (const axis of along) {
        const next = point.map((c, i) => (i === axis ? c + units.get(axis) : c));
        const isNeighbour = next[axis] < axisSize(plan, axis); // false for an axis that is not drawn
        const neighbour = isNeighbour ? cellOf.get(deviceOf(plan, next)) : undefined;
        if (neighbour === undefined) continue;
        g.moveTo(...end(cell));
        g.lineTo(...end(neighbour));
      }
    });
    g.stroke();
  }
}
export function cellAt(page, { offsetX, offsetY }) {
  const { x, y, w, h } = page.cells;
  const isInside = (start, length, offset) => offset >= start && offset < start + length;
  return x.findIndex((left, i) => isInside(left, w, offsetX) && isInside(y[i], h, offsetY));
}
/** Choose the next device of a row or a column of the picture. */
function moveDevice(page, [dx, dy]) {
  const { x, y, device } = page.cells;
  const here = cellHere(page, chosen(page));
  const ahead = (i) => (x[i] - x[here]) * dx + (y[i] - y[here]) * dy;
  const aside = (i) => Math.abs(dx ? y[i] - y[here] : x[i] - x[here]);
  const next = [...x.keys()].filter((i) => ahead(i) > 0.1 && aside(i) < 0.1);
  if (!next.length) return;
  choose(page, { device: device[next.reduce((a, b) => (ahead(b) < ahead(a) ? b : a))] });
}

// -- the timeline ---------------------------------------------------------------------------------
const GUTTER = 108; // the width of the names of lanes
const MEMORY = 112; // the height of a memory curve
const purposeFill = (page, k) => page.data.colours.purposes[page.data.purposes[k]];
// `page.lanes`: the timeline as drawn, { y, h, plan, device, lane, name }, or
// { y, h, plan, device, title }.
const lanesOfPlan = (plan) => plan.devices.flatMap((device) => device.lanes);
/** Return true for a device with one lane: of many only the chosen one shows all lanes. */
function isFolded(page, plan, device) {
  const here = representative(page, plan, page.state.device);
  const isChosen = plan === chosen(page) && device === here;
  return plan.devices.length > 4 && !isChosen;
}
function layLanes(page) {
  page.lanes = [];
  let y = 2;
  const add = (row) => {
    page.lanes.push({ y, ...row });
    y += row.h + 2;
  };
  page.plans.forEach((plan, p) => plan.devices.forEach((device, d) => {
    const titles = page.plans.length > 1 ? [`${"AB"[p]}  ${plan.mesh}`] : [];
    if (page.inCalls) titles.push(`rank ${d}`);
    else if (plan.devices.length > 1) titles.push(`${plan.axes[plan.stage][0]} ${d}`);
    const h = plan.devices.length > 2 ? 11 : 18;
    if (isFolded(page, plan, device)) {
      const letters = page.plans.length > 1 ? `${"AB"[p]} ` : "";
      add({ h: 14, plan, device, lane: null, name: letters + titles.at(-1) });
      return;
    }
    if (titles.length) add({ h: 14, plan, device, title: titles.join(" · ") });
    device.lanes.forEach((name, lane) => add({ h: lane ? h : 13, plan, device, lane, name }));
    y += 4;
  }));
  return y;
}
function laneColour(page, name, hasFlops) {
  if (name === "compute") return page.data.colours.compute[hasFlops ? 0 : 1];
  if (name === "messages") return page.data.colours.messages;
  const network = page.networks.indexOf(name);
  if (network < 0) return page.data.colours.copies;
  return page.data.colours.networks[network % page.data.colours.networks.length];
}
/** The number of the name of the chosen leaf's unit; of the optimizer's state it is the update. */
function unitOf(page, plan) {
  const leaf = plan.leaves[page.state.leaf];
  if (!leaf) return -1;
  if (leaf.path.startsWith("state")) return plan.names.indexOf("update");
  return plan.names.indexOf(leaf.unit || "\0"); // events without a unit have the name ""
}
/** Return a function that is true for events of the chosen row or unit; null if none is chosen. */
function highlight(page, plan) {
  const unit = unitOf(page, plan);
  if (plan !== chosen(page) || (page.state.row < 0 && unit < 0)) return null;
  if (page.state.row >= 0) return (event) => event[ROW] === page.state.row;
  return (event) => event[UNIT] === unit;
}
export const timeWidth = (page) => page.get("timeline").clientWidth - GUTTER - 2;
function xOf(page, t) {
  const [start, end] = page.state.zoom;
  return GUTTER + (t / page.longest - start) / (end - start) * timeWidth(page);
}
function drawTimeline(page) {
  const { drawn } = chosen(page).facts; // the part of a large program that has events
  page.get("time-note").textContent = drawn ?? "";
  const width = page.get("timeline").clientWidth;
  const g = context(page.get("timeline"), width, layLanes(page));
  const [text, muted, accent, ...shades] = ["text", "muted", "accent", "unit-a", "unit-b"].map((name) => css(page, name));
  for (const row of page.lanes) {
    const middle = row.y + row.h / 2;
    if (row.title) {
      const device = representative(page, row.plan, page.state.device);
      const isChosen = row.plan === chosen(page) && row.device === device;
      g.fillStyle = isChosen ? accent : text;
      g.fillText(row.title, 0, middle, 600);
    } else {
      g.fillStyle = muted;
      g.fillText(row.name.replace("network: ", "↔ "), 0, middle, GUTTER - 8);
      drawLane(page, g, row, width, text, shades);
    }
  }
  drawRuler(page, width);
  drawMemory(page, width);
}
function clip(g, y, width, h) {
  g.save();
  g.beginPath();
  g.rect(GUTTER, y, width, h);
  g.clip();
}
/** Return a text, or as much of it as has room; "" if nothing has, or if the width is negative. */
function shortened(g, text, width) {
  while (text && g.measureText(text).width > width) {
    text = text.length > 3 ? `${text.slice(0, -2)}…` : "";
  }
  return text;
}
/** Draw the events of a lane. Units, those of lane 0, are shaded in turn; chosen ones are filled. */
function drawLane(page, g, row, width, text, shades) {
  if (row.lane === null) {
    drawFolded(page, g, row, width);
    return;
  }
  const { plan, device, lane, name, y, h } = row;
  const isChosen = highlight(page, plan);
  const isUnits = lane === 0;
  let edge = -1; // events that end in the last pixel are not drawn
  clip(g, y, width, h);
  device.events.filter((event) => event[LANE] === lane).forEach((event, i) => {
    const start = xOf(page, event[START]);
    const end = xOf(page, event[END]);
    const length = end - start;
    const isLit = !isChosen || isChosen(event);
    const isHidden = end < edge && !(isChosen && isLit);
    if (end < GUTTER || start > width || isHidden) return;
    edge = Math.ceil(end);

    const isFilled = !isUnits || (isChosen && isLit);
    const faint = isUnits ? 0.6 : 0.16;
    g.globalAlpha = isLit ? 1 : faint;
    const fill = laneColour(page, isUnits ? "compute" : name, event[FLOPS]);
    g.fillStyle = isFilled ? fill : shades[i % 2];
    const gap = length > 3 ? 0.7 : 0;
    g.fillRect(start, y, Math.max(length - gap, 0.7), h);

    const hasRoom = length >= (isUnits ? 15 : 34);
    if (!hasRoom) return;
    g.fillStyle = isFilled && isLit ? inkOn(fill) : text;
    const left = Math.max(start, GUTTER) + 3;
    g.fillText(shortened(g, plan.names[event[NAME]], end - left - 3), left, y + h / 2 + 0.5);
  });
  g.restore();
}
/** Draw all lanes of a device as one: operations above, what is on the network below. */
function drawFolded(page, g, { plan, device, y, h }, width) {
  const isChosen = highlight(page, plan);
  clip(g, y, width, h);
  for (const event of device.events) {
    const name = device.lanes[event[LANE]];
    const isOperation = name === "compute";
    const start = xOf(page, event[START]);
    const end = xOf(page, event[END]);
    if (!event[LANE] || end < GUTTER || start > width) continue;
    const fraction = page.inCalls ? 1 : 0.6;
    const top = isOperation || page.inCalls ? y : y + h * fraction;
    g.globalAlpha = !isChosen || isChosen(event) ? 1 : 0.16;
    g.fillStyle = laneColour(page, name, event[FLOPS]);
    const height = isOperation || page.inCalls ? h * fraction : h;
    g.fillRect(start, top, Math.max(end - start, 0.7), height);
  }
  g.restore();
}
/** Return 1, 2 or 5 times a power of ten, of which a range has at most a number. */
function tick(range, count) {
  const ten = 10 ** Math.floor(Math.log10(range / count));
  return ten * [1, 2, 5, 10].find((n) => n * ten >= range / count * 0.999);
}
function drawRuler(page, width) {
  const g = context(page.get("ruler"), width, 18);
  const [start, end] = page.state.zoom.map((x) => x * page.longest);
  const range = end - start;
  let unit = "µs";
  let factor = 1e6;
  if (page.inCalls) [unit, factor] = [range > 1 ? "calls" : "call", 1];
  else if (range >= 2) [unit, factor] = ["s", 1];
  else if (range >= 2e-3) [unit, factor] = ["ms", 1e3];

  const each = tick(range, Math.max(2, width / 120));
  const decimals = Math.max(0, -Math.floor(Math.log10(each * factor) + 1e-9));
  g.fillStyle = css(page, "muted");
  for (let t = Math.ceil(start / each) * each; t <= end; t += each) {
    g.fillRect(xOf(page, t), 12, 1, 6);
    g.fillText(`${(t * factor).toFixed(decimals)} ${unit}`, xOf(page, t) + 3, 8);
  }
}
/** The device of each plan whose memory is drawn. */
function shown(page) {
  return page.plans.map((plan) => {
    const isChosen = plan === chosen(page);
    return isChosen ? representative(page, plan, page.state.device) : plan.devices[0];
  });
}
function drawMemory(page, width) {
  page.get("memory").hidden = page.inCalls;
  if (page.inCalls) return;
  const g = context(page.get("memory"), width, MEMORY * page.plans.length);
  const highest = Math.max(...shown(page).map((device) => device.peak)) * 1.04;
  const [line, muted, text] = ["line", "muted", "text"].map((name) => css(page, name));
  shown(page).forEach((device, p) => {
    const y = (x) => MEMORY * (p + 1) - 6 - (MEMORY - 18) * x / highest;
    g.fillStyle = text;
    g.fillText(page.plans.length > 1 ? `${"AB"[p]} memory` : "memory", 0, y(highest) + 2, 50);
    for (let level = 0; level <= highest; level += tick(highest, 3)) {
      g.fillStyle = line;
      g.fillRect(GUTTER, y(level), width, 1);
      g.fillStyle = muted;
      g.fillText(bytes(level), GUTTER - 8 - g.measureText(bytes(level)).width, y(level));
    }

    clip(g, MEMORY * p, width, MEMORY);
    // The sum of k purposes, over that of more: what remains visible of it is the k-th purpose.
    for (let k = page.data.purposes.length; k > 0; k -= 1) {
      g.beginPath();
      device.memory.forEach(([end, ...sizes], i) => {
        // What is in use after an operation is drawn before its end.
        const left = xOf(page, i ? device.memory[i - 1][0] : 0);
        const top = y(sum(sizes.slice(0, k)));
        g.rect(left, top, xOf(page, end) - left, y(0) - top);
      });
      g.fillStyle = purposeFill(page, k - 1);
      g.fill();
    }
    g.fillStyle = text;
    for (let x = GUTTER; x < width; x += 7) g.fillRect(x, y(device.peak), 4, 1);
    g.restore();
  });
}
function drawLegend(page) {
  const entry = (colour, name) => `<span>${square(colour)}${escaped(name)}</span>`;
  const entries = [];
  if (!page.inCalls) {
    entries.push(entry(page.data.colours.compute[0], "matrix products"));
    entries.push(entry(page.data.colours.compute[1], "other operations"));
  }
  for (const name of page.allLanes) {
    if (name !== "compute") entries.push(entry(laneColour(page, name), name));
  }
  if (!page.inCalls) entries.push("<span>memory:</span>");
  const samples = page.plans.flatMap((plan) => plan.devices.flatMap((device) => device.memory));
  page.data.purposes.forEach((name, k) => {
    const isUsed = samples.some((sample) => sample[k + 1]);
    if (isUsed) entries.push(entry(purposeFill(page, k), name));
  });
  if (!page.inCalls) entries.push("<span>┄ peak</span>");
  page.get("time-legend").innerHTML = entries.join("");
}
export function zoomTo(page, a, b) {
  const length = Math.min(1, Math.max(b - a, 1e-5));
  const start = Math.max(0, Math.min(a, 1 - length));
  choose(page, { zoom: [start, start + length] });
}
/** Zoom by a factor about a fraction of the width, and move by a fraction of it. */
function zoomBy(page, factor, centre = 0.5, move = 0) {
  const [a, b] = page.state.zoom;
  const middle = a + (b - a) * centre;
  const by = (b - a) * move;
  zoomTo(page, middle - (middle - a) * factor + by, middle + (b - middle) * factor + by);
}
function fractionAt(page, event) {
  const { left } = page.get("time").getBoundingClientRect();
  return (event.clientX - left - GUTTER) / timeWidth(page);
}
/** Return what is below the pointer: its lane, its event, and words about it. */
function hovered(page, event) {
  const fraction = fractionAt(page, event);
  if (fraction < 0) return null;
  const range = (page.state.zoom[1] - page.state.zoom[0]) * page.longest;
  const t = page.state.zoom[0] * page.longest + fraction * range;
  if (event.target === page.get("memory")) {
    const device = shown(page)[Math.floor(event.offsetY / MEMORY)];
    const sample = device?.memory.find(([end]) => end >= t);
    return sample && sample[0] && { text: sampleWords(page, t, sample) };
  }

  const row = page.lanes.find(({ y, h }) => event.offsetY >= y && event.offsetY < y + h + 2);
  if (event.target !== page.get("timeline") || !row || row.title) return null;
  const slack = 2 * range / timeWidth(page); // two pixels
  const isOfLane = (e) => (row.lane === null ? e[LANE] > 0 : e[LANE] === row.lane);
  const isNear = (e) => isOfLane(e) && t >= e[START] - slack && t <= e[END] + slack;
  const near = row.device.events.filter(isNear);
  const longer = near.reduce((a, b) => (a && a[SECONDS] >= b[SECONDS] ? a : b), null);
  return longer && { row, event: longer, text: eventWords(page, row, longer) };
}
function sampleWords(page, t, [, ...sizes]) {
  const words = [];
  sizes.forEach((x, k) => {
    if (x) words.push(`${square(purposeFill(page, k))} ${page.data.purposes[k]} ${bytes(x)}`);
  });
  return `<b>${bytes(sum(sizes))} at ${seconds(t)}</b>${words.join("<br>")}`;
}
function eventWords(page, { plan, device, name: laneName }, event) {
  const lane = event[LANE];
  const name = lane ? device.lanes[lane] : laneName;
  let title = escaped(plan.names[event[NAME]]);
  const unit = plan.names[event[UNIT]];
  const count = event[CALLS];
  if (!lane && !page.inCalls) title = `unit ${title}`;
  if (count > 1) {
    title += lane ? ` and ${integer(count - 1)} more` : `: ${plural(count, "operation")}`;
  }

  const length = page.inCalls ? plural(event[SECONDS], "call") : seconds(event[SECONDS]);
  const amounts = [length, bytes(event[BYTES])];
  if (event[FLOPS]) {
    const rate = event[FLOPS] / event[SECONDS];
    amounts.push(scaled(event[FLOPS], "FLOP"), scaled(rate, "FLOP/s"));
  }
  const lines = lane && unit && !page.inCalls ? [`unit ${escaped(unit)}`] : [];
  const begin = page.inCalls ? `call ${integer(event[START] + 1)}` : `from ${seconds(event[START])}`;
  lines.push(amounts.join(" · "), `${begin} · ${escaped(name)}`);
  if (event[ROW] >= 0) lines.push(siteOf(plan.rows[event[ROW]]));
  return `<b>${title}</b>${lines.join("<br>")}`;
}
/** Show words beside the pointer, where the window has room; without words hide them. */
export function tip(page, event, words) {
  const box = page.get("tip");
  box.hidden = !words;
  box.innerHTML = words || "";
  const { clientX: x, clientY: y } = event;
  const { left: start, top: above, width } = page.box.getBoundingClientRect();
  const hasRoomBelow = y + 18 + box.offsetHeight < innerHeight;
  const left = Math.max(4, Math.min(x - start + 14, width - box.offsetWidth - 8));
  const top = (hasRoomBelow ? y + 18 : Math.max(4, y - box.offsetHeight - 12)) - above;
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}

// -- numbers, details, tables ---------------------------------------------------------------------
const TILES = {
  seconds: ["step", seconds],
  mfu: ["MFU", percent],
  tokens: ["tokens a second", (x) => scaled(x, "").trim()],
  peak: ["peak memory", bytes],
  utilization: ["of peak FLOP/s", percent, "all operations, recomputed ones too"],
  calls: ["calls of a rank", integer],
  sent: ["sent by a device", bytes],
  exposed: ["waits for network", seconds],
  idle: ["waits for stages", seconds],
  compute: ["computation", seconds],
};
const letter = (page, p) => (page.plans.length > 1 ? `<em>${"AB"[p]}</em> ` : "");
function drawNumbers(page) {
  let tiles = "";
  for (const [key, [name, format, words]] of Object.entries(TILES)) {
    const isKnown = page.plans.some((plan) => (
      key === "idle" ? plan.numbers.idle : plan.numbers[key] !== undefined));
    if (!isKnown) continue;
    const values = page.plans.map((plan, p) => tileValue(page, key, format, p));
    const title = key === "mfu" ? page.data.mfu : words;
    tiles += `<div title="${title || ""}"><span>${name}</span>${values.join("")}</div>`;
  }
  page.get("numbers").innerHTML = tiles;

  const button = ({ mesh }, p) => {
    const attributes = `data-plan="${p}" aria-pressed="${p === page.state.plan}"`;
    return `<button ${attributes}>${letter(page, p)} ${escaped(mesh)}</button>`;
  };
  const [first] = page.plans;
  page.get("plans").innerHTML = page.plans.length > 1
    ? page.plans.map(button).join("") : `<small>${escaped(first.mesh)}</small>`;
}
/** Return a number of a plan, with the limit of a peak, and the change from the first plan. */
function tileValue(page, key, format, p) {
  const plan = page.plans[p];
  const value = plan.numbers[key];
  const first = page.plans[0].numbers[key];
  if (value === undefined) return `<b>${letter(page, p)}–</b>`;
  let words = `${letter(page, p)}${format(value)}`;
  if (key === "peak" && plan.capacity !== page.plans[p - 1]?.capacity) {
    words += ` <em>of ${bytes(plan.capacity).replace(".0 ", " ")}</em>`;
  }
  if (p && first) {
    const sign = value < first ? "−" : "+";
    words += ` <em>${sign}${percent(Math.abs(value / first - 1))}</em>`;
  }
  const isOver = key === "peak" && value > plan.capacity;
  return `<b class="${isOver ? "over" : ""}">${words}</b>`;
}
/**
 * Return a table: a row is [attributes, cells...]. Numbers, which are [text, exact], are aligned on
 * the right.
 */
export function table(head, rows) {
  const title = (x) => (Array.isArray(x) ? `<th class="n">${x[0]}</th>` : `<th>${x}</th>`);
  const cell = (x) => (
    Array.isArray(x) ? `<td class="n" title="${x[1] ?? ""}">${x[0]}</td>` : `<td>${x}</td>`);
  const line = ([attributes, ...each]) => `<tr ${attributes}>${each.map(cell).join("")}</tr>`;
  const lines = rows.slice(0, MOST).map(line);
  const more = rows.length - MOST;
  if (more > 0) lines.push(`<tr><td colspan="9">and ${integer(more)} more</td></tr>`);
  const heads = head.some((x) => x.length) ? `<tr>${head.map(title).join("")}</tr>` : "";
  return `<table>${heads}${lines.join("")}</table>`;
}
function row(name, number, isChosen) {
  return `tabindex="0" data-${name}="${number}" aria-selected="${isChosen}"`;
}
const amount = (x) => [bytes(x), `${integer(x)} bytes`];
/** The line of the layer; of the step itself, which has none, the units that it is for. */
function siteOf({ site, units }) {
  if (site) return code(site);
  return `<small>the step${units ? `, for ${escaped(units)}` : ""}</small>`;
}

// -- the plan, and what differs -------------------------------------------------------------------
/** Write what the plan is; of two plans both, with the facts that differ. */
function drawFacts(page) {
  const titles = [...new Set(page.plans.flatMap(({ facts }) => Object.keys(facts)))];
  const rows = titles.map((title) => {
    const texts = page.plans.map(({ facts }) => facts[title] ?? "–");
    const isSame = texts.every((text) => text === texts[0]);
    const attributes = isSame ? "" : 'class="differs"';
    const warned = title === "differs" ? texts.map((x) => `<span class="warn">${escaped(x)}</span>`) : null;
    return [attributes, title, ...(warned || texts.map(escaped))];
  });
  const head = page.plans.length > 1 ? ["", "A", "B"] : ["", ""];
  page.get("facts").innerHTML = table(head, rows);
  page.get("facts-title").textContent = page.inCalls ? "Program" : "Plan";
  if (page.plans.length > 1) drawDifferences(page);
  else drawWhy(page);
}
/** Write why the plan is the best of a search: the others, and the term by which each is slower. */
function drawWhy(page) {
  const [{ others, tried, numbers }] = page.plans;
  page.get("why-panel").hidden = !others.length;
  page.get("facts-panel").classList.toggle("wide", !others.length);
  const rows = others.map(({ plan, seconds: time, mfu, peak, reason }, i) => [
    i ? "" : 'class="best"',
    escaped(plan),
    [seconds(time)],
    [percent(mfu)],
    [bytes(peak)],
    escaped(i ? reason || "as fast" : "the best"),
  ]);
  const head = ["plan", ["step"], ["MFU"], ["peak"], "why not"];
  page.get("why").innerHTML = table(head, rows);
  const compared = tried ? ` <small>of ${integer(tried)} plans that were compared</small>` : "";
  page.get("why-title").innerHTML = `Why this plan${compared}`;
  if (others.length && Math.abs(others[0].seconds / numbers.seconds - 1) > 0.01) {
    page.get("why-title").innerHTML += ` <small>its program: ${seconds(numbers.seconds)}</small>`;
  }
}
/** Write the terms of two plans beside each other: seconds, memory at the peak and bytes sent. */
function drawDifferences(page) {
  const terms = page.plans.map(termsOf);
  const titles = [...new Set(terms.flatMap((each) => [...each.keys()]))];
  const rows = titles.map((title) => {
    const [, format] = terms[0].get(title) || terms[1].get(title);
    const [a, b] = terms.map((each) => (each.get(title) || [0])[0]);
    const isChanged = Math.abs(b - a) > 0.005 * Math.max(Math.abs(a), Math.abs(b));
    const sign = b > a ? "+" : "−";
    let change = "=";
    if (isChanged) change = `${b > a ? "▲" : "▼"} ${sign}${format(Math.abs(b - a))}`;
    return [isChanged ? 'class="differs"' : "", title, [format(a)], [format(b)], [change]];
  });
  page.get("why-panel").hidden = false;
  page.get("facts-panel").classList.remove("wide");
  page.get("why-title").textContent = "Differences";
  page.get("why").innerHTML = table(["", ["A"], ["B"], ["B − A"]], rows);
}
/** The terms of a plan, [value, format], by title. */
export function termsOf(plan) {
  const terms = new Map();
  const { numbers } = plan;
  if (numbers.seconds) terms.set("step", [numbers.seconds, seconds]);
  if (numbers.compute) terms.set("computation", [numbers.compute, seconds]);
  for (const [axes, time] of Object.entries(plan.exposed || {})) {
    terms.set(`waits for network: ${axes}`, [time, seconds]);
  }
  if (numbers.idle) terms.set("waits for stages", [numbers.idle, seconds]);
  if (numbers.copies) terms.set("waits at the end", [numbers.copies, seconds]);
  const fullest = plan.devices.reduce((a, b) => (b.peak > a.peak ? b : a));
  for (const [purpose, size] of Object.entries(fullest.purposes)) {
    terms.set(`memory: ${purpose}`, [size, bytes]);
  }
  for (const { collective, axes, sent } of plan.rows) {
    const title = `sent: ${collective} along ${axes.join(", ")}`;
    terms.set(title, [(terms.get(title) || [0])[0] + sent, bytes]);
  }
  return terms;
}
/** Write about the chosen leaf, and the memory and the shards of the chosen device. */
function drawDetails(page) {
  const plan = chosen(page);
  const device = representative(page, plan, page.state.device);
  const leaf = plan.leaves[page.state.leaf];
  const holders = device.holders.map(([size, purpose, site]) => {
    const colour = purposeFill(page, page.data.purposes.indexOf(purpose));
    return ["", square(colour) + purpose, amount(size), siteOf({ site })];
  });

  const arrays = []; // of which the device has a shard, the largest first
  plan.leaves.forEach((each, number) => {
    const shape = localShape(plan, each, page.state.device);
    const size = localBytes(plan, each, page.state.device);
    if (shape) arrays.push({ each, number, shape, size });
  });
  arrays.sort((a, b) => b.size - a.size);
  const rows = arrays.map(({ each, number, shape, size }) => [
    row("leaf", number, number === page.state.leaf),
    escaped(each.path),
    code(`[${shape.join(", ")}]`),
    amount(size),
  ]);

  const total = bytes(sum(arrays.map(({ size }) => size)));
  const words = `${written(plan, page.state.device)} · peak ${bytes(device.peak)}`;
  if (page.inCalls) {
    drawRank(page, plan, device);
    return;
  }
  page.get("details").innerHTML = (leaf ? leafWords(page, plan, leaf) : "")
    + `<h2>Device ${integer(page.state.device)} <small>${words}</small></h2>`
    + `<h3>At the peak</h3>${purposesOf(page, device)}`
    + table(["for", ["bytes"], "source line"], holders)
    + `<h3>${plural(arrays.length, "array")}, ${total}</h3>`
    + table(["array", "local shape", ["bytes"]], rows);
}
/** Write the bytes at the peak by purpose, the most first. */
function purposesOf(page, { purposes }) {
  const sorted = Object.entries(purposes).sort((a, b) => b[1] - a[1]);
  const words = sorted.map(([purpose, size]) => (
    `<span>${square(page.data.colours.purposes[purpose])}${purpose} ${bytes(size)}</span>`));
  return `<p class="legend">${words.join("")}</p>`;
}
/** Write the calls of a rank, in order. */
function drawRank(page, plan, device) {
  const calls = device.events.filter((event) => event[LANE]);
  const rows = calls.map((event, i) => [
    row("row", event[ROW], event[ROW] === page.state.row),
    [integer(i + 1)],
    escaped(plan.names[event[NAME]]),
    escaped(plan.rows[event[ROW]].axes.join(", ")),
    amount(event[BYTES]),
    siteOf(plan.rows[event[ROW]]),
  ]);
  page.get("details").innerHTML = `<h2>Rank ${integer(device.number)} <small>`
    + `${written(plan, device.number)} · ${plural(calls.length, "call")}, ${bytes(device.sent)} sent</small></h2>`
    + table([["call"], "collective", "axis", ["sent"], "source line"], rows);
}
/** The chosen leaf: its type, its shard of the chosen device, and the events of its unit. */
function leafWords(page, plan, leaf) {
  const words = [`${bytes(leaf.bytes)} in all`];
  if (leaf.layout < 0) {
    words.push("sharded by the step");
  } else {
    const shape = localShape(plan, leaf, page.state.device);
    const size = bytes(localBytes(plan, leaf, page.state.device));
    const shard = shape ? `[${shape.join(", ")}], ${size}` : "none";
    words.push(`${shard} on device ${integer(page.state.device)}`);
  }
  if (leaf.unit) words.push(`unit ${escaped(leaf.unit)}`);

  const rows = lifeOf(page, plan, leaf).map(([verb, start, end]) => {
    const attributes = `tabindex="0" data-from="${start}" data-to="${end}"`;
    return [attributes, verb, [seconds(start)], [seconds(end - start)]];
  });
  let life = "";
  if (rows.length) {
    life = `<h3>Life in the step</h3>${table(["event", ["from"], ["seconds"]], rows)}`;
  }
  return `<h2>${escaped(leaf.path)}</h2>${code(leaf.type)}<br>${words.join(" · ")}${life}<hr>`;
}
const VERBS = { all_gather: "gathered", psum_scatter: "reduced", psum: "reduced" };
/** List when the unit of a leaf is gathered, used, reduced and updated: [verb, start, end]. */
function lifeOf(page, plan, leaf) {
  const unit = unitOf(page, plan);
  const update = plan.names.indexOf("update");
  const isUpdated = /^(params|state)/.test(leaf.path);
  const stage = plan.layouts[leaf.layout]?.place.find(([axis]) => axis === plan.stage);
  const device = stage ? plan.devices[stage[1]] : representative(page, plan, page.state.device);

  const life = [];
  for (const event of device.events) {
    const isUnit = event[LANE] === 0;
    const used = plan.rows[event[ROW]]; // the collective of an event, if it is one
    const isUpdate = isUnit && event[UNIT] === update && isUpdated;
    const isUse = event[UNIT] === unit && (isUnit || (used && VERBS[used.collective]));
    let verb = "used";
    if (isUpdate) verb = "updated";
    else if (used) verb = `${VERBS[used.collective]} along ${used.axes.join(", ")}`;
    if (isUpdate || isUse) life.push([verb, event[START], event[END]]);
  }
  return life.sort((a, b) => a[1] - b[1]);
}
function drawLedger(page) {
  const plan = chosen(page);
  const spent = (device, number) => (
    sum(device.events.map((event) => (event[ROW] === number ? event[SECONDS] : 0))));
  const rows = plan.rows.map((each, number) => {
    const { collective, axes, calls, sent } = each;
    const entries = [
      row("row", number, number === page.state.row),
      escaped(collective),
      escaped(axes.join(", ")),
      [integer(calls)],
      amount(sent),
    ];
    if (!page.inCalls) {
      entries.push([seconds(Math.max(...plan.devices.map((device) => spent(device, number))))]);
    }
    return [...entries, siteOf(each)];
  });
  const head = ["collective", "axis", ["calls"], ["bytes sent"], "source line"];
  if (!page.inCalls) head.splice(4, 0, ["seconds"]);
  page.get("ledger").innerHTML = table(head, rows);

  const sent = plan.numbers.sent ?? sum(plan.rows.map((each) => each.sent));
  let words = `${bytes(sent)} sent by a device`;
  if (page.state.row >= 0) {
    const row = plan.rows[page.state.row];
    const sizes = plan.axes.map(([name, n]) => (row.axes.includes(name) ? n : 1));
    const members = integer(product(sizes));
    words = `${row.collective} along ${row.axes.join(", ")}: ${bytes(row.sent)} from each device of `
      + members;
  }
  page.get("ledger-note").textContent = words;
}
function drawLeaves(page) {
  const { leaves } = chosen(page);
  page.get("leaves-panel").hidden = page.inCalls;
  page.get("save-leaves").hidden = page.inCalls;
  const words = page.state.filter.toLowerCase().split(/\s+/);
  const rows = [];
  leaves.forEach((leaf, number) => {
    const text = `${leaf.path} ${leaf.type}`.toLowerCase();
    if (!words.every((word) => text.includes(word))) return;
    rows.push([
      row("leaf", number, number === page.state.leaf),
      escaped(leaf.path),
      code(leaf.type),
      escaped(leaf.unit),
      amount(leaf.bytes),
    ]);
  });
  page.get("leaves").innerHTML = table(["path", "type", "unit", ["bytes in all"]], rows);
  page.get("leaves-note").textContent = `${integer(rows.length)} of ${integer(leaves.length)}`;
}

// -- exports --------------------------------------------------------------------------------------
function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text]));
  link.download = name;
  link.click();
}
const quoted = (x) => (/[",\n]/.test(x) ? `"${String(x).replace(/"/g, '""')}"` : x);
const csv = (rows) => rows.map((each) => `${each.map(quoted).join(",")}\n`).join("");
export function ledgerCsv(plan) {
  const rows = [["collective", "axes", "calls", "bytes", "source line"]];
  for (const { collective, axes, calls, sent, site } of plan.rows) {
    rows.push([collective, axes.join("+"), calls, sent, site]);
  }
  return csv(rows);
}
function leavesCsv(page, plan) {
  const rows = [["path", "type", "unit", "bytes", `bytes on device ${page.state.device}`]];
  for (const leaf of plan.leaves) {
    const local = localBytes(plan, leaf, page.state.device);
    rows.push([leaf.path, leaf.type, leaf.unit, leaf.bytes, local]);
  }
  return csv(rows);
}
/** The timelines as trace events, which Perfetto reads. */
export function traceJson(page) {
  const traceEvents = [];
  page.plans.forEach((plan, p) => plan.devices.forEach((device) => {
    traceEvents.push(...traceOf(page, plan, device, p * 1e6 + device.number));
  }));
  return JSON.stringify({ displayTimeUnit: "ms", traceEvents });
}
/** Return the trace events of a device, as the process `pid`: times are microseconds. */
function traceOf(page, plan, { number, lanes: names, events, memory }, pid) {
  const traceEvents = [];
  const addTitle = (tid, name, title) => {
    traceEvents.push({ ph: "M", pid, tid, name, args: { name: title } });
  };
  addTitle(0, "process_name", `${plan.mesh} device ${number}`);
  names.forEach((lane, tid) => addTitle(tid, "thread_name", lane));
  for (const event of events) {
    traceEvents.push({
      ph: "X",
      pid,
      tid: event[LANE],
      name: plan.names[event[NAME]],
      ts: event[START] * 1e6,
      dur: (event[END] - event[START]) * 1e6,
      args: {
        unit: plan.names[event[UNIT]],
        bytes: event[BYTES],
        flops: event[FLOPS],
        calls: event[CALLS],
        line: plan.rows[event[ROW]]?.site,
      },
    });
  }
  for (const [t, ...values] of memory) {
    const args = Object.fromEntries(page.data.purposes.map((name, k) => [name, values[k]]));
    traceEvents.push({ ph: "C", pid, name: "memory", ts: t * 1e6, args });
  }
  return traceEvents;
}

// -- state ----------------------------------------------------------------------------------------
/** Change the state, and draw what depends on it. */
export function choose(page, change) {
  if ("plan" in change && change.plan !== page.state.plan) {
    // The leaf stays chosen by its path; rows of the ledger are others.
    const next = page.plans[change.plan];
    const path = chosen(page).leaves[page.state.leaf]?.path;
    const leaf = next.leaves.findIndex((each) => each.path === path);
    const device = Math.min(page.state.device, meshSize(next) - 1);
    change = { device, leaf, row: -1, within: [], ...change };
  }
  Object.assign(page.state, change);
  page.onChoose(page);
  const isAll = (key) => Object.keys(change).every((each) => each === key);
  if (isAll("zoom")) drawTimeline(page);
  else if (isAll("filter")) drawLeaves(page);
  else draw(page);
}
/** Write the state as the fragment of a URL. */
export function fragmentOf(page) {
  const [a, b] = page.state.zoom;
  const parts = { ...page.state };
  parts.leaf = chosen(page).leaves[page.state.leaf]?.path;
  parts.row = page.state.row >= 0 && `${page.state.row}`; // a text, as row 0 is written, too
  parts.within = page.state.within.join(".");
  parts.zoom = b - a < 1 && page.state.zoom.map((x) => +x.toFixed(6)).join("-");
  return new URLSearchParams(Object.entries(parts).filter(([, value]) => value));
}
/** Read the state from a fragment; what it does not have is as at first. */
export function readFragment(page, fragment) {
  const parts = new URLSearchParams(fragment);
  const bounded = (name, end) => {
    const number = parseInt(parts.get(name), 10) || 0;
    return Math.max(0, Math.min(number, end - 1));
  };
  const { state } = page;
  state.plan = bounded("plan", page.plans.length);
  state.device = bounded("device", meshSize(chosen(page)));
  state.leaf = chosen(page).leaves.findIndex((leaf) => leaf.path === parts.get("leaf"));
  state.row = parts.has("row") ? bounded("row", chosen(page).rows.length) : -1;
  const digits = (parts.get("within") || "").split(".").filter(Boolean).map(Number);
  const steps = chosen(page).axes.flatMap(stepsOf);
  const areDigits = digits.every((digit, i) => digit >= 0 && digit < steps[i]?.n);
  state.within = areDigits ? digits : [];
  const [a, b] = (parts.get("zoom") || "").split("-").map(Number);
  const isZoom = a >= 0 && a < b && b <= 1;
  state.zoom = isZoom ? [a, b] : [0, 1];
  state.filter = parts.get("filter") || "";
  page.get("filter").value = state.filter;
}
/** Draw all; the focused row of a table stays focused. */
export function draw(page) {
  const focused = page.root.activeElement?.closest("tr");
  const box = focused?.closest("div, #details");
  const number = focused?.rowIndex;
  drawNumbers(page);
  drawFacts(page);
  drawMesh(page);
  drawDetails(page);
  drawTimeline(page);
  drawLegend(page);
  drawLedger(page);
  drawLeaves(page);
  if (focused?.isConnected === false) { // its table was written anew
    box.querySelector("table:last-of-type")?.rows[number]?.focus({ preventScroll: true });
  }
}
/** Choose what an element is of: a plan, a row of the ledger, a leaf, or a range of time. */
function pick(page, element) {
  const target = element.closest("[data-row], [data-leaf], [data-from], [data-plan], [data-within]");
  const { row: number, leaf, from, to, plan, within } = target?.dataset || {};
  const { state } = page;
  if (within !== undefined) choose(page, { within: within ? within.split(".").map(Number) : [] });
  if (plan) choose(page, { plan: +plan });
  if (number) choose(page, { row: +number === state.row ? -1 : +number, leaf: -1 });
  if (leaf) choose(page, { leaf: +leaf === state.leaf ? -1 : +leaf, row: -1 });
  if (from) {
    // The range is the middle fifth of the timeline.
    const start = (3 * from - 2 * to) / page.longest;
    const end = (3 * to - 2 * from) / page.longest;
    zoomTo(page, start - 1e-3, end + 1e-3);
  }
}
const ARROWS = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};
/** Do what a key means where it is pressed; return true if it means anything. */
function press(page, key, target) {
  const [dx, dy] = ARROWS[key] || [0, 0];
  const tr = target.closest("tr[tabindex]");
  const isMesh = target === page.get("mesh");
  const isTime = target === page.get("time");
  const hasChoice = page.state.leaf >= 0 || page.state.row >= 0;
  if (key === "Escape") choose(page, hasChoice ? { leaf: -1, row: -1 } : { zoom: [0, 1] });
  else if (tr && (key === "Enter" || key === " ")) pick(page, tr);
  else if (tr && dy) (dy < 0 ? tr.previousElementSibling : tr.nextElementSibling)?.focus();
  else if (isMesh && (dx || dy)) moveDevice(page, [dx, dy]);
  else if (isMesh && key === "Enter") enter(page, cellHere(page, chosen(page)));
  else if (isMesh && key === "Backspace") leave(page);
  else if (isTime && dx) zoomBy(page, 1, 0.5, 0.2 * dx);
  else if (isTime && "+=-".includes(key)) zoomBy(page, key === "-" ? 1 / 0.6 : 0.6);
  else if (isTime && (key === "0" || key === "Home")) zoomTo(page, 0, 1);
  else return false;
  return true;
}

// -- a page ---------------------------------------------------------------------------------------
/**
 * Draw a document into a root, which has the elements of PANELS in a box with the id "page", and
 * return the page. `fragment` says what is chosen at first; `onChoose(page)` is called after each
 * choice; the page ends with the signal.
 */
export function open(root, data, { fragment = "", onChoose = () => {}, signal } = {}) {
  const page = { root, onChoose, signal, get: (id) => root.getElementById(id) };
  page.box = page.get("page");
  // `within`: the group of the mesh that is zoomed in on, by its steps: see `viewOf`.
  page.state = { plan: 0, device: 0, leaf: -1, row: -1, zoom: [0, 1], filter: "", within: [] };
  setDocument(page, data);
  readFragment(page, fragment);
  followTheme(page);
  listen(page);
  draw(page);
  drawAtOtherWidths(page);
  return page;
}
/** Draw another document, of which a plan is chosen. A leaf and a row stay chosen by their names. */
export function show(page, data, number = 0) {
  const { state } = page;
  const before = chosen(page);
  const leaf = before.leaves[state.leaf]?.path;
  const row = rowKey(before.rows[state.row]);
  const axes = JSON.stringify(before.axes);
  setDocument(page, data);
  state.plan = number;

  const plan = chosen(page);
  state.leaf = plan.leaves.findIndex(({ path }) => path === leaf);
  state.row = plan.rows.findIndex((each) => rowKey(each) === row);
  state.device = Math.min(state.device, meshSize(plan) - 1);
  const isSameMesh = JSON.stringify(plan.axes) === axes;
  if (!isSameMesh) state.within = [];
  draw(page);
}
const rowKey = (row) => row && `${row.collective} ${row.axes.join("+")} ${row.site}`;
function setDocument(page, data) {
  page.data = data;
  page.plans = data.plans;
  page.box.classList.toggle("two", data.plans.length === 2); // their numbers and lanes need more room
  page.inCalls = data.clock === "calls"; // a recording has no seconds, but calls in order
  page.longest = Math.max(...data.plans.map(lengthOf));
  page.allLanes = [...new Set(data.plans.flatMap(lanesOfPlan))].slice(1); // but the units
  page.networks = page.allLanes.filter((name) => name.startsWith("network"));
}
/** The element that has the styles of a root. */
const hostOf = (root) => root.host ?? root.documentElement;
/** Have the theme of JupyterLab, or that of the system. */
function followTheme(page) {
  const host = hostOf(page.root);
  const system = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => {
    const { jpThemeLight } = document.body.dataset;
    const isDark = jpThemeLight === undefined ? system.matches : jpThemeLight === "false";
    host.dataset.theme = isDark ? "dark" : "light";
  };
  const change = () => {
    follow();
    draw(page);
  };
  follow();
  system.addEventListener("change", change, { signal: page.signal });
  const observer = new MutationObserver(change);
  observer.observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
  page.signal?.addEventListener("abort", () => observer.disconnect());
}
/** Draw when the box has another width, and not for its first one. */
function drawAtOtherWidths(page) {
  let drawn = page.box.clientWidth;
  const observer = new ResizeObserver(() => {
    const width = page.box.clientWidth;
    if (width === drawn || !width) return; // without a width it is in a closed tab
    drawn = width;
    draw(page);
  });
  observer.observe(page.box);
  page.signal?.addEventListener("abort", () => observer.disconnect());
}
/** Listen to clicks and keys, to the mesh, the timeline and the buttons. */
function listen(page) {
  const { root, signal } = page;
  root.addEventListener("click", (event) => pick(page, event.target), { signal });
  root.addEventListener("keydown", (event) => {
    const isShortcut = event.ctrlKey || event.metaKey || event.altKey; // of the browser
    if (isShortcut || event.defaultPrevented) return;
    if (press(page, event.key, event.target)) event.preventDefault();
  }, { signal });
  listenToMesh(page);
  listenToTimeline(page);

  const on = (id, type, act) => page.get(id).addEventListener(type, act);
  on("zoom-in", "click", () => zoomBy(page, 0.5));
  on("zoom-out", "click", () => zoomBy(page, 2));
  on("zoom-all", "click", () => zoomTo(page, 0, 1));
  on("save-ledger", "click", () => save("ledger.csv", ledgerCsv(chosen(page))));
  on("save-leaves", "click", () => save("leaves.csv", leavesCsv(page, chosen(page))));
  on("save-trace", "click", () => save("trace.json", traceJson(page)));
  on("filter", "input", (event) => choose(page, { filter: event.target.value }));
}
function listenToMesh(page) {
  const mesh = page.get("mesh");
  mesh.addEventListener("click", (event) => enter(page, cellAt(page, event)));
  mesh.addEventListener("mouseleave", (event) => tip(page, event));
  mesh.addEventListener("mousemove", (event) => {
    const cell = cellAt(page, event);
    tip(page, event, cell < 0 ? "" : tipOfCell(page, cell));
  });
}
function tipOfCell(page, cell) {
  const plan = chosen(page);
  const device = page.cells.device[cell];
  const { steps, devices } = page.cells.view;
  const amountWords = `${page.inCalls ? "sends" : "peak"} ${bytes(amountOf(page, plan, device))}`;
  const noun = page.inCalls ? "rank" : "device";
  const title = devices > 1 ? plural(devices, noun) : `${noun} ${integer(device)}`;
  return `<b>${title}</b>${writtenGroup(plan, steps, page.cells.digits[cell])}<br>${amountWords}`;
}
function listenToTimeline(page) {
  const time = page.get("time");
  const cursor = page.get("cursor");
  let drag = null; // { x, zoom } where a drag began
  let isDragged = false;
  time.addEventListener("pointerdown", ({ clientX: x }) => {
    drag = { x, zoom: page.state.zoom };
    isDragged = false;
  });
  addEventListener("pointerup", () => { drag = null; }, { signal: page.signal });
  time.addEventListener("mouseleave", (event) => {
    tip(page, event);
    cursor.hidden = true;
  });
  time.addEventListener("pointermove", (event) => {
    const fraction = fractionAt(page, event);
    cursor.hidden = !(fraction >= 0 && fraction <= 1);
    cursor.style.left = `${event.clientX - time.getBoundingClientRect().left}px`;
    if (!drag) {
      tip(page, event, hovered(page, event)?.text);
      return;
    }
    const distance = drag.x - event.clientX;
    if (Math.abs(distance) > 3) isDragged = true; // less is a click with an unsteady hand
    if (!isDragged) return;
    const [start, end] = drag.zoom;
    const by = distance / timeWidth(page) * (end - start);
    zoomTo(page, start + by, end + by);
  });
  time.addEventListener("click", (event) => {
    const { row: lane, event: timed } = (!isDragged && hovered(page, event)) || {};
    if (timed) chooseEvent(page, lane, timed);
  });
  time.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      zoomBy(page, event.deltaY < 0 ? 0.8 : 1.25, Math.max(0, fractionAt(page, event)));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      zoomBy(page, 1, 0.5, event.deltaX / timeWidth(page));
    } else {
      return; // the page scrolls
    }
    event.preventDefault();
  }, { passive: false });
}
/** Choose the device of a lane, and the row of the ledger of an event on it. */
function chooseEvent(page, { plan, device: lane }, event) {
  const isHere = plan === chosen(page) && lane === representative(page, plan, page.state.device);
  const device = isHere ? page.state.device : lane.number;
  choose(page, { plan: page.plans.indexOf(plan), device, row: event[ROW], leaf: -1 });
}
