"""A module of a user's own has in the lab what a Transformer by sizes has: code, drags and proofs.

Oracles: torch's SGD on one device, on the rows of the program; the layouts that were chosen.
"""

import copy
import io
import queue
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import PlanError
from fshard.laboratory.answer import Answer
from fshard.laboratory.code import program_code
from fshard.laboratory.engine import Engine
from fshard.laboratory.proof import prove, training_batch, why_not_proven
from fshard.laboratory.state import LabState
from fshard.laboratory.subject import Subject
from tests.laboratory.own_modules import SUBJECTS, Tower, images, loss_of_classes, tower

PLANS = {
    "data": {},
    "tensor": {"tensor": 2},
    "stages": {"pipeline": 2},
    "zero 3": {"zero_stage": 3},
    "stages of layers": {"pipeline": 2, "tensor": 2, "zero_stage": 1},
    "stages, recomputed": {"pipeline": 2, "recompute": "selective"},
    "recomputed": {"recompute": "full", "microbatches": 2},
}
CASES = []
for kind in SUBJECTS:
    for name in PLANS:
        # One subject of each form of batch; the others meet layers of other kinds.
        is_first = kind in ("tower", "gpt2") and name not in ("recomputed", "stages, recomputed")
        is_of_layers = kind == "images" and name in ("tensor", "stages of layers")
        marks = [] if is_first or is_of_layers else [pytest.mark.thorough]
        CASES.append(pytest.param(kind, name, marks=marks))


