"""Answers to the exercises of pipelines: the right ones, and wrong ones by their hint."""

from math import ceil


def written(microbatches, ahead=1):
    first = [f"0F{m}" for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        if m + ahead < microbatches:
            first.append(f"0F{m + ahead}")
        first.append(f"0B{m}")
    second = [f"1{kind}{m}" for m in range(microbatches) for kind in "FB"]
    return f"{','.join(first)}\n{','.join(second)}"


def gpipe(microbatches):
    rows = []
    for stage in range(2):
        forwards = [f"{stage}F{m}" for m in range(microbatches)]
        rows.append(",".join(forwards + [f"{stage}B{m}" for m in range(microbatches)]))
    return "\n".join(rows)


def one_by_one(microbatches):
    rows = []
    for stage in range(2):
        rows.append(",".join(f"{stage}{kind}{m}" for m in range(microbatches) for kind in "FB"))
    return "\n".join(rows)


def backward_first(microbatches):
    return written(microbatches).replace("1F0,1B0", "1B0,1F0")


SOLUTIONS = {
    "pipelines.bubble": lambda stages, m: (stages - 1) / (m + stages - 1),
    "pipelines.enough": lambda stages, limit: ceil((stages - 1) * (1 - limit) / limit),
    "pipelines.held": lambda stage, stages, microbatches: min(stages - stage, microbatches),
    "pipelines.written": written,
}

WRONG = {
    "pipelines.bubble": {
        "relative to the work": lambda k, m: (k - 1) / m,
        "in percent": lambda k, m: 100 * (k - 1) / (m + k - 1),
        "which it works": lambda k, m: m / (m + k - 1),
        "not for K": lambda k, m: k / (m + k),
        "M - 1 others": lambda k, m: (k - 1) / (m + k),
    },
    "pipelines.enough": {
        "round up": lambda k, limit: int((k - 1) * (1 - limit) / limit),
        "one too many": lambda k, limit: int((k - 1) * (1 - limit) / limit) + 1,
        "relative to the work": lambda k, limit: ceil((k - 1) / limit),
    },
    "pipelines.held": {
        "more than there are": lambda stage, k, m: k - stage,
        "GPipe": lambda stage, k, m: m,
        "other way": lambda stage, k, m: min(stage + 1, m),
        "not none": lambda stage, k, m: min(k - stage - 1, m),
    },
    "pipelines.written": {
        "hold 2 and 2": gpipe,
        "longer than needed": one_by_one,
        "cannot run": backward_first,
        "is missing": lambda m: "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
        "two lines; got 1": lambda m: "0F0,0B0",
        "must return a text": lambda m: [["0F0"], ["1F0"]],
    },
}
