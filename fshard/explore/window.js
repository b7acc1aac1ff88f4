// The page of `fshard explore`: a window's document, whose data is in the file. The fragment of the
// URL holds what a reader has chosen.
import { PANELS, draw, fragmentOf, open, readFragment } from "./page.js";

const began = performance.now();
const box = document.getElementById("page");
box.innerHTML = `
  <header>
    <h1>${document.title.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`)}</h1>
    <nav id="plans" aria-label="plans"></nav>
    <span class="space"></span>
    ${PANELS.files}
  </header>
  ${PANELS.numbers}
  <main>
    ${PANELS.facts}${PANELS.why}${PANELS.mesh}${PANELS.details}${PANELS.timeline}${PANELS.ledger}${PANELS.leaves}
  </main>
  ${PANELS.tip}`;

function writeUrl(page) {
  try {
    history.replaceState(null, "", `#${fragmentOf(page)}`);
  } catch {
    // a page in a notebook's frame has no URL
  }
}

const data = JSON.parse(document.getElementById("data").textContent);
const page = open(document, data, { fragment: location.hash.slice(1), onChoose: writeUrl });
addEventListener("hashchange", () => {
  readFragment(page, location.hash.slice(1));
  draw(page);
});
document.documentElement.dataset.drawn = (performance.now() - began).toFixed(0);
