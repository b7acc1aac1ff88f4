"""The batches that a script reads: recorded in processes, and replaced in the one process.

    process 0   loader 0: rows 0 1 | rows 4 5        one process   loader 0: rows 0 1 2 3 | 4 5 6 7
    process 1   loader 0: rows 2 3 | rows 6 7

Loaders are numbered in the order in which the script begins to read them. The length of a loader
is the one in the processes, since schedules of learning rates depend on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fshard.mesh.layout import PyTree

Key = tuple[bool, int, int]
"""A pass over a loader: does it train, the number of the loader, the number of the pass."""

TRAINS = True


class Batches(NamedTuple):
    """The batches that a process read.

    Args:
        loaders: the batches of each pass over a loader.
        lengths: of loaders, in the order in which the script first took them.
        inputs: what models and losses got, in a script that reads no loader.
        samples: of each batch of a pass, before the loader put them together.
        targets: what the last stage of a pipeline got.
        losses_name: the variable of the script whose list got the losses of the last stage.
    """

    loaders: dict[Key, list[PyTree]]
    lengths: list[int]
    inputs: list[PyTree]
    samples: dict[Key, list[Any]]
    targets: list[PyTree]
    losses_name: str = ""

    def of_training(self) -> list[PyTree]:
        """Return the batches of the loader that the script trains on; else the inputs."""
        passes = [key for key in self.loaders if key[0] is TRAINS]
        if not passes:
            return self.inputs
        last = passes[-1][1]
        batches: list[PyTree] = []
        for key in passes:
            if key[1] == last:
                batches += self.loaders[key]
        return batches


class Reader:
    """Watches what a script reads, and gives it other batches in the one process.

    Args:
        replayed: what the one process reads; None in the processes.
        before_first: is called before the first batch for training.
    """

    def __init__(self, replayed: Batches | None) -> None:
        self.read = Batches({}, [], [], {}, [])
        self.before_first: Callable[[], None] = lambda: None
        self._replayed = replayed
        self._number_of: dict[tuple[bool, int], int] = {}
        self._passes: dict[tuple[bool, int], int] = {}
        self._number_of_length: dict[int, int] = {}
        self._alive: list[Any] = []  # a loader that is gone would give its id to another one
        self._input = 0

    def iterate(self, original: Callable[[Any], Iterator[Any]]) -> Any:
        """Return the `__iter__` of a class of loaders."""

        def iterate(loader: Any) -> Iterator[Any]:
            trains = torch.is_grad_enabled()
            number = self._number(loader, trains)
            done = self._passes.get((trains, number), 0)
            self._passes[trains, number] = done + 1
            return _Pass(self, (trains, number, done), original(loader), loader)

        return iterate

    def length(self, original: Callable[[Any], int]) -> Any:
        """Return the `__len__` of a class of loaders."""

        def length(loader: Any) -> int:
            if id(loader) not in self._number_of_length:
                self._alive.append(loader)
                self._number_of_length[id(loader)] = len(self._number_of_length)
                self.read.lengths.append(original(loader))
            number = self._number_of_length[id(loader)]
            if self._replayed is not None and number < len(self._replayed.lengths):
                return self._replayed.lengths[number]
            return original(loader)

        return length

    def _number(self, loader: Any, trains: bool) -> int:
        """Return the number of a loader, among those for training or among the others."""
        key = (trains, id(loader))
        if key not in self._number_of:
            self._alive.append(loader)
            self._number_of[key] = sum(kind == trains for kind, _ in self._number_of)
        return self._number_of[key]

    def batch(self, key: Key, number: int, own: _Own) -> Any:
        """Return the batch that a script gets from a loader, given the loader's own."""
        if key[0] is TRAINS and not self.has_loader():
            self.before_first()
        read = self.read.loaders.setdefault(key, [])
        if self._replayed is not None and key in self._replayed.loaders:
            batches = self._replayed.loaders[key]
            if number == len(batches):
                raise StopIteration
            batch = batches[number]
            if isinstance(batch, Uncollated):
                batch = own.collate(batch.samples)
                read.append(_plain(batch))
                return batch
            read.append(batch)
            return _like(own.batch, batch)
        if own.has_ended:
            raise StopIteration
        read.append(_plain(own.batch))
        self.read.samples.setdefault(key, []).append(_plain(own.samples))
        return own.batch

    def input(self, x: Tensor) -> Tensor:
        """Return what a model gets, in a script that reads no loader."""
        if self.has_loader():
            return x
        self.read.inputs.append(x.detach().clone())
        if self._replayed is None:
            return x
        if self._input == len(self._replayed.inputs):
            raise EndOfInputs
        replayed = self._replayed.inputs[self._input]
        self._input += 1
        return replayed.clone()

    def schedule_step(self, original: Callable[..., Any]) -> Any:
        """Return the step of a pipeline; the one process is the first stage and the last one.

        Scripts have a branch for each stage, and the one process takes that of the first one. Later
        lines of the last stage read its losses, so the same list of the script gets them.
        """

        def step(
            schedule: Any, *args: Any, target: Any = None, losses: Any = None, **kwargs: Any
        ) -> Any:
            variables = sys._getframe(1).f_locals  # pyright: ignore[reportPrivateUsage]
            if losses is not None:
                names = [name for name, value in variables.items() if value is losses]
                self.read = self.read._replace(losses_name=names[0] if names else "")

            number = len(self.read.targets)
            if target is not None:
                self.read.targets.append(_plain(target))
            elif self._replayed is not None and number < len(self._replayed.targets):
                target = self._replayed.targets[number]
                self.read.targets.append(target)
                of_last_stage = variables.get(self._replayed.losses_name)
                if losses is None and isinstance(of_last_stage, list):
                    losses = of_last_stage
            return original(schedule, *args, target=target, losses=losses, **kwargs)

        return step

    def has_loader(self) -> bool:
        """Return True if the script has read a batch for training from a loader."""
        return any(key[0] is TRAINS for key in self.read.loaders)


