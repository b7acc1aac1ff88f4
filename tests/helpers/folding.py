"""Measure how folded code is: the figures that `test_architecture.py` keeps from growing.

    nodes     syntax nodes of a statement, without the statements inside it: the 90th percentile
    dense     comprehensions that must be unfolded in the head, per 1,000 statements: with a second
              `for`, a long condition, or another comprehension, a lambda or a conditional inside
    choices   conditional expressions, `a if b else c`, per 1,000 statements
    pairs     assignments of several unrelated values in one line, per 1,000 statements
    wide      lines of more than 100 characters, per 1,000 lines
    reasons   lines of comments, per 1,000 lines

Figures are symptoms. A reader decides whether code reads well; these only tell when it gets worse.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
TABLES = (ast.List, ast.Tuple, ast.Dict, ast.Set)
PRAGMA = re.compile(r"#\s*(type:|pyright|noqa|fmt:|ruff|pragma|pylint|-{3})")

LONGEST_CONDITION = 6
"""The nodes of a condition that is read at a glance: `x.name not in names`."""

LONGEST_COMPREHENSION = 24
"""The nodes of a comprehension of one line."""


class Figures(NamedTuple):
    """See the module."""

    nodes: float
    dense: float
    choices: float
    pairs: float
    wide: float
    reasons: float


def figures(paths: Iterable[Path]) -> Figures:
    """Return the figures of some files together."""
    sizes: list[int] = []
    dense = choices = pairs = wide = reasons = lines = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        sizes += [_size(statement) for statement in _statements(tree)]
        for node in ast.walk(tree):
            dense += _is_dense(node)
            choices += isinstance(node, ast.IfExp)
            pairs += _is_pair_of_strangers(node)
        for line in text.splitlines():
            lines += 1
            wide += len(line) > 100
            is_comment = line.lstrip().startswith("#")
            reasons += is_comment and not PRAGMA.search(line)

    sizes.sort()
    per_statement = 1000 / max(len(sizes), 1)
    per_line = 1000 / max(lines, 1)
    return Figures(
        nodes=sizes[int(0.9 * (len(sizes) - 1))] if sizes else 0,
        dense=dense * per_statement,
        choices=choices * per_statement,
        pairs=pairs * per_statement,
        wide=wide * per_line,
        reasons=reasons * per_line,
    )


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that are read: no definitions, docstrings or tables of constants."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, DEFINITIONS):
            continue
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_table = isinstance(node, ast.Assign | ast.AnnAssign) and _is_constant(node.value)
        if not is_docstring and not is_table:
            yield node


def _is_constant(value: ast.expr | None) -> bool:
    """Return True if a value is a list, tuple, dict or set of names and constants."""
    plain = (*TABLES, ast.Constant, ast.Name, ast.Attribute, ast.UnaryOp, ast.unaryop)
    nodes = [] if value is None else [*ast.walk(value)]
    inner = [node for node in nodes if not isinstance(node, ast.expr_context)]
    return isinstance(value, TABLES) and all(isinstance(node, plain) for node in inner)


def _size(node: ast.AST) -> int:
    """Return the number of syntax nodes, without those of statements inside."""
    count = 1
    for child in ast.iter_child_nodes(node):
        is_inside = isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)
        if not is_inside and not isinstance(child, ast.expr_context):
            count += _size(child)
    return count


def _is_dense(node: ast.AST) -> bool:
    if not isinstance(node, COMPREHENSIONS):
        return False
    has_inner = False
    for inner in ast.walk(node):
        is_folded = isinstance(inner, (*COMPREHENSIONS, ast.IfExp, ast.Lambda))
        has_inner = has_inner or (is_folded and inner is not node)
    has_long_condition = False
    for generator in node.generators:
        for condition in generator.ifs:
            has_long_condition = has_long_condition or _size(condition) > LONGEST_CONDITION
    is_long = _size(node) > LONGEST_COMPREHENSION
    return len(node.generators) > 1 or has_inner or has_long_condition or is_long


def _is_pair_of_strangers(node: ast.AST) -> bool:
    """Return True for `a, b = f(x), y + 1`, whose values must be told apart by counting commas."""
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    value = node.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    computed = (ast.Call, ast.IfExp, ast.BinOp, ast.Subscript)
    return len(value.elts) > 1 and any(isinstance(each, computed) for each in value.elts)
