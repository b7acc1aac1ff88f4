"""`replaced`: values of modules that are others in a block, also of modules imported in it.

{"torch:compile": make}    torch.compile = make(torch.compile)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MakeReplacement = Callable[[Any], Any]
"""Returns the replacement of a value."""

Replacements = Mapping[str, MakeReplacement]
"""By names of values: the module, a colon, and attributes, as in `torch.nn:Module.to`."""


@contextmanager
def replaced(table: Replacements) -> Generator[None]:
    """Replace values in the block: now, or when their module is imported."""
    later: dict[str, Replacements] = {}
    with ExitStack() as stack:
        for name, make in table.items():
            module, _, path = name.partition(":")
            if module in sys.modules:
                stack.callback(_replace(sys.modules[module], path, make))
            else:
                later[module] = {**later.get(module, {}), path: make}
        finder = _AfterImport(later, stack)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _replace(module: ModuleType, path: str, make: MakeReplacement) -> Callable[[], None]:
    """Replace a value of a module; return what undoes it."""
    owner: Any = module
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    is_inherited = name not in vars(owner)
    # A method as the class has it: `getattr` returns a function that may be bound to no object.
    stored = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))

    def undo() -> None:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, stored)

    return undo


class _AfterImport(MetaPathFinder):
    """Replaces values of modules as soon as a script imports them."""

    def __init__(self, tables: Mapping[str, Replacements], stack: ExitStack) -> None:
        self._tables = tables
        self._stack = stack
        self._searched = set[str]()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find a module as all others do, and let its import end with the replacements."""
        if fullname not in self._tables or fullname in self._searched:
            return None
        self._searched.add(fullname)  # the search below calls this again
        spec = find_spec(fullname)
        self._searched.discard(fullname)
        if spec is None or spec.loader is None:
            return None

        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for name, make in self._tables[fullname].items():
                self._stack.callback(_replace(module, name, make))

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010, a loader's own attribute
        return spec
