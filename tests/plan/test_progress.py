"""`ProgressLine` writes to a terminal at once, and to a file after some seconds; a search has its steps."""

import io

import pytest

import fshard as fs
from fshard.plan.tables import progress


class Terminal(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_progress_is_told_to_terminals_and_to_those_who_wait(monkeypatch, stream, patience):
    monkeypatch.setattr(progress, "PATIENCE", patience)
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    with progress.ProgressLine() as line:
        line("tried 1 layout")
        line("tried 2 layouts")
    text = stderr.getvalue()
    if stream is Terminal:
        assert "tried 2 layouts ..." in text and text.endswith(progress.ERASED)
    else:
        told = "tried 1 layout ...\ntried 2 layouts ...\n"
        assert text == ("" if patience else told)


def test_search_says_how_many_layouts_it_has_tried_and_which_it_costs():
    sizes = {"hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "vocab": 100, "sequence": 32}
    small = fs.plan.Transformer(layers=2, **sizes)
    h100, adamw = fs.plan.cluster("h100"), fs.optim.adamw(0.1)
    options = {"devices": 2, "cluster": h100, "global_batch": 4, "optimizer": adamw}
    texts = []

    plans = fs.plan.search(
        small, **options, tensor=1, pipeline=1, rows=1, recompute="never", progress=texts.append
    )

    count = plans.tried
    tried = [f"tried {number:,} layouts" for number in range(1, count + 1)]
    assert texts[:count] == tried
    assert texts[count] == f"tried {count} layouts; costing 1 of {count} by their programs"
