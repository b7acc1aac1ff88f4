"""A trace says where each element of a target comes from; the oracle is a real load."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import RefitError
from tests.refit.oracle import random_weights, traced_copy


def _copy_all(name="w", shape=(4, 6), dtype=torch.float32):
    """Return a maker of a loader that copies a function of one weight into a target."""

    def maker(move):
        def make():
            target = {name: torch.zeros(shape, dtype=dtype)}

            def load(weights):
                loaded = dict(weights)
                move(target, *loaded.values())

            return load, target

        return make

    return maker


def _assign(move):
    return lambda target, *loaded: target["w"].copy_(move(*loaded))


INDEX = torch.tensor([3, 0, 2, 1])
MASK = torch.tensor([True, False, True, True])


def _index_put(x):
    y = torch.empty_like(x)
    y[INDEX] = x
    return y


def _scatter(x):
    return torch.empty(4, 6).scatter_(0, INDEX[:, None].expand(4, 6), x)


def _index_copy(x):
    return torch.empty(4, 6).index_copy_(0, INDEX, x)


def _masked_rows(x):
    y = torch.zeros(4, 6)
    y[MASK] = x[:3]
    return y


def _inference(x):
    with torch.inference_mode():
        return x.narrow(0, 0, 4).reshape(2, 2, 6).transpose(0, 1).contiguous().flatten(0, 1)


MOVES = {
    "identity": lambda x: x,
    "transpose": lambda x: x.reshape(6, 4).t(),
    "permute": lambda x: x.view(2, 2, 6).permute(1, 0, 2).reshape(4, 6),
    "heads": lambda x: x.view(2, 2, 3, 2).transpose(0, 2).reshape(4, 6),
    "rotary": lambda x: x.view(1, 2, 2, 6).transpose(1, 2).reshape(4, 6),
    "columns": lambda x: x.view(4, 2, 3).transpose(1, 2).reshape(4, 6),
    "chunk and cat": lambda x: torch.cat(x.chunk(3, 1)[::-1], 1),
    "uneven split": lambda x: torch.cat([*reversed(x.split([1, 3]))]),
    "stack": lambda x: torch.stack([x[2], x[0], x[3], x[1]]),
    "strided": lambda x: torch.cat([x[::2], x[1::2]]),
    "flip": lambda x: x.flip(0, 1),
    "roll": lambda x: x.roll(2, 1).rot90(2),
    "index": lambda x: x[INDEX],
    "index_select": lambda x: x.index_select(0, INDEX),
    "gather": lambda x: x.gather(0, INDEX[:, None].expand(4, 6)),
    "take_along_dim": lambda x: x.take_along_dim(INDEX[:, None], 0),
    "index_put": _index_put,
    "scatter": _scatter,
    "index_copy": _index_copy,
    "masked rows": _masked_rows,
    "where": lambda x: torch.where(MASK[:, None], x, x.flip(0)),
    "masked_fill": lambda x: x.masked_fill(MASK[:, None], 0.0),
    "pad": lambda x: nn.functional.pad(x[:, :4], (1, 1)),
    "pad by zeros": lambda x: torch.cat([x[:2], x.new_zeros(2, 6)]),
    "broadcast": lambda x: x[1],
    "repeat": lambda x: x[:2].repeat(2, 1),
    "repeat_interleave": lambda x: x[:2].repeat_interleave(2, 0),
    "diagonal": lambda x: x[:, :4].diagonal()[:, None],
    "expand": lambda x: x[:1].expand(4, 6).contiguous(),
    "clone": lambda x: x.clone().detach().contiguous(),
    "double": lambda x: x.double().float(),
    "bfloat16": lambda x: x.bfloat16(),
    "half twice": lambda x: x.half().float().half(),
    "einsum": lambda x: torch.einsum("ij->ji", x).reshape(6, 4).T,
    "unfold": lambda x: x.view(-1).unfold(0, 6, 6),
    "parameter": lambda x: nn.Parameter(x.view(6, 4).T.contiguous()).data,
    "as_strided": lambda x: x.as_strided((4, 6), (1, 4)),
    "select_scatter": lambda x: x.select_scatter(x[3], 0, 1),
    "inference mode": _inference,
    "deep view": lambda x: x[1:].T[2:].unsqueeze(0).squeeze(0).T.reshape(3, 4)[0],
}
MOVES["deep view"] = lambda x: x[1:].T[2:].unsqueeze(0).squeeze(0).T.repeat(2, 2)[:4, :6]


@pytest.mark.parametrize("name", MOVES)
def test_trace_of_a_move_is_the_real_load(name):
    traced_copy(_copy_all()(_assign(MOVES[name])), random_weights({"w": (4, 6)}))


@pytest.mark.parametrize(
    ("move", "most"),
    [
        (lambda x: x.t(), 1),
        (lambda x: x.flip(0).t(), 1),
        (lambda x: x[:1].expand(6, 4).t(), 1),
        (lambda x: nn.functional.pad(x.t()[:, :4], (1, 1)), 1),
        (lambda x: x.view(1, 2, 3, 4).transpose(1, 2).reshape(6, 4).t(), 3),  # interleaved halves
        (lambda x: torch.cat([x[3:], x[:3]]).t(), 2),
    ],
)
def test_trace_has_few_boxes_for_regular_moves(move, most):
    traced = traced_copy(_copy_all()(_assign(move)), random_weights({"w": (6, 4)}))
    assert len([*traced.boxes("w")]) <= most


def _write_views(target, x):
    param = target["w"].view(2, 2, 6)
    param[:, 1].copy_(x[:2])
    param.select(1, 0).narrow(1, 0, 3)[...] = x[2:, :3]
    target["w"].T[3:, 0::2] = x[2:, 3:].T


def _write_foreach(target, x):
    torch._foreach_copy_([*target["w"].unbind()], [*x.flip(0).unbind()])


def _write_through_memory(target, x):
    buffer = torch.zeros(2, 6)
    for rows in (slice(0, 2), slice(2, 4)):
        buffer.copy_(x[rows])
        target["w"][rows] = buffer
        buffer.zero_()


def _write_twice(target, x):
    target["w"].copy_(x)
    target["w"][1:3] = x[2:]
    target["w"][0].zero_()
    target["w"][3] = 0.5


def _write_out(target, x):
    target["w"][:2] = torch.cat([x[:1], x[1:2]])
    target["w"][2:].fill_(x[0, 0])


@pytest.mark.parametrize(
    "write", [_write_views, _write_foreach, _write_through_memory, _write_twice, _write_out]
)
def test_trace_of_writes_in_place_is_the_real_load(write):
    traced_copy(_copy_all()(write), random_weights({"w": (4, 6)}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_trace_records_the_cast_to_the_target(dtype):
    make = _copy_all(dtype=dtype)(lambda target, x: target["w"].copy_(x))
    traced = traced_copy(make, random_weights({"w": (4, 6)}))
    (box,) = traced.boxes("w")
    assert box.dtypes == (torch.float32, dtype)


def test_trace_records_a_cast_through_a_narrower_dtype():
    make = _copy_all()(lambda target, x: target["w"].copy_(x.bfloat16().float()))
    traced = traced_copy(make, random_weights({"w": (4, 6)}))
    (box,) = traced.boxes("w")
    assert box.dtypes == (torch.float32, torch.bfloat16, torch.float32)


def test_trace_of_a_cast_of_one_of_two_weights_has_two_boxes():
    def write(target, q, k):
        target["w"].copy_(torch.cat([q.bfloat16().float(), k.double()]))

    traced = traced_copy(_copy_all()(write), random_weights({"q": (2, 6), "k": (2, 6)}))
    dtypes = {box.source: box.dtypes[1:] for box in traced.boxes("w")}
    assert dtypes == {"q": (torch.bfloat16, torch.float32), "k": ()}


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("positions", torch.arange(4), persistent=False)


def test_trace_of_a_module_follows_tied_parameters_and_buffers():
    def make():
        module = _Tied()
        return module.load_state_dict, module

    weights = _Tied().state_dict()
    # Of untied sources with tied targets, the last one is loaded.
    random = {name: torch.randn(x.shape) for name, x in weights.items()}
    traced = traced_copy(make, random, unused="embed.weight")
    assert {box.source for box in traced.boxes("embed.weight")} == {"head.weight"}
    assert traced.targets["head.weight"].tied_to == "embed.weight"
    assert "positions" not in traced.targets
    assert {box.source for box in traced.boxes("scale")} == {"scale"}


def test_trace_of_tied_sources_needs_one_of_them():
    module = _Tied()

    def load(weights):
        loaded = dict(weights)
        module.embed.weight.data.copy_(loaded["embed.weight"])
        module.scale.copy_(loaded["scale"])

    traced = fs.refit.trace(load, _Tied(), module)
    assert ("embed.weight", "head.weight") in [weight.names for weight in traced.weights]


@pytest.mark.parametrize("how", ["data", "parameter", "assign", "dict"])
def test_trace_follows_rebound_parameters_and_gives_them_back(how):
    def make():
        torch.manual_seed(0)
        module = nn.Linear(3, 2, bias=False)

        def load(weights):
            w = dict(weights)["w"].t()
            if how == "data":
                module.weight.data = w
            elif how == "parameter":
                module.weight = nn.Parameter(w.contiguous(), requires_grad=False)
            elif how == "assign":
                module.load_state_dict({"weight": w}, assign=True)
            else:
                module._parameters["weight"] = nn.Parameter(w.clone())

        return load, module

    load, module = make()
    before = module.weight
    traced = fs.refit.trace(load, {"w": torch.ones(3, 2)}, module)
    assert module.weight is before
    assert next(traced.boxes("weight")).along == (1, 0)
    traced_copy(make, random_weights({"w": (3, 2)}))


def test_trace_of_weights_and_a_target_without_memory():
    with torch.device("meta"):
        module = nn.Linear(3, 4)
        names = {"a": torch.ones(2, 3), "b": torch.ones(2, 3), "bias": torch.ones(4)}

    def load(weights):
        for name, x in weights:
            if name == "bias":
                module.bias.data.copy_(x.to(module.bias.device))
            else:
                row = 2 * (name == "b")
                module.weight.data[row : row + 2].copy_(x.to(module.weight.device))

    traced = fs.refit.trace(load, names, module)
    assert [box.source for box in traced.boxes("weight")] == ["a", "b"]


def test_trace_of_arrays_has_their_full_shapes():
    mesh = fs.make_mesh({"data": 2})
    layout = fs.Layout(mesh, fs.P.flat("data"))
    params = fs.device_put({"layers": [{"w": torch.ones(3, 4)}]}, layout)
    target = {"w": torch.zeros(4, 3)}
    traced = fs.refit.trace(
        lambda weights: target["w"].copy_(dict(weights)["layers.0.w"].t()), params, target
    )
    assert traced.weights[0].shape == (3, 4)


COMPUTATIONS = {
    "mul": (lambda x: x * 2, "aten.mul"),
    "add one": (lambda x: 1 + x, "aten.add"),
    "in place": (lambda x: x.mul_(1.0), "aten.mul_"),
    "matmul": (lambda x: x @ x.T, "aten.mm"),
    "sum": (lambda x: x.sum(0), "aten.sum"),
    "negative": (lambda x: -x, "aten.neg"),
    "sort": (lambda x: x.sort()[0], "aten.sort"),
    "triangle": (lambda x: x.tril(), "aten.tril"),
    "item": (lambda x: x[0, 0].item(), "_local_scalar_dense"),
    "numpy": (lambda x: torch.from_numpy(x.numpy()), "numpy"),
    "list": (lambda x: torch.tensor(x.tolist()), "tolist"),
    "bits": (lambda x: x.view(torch.int32), "view"),
    "accumulate": (
        lambda x: x.index_put_((INDEX,), x.clone(), accumulate=True),
        "aten.index_put_",
    ),
    "mean": (lambda x: x.mean(), "aten.mean"),
    "compare": (lambda x: torch.equal(x, x), "aten.equal"),
    "where": (lambda x: torch.where(x > 0, x, 0.0), "aten.gt"),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_trace_of_a_computation_raises_with_operation_line_and_weight(name):
    compute, operation = COMPUTATIONS[name]
    load, target = _copy_all()(_assign(compute))()
    with pytest.raises(RefitError) as error:
        fs.refit.trace(load, {"layers.0.w": torch.ones(4, 6)}, target)
    assert operation in str(error.value)
    assert "layers.0.w" in str(error.value)
    assert "test_trace.py" in str(error.value)


def test_trace_of_a_computation_raises_where_the_loader_catches_it():
    target = {"w": torch.zeros(4)}

    def load(weights):
        for _, x in weights:
            try:
                target["w"].copy_(x * 2)
            except ValueError:
                target["w"].copy_(x)

    with pytest.raises(RefitError, match="mul"):
        fs.refit.trace(load, {"w": torch.ones(4)}, target)


def test_trace_of_a_failed_load_gives_the_target_back():
    module = nn.Linear(3, 2, bias=False)
    before = module.weight.data.clone()

    def load(weights):
        module.weight.data = dict(weights)["w"]
        raise KeyError("a missing name")

    with pytest.raises(KeyError, match="a missing name"):
        fs.refit.trace(load, {"w": torch.ones(2, 3)}, module)
    assert torch.equal(module.weight, before)


def test_trace_of_an_update_of_the_target_raises():
    target = {"w": torch.ones(4)}

    def load(weights):
        target["w"].mul_(2)

    with pytest.raises(RefitError, match=r"must only copy to the target; got aten.mul_"):
        fs.refit.trace(load, {"w": torch.ones(4)}, target)
    assert target["w"].tolist() == [1, 1, 1, 1]


def test_trace_names_a_source_that_reaches_no_parameter():
    target = {"w": torch.ones(2)}
    names = {"w": torch.ones(2), "rotary.inv_freq": torch.ones(3)}

    def load(weights):
        target["w"].copy_(dict(weights)["w"])

    with pytest.raises(RefitError, match=r"rotary\.inv_freq\[0\] must reach the target"):
        fs.refit.trace(load, names, target)
    fs.refit.trace(load, names, target, unused="*.inv_freq")


def test_trace_names_a_parameter_that_is_not_written_fully():
    target = {"w": torch.ones(3, 2), "b": torch.ones(2)}

    def load(weights):
        target["w"][:2].copy_(dict(weights)["w"])

    names = {"w": torch.ones(2, 2)}
    with pytest.raises(RefitError, match=r"w\[2, 0\] must be written.* 4 of 6.*b\[0\] must be"):
        fs.refit.trace(load, names, target)
    traced = fs.refit.trace(load, names, target, kept=["w", "b"])
    assert traced.targets["w"].unwritten == 2


@pytest.mark.parametrize("unknown", ["another thread", "a tensor from outside"])
def test_trace_of_elements_that_it_does_not_see_raises(unknown):
    target = {"w": torch.ones(4)}
    outside = torch.ones(4)

    def load(weights):
        x = dict(weights)["w"]
        if unknown == "another thread":
            import threading

            thread = threading.Thread(target=lambda: outside.copy_(x))
            thread.start()
            thread.join()
        target["w"].copy_(outside)

    with pytest.raises(RefitError, match=r"w\[0\] must be written"):
        fs.refit.trace(load, {"w": torch.ones(4)}, target, unused="w")


def test_trace_without_a_target_is_of_the_module_that_has_the_method():
    module = nn.Linear(3, 2)
    traced = fs.refit.trace(module.load_state_dict, module.state_dict())
    assert [*traced.targets] == ["weight", "bias"]
    with pytest.raises(RefitError, match="into must be a module"):
        fs.refit.trace(lambda weights: None, module.state_dict())


def test_trace_of_a_large_load_encodes_numbers_of_earlier_weights(monkeypatch):
    from fshard.refit import numbers

    target = {f"w{index}": torch.empty(64, 64) for index in range(8)}
    largest = 0

    def load(weights):
        nonlocal largest
        for name, x in weights:
            target[name].copy_(x.t())
            (recorder,) = recorders
            dense = [s.length for _, s in recorder._entries.values() if s.dense is not None]
            largest = max(largest, sum(dense))

    recorders = []
    initialize = numbers.Shadows.__init__

    def with_limit(self):
        initialize(self, limit=4096)
        recorders.append(self)

    monkeypatch.setattr(numbers.Shadows, "__init__", with_limit)
    names = {name: torch.empty(64, 64) for name in target}
    traced = fs.refit.trace(load, names, target)
    assert all(len([*traced.boxes(name)]) == 1 for name in target)
    assert largest <= 4 * 4096
