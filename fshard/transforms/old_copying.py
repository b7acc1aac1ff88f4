"""Copies of modules, and of whatever else leads to them: hooks, closures, methods, partials, weak references, helper objects.

copied(module)      as `copy.deepcopy`, for which functions and weak references are atoms: a hook whose closure has the
                    module would go on writing to the original, and a patched forward would run the original's layer
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import copy, deepcopy
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_ATOMS = (Tensor, str, int, float, complex, bytes, type(None), type, ModuleType, BuiltinFunctionType, torch.dtype)
_Cached: Any = type(lru_cache(lambda: None))
_FUNCTIONS = (FunctionType, MethodType, partial, weakref.ref, _Cached)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_TORCHS = vars(nn.Module()).keys()
_HOOKS = tuple(key for key in vars(nn.Module()) if key.startswith(("_forward", "_backward")) and key.endswith("_hooks"))
CONTAINERS = (OrderedDict, dict, list, set, deque)
MANY = 1 << 12
"""Containers of more than that are shared, and nobody looks at what they hold."""
Module = TypeVar("Module", bound=nn.Module)


class Copying(ABC):
    """A copy in the making: of the objects of a tree and of what leads to one of them; the rest is shared.

    Args:
        tree: the objects, by their ids.
        held: what they hold and is copied with them; who else leads to that is copied, too, and has that copy.
        leads: what is known of others: whether they lead there.
        memo: the copies, by what they are copies of.
    """

    def __init__(self, tree: Iterable[int], held: Iterable[Any], leads: dict[int, bool], memo: dict[int, Any]) -> None:
        self._tree, self._leads, self._memo = frozenset(tree), leads, memo
        self._held = frozenset(map(id, held))

    def of(self, x: Any) -> Any:
        """Return the copy of an object, or the object itself if it is to be shared."""
        if id(x) in self._memo:
            return self._memo[id(x)]
        if id(x) in self._tree:
            return self._own(x)
        if isinstance(x, _ATOMS):
            return x
        if isinstance(x, CONTAINERS) and (self._is_to_copy(x) or self._leads_back(x)):
            return self._container(x)
        return self._pointing(x) if self._leads_back(x) else x

    @abstractmethod
    def _own(self, x: Any) -> Any:
        """Copy an object of the tree."""

    def _is_to_copy(self, container: Any) -> bool:
        """Return whether a container is copied even if it leads nowhere."""
        del container
        return False

    def _settled(self, x: Any, where: str) -> Any:
        """Copy what stands where nothing else can be put later."""
        del where
        return self.of(x)

    def _fill(self, made: Any, items: Iterable[tuple[Any, Any]]) -> None:
        """Copy entries of a dict or a list."""
        put = plain(made).__setitem__
        for key, value in items:
            put(made, self.of(key) if isinstance(made, dict) else key, self.of(value))

    def _container(self, x: Any) -> Any:
        made, kind, entries = _emptied(x), plain(x), entries_of(x)
        self._memo[id(x)] = made
        if isinstance(x, dict):
            self._fill(made, entries.items())
        elif isinstance(x, set):
            set.update(made, (self._settled(item, "a set") for item in entries))
        else:
            kind.extend(made, entries)
            self._fill(made, enumerate(entries))
        self._attributes(made, x)
        return made

    def _pointing(self, x: Any) -> Any:
        """Copy what leads back into the tree."""
        made: Any
        if isinstance(x, tuple):
            items = [self._settled(item, "a tuple") for item in x]
            made = getattr(type(x), "_make", type(x))(items)  # a NamedTuple has its own way
        elif isinstance(x, frozenset):
            made = frozenset(self._settled(item, "a set") for item in x)
        elif isinstance(x, MethodType):
            made = MethodType(x.__func__, self.of(x.__self__))
        elif isinstance(x, partial):
            made = self._partial(x)
        elif isinstance(x, FunctionType):
            made = self._closure(x)
        elif isinstance(x, weakref.ref):
            made = weakref.ref(self.of(x()))
        elif isinstance(x, _Cached):
            made = lru_cache(**x.cache_parameters())(self.of(x.__wrapped__))
        else:
            return self._object(x)
        self._memo[id(x)] = made
        return made

    def _partial(self, x: partial[Any]) -> Any:
        made = partial(self.of(x.func), *(self._settled(item, "a partial") for item in x.args))
        self._fill(made.keywords, x.keywords.items())
        return made

    def _object(self, x: Any) -> Any:
        made = self._memo[id(x)] = blank(x) if isinstance(x, nn.Module) else copy(x)
        self._attributes(made, x)
        return made

    def _attributes(self, made: Any, x: Any) -> None:
        if hasattr(x, "__dict__"):
            self._fill(vars(made), vars(x).items())
        for key, value in slots_of(x):
            object.__setattr__(made, key, self._settled(value, f"a slot of {type(x).__name__}"))

    def _closure(self, f: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in f.__closure__ or ())
        made = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, cells)
        self._memo[id(f)] = made  # before its cells: it may stand in one of them
        made.__qualname__ = f.__qualname__
        for cell, old in zip(cells, f.__closure__ or (), strict=True):
            for content in contents_of(old):
                cell.cell_contents = self._settled(content, f"the closure of {f.__qualname__}")
        made.__dict__.update({key: self.of(value) for key, value in vars(f).items()})
        made.__defaults__, made.__kwdefaults__ = self.of(f.__defaults__), self.of(f.__kwdefaults__)
        return made

    def _leads_back(self, x: Any) -> bool:
        """Return whether an object leads to one of the tree."""
        if id(x) not in self._leads:
            self._leads[id(x)] = any(id(each) in self._tree or id(each) in self._held for each in within(x))
        return self._leads[id(x)]


class _Deeply(Copying, dict[int, Any]):
    """The memo of `deepcopy`, which asks it first: it knows copies of the functions and references that it is asked for."""

    def __init__(self, module: nn.Module, memo: dict[int, Any]) -> None:
        dict.__init__(self, memo)
        own = {id(x) for kind in (module.modules(), module.parameters(), module.buffers()) for x in kind}
        held = held_by_attributes(module, lambda x: not isinstance(x, (*_ATOMS, *_FUNCTIONS, nn.Module)))
        Copying.__init__(self, own, held, {}, self)
        apart = (
            x for x in within(module) if isinstance(x, FunctionType | weakref.ref | _Cached) and self._leads_back(x)
        )
        self._apart = {id(x): x for x in apart}
        hooks = (vars(part)[kind].values() for part in module.modules() for kind in _HOOKS)
        self._hooks, self._for_hook = {id(x) for each in hooks for x in each}, False

    def of(self, x: Any) -> Any:
        """Return the copy of an object, or the object itself if it is to be shared."""
        return deepcopy(x, self) if id(x) in self._held else super().of(x)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a copy."""
        if key in self._apart:
            before, self._for_hook = self._for_hook, self._for_hook or key in self._hooks
            try:
                return self.of(self._apart[key])
            finally:
                self._for_hook = before
        return super().get(key, default)

    def forget(self) -> None:
        """Let go of what was copied: it refers to itself, so all of that would wait for the collector of garbage."""
        dict.clear(self)
        vars(self).clear()

    def _object(self, x: Any) -> Any:
        """Share what a hook notes things in, as somebody outside looks for them there."""
        return x if self._for_hook and not isinstance(x, nn.Module) else super()._object(x)

    def _own(self, x: Any) -> Any:
        return deepcopy(x, self)


