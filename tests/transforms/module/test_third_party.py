"""Models of timm, diffusers, torchrec and transformers train under every plugin as in torch, or
with equal bits.
"""

from typing import NamedTuple

import pytest
import torch

from tests.helpers.sampled import in_pairs
from tests.helpers.training import PLUGINS, Case, assert_trained_alike, bits, boosted, stepped
from tests.transforms.module.third_party import (
    OfTensors,
    convit_base,
    deepfm,
    dlrm,
    features,
    gpt2,
    pictures,
    reachable,
    token_ids,
    vqmodel,
)


class Model(NamedTuple):
    """The module that a model is of, and how it is trained; what stands for it where it is given
    tensors alone.
    """

    module: str
    case: Case
    of_tensors: Case


def of_torchrec(make):
    """Return a model that is called on dense features, and on an object made of this device's
    sparse ones.
    """
    on_both = Case(make, forward=lambda model, x: model(x, features(x)))
    return Model("torchrec.models", on_both, Case(lambda: OfTensors(make())))


CONVIT = Case(convit_base, pictures)
VQMODEL = Case(vqmodel, pictures, lambda y: y.sample.square().mean() + y.commit_loss)
GPT2 = Case(gpt2, token_ids, lambda y: y.logits.square().mean() + y.mc_logits.square().mean())
MODELS = {
    "convit_base": Model("timm", CONVIT, CONVIT),
    "dlrm": of_torchrec(dlrm),
    "deepfm": of_torchrec(deepfm),
    "vqmodel": Model("diffusers.models.autoencoders.vq_model", VQMODEL, VQMODEL),
    "gpt2 with two heads": Model("transformers", GPT2, GPT2),
}


@pytest.mark.filterwarnings("ignore")  # of transformers' own
@pytest.mark.parametrize(
    ("name", "plugin", "way"), in_pairs(MODELS, PLUGINS, ("loop", "step", "bits"))
)
def test_third_party_model_trains_as_in_torch(name, plugin, way):
    model = MODELS[name]
    with reachable(model.module):
        if way == "loop":
            assert_trained_alike(model.case, *boosted(model.case, PLUGINS[plugin](), 2))
        elif way == "step":
            assert_trained_alike(model.of_tensors, stepped(model.of_tensors, plugin, 2))
        else:
            (expected,) = bits(model.of_tensors, "ddp", 1)
            for actual in bits(model.of_tensors, plugin, 2):
                assert all(torch.equal(x, expected[key]) for key, x in actual.items())
