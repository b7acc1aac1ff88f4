"""`Handle`: a parameter as a tensor without memory, whose unit is gathered when an operation touches it.

It is a tensor to whoever asks: shape, dtype and device are known, and modules take it.  There are two ways to its values:

    torch.f(h, x)       __torch_function__    f runs on the gathered tensors, and gradients come to their unit (`_Use`)
    what f calls in C++ __torch_dispatch__    f has been given h itself, and gradients come to h's own node (`_Aside`)

The first is the usual one.  On the second go an autograd Function, an operator of the user's, and torch.func, which do not
ask a tensor's class.  What it gives is added to the unit's gradients after the backward.
"""

from __future__ import annotations

import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import Function

from fshard.errors import LayoutError, ModuleError, ScopeError
from fshard.mesh.scope import here
from fshard.transforms.lent import lent, untouched
from fshard.transforms.patterns import named, parts_of

if TYPE_CHECKING:
    from fshard.transforms.tape import Tape
    from fshard.transforms.units import Unit

_compiler: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]
"""What torch.compile runs the present frame with, None outside of it."""
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_T: Any = Tensor
KNOWN = frozenset(
    {
        *(getattr(_T, name).__get__ for name in ("device", "dtype", "itemsize", "layout", "nbytes", "ndim")),
        *(
            getattr(_T, name).__get__
            for name in ("is_cpu", "is_cuda", "is_meta", "is_nested", "is_sparse", "requires_grad", "shape")
        ),
        *(_T.__len__, _T.dim, _T.element_size, _T.get_device, _T.is_complex, _T.is_floating_point),
        *(_T.nelement, _T.numel, _T.size),
    }
)
"""What a handle knows without its values."""
_OF_PARAMETERS = {_T.grad_fn.__get__: None, _T.grad.__get__: None, _T.is_leaf.__get__: True}
"""What is asked of parameters, and the answer."""
_HOOKS = frozenset({_T.register_hook, _T.register_post_accumulate_grad_hook})
_FLAGS = frozenset({_T.requires_grad_, _T.requires_grad.__set__})
_SHOWN = frozenset({_T.numpy, _T.__array__, _T.__dlpack__})
"""What lets others have the memory, who tell nobody when they write to it."""

_COMPILED = (
    "torch.compile cannot follow a parameter that is gathered when it is used. Compile the whole loss function, or a part that "
    "is called with gathered parameters: fs.gathered(torch.compile(fn))."
)


