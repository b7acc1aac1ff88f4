// The lab in a window: its messages go to the server that it comes from, which sends proofs as
// events. The fragment of the URL holds the states, so that a link does.
import { openLab, receive } from "./lab.js";

const { token } = document.getElementById("page").dataset;
const engine = {
  linkTitle: "Copy link",
  linkOf: (fragment) => `${location.href.split("#")[0]}#${fragment}`,
  onFragment: (fragment) => history.replaceState(null, "", `#${fragment}`),
  async send(message) {
    const { id, page, slot } = message;
    const failure = (text) => ({ id, page, slot, kind: "error", field: "", text });
    let answer = null;
    try {
      const response = await fetch(`answer?token=${token}`, { method: "POST", body: JSON.stringify(message) });
      answer = response.ok ? await response.json() : failure(await response.text());
    } catch {
      answer = failure("The program behind this page has ended: start `fshard lab` again.");
    }
    receive(lab, answer);
  },
};
const lab = openLab(document, engine, { fragment: location.hash.slice(1) });
const events = new EventSource(`events?token=${token}`);
events.addEventListener("message", ({ data }) => receive(lab, JSON.parse(data)));
addEventListener("hashchange", () => location.reload()); // another link was pasted
