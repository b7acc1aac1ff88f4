// The layouts of leaves: each dim is a box with the axes that shard it. An axis is dragged from one
// dim to another, or off, by a pointer or by keys; what it becomes is an override of the state.
import { bytes, escaped, integer, plural, table } from "../explore/page.js";
import { activeSlot, edit } from "./lab.js";

const FLAT = "flat"; // the dim of axes that shard all dims as one
const OFF = "off"; // the dim of an axis that shards none
const PLACES = { flat: "flattened", off: "off" };
const FAR = 4; // pixels from which a press is a drag

// `lab.held`: the axis that is dragged, { pattern, axis, from, to, isByKey, x, y }, or null.

/** Draw the table of leaves, and the shards of the chosen one. */
export function drawLayouts(lab) {
  const { answer, error } = activeSlot(lab);
  const { axes, leaves } = answer.layouts;
  const focus = focusOf(lab);
  const present = axes.filter(({ size }) => size > 1);
  lab.get("axes").innerHTML = present.map(({ name, size, role }) => (
    `<span class="chip fixed" title="${escaped(role ?? "")}">${escaped(name)} ${integer(size)}</span>`)).join(" ");
  const head = ["leaf", "dims", "flat", "off", ["on a device"], ""];
  lab.get("layouts").innerHTML = table(head, leaves.map((leaf) => leafRow(lab, leaf, error)));
  focusAgain(lab, focus);
  drawShards(lab);
}
function leafRow(lab, leaf, error) {
  const { pattern, count, dtype, type, why, per_device: local, overridden } = leaf;
  const isChosen = leaf.leaves.includes(lab.page.state.leaf);
  const [number] = leaf.leaves;
  const choice = number === undefined ? "" : `data-leaf="${number}"`;
  const attributes = `tabindex="0" ${choice} data-pattern="${escaped(pattern)}" aria-selected="${isChosen}"`;
  const times = count > 1 ? ` <small>× ${integer(count)}</small>` : "";
  const isWrong = error?.field === `overrides.${pattern}`;
  const note = isWrong ? `<p class="error" role="alert">${escaped(error.text)}</p>` : "";
  const placed = placedAxes(lab, leaf);
  const hasFlat = canBeFlat(leaf);
  const reset = overridden ? `<button class="reset" title="as the rules have it">reset</button>` : "";
  return [
    attributes,
    `<span title="${escaped([type, why].filter(Boolean).join("\n"))}">${escaped(pattern)}</span>${times}
      <small>${escaped(dtype)}</small>${note}`,
    placed.dims.map((axes, dim) => dimMarkup(lab, leaf, dim, axes)).join(""),
    hasFlat ? dimMarkup(lab, leaf, FLAT, placed.flat) : "",
    dimMarkup(lab, leaf, OFF, placed.off),
    [bytes(local), `${plural(leaf.bytes, "byte")} in all`],
    reset,
  ];
}
/**
 * The axes of each dim of a leaf, those of all dims as one, and those that could shard it and do
 * not. An axis whose drop has no answer yet is where it was dropped.
 */
