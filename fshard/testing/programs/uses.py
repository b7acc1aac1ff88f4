"""The mode of a run: float64, the number of backward calls, the order of uses of parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fshard.testing.programs.parameters import named_parameters
from fshard.testing.programs.precision import InFloat64, autograd


class Uses:
    """The parameters of a model in the order in which functions of torch first use them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._names: dict[int, str] = {}
        self._others: dict[int, Tensor] = {}  # with the tensors, so that no id is used again
        self._known: list[Tensor] = []
        self._order: dict[str, None] = {}  # a set in order

    def see(self, arguments: Sequence[Any]) -> None:
        """Record the arguments of a function.

        The first one counts as used last: a weight has its gradient before a bias.
        """
        names = [self._name_of(x) for x in arguments]
        for name in reversed(names):
            if name is not None:
                self._order.setdefault(name)

    def _name_of(self, x: Any) -> str | None:
        is_candidate = isinstance(x, Tensor) and x.requires_grad and x.is_leaf
        if not is_candidate or id(x) in self._others:
            return None
        if id(x) not in self._names:
            self._learn()
        if id(x) not in self._names:
            self._others[id(x)] = x
        return self._names.get(id(x))

    def _learn(self) -> None:
        """Note the tensors that are parameters now: fully_shard replaces them for the forward."""
        for name, x in named_parameters(self._model):
            if id(x) not in self._names:
                self._names[id(x)] = name
                self._known.append(x)

    def names(self) -> tuple[str, ...]:
        """Return the names in order."""
        return tuple(self._order)


class RunMode(InFloat64):
    """The mode of a run: float64, the number of backward calls, and the order of uses.

    Args:
        uses: notes parameters while a loss runs; None before and after.
        backwards: the number of backward calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses: Uses | None = None
        self.backwards = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        is_attribute = getattr(func, "__name__", "") == "__get__"
        if self.uses is not None and not is_attribute:
            self.uses.see([*args, *(kwargs or {}).values()])
        return super().__torch_function__(func, types, args, kwargs)

    @contextmanager
    def counted_backwards(self) -> Generator[None]:
        """Count the backward calls in the block; torch has no hook for them."""
        engine = autograd._engine_run_backward

        def run(*args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
            self.backwards += accumulate_grad
            return engine(*args, accumulate_grad=accumulate_grad, **kwargs)

        autograd._engine_run_backward = run
        try:
            yield
        finally:
            autograd._engine_run_backward = engine
