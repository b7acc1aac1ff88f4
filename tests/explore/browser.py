"""A page in a browser: the notes of a script that clicks in it."""

import json
import re
import shutil
import subprocess
from urllib.parse import unquote

BROWSER = shutil.which("chromium")

# In the module of the page, after it: so its names are those of the script too.
CLICKS = """{
const get = page.get;
const notes = [], note = (id) => notes.push(get(id).textContent.replace(/\\s+/g, " "));
const click = (target, x = 0, y = 0) => {
  const box = target.getBoundingClientRect(), point = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
  target.dispatchEvent(new MouseEvent("click", point));
};
const strike = (target, key) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
try { %s } catch (error) { notes.push(String(error)); }
document.body.innerHTML = `<pre>${JSON.stringify(notes.map((x) => encodeURIComponent(x)))}</pre>`;
}</script>"""


def shown_by(text, script, tmp_path):
    """Return what a script notes in a browser, and the milliseconds of the first drawing."""
    (path := tmp_path / "page.html").write_text(
        re.sub("</script>(?=\n</body>)", lambda _: CLICKS % script, text), encoding="utf-8"
    )
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1300,900",
        "--dump-dom",
    ]
    dom = subprocess.run(
        [BROWSER, *options, path.as_uri()], capture_output=True, text=True, check=True
    ).stdout
    notes = json.loads(re.findall(r"<pre>(.*?)</pre>", dom)[-1])
    return [unquote(note) for note in notes], int(re.search(r'data-drawn="(\d+)"', dom)[1])


NOTES = """<!doctype html><html><head><meta charset="utf-8"><script>
const notes = [], errors = [];
onerror = (text) => { errors.push(text); };
console.error = (...texts) => { errors.push(texts.join(" ")); };
</script></head><body>%s<script>
try { %s } catch (error) { errors.push(String(error)); }
const content = JSON.stringify({ notes, errors });
document.body.innerHTML = `<pre>${encodeURIComponent(content)}</pre>`;
</script></body></html>"""


def noted_on(html, script, tmp_path, *, width=900):
    """Return the notes of a script on a page of this width, and the errors of its console."""
    (path := tmp_path / "notes.html").write_text(NOTES % (html, script), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    dom = subprocess.run(
        [BROWSER, *options, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=True
    ).stdout
    content = json.loads(unquote(re.findall(r"<pre>(.*?)</pre>", dom)[-1]))
    return content["notes"], content["errors"]
