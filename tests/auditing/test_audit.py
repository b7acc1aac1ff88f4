"""An audited step returns what the step returns, and raises no false alarm. Oracle: the step alone."""

import json
import sys
import warnings

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from fshard.auditing.records import copies_of, faults, sent_otherwise
from fshard.auditing.runs import run_recorded
from fshard.command import main
from fshard.errors import AuditError, FshardError
from fshard.mesh.layout import flatten

FOUR = fs.make_mesh({"data": 4})
HALF = fs.make_mesh({"data": 2})
TENSOR = fs.make_mesh({"data": 2, "model": 2})


def full_params():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(6, 8, generator=generator),
        "b": torch.randn(8, generator=generator),
        "c": torch.randn(8, 4, generator=generator),
    }


def batch_of(samples=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 6, generator=generator), torch.randn(
        samples, 4, generator=generator
    )


def loss_fn(params, batch):
    x, y = batch
    hidden = torch.tanh(x @ params["a"] + params["b"])
    return (hidden @ params["c"] - y).square().mean()


def step_of(stage=0, opt=None, loss=loss_fn, **options):
    """Return a step on four devices, and its parameters."""
    params = fs.shard_params(full_params(), fs.fsdp("data") if stage == 3 else P(), mesh=FOUR)
    opt = fs.partition_optimizer(opt or fs.optim.adamw(0.01), mesh=FOUR, axis="data", stage=stage)
    return fs.train_step(loss, opt, mesh=FOUR, batch=P("data"), **options), params


def reproducible(is_exact):
    return {"reproducible": True} if is_exact else {}


def check_equal(step, params, batch, *buffers, steps=2):
    """Run some steps, all of them audited; a difference raises."""
    state = step.init(params)
    for number in range(steps):
        torch.manual_seed(number)
        params, state, *buffers, _ = step(params, state, *buffers, batch)
    assert step.last.is_equal
    assert step.audits == steps


# -- no false alarm --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_exact", [True, False], ids=["bits", "rounding"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("other", range(4))
def test_audit_between_stages_of_zero_passes(stage, other, is_exact, tmp_path):
    step, params = step_of(stage, **reproducible(is_exact))
    step = fs.audit(step, every=1, mesh=HALF, stage=other, folder=tmp_path)
    check_equal(step, params, batch_of())


CASES = {
    "uneven": ({}, {"mesh": HALF}, 13),
    "one device": ({}, {"mesh": fs.make_mesh({"data": 1})}, 16),
    "another order": ({}, {"mesh": fs.make_mesh({"data": 4}, devices=[2, 0, 3, 1])}, 16),
    "two of the devices": ({}, {"mesh": fs.make_mesh({"data": 2}, devices=[3, 1])}, 16),
    "donate": ({"donate": True}, {"mesh": HALF, "stage": 1}, 16),
    "bf16": ({"precision": "bf16"}, {"mesh": HALF, "stage": 1}, 16),
    "accumulate": ({"accumulate": 2}, {"mesh": HALF, "stage": 2}, 16),
    "options": ({}, {"bucket": 0, "prefetch": 0, "live_units": 1}, 16),
    "the same": ({}, {}, 16),
}


@pytest.mark.parametrize("is_exact", [True, False], ids=["bits", "rounding"])
@pytest.mark.parametrize("case", CASES)
def test_audit_of_a_right_layout_passes(case, is_exact, tmp_path):
    options, layout, samples = CASES[case]
    step, params = step_of(3, **options, **reproducible(is_exact))
    step = fs.audit(step, every=1, folder=tmp_path, **layout)
    check_equal(step, params, batch_of(samples))


OPTIMIZERS = {
    "scaled": lambda: fs.optim.loss_scaled(fs.optim.adamw(0.01)),
    "clipped": lambda: fs.optim.chain(
        fs.optim.clip_by_global_norm(0.1), fs.optim.sgd(0.1, momentum=0.9)
    ),
    "owners": lambda: fs.optim.by_label(
        {"muon": fs.optim.muon(0.01), "adam": fs.optim.adamw(0.01)},
        {"a": "muon", "b": "adam", "c": "muon"},
    ),
}