class Opaque(nn.Module):
    """Calls a function that arrays do not have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.fft.fft(self.linear(x)).real


def answer_of(subject, plan, overrides=None):
    state = LabState(model=None, devices=4, plan=plan, overrides=overrides or {}, optimizer="sgd")
    return Answer(state, subject)


def losses_of_code(answer):
    """Return the losses that the program of an answer prints, given what `fs.lab` was given."""
    subject = answer.subject
    code = program_code(answer.state, answer.model)
    names = {"model": subject.module, "batch": subject.batch, "loss": subject.loss}
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "program", "exec"), names)
    return [float(text) for text in printed.getvalue().split()]


def losses_on_one_device(subject, rows):
    """Return the losses of three steps of SGD, on a batch whose rows are repeated."""
    model = copy.deepcopy(subject.module)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    is_by_name = isinstance(subject.batch, dict)
    values = subject.batch.values() if is_by_name else subject.batch
    repeated = [torch.cat([x] * rows)[:rows] for x in values]
    losses = []
    for _ in range(3):
        if is_by_name:
            loss = model(**dict(zip(subject.batch, repeated, strict=True))).loss
        else:
            loss = subject.loss(model(repeated[0]), repeated)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_code_of_a_module_trains_as_one_device(kind, name):
    answer = answer_of(SUBJECTS[kind](), PLANS[name])
    expected = losses_on_one_device(SUBJECTS[kind](), answer.plan.rows_of_step)

    assert losses_of_code(answer) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_proof_of_a_module_is_within_rounding(kind, name):
    answer = answer_of(SUBJECTS[kind](), PLANS[name])
    before = copy.deepcopy(answer.subject.module.state_dict())

    assert why_not_proven(answer) == ""
    result = prove(answer, lambda: False)

    assert result["verdict"] in ("equal", "rounding")
    after = answer.subject.module.state_dict()
    assert all([torch.equal(x, after[key]) for key, x in before.items()])


@pytest.mark.parametrize(
    ("kind", "plan", "pattern", "dims", "expected"),
    [
        ("tower", {"zero_stage": 3}, "blocks.*.up.weight", {"data": 1}, [[], ["data"]]),
        ("tower", {"tensor": 2}, "blocks.*.up.weight", {"model": 0}, [["model"], []]),
        ("tower", {"pipeline": 2, "tensor": 2}, "head.weight", {"model": None}, [[], []]),
        ("images", {}, "blocks.*.conv.weight", {"data": 2}, [[], [], ["data"], []]),
        ("gpt2", {"tensor": 2}, "transformer.h.*.mlp.c_fc.weight", {"model": 0}, [["model"], []]),
        ("gpt2", {"tensor": 2}, "transformer.wte.weight", {"model": 1}, [[], ["model"]]),
    ],
    ids=["zero", "layers", "stages", "convolution", "stored as in, out", "tied"],
)
def test_override_of_a_module_is_drawn_trained_and_proven(kind, plan, pattern, dims, expected):
    answer = answer_of(SUBJECTS[kind](), plan, {pattern: dims})
    losses = losses_on_one_device(SUBJECTS[kind](), answer.plan.rows_of_step)

    (row,) = [row for row in answer.layouts()["leaves"] if row["pattern"] == pattern]

    assert row["dims"] == expected
    assert losses_of_code(answer) == pytest.approx(losses, rel=1e-4)
    assert prove(answer, lambda: False)["verdict"] in ("equal", "rounding")


def test_drag_of_a_module_is_answered_with_its_proof():
    messages = queue.Queue()
    engine = Engine(tower(), LabState(model=None, devices=4), messages.put)
    state = LabState(
        model=None,
        devices=4,
        plan={"zero_stage": 3},
        overrides={"blocks.*.up.weight": {"data": 0}},
    )

    reply = engine.reply({"id": 1, "slot": "A", "state": state.to_json()})
    verdicts = [messages.get(timeout=120)["verdict"] for _ in range(2)]

    assert reply["kind"] == "answer"
    assert '"blocks.*.up.weight": P("data")' in reply["code"]
    assert verdicts == ["running", "rounding"]
    engine.close()


def test_proof_of_a_module_sees_a_loss_that_is_no_mean_over_samples():
    def sum_over_samples(output, batch):
        return loss_of_classes(output, batch) * len(output)

    subject = Subject(Tower(), tower().batch, sum_over_samples)

    result = prove(answer_of(subject, {}), lambda: False)

    assert result["verdict"] == "differs"


@pytest.mark.parametrize("is_training", [True, False])
def test_module_with_dropout_has_no_proof(is_training):
    subject = tower(nn.Dropout)
    subject.module.train(is_training)  # a step trains it either way

    assert "dropout" in why_not_proven(answer_of(subject, {}))


def test_module_whose_buffers_change_has_code_and_no_proof():
    subject = images()
    subject.module.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16))
    answer = answer_of(subject, {"zero_stage": 3})

    assert "stem.1.running_mean changes in each forward" in why_not_proven(answer)
    assert len(losses_of_code(answer)) == 3


def test_module_without_values_has_no_proof():
    subject = Subject(Tower().to("meta"), tower().batch, loss_of_classes)

    assert "on the meta device" in why_not_proven(answer_of(subject, {}))


def test_module_that_raises_with_values_has_its_error_instead_of_a_proof():
    class Refusing(nn.Module):
        def forward(self, x):
            if not x.is_meta:
                raise TypeError("values are not welcome")
            return x

    messages = queue.Queue()
    engine = Engine(tower(Refusing), LabState(model=None, devices=2), messages.put)

    engine.reply({"id": 1, "slot": "A", "state": None})

    assert messages.get(timeout=120)["text"] == "TypeError: values are not welcome"
    engine.close()


def test_ledger_of_stages_names_the_lines_of_the_layers():
    lines_by_plan = []
    for plan in ({"tensor": 2}, {"tensor": 2, "pipeline": 2}):
        (shown,) = answer_of(tower(), plan).document()["plans"]
        lines_by_plan.append({row["site"] for row in shown["rows"]})

    full, staged = lines_by_plan

    assert staged == full
    assert len(full) == 3  # two lines of the model, and "" of the step


def test_weight_of_a_layer_that_runs_unsharded_has_the_reason():
    subject = tower(Opaque)

    leaves = answer_of(subject, {"tensor": 2}).layouts()["leaves"]

    (row,) = [row for row in leaves if row["pattern"] == "more.linear.weight"]
    assert row["why"].startswith("more runs unsharded: ")


@pytest.mark.parametrize("rows_given", [1, 4])
def test_batch_of_a_proof_has_other_rows_within_the_bounds_of_those_given(rows_given):
    floats = torch.tensor([[0.0, -2.0, float("-inf")]]).repeat(rows_given, 1)
    ids = torch.arange(9).repeat(rows_given, 1)
    mask = torch.tensor([[True, False]]).repeat(rows_given, 1)
    subject = Subject(Tower(), {"floats": floats, "ids": ids, "mask": mask})

    batch = training_batch(answer_of(subject, {"rows": 2}))

    assert [len(x) for x in batch.values()] == [8, 8, 8]
    assert [x.dtype for x in batch.values()] == [floats.dtype, ids.dtype, mask.dtype]
    for row in range(8):
        zero, number, infinity = batch["floats"][row].tolist()
        assert (zero, infinity) == (0.0, float("-inf"))
        assert -2 <= number <= -1
        assert sorted(batch["ids"][row].tolist()) == [*range(9)]
        assert batch["mask"][row].tolist() == [True, False]
    assert len({tuple(row) for row in batch["floats"].tolist()}) == 8
    assert len({tuple(row) for row in batch["ids"].tolist()}) == 8


# -- as values of Python ---------------------------------------------------------------------------


def test_state_of_a_module_is_used_with_the_module_alone():
    """A state has no module: without it there would be another model, in silence."""
    subject = tower()
    arguments = (subject.module, subject.batch)
    lab = fs.lab(*arguments, loss=subject.loss, mesh={"data": 4})

    with pytest.raises(PlanError, match=r"model must be .* a module; got null"):
        fs.lab(state=lab.state.text)
    same = fs.lab(*arguments, loss=subject.loss, state=lab.state.text)
    assert (same.plan, same.code) == (lab.plan, lab.code)

    of_sizes = fs.lab(devices=4, optimizer="sgd").state
    assert fs.lab(*arguments, loss=subject.loss, state=of_sizes).state.model is None


def test_lab_of_a_batch_that_the_module_does_not_take_raises_at_once():
    with pytest.raises(PlanError, match="batch must have the arguments of the model, x; got y"):
        fs.lab(Tower(), {"y": torch.ones(1, 8)})


def test_lab_whose_loss_does_not_take_the_batch_raises_at_once():
    """Labels of regression are none of the default loss."""
    batch = (torch.randn(3, 8), torch.randn(3, 4, 2))
    with pytest.raises(PlanError, match="must run on the batch; got .* it is the cross-entropy"):
        fs.lab(Tower(), batch)


def test_code_takes_the_first_rows_or_all_again():
    for devices in (2, 8):
        batch = (torch.randn(4, 8), torch.randint(4, (4,)))
        code = fs.lab(Tower(), batch, devices=devices).code
        assert f"A step takes {devices} rows: the first ones, and" in code

        names = {"torch": torch, "batch": batch}
        exec("\n".join([line for line in code.splitlines() if "rows" in line][1:]), names)
        assert torch.equal(names["batch"][0], batch[0].repeat(2, 1)[:devices])


def test_certificate_of_a_lab_is_that_of_its_program():
    subject = tower()
    lab = fs.lab(subject.module, subject.batch, loss=subject.loss, mesh={"data": 2})
    names = [name for name, _ in subject.module.named_parameters()]
    certificate = lab.certificate()
    assert certificate.ok
    leaves = {row.leaf.replace("[", ".").replace("]", "") for row in certificate.rows}
    assert leaves >= {*names}

    with pytest.raises(PlanError, match="at most 16 virtual devices; these are 32"):
        fs.lab(devices=32).certificate()
