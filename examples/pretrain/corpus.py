"""English text that Python brings along, and rows of tokens that are packed of it.

The documents are the topics of `help()`, then the docstrings of the standard library: 1.3 MB.
"""

import ast
import random
import sysconfig
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.utils.data import IterableDataset

HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef)


def read_documents(count=None):
    """Return the first `count` documents, or all, in the same order on all processes."""
    return list(islice(_documents(), count))


def _documents():
    for name in sorted(topics):
        yield topics[name]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, HAS_DOCSTRING) else None
            if text:
                yield text


class PackedRows(IterableDataset):
    """Rows of `length` tokens, without end and without padding.

    The documents of an epoch are in an order of their own, one after the other: a row begins where
    the last one ended, in the middle of a document or at its end token. The position is the state:
    a stream that has loaded it goes on with the next row.
    """

    def __init__(self, documents, length, seed=0):
        self.documents = documents
        self.length = length
        self.seed = seed
        self.epoch = 0
        self.document = 0  # its number in the order of the epoch
        self.offset = 0  # of the next token in the document

    def __iter__(self):
        row = []
        while True:
            order = list(range(len(self.documents)))
            random.Random(f"{self.seed}, {self.epoch}").shuffle(order)
            while self.document < len(order):
                tokens = self.documents[order[self.document]]
                taken = tokens[self.offset : self.offset + self.length - len(row)]
                row += taken
                self.offset += len(taken)
                if self.offset == len(tokens):
                    self.document += 1
                    self.offset = 0
                # The position is that after the row before the row is used: a checkpoint in the
                # loop's body continues with the next one.
                if len(row) == self.length:
                    yield torch.tensor(row)
                    row = []
            self.epoch += 1
            self.document = 0

    def state_dict(self):
        return {"epoch": self.epoch, "document": self.document, "offset": self.offset}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.document = state["document"]
        self.offset = state["offset"]


def held_out_split(texts):
    """Return the documents to train on, and each tenth one, which is not trained on."""
    training = [text for number, text in enumerate(texts) if number % 10 != 9]
    return training, texts[9::10]
