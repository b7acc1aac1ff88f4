"""Find the version that a new generation begins with: which shares are left, and where.

All devices that are there take part, also those that are not in the new mesh.

    version      1.7                 1.8
    device 0     s0 s3               s0          s3 was on its way
    device 1     s1 s0               s1 s0
    device 3     s3 s2               s3          so 1.7 is the last one that has s2
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.index import index_of
from fshard.errors import LostStateError
from fshard.mesh.layout import Mesh
from fshard.mesh.reshard.rounds import ROUND
from fshard.mesh.spmd.run import run_on_devices
from fshard.recovery.copies import Found, Shelf, Version, VersionKey
from fshard.recovery.exchange import ShareRequest, all_bytes, fetch


class Holding(NamedTuple):
    """A share that a device has: its version, its owner, its bytes, and the device's name.

    Args:
        owners: the number of shares of the version.
        is_first: True if nothing was saved before the version.
    """

    key: VersionKey
    owners: int
    owner: int
    size: int
    name: int
    is_first: bool


def holdings(shelves: Mapping[int, Shelf]) -> list[Holding]:
    """Return what devices have."""
    result: list[Holding] = []
    for name, shelf in shelves.items():
        for version in shelf.versions:
            for owner, share in version.shares.items():
                row = Holding(
                    version.key, version.owners, owner, len(share), name, version.is_first
                )
                result.append(row)
    return result


def choose(table: Iterable[Holding]) -> tuple[VersionKey, dict[int, list[Holding]]] | None:
    """Return the last version whose shares are all there, and who has each.

    None if there was none yet: the first one may not have been complete. Raise a `LostStateError`
    if there were others.
    """
    versions: dict[VersionKey, dict[int, list[Holding]]] = defaultdict(lambda: defaultdict(list))
    missing_by_version: list[list[int]] = []
    has_others = False
    for row in table:
        versions[row.key][row.owner].append(row)
        has_others |= not row.is_first
    for key in sorted(versions, reverse=True):
        holders = versions[key]
        owners = next(iter(holders.values()))[0].owners
        missing = [owner for owner in range(owners) if owner not in holders]
        if not missing:
            return key, holders
        missing_by_version.append(missing)
    if not has_others:
        return None
    # Of the version that is still being written, and of one that is being overwritten, shares of
    # living devices are missing too.
    shown = ", ".join(map(str, min(missing_by_version, key=len)))
    raise LostStateError(
        "fs.elastic: too many devices were lost at once: none that is left has the state of device "
        f"{shown} of the mesh before. More copies outlive more losses (copies=2), and with "
        "folder=fs.Checkpoints(...) a run goes back to its last checkpoint."
    )


def find_here(shelves: Mapping[int, Shelf]) -> Found | None:
    """Find the version in the memory of virtual devices, which is that of the caller."""
    choice = choose(holdings(shelves))
    if choice is None:
        return None
    key, _ = choice
    shares: dict[int, Tensor] = {}
    found: Version | None = None
    for version in _versions(shelves, key):
        shares |= version.shares
        found = version
    assert found is not None
    holders = dict.fromkeys(shares, 0)  # the caller has all
    return Found(key, found.step, index_of(json.loads(found.text)), shares, holders)


@torch.no_grad()
def find_together(world: Mesh, name: int, shelf: Shelf, members: Sequence[int]) -> Found | None:
    """Find the version together with all other processes; each calls it.

    Args:
        world: all processes.
        name: of this one in the run.
        shelf: what it has.
        members: the processes of the new mesh, by their index in the world.
    """
    (found,) = run_on_devices(world, lambda device: _find(device, name, shelf, members))
    return found


def _find(device: int, name: int, shelf: Shelf, members: Sequence[int]) -> Found | None:
    rows: list[Holding] = []
    names: list[int] = []
    for content in all_bytes(json.dumps([name, holdings({name: shelf})]).encode()):
        other, table = json.loads(content)
        names.append(other)
        for (generation, number), *fields in table:
            rows.append(Holding(VersionKey(generation, number), *fields))
    choice = choose(rows)
    if choice is None:
        return None

    key, holders = choice
    own = next(_versions({name: shelf}, key), None)
    # Any process that has the version sends its index to the others: new ones have none.
    texts = all_bytes(json.dumps([own.step, own.text]).encode() if own else b"")
    step, text = json.loads(next(filter(None, texts)))
    if own is None:
        own = Version(key, step, text, len(holders), {}, torch.empty(0, dtype=torch.uint8))
        shelf.versions.append(own)

    index_of_name = {other: index for index, other in enumerate(names)}
    places: dict[int, int] = {}
    moved: dict[int, Holding] = {}
    for owner, rows_of_owner in sorted(holders.items()):
        at = [index_of_name[row.name] for row in rows_of_owner]
        near = [members.index(index) for index in at if index in members]
        places[owner] = near[0] if near else owner % len(members)
        if not near:
            moved[owner] = rows_of_owner[0]
    for owner, row in moved.items():
        receiver = members[places[owner]]
        share = _fetched(row, index_of_name[row.name], own.shares, is_receiver=device == receiver)
        if share is not None:
            own.shares[owner] = share
    return Found(key, step, index_of(json.loads(text)), own.shares, places)


def _fetched(
    row: Holding, holder: int, shares: Mapping[int, Tensor], *, is_receiver: bool
) -> Tensor | None:
    """Return a share that only a process outside of the new mesh has, on its receiver."""
    parts: list[Tensor] = []
    for number, begin in enumerate(range(0, row.size, ROUND)):
        requests: list[ShareRequest] = []
        if is_receiver:
            requests = [ShareRequest(holder, row.owner, begin, min(ROUND, row.size - begin))]
        parts += [part.clone() for part in fetch(requests, shares, number)]
    if not is_receiver:
        return None
    return torch.cat([torch.empty(0, dtype=torch.uint8), *parts])


def _versions(shelves: Mapping[int, Shelf], key: VersionKey) -> Iterator[Version]:
    """Yield what devices have of a version."""
    for shelf in shelves.values():
        for version in shelf.versions:
            if version.key == key:
                yield version