@pytest.mark.parametrize("is_exact", [True, False], ids=["bits", "rounding"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_audit_of_an_optimizer_passes(name, is_exact, tmp_path):
    precision = {"precision": "fp16"} if name == "scaled" else {}
    step, params = step_of(1, OPTIMIZERS[name](), **precision, **reproducible(is_exact))
    step = fs.audit(step, every=1, mesh=HALF, stage=3, folder=tmp_path)
    check_equal(step, params, batch_of())


@pytest.mark.parametrize("is_exact", [True, False], ids=["bits", "rounding"])
@pytest.mark.parametrize("size", [1, 4])
def test_audit_of_tensor_parallel_layers_passes(size, is_exact, tmp_path):
    def loss(params, batch):
        x, y = batch
        hidden = torch.tanh(x @ params["a"] + params["b"])
        return (fs.psum(hidden @ params["c"], "model") - y).square().mean()

    rules = {"a": P(None, "model"), "b": P("model"), "c": P("model")}
    params = fs.shard_params(full_params(), fs.fsdp("data", within=rules), mesh=TENSOR)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=TENSOR, axis="data", stage=3)
    options = reproducible(is_exact)
    step = fs.train_step(loss, opt, mesh=TENSOR, batch=P("data"), local="model", **options)
    other = fs.make_mesh({"data": size, "model": 2})
    step = fs.audit(step, every=1, mesh=other, stage=1, folder=tmp_path)
    check_equal(step, params, batch_of())


@pytest.mark.parametrize("is_exact", [True, False], ids=["bits", "rounding"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_audit_of_stages_passes(name, is_exact, tmp_path):
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule(name, stages=2, microbatches=4)
    torch.manual_seed(0)
    stages = fs.pipeline.split_stages(
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 4)), 2
    )
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=3)

    def loss(y, batch):
        return (y - batch[1]).square().mean()

    options = reproducible(is_exact)
    step = fs.train_step(
        stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=loss, **options
    )
    pair = fs.make_mesh({"pipe": 2, "data": 1})
    other = fs.pipeline_schedule("gpipe", stages=2, microbatches=8)
    step = fs.audit(step, every=1, mesh=pair, schedule=other, stage=1, folder=tmp_path)
    check_equal(step, params, batch_of())


def test_audit_of_stages_moves_them_to_their_devices(tmp_path):
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("interleaved", stages=4, devices=2, microbatches=4)
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    stages = fs.pipeline.split_stages(nn.Sequential(*layers), 4)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=3)
    step = fs.train_step(
        stages,
        opt,
        mesh=mesh,
        batch=P("data"),
        schedule=schedule,
        loss=lambda y, batch: (y - batch[1]).square().mean(),
        reproducible=True,
    )
    other = fs.pipeline_schedule("zbv", stages=4, devices=2, microbatches=4)
    assert other.placement != schedule.placement
    step = fs.audit(step, every=1, schedule=other, folder=tmp_path)
    check_equal(step, params, batch_of())


@pytest.mark.parametrize("is_exact", [True, False], ids=["bits", "rounding"])
def test_audit_of_buffers_passes(is_exact, tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    sync = {} if is_exact else {"sync_batchnorm": "data"}
    apply, params, buffers = fs.functionalize(module, **sync)

    def loss(params, buffers, batch):
        y, buffers = apply(params, buffers, batch[0])
        return (y - batch[1]).square().mean(), buffers

    params = fs.shard_params(params, fs.fsdp("data"), mesh=FOUR)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=FOUR, axis="data", stage=3)
    options = reproducible(is_exact)
    step = fs.train_step(loss, opt, mesh=FOUR, batch=P("data"), has_buffers=True, **options)
    step = fs.audit(step, every=1, mesh=HALF, stage=1, folder=tmp_path, digest=True)
    check_equal(step, params, batch_of(), buffers)


def test_audit_of_dropout_and_metrics_passes(tmp_path):
    def loss(params, batch):
        x, y = batch
        hidden = nn.functional.dropout(torch.tanh(x @ params["a"] + params["b"]), 0.5)
        losses = (hidden @ params["c"] - y).square().mean(1)
        return losses.mean(), {"largest": losses.detach().mean(), "rows": losses.detach()}

    aux = {"largest": "mean", "rows": "rows"}
    step, params = step_of(2, loss=loss, reproducible=True, aux=aux)
    step = fs.audit(step, every=1, mesh=HALF, stage=3, folder=tmp_path)
    check_equal(step, params, batch_of())


