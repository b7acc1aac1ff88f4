"""Messages of uneven sizes between processes."""

import torch

import fshard as fs


def uneven_jvp(w, first):
    torch.func.jvp(lambda w: fs.psum(w * 1 if first else torch.ones(2), "d"), (w,), (w * 10,))
    fs.psum(torch.ones(2), "d")


def uneven_backward(w, first):
    y = fs.all_gather(w * 1 if first else torch.ones(2), "d")
    if first:
        torch.autograd.grad(y.sum(), w)
    fs.psum_scatter(torch.arange(4.0), "d")


def uneven_message(w, first):
    def hand_on(w):
        return fs.send(w, "d", to=1) if first else fs.recv(torch.empty(2), "d", source=0)

    torch.func.jvp(lambda w: hand_on(w * 1), (w,), (w * 10,))
    hand_on(w)


UNEVEN = {uneven_jvp: "tangents", uneven_backward: "cotangents", uneven_message: "tangents"}
