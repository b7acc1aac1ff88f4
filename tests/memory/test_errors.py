"""Mistakes with memory are errors before training, which name all that is wrong; a failing disk
ends every process.
"""

import os

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P, optim
from fshard.errors import DiskError, LayoutError, MemoryLimitError, OptimizerError
from fshard.memory import disk, pool
from tests.helpers.processes import run_processes

MESH = fs.make_mesh({"data": 2})
PARAMS = {"blocks": [torch.ones(6), torch.ones(5)], "head": torch.ones(3)}


def sharded(memory, rules=None):
    return fs.shard_params(PARAMS, rules or fs.fsdp("data"), mesh=MESH, memory=memory)


def partitioned(stage=3, **options):
    return fs.partition_optimizer(optim.adamw(0.1), mesh=MESH, axis="data", stage=stage, **options)


def step_of(**options):
    opt = partitioned(state_memory="disk")
    return fs.train_step(
        lambda p, x: (p["head"] * x).sum(), opt, mesh=MESH, batch=P("data"), **options
    )


def boosted(**options):
    model = nn.Linear(3, 3)
    booster = fs.Booster(fs.ZeroPlugin(mesh=MESH, **options))
    return booster.init(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())


ERRORS = {  # the call, the error, and what it says: the offenders, what they must be, what they are, and a fix
    "kind of parameters": (lambda: sharded("vram"), LayoutError, '"device", "host" or "disk"; got \'vram\''),
    "kinds by patterns": (
        lambda: sharded({"blocks.**": "cpu", "**": "nvme"}),
        LayoutError,
        "got 'cpu'; .*got 'nvme'.*\"device\" is for what no other",
    ),
    "unused patterns": (
        lambda: sharded({"block.**": "host", "tail": "disk", "**": "device"}),
        LayoutError,
        'no leaf is for the rule "block.*"; no leaf is for the rule "tail"',
    ),
    "missing patterns": (
        lambda: sharded({"blocks.**": "host"}),
        LayoutError,
        'no rule is for .*head.*; "..": "device" is for what no other',
    ),
    "kind of a layout": (lambda: fs.Layout(MESH, P(), "cpu"), ValueError, "or \"disk\"; got 'cpu'"),
    "kind of state": (lambda: partitioned(state_memory="nvme"), OptimizerError, "or \"disk\".*; got 'nvme' and 'device'"),
    "place of the update": (
        lambda: partitioned(state_memory="host", update_on="disk"),
        OptimizerError,
        'update_on "device" or "host"; got \'host\' and \'disk\'',
    ),
    "kind of a plugin": (lambda: fs.ZeroPlugin(offload="nvme"), ValueError, "'host', 'disk' or None, got 'nvme'"),
    "plugin of stage 3": (
        lambda: fs.FSDPPlugin(offload="cpu"), ValueError, "offload must be False, True, 'host' or 'disk', got 'cpu'",
    ),
    "flag of a plugin": (lambda: fs.ZeroPlugin(offload=True), ValueError, "offload must be 'host', 'disk' or None, got True"),
    "exact plugin": (lambda: fs.FSDPPlugin(offload="disk", reproducible=True), ValueError, 'use offload="host"'),
    "fractions": (
        lambda: fs.GeminiPlugin(placement="static", offload_optim_frac=1.5, offload_param_frac=-1),
        ValueError,
        "offload_optim_frac must be from 0 to 1; got 1.5; offload_param_frac must",
    ),
    "fractions of auto": (lambda: fs.GeminiPlugin(offload_optim_frac=0.5), ValueError, 'are for placement="static"'),
    "limits of static": (lambda: fs.GeminiPlugin(placement="static", device=1), ValueError, "device= and host= are for"),
    "both fractions": (
        lambda: fs.GeminiPlugin(placement="static", offload_param_frac=0.5, shard_param_frac=0.5),
        ValueError,
        "shard_param_frac must be 1",
    ),
    "placement": (lambda: fs.GeminiPlugin(placement="cpu"), ValueError, "placement must be"),
    "state on the device": (
        lambda: partitioned(update_on="host"), OptimizerError, 'got state_memory="device". Write state_memory="host"',
    ),
    "stage": (
        lambda: partitioned(stage=2).init(sharded({"blocks.**": "host", "**": "device"}, P())),
        OptimizerError,
        r"stage must be 3 .*; got 2, and blocks\[0\] in host memory, .*\[1\] in host memory. .* or write stage=3",
    ),
    "donation": (lambda: step_of(), ValueError, "donate must be True .*; got donate=False .*train_step.*donate=True"),
    "exact steps": (
        lambda: step_of(donate=True, reproducible=True),
        ValueError,
        "reproducible False; got donate=True and reproducible=True. .*state_memory=\"host\"",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_raise_before_training(disk_folder, name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()


DISKS = {
    "not set": ("", "it is not set"),
    "missing": ("/no/such/folder", "No such file or directory"),
    "read-only": ("/proc", "must be a writable folder"),
    "memory": ("/dev/shm", "got a tmpfs, which is memory"),
}
ON_DISK = {
    "parameters": lambda: sharded("disk"),
    "state": lambda: partitioned(state_memory="disk").init(sharded("device")),
    "a plugin": lambda: boosted(stage=1, offload="disk"),
}


@pytest.mark.parametrize("what", ON_DISK)
@pytest.mark.parametrize("folder", DISKS)
def test_a_folder_that_is_no_disk_raises_before_training(monkeypatch, folder, what):
    path, complaint = DISKS[folder]
    monkeypatch.setenv("FSHARD_DISK", path)
    with pytest.raises(DiskError, match=f"FSHARD_DISK.*{complaint}.*export FSHARD_DISK="):
        ON_DISK[what]()


@pytest.mark.parametrize("what", ON_DISK)
def test_a_disk_that_is_too_small_raises_before_training(monkeypatch, disk_folder, what):
    monkeypatch.setattr(disk, "_free_bytes", lambda descriptor: 5)
    with pytest.raises(
        DiskError, match=r"must have \d+ more bytes for .*; got 5 .*Free some, or name a folder"
    ):
        ON_DISK[what]()


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("what", ["parameters", "state"])
def test_a_limit_that_is_too_small_raises_before_training(disk_folder, kind, what):
    """Of 8 numbers on the first device."""
    message = rf"{kind} memory must be at most 27 bytes per device; got \d+ with"
    with pytest.raises(MemoryLimitError, match=message), fs.memory.limit(**{kind: 27}):
        sharded(kind) if what == "parameters" else partitioned(state_memory=kind).init(
            sharded("device")
        )


def test_a_host_that_is_too_small_raises_with_both_numbers(monkeypatch):
    """Before pages are locked, which would end the process."""
    monkeypatch.setattr(pool, "_free_bytes", lambda: 1000)
    with pytest.raises(
        MemoryLimitError,
        match=r"must have 1,200 more bytes .*\(300,\); got 1,000. .*state_memory=\"disk\"",
    ):
        pool.empty_on_host((300,), torch.float32)


def test_bytes_that_the_host_has_are_at_most_all():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < pool._free_bytes() <= pages


# -- in the middle of a step -----------------------------------------------------------------------


def end_of_a_process(folder, what, call):
    """Take a step in which the disk of the first process fails; write the error that this process
    gets.
    """
    os.environ["FSHARD_DISK"] = folder
    mesh = fs.make_mesh({"data": 2})
    rank = fs.mesh.process_index()
    memory, state_memory = ("disk", "device") if what == "parameters" else ("device", "disk")
    params = fs.shard_params(PARAMS, fs.fsdp("data"), mesh=mesh, memory=memory)
    opt = fs.partition_optimizer(
        optim.adamw(0.1), mesh=mesh, axis="data", stage=3, state_memory=state_memory
    )
    step = fs.train_step(
        lambda p, x: (p["head"] * x).sum(), opt, mesh=mesh, batch=P("data"), donate=True
    )
    params, state, _ = step(params, opt.init(params), torch.ones(2, 3))
    before = getattr(os, call)

    def broken(*args):
        if rank == 0:
            raise OSError(5, "Input/output error")
        return before(*args)

    setattr(os, call, broken)
    try:
        step(params, state, torch.ones(2, 3))
        step(params, state, torch.ones(2, 3))  # the other process has its state
    except Exception as error:
        with open(os.path.join(folder, f"end {rank}"), "w", encoding="utf-8") as file:
            file.write(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize(
    ("what", "call"), [("parameters", "preadv"), ("state", "preadv"), ("state", "pwritev")]
)
def test_a_failing_disk_ends_every_process(disk_folder, what, call):
    """The error of its process names the file, and the others have lost a process."""
    with pytest.raises(DiskError):
        run_processes(end_of_a_process, 2, str(disk_folder), what, call, timeout=60)
    first, second = ((disk_folder / f"end {rank}").read_text(encoding="utf-8") for rank in range(2))
    verb = "Reading" if call == "preadv" else "Writing"
    assert (
        f"DiskError: {verb} the unlinked file" in first and f"in FSHARD_DISK={disk_folder}" in first
    )
    assert second.startswith("LostProcessError")
