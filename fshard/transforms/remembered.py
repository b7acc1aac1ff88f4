"""What all slices of all devices have made of what a model remembers, as it is for the next step.

Each slice begins with the same, and may write to some of it, or make something new, in a branch that others do not take.  So
devices tell each other what they have written to before they send any of it: a mark of the list goes along with numbers that
are sent anyway, and only where marks differ lists do.

    device 0    n = 5   mean (3,)               n     5        of all that wrote to it
    device 1    n = 5              mask (2,)    mean  (3,)     of device 0
    device 2    n = 5              mask (4,)    mask           as it was: shapes differ, so there is no mean; a warning says so

The mean is weighted as the loss is, over those that wrote; whole numbers are rounded.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.scope import Group
from fshard.source import Site
from fshard.transforms.agree import exchanged, summed
from fshard.transforms.kept import slot_of
from fshard.transforms.means import sum_of_rows
from fshard.transforms.patterns import named, parts_of


class Written(NamedTuple):
    """What one slice has written to, by path, and what it counts for."""

    weight: float
    changed: Mapping[str, Tensor]


class Entry(NamedTuple):
    """Something that was written to."""

    path: str
    dtype: str
    shape: tuple[int, ...]


def entries_of(slices: Sequence[Written]) -> list[Entry]:
    """Return what slices that count for something have written to, in an order that does not depend on them."""
    counting = [one.changed for one in slices if one.weight]
    return sorted({entry_of(path, x) for one in counting for path, x in one.items()})


def entry_of(path: str, x: Tensor) -> Entry:
    """Return the entry of a tensor."""
    return Entry(path, str(x.dtype)[6:], tuple(x.shape))


def entries_of_all(own: Sequence[Entry], group: Group | None, site: Site) -> list[Entry]:
    """Return what any device of a group has written to."""
    if group is None or group.size == 1:
        return [*own]
    lists = exchanged([*json.dumps(own).encode()], group, site).values()
    return sorted({Entry(path, dtype, tuple(shape)) for one in lists for path, dtype, shape in json.loads(bytes(one))})


def of_one_kind(entries: Sequence[Entry]) -> list[Entry]:
    """Return what has one shape and dtype wherever it was written; warn of the rest.

    What a module has written together stays together: the length of a table, say, and the table.
    """
    times = Counter(entry.path for entry in entries)
    if len(times) == len(entries):
        return [*entries]
    owners = {_owner(path) for path, count in times.items() if count > 1}
    lost = {path: named(parts_of(path)) for path in times if _owner(path) in owners}
    several = ", ".join(name for path, name in lost.items() if times[path] > 1)
    warnings.warn(
        f"Devices, or slices of a batch, give {several} several shapes or dtypes: there is no mean of these, so "
        f"{', '.join(lost.values())} is as it was before the step. That is right for what can be computed again, a mask, say.",
        stacklevel=2,
    )
    return [entry for entry in entries if entry.path not in lost]


def warn_of_samples(
    slices: Sequence[Written], rows: Sequence[int | None], params: Iterable[str], means: Mapping[str, Tensor]
) -> None:
    """Warn of what is kept in attributes, not in frozen parameters, and seems to have a row for each sample of a slice.

    What is its own mean, a mask that is the same everywhere, is none.
    """
    frozen = {named(parts_of(path)) for path in params}
    found = {
        named(parts_of(path)).partition(":")[0]
        for one, count in zip(slices, rows, strict=True)
        for path, x in one.changed.items()
        if count is not None and slot_of(parts_of(path)[-1]) is not None
        if x.ndim > 2 and 1 < count in x.shape[1:3]  # the first dim says that something is kept
        if path in means and not torch.equal(x.detach(), means[path].to(x))
    }
    if found := found - frozen:
        warnings.warn(
            f"{', '.join(sorted(found))} is kept from call to call, and seems to have a row for each sample. Devices and slices"
            " have other samples: calls of one step find their own, and the next step the mean over them. Let a state that is "
            "to go on from step to step be an argument of forward, and return it.",
            stacklevel=2,
        )


def _owner(path: str) -> tuple[str, ...]:
    """Return the parts of the path of what has written something."""
    return parts_of(path)[:-1]


def averaged(
    slices: Sequence[Written],
    entries: Sequence[Entry],
    group: Group | None,
    given: Mapping[str, Any],
    near: torch.device,
    site: Site,
    added: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the means of entries over all slices that wrote to them, or the sums of those that are to be `added`.

    All devices of the group ask for the same entries; `given` are those that the slices began with.
    """
    if not entries:
        return {}
    with torch.no_grad():
        begun = {entry.path: given[entry.path] for entry in entries if _counts_from(given.get(entry.path), entry)}
        sums = sum_of_rows(torch.stack([_row(one, entries, begun, near, added) for one in slices]))
    if group is not None and group.size > 1:
        (sums,) = summed((sums,), group, site)
    *totals, counts = sums.split([*(_count(entry) for entry in entries), len(entries)])
    result: dict[str, Tensor] = {}
    for entry, total, count in zip(entries, totals, counts, strict=True):
        x = total if entry.path in added else total / count
        dtype: torch.dtype = getattr(torch, entry.dtype)
        own = next((one.changed[entry.path] for one in slices if entry.path in one.changed), given.get(entry.path))
        place = near if own is None else own.device
        if dtype.is_complex:
            x = torch.view_as_complex(x.reshape(*entry.shape, 2))
        elif not dtype.is_floating_point:
            x = x.round()
        x = x.reshape(entry.shape).to(place, dtype)
        result[entry.path] = begun[entry.path] + x if entry.path in begun else x
    return result


def _counts_from(given: Any, entry: Entry) -> bool:
    """Return whether whole numbers are averaged as differences from those of before: so large ones keep all digits."""
    return isinstance(given, Tensor) and given.dtype is torch.int64 and entry_of(entry.path, given) == entry


def _row(
    one: Written, entries: Sequence[Entry], begun: Mapping[str, Tensor], near: torch.device, added: Collection[str]
) -> Tensor:
    """Return all numbers of a slice, times what it counts for, and for each entry what that is."""
    wrote = one.changed if one.weight else {}
    weights = [(1.0 if entry.path in added else one.weight) * (entry.path in wrote) for entry in entries]

    def numbers(path: str) -> Tensor:
        x = wrote[path] - begun[path] if path in begun else wrote[path]
        return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).to(near, torch.float64).reshape(-1)

    values = [
        numbers(entry.path) * weight if weight else torch.zeros(_count(entry), dtype=torch.float64, device=near)
        for entry, weight in zip(entries, weights, strict=True)
    ]
    return torch.cat([*values, torch.tensor(weights, dtype=torch.float64, device=near)])


def _count(entry: Entry) -> int:
    return torch.Size(entry.shape).numel() * (2 if entry.dtype.startswith("complex") else 1)
