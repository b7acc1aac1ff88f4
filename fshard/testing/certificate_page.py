"""`certificate_page`: a certificate as one HTML file, a tree of the model's leaves.

    rows ─> tree: "layers.0.q.weight" is in q, in 0, in layers ─> nested lists that fold

The heading of a module counts the verdicts below it, and has the colour of the worst. A module is
open if something in it fails. The file needs no script and no network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

from fshard.testing.certificate import Certificate, CertificateRow, Verdict

SEVERITY: tuple[Verdict, ...] = ("EXACT", "BOUNDED", "INCONCLUSIVE", "DIVERGENT")
"""The verdicts, the worst one last."""

# Four colours that differ for the colour-blind too; the words are there besides.
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2127; --line: #d9dde3; }
@media (prefers-color-scheme: dark) { :root { --back: #0e1116; --text: #d9dfe7; --line: #2a303a; } }
body { margin: 1.5rem auto; max-width: 70rem; padding: 0 1rem; background: var(--back);
  color: var(--text); font: 14px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.15rem; } h2 { font-size: 1rem; margin-bottom: .3rem; }
ul { list-style: none; margin: 0; padding-left: 1.1rem; border-left: 1px solid var(--line); }
summary { cursor: pointer; }
code { font: 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
small { opacity: .75; }
b { display: inline-block; padding: 0 .45em; border-radius: .3em; font-size: 11px; color: #111; }
.exact { background: #6fc7a8; } .bounded { background: #8fc9ee; }
.inconclusive { background: #efc15a; } .divergent { background: #f0905a; }
""".strip()


@dataclass
class _Module:
    """A module: the rows of its own leaves, and the modules in it, in the order of the model."""

    rows: list[tuple[str, CertificateRow]] = field(default_factory=list[tuple[str, CertificateRow]])
    children: dict[str, _Module] = field(default_factory=dict[str, "_Module"])

    def verdicts(self) -> Counter[Verdict]:
        """Count the verdicts of all leaves below."""
        counts = Counter[Verdict]([row.verdict for _, row in self.rows])
        for child in self.children.values():
            counts += child.verdicts()
        return counts


def certificate_page(certificate: Certificate) -> str:
    """Return the text of the page."""
    verdict = "All leaves agree." if certificate.ok else _failure(certificate)
    of_stages: dict[int | str, list[CertificateRow]] = {}
    for row in certificate.rows:
        of_stages.setdefault(row.stage, []).append(row)

    parts = [f"<h1>{escape(certificate.title)}</h1>", f"<p>{verdict}</p>"]
    for note in certificate.notes:
        parts.append(f"<p>{escape(note)}</p>")
    for stage, rows in of_stages.items():
        parts.append(f"<h2>{escape(certificate.column)} {escape(str(stage))}</h2>")
        parts.append(_list_of(_tree(rows)))
    parts.append(f"<p><small>{certificate.steps} steps. {escape(certificate.unseen)}</small></p>")
    title = f"<title>{escape(certificate.title)}</title>"
    head = f'<meta charset="utf-8">{title}<style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(parts)}</body></html>\n'


def _failure(certificate: Certificate) -> str:
    first = certificate.first
    assert first is not None
    return f"First failure: <code>{escape(first.leaf)}</code>, {escape(first.reason)}."


def _tree(rows: Iterable[CertificateRow]) -> _Module:
    root = _Module()
    for row in rows:
        *path, name = row.leaf.split(".")
        module = root
        for part in path:
            module = module.children.setdefault(part, _Module())
        module.rows.append((name, row))
    return root


def _list_of(module: _Module) -> str:
    """Return a module's leaves and its modules as a list."""
    items = [_leaf(name, row) for name, row in module.rows]
    for name, child in module.children.items():
        counts = child.verdicts()
        worst = max(counts, key=SEVERITY.index)
        is_open = " open" if worst not in ("EXACT", "BOUNDED") else ""
        number = ", ".join(
            [f"{counts[verdict]} {verdict}" for verdict in SEVERITY if counts[verdict]]
        )
        heading = f"{_badge(worst)} <code>{escape(name)}</code> <small>{number}</small>"
        items.append(
            f"<li><details{is_open}><summary>{heading}</summary>{_list_of(child)}</details></li>"
        )
    return f"<ul>{''.join(items)}</ul>"


def _leaf(name: str, row: CertificateRow) -> str:
    numbers = f"error {row.error:.1e}, bound {row.bound:.1e}"
    reason = f"<br>{escape(row.reason)}" if row.reason else ""
    badge = _badge(row.verdict)
    return f"<li>{badge} <code>{escape(name)}</code> <small>{numbers}</small>{reason}</li>"


def _badge(verdict: Verdict) -> str:
    return f'<b class="{verdict.lower()}">{verdict}</b>'