def test_audit_of_experts_passes(tmp_path):
    torch.manual_seed(0)
    params = {
        "router": torch.randn(6, 4),
        "up": torch.randn(4, 6, 8),
        "down": torch.randn(4, 8, 6),
    }
    rules = {"router": P(), "up": P("data"), "down": P("data")}

    def loss(params, batch):
        x, y = batch
        weights = (x @ params["router"]).softmax(-1)
        up = fs.all_gather(params["up"], "data")
        down = fs.all_gather(params["down"], "data")
        outputs = torch.einsum("bi,eij->bej", x, up).relu()
        outputs = torch.einsum("bej,ejk->bek", outputs, down)
        return ((outputs * weights[..., None]).sum(1)[:, :4] - y).square().mean()

    arrays = fs.shard_params(params, rules, mesh=FOUR)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=FOUR, axis="data", stage=1)
    step = fs.train_step(loss, opt, mesh=FOUR, batch=P("data"), local="data")
    turned = fs.make_mesh({"data": 4}, devices=[1, 0, 3, 2])
    step = fs.audit(step, every=1, mesh=turned, folder=tmp_path)
    check_equal(step, arrays, batch_of())


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("stage", [1, 3])
def test_audit_of_state_on_the_host_passes(stage, update_on, tmp_path):
    params = fs.shard_params(full_params(), fs.fsdp("data") if stage == 3 else P(), mesh=FOUR)
    opt = fs.partition_optimizer(
        fs.optim.adamw(0.01),
        mesh=FOUR,
        axis="data",
        stage=stage,
        state_memory="host",
        update_on=update_on,
    )
    step = fs.train_step(loss_fn, opt, mesh=FOUR, batch=P("data"), reproducible=True)
    step = fs.audit(step, every=1, mesh=HALF, stage=2, folder=tmp_path)
    check_equal(step, params, batch_of())


@pytest.mark.parametrize(("stage", "other"), [(3, 1), (1, 3)])
def test_audit_of_tied_frozen_and_other_leaves_passes(stage, other, tmp_path):
    torch.manual_seed(0)
    tied = torch.randn(8, 8)
    full = {
        "first": torch.randn(6, 8),
        "tied": [tied, tied],
        "ids": torch.arange(4),
        "unused": torch.randn(3),
        "frozen": torch.randn(8),
        "word": "tanh",
    }

    def loss(params, batch):
        hidden = torch.tanh(batch[0] @ params["first"] + params["frozen"]) @ params["tied"][0]
        y = (hidden @ params["tied"][1].T)[:, params["ids"]]
        return (y - batch[1]).square().mean()

    params = fs.shard_params(full, fs.fsdp("data") if stage == 3 else P(), mesh=FOUR)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=FOUR, axis="data", stage=stage)
    step = fs.train_step(
        loss, opt, mesh=FOUR, batch=P("data"), frozen=["frozen"], reproducible=True
    )
    step = fs.audit(step, every=1, mesh=HALF, stage=other, folder=tmp_path)
    check_equal(step, params, batch_of())


@pytest.mark.parametrize("is_exact", [True, False], ids=["bits", "rounding"])
def test_audit_of_two_axes_and_a_sharded_batch_passes(is_exact, tmp_path):
    mesh = fs.make_mesh({"copies": 2, "data": 2})
    params = fs.shard_params(full_params(), fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=3)
    spec = P(("copies", "data"))
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=spec, **reproducible(is_exact))
    other = fs.make_mesh({"copies": 1, "data": 4})
    step = fs.audit(step, every=1, mesh=other, folder=tmp_path)
    check_equal(step, params, fs.device_put(batch_of(), fs.Layout(mesh, spec)))


def test_audit_of_master_weights_passes(tmp_path):
    full = {name: x.bfloat16() for name, x in full_params().items()}
    params = fs.shard_params(full, fs.fsdp("data"), mesh=FOUR)
    opt = fs.optim.with_master_weights(fs.optim.adamw(0.01))
    opt = fs.partition_optimizer(opt, mesh=FOUR, axis="data", stage=3)
    step = fs.train_step(loss_fn, opt, mesh=FOUR, batch=P("data"))
    step = fs.audit(step, every=1, mesh=HALF, stage=1, folder=tmp_path)
    check_equal(step, params, tuple([x.bfloat16() for x in batch_of()]))


def test_audit_of_compressed_gradients_keeps_the_mesh(tmp_path):
    params = fs.shard_params(full_params(), P(), mesh=FOUR)
    compress = {"data": fs.comm.power_sgd(rank=1)}
    opt = fs.partition_optimizer(
        fs.optim.sgd(0.1), mesh=FOUR, axis="data", stage=1, compress=compress
    )
    step = fs.train_step(loss_fn, opt, mesh=FOUR, batch=P("data"))
    check_equal(fs.audit(step, every=1, bucket=0, folder=tmp_path), params, batch_of())
    with pytest.raises(ValueError, match="the optimizer compresses gradients"):
        fs.audit(step, mesh=HALF)


