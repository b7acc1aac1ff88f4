"""Which attributes a call of a module may read before it sets them, by the code of its methods.

In the classes below `first` is read on some way on which it was not set before, `done` is not; and so are `first_...`, `done_...`.
"""

import contextlib
import functools
import gc
import re
import weakref
from functools import partial, partialmethod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fshard.transforms.methods import Reads


def of(x):
    return x


def scaled(module, x):
    return module.first * x


def plain_decorator(function):
    def call(self, *args):
        return function(self, *args)

    return call


def every_other(function):
    @functools.wraps(function)
    def call(self, *args):
        self.done_calls = 0
        return function(self, *args) if of(self.done_calls) else None

    return call


class Base:
    def prepare(self, x):
        self.done_by_base = x
        of(self.done_by_base)

    def forward(self, x):
        return self.read_by_base


class Flag:
    """A context manager of Python that lets errors pass."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        of(error)


class Straight:
    def forward(self, x):
        self.done = x
        y, self.first = self.done + self.first, x
        self.done_later, self.unpacked_too = y, x
        return self.done_later


class Branches:
    def forward(self, x):
        if x:
            self.first = self.done = x
        else:
            self.done = 0
        self.done_after = self.done
        return self.first + self.done_after if self.done else 0


class Augmented:
    def forward(self, x):
        self.first += x
        self.first_T *= 0.9
        self.done = x
        self.done -= self.done
        self.first_mean: float = self.first_mean
        return x


class Elif:
    def forward(self, x):
        if x == 0:
            self.done = self.first = 0
        elif x == 1:
            self.done = self.first = 1
        elif x == 2:
            self.done = 2
        else:
            raise ValueError
        return self.done, self.first


class EarlyReturn:
    def forward(self, x):
        if x is None:
            return 0
        self.done = x
        if x > 1:
            self.first = x
            return self.done
        return self.done + self.first


class Deleting:
    def forward(self, x):
        self.done = x
        del self.done
        return hasattr(self, "done") or hasattr(self, "first") or setattr_first(self)


def setattr_first(module):
    module.first = 1


class Loop:
    def forward(self, xs):
        for x in xs:
            self.first = self.done = x
            of(self.done)
        return self.first


class ForElse:
    def forward(self, xs):
        for x in xs:
            if x:
                self.done = x
                break
            self.first = x
        else:
            self.done = 0
        return self.done, self.first


class WhileElse:
    def forward(self, x):
        while of(x):
            if of(x):
                self.done = x
                break
            if of(not x):
                self.first = 0
                continue
        else:
            self.done = self.first = 0
        return self.done + self.first


class While:
    def forward(self, x):
        while True:
            self.done = x
            if self.done:
                break
            self.first = x
        return self.done + self.first


class TryKeeps:
    def forward(self, x):
        try:
            self.first = of(x)
        except ValueError:
            of(x)
        return self.first


class TrySets:
    def forward(self, x):
        try:
            self.done = of(x)
        except ValueError:
            self.done = 0
        except (TypeError, KeyError) as error:
            self.done = error
        return self.done


class TryElse:
    def forward(self, x):
        try:
            of(x)
        except ValueError:
            return None
        else:
            self.done = x
        return self.done


class TryRaises:
    def forward(self, x):
        try:
            self.done = of(x)
        except ValueError as error:
            raise RuntimeError from error
        return self.done


class Finally:
    def forward(self, x):
        try:
            self.done = of(x)
            self.first_in_finally = x
        finally:
            self.done_finally = of(self.first_in_finally)
        return self.done + self.done_finally


class TryInLoop:
    def forward(self, xs):
        while True:
            try:
                self.done = of(xs)
                break
            except ValueError:
                continue
        return self.done


class TryCalls:
    def forward(self, x):
        try:
            self.set(x)
        except ValueError:
            return self.first
        return self.done

    def set(self, x):
        self.done = of(x)
        self.first = of(x)


class Group:
    def forward(self, x):
        try:
            self.first = of(x)
        except* ValueError:
            self.done = 1
            of(self.done)
        return self.first


class Suppress:
    def forward(self, x):
        with contextlib.suppress(ValueError):
            self.first = of(x)
        return self.first


class NoGrad:
    def forward(self, x):
        with torch.no_grad():
            self.done = of(x)
        with torch.autocast("cpu"), Flag() as flag:
            self.done_in_two = of(flag)
        with contextlib.nullcontext() if x else torch.enable_grad():
            self.done_in_either = of(x)
        return self.done + self.done_in_two + self.done_in_either


class Within:
    def forward(self, x):
        with self.lock(), torch.no_grad():
            self.first = of(x)
            self.done = of(x)
            of(self.done)
        return self.first

    @contextlib.contextmanager
    def lock(self):
        with contextlib.suppress(ValueError):
            yield


class Match:
    def forward(self, x):
        match x:
            case [a, b]:
                self.done = a + b
                self.first = a
            case {"a": a}:
                self.done = a
            case _:
                self.done = 0
        return self.done, self.first


class MatchAttribute:
    def forward(self, x):
        match self:
            case MatchAttribute(first=0):
                self.first = x
        return 0


class Walrus:
    def forward(self, x):
        if (y := self.first) and (z := of(x)):
            self.first = self.done = z
            return self.done
        return y


class Comprehensions:
    def forward(self, xs):
        self.done = 1
        y = (
            [self.done * x for x in xs],
            dict.fromkeys(xs, self.done),
            {self.done for _ in xs},
            sum(self.done for _ in xs),
        )
        z = [self.first for _ in xs]
        self.first = 1
        return y, z


class Lambdas:
    def forward(self, xs):
        self.done = self.first_kept = 1
        self.keep = lambda x: self.first_kept * x
        return sorted(xs, key=lambda x: self.done * x), (lambda: self.done)()  # noqa: PLC3002


class Checkpointed:
    def forward(self, x):
        self.done = 1

        def run(x):
            return self.done * self.first

        y = checkpoint(run, x, use_reentrant=False)
        self.first = 1
        return y


class Nested:
    def forward(self, x):
        def set():
            self.first = x

        def read():
            return self.first

        return read() if x else set()


class Rebound:
    def forward(self, other):
        self.done = 1
        of(self.done)
        self = other  # noqa: PLW0642
        self.first = 1
        return self.first


class Alias:
    def forward(self, x):
        module = self
        module.done = self.done_too = x
        return self.done + module.done_too + module.first, self.again()

    def again(self):
        self.first = 1


class Helper:
    def forward(self, x):
        self.set(x)
        of(self.done)
        return self.read(x)

    def set(self, x):
        self.done = x
        if x:
            self.first = x

    def read(self, x):
        return self.done + self.first


class Arguments:
    """Reads what a call sets, before it."""

    def forward(self, x):
        return self.set(self.first) + self.done + self.set(*x) + self.done

    def set(self, x):
        self.first = self.done = x
        return x


class TwoCallers:
    def forward(self, x):
        self.done = x
        if x:
            self.first = x
            return self.read()
        return self.read()

    def read(self):
        return self.done + self.first


class Uncalled:
    def forward(self, x):
        of(self.set)
        return self.first

    def set(self):
        self.first = 1


class Dispatch:
    def forward(self, x):
        f = {0: self.set, 1: self.read}[x]
        return f()

    def set(self):
        self.first = self.done = 1
        return self.done

    def read(self):
        return self.first


class Either:
    def forward(self, x):
        (self.set if x else self.other)()
        return self.first

    def set(self):
        self.first = 1

    def other(self):
        self.other_done = 1


class Recursive:
    def forward(self, x):
        self.done = x
        if x:
            self.first = x
            return self.forward(x - 1)
        return self.done + self.first


class Mutual:
    def forward(self, x):
        self.done = x
        return self.even(x)

    def even(self, x):
        return self.odd(x - 1) if x else self.first

    def odd(self, x):
        self.first = 1
        return self.even(x - 1) if x else self.done


class Properties:
    def forward(self, x):
        self.done = self.done_before = x
        return self.ready + self.late + self.done_by_getter

    @property
    def ready(self):
        self.done_by_getter = 1
        return self.done_before

    @property
    def late(self):
        y = self.first
        self.first = 1
        return y


class Setter:
    def forward(self, x):
        self.rate = x

    @property
    def rate(self):
        return 1

    @rate.setter
    def rate(self, value):
        self.first = self.first * value


class Dunders:
    def __getitem__(self, i):
        return self.first + i

    def forward(self, x):
        y = self[1]
        self.first = x
        return y


class Operators:
    def __matmul__(self, x):
        y = self.first
        self.first = x
        self.done = y
        return self.done

    def forward(self, x):
        return self @ x


class ByName:
    def forward(self, x, mode):
        return getattr(self, f"forward_{mode}")(x)

    def forward_train(self, x):
        y = self.first
        self.first = x
        return y

    def shown(self):
        return self.done

    def set_done(self):
        self.done = 1


class ByAnyName:
    def forward(self, x, mode):
        return getattr(self, mode)(x)

    def train_it(self, x):
        y = self.first
        self.first = x
        return y


class ByMap:
    def forward(self, names):
        return [*map(partial(getattr, self), names)]

    def train_it(self, x):
        y = self.first
        self.first = x
        return y


class Asked:
    def forward(self, x):
        self.done = 1
        y = getattr(self, "done"), getattr(self, "first", None), getattr(self, "first_" + x, None)  # noqa: B009
        self.first = self.first_a = 1
        return y


class Bound:
    def __init__(self):
        self.function = self._train

    def _train(self, x):
        y = self.first
        self.first = x
        return y

    def forward(self, x):
        return self.function(x)


class Hooked:
    def __init__(self, layer):
        layer.register_forward_hook(lambda *_: self.update())

    def update(self):
        self.first = self.first + 1

    def forward(self, x):
        return x


class PartialMethods:
    def train_it(self, x, scale):
        y = self.first
        self.first = x
        return y * scale

    one = partialmethod(train_it, scale=1)

    def forward(self, x):
        return self.one(x)


class PlainDecorator:
    @plain_decorator
    def forward(self, x):
        y = self.first
        self.first = x
        self.done = y
        return self.done


class SometimesDecorator:
    def forward(self, x):
        self.update(x)
        return self.first

    @every_other
    def update(self, x):
        self.first = self.done = x
        return self.done


class TorchDecorator:
    def forward(self, x):
        self.update(x)
        return self.done + self.first

    @torch.no_grad()
    def update(self, x):
        self.done = x
        of(self.first)
        self.first = x


class Cached:
    """A cache sets nothing the second time."""

    def forward(self, x):
        return self.update() + self.first

    @functools.cache  # noqa: B019
    def update(self):
        self.first = 1


class Generator:
    def forward(self, x):
        self.done = 1
        parts = self.parts(x)
        return self.first, sum(parts)

    def parts(self, x):
        self.first = x
        yield self.done


class Static:
    @staticmethod
    def set(other):
        other.first = 1

    def forward(self, x):
        self.set(x)
        y = self.first
        self.first = 1
        return y


class Overridden(Helper):
    """Does not set what its base does."""

    def set(self, x):
        pass

    def forward(self, x):
        self.set(x)
        y = self.first + self.first_of_base
        self.first_of_base = 1
        return y

    def read(self, x):
        return 0


class Super(Base):
    def prepare(self, x):
        super().prepare(x)
        super(Super, self).prepare(x)  # noqa: UP008
        return self.done_by_base

    def forward(self, x):
        self.prepare(x)
        y = self.done_by_base
        y += super().forward(x)
        self.read_by_base = 1
        return y


class NotSuper(Base):
    """Overrides what reads."""

    def forward(self, x):
        self.read_by_base = x
        return self.read_by_base


class SetByHand:
    def __setattr__(self, name, value):
        if value:
            object.__setattr__(self, name, value)

    def forward(self, x):
        self.first = x
        return self.first


class Logs:
    """What nobody in a call names, those outside call between calls."""

    def forward(self, x):
        self.done = self.done_norm = x
        return x

    def attention_map(self):
        return self.done

    @property
    def norm(self):
        return self.done_norm


class Outside:
    def forward(self, x):
        y = scaled(self, x)
        self.first = x
        return y


class InDict:
    def forward(self, x):
        self.first = self.done = vars(self).get("first", 0) + 1
        return self.done


class Shadowed:
    """Whose method an attribute may stand before."""

    def forward(self, x):
        self.update()
        y = self.first
        self.update = of
        return y

    def update(self):
        self.first = 1


class ByTensors:
    """Reads of tensors, and of a layer, what it sets itself under the same names."""

    def forward(self, x: Tensor, block: nn.Module):
        self.mean = x.mean()
        self.attn = block.attn(x) + block.attn.out_features
        self.view = x.view(*x.size())
        return self.mean, self.attn, self.view


KINDS = [x for x in [*globals().values()] if isinstance(x, type) and x.__module__ == __name__ and x not in (Base, Flag)]
OTHERS = {
    (Super, "read_by_base"): True,
    (NotSuper, "read_by_base"): False,
    (ByTensors, "mean"): False,
    (ByTensors, "attn"): False,
    (ByTensors, "view"): False,
}


def rows():
    """Yield classes, attributes that their methods name, and whether these may be read first, which their names say."""
    for kind in KINDS:
        codes = [x.__code__ for base in kind.__mro__ for x in vars(base).values() if hasattr(x, "__code__")]
        for key in sorted({name for code in codes for name in code.co_names} - {*dir(kind)}):
            if key.startswith(("first", "done")):
                yield kind, key, key.startswith("first")
    yield from ((kind, key, expected) for (kind, key), expected in OTHERS.items())


@pytest.mark.parametrize(
    ("kind", "key", "expected"), [*rows()], ids=lambda x: x.__name__ if isinstance(x, type) else str(x)
)
def test_what_may_be_read_first(kind, key, expected):
    assert Reads([kind]).may_be_first(kind, key) is expected


class Parent:
    """Reads what its child sets."""

    def forward(self, x):
        return self.child.mean + self.child(x) + self.others[0].read(x)


class Child:
    def forward(self, x):
        self.mean = self.map = x
        return self.map

    def read(self, x):
        self.set_by_read = 1
        return self.read_by_read + self.set_by_read

    def write(self):
        self.read_by_read = self.shown = 1

    def show(self):
        return self.shown


def test_what_modules_read_of_each_other():
    alone, together = Reads([Child]), Reads([Child, Parent])
    keys = ("mean", "map", "read_by_read", "set_by_read", "shown")
    assert [alone.may_be_first(Child, key) for key in keys] == [False] * 5
    assert [together.may_be_first(Child, key) for key in keys] == [True, False, True, False, False]


def test_a_method_that_is_replaced_counts(monkeypatch):
    assert not Reads([Child]).may_be_first(Child, "mean")
    monkeypatch.setattr(Child, "forward", Parent.forward)
    monkeypatch.setattr(Child, "write", lambda self: setattr(self, "mean", 1))
    assert Reads([Child]).may_be_first(Child, "mean")


class Configured:
    def forward(self, x, name):
        self.mean = x
        return self.mean + getattr(self.config, name)


def test_an_attribute_that_is_no_module_is_asked_for_what_it_has():
    assert not Reads([Configured], ["layer"]).may_be_first(Configured, "mean")
    assert Reads([Configured], ["config"]).may_be_first(Configured, "mean")


def test_no_class_is_kept():
    kind = type("Local", (Helper,), {})
    assert Reads([kind]).may_be_first(kind, "first")
    gone = weakref.ref(kind)
    del kind
    gc.collect()
    assert gone() is None


# -- programs -----------------------------------------------------------------------------------------------------------


class Failure(Exception):
    """An error that a program catches."""


class Spent(BaseException):
    """The end of a way that is not followed further."""


class Way:
    """A way through a program, by the choices that it makes, and what is read on it before it is set."""

    def __init__(self, choices):
        self.choices, self.made, self.set, self.first = choices, 0, set(), set()

    def choose(self):
        if self.made == len(self.choices):
            self.made += 1
        if self.made > len(self.choices):  # and what follows is not seen
            raise Spent
        self.made += 1
        return self.choices[self.made - 1]

    def note(self, key, done):
        if self.made <= len(self.choices):
            if done == "set":
                self.set.add(key)
            elif key not in self.set:
                self.first.add(key)


class Recorder:
    """A module that notes what is done to `a`, `b` and `c`."""

    way: Way

    def __getattribute__(self, key):
        if key in KEYS:
            type(self).way.note(key, "read")
            return 1
        return object.__getattribute__(self, key)

    def __setattr__(self, key, value):
        type(self).way.note(key, "set")


KEYS, MOST = ("a", "b", "c"), 9
HARMLESS = contextlib.nullcontext
swallowing = partial(contextlib.suppress, Failure)


def on_all_ways(source):
    """Return what is read first on any way that makes up to so many choices."""
    found, left = set(), [()]
    while left:
        way = Way(left.pop())

        def fail(way=way):
            if way.choose():
                raise Failure
            return 1

        names = {"choose": way.choose, "fail": fail, "Failure": Failure, "swallowing": swallowing, "Base": Recorder}
        names["harmless"] = HARMLESS
        exec(source, names)
        names["Program"].way = way
        with contextlib.suppress(Spent, Failure, RecursionError):
            names["Program"]().forward()
        found |= way.first
        if way.made > len(way.choices) and len(way.choices) < MOST:
            left += [(*way.choices, 0), (*way.choices, 1)]
    return found


def by_code(source):
    names = {
        "choose": of,
        "fail": of,
        "Failure": Failure,
        "swallowing": swallowing,
        "harmless": HARMLESS,
        "Base": object,
    }
    exec(source, names)
    reads = Reads([names["Program"]])
    return {key for key in KEYS if reads.may_be_first(names["Program"], key)}


def written_in(source):
    return {key for key in KEYS if re.search(rf"self\.{key} \+?= ", source)}


def indented(lines):
    return [f"    {line}" for line in lines] or ["    pass"]


key = st.sampled_from(KEYS)
simple = st.one_of(
    key.map(lambda k: [f"self.{k} = 1"]),
    key.map(lambda k: [f"self.{k}"]),
    st.tuples(key, key).map(lambda ks: [f"self.{ks[0]} = self.{ks[1]}"]),
    st.tuples(key, key).map(lambda ks: [f"self.{ks[0]} += self.{ks[1]}"]),
    st.tuples(key, key).map(lambda ks: [f"self.{ks[0]} = self.{ks[1]} if choose() else 1"]),
    st.tuples(key, key).map(lambda ks: [f"choose() and self.{ks[0]} or self.{ks[1]}"]),
)
leaving = st.just(["if choose(): return 1"])  # what follows a bare one is not even compiled
failing = st.one_of(
    key.map(lambda k: [f"self.{k} = fail()"]),
    key.map(lambda k: [f"[self.{k} for _ in range(choose())]"]),
    key.map(lambda k: [f"(lambda: self.{k})()"]),
    key.map(lambda k: [f"later = lambda: self.{k}", "choose() and later()"]),
    key.map(lambda k: [f"getattr(self, {k!r})"]),
    key.map(lambda k: ["module = self", f"module.{k} = 1", f"self.{k}"]),
    key.map(lambda k: [f"if (y := self.{k}): of = y"]),
    st.sampled_from(
        [["raise Failure"], ["fail()"], ["self.get"], ["for _ in self.parts(): pass"], ["later = self.parts()"]]
    ),
    st.sampled_from([["{0: self.g, 1: self.h}[choose()]()"], ["(self.g if choose() else self.h)()"], ["self[0]"]]),
)


def called(name, ks):
    return [f"self.{name}(self.{ks[0]})", f"self.{name}(*[self.{ks[1]}])"][: 1 + (ks[0] == ks[1])]


def calls(names):
    return st.tuples(st.sampled_from(names), key, key).map(lambda x: called(x[0], x[1:]))


def blocks(leaf, kinds):
    """Return lists of lines with the statements of some kinds."""

    def compound(block):
        body = block.map(indented)
        two = st.tuples(body, body)
        makers = {
            "if": two.map(lambda x: ["if choose():", *x[0], "else:", *x[1]]),
            "while": two.map(lambda x: ["while choose():", *x[0], "    if choose(): break", "else:", *x[1]]),
            "for": two.map(lambda x: ["for _ in range(choose()):", *x[0], "    if choose(): continue", *x[1]]),
            "try": st.tuples(body, body, body).map(
                lambda x: ["try:", *x[0], "except Failure:", *x[1], "else:", *x[2], "self.a"]
            ),
            "finally": two.map(lambda x: ["try:", *x[0], "finally:", *x[1]]),
            "with": body.map(lambda x: ["with harmless():", *x]),
            "suppress": body.map(lambda x: ["with swallowing():", *x]),
        }
        rows = st.lists(st.one_of(leaf, *(makers[kind] for kind in kinds)), min_size=1, max_size=3)
        return rows.map(lambda each: [line for lines in each for line in lines])

    flat = st.lists(leaf, min_size=1, max_size=3).map(lambda each: [line for lines in each for line in lines])
    return st.recursive(flat, compound, max_leaves=6)


def programs(leaf, kinds, f_calls, g_calls, others=""):
    """Return classes of three methods, of which each may call some."""
    forward = blocks(st.one_of(leaf, calls(("f", "g"))), kinds)
    f = blocks(st.one_of(leaf, calls(f_calls)) if f_calls else leaf, kinds)
    g = blocks(st.one_of(leaf, calls(g_calls)) if g_calls else leaf, kinds)

    def source(parts):
        methods = zip(("forward(self)", "f(self, x=0)", "g(self, x=0)"), parts, strict=True)
        lines = [line for name, part in methods for line in (f"    def {name}:", *indented(indented(part)))]
        return "\n".join(["class Program(Base):", *lines, others])

    return st.tuples(forward, f, g).map(source)


@settings(max_examples=150, deadline=None)
@given(programs(st.one_of(simple, leaving), ("if", "while", "for", "with"), ("g",), ()))
def test_it_finds_just_what_some_way_reads_first(source):
    assert by_code(source) & written_in(source) == on_all_ways(source) & written_in(source)


MORE = """
    def h(self):
        self.b = self.c

    @property
    def get(self):
        self.c = self.a

    def parts(self):
        self.a = self.b
        yield 1

    def __getitem__(self, i):
        self.b = 1
        return self.b
"""
EVERY = ("if", "while", "for", "try", "finally", "with", "suppress")


@settings(max_examples=150, deadline=None)
@given(
    programs(
        st.one_of(simple, leaving, failing), EVERY, ("f", "g"), ("f", "h"), MORE.replace("h(self)", "h(self, x=0)")
    )
)
def test_it_finds_all_that_any_way_reads_first(source):
    assert by_code(source) >= on_all_ways(source)
