"""Models of transformers with experts along an axis train as plain torch does on one device."""

from itertools import product

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.experts import expert_rules
from tests.experts.models import MODELS, ids, model_of
from tests.helpers.sampled import thorough

LAYOUTS = {  # sizes of the axes, stage
    "experts": ({"data": 1, "expert": 2}, 0),
    "zero 1": ({"data": 2, "expert": 2}, 1),
    "fsdp": ({"data": 2, "expert": 4}, 3),
    "data alone": ({"data": 2, "expert": 1}, 3),
    "experts, tensor": ({"data": 1, "expert": 2, "model": 2}, 0),
    "experts, tensor, fsdp": ({"data": 2, "expert": 2, "model": 2}, 3),
    "tensor": ({"data": 2, "model": 2}, 1),
    "sequence": ({"expert": 2, "seq": 2, "model": 1}, 3),
}


ALL = [*product(MODELS, LAYOUTS)]
QUICK = {"fsdp", "experts, tensor, fsdp", "sequence"}
"""The layouts of all models; the others are those of one with every commit."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [case if case[0] == "mixtral" or case[1] in QUICK else thorough(*case) for case in ALL],
)
def test_models_of_transformers_train_with_experts_on_an_axis(name, layout):
    """Losses, gradients and three steps of AdamW in float64; routers and losses compute in float32."""
    (sizes, stage), model = LAYOUTS[layout], model_of(name)
    mesh = fs.make_mesh(sizes)
    axes = tuple([axis for axis in ("data", "expert") if axis in sizes])
    experts = "expert" if "expert" in sizes else None
    plan = None
    local = (experts,) if experts else ()
    if "model" in sizes:
        sample = {"input_ids": ids(), "labels": ids()}
        tokens = "seq" if "seq" in sizes else None
        plan = fs.tensor_parallel(
            model, axis="model", experts=experts, sequence=tokens, sample=sample
        )
        rules, local = plan.rules, (*local, *plan.axes)
    else:
        rules = expert_rules(model, "expert")
    apply, params, buffers = fs.functionalize(model, plan=plan)
    sharded = fs.shard_params(
        params, fs.fsdp(axes, within=rules) if stage == 3 else rules, mesh=mesh
    )

    def loss_fn(params, rows):
        loss = apply(params, buffers, input_ids=rows, labels=rows)[0].loss
        return loss if plan is None else plan.full(loss)

    opt = fs.partition_optimizer(
        fs.optim.adamw(1e-2, weight_decay=0.0), mesh=mesh, axis=axes, stage=stage
    )
    options = {"mesh": mesh, "batch": P(axes), "local": local}
    loss, grads = fs.value_and_grad(loss_fn, **options)(sharded, ids())
    reference = model_of(name)
    expected = reference(input_ids=ids(), labels=ids()).loss
    torch.testing.assert_close(loss, expected.detach(), rtol=3e-7, atol=0.0)  # a float32
    by_name = dict(reference.named_parameters())
    used = {key: x for key, x in by_name.items() if grads[key] is not None}
    for key, g in zip(
        used, torch.autograd.grad(expected, [*used.values()], retain_graph=True), strict=True
    ):
        torch.testing.assert_close(fs.unshard(grads[key]), g, rtol=1e-6, atol=1e-7)

    step = fs.train_step(loss_fn, opt, **options)
    state = opt.init(sharded)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        sharded, state, _ = step(sharded, state, ids())
        theirs.zero_grad()
        reference(input_ids=ids(), labels=ids()).loss.backward()
        theirs.step()
    for key in used:
        torch.testing.assert_close(
            fs.unshard(sharded[key]), by_name[key].detach(), rtol=1e-5, atol=1e-5
        )
    wanted = {"{flat:data}"} if stage == 3 and "data" in sizes else {""}
    suffixes = {
        str(fs.typeof(x)).partition("]")[2] for key, x in sharded.items() if ".experts." in key
    }
    assert suffixes == wanted


def test_outside_of_a_mesh_a_model_computes_as_before():
    model = model_of("mixtral")
    reference = model_of("mixtral")
    expert_rules(model, "expert")
    torch.testing.assert_close(model(ids()).logits, reference(ids()).logits)


def test_a_model_without_experts_raises():
    for experts_of in (
        expert_rules,
        lambda model, axis: fs.tensor_parallel(
            model, axis="m", experts=axis, sample=torch.ones(2, 2)
        ),
    ):
        with pytest.raises(fs.errors.ModuleError, match="Linear must have layers of experts"):
            experts_of(torch.nn.Linear(2, 2), "expert")


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_of_experts_fit_other_meshes_and_from_pretrained(name, tmp_path):
    """Experts stay grouped: saved in shards of experts and data, restored beside an axis of layers,
    exported.
    """
    model = model_of(name)
    sample = {"input_ids": ids(), "labels": ids()}
    rules = expert_rules(model, "expert")
    _, params, buffers = fs.functionalize(model)
    mesh = fs.make_mesh({"data": 2, "expert": 2})
    fs.save(
        tmp_path / "own",
        fs.shard_params(params, fs.fsdp(("data", "expert"), within=rules), mesh=mesh),
    )
    plan = fs.tensor_parallel(model, axis="model", experts="expert", sample=sample)
    restored = fs.restore(
        tmp_path / "own", plan.rules, mesh=fs.make_mesh({"expert": 2, "model": 2})
    )
    path = next(path for path in restored if path.endswith("experts.down_proj"))
    assert "[4@expert+model, " in str(fs.typeof(restored[path]))
    for key, x in params.items():
        assert torch.equal(fs.unshard(restored[key]), x)
    fs.export(
        tmp_path / "hf",
        {**restored, **{key: x for key, x in buffers.items() if key in model.state_dict()}},
        to="hf",
    )
    model.config.save_pretrained(tmp_path / "hf")
    again = type(model).from_pretrained(tmp_path / "hf", dtype=torch.float64)
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))


def test_expert_rules_of_a_layer_itself_name_its_leaves():
    layers = [x for x in model_of("mixtral").modules() if hasattr(x, "_is_expert_parallel")]
    names = {name for name, _ in layers[0].named_parameters()}
    assert {*expert_rules(layers[0], "expert")} == {*names, "**"}
