"""How the collectives present themselves: help() and keywords of other libraries."""

import inspect
import pydoc

import pytest
import torch

import fshard as fs

X = torch.ones(4)


@pytest.mark.parametrize("function", [fs.psum, fs.all_gather, fs.ppermute, fs.send])
def test_help_shows_the_signature(function):
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)
    names = list(inspect.signature(function).parameters)
    assert inspect.isfunction(function) and all(name in text.splitlines()[2] for name in names), text
    assert "wait" not in names and "Handle" in str(inspect.signature(function.start))


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: fs.psum(X, axis_name="d"), "missing a required argument: 'axis'. The mesh axis is `axis`."),
        (lambda: fs.all_gather(X, "d", axis=0), "for argument 'axis'. The mesh axis is `axis`, a tensor dim is `dim`."),
        (lambda: fs.all_gather(X, "d", tiled=True), "Results are always tiled"),
        (lambda: fs.psum_scatter(X, "d", scatter_dimension=0), "The tensor dim is `dim`"),
        (
            lambda: fs.all_to_all(X, "d", split_axis=0, concat_axis=0),
            "is `split_dim`. The tensor dim to concatenate along is `concat_dim`.",
        ),
        (
            lambda: fs.ppermute(X, "d", pairs=[(0, 1)]),
            "fs.ppermute(tree, axis, perm): missing a required argument: 'perm'. The (source",
        ),
        (lambda: fs.broadcast.start(X, "d", src=0), "The device that sends is `source`"),
        (lambda: fs.psum(X, "d", nonsense=1), "unexpected keyword argument 'nonsense'."),
    ],
)
def test_foreign_keyword_raises_with_hint(call, hint):
    with pytest.raises(TypeError) as error:
        fs.run(call, mesh=fs.make_mesh({"d": 2}))
    assert hint in str(error.value)


def test_perm_as_keyword_runs():
    sent = fs.run(lambda: fs.ppermute(X * fs.axis_index("d"), "d", perm=[(1, 0)]), mesh=fs.make_mesh({"d": 2}))
    assert [int(x.sum()) for x in sent] == [4, 0]
