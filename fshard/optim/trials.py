"""Optimizers of any class as pure ones, by copies; and whether these do what the given one would.

Classes of torch are known to.  Of others dry steps on random numbers must show it, bit by bit: all parameters together, each
in its place and as it was given, against each alone and plain; several of each kind for longer; and each by a new copy in each
step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fshard.errors import FshardError, OptimizerError
from fshard.optim.contract import Optimizer
from fshard.optim.copies import same
from fshard.optim.dry import STEPS, After, Example, Groups, agree, everywhere, long, ran, ran_pure
from fshard.optim.foreign import is_torchs, known_elementwise
from fshard.optim.held import refuse_held, refuse_shared
from fshard.optim.methods import refuse_zeroing


def foreign(given: torch.optim.Optimizer, at: Iterable[int]) -> Groups:
    """Return some groups of an optimizer that was made, of which there can be copies."""
    if not is_torchs(type(given)):
        refuse_shared(given)
        refuse_held(given)
    return Groups.of(given, at)


def pure(of: Groups, place: Callable[[str], int], *, idle: bool = False) -> dict[int, Optimizer]:
    """Return the pure optimizers of groups, which read their options anew in each step.

    A class that is not torch's own counts as elementwise if it says so: `elementwise = True`.

    Args:
        of: the groups.
        place: that of a parameter in its group, by its path.
        idle: whether it is right that nothing moves, since options say so.

    >>> class Sign(torch.optim.Optimizer):
    ...     def __init__(self, params, **options):
    ...         super().__init__(params, {"lr": 0.5, **options})
    ...     @torch.no_grad()
    ...     def step(self):
    ...         for group in self.param_groups:
    ...             for p in group["params"]:
    ...                 p.sub_(group["lr"] * p.grad.sign())
    >>> given = Sign([torch.nn.Parameter(torch.ones(2))], lr=0.25)
    >>> opt, params = pure(foreign(given, [0]), lambda path: 0)[0], [torch.ones(2)]
    >>> opt.step([torch.tensor([3.0, -3.0])], opt.init(params), params)[0], opt.elementwise
    ([tensor([0.7500, 1.2500])], False)
    """
    cls = type(of.given)
    own = is_torchs(cls)
    elementwise = known_elementwise(cls, None) if own else getattr(of.given, "elementwise", None) is True
    most = 2 if own or elementwise else 256  # second moments are factored from some size on
    with _dry(of):
        everyone = [] if own else everywhere(of)
        cut = _cut(of, everyone)
        groups = {at: group.cutting(cut or ()) for at, group in of.groups.items()}
        made = {at: group.pure(of.shapes(at, most), elementwise, place) for at, group in groups.items()}
        if cut is None:
            raise _told_apart(cls.__name__, everyone) or _dependent(cls.__name__)
        if not own:
            _try(of, [example.cutting(cut) for example in long(of)], elementwise, idle)
            refuse_zeroing(of.given, everyone)
        return made


@contextmanager
def _dry(of: Groups) -> Generator[None]:
    """Within, steps draw nothing from the random numbers of the loop, and what they raise is one error."""
    devices = {spot.device for spots in of.spots.values() for spot in spots}
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    except FshardError:
        raise
    except Exception as error:
        raise OptimizerError(
            f"{type(of.given).__name__}: an optimizer like it could not step other parameters of the same shapes: "
            f"{type(error).__name__}: {error}. Its step() is to take from param_groups and state all that it needs of a "
            "parameter, and no closure."
        ) from error


def _try(of: Groups, examples: list[Example], elementwise: bool, idle: bool) -> None:
    """Raise if dry steps of several examples show that an update is made of more than a parameter's gradient and state."""
    name = type(of.given).__name__
    alone, short = [*_alone(examples)], [x._replace(grads=x.grads[:5]) for x in examples]
    if not agree(alone, ran(examples)) or any(map(_are_dependent, _unusual(short))):
        raise _dependent(name)
    unmoved = [same(after.param, example.start) for example, after in zip(examples, alone, strict=True)]
    if not idle and examples and all(unmoved):
        raise OptimizerError(
            f"{name}: {STEPS} steps of an optimizer like it have moved none of the parameters that it was given. Its step() "
            "is to find them, and their gradients, in param_groups: those of a list, a function or a model are not trained."
        )
    if _moves_unused(examples):
        raise OptimizerError(
            f"{name} moves parameters that have no gradient, which stay as they are. Let its step() skip them."
        )
    for at in of.groups:
        _refuse_others(
            name, [(x, y.param) for x, y in zip(examples, alone, strict=True) if x.group.at == at], elementwise
        )


# -- each in its place ------------------------------------------------------------------------------------------------


