"""`Handle`: a parameter as a tensor without memory, whose unit is all-gathered when an operation touches it.

Its shape, dtype and device are known, and modules take it.  There are two ways to its values:

    torch.f(h, x)       __torch_function__    f runs on the unsharded tensors, and gradients come to their unit (`_Use`)
    what f calls in C++ __torch_dispatch__    f has been given h itself, and gradients come to h's own node (`_Aside`)

The second is that of autograd Functions, custom operators and torch.func, which do not ask a tensor's class.

What autograd saves of unsharded parameters is a note of where it lay in its unit, so that the memory can be freed; for the
backward the unit is all-gathered again.  Notes are taken by saved-tensor hooks, under which torch.func's grad, vjp and jacrev
refuse to run: a loss function that calls one of these marks that part `fs.gathered(part, keep=True)`, or the step says
`reshard_after_forward=False`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fshard.errors import LayoutError, ModuleError, ScopeError
from fshard.mesh.spmd.scope import here
from fshard.transforms.patterns import named, parts_of

if TYPE_CHECKING:
    from fshard.transforms.fsdp.param_runtime import Tape
    from fshard.transforms.fsdp.units import Unit

_compiler: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]
"""What torch.compile runs the present frame with, None outside of it."""
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_T: Any = Tensor
_ATTRIBUTES = (
    "device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_nested", "is_sparse", "itemsize", "layout", "nbytes", "ndim",
    "requires_grad", "shape",
)  # fmt: skip
_METHODS = (
    _T.__len__,
    _T.dim,
    _T.element_size,
    _T.get_device,
    _T.is_complex,
    _T.is_floating_point,
    _T.nelement,
    _T.numel,
    _T.size,
)
KNOWN = frozenset((*(getattr(_T, name).__get__ for name in _ATTRIBUTES), *_METHODS))
"""What a handle knows without its values."""
_OF_PARAMETERS = {_T.grad_fn.__get__: None, _T.is_leaf.__get__: True}
"""What is asked of parameters, and the answer."""

_COMPILED = (
    "torch.compile cannot follow a parameter that is gathered when it is used. Compile the whole loss function, or a part that "
    "is called with gathered parameters: fs.gathered(torch.compile(fn))."
)
WRITES = (
    "Declare a frozen parameter that the forward updates as a buffer, fs.functionalize(module, buffers=...), or update it "
    "in the training loop."
)


class Handle(Tensor):
    """A parameter inside a loss function."""

    unit: Unit
    at: int
    _is_param = True
    """As torch asks whether it is one."""

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
        unit = self.unit
        if unit.used is not None and not unit.tape.each_use and here() is unit.tape.scope:
            return unit.used[self.at]
        if torch.compiler.is_compiling() or _compiler():
            raise LayoutError(_COMPILED)
        self._check_device()
        if unit.tape.over:
            raise ScopeError(
                f"{self._path} is a parameter of a step that is over: it was kept from inside a loss function. Return what is "
                "needed of it with has_aux=True, or take it from the parameters that the step returns."
            )
        return unit.leaf(self.at)

    @property
    def step(self) -> Tape:
        """The step whose parameter it is."""
        return self.unit.tape

    def refuse_write(self, *given: Any) -> None:
        """Raise: a forward writes to a parameter."""
        raise ModuleError(f"a forward writes to the parameter {self._path}. {WRITES}")

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
        if func in _DATA and type(args[0]) is Handle:
            return _DATA[func](args[0], *args[1:])
        return func(*wholes(args), **(wholes(kwargs) if kwargs else {}))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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


def _gradient(handle: Handle) -> None:
    """Return None, as of any parameter in a forward; raise once there are gradients, which are not here."""
    if any(handle.unit.tape.reductions.used):
        raise ModuleError(
            "gradients of a boosted model are sharded, so its parameters have no .grad. Clip them by "
            "booster.clip_grad_norm(optimizer, max_norm); optimizer.grads are they."
        )


_DATA: dict[Any, Callable[..., Any]] = {
    _T.grad.__get__: _gradient,
    _T.data.__get__: lambda handle: handle.whole().detach(),  # it shares the version, so that a write is seen
    _T.data.__set__: Handle.refuse_write,
}
"""A parameter's gradient, and its data, read and bound to other memory."""


def own_versions(xs: Sequence[Tensor]) -> list[int]:
    """Return numbers that grow whenever one of these is written to; handles are not gathered for it."""
    with _C.DisableTorchFunctionSubclass():
        return [x._version for x in xs]


def wholes(x: Any) -> Any:
    """Put tensors in the place of handles, in whatever arguments torch's functions take."""
    if type(x) is Handle:
        return x.whole()
    if type(x) is tuple or type(x) is list:
        return type(x)(map(wholes, x))
    if type(x) is dict:
        return {key: wholes(value) for key, value in x.items()}
    return x


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


_VF: Any = torch
_hooks: Any = torch._C._autograd  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class _Note(NamedTuple):
    """Where a saved tensor lay in a unit."""

    unit: Unit
    at: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


class _Memory(NamedTuple):
    """The memory of a leaf that has been gathered.  It may go, but as long as this is there, nothing else has its name."""

    unit: Unit
    at: int
    dtype: torch.dtype
    itself: StorageWeakRef


class Saved:
    """The memory of all units that have been gathered in a slice, and the hooks of autograd that ask whose a tensor's is.

    A unit's memory outlasts the unit being let go if an operation that takes many units holds it.

    Args:
        needed: whether any unit is let go.
    """

    def __init__(self, needed: bool) -> None:
        self._needed = needed
        self._known: dict[int, _Memory] = {}

    def know(self, unit: Unit) -> None:
        """Note the memory of a unit that has been gathered."""
        for at, x in enumerate(unit.values if self._needed else ()):
            self._known[_storage(x)] = _Memory(unit, at, x.dtype, StorageWeakRef(x.untyped_storage()))

    def clear(self) -> None:
        """End a slice."""
        self._known.clear()

    def watch(self) -> AbstractContextManager[Any]:
        """Return the context of a forward, in which notes are kept in the place of what autograd saves of units."""
        return saved_tensors_hooks(self._note, self._read) if self._needed else nullcontext()

    def _note(self, x: Tensor) -> Any:
        if type(x) is Handle:
            return x
        found = self._known.get(_storage(x))
        if found is None or x.dtype != found.dtype:
            return x.detach() if x.requires_grad else x  # an operation's own output would hold the operation, and stay
        return _Note(found.unit, found.at, x.size(), x.stride(), int(x.storage_offset()), x.is_conj(), x.is_neg())

    def _read(self, note: Any) -> Tensor:
        if not isinstance(note, _Note):
            return note
        x = note.unit.again()[note.at].as_strided(note.size, note.stride, note.offset)
        x = x.conj() if note.conj else x
        return _VF._neg_view(x) if note.neg else x


@contextmanager
def unwatched() -> Generator[None]:
    """Let autograd save tensors as they are for a while, whoever asks for something else."""
    before: list[Any] = []
    while (hooks := _hooks._top_saved_tensors_default_hooks(False)) is not None:
        before.append(hooks)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(before):
            _hooks._push_saved_tensors_default_hooks(*hooks)


def _storage(x: Tensor) -> int:
    """Return what tells a tensor's memory apart, as long as it lives."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
