"""Text as batches of tokens, and tokens as text."""

import torch


def batch_of(rows, count):
    """Return the next rows of a stream; of each all tokens but the last, and those that follow them."""
    tokens = torch.stack([next(rows) for _ in range(count)])
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}  # (count, length) each


@torch.no_grad()
def write(model, tokenizer, count, start="The "):
    """Return a text of `count` tokens that the model, on one device, writes after a start."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.tensor(tokenizer.encode(start))
    for _ in range(count):
        scores = model(tokens[None, -256:])[0, -1] / 0.7
        best = scores.topk(40)
        chosen = torch.multinomial(best.values.softmax(-1), 1, generator=draw)
        tokens = torch.cat([tokens, best.indices[chosen]])
    return tokenizer.decode(tokens.tolist())
