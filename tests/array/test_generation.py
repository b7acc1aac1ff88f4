"""Decode loops on arrays: tokens are those of one device, draws too; and what a step plans, by counts."""

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.array import dispatch
from fshard.errors import LayoutError, MismatchError
from tests.helpers.processes import run_processes
from tests.tensor.hugging_face import model_of

RULES = {
    "*.[qkv]_proj.weight": P("model"), "*.o_proj.weight": P(None, "model"),
    "*.gate_proj.weight": P("model"), "*.up_proj.weight": P("model"),
    "*.down_proj.weight": P(None, "model"), "lm_head.weight": P("model"),
}  # fmt: skip
WAYS = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "stop": {"eos_token_id": 3},
    "beams": {"num_beams": 2},
    "sample": {"do_sample": True},
    "top k": {"do_sample": True, "top_k": 5, "use_cache": False},
    "top p": {"do_sample": True, "top_p": 0.8, "num_return_sequences": 2},
}


def prompt_of(rows):
    return torch.randint(1, 64, (rows, 5), generator=torch.Generator().manual_seed(rows))


def generate(model, prompt, **options):
    torch.manual_seed(3)
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, **options}
    return model.generate(prompt, **options)


def sharded_llama(mesh):
    return fs.array.shard_module(model_of("Llama"), RULES, mesh=mesh)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_generate_returns_tokens_of_one_device(way, rows):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    prompt = prompt_of(rows)
    expected = generate(model_of("Llama"), prompt, **WAYS[way])

    spec = P("data") if rows > 1 else P()
    array = fs.device_put(prompt, fs.Layout(mesh, spec))
    with fs.array.equal_tensors():
        tokens = generate(sharded_llama(mesh), array, **WAYS[way])

    assert fs.unshard(tokens).equal(expected)


def generate_on_processes():
    mesh = fs.make_mesh({"model": 2})
    model = sharded_llama(mesh)
    with fs.array.equal_tensors():
        tokens = [generate(model, prompt_of(rows), **WAYS["sample"]) for rows in (1, 4)]
    tokens = [fs.unshard(each) for each in tokens]

    torch.manual_seed(fs.mesh.process_index())
    probabilities = fs.array.ones(2, 8, layout=fs.Layout(mesh, P()))
    try:
        torch.multinomial(probabilities, 1)
    except MismatchError:
        return tokens
    return "no error"


def test_generate_on_processes_returns_tokens_of_one_device():
    """Processes whose generators differ raise: they would draw different tokens."""
    expected = [generate(model_of("Llama"), prompt_of(rows), **WAYS["sample"]) for rows in (1, 4)]
    for tokens in run_processes(generate_on_processes, 2, timeout=120):
        assert all(x.equal(y) for x, y in zip(tokens, expected, strict=True))


def test_generate_of_plain_prompt_raises_and_names_the_fix():
    mesh = fs.make_mesh({"model": 2})
    with pytest.raises(LayoutError, match=r"fs.array.equal_tensors\(\)"):
        generate(sharded_llama(mesh), prompt_of(1))


def test_draws_of_arrays_differ_in_each_call_and_follow_the_seed():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    layout = fs.Layout(mesh, P("data"))

    def draw():
        return torch.multinomial(fs.array.ones(8, 64, layout=layout), 1)

    torch.manual_seed(0)
    first, second = draw(), draw()
    torch.manual_seed(0)

    assert fs.unshard(draw()).equal(fs.unshard(first))
    assert not fs.unshard(first).equal(fs.unshard(second))
    by_device = [shard.flatten().tolist() for shard in first.shards]
    assert by_device[0] == by_device[1] != by_device[2] == by_device[3]


def test_draws_of_arrays_on_devices_with_other_seeds_raise():
    mesh = fs.make_mesh({"data": 2})

    def main():
        torch.manual_seed(fs.axis_index("data"))
        torch.multinomial(fs.array.ones(4, 8, layout=fs.Layout(mesh, P())), 1)

    with pytest.raises(MismatchError, match="the state of the random generator"):
        fs.run(main, mesh=mesh)


# What a step costs.


WIDTH, HEADS = 8, 2


def attend(weights, cache, x, positions):
    """Attend from one token to a cache that grows; `positions` are a plain tensor."""
    q, k, v = (F.linear(x, w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in weights)
    k = torch.cat([cache[0], k * positions], 2)
    v = torch.cat([cache[1], v], 2)
    y = F.scaled_dot_product_attention(q * positions, k, v)
    return F.silu(y.transpose(1, 2).flatten(2)), (k, v)


def test_decode_step_plans_only_operations_of_new_shapes(monkeypatch):
    mesh = fs.make_mesh({"model": 2})
    draw = torch.Generator().manual_seed(0)

    def put(*shape, spec):
        # Each array has a layout of its own, as those that a user makes one by one.
        return fs.device_put(torch.randn(*shape, generator=draw), fs.Layout(mesh, spec))

    weights = [put(WIDTH, WIDTH, spec=P("model")) for _ in range(3)]
    cache = tuple(put(1, HEADS, 4, WIDTH // HEADS, spec=P(None, "model")) for _ in range(2))
    planned = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *args: planned.append(1) or choose(*args))

    counts = []
    with torch.no_grad(), fs.array.equal_tensors():
        for _ in range(4):
            planned.clear()
            x = put(1, 1, WIDTH, spec=P())
            _, cache = attend(weights, cache, x, torch.ones(WIDTH // HEADS))
            counts.append(len(planned))

    # The concatenations are of one shape, so they are one plan; and there is the attention.
    assert counts[1:] == [2, 2, 2]
