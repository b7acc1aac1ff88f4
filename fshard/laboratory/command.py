"""The command `fshard lab`: the page of the lab in a browser."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence

from fshard.arguments import ArgumentParser
from fshard.laboratory.engine import Engine
from fshard.laboratory.server import LabServer
from fshard.laboratory.state import LabState
from fshard.laboratory.subject import Subject
from fshard.parallelism.value import Parallelism
from fshard.plan.cluster import PRESETS
from fshard.plan.models import Transformer

LARGEST_PORT = 65535


def run(arguments: Sequence[str]) -> int:
    """Serve the page until it is interrupted; return the exit status."""
    parser = ArgumentParser(
        prog="fshard lab",
        description="Serve a page on which a mesh and layouts are changed, and what a step then "
        "does is seen at once.",
    )
    add = parser.add_argument
    add(
        "config",
        nargs="?",
        help="config.json of Hugging Face, or its folder; default: a small model",
    )
    add("--sequence", type=int, help="tokens of a sample; default: the most that the model takes")
    add("--devices", type=int, default=8, help="their number at first (%(default)s)")
    add("--gpu", choices=PRESETS, default="h100", help="the machine at first (%(default)s)")
    add("--port", type=int, default=0, help="of 127.0.0.1; default: a free one")
    add("--no-browser", action="store_true", help="print the address alone")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= LARGEST_PORT:
        parser.error(f"--port must be from 0 to {LARGEST_PORT}; got {options.port}")

    model = {}
    if options.config is not None:
        model["model"] = Transformer.from_config(options.config, sequence=options.sequence)
    state = LabState(
        **model, devices=options.devices, cluster=options.gpu, plan=Parallelism(zero_stage=3)
    )
    with LabServer(Engine(Subject(), state), options.port) as server:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        if not options.no_browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0
