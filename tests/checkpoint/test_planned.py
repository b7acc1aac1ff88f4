"""Parameters under a tensor-parallel plan: fused parts are one named array, which loads without the
plan or with another.
"""

import copy
import pickle

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.checkpoint.names import leaves_of
from fshard.errors import CheckpointError
from fshard.mesh.layout.sharded import flatten_shards
from fshard.tensor.layer_plans import parts_class
from tests.tensor.hugging_face import inputs_of, model_of

STEPS = 2


def trained(layers, kind=fs.optim.adamw):
    """Return parameters and optimizer state of a GPT-2, whose fused weights are (in, out), after
    steps on `layers` devices.

    With layers=0 there is no plan.
    """
    module, (inputs, labels) = model_of("GPT-2"), inputs_of("GPT-2")
    mesh = fs.make_mesh({"data": 2, "model": layers or 1})
    plan = fs.tensor_parallel(module, axis="model", sample=inputs, check=False) if layers else None
    apply, params, buffers = fs.functionalize(module, plan=plan)
    full = (lambda x: x) if plan is None else plan.full

    def loss(params, batch):
        logits = full(apply(params, buffers, **batch["given"])[0].logits)
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())

    params = fs.shard_params(
        params, fs.fsdp("data", within=None if plan is None else plan.rules), mesh=mesh
    )
    opt = fs.partition_optimizer(kind(0.1), mesh=mesh, axis="data", stage=3)
    local = () if plan is None else plan.axes
    step = fs.train_step(loss, opt, mesh=mesh, batch=P("data"), local=local)
    state = opt.init(params)
    for _ in range(STEPS):
        params, state, _ = step(params, state, {"given": inputs, "labels": labels})
    return {"params": params, "state": state}


def full_by_name(tree):
    return {
        leaf.name: torch.cat(leaf.value.parts, leaf.value.dim)
        if hasattr(leaf.value, "parts")
        else leaf.value
        for leaf in leaves_of(fs.unshard(tree))
    }


def cleared(tree):
    for x in flatten_shards(tree)[0]:
        x.detach().zero_()
    return tree


@pytest.mark.parametrize(
    ("source_devices", "target_devices"), [(2, 0), (0, 2), (2, 4), (4, 2), (2, 2)]
)
def test_fused_weights_are_restored_under_any_plan(source_devices, target_devices, tmp_path):
    saved = trained(source_devices)
    target = cleared(trained(target_devices))
    fs.save(tmp_path, saved)
    torch.testing.assert_close(
        full_by_name(fs.restore(tmp_path, target)), full_by_name(saved), rtol=0, atol=0
    )
    assert fs.restore(tmp_path)["params"]["transformer.h.0.attn.c_attn.weight"].shape == (32, 96)


def test_restored_counts_continue(tmp_path):
    """The count of a fused weight is that of each part."""
    fs.save(tmp_path, trained(0))
    counts = fs.restore(tmp_path, cleared(trained(2)))["state"]["step"][
        "transformer.h.0.attn.c_attn.weight"
    ]
    assert [int(x) for x in counts] == [STEPS] * 3


def test_state_of_other_shapes_is_restored_under_the_plan(tmp_path):
    """Factors of each part, as Adafactor has them, are those of no full weight."""
    saved = trained(2, fs.optim.adafactor)
    fs.save(tmp_path, saved)
    torch.testing.assert_close(
        full_by_name(fs.restore(tmp_path, cleared(trained(2, fs.optim.adafactor)))),
        full_by_name(saved),
        rtol=0,
        atol=0,
    )
    with pytest.raises(
        CheckpointError, match=r"state\.row_var\.\S*c_attn.weight must have shape \(32, 1\)"
    ):
        fs.restore(tmp_path, trained(0, fs.optim.adafactor))


def test_parts_with_other_counts_raise(tmp_path):
    parts = parts_class(0, 2)
    with pytest.raises(
        CheckpointError, match="the numbers of the parts of one weight must be equal"
    ):
        fs.save(tmp_path, {"step": parts(torch.tensor(1.0), torch.tensor(2.0))})


def test_parts_are_copied_and_pickled():
    x = parts_class(1, 3)(torch.ones(1), torch.zeros(2), None)
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert type(y) is type(x) and y.joined_dim == 1
        assert torch.equal(y[1], x[1])
