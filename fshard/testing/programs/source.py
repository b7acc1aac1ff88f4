"""The program that a command names, `FILE:NAME`, checked before any process starts."""

from __future__ import annotations

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

FORM = (
    "FILE:NAME, such as train.py:program, of a function program(rank, world) that returns (model, "
    "loss, batch, step)"
)


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
        sys.path.insert(0, str(Path(self.path).parent))  # as in `python FILE`
        spec.loader.exec_module(module)
        return getattr(module, self.name)(rank, world)


def program_named(text: str) -> FromFile:
    """Return the program FILE:NAME; raise a ValueError of one line unless it can be one.

    The file is read, not imported: a script that trains at its import would do so here.
    """
    path, separator, name = text.rpartition(":")
    if not separator:
        path, name = text, ""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"fshard certify: the program must be {FORM}; got no file {path!r}.")
    if not name:
        raise ValueError(
            f"fshard certify: the program must be {FORM}; got {text!r}. Name the function, as "
            f"{file.name}:program, or certify the script as it is: --run {file.name}."
        )
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"fshard certify: {path} must be a Python file; got {error}.") from None
    _validate_function(tree, path, name)
    return FromFile(str(file.resolve()), name)


def _validate_function(tree: ast.Module, path: str, name: str) -> None:
    functions: dict[str, ast.FunctionDef] = {}
    has_other = False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
        elif not isinstance(node, ast.ClassDef | ast.AsyncFunctionDef):
            has_other = has_other or _may_bind(node, name)

    function = functions.get(name)
    if function is None:
        if has_other:
            return  # it is imported, or made by a call, which only the import shows
        known = ", ".join(functions) or "none"
        raise ValueError(
            f"fshard certify: the program must be {FORM}; got no function {name!r} in {path} (its "
            f"functions: {known})."
        )
    if not _takes_two(function.args):
        arguments = ", ".join([x.arg for x in _positional(function.args)])
        raise ValueError(
            f"fshard certify: the program must be {FORM}; got {name}({arguments}). Write "
            f"def {name}(rank, world)."
        )


def _may_bind(node: ast.stmt, name: str) -> bool:
    """Return True if a statement may give a name its value."""
    for part in ast.walk(node):
        is_stored = False
        if isinstance(part, ast.Name):
            is_stored = part.id == name and isinstance(part.ctx, ast.Store)
        is_imported = isinstance(part, ast.alias) and name in (part.asname or part.name, "*")
        is_star = isinstance(part, ast.alias) and part.name == "*"
        is_defined = isinstance(part, ast.FunctionDef) and part.name == name
        if is_stored or is_imported or is_star or is_defined:
            return True
    return False


def _positional(args: ast.arguments) -> list[ast.arg]:
    return [*args.posonlyargs, *args.args]


def _takes_two(args: ast.arguments) -> bool:
    """Return True if a function can be called with two arguments."""
    positional = _positional(args)
    needed = len(positional) - len(args.defaults)
    has_needed_keywords = any(default is None for default in args.kw_defaults)
    can_take_two = len(positional) >= 2 or args.vararg is not None
    return needed <= 2 and can_take_two and not has_needed_keywords
