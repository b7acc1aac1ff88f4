"""Generation by boosted models of transformers: tokens are those of one device; which devices draw alike."""

import pytest
import torch

import fshard as fs
from tests.tensor.hugging_face import model_of

ROWS, TOKENS = 4, 4
PROMPT = torch.randint(1, 64, (ROWS, 5), generator=torch.Generator().manual_seed(1))
GREEDY = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": None}
SAMPLING = {**GREEDY, "do_sample": True}
PLUGINS = {
    "ddp": lambda: fs.DDPPlugin(),
    "zero 3": lambda: fs.FSDPPlugin(),
    "tensor": lambda: fs.HybridParallelPlugin(
        tensor=2, zero_stage=3, sample={"input_ids": PROMPT[:2]}, tensor_tolerance=1e-6
    ),
}


def boosted(plugin):
    model = model_of("Llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, *_ = fs.Booster(PLUGINS[plugin]()).boost(model, optimizer)
    return model.eval()


def decode(model, ids):
    """Decode greedily by the model's own cache."""
    tokens, cache = [ids], None
    for _ in range(TOKENS):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        ids = output.logits[:, -1:].argmax(-1)
        tokens.append(ids)
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_decode_loop_and_generate_of_a_copy_return_tokens_of_one_device(plugin):
    expected = model_of("Llama").generate(PROMPT, **GREEDY)

    def main():
        model = boosted(plugin)
        with torch.no_grad():
            return decode(model, PROMPT), model.unwrap().generate(PROMPT, **GREEDY)

    for tokens in fs.run(main, mesh=fs.make_mesh({"data": 2, "model": 2})):
        assert all(each.equal(expected) for each in tokens)


def test_generate_names_the_copy_with_full_parameters():
    def main():
        with pytest.raises(AttributeError, match=r"model\.unwrap\(\)\.generate"):
            boosted("zero 3").generate(PROMPT)

    fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_sampled_tokens_differ_by_key_and_agree_on_devices_along_model():
    """Without a key all devices draw alike, as the guide on reinforcement learning states."""

    def main():
        copy = boosted("tensor").unwrap()

        def sample(*key):
            with fs.keyed_random(0, *key):
                return copy.generate(PROMPT, **SAMPLING).tolist()

        index = fs.axis_index("data")
        return sample(0, index), sample(1, index), sample(0, index)

    results = fs.run(main, mesh=fs.make_mesh({"data": 2, "model": 2}))
    for first, second, again in results:
        assert first == again != second
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert results[0][0] != results[2][0]
