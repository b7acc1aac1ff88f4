"""A byte-pair tokenizer: a text is bytes at first, and the most frequent pair becomes a token of its own.

A merge never crosses the border of a word, so a text is counted and encoded word by word.
"""

import re
from collections import Counter, defaultdict
from itertools import pairwise

WORDS = re.compile(r" ?\w+| ?[^\w\s]+|\s+?(?= \S)|\s+")
"""A space belongs to the word that follows it."""


class Tokenizer:
    """Encodes texts as numbers below `size`, by pairs that become one token; the first pair first."""

    def __init__(self, merges):
        self.merges = {pair: 256 + number for number, pair in enumerate(merges)}
        self.bytes = [bytes([byte]) for byte in range(256)]
        for left, right in merges:
            self.bytes.append(self.bytes[left] + self.bytes[right])
        self.end = len(self.bytes)  # the token after each document
        self.size = self.end + 1
        self._encoded_words = {}

    @classmethod
    def train(cls, texts, size):
        """Return the tokenizer of some texts, with at most `size` tokens."""
        word_counts = Counter()
        for text in texts:
            word_counts.update(WORDS.findall(text))
        words = [list(word.encode()) for word in word_counts]
        frequencies = list(word_counts.values())

        pair_counts = Counter()
        words_with = defaultdict(set)
        for number, word in enumerate(words):
            for pair in pairwise(word):
                pair_counts[pair] += frequencies[number]
                words_with[pair].add(number)

        merges = []
        while len(merges) < size - 257 and pair_counts:
            # Of two pairs that are equally frequent the larger one: all processes choose alike.
            count, best = max(zip(pair_counts.values(), pair_counts, strict=True))
            if count == 0:
                break
            for number in words_with.pop(best):
                frequency = frequencies[number]
                for pair in pairwise(words[number]):
                    pair_counts[pair] -= frequency
                words[number] = merged(words[number], best, 256 + len(merges))
                for pair in pairwise(words[number]):
                    pair_counts[pair] += frequency
                    words_with[pair].add(number)
            merges.append(best)
            del pair_counts[best]
        return cls(merges)

    def encode(self, text):
        """Return the tokens of a text, without the end token."""
        tokens = []
        for word in WORDS.findall(text):
            if word not in self._encoded_words:
                self._encoded_words[word] = self._encode_word(word)
            tokens += self._encoded_words[word]
        return tokens

    def _encode_word(self, word):
        tokens = list(word.encode())
        while len(tokens) > 1:
            first_pair = min(pairwise(tokens), key=lambda pair: self.merges.get(pair, self.size))
            if first_pair not in self.merges:
                break
            tokens = merged(tokens, first_pair, self.merges[first_pair])
        return tokens

    def decode(self, tokens):
        """Return the text of some tokens; an end token is an empty line."""
        text = b"".join(b"\n\n" if token == self.end else self.bytes[token] for token in tokens)
        return text.decode(errors="replace")


def merged(tokens, pair, token):
    """Return tokens with `token` in place of each occurrence of a pair."""
    result = []
    position = 0
    while position < len(tokens):
        if tuple(tokens[position : position + 2]) == pair:
            result.append(token)
            position += 2
        else:
            result.append(tokens[position])
            position += 1
    return result
