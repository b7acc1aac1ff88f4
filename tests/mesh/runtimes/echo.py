"""A process group of this process alone, which plays all ranks: each has the same data, and so the
same results.

Results are there at once, but no operation counts as complete before `release`, as if the device
were far behind the host. Whatever would block the host on NCCL is noted: `wait(timeout)`, and a
look at an operation's end.
"""

from contextlib import contextmanager
from functools import wraps
from threading import get_ident

import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fshard.mesh.runtimes import process


class EchoWork(dist._Work):
    """An operation: its name, and whether it is complete."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.thread = get_ident()
        self.is_done = False

    def wait(self, timeout=None):
        if timeout is not None and timeout.total_seconds():
            blocking.append(f"wait({timeout}) for {self.name}")
        if get_ident() != self.thread:
            blocking.append(f"wait for {self.name} in another thread")
        return True

    def is_completed(self):
        return self.is_done

    def synchronize(self):
        self.wait()


works: list[EchoWork] = []
"""All operations since `forget`, in order."""
blocking: list[str] = []
"""The calls that would have blocked the host."""


def forget():
    works.clear()
    blocking.clear()


def _started(name):
    works.append(EchoWork(name))
    return works[-1]


def by_the_network(operation):
    """Run an operation outside of dispatch modes: its copies are no kernels of this process."""

    @wraps(operation)
    def run(*args, **kwargs):
        with _disable_current_modes():
            return operation(*args, **kwargs)

    return run


class EchoGroup(dist.ProcessGroup):
    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self):
        return "echo"

    @by_the_network
    def all_gather_single(self, output, input, opts=None):
        for row in output.view(self.size(), -1):
            if row.data_ptr() != input.data_ptr():  # it may be the input
                row.copy_(input.view(-1))
        return _started("all_gather")

    @by_the_network
    def reduce_scatter_single(self, output, input, opts=None):
        output.view(-1).copy_(input.view(self.size(), -1)[self.rank()])
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            output.mul_(self.size())
        return _started("reduce_scatter")

    @by_the_network
    def all_to_all_single(self, output, input, output_sizes=(), input_sizes=(), opts=None):
        output.view(self.size(), -1).copy_(input.view(self.size(), -1)[self.rank()])
        return _started("all_to_all")

    @by_the_network
    def allreduce(self, tensors, opts=None):
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for x in tensors:
                x.mul_(self.size())
        return _started("all_reduce")

    def broadcast(self, tensors, opts=None):
        return _started("broadcast")

    @by_the_network
    def allgather(self, outputs, inputs, opts=None):
        for rows, x in zip(outputs, inputs, strict=True):
            for row in rows:
                row.copy_(x)
        return _started("all_gather")

    def send(self, tensors, to, tag=0):
        return _started("send")

    def recv(self, tensors, source, tag=0):
        return _started("recv")

    # torch's older names
    _allgather_base = all_gather_into_tensor = all_gather_single
    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single
    alltoall_base = all_to_all_single


@contextmanager
def echoing(n):
    """Make this process rank 0 of n."""
    if "ECHO" not in dir(dist.Backend):
        dist.Backend.register_backend(
            "echo", lambda store, rank, n, timeout: EchoGroup(rank, n), devices=["cpu"]
        )
    dist.init_process_group("echo", store=dist.HashStore(), rank=0, world_size=n)
    forget()
    try:
        yield
    finally:
        process.leave(waiting=False)
        if dist.is_initialized():
            dist.destroy_process_group()
