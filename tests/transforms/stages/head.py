"""A last stage whose loss is its own."""

import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * x @ self.weight.T