function placedAxes(lab, { pattern, dims, flat, movable }) {
  const { state, answer } = activeSlot(lab);
  const wanted = state.overrides?.[pattern] ?? {};
  const answered = answer.state.overrides?.[pattern] ?? {};
  const moved = Object.keys(wanted).filter((axis) => answered[axis] !== wanted[axis]);
  const others = (axes) => axes.filter((axis) => !moved.includes(axis));
  const placed = { dims: dims.map(others), flat: others(flat) };
  for (const axis of moved) placed.dims[wanted[axis]]?.push(axis);
  const used = [...placed.dims.flat(), ...placed.flat];
  return { ...placed, off: movable.filter((axis) => !used.includes(axis)) };
}
/** Return true for a leaf that its rules flatten, or may flatten without the overrides. */
const canBeFlat = ({ flat, overridden }) => flat.length > 0 || overridden;
function dimMarkup(lab, leaf, dim, axes) {
  const chips = axes.map((axis) => chipMarkup(lab, leaf, dim, axis)).join("");
  const size = Number.isInteger(dim) ? `<small>${integer(leaf.shape[dim])}</small>` : "";
  const { held } = lab;
  const isHere = held?.pattern === leaf.pattern;
  const why = isHere ? leaf.refused?.[held.axis]?.[dim] : null;
  const classes = ["dim"];
  if (isHere) classes.push(why ? "refused" : "open");
  if (isHere && held.to === dim) classes.push("target");
  return `<span class="${classes.join(" ")}" data-dim="${dim}" title="${escaped(why ?? "")}">${size}${chips}</span>`;
}
function chipMarkup(lab, { pattern, movable, fixed }, dim, axis) {
  if (!movable.includes(axis)) {
    return `<span class="chip fixed" title="${escaped(fixed[axis] ?? "")}">${escaped(axis)}</span>`;
  }
  const isHeld = lab.held?.pattern === pattern && lab.held.axis === axis;
  return `<button class="chip" data-axis="${escaped(axis)}" data-from="${dim}" aria-pressed="${isHeld}"
    aria-label="axis ${escaped(axis)}, ${PLACES[dim] ?? `on dim ${dim}`} of ${escaped(pattern)}">${escaped(axis)}</button>`;
}
function drawShards(lab) {
  const { shards } = activeSlot(lab);
  const picture = shards?.svg ? `<h3>${escaped(shards.pattern)}</h3>${shards.svg}` : "";
  const box = lab.get("shards");
  if (box.dataset.drawn === picture) return; // as the box may be scrolled
  box.dataset.drawn = picture;
  box.innerHTML = picture || "<small>choose a leaf to see its shards</small>";
}

/** The row of the leaf that a field of the state is about; undefined for another field. */
export function rowOf(lab, field) {
  const rows = [...lab.get("layouts").querySelectorAll("tr")];
  return rows.find((row) => field === `overrides.${row.dataset.pattern}`);
}
/** What has the focus in the table: a leaf, and an axis of it. */
function focusOf(lab) {
  const element = lab.root.activeElement;
  const row = element?.closest("#layouts tr");
  return row && { pattern: row.dataset.pattern, axis: element.dataset.axis };
}
function focusAgain(lab, focus) {
  if (!focus) return;
  const rows = [...lab.get("layouts").querySelectorAll("tr")];
  const row = rows.find((each) => each.dataset.pattern === focus.pattern);
  const chips = [...(row?.querySelectorAll(".chip[data-axis]") ?? [])];
  const chip = chips.find((each) => each.dataset.axis === focus.axis);
  (chip ?? row)?.focus({ preventScroll: true });
}

// -- dragging -------------------------------------------------------------------------------------
const dimOf = (text) => (text in PLACES ? text : Number(text));
const leafOf = (lab, pattern) => (
  activeSlot(lab).answer.layouts.leaves.find((leaf) => leaf.pattern === pattern));
