// The lab in a notebook: a widget's messages are those of the lab. It is in a shadow root, so its
// styles are not the notebook's, nor the other way round.
import { openLab, receive } from "./lab.js";

function render({ model, el: host }) {
  const ending = new AbortController();
  const root = host.shadowRoot ?? host.attachShadow({ mode: "open" });
  host.dataset.lmSuppressShortcuts = "true"; // keys of the lab are not commands of JupyterLab
  host.classList.add("fshard-lab");
  root.innerHTML = `<style>${STYLE}</style><div id="page"></div>`;
  const engine = {
    send: (message) => model.send(message),
    linkTitle: "Copy state",
    linkOf: (_, state) => `fs.lab(state=${JSON.stringify(JSON.stringify(state))})`,
    onFragment: () => {}, // the address is the notebook's
  };
  const lab = openLab(root, engine, { signal: ending.signal });
  const take = (message) => receive(lab, message);
  model.on("msg:custom", take);
  return () => {
    model.off("msg:custom", take);
    ending.abort();
  };
}
export default { render };
