"""A fault of one process is raised on all, with one text. Oracle: the place where the test put it."""

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import AuditError
from fshard.mesh.spmd.scope import here
from tests.helpers.bit_flips import Flip

SIZES = {"a": 48, "b": 8, "c": 32}


def loss_fn(params, batch):
    x, y = batch
    hidden = torch.tanh(x @ params["a"] + params["b"])
    return (hidden @ params["c"] - y).square().mean()


def program(folder, stage, devices):
    """Return an audited step of two processes, and the arguments of its first call."""
    torch.manual_seed(0)
    mesh = fs.make_mesh({"data": 2})
    full = {"a": torch.randn(6, 8), "b": torch.randn(8), "c": torch.randn(8, 4)}
    params = fs.shard_params(full, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=stage)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True)
    other = fs.make_mesh({"data": len(devices)}, devices=devices)
    step = fs.audit(step, every=2, mesh=other, stage=1, folder=folder)
    batch = torch.randn(16, 6), torch.randn(16, 4)
    return step, params, step.init(params), batch


def errors_of(folder, flip, stage, devices):
    """Return the error of the second step, or the table of its audit."""
    step, params, state, batch = program(folder, stage, devices)
    with flip.installed():
        params, state, _ = step(params, state, batch)
        flip.is_armed = True
        try:
            step(params, state, batch)
        except AuditError as error:
            return str(error)
    return step.last.text


@pytest.mark.parametrize("devices", [(1, 0), (0,), (1,)], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_processes_agree_that_layouts_are_equal(two, stage, devices, tmp_path):
    never = Flip("gradient", 7, "a", SIZES, 0, 20)
    first, second = two.run(errors_of, tmp_path, never, stage, devices)
    assert first == second
    assert "equal bits" in first


@pytest.mark.parametrize("moment", ["gradient", "parameter", "state"])
@pytest.mark.parametrize("devices", [(1, 0), (0,)], ids=str)
def test_flip_on_one_process_is_raised_on_all(two, moment, devices, tmp_path):
    flip = Flip(moment, 1, "c", SIZES, 5, 25)
    first, second = two.run(errors_of, tmp_path, flip, 1, devices)
    assert first == second
    assert first.startswith("step 2: data=2, ZeRO 1 against")
    finding = first.splitlines()[1]
    if moment == "state":  # then the next parameters are gathered
        assert finding.startswith(
            "  process 1 (data=1) sent another all_gather over data in the up"
        )
        assert finding.endswith("the first leaf with it is exp_avg.c")
    else:
        assert finding.startswith("  process 1 (data=1) computed another ")
        assert " of c than when the step was repeated" in finding
    assert first.splitlines()[2].startswith("  gradient")


def audited_on_one(folder, number):
    """Audit a step of one process by one of both; return what each process has seen."""
    torch.manual_seed(0)
    mesh = fs.make_mesh({"data": 1}, devices=(number,))
    full = {"a": torch.randn(6, 8), "b": torch.randn(8), "c": torch.randn(8, 4)}
    params = fs.shard_params(full, P(), mesh=mesh)
    step = fs.train_step(
        loss_fn, fs.optim.adamw(0.01), mesh=mesh, batch=P("data"), reproducible=True
    )
    other = fs.make_mesh({"data": 2})
    step = fs.audit(step, every=1, mesh=other, stage=3, folder=folder, digest=True)
    batch = torch.randn(16, 6), torch.randn(16, 4)
    *_, metrics = step(params, step.init(params), batch)
    return step.last.text, metrics["loss"] is None


@pytest.mark.parametrize("number", [0, 1])
def test_step_of_some_processes_is_audited_by_all(two, number, tmp_path):
    results = two.run(audited_on_one, tmp_path, number)
    texts = [text for text, _ in results]
    assert texts[0] == texts[1]
    assert "equal bits" in texts[0]
    assert [is_outside for _, is_outside in results] == [number != 0, number != 1]


def mistaken_loss(params, batch):
    """A loss that is another one on one device alone."""
    scope = here()
    assert scope is not None
    return loss_fn(params, batch) * (1.5 if scope.mesh.size == 1 else 1.0)


def mistaken(folder):
    """Return the step of a mistaken program on two devices, audited on one, and its arguments."""
    torch.manual_seed(0)
    mesh = fs.make_mesh({"data": 2})
    full = {"a": torch.randn(6, 8), "b": torch.randn(8), "c": torch.randn(8, 4)}
    params = fs.shard_params(full, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=3)
    step = fs.train_step(mistaken_loss, opt, mesh=mesh, batch=P("data"), reproducible=True)
    other = fs.make_mesh({"data": 1}, devices=(0,))
    step = fs.audit(step, every=1, mesh=other, stage=0, folder=folder)
    return step, params, step.init(params), (torch.randn(16, 6), torch.randn(16, 4))


def error_of_mistake(folder):
    step, *arguments = mistaken(folder)
    with pytest.raises(AuditError) as error:
        step(*arguments)
    return str(error.value)


def test_step_of_processes_is_replayed_on_virtual_devices(two, tmp_path):
    first, second = two.run(error_of_mistake, tmp_path)
    assert first == second
    table = (tmp_path / "step-1" / "table.txt").read_text()
    replayed = fs.replay(tmp_path / "step-1", *mistaken(tmp_path))
    assert replayed.text.replace("device", "process") == table.rstrip("\n")
