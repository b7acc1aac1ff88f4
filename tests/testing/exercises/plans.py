"""Answers to the exercises of plans: the right ones, and wrong ones by their hint."""

import fshard as fs


def parameters(hidden, ffn, heads, kv_heads):
    attention = 2 * hidden * hidden + 2 * hidden * (hidden * kv_heads // heads)
    return attention + 3 * hidden * ffn + 2 * hidden


def layout(devices, node, **changed):
    data = devices // (4 * node)
    sizes = {"tensor": node, "pipeline": 4, "data": data, "zero_stage": 1, "microbatches": 12}
    return fs.Parallelism(**{**sizes, **changed})


SOLUTIONS = {
    "plans.parameters": parameters,
    "plans.batch": lambda plan: plan.data * plan.microbatches * plan.rows,
    "plans.layout": layout,
}

WRONG = {
    "plans.parameters": {
        "fewer heads": lambda h, ffn, heads, kv: 4 * h * h + 3 * h * ffn + 2 * h,
        "is gated": lambda h, ffn, heads, kv: parameters(h, ffn, heads, kv) - h * ffn,
        "norms": lambda h, ffn, heads, kv: parameters(h, ffn, heads, kv) - 2 * h,
        "output of attention": lambda h, ffn, heads, kv: parameters(h, ffn, heads, kv) - h * h,
    },
    "plans.batch": {
        "same rows": lambda plan: plan.devices * plan.microbatches * plan.rows,
        "several microbatches": lambda plan: plan.data * plan.rows,
        "`plan.rows` rows": lambda plan: plan.data * plan.microbatches,
        "one device's part": lambda plan: plan.microbatches * plan.rows,
    },
    "plans.layout": {
        "of a node": lambda devices, node: layout(devices, node, tensor=2 * node),
        "four stages": lambda devices, node: layout(devices, node, pipeline=2),
        "must be all": lambda devices, node: layout(devices, node, data=devices),
        "`zero_stage=1`": lambda devices, node: layout(devices, node, zero_stage=0),
        "ZeRO 2 and 3": lambda devices, node: layout(devices, node, zero_stage=2),
        "The bubble is": lambda devices, node: layout(devices, node, microbatches=8),
        'must be "1f1b"': lambda devices, node: layout(devices, node, schedule="gpipe"),
        "must return": lambda devices, node: {"tensor": node},
    },
}
