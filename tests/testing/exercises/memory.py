"""Answers to the exercises of memory: the right ones, and wrong ones by their hint."""

import torch

import fshard as fs
from fshard import P


def recompute(weights, x, layer):
    for w in weights:
        x = fs.remat(layer)(w, x)
    return x.square().mean()


def plain(weights, x, layer):
    for w in weights:
        x = layer(w, x)
    return x.square().mean()


def detached(weights, x, layer):
    for w in weights:
        x = layer(w, x.detach())
    return x.square().mean()


def all_at_once(weights, x, layer):
    return fs.remat(lambda weights, x: plain(weights, x, layer))(weights, x)


SOLUTIONS = {
    "memory.host": lambda mesh: fs.Layout(mesh, P("data"), "host"),
    "memory.in_place": lambda x: torch.tanh(x).mul_(2).add_(1),
    "memory.recompute": recompute,
}

WRONG = {
    "memory.host": {
        "memory of the device": lambda mesh: fs.Layout(mesh, P("data")),
        "all elements": lambda mesh: fs.Layout(mesh, P(), "host"),
        "return a layout": lambda mesh: P("data"),
        "FSHARD_DISK": lambda mesh: fs.Layout(mesh, P("data"), "disk"),
    },
    "memory.in_place": {
        "its operand is there": lambda x: torch.tanh(x) * 2 + 1,
        "argument itself": lambda x: x.tanh_().mul_(2).add_(1),
        "return a tensor": lambda x: (torch.tanh(x) * 2 + 1).tolist(),
        "values are not": lambda x: torch.tanh(x).mul_(2),
    },
    "memory.recompute": {
        "are saved for the backward": plain,
        "and the gradient is not": detached,
        "activations": all_at_once,
        "another one": lambda weights, x, layer: plain(weights[:-1], x, layer),
    },
}
