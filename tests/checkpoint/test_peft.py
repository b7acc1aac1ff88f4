"""Adapters and peft itself: it reads ours, and we read its, with the same bits of logits."""

import pytest
import torch

import fshard as fs
from tests.checkpoint.helpers.exported import CONFIGS, trained
from tests.checkpoint.helpers.programs import mesh
from tests.checkpoint.helpers.tiny import tiny
from tests.transforms.module.third_party import reachable

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft's own
TOKENS = torch.arange(6).reshape(1, 6)


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def plain(model):
    """Return GPT-2 without LoRA layers, with the frozen weights of a model that has them."""
    base = tiny("gpt2")
    params = dict(model.named_parameters())
    for name, x in base.named_parameters():
        parent, _, last = name.rpartition(".")
        x.data = params.get(f"{parent}.base_layer.{last}", params.get(name)).data.clone()
    return base


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_reads_our_adapters(name, tmp_path):
    model, params = trained(CONFIGS[name])
    fs.export(tmp_path / "adapter", params, to="peft", model=model)
    with reachable("peft"):
        from peft import PeftModel

        peft_model = PeftModel.from_pretrained(plain(model), tmp_path / "adapter")
        assert torch.equal(logits(peft_model), logits(model))


@pytest.mark.parametrize(
    ("name", "more"),
    [("linear", ()), ("embedding", ()), ("tied head", ("lm_head.base_layer.weight",))],
)
def test_adapters_of_peft_are_restored(name, more, tmp_path):
    """Of a tied head peft also saves the frozen weight, which is another parameter's here."""
    config = CONFIGS[name]
    base = tiny("gpt2")
    with reachable("peft"):
        from peft import LoraConfig, get_peft_model

        options = {
            key: getattr(config, key) for key in ("r", "lora_alpha", "bias", "target_modules")
        }
        peft_model = get_peft_model(
            plain(base), LoraConfig(**options, modules_to_save=[*config.modules_to_save] or None)
        )
        for x in peft_model.parameters():
            if x.requires_grad:
                torch.nn.init.normal_(x)
        peft_model.save_pretrained(tmp_path)
        want = logits(peft_model)
    model = fs.nn.lora(base, config)
    params = fs.shard_params(fs.functionalize(model)[1], fs.fsdp("data"), mesh=mesh())
    params, differences = fs.restore(tmp_path, params, strict=False)
    assert differences == ((), more, ())
    model.load_state_dict(fs.unshard(params), strict=False)
    assert torch.equal(logits(model), want)