def copied(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """Return a deep copy of a module, with copies of the functions that lead to it; `memo` has what is known, by ids.

    >>> def patched(layer):
    ...     old = layer.forward
    ...     layer.forward = lambda x: old(x).tanh()
    ...     return layer
    >>> layer = patched(nn.Linear(2, 2))
    >>> same, other = deepcopy(layer), copied(layer)
    >>> with torch.no_grad():
    ...     _ = layer.weight.zero_(), layer.bias.zero_()
    >>> same(torch.ones(2)).any(), other(torch.ones(2)).any()
    (tensor(False), tensor(True))
    """
    known = _Deeply(module, memo or {})
    made = deepcopy(module, known)
    originals = {id(part) for part in module.modules() if dict.get(known, id(part)) is not part}
    known.forget()
    if any(id(x) in originals for x in within(made)):
        wrong = [
            f"{path}.{key}".removeprefix(".")
            for path, part in made.named_modules()
            for key, x in vars(part).items()
            if key != "_modules" and any(id(each) in originals for each in within(x))
        ]
        warnings.warn(
            f"{', '.join(wrong)} of {type(module).__name__} still leads to the module that was given, though a copy is used "
            "from now on, and trained: an object that its hooks note things in, or one that is not copied.",
            stacklevel=2,
        )
    return made


def held_apart(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that attributes lead to and that are no submodules, each with the attribute's name."""
    own = {id(x) for x in module.modules()}
    for path, part in module.named_modules():
        for key, x in _set_in(part):
            for each in reached_from([x], lambda x: not isinstance(x, _ATOMS) and id(x) not in own):
                if isinstance(each, nn.Module):
                    yield f"{path}.{key}".removeprefix("."), each


def unlike(module: nn.Module) -> list[str]:
    """Return what a module's attributes hold and would go on with the original's layers and parameters in a copy, or find none.

    >>> layer = nn.Linear(2, 2)
    >>> layer.names = {layer.weight: "weight"}
    >>> unlike(layer)
    ['names has parameters as keys of a dict']
    """
    own = {id(x) for kind in (module.modules(), module.parameters(), module.buffers()) for x in kind}

    def counts(x: Any) -> bool:
        return not isinstance(x, (*_ATOMS, torch.optim.Optimizer)) and id(x) not in own

    held = [
        (f"{path}.{key}".removeprefix("."), kind)
        for path, part in module.named_modules()
        for key, x in _set_in(part)
        for kind in dict.fromkeys(_unlike(each, own) for each in reached_from([x], counts))
    ]
    return [f"{name} has {kind}" for name, kind in held if kind]


def _unlike(x: Any, own: Collection[int]) -> str:
    """Return what an object is, if no copy of it would have copies of what is in it; nothing if one would."""
    if isinstance(x, dict):
        keys: Any = x.keys()
        return "parameters as keys of a dict" * any(isinstance(key, Tensor) and id(key) in own for key in keys)
    if isinstance(x, _WEAK):
        return "layers in a weak dict or set" * any(id(each) in own for each in within(x))
    if isinstance(x, FunctionType) and {"registry", "dispatch"} <= vars(x).keys():
        return "a function of functools.singledispatch" * any(id(each) in own for each in within(x))
    return ""


def held_by_attributes(module: nn.Module, counts: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield what attributes of modules hold, and what that holds, as far as it counts."""
    yield from reached_from((x for part in module.modules() for _, x in _set_in(part)), counts)


def _set_in(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that are not torch's."""
    return ((key, x) for key, x in vars(part).items() if key not in _TORCHS)


def reached_from(begin: Iterable[Any], counts: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield objects, and what they hold, as far as it counts."""
    seen, found = dict[int, Any](), [*begin]
    while found:
        x = found.pop()
        if id(x) not in seen and counts(x):
            seen[id(x)] = x
            yield x
            found += _parts(x)


def within(x: Any) -> Iterator[Any]:
    """Yield an object and all that it leads to, as far as that could be copied."""
    seen, found = dict[int, Any](), [x]
    while found:
        x = found.pop()
        if id(x) not in seen:
            seen[id(x)] = x  # held, so that no other object gets its id
            yield x
            found += _parts(x) if not isinstance(x, _ATOMS) else ()


def _parts(x: Any) -> list[Any]:
    """Return the objects that an object is made of, as far as they could be copied."""
    parts: list[Any]
    if isinstance(x, dict):
        parts = [*x.keys(), *x.values()]
    elif isinstance(x, list | tuple | set | frozenset | deque):
        parts = list(x)
    elif isinstance(x, MethodType):
        parts = [x.__self__]
    elif isinstance(x, partial):
        parts = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, FunctionType):
        cells = [content for cell in x.__closure__ or () for content in contents_of(cell)]
        parts = [*cells, x.__defaults__, x.__kwdefaults__, *vars(x).values()]
    elif isinstance(x, weakref.ref):
        parts = [x()] if isinstance(x(), nn.Module) else []
    else:
        parts = [*getattr(x, "__dict__", {}).values(), *(value for _, value in slots_of(x))]
    return parts


def contents_of(cell: CellType) -> list[Any]:
    """Return what a closure's variable holds: nothing as long as it has not been set."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def slots_of(x: Any) -> list[tuple[str, Any]]:
    """Return the attributes that a class of Python keeps in slots."""
    names = [name for kind in type(x).__mro__ for name in _listed(vars(kind).get("__slots__", ()))]
    return [(name, getattr(x, name)) for name in names if not name.startswith("__") and hasattr(x, name)]


def _listed(names: str | Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names


def blank(module: nn.Module) -> nn.Module:
    """Return an object of a module's class that has no attributes yet."""
    return object.__new__(type(module))


def _emptied(x: Any) -> Any:
    """Return a container of the same kind with nothing in it."""
    if type(x) in (dict, OrderedDict, list, set):
        return type(x)()
    make, arguments, *_ = x.__reduce_ex__(4)  # as copy does: a defaultdict keeps its default
    made = make(*arguments)
    plain(x).clear(made)
    return made


def plain(x: Any) -> Any:
    """Return the built-in class of a container: its methods write also where those of a class of the user's refuse to."""
    return next(kind for kind in CONTAINERS if isinstance(x, kind))


def entries_of(x: Any) -> Any:
    """Return what a container holds, in a plain one."""
    if isinstance(x, dict):
        return dict(plain(x).items(x))
    return {*x} if isinstance(x, set) else [*x]
