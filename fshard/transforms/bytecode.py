"""A piece of code, walked through on all ways at once: what is on the stack, and which attributes have surely been set.

Only a few kinds of values are told apart, and all else is None, of which nothing is known:

    self.mean = f(x)            OWN is on top when an attribute is set: from here on `mean` is done
    y = self.scale(x)           Loaded("scale", of OWN) below x when it is called: what `scale` sets, is done
    getattr(self, f"m{i}")      Known(getattr) is called with OWN and Text("m*")
    with torch.no_grad():       QUIET on top: whatever fails within, fails

Where two ways meet, what is the same on both is left.  A handler of errors may be come to from anywhere within its `try`.  An
instruction that is not known here leaves nothing known of the stack.
"""

from __future__ import annotations

import builtins
import dis
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from inspect import getattr_static
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias, cast


class Thing(Enum):
    """What has no name of its own."""

    OWN = "the module whose method it is"
    SUPER = "super() of it"
    QUIET = "a context manager that lets all errors pass"
    QUIET_EXIT = "the way out of such a one"
    LOUD_EXIT = "the way out of one that may not"
    FALSE = "False"


class Known(NamedTuple):
    """A module, class or function that a global name stands for."""

    thing: Any


class Text(NamedTuple):
    """A string, with a star for what of it is not known."""

    pattern: str


class Loaded(NamedTuple):
    """What an attribute was, of the module itself, of super() or of something else, by the instruction that loaded it."""

    name: str
    offset: int
    owner: Value


class Inner(NamedTuple):
    """A function that is made within."""

    code: CodeType
    offset: int


Value: TypeAlias = "Thing | Known | Text | Loaded | Inner | None"


class State(NamedTuple):
    """What is known where an instruction begins; `done` are the attributes of the module that have been set."""

    stack: tuple[Value, ...]
    variables: Mapping[str, Value]
    done: frozenset[str]

    def top(self, depth: int = 1) -> Value:
        """Return what is so deep in the stack."""
        return self.stack[-depth] if depth <= len(self.stack) else None

    def moved(self, pops: int, *pushed: Value) -> State:
        """Take some from the stack, and put others there."""
        return self._replace(stack=(*self.stack[: max(len(self.stack) - pops, 0)], *pushed))

    def at_most(self, other: State) -> State:
        """Return what is known here and there."""
        variables = {name: x for name, x in self.variables.items() if other.variables.get(name) == x}
        stack = tuple(x if x == y else None for x, y in zip(self.stack, other.stack, strict=False))
        return State(stack, variables, self.done & other.done)


class Call(NamedTuple):
    """What is called, with which positional arguments, as far as they are known."""

    callee: Value
    args: tuple[Value, ...]


