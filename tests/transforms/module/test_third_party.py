"""Models of timm, diffusers and torchrec train under every plugin as torch trains them on one device, or with equal bits."""

from typing import NamedTuple

import pytest
import torch

from tests.training import PLUGINS, Case, assert_trained_alike, bits, boosted, stepped
from tests.transforms.module.third_party import (
    OfTensors,
    convit_base,
    deepfm,
    dlrm,
    features,
    pictures,
    reachable,
    vqmodel,
)


class Model(NamedTuple):
    """The module that a model is of, and how it is trained; what stands for it where it is given tensors alone."""

    module: str
    case: Case
    of_tensors: Case


def of_torchrec(make):
    """Return a model that is called on dense features, and on an object made of this device's sparse ones."""
    on_both = Case(make, called=lambda model, x: model(x, features(x)))
    return Model("torchrec.models", on_both, Case(lambda: OfTensors(make())))


CONVIT = Case(convit_base, pictures)
VQMODEL = Case(vqmodel, pictures, lambda y: y.sample.square().mean() + y.commit_loss)
MODELS = {
    "convit_base": Model("timm", CONVIT, CONVIT),
    "dlrm": of_torchrec(dlrm),
    "deepfm": of_torchrec(deepfm),
    "vqmodel": Model("diffusers.models.autoencoders.vq_model", VQMODEL, VQMODEL),
}


@pytest.fixture(params=MODELS)
def model(request):
    found = MODELS[request.param]
    with reachable(found.module):
        yield found


each_plugin = pytest.mark.parametrize("plugin", PLUGINS)


@each_plugin
def test_third_party_models_train_as_in_torch(model, plugin):
    found = [one for n in (2, 4) for one in boosted(model.case, PLUGINS[plugin](), n)]
    assert_trained_alike(model.case, *found)


@each_plugin
def test_third_party_models_train_functionalized(model, plugin):
    assert_trained_alike(model.of_tensors, stepped(model.of_tensors, plugin, 2))


@each_plugin
def test_third_party_models_have_equal_bits_on_any_mesh(model, plugin):
    (expected,) = bits(model.of_tensors, "ddp", 1)
    for found in bits(model.of_tensors, plugin, 2):
        assert all(torch.equal(x, expected[key]) for key, x in found.items())
