"""What methods may do to attributes of their module, by their code: which a call may read before it sets it.

    def forward(self, x):
        self.map = self.attend(x)       done, whenever it is come to
        return self.map + self.mean     `map` is read after that, `mean` first

A method runs in a call if it is `forward`, or one that Python calls (`self[i]`), or if code that may run names it: as an
attribute of whatever object, in a string, or as one of those that `getattr(self, f"forward_{mode}")` may find.  So does one
that any code takes without calling it at once, as `self.act = self._act` in `__init__`.  Of all others, as `reset` or
`attention_map`, it is those outside who call them, between calls.

It begins with nothing done, unless only its own module's methods call it: then with what all of them have done before.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property, partial, partialmethod
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from torch import Tensor

from fshard.transforms.bytecode import (
    Inner,
    Known,
    Loaded,
    State,
    Text,
    Thing,
    Value,
    Walk,
    all_within,
    call_of,
    instructions,
    is_call,
    is_read,
    is_torchs,
    loaded_by,
)

_OUTSIDE = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "init_subclass", "class_getitem", "del", "repr", "str", "dir", "sizeof"),
        *("getstate", "setstate", "reduce", "reduce_ex", "copy", "deepcopy"),
    )
)
"""These are not called by Python in a call of the module."""
_ASKS = (getattr, hasattr)
_ASKED_BY_PYTHON = ("__getattr__", "__getattribute__")
_ASKS_BY_WORDS = frozenset(("attrgetter", "methodcaller", *_ASKED_BY_PYTHON))
_AT_ONCE = (all, any, filter, map, max, min, sorted, sum)
"""What calls a function that it is given while it runs itself."""
_VALUES = (Tensor, bool, int, float, complex, None)
_WRITES = ("STORE_ATTR", "DELETE_ATTR")
_SETS = ("STORE_FAST", "STORE_DEREF", "DELETE_FAST", "DELETE_DEREF")
_DICTS = frozenset(("vars", "__dict__"))
_NOTHING = frozenset[str]()
_FAR = frozenset((*sys.stdlib_module_names, "torch", "numpy")) - {"__main__"}
_LATER = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


class Reads:
    """What calls of modules of some classes, all that a model has, may read.

    Args:
        kinds: the classes.
        layers: what the modules are called within each other.
    """

    def __init__(self, kinds: Iterable[type], layers: Collection[str] = ()) -> None:
        self._layers = layers
        self._kinds = {kind: _Kind(kind) for kind in kinds}
        self._first: dict[type, set[str]] = {kind: set() for kind in self._kinds}
        self._others, self._unseen, self._named = set[str](), set[str](), set[str]()
        self._begun: dict[_Place, _Task] = {}
        self._left: list[_Task] = []
        entered = set[tuple[type, str]]()
        for kind in self._kinds.values():
            self._look_for_taken(kind)
        while True:
            for kind in self._kinds.values():
                for name in kind.members:
                    if (kind.kind, name) not in entered and (_is_called_by_python(name) or _fits(name, self._named)):
                        entered.add((kind.kind, name))
                        for member in kind.members[name] if _fits(name, self._named) else kind.members[name][:1]:
                            self._enter(kind, member)
            if not self._left:
                break
            while self._left:
                self._run(self._left.pop())
        for kind in self._kinds.values():
            if "__getattr__" in kind.members:  # asks another module for what it does not have
                self._others |= self._first[kind.kind]

    def may_be_first(self, kind: type, key: str) -> bool:
        """Return whether a call may read an attribute of modules of a class before it sets it."""
        if _fits(key, self._first[kind]) or _fits(key, self._others) or _fits(key, self._unseen):
            return True
        return not any(key in each.written for each in self._kinds.values())  # but by a hook, say, that may read it too

    def _enter(self, kind: _Kind, member: _Member, done: frozenset[str] = _NOTHING) -> None:
        """Let a member of a class run."""
        for function in member.functions:
            variables = _own(function.__code__) if member.is_bound else {}
            is_sure = function is member.body or member.is_getter
            self._left.append(
                _Task(_Place(kind, member.position, function.__code__), function.__globals__, variables, done, is_sure)
            )

    def _run(self, task: _Task) -> None:
        """Note what a function reads, and which others it calls."""
        known = self._begun.get(task.place)
        if known is not None:
            if known.done <= task.done and known.is_sure <= task.is_sure:
                return
            task = task._replace(done=known.done & task.done, is_sure=known.is_sure and task.is_sure)
        self._begun[task.place] = task
        kind = task.place.kind
        seen = _Seen(task, self._layers)
        first = self._first[kind.kind] if kind else self._others
        first |= seen.first
        self._others |= seen.others if task.is_sure else seen.others | seen.first
        self._unseen |= seen.unseen
        self._named |= seen.named
        for loaded, done in seen.calls:
            member = kind and kind.find(loaded.name, task.place.position if loaded.owner is Thing.SUPER else -1)
            if kind and member:
                self._enter(kind, member, done)
        for inner, done in seen.inner:
            self._left.append(
                task._replace(place=task.place._replace(code=inner), variables=_captured(inner, task), done=done)
            )
        for function in seen.functions:
            self._left.append(
                _Task(_Place(None, 0, function.__code__), function.__globals__, {}, _NOTHING, is_sure=True)
            )

    def _look_for_taken(self, kind: _Kind) -> None:
        """Note which methods are taken by any code that does not call them at once, and what may run by functions it makes."""
        for members in kind.members.values():
            for member in members:
                for function in member.functions:
                    place = _Place(kind, member.position, function.__code__)
                    variables = _own(function.__code__) if member.is_bound else {}
                    task = _Task(place, function.__globals__, variables, _NOTHING, is_sure=False)
                    seen = _Seen(task, self._layers)
                    self._named |= seen.taken
                    for inner in seen.kept:
                        place = task.place._replace(code=inner)
                        self._left.append(task._replace(place=place, variables=_captured(inner, task)))


class _Place(NamedTuple):
    """Code that runs for a class, which stands at a place among its bases."""

    kind: _Kind | None
    position: int
    code: CodeType


class _Task(NamedTuple):
    """Code that may run, with what its global names are, and what is known when it begins.

    `is_sure` if its first argument is the module, and nothing else.
    """

    place: _Place
    names: Mapping[str, Any]
    variables: Mapping[str, Value]
    done: frozenset[str]
    is_sure: bool


class _Seen:
    """What code does, all ways taken together.

    Attributes:
        first: what it may read of the module itself that has not been set.
        others: what it may read of other objects.
        unseen: what it may read where no descriptor sees it.
        named: methods that it may call of whatever object; `taken` are those of them that it does not call at once.
        calls: methods that it calls of its own module, and what has been set before.
        inner: functions that it makes, with what is done when they begin; `kept` are those that may outlive the call.
        functions: those outside of classes that it names.
    """

    def __init__(self, task: _Task, layers: Collection[str]) -> None:
        self.first, self.others, self.unseen, self.named = set[str](), set[str](), set[str](), set[str]()
        self.taken, self.calls, self.functions = set[str](), list[tuple[Loaded, frozenset[str]]](), list[FunctionType]()
        self._task, self._names, self._layers = task, task.names, layers
        self._loads, self._called, self._objects = dict[int, Loaded](), set[int](), set[int]()
        self._used, self._lost = dict[int, frozenset[str]](), set[int]()
        kind, code = task.place.kind, task.place.code
        sets = _sets_nothing if kind is None else partial(kind.sets, task.place.position)
        made: list[Inner] = []
        for step, state, after in Walk(code, self._names, task.variables, task.done, sets):
            if is_read(step):
                self._read(loaded_by(step, state), state)
            elif is_call(step):
                self._call(*call_of(step, state), state)
            elif step.opname == "STORE_ATTR" and state.top() is Thing.OWN:
                self.calls.append((Loaded(step.argval, step.offset, Thing.OWN), state.done))
            elif step.opname == "LOAD_GLOBAL":
                self.functions += _functions(self._names.get(step.argval))
            elif isinstance(step.argval, CodeType):
                made.append(Inner(step.argval, step.offset))
            if not is_call(step) and not step.opname.startswith(("POP_TOP", "STORE_FAST", "STORE_DEREF")):
                self._lost |= _functions_on(state) - _functions_on(after)
        self._end(code)
        shared = {name for inner in all_within(code) if inner is not code for name in inner.co_freevars}
        outlives = {x for x in made if x.offset in self._lost or x.offset not in self._used or x.code.co_name in shared}
        self.inner = [(x.code, _NOTHING if x in outlives else self._used[x.offset]) for x in made]
        self.kept = [x.code for x in made if x in outlives]

    def _read(self, loaded: Loaded, state: State) -> None:
        holder = state.top()
        if isinstance(loaded.owner, Known):
            return
        self._loads[loaded.offset] = loaded
        if loaded.owner is None:
            self.named.add(loaded.name)
            if isinstance(holder, Loaded) and not any(hasattr(x, loaded.name) for x in _VALUES):
                self._objects.add(holder.offset)
            return
        self._read_own(loaded.name, state)
        if (kind := self._task.place.kind) and kind.is_getter(loaded.name):
            self.calls.append((loaded, state.done))
            self._called.add(loaded.offset)

    def _read_own(self, name: str, state: State) -> None:
        if name not in state.done:
            self.first.add(name)

    def _call(self, callee: Value, args: tuple[Value, ...], state: State) -> None:
        thing = callee.thing if isinstance(callee, Known) else None
        at_once = thing in _AT_ONCE or getattr(thing, "__module__", None) == "torch.utils.checkpoint"
        for x in (callee, *args):
            if isinstance(x, Inner):
                self._used[x.offset] = self._used.get(x.offset, state.done) & state.done
                self._lost |= set[int]() if at_once or x is callee else {x.offset}
            elif x is not callee and isinstance(x, Known) and x.thing in _ASKS:
                self._ask(None, "*", state)
        if isinstance(callee, Loaded):
            self._called.add(callee.offset)
            if callee.owner is not None:
                self.calls.append((callee, state.done))
        if thing in _ASKS:
            owner, name, *_ = *args, None, None
            self._ask(owner, name.pattern if isinstance(name, Text) else "*", state)

    def _ask(self, owner: Value, pattern: str, state: State) -> None:
        """Note what `getattr` may find."""
        is_no_module = isinstance(owner, Known) or (isinstance(owner, Loaded) and owner.name not in self._layers)
        if pattern == "*" and (is_no_module or self._task.place.code.co_name in _ASKED_BY_PYTHON):
            return
        self.named.add(pattern)
        if owner is Thing.OWN:
            self._read_own(pattern, state)
        else:
            self.others.add(pattern)

    def _end(self, code: CodeType) -> None:
        """Note what has been loaded and not called, and what strings may stand for."""
        words = {x for x in _flat(code.co_consts) if isinstance(x, str) and x.isidentifier()}
        names, anything = {*code.co_names}, words or {"*"}
        self.named |= words
        self.taken |= {x.name for offset, x in self._loads.items() if offset not in self._called}
        self.named |= self.taken
        found = (
            x.name for offset, x in self._loads.items() if offset not in self._called | self._objects and not x.owner
        )
        self.others.update(found)
        if names & _ASKS_BY_WORDS and code.co_name not in _ASKED_BY_PYTHON:
            self.first |= anything
            self.others |= anything
            self.named |= anything
        if any(step.opname == "MATCH_CLASS" for step in instructions(code)):
            self.first |= words
            self.others |= words
        if names & _DICTS:
            self.unseen |= anything


# -- classes ------------------------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    """What a class, which stands at a place among the bases of another, has by a name.

    `functions` may run when it is used; `body` does for sure; `is_bound` if their first argument is the module.
    """

    position: int
    functions: tuple[FunctionType, ...]
    body: FunctionType | None
    is_getter: bool
    is_bound: bool


class _Kind:
    """A class, and what it has of its own or by its bases, as far as they are not torch's."""

    def __init__(self, kind: type) -> None:
        self.kind, self.members = kind, dict[str, list[_Member]]()
        for position, base in enumerate(kind.__mro__):
            if base is not object and not is_torchs(base):
                for name, thing in vars(base).items():
                    if found := _member(position, thing):
                        self.members.setdefault(name, []).append(found)
        inside = [x for name, members in self.members.items() if name not in _OUTSIDE for x in members]
        codes = [code for x in inside for function in x.functions for code in all_within(function.__code__)]
        self.written = {step.argval for code in codes for step in instructions(code) if step.opname in _WRITES}
        self._sets: dict[_Member, frozenset[str]] = {}
        self._is_plain = not self.members.keys() & {"__setattr__", "__delattr__", "__getattribute__"}

    def find(self, name: str, after: int = -1) -> _Member | None:
        """Return what stands first by a name, of the bases after one."""
        return next((x for x in self.members.get(name, ()) if x.position > after), None)

    def is_getter(self, name: str) -> bool:
        """Return whether something runs when an attribute is read."""
        return any(x.is_getter for x in self.members.get(name, ()))

    def sets(self, position: int, loaded: Loaded, how: str) -> frozenset[str]:
        """Return what is set for sure when code at a position sets an attribute, reads it, or calls what it is."""
        if not self._is_plain:
            return _NOTHING
        if how == "set":
            return frozenset({loaded.name})
        member = self.find(loaded.name, position if loaded.owner is Thing.SUPER else -1)
        if member is None or member.body is None or loaded.name in self.written or member.is_getter != (how == "read"):
            return _NOTHING
        if member not in self._sets:
            self._sets[member] = _NOTHING  # while it calls itself
            body = cast("FunctionType", member.body)
            if not body.__code__.co_flags & _LATER:
                sets = partial(self.sets, member.position)
                walk = Walk(body.__code__, body.__globals__, _own(body.__code__), _NOTHING, sets)
                self._sets[member] = walk.done_at_end()
        return self._sets[member]


