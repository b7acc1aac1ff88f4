"""Answers to the exercises of slow links: the right ones, and wrong ones by their hint."""

import torch


def feedback(grad, residual, compress):
    corrected = grad + residual
    message = compress(corrected)
    return message, corrected - message


def forgetful(grad, residual, compress):
    message = compress(grad + residual)
    return message, grad - message


def in_place(grad, residual, compress):
    grad += residual
    message = compress(grad)
    return message, grad - message


def unused(grad, residual, compress):
    return compress(grad), residual + grad - compress(grad)


def ring(n, own=1 / 3):
    eye = torch.eye(n)
    return own * eye + (1 - own) / 2 * (eye.roll(1, 1) + eye.roll(-1, 1))


SOLUTIONS = {
    "slow_links.local": lambda n, numbers, every: 2 * (n - 1) / n * 4 * numbers / every,
    "slow_links.feedback": feedback,
    "slow_links.ring": ring,
}

WRONG = {
    "slow_links.local": {
        "Of `every` steps": lambda n, numbers, every: 2 * (n - 1) / n * 4 * numbers,
        "sends twice": lambda n, numbers, every: (n - 1) / n * 4 * numbers / every,
        "4 bytes": lambda n, numbers, every: 2 * (n - 1) / n * numbers / every,
        "own shard": lambda n, numbers, every: 8 * numbers / every,
    },
    "slow_links.feedback": {
        "forgets the old": forgetful,
        "never added": lambda g, r, compress: (compress(g), g - compress(g)),
        "is lost": lambda g, r, compress: (compress(g), torch.zeros(5)),
        "sign": lambda g, r, compress: (compress(g + r), compress(g + r) - g - r),
        "not compressed": lambda g, r, compress: (g + r, torch.zeros(5)),
        "Nothing is sent": lambda g, r, compress: (torch.zeros(5), g + r),
        "not used": unused,
        "in place": in_place,
        "a pair": lambda g, r, compress: compress(g + r),
    },
    "slow_links.ring": {
        "only swaps": lambda n: ring(n, own=1.0) if n == 5 else ring(n, own=0.0),
        "sum to 1": lambda n: 3 * ring(n),
        "than its two neighbours": lambda n: torch.full((n, n), 1 / n),
        "equal weights have": lambda n: ring(n, own=0.9),
        "n x n": lambda n: [1 / 3, 1 / 3, 1 / 3],
    },
}
