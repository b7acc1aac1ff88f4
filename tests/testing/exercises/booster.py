"""Answers to the exercises of the Booster: the right ones, and wrong ones by their hint."""

from math import ceil

import fshard as fs

SOLUTIONS = {
    "booster.loss": lambda loss: fs.pmean(loss.detach(), "data"),
    "booster.plugin": lambda mesh: fs.ZeroPlugin(stage=1, mesh=mesh),
    "booster.steps": lambda count, batch_size, n: ceil(count / batch_size),
    "booster.adapter": lambda inputs, outputs, rank: rank * (inputs + outputs),
}

WRONG = {
    "booster.loss": {
        "own rows": lambda loss: loss.detach(),
        "the sum": lambda loss: fs.psum(loss.detach(), "data"),
        "largest": lambda loss: fs.pmax(loss.detach(), "data"),
        "still has a graph": lambda loss: fs.pmean(loss, "data"),
    },
    "booster.plugin": {
        "all of it": lambda mesh: fs.DDPPlugin(mesh=mesh),
        "gathered for each use": lambda mesh: fs.FSDPPlugin(mesh=mesh),
        "`mesh=mesh`": lambda mesh: fs.ZeroPlugin(stage=1),
        "return a plugin": lambda mesh: "zero1",
        "raises": lambda mesh: fs.ZeroPlugin(stage=3, mesh=mesh),
    },
    "booster.steps": {
        "does not depend on n": lambda count, batch_size, n: ceil(count / batch_size / n),
        "round up": lambda count, batch_size, n: count // batch_size,
        "batches of its own": lambda count, batch_size, n: n * ceil(count / batch_size),
    },
    "booster.adapter": {
        "one of the two": lambda inputs, outputs, rank: rank * inputs,
        "bias": lambda inputs, outputs, rank: rank * (inputs + outputs) + outputs,
        "full matrices": lambda inputs, outputs, rank: rank * inputs * outputs,
        "itself is frozen": lambda i, o, rank: rank * (i + o) + i * o,
    },
}
