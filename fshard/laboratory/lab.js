// The lab: controls of a state, an engine that answers it, and the page of fshard.explore that draws
// the answer.
//
//     a control or a drag ─> edit ─> send { id, slot, state, leaf } ─> the engine
//     receive { answer | error | shards | proof } <─ the engine: drawn if it is of the newest state
//
// A slot, "A" or "B", has a state, its newest answer, and what is wrong with the state, if anything:
// the answer before then remains, greyed. `lab.past` and `lab.future` have the states of both slots.
import { PANELS, bytes, choose, chosen, escaped, fragmentOf, open, percent, seconds, show } from "../explore/page.js";
import { controlOf, drawControls, listenToControls } from "./controls.js";
import { drawLayouts, listenToLayouts, rowOf } from "./layouts.js";

const SLOTS = ["A", "B"];
const SLOW = 400; // milliseconds after which a page says that it computes
const ICONS = { undo: "↶", redo: "↷" };

const MARKUP = `
  <header>
    <h1>fshard lab</h1>
    <nav id="plans" aria-label="layouts"></nav>
    <button id="compare"></button>
    <span class="space"></span>
    <small id="status" role="status"></small>
    <button id="undo" aria-label="undo" title="undo: Ctrl Z">${ICONS.undo}</button>
    <button id="redo" aria-label="redo" title="redo: Ctrl Shift Z">${ICONS.redo}</button>
    <button id="link"></button>
  </header>
  <p id="differences"></p>
  <p id="refused" class="notice" role="alert"></p>
  <div id="lab">
    <aside id="controls" aria-label="controls"></aside>
    <p id="first" role="status" hidden>computing the first answer …</p>
    <div id="answer" hidden>
      ${PANELS.numbers}
      <div class="panel" id="verdicts">
        <p id="proof"></p>
        <p id="words"></p>
      </div>
      <section class="panel" id="layouts-panel">
        <h2>Layouts <small>drag an axis onto a dim, or off; by keys: Enter, arrows, Enter</small>
          <span class="space"></span><small id="axes"></small></h2>
        <div id="layouts-columns">
          <div class="table" id="layouts"></div>
          <div id="shards" aria-label="shards of the chosen leaf"></div>
        </div>
        <p id="spoken" role="status"></p>
      </section>
      <main>
        ${PANELS.mesh}${PANELS.details}${PANELS.timeline}${PANELS.ledger}${PANELS.leaves}
        ${PANELS.facts}${PANELS.why}
        <section class="panel wide" id="code-panel">
          <h2>Program <small>that does this</small><span class="space"></span>${PANELS.files}
            <button id="copy-code">Copy</button></h2>
          <pre class="table" id="code" tabindex="0"></pre>
        </section>
      </main>
    </div>
  </div>
  ${PANELS.tip}
  <div id="ghost" class="chip" hidden></div>`;

/**
 * Put a lab into the box of a root, and return it.
 *
 * `engine.send(message)` sends to the engine; `receive` is to be called with what it answers.
 * `engine.linkOf(fragment)` returns the text that holds the states, and its title;
 * `engine.onFragment(fragment)` is called when they change.
 */
export function openLab(root, engine, { fragment = "", signal } = {}) {
  const lab = {
    root,
    engine,
    signal,
    get: (id) => root.getElementById(id),
    page: null, // of fshard.explore, from the first answer on
    fragment, // of that page, at first
    slots: { A: newSlot(null) },
    active: 0, // the number of the slot that the controls are of
    past: [],
    future: [],
    newest: Date.now(), // id: a page that is loaded again has higher ones
    name: crypto.getRandomValues(new Uint32Array(2)).join("-"), // of this page, of several on an engine
    held: null, // the axis that is dragged, see layouts.js
  };
  lab.get("page").innerHTML = MARKUP;
  listenToLab(lab);
  listenToControls(lab);
  listenToLayouts(lab);
  readLink(lab, new URLSearchParams(fragment));
  for (const name of namesOf(lab)) ask(lab, name);
  drawBar(lab);
  return lab;
}
function newSlot(state) {
  return { state, answer: null, before: null, error: null, proof: null, id: 0, shards: null };
}
const namesOf = (lab) => SLOTS.filter((name) => lab.slots[name]);
/** The name of the slot that the controls are of. */
export const activeName = (lab) => SLOTS[lab.active];
export const activeSlot = (lab) => lab.slots[activeName(lab)];

