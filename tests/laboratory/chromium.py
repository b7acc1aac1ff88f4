"""A chromium that tests drive by its DevTools: pages, the mouse, keys, sizes, and what it logs."""

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

websocket = pytest.importorskip("websocket", reason="websocket-client comes with JupyterLab")

CHROMIUM = shutil.which("chromium")

# The codes of keys that are no letters: without them a browser scrolls, types or moves nothing.
CODES = {
    "Enter": 13, "Escape": 27, " ": 32, "Tab": 9, "Backspace": 8,
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip


class Tab:
    """One page of a chromium that runs without a window, until `close`."""

    def __init__(self, folder, width=1280, height=900):
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        options += ["--remote-allow-origins=*", f"--user-data-dir={folder}", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [CHROMIUM, *options, f"--window-size={width},{height}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        host = f"127.0.0.1:{self._port(Path(folder) / 'DevToolsActivePort')}"
        with urllib.request.urlopen(f"http://{host}/json/list") as reply:
            pages = json.load(reply)
        page = next(each for each in pages if each["type"] == "page")
        self._socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60)
        self._ids = itertools.count(1)
        self.errors = []
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height)

    def _port(self, path, seconds=60):
        """Return the port of the DevTools, which chromium writes into its folder."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            lines = path.read_text().split() if path.exists() else []
            if lines:
                return lines[0]
            time.sleep(0.05)
        raise AssertionError(f"chromium must write {path} within {seconds} s")

    def close(self):
        self._socket.close()
        self._process.kill()
        self._process.wait()

    # -- pages --------------------------------------------------------------------------------

    def open(self, address):
        self._call("Page.navigate", url="about:blank")  # or a change of the fragment loads nothing
        if address != "about:blank":
            self._call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def resize(self, width, height=900):
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def use_dark(self, is_dark=True):
        value = "dark" if is_dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def get(self, expression):
        """Return the value of an expression of JavaScript."""
        reply = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in reply:
            raise AssertionError(reply["exceptionDetails"]["exception"].get("description"))
        return reply["result"].get("value")

    def wait(self, expression, seconds=30):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.get(
                f"(() => {{ try {{ return !!({expression}) }} catch {{ return false }} }})()"
            ):
                return
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}; errors: {self.errors}")

    def screenshot(self, path):
        image = self._call("Page.captureScreenshot")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(image))

    # -- input --------------------------------------------------------------------------------

    def press(self, key, *, control=False, shift=False):
        """Press a key: a letter, or a name such as "ArrowLeft"."""
        modifiers = 2 * control + 8 * shift
        code = CODES.get(key, ord(key[0].upper()))
        event = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        is_letter = len(key) == 1 and not control
        text = {"Enter": "" if shift else "\r"}.get(key, key if is_letter else "")
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, element):
        x, y = self.centre(element)
        self._mouse("mousePressed", x, y)
        self._mouse("mouseReleased", x, y)

    def drag(self, element, target):
        """Drag from the centre of an element to that of another one, in ten moves."""
        x, y = self.centre(element)
        to_x, to_y = self.centre(target)
        self._mouse("mouseMoved", x, y, buttons=0)
        self._mouse("mousePressed", x, y)
        for i in range(1, 11):
            self._mouse("mouseMoved", x + (to_x - x) * i / 10, y + (to_y - y) * i / 10)
        self._mouse("mouseReleased", to_x, to_y)

    def centre(self, element):
        """Return the middle of an element, an expression of JavaScript, scrolled into view."""
        return self.get(f"""(() => {{
            const element = {element};
            element.scrollIntoView({{ block: "center" }});
            const {{ left, top, width, height }} = element.getBoundingClientRect();
            return [left + width / 2, top + height / 2];
        }})()""")

    def _mouse(self, kind, x, y, buttons=1):
        button = "none" if kind == "mouseMoved" and not buttons else "left"
        self._call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button=button,
            buttons=buttons,
            clickCount=1,
        )

    # -- DevTools -----------------------------------------------------------------------------

    def _call(self, method, **params):
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message):
        """Note an error that the page logs, and leave a page that asks whether to be left."""
        params = message.get("params", {})
        if message.get("method") == "Page.javascriptDialogOpening":
            accept = {"method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            self._socket.send(json.dumps({"id": next(self._ids), **accept}))
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        is_console = message.get("method") == "Runtime.consoleAPICalled"
        if is_console and params["type"] == "error":
            self.errors.append(str([each.get("value") for each in params["args"]]))
        is_log = message.get("method") == "Log.entryAdded"
        if is_log and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
