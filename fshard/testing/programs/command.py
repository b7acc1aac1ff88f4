"""The command `fshard certify FILE:NAME`: does a program train in processes as in one?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

from fshard.rounding import TOLERANCES
from fshard.testing.certificate_page import certificate_page
from fshard.testing.programs.certify import certify_program

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}


class FromFile(NamedTuple):
    """A program that is a function in a file: the file is imported in each process."""

    path: str
    name: str

    def __call__(self, rank: int, world: Any) -> Any:
        """Import the file, and call the program."""
        spec = spec_from_file_location("certified_program", self.path)
        if spec is None or spec.loader is None:
            raise ImportError(f"certify: {self.path} must be a Python file.")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, self.name)(rank, world)


def run(arguments: Sequence[str]) -> int:
    """Certify a program; return the status of the command.

    It is 0 if the program trains as in one process, 1 if it does not, 2 if there is an error.
    """
    options = _parser().parse_args(arguments)
    path, _, name = options.program.rpartition(":")
    try:
        program = FromFile(str(Path(path).resolve()), name)
        meshes = [_axes(text) for text in options.mesh]
        certificate = certify_program(
            program,
            meshes,
            steps=options.steps,
            dtype=DTYPES[options.dtype],
            timeout=options.timeout,
        )
    except Exception as error:
        notes = getattr(error, "__notes__", ())
        lines = [f"{type(error).__name__}: {error}", *notes]
        sys.stderr.write("\n".join(lines) + "\n")
        return 2
    sys.stdout.write(f"{certificate}\n")
    if options.json:
        Path(options.json).write_text(certificate.json())
    if options.html:
        Path(options.html).write_text(certificate_page(certificate), encoding="utf-8")
    return 0 if certificate.ok else 1


def _axes(text: str) -> dict[str, int]:
    """Return the axes of a mesh.

    >>> _axes("data=2,model=4")
    {'data': 2, 'model': 4}
    """
    axes: dict[str, int] = {}
    for pair in text.split(","):
        name, _, size = pair.partition("=")
        is_size = size.isdecimal() and int(size) > 0
        if not name.isidentifier() or not is_size:
            raise ValueError(f"fshard certify: a mesh must be like data=2,model=4; got {text!r}.")
        axes[name] = int(size)
    return axes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard certify",
        description="Train a program of torch.distributed on CPUs in processes and in one, and "
        "compare losses, gradients and parameters: see fshard.testing.certify_program. Status 0: "
        "they agree; 1: they do not; 2: an error.",
    )
    parser.add_argument(
        "program", metavar="FILE:NAME", help="a function program(rank, world) in a file"
    )
    parser.add_argument(
        "--mesh",
        action="append",
        required=True,
        help="axes, such as data=2,model=2; several are tried",
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float64", help="the lowest precision of the program"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each mesh")
    parser.add_argument("--json", help="a file for the certificate")
    parser.add_argument("--html", help="a file for a page with the tree of the model's leaves")
    return parser