// -- states ---------------------------------------------------------------------------------------
/** Change one value of the active state, by the names that lead to it. */
export function edit(lab, path, value) {
  const state = structuredClone(activeSlot(lab).state);
  let inner = state;
  for (const name of path.slice(0, -1)) inner = inner[name] ??= {};
  if (value === undefined) delete inner[path.at(-1)];
  else inner[path.at(-1)] = value;
  remember(lab);
  activeSlot(lab).state = state;
  ask(lab, activeName(lab));
  drawBar(lab);
}
/** The states of both slots, and which one is active. */
const statesOf = (lab) => ({
  A: lab.slots.A.state,
  B: lab.slots.B?.state ?? null,
  active: lab.active,
});
function remember(lab) {
  lab.past.push(statesOf(lab));
  lab.future = [];
}
/** Go to the last of `from`, so that one can come back by `to`. */
function travel(lab, from, to) {
  if (!from.length) return;
  to.push(statesOf(lab));
  const states = from.pop();
  if (!states.B) delete lab.slots.B;
  else lab.slots.B ??= { ...lab.slots.A, id: 0 };
  lab.active = states.active;
  for (const name of namesOf(lab)) {
    const slot = lab.slots[name];
    const isSame = JSON.stringify(slot.state) === JSON.stringify(states[name]);
    slot.state = states[name];
    if (!isSame || slot.error) ask(lab, name);
  }
  drawLab(lab);
}
const undo = (lab) => travel(lab, lab.past, lab.future);
const redo = (lab) => travel(lab, lab.future, lab.past);
/** Lay a copy of A beside it, or remove B. */
function compare(lab) {
  remember(lab);
  if (lab.slots.B) {
    delete lab.slots.B;
    lab.active = 0;
  } else {
    lab.slots.B = { ...lab.slots.A, id: 0, before: null };
    lab.active = 1;
    ask(lab, "B");
  }
  drawLab(lab);
}

// -- link -----------------------------------------------------------------------------------------
function readLink(lab, parts) {
  for (const name of SLOTS) {
    const text = parts.get(name);
    if (!text) continue;
    try {
      lab.slots[name] = newSlot(JSON.parse(text));
    } catch {
      // A link that was cut off has no state: the engine's first one is as good.
    }
  }
}
/** The fragment of a URL that holds both states, and what is chosen on the page. */
function linkFragment(lab) {
  const parts = lab.page ? fragmentOf(lab.page) : new URLSearchParams();
  for (const name of namesOf(lab)) {
    const { state } = lab.slots[name];
    if (state) parts.set(name, JSON.stringify(state));
  }
  return parts.toString();
}
async function copy(lab, text, button) {
  const { textContent } = button;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // by the browser: the text can be selected
  }
  setTimeout(() => { button.textContent = textContent; }, 1200);
}

// -- messages -------------------------------------------------------------------------------------
/** Ask the engine about the state of a slot. */
function ask(lab, name, only) {
  const slot = lab.slots[name];
  lab.newest += 1;
  const message = {
    id: lab.newest,
    page: lab.name,
    slot: name,
    state: slot.state,
    leaf: patternOf(lab, name),
  };
  if (only) {
    lab.engine.send({ ...message, only });
    return;
  }
  slot.id = lab.newest;
  slot.isAsked = true;
  slot.isLate = false;
  setTimeout(() => {
    slot.isLate = slot.isAsked && slot.id === message.id;
    drawStatus(lab);
  }, SLOW);
  lab.engine.send(message);
}
/** The pattern of the leaf that is chosen on the page; null for none. */
function patternOf(lab, name) {
  const { page } = lab;
  const leaves = lab.slots[name].answer?.layouts.leaves;
  if (!page || !leaves) return null;
  return leaves.find((leaf) => leaf.leaves.includes(page.state.leaf))?.pattern ?? null;
}
/** Take what the engine answers. */
export function receive(lab, message) {
  const slot = lab.slots[message.slot];
  const isOfOther = message.page !== undefined && message.page !== lab.name;
  if (!slot || isOfOther) return; // the slot was removed, or it is of another page
  if (message.kind === "shards") {
    slot.askedShards = null;
    slot.shards = message.shards;
    drawLayouts(lab);
    return;
  }
  if (message.id !== slot.id) return; // of an older state
  if (message.kind === "proof") {
    slot.proof = message;
    if (slot.answer) drawProof(lab);
    return;
  }
  slot.isAsked = false;
  slot.isLate = false;
  if (message.kind === "answer") {
    slot.before = slot.answer;
    Object.assign(slot, { answer: message, state: message.state, error: null });
    slot.shards = message.shards;
  } else if (message.kind === "error") {
    slot.error = message;
  }
  drawLab(lab);
}