# -- a step repeats itself -------------------------------------------------------------------------


def check_repeated(step, params, batch):
    """Run a step four times from one state; the records of all but the first are equal."""
    state = step.init(params)
    records = []
    for _ in range(4):
        torch.manual_seed(0)
        arguments = [copies_of(tree) for tree in (params, state, batch)]
        records.append(run_recorded(step, arguments).record)
    _, second, *others = records
    for record in others:
        assert faults(second, record) == []
        assert sent_otherwise(second, record) == []


@pytest.mark.parametrize("name", [None, *OPTIMIZERS])
@pytest.mark.parametrize("stage", range(4))
def test_record_of_a_step_is_equal_when_it_is_repeated(stage, name):
    precision = {"precision": "fp16"} if name == "scaled" else {}
    step, params = step_of(stage, OPTIMIZERS[name]() if name else None, **precision)
    check_repeated(step, params, batch_of(13))


def test_record_of_a_compressed_step_is_equal_when_it_is_repeated():
    params = fs.shard_params(full_params(), P(), mesh=FOUR)
    compress = {"data": fs.comm.power_sgd(rank=1)}
    opt = fs.partition_optimizer(
        fs.optim.sgd(0.1), mesh=FOUR, axis="data", stage=1, compress=compress
    )
    step = fs.train_step(loss_fn, opt, mesh=FOUR, batch=P("data"))
    check_repeated(step, params, batch_of())


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_record_of_stages_is_equal_when_it_is_repeated(name):
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule(name, stages=2, microbatches=4)
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)]
    stages = fs.pipeline.split_stages(nn.Sequential(*layers), 2)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=3)

    def loss(y, batch):
        return (y - batch[1]).square().mean()

    step = fs.train_step(stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=loss)
    check_repeated(step, params, batch_of())


# -- what it returns, and when ---------------------------------------------------------------------


@pytest.mark.parametrize("is_exact", [True, False], ids=["bits", "rounding"])
def test_audited_step_returns_what_the_step_returns(is_exact, tmp_path):
    def loss(params, batch):
        hidden = nn.functional.dropout(torch.tanh(batch[0] @ params["a"] + params["b"]), 0.0)
        return (hidden @ params["c"] - batch[1]).square().mean() + 0 * torch.rand(())

    def train(every):
        torch.manual_seed(0)
        step, params = step_of(3, loss=loss, **reproducible(is_exact))
        if every:
            step = fs.audit(step, every=every, mesh=HALF, stage=1, folder=tmp_path)
        state = step.init(params)
        for _ in range(4):
            params, state, metrics = step(params, state, batch_of())
        return fs.unshard((params, state)), metrics["loss"], torch.rand(2)

    expected = train(0)
    for every in (1, 3):
        actual = train(every)
        pairs = zip(flatten(actual)[0], flatten(expected)[0], strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_audit_is_of_each_nth_call(tmp_path):
    step, params = step_of(0)
    step = fs.audit(step, every=3, folder=tmp_path)
    state = step.init(params)
    audited = []
    for number in range(1, 8):
        params, state, _ = step(params, state, batch_of())
        if step.audits > len(audited):
            audited.append(number)
    assert audited == [3, 6]
    assert step.last.step == 6


def test_calls_continue_those_of_an_earlier_run(tmp_path):
    step, params = step_of(0)
    step = fs.audit(step, every=3, folder=tmp_path)
    step.calls = 500
    step(params, step.init(params), batch_of())
    assert step.last.step == 501


def test_audit_counts_no_bytes_of_its_own(tmp_path):
    def sent(wrap):
        step, params = step_of(1)
        step = wrap(step)
        state = step.init(params)
        with fs.ledger() as comm:
            step(params, state, batch_of())
        return comm.bytes(), comm.calls()

    audited = sent(lambda step: fs.audit(step, every=1, mesh=HALF, stage=3, folder=tmp_path))
    assert audited == sent(lambda step: step)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every": 0}, "every must be an integer >= 1; got 0"),
        ({"on_difference": "stop"}, 'on_difference must be "raise" or "warn"'),
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, as in ZeRO; got 4"),
        ({"program": "train.py"}, 'program must be "FILE:FUNCTION"'),
        ({"mesh": fs.make_mesh({"data": 2}, runtime="abstract")}, None),
    ],
)
def test_audit_refuses_wrong_arguments(options, error):
    step, _ = step_of(0)
    if error is None:
        step = step.replace(**options)
        options, error = {}, "an abstract mesh has no values"
    with pytest.raises(ValueError, match=error):
        fs.audit(step, **options)