class Walk:
    """A piece of code on all ways through it.

    Args:
        code: of the function.
        names: what its global names stand for.
        variables: what is known of its own ones at first.
        done: what has been set before it begins.
        sets: which attributes are set for sure when one is set, or read, or what was read is called: "set", "read", "call".
    """

    def __init__(
        self,
        code: CodeType,
        names: Mapping[str, Any],
        variables: Mapping[str, Value],
        done: frozenset[str],
        sets: Callable[[Loaded, str], frozenset[str]],
    ) -> None:
        self.steps = instructions(code)
        self._names, self._sets = names, sets
        self._loose = {name for inner in all_within(code) if inner is not code for name in _stored(inner)}
        self._places = {step.offset: place for place, step in enumerate(self.steps)}
        self._handlers = cast("Any", dis.Bytecode(code)).exception_entries
        self._found: dict[int, State] = {}
        left = [(0, State((), {k: v for k, v in variables.items() if k not in self._loose}, done))]
        while left:
            place, state = left.pop()
            offset = self.steps[place].offset
            now = self._found[offset].at_most(state) if offset in self._found else state
            if self._found.get(offset) != now:
                self._found[offset] = now
                left += [(self._places[to], after) for to, after in self._ways(place, now)]

    def __iter__(self) -> Iterator[tuple[dis.Instruction, State, State]]:
        """Yield the instructions that can be come to, and what is known there and after them."""
        found = ((step, self._found[step.offset]) for step in self.steps if step.offset in self._found)
        return ((step, state, self._after(step, state, jump=False)) for step, state in found)

    def done_at_end(self) -> frozenset[str]:
        """Return what has been set whenever it returns."""
        ends = [state.done for step, state, _ in self if step.opname in _RETURNS]
        return frozenset[str].intersection(*ends) if ends else frozenset[str]()

    def _ways(self, place: int, state: State) -> Iterator[tuple[int, State]]:
        """Yield where it may go on from an instruction, and with what."""
        step = self.steps[place]
        for entry in self._handlers:
            if entry.start <= step.offset < entry.end:
                yield entry.target, state._replace(stack=(*state.stack[: entry.depth], *[None] * (entry.lasti + 1)))
        if step.opcode in _JUMPS and not ("IF_TRUE" in step.opname and state.top() is Thing.FALSE):
            yield step.argval, self._after(step, state, jump=True)
        if step.opname not in _ENDS and place + 1 < len(self.steps):
            yield self.steps[place + 1].offset, self._after(step, state, jump=False)

    def _after(self, step: dis.Instruction, state: State, *, jump: bool) -> State:
        """Return what is known after an instruction."""
        op, effect = step.opname, 0 if step.opname == "PRECALL" else dis.stack_effect(step.opcode, step.arg, jump=jump)
        if ("_FAST" in op or op.endswith("_DEREF")) and op != "LOAD_FROM_DICT_OR_DEREF":
            return self._with_variables(step, state)
        if is_call(step):
            return self._called(step, state)
        if is_read(step):
            return self._read(step, state, effect)
        if op in ("STORE_ATTR", "DELETE_ATTR") and state.top() is Thing.OWN:
            done = state.done | self._sets(Loaded(step.argval, step.offset, Thing.OWN), "set")
            return state._replace(done=done).moved(-effect)
        if op == "LOAD_GLOBAL":
            found = known(self._names.get(step.argval, getattr(builtins, step.argval, None)))
            return state.moved(0, *(None,) * (effect - 1), found)
        return _FOLLOWED[op](step, state, effect) if op in _FOLLOWED else _moved(op, state, effect)

    def _with_variables(self, step: dis.Instruction, state: State) -> State:
        """Follow one or two variables that are loaded, stored or deleted."""
        names = cast("tuple[str, ...]", step.argval if isinstance(step.argval, tuple) else (step.argval,))
        for verb, name in zip(re.findall("LOAD|STORE|DELETE", step.opname), names, strict=False):
            if verb == "LOAD":
                state = state.moved(0, state.variables.get(name))
                continue
            value = state.top() if verb == "STORE" and name not in self._loose else None
            kept = None if isinstance(value, Loaded) else value
            state = state._replace(variables={**state.variables, name: kept}).moved(verb == "STORE")
        return state

    def _read(self, step: dis.Instruction, state: State, effect: int) -> State:
        pops = 3 if step.opname == "LOAD_SUPER_ATTR" else 1
        loaded = loaded_by(step, state)
        value: Value = loaded
        if loaded.owner in (Thing.OWN, Thing.SUPER):
            state = state._replace(done=state.done | self._sets(loaded, "read"))
        elif isinstance(loaded.owner, Known):
            value = known(vars(loaded.owner.thing).get(loaded.name))
        return state.moved(pops, *(None,) * (effect + pops - 1), value)

    def _called(self, step: dis.Instruction, state: State) -> State:
        callee, pops, made = call_of(step, state).callee, _pops_of_call(step), cast("Value", None)
        if isinstance(callee, Loaded) and callee.owner in (Thing.OWN, Thing.SUPER):
            state = state._replace(done=state.done | self._sets(callee, "call"))
        elif isinstance(callee, Known):
            made = Thing.QUIET if _is_quiet(callee.thing) else None
            if callee.thing is super and call_of(step, state).args[1:] in ((), (Thing.OWN,)):
                made = Thing.SUPER
        return state.moved(pops, made)


