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
        (lambda: fs.psum(X, axis_name="d"), "axis_name is not an argument. The mesh axis is `axis`."),
        (lambda: fs.all_gather(X, "d", axis=0), "axis is given twice. The mesh axis is `axis`, a tensor dim is `dim`."),
        (lambda: fs.all_gather(X, "d", tiled=True), "Results are always tiled"),
        (lambda: fs.psum_scatter(X, "d", scatter_dimension=0), "The tensor dim is `dim`"),
        (lambda: fs.all_to_all(X, "d", split_axis=0, concat_axis=0), "is `split_dim`. concat_axis is not"),
        (lambda: fs.ppermute(X, "d", pairs=[(0, 1)]), r"fs.ppermute(tree, axis, perm): pairs is not an argument"),
        (lambda: fs.broadcast.start(X, "d", src=0), "The device that sends is `source`"),
        (lambda: fs.psum(X, "d", nonsense=1), "nonsense is not an argument."),
    ],
)
def test_foreign_keyword_raises_with_hint(call, hint):
    with pytest.raises(TypeError) as error:
        fs.run(call, mesh=fs.make_mesh({"d": 2}))
    assert hint in str(error.value)


def test_perm_as_keyword_runs():
    sent = fs.run(lambda: fs.ppermute(X * fs.axis_index("d"), "d", perm=[(1, 0)]), mesh=fs.make_mesh({"d": 2}))
    assert [int(x.sum()) for x in sent] == [4, 0]