class Handle(Tensor):
    """A parameter inside a loss function."""

    unit: Unit
    at: int
    _is_param = True
    """As torch asks whether it is one."""
    own: Tensor | None = None
    """What a call has made of a frozen one."""
    bound: bool = False
    """Whether it was given other data, or an operation has written to it."""
    was: Tensor | None = None
    """What it was before a call has made something of it."""
    swapped: tuple[Tensor, int] | None = None
    """A trained one that was given other data, and where its own lies."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the handle itself has; tell of all else, which no later call would find."""
        if name not in _OWN:
            tell_set(name, self._path, tells=self.unit.tape.fresh and name not in vars(self))
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: Any) -> Handle:
        """Raise: what lies as a plugin says has no copies."""
        refuse_copy(self._path)

    @staticmethod
    def of(unit: Unit, at: int) -> Handle:
        """Return the handle of a unit's leaf."""
        tape, place = unit.tape, unit.places[at]
        leaf, x = tape.leaves[place], tape.shards[place]
        dtype = tape.manner.compute if tape.manner.compute is not None and leaf.dtype.is_floating_point else leaf.dtype
        made = _T._make_wrapper_subclass(Handle, leaf.shape, dtype=dtype, device=x.device)
        made.unit, made.at = unit, at
        return made

    def whole(self) -> Tensor:
        """Return the tensor."""
        if torch.compiler.is_compiling() or _compiler():
            raise LayoutError(_COMPILED)
        self._check_device()
        if self.unit.tape.over:
            raise ScopeError(
                f"{self._path} is a parameter of a step that is over: it was kept from inside a loss function. Return what is "
                "needed of it with has_aux=True, or take it from the parameters that the step returns."
            )
        return self.unit.leaf(self.at) if self.own is None else self.own

    @property
    def _trained(self) -> bool:
        return self.unit.tape.leaves[self.unit.places[self.at]].trained

    def _to_write(self) -> Tensor:
        """Return what may be written to: of a frozen one a copy, which stands for it from now on."""
        if self.own is None and not self._trained:
            with torch.inference_mode(False):  # what is made there can be saved for no backward
                self.was = self.whole().detach()
                self.own = lent(self.was)
        return self.whole()

    def _memory(self) -> Tensor:
        """Return what shares the memory, and the version, of what may be written to: whoever writes to it is seen."""
        memory = self._to_write().detach()
        if self._trained and self.unit.sharded:
            self.unit.tape.watch(self.unit.places[self.at], memory)
        return memory

    def _bind(self, x: Tensor) -> None:
        """Give it other data: a frozen one for good, a trained one until the call ends, when it has to have its own again."""
        if not self._trained:
            self.own, self.bound = x.detach().clone(), True
        elif not torch.is_grad_enabled():
            self.own = None if x.data_ptr() == self.unit.leaf(self.at).data_ptr() else x.detach()
        elif self.unit.tape.reductions.singly:
            self._refuse()
        else:
            whole = self.whole()
            self.swapped = self.swapped or (whole, whole.data_ptr())
            _T.data.__set__(whole, x)

    def _refuse(self) -> None:
        raise ModuleError(
            f"a forward has given {self._path} other data, or written to it. It is trained, and so the optimizer's to change; "
            "of a frozen parameter, requires_grad_(False) before, it would be kept."
        )

    def _flag(self, trained: bool) -> Handle:
        """Return itself; raise if a forward freezes or thaws it: it is another one in the next step.

        Where nobody takes gradients it says that it is frozen, and may be told so.
        """
        if trained not in (self._trained, self.requires_grad):
            raise ModuleError(
                f"a forward freezes or thaws a parameter, {self._path}, which only stands for it in this step. What is frozen "
                "for good is frozen before the model is boosted. Call a layer whose parameters are to get no gradient so: "
                "torch.func.functional_call(layer, {name: p.detach() for name, p in layer.named_parameters()}, x)."
            )
        return self

    def is_written(self) -> bool:
        """Return whether a call has written to a frozen one, or has left a trained one with other data."""
        if self.swapped is not None:
            return self.swapped[0].data_ptr() != self.swapped[1]
        if self.own is None or self.bound or self.own.is_inference() or self.own._version > 0:
            return self.own is not None
        return (
            self.was is not None and not untouched(self.own) and not self.own.equal(self.was)
        )  # numpy counts no versions

    def take_written(self) -> Tensor | None:
        """Return what a call has made of it, if it has; a backward that has saved it keeps it, the next call has another."""
        own = self.own
        if own is not None and self._trained:
            self._refuse()
        if own is None or not self.is_written():
            self.own = self.was = None
            return None
        self.unit.tape.handles[self.unit.places[self.at]] = Handle.of(self.unit, self.at)
        self.own, self.was = lent(own), None
        return own

    @property
    def _path(self) -> str:
        return named(parts_of(self.unit.tape.leaves[self.unit.places[self.at]].path))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in KNOWN:
            with _C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _OF_PARAMETERS:
            return _OF_PARAMETERS[func]
        if func in _HOOKS:
            refuse_hook(args[0]._path)
        if func in _FLAGS:
            return args[0]._flag(bool(next(iter((*args[1:], *(kwargs or {}).values())), True)))
        if func not in _effects:
            _effects[func] = _effect_of(func)
        written = list[Handle]()
        if (effect := _effects[func]) is not None or (kwargs and kwargs.get("out") is not None):
            target = _first(args, kwargs)
            if effect == "gets" and type(target) is Handle:
                return target._memory()
            if effect == "sets" and type(target) is Handle:
                return target._bind(wholes(args[1]))
            if effect == "shows" and type(target) is Handle:
                target._to_write()
            written += _handles_in((target if effect == "writes" else (), (kwargs or {}).get("out")))
            for handle in written:
                handle._to_write()
                handle.bound = handle.own is not None
        own_args, own_kwargs = wholes(args), wholes(kwargs) if kwargs else {}
        with nullcontext() if _here.context is None else _here.context():
            result = func(*own_args, **own_kwargs)
        return _first(args, kwargs) if written and result is _first(own_args, own_kwargs) else result  # self.w *= 2

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for handle in _mutated(func, args, kwargs or {}):
            if handle._trained:
                handle._refuse()  # the version stays what it is here
            handle._to_write()
            handle.bound = True
        with torch.no_grad():
            return func(*wholes(args), **(wholes(kwargs) if kwargs else {}))

    def _check_device(self) -> None:
        """Raise if another device has come by this handle."""
        tape, scope = self.unit.tape, here()
        if scope is not None and scope.device != tape.scope.device and scope.mesh is tape.scope.mesh:
            raise ModuleError(
                f"device {scope.device} of {scope.mesh} came upon device {tape.scope.device}'s parameter {self._path}: virtual "
                "devices are threads and share what the loss function changes, as torch.func.functional_call changes a "
                "module. Write apply, params, buffers = fs.functionalize(module), or fs.gathered around the call."
            )

    def __hash__(self) -> int:
        self._check_device()  # functional_call asks for it before it touches the module
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Handle({str(self.dtype).removeprefix('torch.')}{list(self.shape)})"


