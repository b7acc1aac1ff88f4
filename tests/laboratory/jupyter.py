"""A JupyterLab of its own: a server in a folder with one notebook, on a free port."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

TOKEN = "of-a-test"


@contextmanager
def jupyter_lab(folder, cells):
    """Serve a notebook of some cells, and yield its address."""
    notebook = {
        "cells": [
            {
                "cell_type": "code", "id": f"cell-{number}", "source": source,
                "metadata": {}, "outputs": [], "execution_count": None,
            }
            for number, source in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }  # fmt: skip
    (folder / "lab.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    # Settings of the user, and news from the network, are none of this server's.
    own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    options = [f"--ServerApp.port={port}", f"--IdentityProvider.token={TOKEN}", "--no-browser"]
    options += ["--allow-root", "--expose-app-in-browser", f"--ServerApp.root_dir={folder}"]
    options += ["--LabApp.news_url=", "--LabApp.check_for_updates_class="]
    options += ["--LabApp.extension_manager=readonly", "--ServerApp.terminals_enabled=False"]
    options += [f"--LabApp.workspaces_dir={folder}", f"--LabApp.user_settings_dir={folder}"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env={**os.environ, **own},
            stdout=log,
            stderr=log,
        )
        address = f"http://127.0.0.1:{port}"
        try:
            _wait_for(f"{address}/api/status?token={TOKEN}")
            yield f"{address}/lab/tree/lab.ipynb?token={TOKEN}"
        finally:
            server.terminate()  # it shuts its kernels down
            server.wait()


def _wait_for(address, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(address):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{address} must answer within {seconds} s")


def run_first_cell(tab, address):
    """Open a notebook in a tab, and run its first cell."""
    kernel = "document.querySelector('.jp-Toolbar-kernelName').innerText"
    prompt = "document.querySelector('.jp-InputPrompt').textContent"
    tab.open(address)
    # Before it has a kernel a notebook looks ready, and ignores that a cell is run.
    tab.wait(f"{kernel}.startsWith('Python') && {prompt} === '[ ]:'", 60)
    time.sleep(1)
    tab.click("document.querySelector('[data-command=\"notebook:run-cell-and-select-next\"]')")
    tab.wait(f"{prompt} !== '[ ]:'", 60)
