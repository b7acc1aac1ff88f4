"""The page of a certificate shows each leaf once, in its module, with its verdict.

The oracle reads the page with Python's parser of HTML, and compares it with the rows.
"""

from html.parser import HTMLParser

import pytest

from fshard.testing.certificate import Certificate, CertificateRow
from fshard.testing.certificate_page import certificate_page

ROWS = (
    CertificateRow("data=2", "loss", "EXACT", 0.0, 1e-9),
    CertificateRow("data=2", "layers.0.q.weight", "BOUNDED", 1e-12, 1e-9),
    CertificateRow("data=2", "layers.0.q.bias", "EXACT", 0.0, 1e-9),
    CertificateRow("data=2", "layers.1.q.weight", "DIVERGENT", 1.0, 1e-9, "step 0: a <b> & c", 0),
    CertificateRow("data=4", "loss", "INCONCLUSIVE", 1.0, 1e-9, "step 1: not finite", 1),
)


class Reader(HTMLParser):
    """Reads the badges and names of a page, and which modules are open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.badges, self.names, self.is_open = [], [], [], []
        self.feed(text)
        assert not self.tags, "tags are not closed"

    def handle_starttag(self, tag, attrs):
        if tag in ("meta", "br"):
            return
        self.tags.append(tag)
        if tag == "details":
            self.is_open.append("open" in dict(attrs))

    def handle_endtag(self, tag):
        assert self.tags.pop() == tag

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "b":
            self.badges.append(data)
        if self.tags and self.tags[-1] == "code" and "li" in self.tags:
            self.names.append(data)


@pytest.fixture
def text():
    return certificate_page(
        Certificate(ROWS, 2, "runs <compared>", "It does not see & know.", "mesh")
    )


def test_a_page_shows_the_leaves_in_their_modules(text):
    read = Reader(text)

    assert read.names == ["loss", "layers", "0", "q", "weight", "bias", "1", "q", "weight", "loss"]
    assert read.badges == [
        "EXACT",  # loss
        "DIVERGENT",  # layers: the worst of it
        "BOUNDED",  # layers.0
        "BOUNDED",  # layers.0.q
        "BOUNDED",
        "EXACT",
        "DIVERGENT",  # layers.1
        "DIVERGENT",  # layers.1.q
        "DIVERGENT",
        "INCONCLUSIVE",
    ]


def test_modules_with_failures_are_open(text):
    assert Reader(text).is_open == [True, False, False, True, True]


def test_a_page_escapes_texts_and_names_the_first_failure(text):
    assert "runs &lt;compared&gt;" in text and "a &lt;b&gt; &amp; c" in text
    assert "First failure: <code>layers.1.q.weight</code>" in text
    assert "<h2>mesh data=2</h2>" in text and "<h2>mesh data=4</h2>" in text
    assert "All leaves agree." in certificate_page(Certificate(ROWS[:3], 2, "", "", "mesh"))


def test_a_page_needs_no_script_and_no_network(text):
    assert "<script" not in text and "http" not in text


def test_notes_are_on_the_page_and_warnings_above_the_table_too():
    notes = ("Bounds are those of bf16.", "WARNING: 3 of 8 rows are read by several ranks.")
    certificate = Certificate(ROWS[:1], 2, "runs", "It sees not all.", "mesh", notes)
    page = certificate_page(certificate)
    assert all(f"<p>{note}</p>" in page for note in notes)

    lead, *rest = str(certificate).splitlines()
    assert lead == notes[1]
    assert "Bounds are those of bf16." in " ".join(" ".join(rest).split())
