"""Reproducible mode: sums over devices in one tree on every runtime, and the settings that CUDA
needs.
"""

import os
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.mesh.spmd.deterministic import deterministic, missing_cuda_settings
from tests.helpers.processes import run_processes
from tests.mesh.runtimes import nccl_rules

N = 4
SUMMANDS = torch.tensor([1e8, 1.0, -1e8, 1.0, 1e8, 3.0, -1e8, 0.1])


def summands(count, dtype, index):
    """Return the summands of a device: numbers whose sum depends on the order in which they are
    added.
    """
    xs = (
        torch.stack([SUMMANDS.roll(index + i % 5)[0] * (1 + i % 3) for i in range(count)])
        if count
        else torch.ones(0)
    )
    return xs.to(dtype)


def sums():
    """Sum numbers of several dtypes and counts, some of which the devices do not share evenly."""
    index = fs.axis_index("d")
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int16):
        for count in (0, 5, 8):
            x = summands(count, dtype, index)
            results.append(fs.psum(x, "d"))
            if dtype is torch.bfloat16:
                results.append(fs.pmax(x, "d"))
            if count % N == 0:
                results.append(fs.psum_scatter(x, "d"))
    return results


def step(stage, mesh):
    """Return the parameters after a reproducible step whose gradients are summands."""
    params = {"w": torch.zeros(10), "v": torch.zeros(3)}
    params = fs.shard_params(params, fs.fsdp("d") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.sgd(1.0), mesh=mesh, axis="d", stage=stage)
    loss_fn = lambda p, x: (p["w"] * x).sum() + (p["v"] * x[:, :3]).sum()  # noqa: E731
    run = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("d"), reproducible=True, slices=8)
    params, _, metrics = run(params, opt.init(params), SUMMANDS[:, None] * torch.arange(1.0, 11.0))
    return [*fs.unshard(params).values(), metrics["loss"], metrics["grad_norm"]]


def everything(mesh):
    with deterministic(True, "cpu"):
        collectives = fs.run(sums, mesh=mesh)
    return collectives, [step(stage, mesh) for stage in (0, 3)]


def over_nccl():
    """Do it under the rules of NCCL, where the order of a sum also depends on the sums before."""
    (collectives,), steps = everything(fs.make_mesh({"d": N}))
    return collectives, steps, (nccl_rules.violations, nccl_rules.counts["host syncs"])


def test_nccl_sums_in_reproducible_mode_have_the_bits_of_virtual_ones():
    collectives, steps = everything(fs.make_mesh({"d": N}))
    processes = run_processes(over_nccl, N, environment={"FSHARD_BACKEND": "nccl_rules"})
    for expected, (sums_of_rank, steps_of_rank, notes) in zip(collectives, processes, strict=True):
        assert notes == ([], 0)
        for xs, ys in [(sums_of_rank, expected), *zip(steps_of_rank, steps, strict=True)]:
            assert all(x.dtype == y.dtype and x.equal(y) for x, y in zip(xs, ys, strict=True))


# -- CUDA ------------------------------------------------------------------------------------------


@pytest.fixture
def unset(monkeypatch):
    """Restore the settings of the process after a test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    owners = (
        torch.backends.cuda.matmul,
        torch.backends.cudnn,
        torch.backends.cudnn.conv,
        torch.backends.cudnn.rnn,
    )
    reductions = (f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16"))
    names = "benchmark", *reductions, "fp32_precision"
    before = [
        (owner, name, getattr(owner, name))
        for owner in owners
        for name in names
        if hasattr(owner, name)
    ]
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    for owner, name, value in before:
        setattr(owner, name, value)


def test_cuda_settings_are_required_until_the_lines_of_the_error_are_run(unset):
    guide = Path(__file__).parents[3] / "docs" / "guides" / "reproducibility_and_testing.md"
    lines = missing_cuda_settings()
    assert len(lines) == 8 and "\n".join(lines) in guide.read_text()
    for index, line in enumerate(lines):
        with pytest.raises(ValueError, match="CUDA kernels must be deterministic") as error:
            deterministic(True, "cuda").__enter__()
        assert str(error.value).splitlines()[1:] == [f"    {rest}" for rest in lines[index:]]
        exec(line, {"os": os, "torch": torch})
    with deterministic(True, "cuda"):
        pass