_OWN = frozenset(
    {"unit", "at", "own", "bound", "was", "swapped", "data", "grad", "requires_grad", "_is_param", "_backward_hooks"}
)
"""What is set at a handle by itself, and by torch."""


def tell_set(name: str, path: str, *, tells: bool) -> None:
    """Warn, in a first step, of an attribute that a forward sets at a parameter; refuse to make it something else."""
    if name == "__class__":
        raise ModuleError(
            f"a forward swaps a parameter for another, {path}: what lies as a plugin says stays what it is. Write to a frozen "
            "one, self.weight.copy_(...), which is kept where there are no stages; or do it before the model is boosted."
        )
    if tells:
        warnings.warn(
            f"a forward sets {name} of a parameter, {path}, which only stands for it in this step: no later one finds that. "
            f"Keep it in an attribute of the module: self.{name.lstrip('_')}.",
            stacklevel=3,
        )


def refuse_copy(path: str) -> NoReturn:
    """Raise: a parameter is to be copied."""
    raise ModuleError(
        f"a forward makes a deep copy of a parameter, {path}, which would be neither kept nor laid as the plugin says. Make "
        "the copy before the model is boosted: a submodule with requires_grad_(False), to which forward may write."
    )


def refuse_hook(path: str) -> NoReturn:
    """Raise: a forward hooks a parameter, which is another one in the next step."""
    raise ModuleError(
        f"a forward hooks a parameter, {path}, which only stands for it in this step. Hook what is made of it: "
        "w = self.weight * 1; w.register_hook(...)."
    )


Context = Callable[[], AbstractContextManager[Any]]


class _Here(threading.local):
    context: Context | None = None


_here = _Here()


@contextmanager
def around_each(context: Context | None) -> Generator[None]:
    """Run each operation that the calling thread does on handles in a context of its own."""
    before, _here.context = _here.context, context
    try:
        yield
    finally:
        _here.context = before


def _first(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    return args[0] if args else next(iter((kwargs or {}).values()), None)


def wholes(x: Any) -> Any:
    """Put tensors in the place of handles, in whatever arguments torch's functions take."""
    if type(x) is Handle:
        return x.whole()
    if type(x) is tuple or type(x) is list:
        return type(x)(map(wholes, x))
    if type(x) is dict:
        return {key: wholes(value) for key, value in x.items()}
    return x


Effect = Literal["gets", "sets", "shows", "writes"]
_effects: dict[Callable[..., Any], Effect | None] = {}  # no lru_cache: Dynamo warns of these


def _effect_of(func: Callable[..., Any]) -> Effect | None:
    """Return what a function of torch's does to its first argument: it gets, sets or shows its data, or writes to it."""
    if func in (_T.data.__get__, _T.detach, torch.detach):
        return "gets"
    if func in _SHOWN:
        return "shows"
    if func == _T.data.__set__:
        return "sets"
    name = getattr(func, "__name__", "")
    return (
        "writes" if name in _IN_PLACE or (name.endswith("_") and not name.endswith(("__", "requires_grad_"))) else None
    )


_IN_PLACE = {name for name in dir(operator) if name.startswith("__i") and name.replace("__i", "__", 1) in dir(operator)}
_IN_PLACE.add("__setitem__")


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Handle]:
    """Yield the handles that an operator writes to, by its schema."""
    if func._schema.is_mutable:
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _handles_in(args[at] if at < len(args) else kwargs.get(argument.name))


def _handles_in(x: Any) -> Iterator[Handle]:
    if type(x) is Handle:
        yield x
    elif isinstance(x, tuple | list):
        for each in x:
            yield from _handles_in(each)


class _Aside(Function):
    """From nothing to the handles of a tape; backward, what came to the handles themselves is kept for their units."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tape: Tape) -> tuple[Tensor, ...]:
        ctx.tape = weakref.ref(tape)
        ctx.set_materialize_grads(False)
        handles = [Handle.of(unit, at) for unit in tape.units for at in range(len(unit.places))]
        ctx.mark_non_differentiable(*(h for h in handles if not tape.leaves[h.unit.places[h.at]].trained))
        return tuple(handles)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None]:
        tape: Tape = ctx.tape()
        start = 0
        for unit in tape.units:
            stop = start + len(unit.places)
            tape.reductions.receive_apart(unit, gs[start:stop])
            start = stop
        return None, None


def handles_of(tape: Tape) -> tuple[Tensor, ...]:
    """Return the handles of all leaves of all units, in their order."""
    return _Aside.apply(tape.anchor, tape)  # type: ignore[no-any-return]