# -- instructions -------------------------------------------------------------------------------------------------------

_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_RETURNS = ("RETURN_VALUE", "RETURN_CONST")
_ENDS = (*_RETURNS, "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
_NAMED = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_", "DELETE_", "IMPORT_")
_IDLE = (
    *("JUMP_", "NOP", "NOT_TAKEN", "RESUME", "EXTENDED_ARG", "TO_BOOL"),
    *("PRECALL", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS"),
)
_PUSHING = ("LOAD_", "PUSH_NULL")
_POPPING = (
    *("POP_", "STORE_", "DELETE_", "RETURN_", "RAISE_", "RERAISE", "JUMP_", "FOR_ITER", "END_FOR"),
    *("LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE", "MAP_ADD", "DICT_UPDATE", "DICT_MERGE"),
)
_PLAIN = (
    *("BINARY_", "UNARY_", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "BUILD_", "FORMAT_", "CONVERT_", "LIST_TO_TUPLE"),
    *("GET_", "UNPACK_", "FOR_ITER", "MATCH_", "SEND", "YIELD_", "CHECK_", "END_", "IMPORT_"),
    *("PUSH_EXC_INFO", "CALL_INTRINSIC_1"),
)


@lru_cache(maxsize=1024)
def instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """Return the instructions of a piece of code."""
    return (*dis.get_instructions(code),)


def is_read(step: dis.Instruction) -> bool:
    """Return whether an instruction reads an attribute: all do that have a name and are not known for something else."""
    return step.opcode in dis.hasname and not step.opname.startswith(_NAMED)


def loaded_by(step: dis.Instruction, state: State) -> Loaded:
    """Return what an instruction reads, and of what."""
    owner = state.top()
    if step.opname == "LOAD_SUPER_ATTR":
        owner = Thing.SUPER if owner is Thing.OWN else None
    is_module = isinstance(owner, Known) and isinstance(owner.thing, ModuleType)
    return Loaded(step.argval, step.offset, owner if is_module or owner in (Thing.OWN, Thing.SUPER) else None)


def call_of(step: dis.Instruction, state: State) -> Call:
    """Return what an instruction calls: it is in one of two places below the arguments."""
    rows = state.stack[-_pops_of_call(step) :]
    return Call(next((x for x in rows[:2] if x is not None), None), rows[2:])


def is_call(step: dis.Instruction) -> bool:
    """Return whether an instruction calls something."""
    return step.opname in _CALLS


def _pops_of_call(step: dis.Instruction) -> int:
    if step.opname == "CALL_FUNCTION_EX":
        return 1 - dis.stack_effect(step.opcode, step.arg)
    return cast("int", step.arg) + (3 if step.opname == "CALL_KW" else 2)


def _moved(op: str, state: State, effect: int) -> State:
    """Follow an instruction of which no more is known than how many values it takes from the stack, or puts there."""
    if op.startswith(_IDLE) and effect == 0:
        return state
    if op.startswith(_POPPING) and effect <= 0:
        return state.moved(-effect)
    if op.startswith(_PUSHING) and effect > 0:
        return state.moved(0, *(None,) * effect)
    height = len(state.stack) + effect
    kept = max(min(len(state.stack), height) - 1, 0) if op.startswith(_PLAIN) else 0  # below what it may have touched
    return state._replace(stack=state.stack[:kept] + (None,) * max(height - kept, 0))


def _copy(step: dis.Instruction, state: State, effect: int) -> State:
    copied, rows = state.top(step.argval), [*state.stack]
    if isinstance(copied, Loaded):  # of which one may be kept
        copied = rows[-step.argval] = None
    return state._replace(stack=(*rows, copied))


def _swap(step: dis.Instruction, state: State, effect: int) -> State:
    rows = [*[None] * step.argval, *state.stack]
    rows[-1], rows[-step.argval] = rows[-step.argval], rows[-1]
    return state._replace(stack=tuple(rows[step.argval :]))


def _add(step: dis.Instruction, state: State, effect: int) -> State:
    return state.moved(2, _joined((state.top(2), state.top())) if step.argrepr == "+" else None)


def _enter(step: dis.Instruction, state: State, effect: int) -> State:
    is_quiet = state.top() is Thing.QUIET and (step.opname == "BEFORE_WITH" or step.argval in (1, "__exit__"))
    return state.moved(1, Thing.QUIET_EXIT if is_quiet else Thing.LOUD_EXIT, None)


def _fail(step: dis.Instruction, state: State, effect: int) -> State:
    exits = [x for x in state.stack if x in (Thing.QUIET_EXIT, Thing.LOUD_EXIT)]
    return state.moved(0, Thing.FALSE if exits and exits[-1] is Thing.QUIET_EXIT else None)


def _load_constant(step: dis.Instruction, state: State, effect: int) -> State:
    return state.moved(0, _constant(step))


def _make_function(step: dis.Instruction, state: State, effect: int) -> State:
    return state.moved(1 - effect, state.top())


def _build_string(step: dis.Instruction, state: State, effect: int) -> State:
    return state.moved(step.argval, _joined(state.stack[-step.argval :]))


_FOLLOWED = {
    "COPY": _copy,
    "SWAP": _swap,
    "LOAD_CONST": _load_constant,
    "BINARY_OP": _add,
    "BUILD_STRING": _build_string,
    "MAKE_FUNCTION": _make_function,
    "SET_FUNCTION_ATTRIBUTE": _make_function,
    "BEFORE_WITH": _enter,
    "LOAD_SPECIAL": _enter,
    "WITH_EXCEPT_START": _fail,
}


# -- values -------------------------------------------------------------------------------------------------------------


def known(thing: Any) -> Value:
    """Return the value of what a global name stands for."""
    return Known(thing) if isinstance(thing, ModuleType | type | FunctionType | BuiltinFunctionType) else None


def is_torchs(thing: Any) -> bool:
    """Return whether torch has made a class or function: what its code does is known."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0] == "torch"


def all_within(code: CodeType) -> Iterator[CodeType]:
    """Yield a piece of code, and that of the functions within it."""
    left = [code]
    while left:
        yield (each := left.pop())
        left += [x for x in each.co_consts if isinstance(x, CodeType)]


def _stored(code: CodeType) -> Iterable[str]:
    """Return the names that a function sets of those around it."""
    return [step.argval for step in instructions(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF")]


def _constant(step: dis.Instruction) -> Value:
    if isinstance(step.argval, CodeType):
        return Inner(step.argval, step.offset)
    return Text(step.argval) if isinstance(step.argval, str) and not re.search(r"[*?\[]", step.argval) else None


def _joined(parts: Iterable[Value]) -> Value:
    rows = [*parts]
    texts = [x for x in rows if isinstance(x, Text)]
    return Text("".join(x.pattern if isinstance(x, Text) else "*" for x in rows)) if texts else None


def _is_quiet(thing: Any) -> bool:
    """Return whether context managers of a class, or that a function of torch makes, let all errors pass."""
    if is_torchs(thing):
        return True
    leave = getattr_static(thing, "__exit__", None) if isinstance(thing, type) else None
    if not isinstance(leave, FunctionType):
        return False
    ends = [(before, step) for before, step in pairwise(instructions(leave.__code__)) if step.opname in _RETURNS]
    last = [step if step.opname == "RETURN_CONST" else before for before, step in ends if not step.is_jump_target]
    return len(last) == len(ends) and all("CONST" in step.opname and step.argval in (None, False) for step in last)