def _member(position: int, thing: Any) -> _Member | None:
    """Return what may run when something is used that a class has."""
    functions, is_getter = (*_functions(thing),), isinstance(thing, property | cached_property)
    body = thing.fget if isinstance(thing, property) else thing
    while isinstance(body, FunctionType) and body.__globals__.get("__name__", "").startswith("torch."):
        body = getattr(body, "__wrapped__", None)  # of which torch.no_grad has made another
    body = body if isinstance(body, FunctionType) and not hasattr(body, "__wrapped__") else None
    is_bound = not isinstance(thing, staticmethod | classmethod)
    return _Member(position, functions, body if is_bound else None, is_getter, is_bound) if functions else None


def _functions(thing: object) -> Iterator[FunctionType]:
    """Yield the functions that something is made of: decorators have them within."""
    left, seen = [thing], set[int]()
    while left:
        each: Any = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, property):
            left += [each.fget, each.fset, each.fdel]
        elif isinstance(each, staticmethod | classmethod):
            left.append(each.__func__)
        elif isinstance(each, cached_property | partial | partialmethod):
            left.append(each.func)
        elif isinstance(each, FunctionType):
            left += [cell.cell_contents for cell in each.__closure__ or () if _is_filled(cell)]
            if each.__globals__.get("__name__", "").partition(".")[0] not in _FAR:
                yield each
        if not isinstance(each, type | ModuleType):
            left.append(getattr(each, "__dict__", {}).get("__wrapped__"))