def test_audit_refuses_other_sizes_of_local_axes():
    params = fs.shard_params(full_params(), P(), mesh=TENSOR)
    del params
    step = fs.train_step(loss_fn, fs.optim.sgd(0.1), mesh=TENSOR, batch=P("data"), local="model")
    with pytest.raises(ValueError, match="same size along the local axis model, 2; got 1"):
        fs.audit(step, mesh=fs.make_mesh({"data": 4, "model": 1}))


def test_audit_refuses_other_numbers_of_slices():
    step, _ = step_of(0, reproducible=True)
    with pytest.raises(ValueError, match="as many slices, 8, to have equal bits; got 16"):
        fs.audit(step, slices=16)
    with pytest.raises(ValueError, match="8 slices, which 3 devices do not share evenly"):
        fs.audit(step, mesh=fs.make_mesh({"data": 3}))


def test_difference_by_dropout_asks_for_draws(tmp_path):
    def loss(params, batch):
        return loss_fn(params, (nn.functional.dropout(batch[0], 0.5), batch[1]))

    step, params = step_of(1, loss=loss)
    step = fs.audit(step, every=1, mesh=HALF, folder=tmp_path)
    with pytest.raises(AuditError, match=r"random numbers, .* only with reproducible=True"):
        step(params, step.init(params), batch_of())


