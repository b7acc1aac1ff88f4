"""Classes of torch.optim as pure pairs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard import optim
from fshard.testing import check_elementwise
from tests.optimizers import FOREIGN, by_step, by_torch, example, leaves_of, same, suited, trees


@pytest.mark.parametrize("cls", FOREIGN, ids=lambda cls: cls.__name__)
@given(st.data())
@settings(max_examples=10)
def test_foreign_optimizers_have_torchs_bits(cls, data):
    params, steps = data.draw(trees((torch.float32, torch.float64)))
    expected = by_torch(cls, params, steps, **FOREIGN[cls])
    assert same(leaves_of(by_step(optim.from_torch(cls, **FOREIGN[cls]), params, steps)[0]), expected)


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_foreign_optimizers_of_matrices(cls):
    params, steps = suited(optim.muon, *example())
    opt = optim.from_torch(cls, lr=0.1)
    assert not opt.elementwise
    assert same(leaves_of(by_step(opt, params, steps)[0]), by_torch(cls, params, steps, lr=0.1))


CLASSES = [
    cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
]
REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)


@pytest.mark.parametrize(
    "cls", [cls for cls in CLASSES if cls is not torch.optim.Optimizer], ids=lambda cls: cls.__name__
)
def test_of_every_class_it_is_known_whether_it_is_elementwise(cls):
    if cls in REFUSED:
        with pytest.raises(optim.OptimizerError, match=f"cannot make torch.optim.{cls.__name__}"):
            optim.from_torch(cls)
    elif optim.from_torch(cls).elementwise:
        check_elementwise(optim.from_torch(cls))
    else:
        with pytest.raises((AssertionError, optim.OptimizerError), match="flat pieces|refused what it was given"):
            check_elementwise(optim.from_torch(cls, elementwise=True), {"w": torch.ones(6, 5)})


def test_of_a_class_that_torch_may_add_it_is_asked(monkeypatch):
    later = type("Later", (torch.optim.SGD,), {})
    monkeypatch.setattr(torch.optim, "Later", later, raising=False)
    with pytest.raises(optim.OptimizerError, match="does not know whether Later is elementwise"):
        optim.from_torch(later)
    assert optim.from_torch(later, elementwise=True).elementwise
