"""Pure optimizers on trees: pairs of functions (init, update), most of them with a donated `step`.

rate = schedules.warmup_cosine(3e-4, warmup=100, steps=10_000)
opt = chain(clip_by_global_norm(1.0), adamw(rate))
state = opt.init(params)
params, state = opt.step(grads, state, params)
"""

from fshard.errors import OptimizerError
from fshard.foreign_names import hint
from fshard.optim import schedules
from fshard.optim.by_label import by_label, masked
from fshard.optim.chain import add_decayed_weights, chain, clip_by_global_norm, clip_by_value, scale
from fshard.optim.contract import Optimizer, apply_updates, pure_step, step_of
from fshard.optim.norms import global_dot, global_norm
from fshard.optim.rules.adam import adam, adamw
from fshard.optim.rules.lamb import lamb
from fshard.optim.rules.lion import lion
from fshard.optim.rules.sgd import sgd
from fshard.optim.rules.shampoo import shampoo
from fshard.optim.scaling import all_finite, loss_scaled, skip_if_not_finite
from fshard.optim.schedules import Rate, Schedule
from fshard.optim.torch_optim.classes import adafactor, from_torch, muon
from fshard.optim.wrappers import accumulate, ema, ema_params, with_master_weights


def __getattr__(name: str) -> object:
    """Raise, naming the word for an optimizer or a schedule of another library."""
    raise AttributeError(f"module 'fshard.optim' has no attribute {name!r}.{hint(name)}")


__all__ = [
    "Optimizer",
    "OptimizerError",
    "Rate",
    "Schedule",
    "accumulate",
    "adafactor",
    "adam",
    "adamw",
    "add_decayed_weights",
    "all_finite",
    "apply_updates",
    "by_label",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "ema",
    "ema_params",
    "from_torch",
    "global_dot",
    "global_norm",
    "lamb",
    "lion",
    "loss_scaled",
    "masked",
    "muon",
    "pure_step",
    "scale",
    "schedules",
    "sgd",
    "shampoo",
    "skip_if_not_finite",
    "step_of",
    "with_master_weights",
]