// -- drawing --------------------------------------------------------------------------------------
/** The document of the answers, side by side; null until all slots have one. */
function documentOf(lab) {
  const answers = namesOf(lab).map((name) => lab.slots[name].answer);
  if (!answers.every(Boolean)) return null;
  return { ...answers[0].document, plans: answers.flatMap(({ document }) => document.plans) };
}
function drawLab(lab) {
  const began = performance.now();
  const data = documentOf(lab);
  if (data && !lab.page) openPage(lab, data);
  else if (data) show(lab.page, data, lab.active);
  if (lab.slots.A.answer) drawControls(lab);
  if (data) {
    drawLayouts(lab);
    askShards(lab);
    drawProof(lab);
    drawWords(lab);
    lab.get("code").textContent = activeSlot(lab).answer.code;
  }
  drawChangedFields(lab);
  drawBar(lab);
  lab.get("page").dataset.drawn = (performance.now() - began).toFixed(0); // milliseconds
}
function openPage(lab, data) {
  lab.get("answer").hidden = false;
  const { fragment, root, signal } = lab;
  const parts = new URLSearchParams(fragment);
  const onChoose = (page) => follow(lab, page);
  lab.page = open(root, data, { fragment, onChoose, signal });
  lab.active = lab.page.state.plan;
  // At first a leaf is chosen, so that one sees shards.
  const [first] = activeSlot(lab).answer.layouts.leaves;
  if (!parts.has("leaf") && first?.leaves.length) choose(lab.page, { leaf: first.leaves[0] });
}
/** Draw what depends on a choice in the page. */
function follow(lab, page) {
  if (!lab.page) return;
  const { plan, leaf } = page.state;
  const isOther = plan !== lab.active;
  lab.active = plan;
  if (isOther) drawLab(lab);
  else drawLayouts(lab);
  askShards(lab);
  lab.engine.onFragment(linkFragment(lab));
}
/** Ask for the picture of the chosen leaf, unless it is there or on its way. */
function askShards(lab) {
  const name = activeName(lab);
  const slot = lab.slots[name];
  const pattern = patternOf(lab, name);
  const isKnown = pattern === slot.shards?.pattern || pattern === slot.askedShards;
  if (!pattern || isKnown || slot.isAsked) return;
  slot.askedShards = pattern;
  ask(lab, name, "shards");
}
/** Draw the buttons above, and an error of the state. */
function drawBar(lab) {
  lab.get("undo").disabled = !lab.past.length;
  lab.get("redo").disabled = !lab.future.length;
  lab.get("compare").textContent = lab.slots.B ? "Remove B" : "Compare";
  lab.get("compare").title = lab.slots.B ? "leave layout A alone" : "lay a second layout beside this one";
  lab.get("compare").disabled = !lab.page;
  lab.get("link").textContent = lab.engine.linkTitle;
  const { error } = activeSlot(lab);
  // Without a control or a leaf to stand beside, an error stands above.
  const isAbove = error && !controlOf(lab, error.field) && !rowOf(lab, error.field);
  lab.get("refused").textContent = isAbove ? error.text : "";
  drawStatus(lab);
  if (lab.page) lab.engine.onFragment(linkFragment(lab));
}
/** Write what the engine does, and grey the answer if it is of an older state. */
function drawStatus(lab) {
  const { isAsked, isLate, error, answer } = activeSlot(lab);
  const isComputed = answer && answer.milliseconds !== null; // not one that was kept
  let words = isComputed ? `answered in ${answer.milliseconds} ms` : "";
  if (error) words = "not possible";
  if (isLate) words = "computing …";
  lab.get("status").textContent = words;
  lab.get("answer").classList.toggle("stale", Boolean(error) || isLate);
  const areAsked = namesOf(lab).some((name) => lab.slots[name].isAsked);
  lab.get("first").hidden = Boolean(lab.page) || !areAsked;
  lab.get("page").dataset.state = isAsked ? "asked" : "answered";
}
const VERDICTS = {
  running: ["…", "muted"],
  equal: ["✓", "good"],
  rounding: ["✓", "good"],
  differs: ["≠", "warn"],
  none: ["–", "muted"],
};
/** Write whether the step equals that of one device. */
function drawProof(lab) {
  const { proof, answer } = activeSlot(lab);
  const isNew = proof?.id === answer.id; // it may come before its answer, or of an older state
  const { verdict, text, rows } = isNew ? proof : { verdict: "running" };
  const [icon, style] = VERDICTS[verdict];
  const words = text || "comparing with one device";
  const title = (rows ?? []).map(({ leaf, text: each }) => `${leaf}: ${each}`).join("\n");
  const box = lab.get("proof");
  box.innerHTML = `<b class="${style}">${icon}</b> <span>${escaped(words)}</span>`;
  box.title = title;
}
/** Write below the tabs of two layouts the fields in which they differ. */
function drawChangedFields(lab) {
  const { A, B } = lab.slots;
  let words = "";
  if (A.answer && B?.answer) {
    const [a, b] = [A.answer, B.answer].map(fieldTexts);
    const fields = [...new Set([...b.keys(), ...a.keys()])];
    const changed = fields.filter((field) => a.get(field)?.text !== b.get(field)?.text);
    const changes = changed.map((field) => {
      const { label, without } = a.get(field) ?? b.get(field);
      const [before, after] = [a, b].map((texts) => texts.get(field)?.text ?? without);
      return `${label} ${after} instead of ${before}`;
    });
    words = `B: ${changes.join(", ") || "a copy of A, until a control or an axis is changed"}`;
  }
  lab.get("differences").textContent = words;
}
/** The fields of an answered state, { label, text, without }, by their paths. */
function fieldTexts({ controls: groups, state }) {
  const texts = new Map();
  for (const { field, label, value, choices } of groups.flatMap(({ controls }) => controls)) {
    if (field === "model") continue; // its sizes are fields of their own
    const choice = choices?.find((each) => each.value === value);
    texts.set(field, { label, text: String(choice?.label ?? value), without: "none" });
  }
  for (const [pattern, dims] of Object.entries(state.overrides ?? {})) {
    for (const [axis, dim] of Object.entries(dims)) {
      const text = dim === null ? "off" : `on dim ${dim}`;
      texts.set(`overrides.${pattern}.${axis}`, { label: `${axis} of ${pattern}`, text, without: "as by the rules" });
    }
  }
  return texts;
}
const TERMS = { seconds: ["the step", seconds], peak: ["peak memory", bytes], sent: ["sent", bytes] };
/** Write what has changed: from A to B, or since the answer before. */
function drawWords(lab) {
  const { A, B } = lab.slots;
  const before = B ? A.answer : A.before;
  const after = B ? B.answer : A.answer;
  let words = "change a control, or drag an axis: what changes is here";
  if (before) {
    const [a, b] = [before, after].map((answer) => answer.document.plans[0].numbers);
    const changes = Object.entries(TERMS).map(([key, term]) => changeWords(a[key], b[key], ...term));
    words = `${B ? "B against A" : "the last change"}: ${changes.join(" · ")}`;
  }
  lab.get("words").textContent = words;
  lab.get("words").title = words; // a narrow page has not all of it
}
function changeWords(a, b, title, format) {
  if (a === undefined || b === undefined) return `${title} –`; // of a large model some are not known
  if (Math.abs(b - a) <= 0.0005 * Math.max(Math.abs(a), Math.abs(b))) return `${title} =`;
  const sign = b > a ? "+" : "−";
  const share = a ? ` (${sign}${percent(Math.abs(b / a - 1))})` : "";
  return `${title} ${sign}${format(Math.abs(b - a))}${share}`;
}

// -- buttons and keys -----------------------------------------------------------------------------
function listenToLab(lab) {
  const on = (id, act) => lab.get(id).addEventListener("click", ({ currentTarget }) => act(currentTarget));
  on("undo", () => undo(lab));
  on("redo", () => redo(lab));
  on("compare", () => compare(lab));
  on("link", (button) => copy(lab, lab.engine.linkOf(linkFragment(lab), activeSlot(lab).state), button));
  on("copy-code", (button) => copy(lab, activeSlot(lab).answer.code, button));
  lab.root.addEventListener("keydown", (event) => {
    const isCommand = (event.ctrlKey || event.metaKey) && !event.altKey;
    if (!isCommand || isTyping(event.target)) return;
    const key = event.key.toLowerCase();
    const isRedo = key === "y" || (key === "z" && event.shiftKey);
    if (isRedo) redo(lab);
    else if (key === "z") undo(lab);
    else return;
    event.preventDefault();
  }, { signal: lab.signal });
}
/** Return true in a field whose text has been changed, where the browser undoes. */
function isTyping(target) {
  return target.matches("input:not([type=radio], [type=checkbox])") && target.value !== target.defaultValue;
}
