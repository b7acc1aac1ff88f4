"""Every exercise takes its solution, and names the mistake of each wrong answer.

The oracle is the table of answers beside this file: a topic a file, each with its solutions, and
with wrong answers by a part of the hint that they must get.
"""

import json
import re
from importlib import import_module
from inspect import getsource
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard.testing.exercises import TOPICS, exercises
from fshard.testing.programs.source import program_named
from tests.testing.exercises import from_nothing

ANSWERS = {topic: import_module(f"tests.testing.exercises.{topic}") for topic in TOPICS}
ALL = [one for topic in TOPICS for one in exercises(topic)]
WRONG = [
    pytest.param(one.name, hint, id=f"{one.name}-{hint}")
    for one in ALL
    for hint in ANSWERS[one.name.partition(".")[0]].WRONG[one.name]
]


@pytest.mark.parametrize("name", [one.name for one in ALL])
def test_exercise_takes_its_solution(name):
    topic = ANSWERS[name.partition(".")[0]]

    remark = fs.testing.exercise(name).check(topic.SOLUTIONS[name])

    assert remark.is_right, remark


@pytest.mark.parametrize(("name", "hint"), WRONG)
def test_exercise_names_the_mistake_of_a_wrong_answer(name, hint):
    topic = ANSWERS[name.partition(".")[0]]

    remark = fs.testing.exercise(name).check(topic.WRONG[name][hint])

    assert remark.kind == "not yet"
    assert hint in remark.text
    assert "Traceback" not in remark.text


def raises(*args):
    raise KeyError("no such leaf")


def open_answer(*args):
    return ...


NONSENSE = (0, "P('data')", [], raises, lambda *args: None, torch.ones(2))


@pytest.mark.parametrize("name", [one.name for one in ALL])
def test_exercise_answers_nonsense_with_a_remark(name):
    remarks = [fs.testing.exercise(name).check(answer) for answer in NONSENSE]

    for remark in remarks:
        assert remark.kind == "not yet"
        assert remark.text.endswith((".", "?", "`"))


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_exercise_has_hints_by_step_and_is_open_without_an_answer(one):
    fresh = fs.testing.exercise(one.name)

    texts = [fresh.hint().text for _ in range(len(one.hints) + 1)]

    assert len(one.hints) >= 2
    assert texts[-1] == texts[-2]
    assert len(set(texts)) == len(one.hints)
    assert fresh.check(...).kind == "not answered yet"
    assert fresh.check(open_answer).kind == "not answered yet"
    assert fs.testing.exercise(one.name).hints_shown == 0
    assert re.fullmatch(r"<div .*</div>", fresh._repr_html_(), flags=re.DOTALL)


def test_at_least_40_exercises_each_with_two_wrong_answers():
    assert len(ALL) >= 40
    for one in ALL:
        assert len(ANSWERS[one.name.partition(".")[0]].WRONG[one.name]) >= 2, one.name


def test_exercise_of_another_name_raises_with_the_names():
    with pytest.raises(ValueError, match="zero.flat_bytes"):
        fs.testing.exercise("zero.flat")
    with pytest.raises(ValueError, match="meshes"):
        fs.testing.exercise("mesh.flat")


FILE_OF_OWN_STEP = Path(__file__).parents[3] / "notebooks" / "14_zero_from_nothing.ipynb"


def own_program(folder, answer):
    """Return the program of the notebook's own.py, with a step of the answers to its exercise."""
    cells = json.loads(FILE_OF_OWN_STEP.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    (source,) = (text for text in sources if text.startswith("%%writefile own.py"))
    empty = "def step(shards, moments, x, y):\n    return ..."
    assert empty in source

    functions = [from_nothing.params_loss, from_nothing.replicated, from_nothing.summed]
    functions += [from_nothing.local, from_nothing.own_step]
    parts = "\n\n".join(getsource(function) for function in functions)
    step = f"def step(shards, moments, x, y):\n    return own_step(shards, moments, x, y{answer})"
    file = folder / "own.py"
    text = source.partition("\n")[2].replace(empty, f"{parts}\n\n{step}")
    file.write_text(text)
    return program_named(f"{file}:program")


def test_own_step_of_the_notebook_is_certified_in_processes(certified, tmp_path):
    certificate = certified(own_program(tmp_path, ""), {"data": 2})

    assert certificate.ok
    assert {row.leaf for row in certificate.rows} == {"loss", "shards.0", "shards.1", "shards.2"}


@pytest.mark.thorough
@pytest.mark.parametrize("answer", [", replicated", ", summed", ", local"])
def test_own_step_with_a_mistake_diverges_in_processes(certified, tmp_path, answer):
    certificate = certified(own_program(tmp_path, answer), {"data": 2}, check=False)

    assert certificate.first.verdict == "DIVERGENT"
