// The controls of a state: groups of choices, numbers and switches, as the engine lists them.
import { escaped } from "../explore/page.js";
import { activeSlot, edit } from "./lab.js";

const WIDEST = 128; // pixels in which choices are beside each other; others are a list

/** The value of a state at a path of names; undefined for one that is left out. */
function valueAt(state, field) {
  return field.split(".").reduce((inner, name) => inner?.[name], state);
}
/** Draw the controls; what has the focus keeps it, with a text that is being typed. */
export function drawControls(lab) {
  const { answer, error } = activeSlot(lab);
  const focused = lab.root.activeElement?.closest("[data-field]");
  const isEdited = focused?.matches("input[type=number], input[type=text]") && focused.value !== focused.defaultValue;
  const typed = isEdited ? focused.value : null;
  const field = focused?.dataset.field;
  const closed = new Set([...lab.root.querySelectorAll("#controls details:not([open])")].map((x) => x.dataset.title));

  const groups = answer.controls.map((group) => groupMarkup(lab, group, closed));
  lab.get("controls").innerHTML = groups.join("");
  markError(lab, error);
  if (!field) return;
  const same = [...lab.root.querySelectorAll(`[data-field="${CSS.escape(field)}"]`)];
  const next = same.find((x) => x.checked) ?? same[0];
  if (typed !== null && next) next.value = typed;
  next?.focus({ preventScroll: true });
}
function groupMarkup(lab, { title, controls }, closed) {
  const { state, error } = activeSlot(lab);
  const lines = controls.map((control) => {
    // After an error the value that was refused is shown, and not that of the last answer.
    const refused = error ? valueAt(state, control.field) : undefined;
    return controlMarkup({ ...control, value: refused ?? control.value });
  });
  return `<details ${closed.has(title) ? "" : "open"} data-title="${escaped(title)}">
    <summary>${escaped(title)}</summary>${lines.join("")}</details>`;
}
const idOf = (field) => `control-${field.replace(/\W/g, "-")}`;
function controlMarkup(control) {
  const { field, label, help } = control;
  return `<div class="control" data-of="${escaped(field)}" title="${escaped(help ?? "")}">
    <label id="${idOf(field)}-label" for="${idOf(field)}">${escaped(label)}</label>
    ${inputMarkup(control)}<p class="error" id="${idOf(field)}-error"></p></div>`;
}
function inputMarkup(control) {
  const { kind, field, value } = control;
  const attributes = `id="${idOf(field)}" data-field="${escaped(field)}" aria-describedby="${idOf(field)}-error"`;
  if (kind === "number") return numberMarkup(control, attributes);
  if (kind === "text") return `<input type="text" ${attributes} value="${escaped(value ?? "")}">`;
  if (kind === "switch") return `<input type="checkbox" ${attributes} ${value ? "checked" : ""}>`;
  const letters = control.choices.map((choice) => String(choice.label)).join("").length;
  const hasRoom = 7 * letters + 10 * control.choices.length <= WIDEST;
  return hasRoom ? radiosMarkup(control) : listMarkup(control, attributes);
}
const isChosen = (choice, value) => JSON.stringify(choice.value) === JSON.stringify(value ?? null);
function listMarkup({ choices, value }, attributes) {
  const options = choices.map((choice, i) => {
    const reason = choice.why_not ? `class="refused" title="${escaped(choice.why_not)}"` : "";
    const selected = isChosen(choice, value) ? "selected" : "";
    return `<option value="${i}" ${selected} ${reason}>${escaped(choice.label)}</option>`;
  });
  return `<select ${attributes}>${options.join("")}</select>`;
}
function radiosMarkup({ field, choices, value }) {
  const buttons = choices.map((choice, i) => {
    const id = i ? `${idOf(field)}-${i}` : idOf(field);
    const checked = isChosen(choice, value) ? "checked" : "";
    const reason = choice.why_not ? `class="refused" title="${escaped(choice.why_not)}"` : "";
    return `<input type="radio" id="${id}" name="${idOf(field)}" value="${i}" ${checked}
      data-field="${escaped(field)}" aria-describedby="${idOf(field)}-error"
      ><label for="${id}" ${reason}>${escaped(choice.label)}</label>`;
  });
  return `<div class="radios" role="radiogroup" aria-labelledby="${idOf(field)}-label">${buttons.join("")}</div>`;
}
function numberMarkup({ value, min, max, step, optional, placeholder }, attributes) {
  const bound = (name, x) => (x === undefined || x === null ? "" : `${name}="${x}"`);
  const isDoubled = step === "double";
  const each = isDoubled ? "any" : step ?? 1;
  const hint = optional ? `placeholder="${escaped(placeholder ?? "auto")}"` : "";
  const input = `<input type="number" inputmode="numeric" ${attributes} step="${each}" ${bound("min", min)}
    ${bound("max", max)} value="${value ?? ""}" ${hint} ${isDoubled ? "data-doubled" : ""}
    ${optional ? "data-optional" : ""}>`;
  const button = (factor, sign, verb) => (
    `<button tabindex="-1" data-factor="${factor}" aria-label="${verb}">${sign}</button>`);
  return `<div class="number">${button(-1, "−", "less")}${input}${button(1, "+", "more")}</div>`;
}
/** The element of a control; null for a field without one. */
export const controlOf = (lab, field) => (
  field ? lab.root.querySelector(`.control[data-of="${CSS.escape(field)}"]`) : null);
/** Write an error beside the control that it names. */
function markError(lab, error) {
  const control = controlOf(lab, error?.field);
  if (!control) return;
  control.classList.add("wrong");
  control.closest("details").open = true;
  const note = control.querySelector(".error");
  note.setAttribute("role", "alert");
  note.textContent = error.text;
}

/** The next number of a control: twice or half, or one step on. */
function stepped(input, direction) {
  const number = input.value === "" ? Number(input.min || 1) : Number(input.value);
  let next = number + direction * Number(input.step === "any" ? 1 : input.step);
  if ("doubled" in input.dataset) next = direction > 0 ? number * 2 : Math.ceil(number / 2);
  if (input.min !== "") next = Math.max(next, Number(input.min));
  if (input.max !== "") next = Math.min(next, Number(input.max));
  return next;
}
function step(lab, input, direction) {
  const next = stepped(input, direction);
  if (String(next) === input.value) return;
  input.value = next;
  change(lab, input);
}
/** Take the value of an element into the state. */
function change(lab, input) {
  const { field } = input.dataset;
  const groups = activeSlot(lab).answer.controls;
  const control = groups.flatMap(({ controls }) => controls).find((each) => each.field === field);
  let { value } = input;
  if (input.type === "checkbox") value = input.checked;
  else if (input.type === "radio" || input.localName === "select") value = control.choices[+value].value;
  else if (input.type === "number") value = value === "" ? null : Number(value);
  if (value === null && input.type === "number" && !control.optional) {
    input.value = control.value; // a number that was deleted
    return;
  }
  input.defaultValue = input.value; // it is not being typed any longer
  edit(lab, field.split("."), value);
}
export function listenToControls(lab) {
  const box = lab.get("controls");
  box.addEventListener("change", (event) => change(lab, event.target));
  box.addEventListener("click", ({ target }) => {
    const { factor } = target.dataset;
    if (factor) step(lab, target.parentElement.querySelector("input"), Number(factor));
  });
  box.addEventListener("keydown", (event) => {
    const { target, key } = event;
    const direction = { ArrowUp: 1, ArrowDown: -1 }[key];
    if (target.type !== "number" || !direction) return;
    step(lab, target, direction);
    event.preventDefault();
  });
}
