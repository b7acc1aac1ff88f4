"""Modules of a user's own with their batches and losses, as `fs.lab` takes them."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from fshard.laboratory.subject import Subject


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Equal layers between two others."""

    def __init__(self, more=nn.Identity):
        super().__init__()
        self.read = nn.Linear(8, 16)
        self.more = more()
        self.blocks = nn.ModuleList([Residual(16) for _ in range(4)])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.more(self.read(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvolvedAttention(nn.Module):
    """A convolution, then attention of all pixels to each other."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, image):
        image = image + torch.relu(self.conv(image))
        sizes = image.shape[2:]
        pixels = image.flatten(2).transpose(1, 2)
        parts = self.qkv(self.norm(pixels)).chunk(3, -1)
        query, key, value = [x.unflatten(-1, (4, -1)).transpose(1, 2) for x in parts]
        mixed = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return image + self.out(mixed).transpose(1, 2).unflatten(2, sizes)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList([ConvolvedAttention(16) for _ in range(2)])
        self.head = nn.Linear(16, 10)

    def forward(self, image):
        image = self.stem(image)
        for block in self.blocks:
            image = block(image)
        return self.head(image.mean((2, 3)))


def loss_of_classes(output, batch):
    return cross_entropy(output, batch[1])


def tower(more=nn.Identity):
    """Return a subject: layers of matrices, and four samples of floats with classes."""
    torch.manual_seed(0)
    batch = (torch.randn(4, 8), torch.arange(4))
    return Subject(Tower(more), batch, loss_of_classes)


def images():
    """Return a subject: convolutions and attention, and two images with classes."""
    torch.manual_seed(0)
    batch = (torch.randn(2, 3, 4, 4), torch.tensor([3, 7]))
    return Subject(Images(), batch, loss_of_classes)


def llama():
    """Return a subject: a Llama of transformers, which returns its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=32,
        use_cache=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return Subject(LlamaForCausalLM(config), _batch_of_tokens())


def gpt2():
    """Return a subject: a GPT-2 of transformers, which returns its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=4,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return Subject(GPT2LMHeadModel(config), _batch_of_tokens())


def _batch_of_tokens():
    ids = torch.randint(32, (2, 8))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


SUBJECTS = {"tower": tower, "images": images, "llama": llama, "gpt2": gpt2}