def test_difference_beyond_rounding_names_causes_and_measure(tmp_path):
    """BatchNorm has other statistics on another number of devices; updates take equal gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    apply, params, buffers = fs.functionalize(module)

    def loss(params, buffers, batch):
        y, buffers = apply(params, buffers, batch[0])
        return (y - batch[1]).square().mean(), buffers

    params = fs.shard_params(params, P(), mesh=FOUR)
    step = fs.train_step(loss, fs.optim.sgd(0.1), mesh=FOUR, batch=P("data"), has_buffers=True)
    step = fs.audit(step, every=1, mesh=HALF, folder=tmp_path)
    with pytest.raises(AuditError) as error:
        step(params, step.init(params), buffers, batch_of())
    text = str(error.value)
    for cause in ("wrong reduction", "BatchNorm", "number of devices", "dropout"):
        assert cause in text
    lines = text.splitlines()
    assert "  parameter  equal up to rounding" in lines
    assert "  state      equal up to rounding" in lines


def test_audit_refuses_a_function():
    with pytest.raises(ValueError, match=r"step must be a step of fs\.train_step; got function"):
        fs.audit(loss_fn)


# -- a difference ----------------------------------------------------------------------------------


def mistaken_loss(params, batch):
    """A loss that is another one on two devices."""
    from fshard.mesh.spmd.scope import here

    scope = here()
    assert scope is not None
    return loss_fn(params, batch) * (1.5 if scope.mesh.size == 2 else 1.0)


def make():
    """Return the audited step of a mistaken program, and arguments as at its start."""
    step, params = step_of(1, loss=mistaken_loss, reproducible=True)
    step = fs.audit(step, every=2, mesh=HALF, stage=3, folder="audits")
    return step, params, step.init(params), batch_of()


@pytest.fixture(scope="module")
def audited_folder(tmp_path_factory):
    """The folder of a step that differed."""
    folder = tmp_path_factory.mktemp("audited")
    step, params, state, batch = make()
    step.folder = folder
    params, state, _ = step(params, state, batch)
    with pytest.raises(AuditError):
        step(params, state, batch)
    return folder / "step-2"


def test_difference_raises_and_is_replayed_with_the_same_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    step, params, state, batch = make()
    params, state, _ = step(params, state, batch)
    with pytest.raises(AuditError) as error:
        step(params, state, batch)
    table = (tmp_path / "audits" / "step-2" / "table.txt").read_text()
    assert str(error.value).startswith(table)
    assert "another loss in slice 0" in table
    assert json.loads((tmp_path / "audits" / "step-2" / "audit.json").read_text())["step"] == 2

    again = fs.replay("audits/step-2", *make())
    assert f"{again.text}\n" == table
    assert not again.is_equal

    assert main(["replay", "audits/step-2", f"{__file__}:make"]) == 1
    assert capsys.readouterr().out == table


def test_difference_replaces_the_folder_of_an_earlier_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = []
    for shift in (0.0, 1.0):
        step, params, state, (x, y) = make()
        params, state, _ = step(params, state, (x, y + shift))
        with pytest.raises(AuditError):
            step(params, state, (x, y + shift))
        tables.append(fs.replay("audits/step-2", *make()).text)
        assert tables[-1] == step.last.text
    assert tables[0] != tables[1]


def test_replay_in_a_new_other_layout_has_the_arguments_of_the_run(audited_folder):
    """The step against one device has the losses of the run on four; the table has both layouts."""
    recorded = (audited_folder / "table.txt").read_text()
    step, params = step_of(1, loss=mistaken_loss, reproducible=True)
    same = fs.audit(step.replace(slices=8), mesh=HALF, stage=3)  # 8 is the default
    assert fs.replay(audited_folder, same, params, same.init(params), batch_of()).text in recorded

    one = fs.audit(step, mesh=fs.make_mesh({"data": 1}))
    outcome = fs.replay(audited_folder, one, params, one.init(params), batch_of())
    assert outcome.is_equal
    assert outcome.text.endswith(
        "the other layout, recorded: data=2, ZeRO 3, reproducible=True, slices=8; "
        "replayed: data=1, ZeRO 1, reproducible=True, slices=8"
    )
    option = fs.audit(step, mesh=HALF, stage=3, bucket=0)
    outcome = fs.replay(audited_folder, option, params, option.init(params), batch_of())
    assert "replayed: data=2, ZeRO 3, reproducible=True, bucket=0" in outcome.text


OTHER_STEPS = {
    "stage": (2, {"reproducible": True}, "ZeRO 2"),
    "slices": (1, {"reproducible": True, "slices": 16}, "slices=16"),
    "reproducible": (1, {}, " data=4, ZeRO 1. Make"),
    "precision": (1, {"reproducible": True, "precision": "bf16"}, "precision=bf16"),
    "accumulate": (1, {"reproducible": True, "accumulate": 2}, "accumulate=2"),
}


@pytest.mark.parametrize("name", OTHER_STEPS)
def test_replay_of_another_step_raises(name, audited_folder):
    stage, options, text = OTHER_STEPS[name]
    step, params = step_of(stage, loss=mistaken_loss, **options)
    step = fs.audit(step, mesh=HALF, stage=3)
    with pytest.raises(AuditError, match=r"recorded: data=4, ZeRO 1, .*; replayed: ") as error:
        fs.replay(audited_folder, step, params, step.init(params), batch_of())
    assert text in str(error.value).partition("replayed:")[2]


def test_replay_of_a_step_on_another_mesh_raises(audited_folder):
    params = fs.shard_params(full_params(), P(), mesh=HALF)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=HALF, axis="data", stage=1)
    step = fs.train_step(loss_fn, opt, mesh=HALF, batch=P("data"), reproducible=True)
    step = fs.audit(step, stage=3)
    with pytest.raises(AuditError, match=r"recorded: data=4, .* replayed: data=2, "):
        fs.replay(audited_folder, step, params, step.init(params), batch_of())


def test_replay_without_a_folder_names_it(tmp_path):
    with pytest.raises(AuditError, match=r"must be one that fs\.audit has written"):
        fs.replay(tmp_path / "step-1", *make())


def test_command_without_a_program_asks_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    step, params, state, batch = make()
    params, state, _ = step(params, state, batch)
    with pytest.raises(AuditError):
        step(params, state, batch)
    assert main(["replay", "audits/step-2"]) == 2
    assert "FILE:FUNCTION" in capsys.readouterr().err
    assert main(["replay", "audits/step-3"]) == 2
    assert "has no audit.json" in capsys.readouterr().err


def test_replay_with_wrong_arguments_names_them(audited_folder):
    step, params, state, batch = make()
    with pytest.raises(ValueError, match=r"step, params, state, batch\); got 4, not 5"):
        fs.replay(audited_folder, step, params, state)
    with pytest.raises(ValueError, match=r"step, params, state, batch\); got 6, not 5"):
        fs.replay(audited_folder, step, params, state, {}, batch)
    for wrong in (step.step, params, None, make):
        with pytest.raises(ValueError, match=r"step must be a step of fs\.audit; got"):
            fs.replay(audited_folder, wrong, params, state, batch)
    for wrong in (batch, None, 3):
        with pytest.raises((ValueError, FshardError), match="params"):
            fs.replay(audited_folder, step, wrong, state, batch)


def test_command_of_a_program_imports_what_is_beside_it(
    audited_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("from tests.auditing.test_audit import make\n")
    program = tmp_path / "program.py"
    program.write_text("import beside\ndef make():\n    return beside.make()\n")
    assert main(["replay", str(audited_folder), f"{program}:make"]) == 1
    assert capsys.readouterr().err == ""


BROKEN = {
    "no function": ("", "has no function make"),
    "syntax": ("def make(:\n", "SyntaxError"),
    "import": ("import not_there\n", "ModuleNotFoundError: No module named 'not_there'"),
    "exception": ("def make():\n    raise KeyError('w\\nv')\n", "KeyError: "),
    "exit": ("raise SystemExit(1)\n", "SystemExit: 1"),
    "result": ("def make():\n    return 3\n", "(step, params, state, batch)"),
    "short": ("def make():\n    return ()\n", "(step, params, state, batch)"),
    "in the step": (
        "from tests.auditing.test_audit import make as right\n"
        "def make():\n"
        "    step, params, state, (x, y) = right()\n"
        "    return step, params, state, (x[:3, :2], y)\n",
        "batch",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_command_of_a_broken_program_names_it_in_a_line(name, audited_folder, tmp_path, capsys):
    """Status 1 is only for layouts that differ again."""
    text, expected = BROKEN[name]
    program = tmp_path / "broken.py"
    program.write_text(text)
    assert main(["replay", str(audited_folder), f"{program}:make"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fshard replay: {program}:make failed: ")
    assert expected in line


@pytest.mark.parametrize("on_difference", ["raise", "warn"])
def test_exception_in_the_audit_says_so_and_leaves_the_results(on_difference, tmp_path):
    """The oracle of the results is the step alone, which donates its arguments too."""
    from fshard.mesh.spmd.scope import here

    def loss(params, batch):
        scope = here()
        assert scope is not None
        if scope.mesh.size == 2:
            torch.rand(1)
            raise torch.OutOfMemoryError("no memory")
        return loss_fn(params, batch)

    torch.manual_seed(0)
    alone, params = step_of(1, loss=loss, donate=True)
    expected = alone(params, alone.init(params), batch_of())
    drawn = torch.get_rng_state()

    torch.manual_seed(0)
    alone, params = step_of(1, loss=loss, donate=True)
    step = fs.audit(alone, every=1, mesh=HALF, folder=tmp_path, on_difference=on_difference)
    state = step.init(params)
    with pytest.raises(torch.OutOfMemoryError, match="no memory") as error:
        step(params, state, batch_of())
    notes = " ".join(error.value.__notes__)
    assert "the audit of step 1, data=4, ZeRO 1 against data=2, ZeRO 1," in notes
    assert "The step itself had succeeded" in notes
    for x, y in zip(flatten(step.results)[0], flatten(expected)[0], strict=True):
        assert torch.equal(fs.unshard(x), fs.unshard(y))
    assert torch.equal(torch.get_rng_state(), drawn)

    params, state, _ = step.results
    step.every = 2
    step.calls = 2
    step(params, state, batch_of())
    assert step.results is None


def test_difference_may_warn_and_go_on(tmp_path):
    step, params = step_of(1, loss=mistaken_loss, reproducible=True)
    step = fs.audit(step, every=1, mesh=HALF, folder=tmp_path, on_difference="warn")
    state = step.init(params)
    with pytest.warns(RuntimeWarning, match="step 1: .* different bits"):
        params, state, _ = step(params, state, batch_of())
    with pytest.warns(RuntimeWarning, match="step 2: .* different bits"):
        step(params, state, batch_of())


def test_difference_within_rounding_passes_and_beyond_it_raises(tmp_path):
    """Without reproducible mode a factor of 1 + 1e-7 is rounding, 1.01 is not."""
    from fshard.mesh.spmd.scope import here

    def audited(factor):
        def loss(params, batch):
            is_other = here().mesh.size == 2
            return loss_fn(params, batch) * (factor if is_other else 1.0)

        step, params = step_of(1, loss=loss)
        step = fs.audit(step, every=1, mesh=HALF, folder=tmp_path)
        return step(params, step.init(params), batch_of()), step

    _, step = audited(1 + 1e-7)
    assert "equal up to rounding" in step.last.text
    with pytest.raises(AuditError, match="disagree in the reduced gradient"):
        audited(1.01)


def test_step_that_does_not_repeat_itself_is_said_so(tmp_path):
    calls = []

    def loss(params, batch):
        calls.append(1)
        return loss_fn(params, batch) * (1 + 0.1 * len(calls))

    step, params = step_of(1, loss=loss, reproducible=True)
    step = fs.audit(step, every=1, mesh=HALF, folder=tmp_path)
    with pytest.raises(AuditError, match="neither run repeats itself"):
        step(params, step.init(params), batch_of())


def test_difference_is_raised_on_all_devices_of_a_run(tmp_path, monkeypatch):
    """Each virtual device runs the program, as a process does."""
    monkeypatch.chdir(tmp_path)

    def main():
        mesh = fs.make_mesh({"data": 4})
        half = fs.make_mesh({"data": 2}, devices=[1, 2])
        params = fs.shard_params(full_params(), fs.fsdp("data"), mesh=mesh)
        opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=3)
        step = fs.train_step(mistaken_loss, opt, mesh=mesh, batch=P("data"), reproducible=True)
        step = fs.audit(step, every=1, mesh=half, stage=1)
        with pytest.raises(AuditError) as error:
            step(params, step.init(params), batch_of())
        return str(error.value)

    texts = fs.run(main, mesh=FOUR)
    assert len({*texts}) == 1
    devices = "device 0 (data=0) in this one, device 1 (data=0) in the other one"
    assert f"{devices}. One of the two is wrong; an audit in a third layout" in texts[0]


# -- replicas --------------------------------------------------------------------------------------


def test_digest_names_the_leaf_and_the_device_of_a_replica(tmp_path):
    step, params = step_of(0)
    step = fs.audit(step, every=100, digest=True, folder=tmp_path)
    state = step.init(params)
    params, state, _ = step(params, state, batch_of())
    x = params["c"]
    shards = [shard.clone() for shard in x.shards]
    shards[2][0, 1] += 1
    params = params | {"c": fs.Sharded(x.shape, x.layout, tuple(shards))}
    with pytest.raises(AuditError) as error:
        step(params, state, batch_of())
    text = str(error.value)
    assert text.startswith("step 2: replicas must be equal on all devices")
    assert "parameter c has other values on device 2 (data=2)" in text
    assert "parameter a" not in text


@pytest.mark.parametrize("shape", [{"data": 2}, {"data": 2, "model": 2}])
def test_digest_of_two_holders_names_both(shape, tmp_path):
    """Neither of two is wrong more than the other."""
    mesh = fs.make_mesh(shape)
    params = fs.shard_params(full_params(), P("model") if "model" in shape else P(), mesh=mesh)
    local = {"local": "model"} if "model" in shape else {}
    step = fs.train_step(zero_loss, fs.optim.sgd(0.0), mesh=mesh, batch=P("data"), **local)
    step = fs.audit(step, every=100, digest=True, folder=tmp_path)
    x = params["c"]
    shards = [shard.clone() for shard in x.shards]
    shards[0][0, 1] += 1
    params = params | {"c": fs.Sharded(x.shape, x.layout, tuple(shards))}
    with pytest.raises(AuditError) as error:
        step(params, step.init(params), batch_of())
    second = "device 2 (data=1, model=0)" if local else "device 1 (data=1)"
    first = "device 0 (data=0, model=0)" if local else "device 0 (data=0)"
    text = f"parameter c differs between {first} and {second}, after the step"
    assert text in str(error.value)
    assert "most" not in str(error.value)


def zero_loss(params, batch):
    """A loss of 0 on all devices, of whole parameters or of shards."""
    total = batch[0].mean()
    for x in params.values():
        total = total + x.mean()
    return total * 0.0


@pytest.mark.parametrize("stage", range(4))
def test_digest_costs_one_psum_of_8_bytes(stage, tmp_path):
    def sent(digest):
        step, params = step_of(stage)
        if digest:
            step = fs.audit(step, every=100, digest=True, folder=tmp_path)
        state = step.init(params)
        with fs.ledger() as comm:
            step(params, state, batch_of())
        return comm.calls(), comm.bytes()

    calls, size = sent(digest=False)
    # A ring sends 2 (n - 1) / n of the 8 bytes.
    assert sent(digest=True) == (calls + 1, size + 12)


def test_audit_names_replicas_that_differed_before(tmp_path):
    step, params = step_of(0, reproducible=True)
    step = fs.audit(step, every=1, mesh=HALF, folder=tmp_path, on_difference="warn")
    state = step.init(params)
    x = params["b"]
    shards = [shard.clone() for shard in x.shards]
    shards[3][1] += 1
    params = params | {"b": fs.Sharded(x.shape, x.layout, tuple(shards))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(params, state, batch_of())
    (finding,) = step.last.findings
    assert (finding.phase, finding.device, finding.leaf) == ("replicas", 3, "parameter b")