class EndOfInputs(BaseException):
    """Ends a script that takes more inputs in the one process than in the processes."""


class Uncollated(NamedTuple):
    """Samples that the loader of the one process puts together: it pads them to one length."""

    samples: list[Any]


class _Own:
    """The batches of a loader itself."""

    def __init__(self, original: Iterator[Any]) -> None:
        self.batch: Any = None
        self.samples: Any = None
        self.has_ended = False
        self._original = original
        fetcher = getattr(original, "_dataset_fetcher", None)
        self._collate = getattr(fetcher, "collate_fn", None)
        if self._collate is not None:
            cast("Any", fetcher).collate_fn = self.collate

    def collate(self, samples: Any) -> Any:
        """Put samples together as the loader does."""
        self.samples = samples
        assert self._collate is not None
        return self._collate(samples)

    def fetch(self) -> None:
        """Take the next batch; the last one stays when there is none."""
        if self.has_ended:
            return
        try:
            self.batch = next(self._original)
        except StopIteration:
            self.has_ended = True


class _Pass:
    """A pass over a loader."""

    def __init__(self, reader: Reader, key: Key, original: Iterator[Any], loader: Any) -> None:
        self._reader = reader
        self._key = key
        self._loader = loader
        self._number = 0
        self._own = _Own(original)

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        # In the one process, the types of what is replaced are those of its own batch.
        self._own.fetch()
        batch = self._reader.batch(self._key, self._number, self._own)
        self._number += 1
        return batch

    def __len__(self) -> int:
        return len(self._loader)


def _plain(batch: Any) -> PyTree:
    """Return a batch as dicts, lists, tuples and copies of tensors, which any process can read."""
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, Mapping):
        return {str(key): _plain(x) for key, x in cast(Mapping[Any, Any], batch).items()}
    if isinstance(batch, list | tuple):
        values = [_plain(x) for x in cast(Sequence[Any], batch)]
        return values if isinstance(batch, list) else tuple(values)
    return batch


def _like(template: Any, batch: PyTree) -> Any:
    """Return a plain batch in the types of another one."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        values: dict[Any, Any] = {}
        templates = template if isinstance(template, Mapping) else {}
        keys = {str(key): key for key in cast(Mapping[Any, Any], templates)}
        for name, x in cast(dict[str, Any], batch).items():
            key = keys.get(name, name)
            values[key] = _like(templates.get(key), x)
        is_other = isinstance(template, Mapping) and not isinstance(template, dict)
        return cast("Any", type(template))(values) if is_other else values
    if isinstance(batch, list | tuple):
        length = len(template) if isinstance(template, list | tuple) else 0
        items: list[Any] = []
        for number, x in enumerate(cast(Sequence[Any], batch)):
            items.append(_like(template[number] if number < length else None, x))
        if hasattr(template, "_fields"):
            return cast("Any", type(template))(*items)
        return items if isinstance(batch, list) else tuple(items)
    return batch
