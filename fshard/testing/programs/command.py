"""The command `fshard certify`: does a program, or a script, train in processes as in one?

fshard certify train.py:program --mesh data=2              a function program(rank, world)
fshard certify --run train.py --mesh data=2 -- --lr 0.1    a script as torchrun runs it
"""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

from fshard.rounding import TOLERANCES
from fshard.testing.certificate import Certificate
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
    """Certify a program or a script; return the status of the command.

    It is 0 if it trains as in one process, 1 if it does not, 2 if there is an error.
    """
    words, of_script = _divided(arguments)
    options = _parser().parse_args(words)
    try:
        meshes = [_axes(text) for text in options.mesh]
        if options.steps is not None and options.steps < 1:
            raise UsageError(f"--steps must be >= 1; got {options.steps}.")
        if options.run is None:
            certificate = _certified_program(options, meshes, of_script)
        else:
            certificate = _certified_script(options, meshes, of_script)
    except UsageError as error:
        sys.stderr.write(f"fshard certify: {error}\n")
        return 2
    except Exception as error:
        notes = getattr(error, "__notes__", ())
        lines = [f"{type(error).__name__}: {error}", *notes]
        sys.stderr.write("\n".join(lines) + "\n")
        return 2
    sys.stdout.write(f"{certificate}\n")
    if options.json:
        Path(options.json).write_text(certificate.json())
    return 0 if certificate.ok else 1


class UsageError(Exception):
    """A command line that says nothing that can be run."""


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of the command, and those behind `--`, which are the script's.

    >>> _divided(["--run", "train.py", "--", "--steps", "5"])
    (['--run', 'train.py'], ['--steps', '5'])
    """
    words = list(arguments)
    if "--" not in words:
        return words, []
    end = words.index("--")
    return words[:end], words[end + 1 :]


def _certified_program(
    options: argparse.Namespace, meshes: list[dict[str, int]], of_script: Sequence[str]
) -> Certificate:
    if options.program is None:
        raise UsageError("what to certify must be FILE:NAME or --run FILE; got neither.")
    if of_script or options.alone is not None:
        raise UsageError("arguments of a script need --run FILE.")
    path, name = program_of(options.program)
    return certify_program(
        FromFile(path, name),
        meshes,
        steps=options.steps or 3,
        dtype=_dtype(options),
        splits=_splits(options.split),
        timeout=options.timeout or 60.0,
    )


def _certified_script(
    options: argparse.Namespace, meshes: list[dict[str, int]], of_script: Sequence[str]
) -> Certificate:
    from fshard.testing.programs.script import certify_script

    if options.program is not None:
        raise UsageError(
            f"what to certify must be one of FILE:NAME and --run FILE; got {options.program} and "
            f"{options.run}. Arguments of the script stand behind --."
        )
    _validate_file(options.run)
    return certify_script(
        options.run,
        meshes,
        of_script,
        steps=options.steps or 2,
        alone=None if options.alone is None else shlex.split(options.alone),
        dtype=_dtype(options),
        splits=_splits(options.split),
        timeout=options.timeout or 180.0,
    )


def _dtype(options: argparse.Namespace) -> Any:
    return None if options.dtype is None else DTYPES[options.dtype]


def program_of(text: str) -> tuple[str, str]:
    """Return the path and the name of a program; raise one line if there is none.

    The file is not run: the names at its top level are read.
    """
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise UsageError(
            f"what to certify must be FILE:NAME, of a function program(rank, world), or --run FILE, "
            f"a script of torchrun; got {text}. Write fshard certify {text}:program or fshard "
            f"certify --run {text}."
        )
    _validate_file(path)
    try:
        tree = ast.parse(Path(path).read_text())
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} must be a Python file; got {error}.") from None

    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    function = functions.get(name)
    if function is not None:
        _validate_arguments(path, function)
    elif not {name, "*"} & _bound_names(tree):
        found = ", ".join(functions) or "none"
        raise UsageError(
            f"{path} must have a function {name}(rank, world); got the functions {found}."
        )
    return str(Path(path).resolve()), name


def _bound_names(tree: ast.Module) -> set[str]:
    """Return the names that a file binds, anywhere in it: it may be by an import or an assignment."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
    return names


def _validate_arguments(path: str, function: ast.FunctionDef) -> None:
    arguments = function.args
    names = [x.arg for x in (*arguments.posonlyargs, *arguments.args)]
    needed = len(names) - len(arguments.defaults)
    takes_two = needed <= 2 and (len(names) >= 2 or arguments.vararg is not None)
    if not takes_two:
        raise UsageError(
            f"a program must take (rank, world) and return (model, loss, batch, step); got "
            f"{path}:{function.name}({', '.join(names)})."
        )


def _validate_file(path: str) -> None:
    if not Path(path).is_file():
        raise UsageError(f"a program must be in a file; got {path}, which is none.")


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
            raise UsageError(f"a mesh must be like data=2,model=4; got {text!r}.")
        axes[name] = int(size)
    return axes


def _splits(texts: Sequence[str]) -> dict[str, int]:
    """Return the dims that are split along axes.

    >>> _splits(["context=1"])
    {'context': 1}
    """
    splits: dict[str, int] = {}
    for text in texts:
        name, _, dim = text.partition("=")
        if not name.isidentifier() or not dim.isdecimal():
            raise UsageError(f"--split must be like context=1; got {text!r}.")
        splits[name] = int(dim)
    return splits


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard certify",
        usage="fshard certify (FILE:NAME | --run FILE) --mesh data=2 [options] [-- arguments]",
        description="Train a program of torch.distributed, or a script of torchrun, on CPUs in "
        "processes and in one, and compare losses, gradients and parameters: see "
        "fshard.testing.certify_program and certify_script. Status 0: they agree; 1: they do not; "
        "2: an error.",
    )
    parser.add_argument(
        "program", metavar="FILE:NAME", nargs="?", help="a function program(rank, world) in a file"
    )
    parser.add_argument(
        "--run", metavar="FILE", help="a script as it is; its arguments stand behind --"
    )
    parser.add_argument(
        "--mesh",
        action="append",
        required=True,
        help="axes, such as data=2,model=2; several are tried",
    )
    parser.add_argument("--steps", type=int, help="3; of a script 2")
    parser.add_argument(
        "--alone", metavar="ARGUMENTS", help='of the script in one process, such as "--tp 1"'
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="the lowest precision that tensors may be reduced in"
    )
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="AXIS=DIM",
        help="the dim of batches that is split along an axis, such as context=1",
    )
    parser.add_argument("--timeout", type=float, help="seconds for each mesh: 60, of a script 180")
    parser.add_argument("--json", help="a file for the certificate")
    return parser