/** Pick up the axis of a chip. */
function pickUp(lab, chip, place) {
  const { pattern } = chip.closest("tr").dataset;
  const { axis, from } = chip.dataset;
  lab.held = { pattern, axis, from: dimOf(from), to: dimOf(from), ...place };
  const leaf = leafOf(lab, pattern);
  speak(lab, `${axis} of ${pattern} is picked up, ${plural(leaf.shape.length, "dim")}: arrows, then Enter`);
  drawLayouts(lab);
}
function moveTo(lab, to) {
  if (to === lab.held.to) return;
  lab.held.to = to;
  const { shape, refused } = leafOf(lab, lab.held.pattern);
  const reason = refused?.[lab.held.axis]?.[to];
  const place = PLACES[to] ?? `dim ${to} of ${integer(shape[to] ?? 0)}`;
  speak(lab, reason ? `${place}: ${reason}` : place);
  drawLayouts(lab);
}
/** Drop the axis; on no dim, or on its own, nothing changes. */
function drop(lab) {
  const { pattern, axis, from, to } = lab.held;
  lab.held = null;
  lab.get("ghost").hidden = true;
  speak(lab, "");
  const isMoved = to !== null && to !== from;
  // Flattened is what a leaf is without an override.
  const values = { flat: undefined, off: null };
  if (isMoved) edit(lab, ["overrides", pattern, axis], to in values ? values[to] : to);
  drawLayouts(lab);
}
function cancel(lab) {
  lab.held.to = lab.held.from;
  drop(lab);
}
function speak(lab, words) {
  lab.get("spoken").textContent = words;
}
/** The dim below the pointer, of the leaf that is dragged; null for none. */
function dimBelow(lab, { clientX, clientY }) {
  const box = lab.root.elementFromPoint(clientX, clientY)?.closest(".dim");
  const isOfLeaf = box?.closest("tr").dataset.pattern === lab.held.pattern;
  return isOfLeaf ? dimOf(box.dataset.dim) : null;
}
function drawGhost(lab, { clientX, clientY }) {
  const { left, top } = lab.get("page").getBoundingClientRect();
  const ghost = lab.get("ghost");
  ghost.hidden = false;
  ghost.textContent = lab.held.axis;
  ghost.style.left = `${clientX - left + 8}px`;
  ghost.style.top = `${clientY - top + 8}px`;
}
/** Move a held axis by a key; return true if the key means anything. */
function pressHeld(lab, key) {
  const { held } = lab;
  const leaf = leafOf(lab, held.pattern);
  const places = [...leaf.shape.keys(), ...(canBeFlat(leaf) ? [FLAT] : []), OFF];
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[key];
  const next = places[places.indexOf(held.to) + by];
  if (key === "Escape") cancel(lab);
  else if (key === "Enter" || key === " ") drop(lab);
  else if (by && next !== undefined) moveTo(lab, next);
  else return Boolean(by);
  return true;
}
export function listenToLayouts(lab) {
  const box = lab.get("layouts");
  let pressed = null; // { chip, x, y } until it is a drag
  box.addEventListener("pointerdown", (event) => {
    const chip = event.target.closest(".chip[data-axis]");
    if (!chip || event.button !== 0) return;
    pressed = { chip, x: event.clientX, y: event.clientY };
    event.preventDefault(); // or the browser selects text
    chip.focus({ preventScroll: true });
  });
  addEventListener("pointermove", (event) => {
    if (pressed && !lab.held) {
      const distance = Math.hypot(event.clientX - pressed.x, event.clientY - pressed.y);
      if (distance > FAR) pickUp(lab, pressed.chip, { isByKey: false });
    }
    if (!lab.held || lab.held.isByKey) return;
    drawGhost(lab, event);
    moveTo(lab, dimBelow(lab, event));
  }, { signal: lab.signal });
  addEventListener("pointerup", () => {
    pressed = null;
    if (lab.held && !lab.held.isByKey) drop(lab);
  }, { signal: lab.signal });
  addEventListener("pointercancel", () => {
    pressed = null;
    if (lab.held) cancel(lab);
  }, { signal: lab.signal });

  // Keys and clicks of chips are not those of their rows.
  box.addEventListener("keydown", (event) => {
    const chip = event.target.closest(".chip[data-axis]");
    const isCommand = event.ctrlKey || event.metaKey || event.altKey;
    if (isCommand || event.key === "Tab") return;
    if (lab.held) {
      if (pressHeld(lab, event.key)) event.preventDefault();
    } else if (chip && (event.key === "Enter" || event.key === " ")) {
      pickUp(lab, chip, { isByKey: true });
      event.preventDefault();
    }
  });
  box.addEventListener("focusout", ({ relatedTarget }) => {
    const isGone = relatedTarget && !relatedTarget.closest("#layouts");
    if (lab.held?.isByKey && isGone) cancel(lab);
  });
  box.addEventListener("click", (event) => {
    const { target } = event;
    if (target.closest(".chip, .reset")) event.stopPropagation();
    if (!target.matches(".reset")) return;
    edit(lab, ["overrides", target.closest("tr").dataset.pattern], undefined);
  });
}