def _is_filled(cell: CellType) -> bool:
    with suppress(ValueError):
        return isinstance(cell.cell_contents, FunctionType | partial | staticmethod | classmethod)
    return False


# -- code ---------------------------------------------------------------------------------------------------------------


def _own(code: CodeType) -> dict[str, Value]:
    """Return what the first argument of a method is."""
    return {code.co_varnames[0]: Thing.OWN} if code.co_argcount else {}


def _captured(inner: CodeType, task: _Task) -> dict[str, Value]:
    """Return what a function that another makes knows of its variables: of those that are never set."""
    stores = [x for code in all_within(task.place.code) for x in instructions(code) if x.opname.startswith(_SETS)]
    changed = {name for x in stores for name in (x.argval if isinstance(x.argval, tuple) else (x.argval,))}
    return {
        name: Thing.OWN for name in inner.co_freevars if task.variables.get(name) is Thing.OWN and name not in changed
    }


def _functions_on(state: State) -> set[int]:
    return {x.offset for x in state.stack if isinstance(x, Inner)}


def _sets_nothing(loaded: Loaded, how: str) -> frozenset[str]:
    return _NOTHING


def _flat(constants: Iterable[Any]) -> Iterator[Any]:
    for x in constants:
        yield from _flat(x) if isinstance(x, tuple | frozenset) else (x,)


def _is_called_by_python(name: str) -> bool:
    return name == "forward" or (name.startswith("__") and name.endswith("__") and name not in _OUTSIDE)


def _fits(name: str, patterns: Collection[str]) -> bool:
    """Return whether a name is among some that may have stars."""
    return name in patterns or any(fnmatchcase(name, x) for x in patterns if "*" in x and name not in _OUTSIDE)
