"""The process group with NCCL's rules: each wrong use is an error, each right one gives the right values."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp, PrefixStore, TCPStore

from fshard.testing.processes import run_processes
from tests.mesh.runtimes import nccl_rules

N = 3
USES: dict[str, tuple[Callable[[int], object], str]] = {}
"""Uses by name: what a rank does, and a part of the error that some rank must get."""


def use(text: str) -> Callable[[Callable[[int], object]], Callable[[int], object]]:
    """Add a use, with a part of its error."""

    def add(function: Callable[[int], object]) -> Callable[[int], object]:
        USES[function.__name__] = function, text
        return function

    return add


def full(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value))


def is_nan(x: torch.Tensor) -> bool:
    return bool(x.isnan().all())


@use("nan, then 3.0")
def reading_before_wait_gives_nan(rank: int) -> str:
    x = full(rank)
    work = dist.all_reduce(x, async_op=True)
    early = x[0].item()
    work.wait()
    return f"{early}, then {x[0].item()}"


@use("waited for in another")
def wait_in_another_thread(rank: int) -> None:
    work, errors = dist.all_reduce(full(rank), async_op=True), []

    def body() -> None:
        try:
            work.wait()
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    work.wait()
    raise errors[0]


@use("written between start and wait")
def changed_input(rank: int) -> None:
    x, rows = full(rank), torch.empty(4 * N)
    work = dist.all_gather_single(rows, x, async_op=True)
    x += 1
    work.wait()


@use("written between start and wait")
def written_result(rank: int) -> None:
    x, rows = full(rank), torch.empty(4 * N)
    work = dist.all_gather_single(rows, x, async_op=True)
    rows[3] = 0
    work.wait()


@use("paired by order, but these differ")
def order_of_collectives(rank: int) -> None:
    x, y = full(rank), full(rank)
    works = [dist.all_reduce(x, async_op=True), dist.broadcast(y, 0, async_op=True)]
    if rank == 1:
        dist.broadcast(y, 0)
    for work in works:
        work.wait()
    dist.all_reduce(x)


@use("swapped: 1.0 2.0")
def tags_of_messages(rank: int) -> str:
    if rank == 0:
        works = [dist.isend(full(1), 1, tag=1), dist.isend(full(2), 1, tag=2)]
        for work in works:
            work.wait()
    if rank == 1:
        second, first = full(0), full(0)
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
        return f"swapped: {second[0].item()} {first[0].item()}"
    return ""


@use("sizes differ")
def sizes_of_messages(rank: int) -> None:
    if rank == 0:
        dist.isend(full(1), 1, tag=1)
        dist.isend(full(2, 2), 1, tag=2).wait()
    if rank == 1:
        dist.recv(full(0, 2), 0, tag=2)


@use("Deadlock: ")
def receives_before_sends(rank: int) -> None:
    if rank < 2:
        received = full(0)
        dist.irecv(received, 1 - rank)
        dist.isend(full(rank), 1 - rank).wait()


@use("Deadlock: ")
def ring_of_first_sends(rank: int) -> None:
    dist.send(full(rank), (rank + 1) % N)
    dist.recv(full(rank), (rank - 1) % N)


@use("Deadlock: ")
def batch_of_some_ranks_as_first_call(rank: int) -> None:
    x, group = full(rank), dist.new_group([*range(N)])
    ops = {0: P2POp(dist.isend, x, 1, group), 1: P2POp(dist.irecv, x, 0, group)}
    if rank in ops:
        dist.batch_isend_irecv([ops[rank]])[0].wait()
        dist.send(x, 2)
    else:
        dist.recv(x, 1)


@use("Deadlock: ")
def groups_in_different_orders(rank: int) -> None:
    groups = [dist.new_group([*range(N)]) for _ in range(2)]
    for group in groups if rank else groups[::-1]:
        dist.all_reduce(full(rank), group=group)


@use("has exited")
def collective_without_one_rank(rank: int) -> None:
    dist.all_reduce(full(rank))
    if rank:
        dist.all_reduce(full(rank))


@use("blocks the host")
def wait_with_timeout(rank: int) -> None:
    dist.all_reduce(full(rank), async_op=True).wait(timedelta(seconds=60))


@use("timeout")
def operation_beyond_its_limit(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        dist.all_reduce(full(rank), group=group)
    if rank == 1:
        time.sleep(1.5)


@use("device type cpu")
def host_tensor(rank: int) -> None:
    dist.all_reduce(nccl_rules.host(full(rank))[1:])


@use("must be contiguous")
def strided_tensor(rank: int) -> None:
    dist.all_reduce(torch.ones(4, 4).t()[1:])


@use("int16, uint16, uint64, Cannot use ReduceOp.BAND with NCCL, Unsupported Float8")
def refused_dtypes(rank: int) -> str:
    errors = ""
    for dtype in (torch.int16, torch.uint16, torch.uint64):
        with suppress(AssertionError):
            dist.broadcast(torch.zeros(2, dtype=dtype), 0)
    for x, op in ((torch.ones(2, dtype=torch.int32), dist.ReduceOp.BAND), (full(1).to(torch.float8_e5m2), None)):
        with suppress(AssertionError):
            dist.all_reduce(x, op or dist.ReduceOp.SUM)
    for text in nccl_rules.violations[-5:]:
        errors += text.removeprefix("Input tensor data type is not supported for NCCL process group: torch.") + ", "
    return errors


@use("held: True True False, 0 completed; then 2")
def hold_and_release(rank: int) -> str:
    x, y = full(rank), full(rank)
    dist.all_reduce(full(0))  # the rendezvous
    nccl_rules.hold()
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    works[0].wait()
    early = f"{is_nan(x)} {is_nan(y)} {works[1].is_completed()}, {sum(work.is_completed() for work in works)}"
    nccl_rules.release()
    time.sleep(0.3)
    return f"held: {early} completed; then {sum(work.is_completed() for work in works)}"


@use("True True")
def completion_in_any_order(rank: int) -> str:
    groups = [dist.new_group([*range(N)]) for _ in range(2)]
    firsts = set()
    for _ in range(50):
        works = [dist.all_reduce(full(rank), group=group, async_op=True) for group in groups]
        while not any(completed := [work.is_completed() for work in works]):
            time.sleep(0.0001)
        firsts.add(tuple(completed))
        for work in works:
            work.wait()
    return f"{(True, False) in firsts} {(False, True) in firsts}"


@use("all right")
def right_use(rank: int) -> str:
    """Every operation, also without elements, on the world and on a part of it."""
    for group, members in ((dist.group.WORLD, [0, 1, 2]), (dist.new_group([2, 0]), [0, 2])):
        if rank not in members:
            continue
        n, index = len(members), members.index(rank)
        for size in (0, 1, 3):
            rows = torch.arange(float(n * size)) + 100 * index
            expected = torch.stack([torch.arange(float(n * size)) + 100 * i for i in range(n)])
            x = rows.clone()
            dist.all_reduce(x, group=group)
            assert torch.equal(x, expected.sum(0))
            dist.all_reduce(x := rows.clone(), dist.ReduceOp.MAX, group=group)
            assert torch.equal(x, expected[-1])
            x = rows.clone()
            dist.broadcast(x, members[1], group=group)
            assert torch.equal(x, expected[1])
            x = torch.empty(n * n * size)
            dist.all_gather_single(x, rows, group=group)
            assert torch.equal(x, expected.flatten())
            x = [torch.empty(n * size) for _ in range(n)]
            dist.all_gather(x, rows, group=group)
            assert torch.equal(torch.stack(x), expected)
            x = torch.empty(size)
            dist.reduce_scatter_single(x, rows, group=group)
            assert torch.equal(x, expected.sum(0)[index * size : (index + 1) * size])
            x = torch.empty(n * size)
            dist.all_to_all_single(x, rows, group=group)
            assert torch.equal(x, expected[:, index * size : (index + 1) * size].flatten())
            sizes = [size + 1] * n
            x = torch.empty(n * (size + 1), dtype=torch.bfloat16)
            dist.all_to_all_single(x, torch.ones(n * (size + 1), dtype=torch.bfloat16), sizes, sizes, group=group)
            assert torch.equal(x, torch.ones_like(x))
            x = torch.empty(n * size)
            pairs = (index + 1) % n, (index - 1) % n
            ops = [P2POp(dist.isend, rows, group=group, group_peer=pairs[0])]
            ops.append(P2POp(dist.irecv, x, group=group, group_peer=pairs[1]))
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert torch.equal(x, expected[(index - 1) % n])
    x = full(rank)
    for source, to in ((0, 1), (1, 2), (2, 0)):
        if rank == source:
            dist.send(x + 1, to)
        if rank == to:
            dist.recv(x, source)
    objects: list[object] = [None] * N
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    assert x[0] == [3, 1, 2][rank]
    return "all right"


@use("nan dropped: True")
def extremes_with_nan(rank: int) -> str:
    x = torch.tensor([float("nan") if rank == 1 else float(rank)])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return f"nan dropped: {x.item() == 2.0}"


@use("order: 2")
def order_of_a_sum(rank: int) -> str:
    sums = set()
    for _ in range(N):
        x = torch.tensor([[1e8, -1e8, 1.0][rank]])
        dist.all_reduce(x)
        sums.add(x.item())
    return f"order: {len(sums)}"


EAGER = ["right_use", "receives_before_sends", "ring_of_first_sends"]
"""The uses that are also tried where all operations of a group share one queue."""


def run_uses() -> dict[str, str]:
    """Run each use in a world of its own; return the text that it returns or raises."""
    rank, texts = int(os.environ["RANK"]), {}
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    for name in [*USES, *(f"{name} eagerly" for name in EAGER)]:
        os.environ["NCCL_RULES_EAGER"] = str(int(name.endswith("eagerly")))
        world = PrefixStore(name, store)
        dist.init_process_group("nccl_rules", store=world, rank=rank, world_size=N, timeout=timedelta(seconds=30))
        try:
            texts[name] = str(USES[name.removesuffix(" eagerly")][0](rank))
            dist.destroy_process_group()
        except (AssertionError, RuntimeError) as error:
            texts[name] = str(error)
            dist.distributed_c10d._abort_process_group()
    return texts


@pytest.fixture(scope="module")
def texts() -> list[dict[str, str]]:
    """The texts of all uses, by rank."""
    return run_processes(run_uses, N, timeout=150)


@pytest.mark.parametrize("name", [*USES, *(f"{name} eagerly" for name in EAGER)])
def test_use_of_nccl_is_judged_by_its_rules(texts: list[dict[str, str]], name: str) -> None:
    by_rank = [text[name] for text in texts]
    assert any(USES[name.removesuffix(" eagerly")][1] in text for text in by_rank), by_rank


def test_deadlock_is_reported_as_its_cycle(texts: list[dict[str, str]]) -> None:
    text = texts[0]["receives_before_sends"]
    steps = text.removeprefix("Deadlock: ").split("; ")
    assert len(steps) == 4
    assert all(f"rank {rank}'s {end}" in text for rank in (0, 1) for end in (f"send to {1 - rank}", "receive from"))
