"""Collectives of plain torch programs are recorded with their groups, bytes and lines, in processes."""

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fshard.torch_collectives import Recording, record_collectives
from tests.helpers.processes import run_processes

AXES = {"data": 2, "tp": 2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))  # the line of the layer


def calls_of(program):
    """Return the calls of a program in a process that torchrun has started."""
    with record_collectives() as calls:
        program()
    return calls


def functions():
    """Call torch's functions, and send a message."""
    x = torch.ones(4)
    dist.all_reduce(x)
    dist.broadcast(x, src=1)
    dist.all_gather_into_tensor(torch.empty(8), x)
    dist.reduce_scatter_tensor(torch.empty(2), x)
    dist.all_to_all_single(torch.empty(4), x)
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)
    dist.barrier()


def functions_of_ranks():
    dist.init_process_group("gloo")
    return calls_of(functions)


def test_functions_are_recorded_with_bytes():
    first, second = run_processes(functions_of_ranks, 2)
    assert [(call.collective, call.group, call.bytes, call.sent) for call in first] == [
        ("all_reduce", (0, 1), 16, 16),
        ("broadcast", (0, 1), 16, 16),
        ("all_gather", (0, 1), 16, 16),
        ("reduce_scatter", (0, 1), 16, 8),
        ("all_to_all", (0, 1), 16, 8),
        ("send", (0, 1), 16, 16),
    ]
    assert second[:5] == first[:5]
    assert (second[5].collective, second[5].group, second[5].sent) == ("recv", (0, 1), 0)
    (_, start) = inspect.getsourcelines(functions)
    assert first[0].line == f"tests/test_torch_collectives.py:{start + 3} in functions"


def data_parallel():
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    return calls_of(lambda: model(torch.ones(2, 3)).sum().backward())


def test_reductions_of_ddp_are_recorded():
    """They begin in C++, in a hook of the backward."""
    (calls, _) = run_processes(data_parallel, 2)
    assert [(call.collective, call.group, call.bytes) for call in calls] == [
        ("all_reduce", (0, 1), 4 * (3 + 1))
    ]
    assert "test_torch_collectives.py" in calls[0].line


def sharded():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = Block()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return calls_of(lambda: model(torch.ones(2, 8)).sum().backward())


def test_fsdp_and_tensor_parallelism_are_recorded_by_axis_and_layer(tmp_path):
    recording = Recording("train.py", run_processes(sharded, 4), AXES)
    for calls in recording.ranks:
        by_axes = [(call.collective, recording.axes_of(call.group)) for call in calls]
        assert by_axes.count(("reduce_scatter", ("data",))) == 1
        assert ("all_gather", ("data",)) in by_axes and ("all_reduce", ("tp",)) in by_axes
        of_layer = [call.line for call in calls if recording.axes_of(call.group) == ("tp",)]
        assert of_layer[0].endswith("in forward")
        (gradients,) = [call for call in calls if call.collective == "reduce_scatter"]
        assert gradients.bytes == 4 * (8 * 16 + 16 * 8) // 2  # those of a device along tp
    assert recording.mismatch() == ""

    recording.save(tmp_path / "calls.json")
    loaded = Recording.load(tmp_path / "calls.json")
    assert loaded.ranks == recording.ranks and loaded.axes == AXES