def _cut(of: Groups, everyone: list[Example]) -> frozenset[str] | None:
    """Return the options to be cut with which each example alone has the result that all have together; None: none do.

    Nothing, if that will do, also for twice as many parameters: a list may be as long as there are parameters by chance, and
    items of one that goes by place may be equal now.
    """
    lists = frozenset(name for group in of.groups.values() for name in group.by_place())
    together = ran(everyone)
    for cut in dict.fromkeys([frozenset[str](), lists & {"param_names"}, lists]):
        examples = [example.plain.cutting(cut) for example in everyone]
        try:
            if agree(_alone(examples), together) and (cut >= lists or agree(ran(examples * 2), together * 2)):
                return cut
        except Exception:  # of whatever kind: some compare lengths
            continue
    return None


def _dependent(name: str) -> OptimizerError:
    return OptimizerError(
        f"{name}: steps of several parameters together have another result than those of each alone. The update of one "
        "depends on others, by a norm of all, a count, random numbers or its place in the group, and others may be on "
        "other devices. For norms there is booster.clip_grad_norm(optimizer, max_norm)."
    )


def _told_apart(name: str, everyone: list[Example]) -> OptimizerError | None:
    """Return the error that names attributes or a class of parameters that steps ask for; None if they ask for none."""
    for example in filter(lambda example: example.trained, everyone):
        expected = ran([example.plain])
        if example.tags and not agree(ran([example._replace(cls=nn.Parameter)]), expected):
            return OptimizerError(
                f"{name} reads attributes of parameters, of {', '.join(example.tags)}, and these are lost. Make groups with "
                "options."
            )
        if example.cls is not nn.Parameter and not agree(ran([example]), expected):
            return OptimizerError(
                f"{name} steps parameters of the class {example.cls.__name__} otherwise than others, and that class is lost. "
                "Make groups with options."
            )
    return None


def _alone(examples: Iterable[Example]) -> Iterator[After]:
    """Yield each example after steps without others; those that have no gradient stay as they are."""
    return (ran([x])[0] if x.trained else After(x.start, {}) for x in examples)


# -- for longer, and in strange cases ---------------------------------------------------------------------------------


def _unusual(examples: list[Example]) -> list[list[Example]]:
    """Return examples of which some have no gradient at times, large ones, or one that is no number."""

    def with_one(i: int, at: int, grad: Tensor | None) -> Example:
        return examples[i]._replace(grads=[grad if t == at else g for t, g in enumerate(examples[i].grads)])

    places = range(len(examples))
    starts = [example.start for example in examples]
    return [
        [with_one(i, i % 3, None) if i % 2 else examples[i] for i in places],  # their counts differ from then on
        [with_one(i, 1, 1e6 * starts[i]) for i in places],
        [with_one(i, 1, torch.full_like(starts[i], torch.nan if i == 1 else 1.0)) for i in places],
    ]


def _are_dependent(examples: list[Example]) -> bool:
    """Return whether steps together have another result than alone; what they raise, they raise in torch's loop as well."""
    try:
        return not agree([*_alone(examples)], ran(examples))
    except Exception:  # of whatever kind
        return False


def _moves_unused(examples: list[Example]) -> bool:
    """Return whether a step moves what has no gradient, or has had one; many raise an error, in torch's loop as well."""

    def after(example: Example, grads: list[Tensor | None]) -> Tensor:
        return ran([example._replace(grads=grads)])[0].param if grads else example.start

    try:
        return any(
            not same(after(x, [*some, None, None]), after(x, some)) for x in examples for some in ([], x.grads[:1])
        )
    except Exception:  # of whatever kind
        return False


def _refuse_others(name: str, examples: list[tuple[Example, Tensor]], elementwise: bool) -> None:
    """Raise if the pure optimizer of a group does not do to examples what the class does."""
    if not examples:
        return
    starts, grads = [x.start for x, _ in examples], [x.grads for x, _ in examples]
    places = {f"[{i}]": x.place for i, (x, _) in enumerate(examples)}
    opt = examples[0][0].group.pure(starts, elementwise, places.__getitem__)
    if not all(map(same, ran_pure(opt, starts, grads), [after for _, after in examples])):
        raise OptimizerError(
            f"{name}: steps of one optimizer have another result than those of new ones, each given the state that the one "
            "before has left. What is kept from step to step are tensors and numbers in state[param]; none is the parameter."
        )
    if elementwise:
        opt = examples[0][0].group.pure(starts, elementwise, lambda path: places[f"[{int(path[1:-1]) // 2}]"])
        halves = [half for x in starts for half in _halves(x)]
        parts = iter(ran_pure(opt, halves, [[*own] for x in grads for own in zip(*map(_halves, x), strict=True)]))
        if not all(same(torch.cat([next(parts), next(parts)]), after.flatten()) for _, after in examples):
            raise OptimizerError(
                f"{name} says elementwise = True, but pieces of a parameter have another result than the whole. Leave it out."
            )


def _halves(x: Tensor | None) -> tuple[Tensor, ...]:
    return () if x is None else x.flatten().tensor_split(2)
