"""`SharesInMemory`: a saved tree whose shares are in the memory of devices.

A device requests of a holder what it lacks. All devices of the mesh read together, and serve each
other meanwhile:

    new device    needs of share 0 and 1     has share    requests
    0             [0 0 0 0]                  0            -
    1             [0 0 1 1]                  1            device 0 for the last bytes of share 0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fshard.checkpoint.copying import copy
from fshard.checkpoint.index import Index
from fshard.checkpoint.source import IndexedSource, ReadRange, Target
from fshard.mesh.layout import Mesh
from fshard.mesh.reshard.rounds import ROUND
from fshard.mesh.spmd.run import as_one_device
from fshard.recovery.exchange import ShareRequest, all_rows, fetch


class SharesInMemory(IndexedSource):
    """A tree by the shares of its devices.

    Args:
        index: of the tree.
        shares: the bytes that the caller has, by owner: what that device would write to a file.
        holders: the index, in the mesh, of a device that has each share.
        mesh: the devices that read together, with one axis; None if the caller has all shares.
    """

    def __init__(
        self,
        index: Index,
        shares: Mapping[int, Tensor],
        holders: Mapping[int, int],
        mesh: Mesh | None,
    ) -> None:
        super().__init__(index)
        self._shares = shares
        self._holders = holders
        self._mesh = mesh

    def read(self, targets: Sequence[Target]) -> None:
        far: list[tuple[int, ReadRange]] = []
        for owner, ranges in sorted(self.ranges(targets).items()):
            for needed in ranges:
                if owner in self._shares:
                    share = self._shares[owner]
                    _put(share[needed.byte : needed.byte + needed.size], needed)
                else:
                    far.append((owner, needed))
        if self._mesh is not None:
            self._read_from_others(far)

    def _read_from_others(self, ranges: Sequence[tuple[int, ReadRange]]) -> None:
        """Read what other devices have, in rounds of bounded memory."""
        assert self._mesh is not None
        rounds = [*_in_rounds(ranges)]
        with as_one_device(self._mesh):
            count = max([row[0] for row in all_rows([len(rounds)])])
            for number in range(count):
                wanted = rounds[number] if number < len(rounds) else []
                requests: list[ShareRequest] = []
                for owner, needed in wanted:
                    requests.append(
                        ShareRequest(self._holders[owner], owner, needed.byte, needed.size)
                    )
                arrived = fetch(requests, self._shares, number)
                for (_, needed), content in zip(wanted, arrived, strict=True):
                    _put(content, needed)


def _put(content: Tensor, needed: ReadRange) -> None:
    """Copy the bytes of a range into its target."""
    is_aligned = content.storage_offset() % needed.dtype.itemsize == 0
    values = content if is_aligned else content.clone()
    copy(needed.span, values.view(needed.dtype), needed.target.span, needed.target.memory)


def _in_rounds(
    ranges: Sequence[tuple[int, ReadRange]],
) -> Iterator[list[tuple[int, ReadRange]]]:
    """Divide ranges into rounds of at most `ROUND` bytes."""
    current: list[tuple[int, ReadRange]] = []
    free = ROUND
    for owner, needed in ranges:
        for part in _cut(needed):
            if part.size > free and current:
                yield current
                current = []
                free = ROUND
            current.append((owner, part))
            free -= part.size
    if current:
        yield current


def _cut(needed: ReadRange) -> Iterator[ReadRange]:
    """Divide a range into some of at most `ROUND` bytes."""
    count = ROUND // needed.dtype.itemsize
    first = needed.span.start
    for start in range(first, needed.span.stop, count):
        byte = needed.byte + (start - first) * needed.dtype.itemsize
        yield replace(needed, byte=byte, span=needed.span.clip(start, start + count))
