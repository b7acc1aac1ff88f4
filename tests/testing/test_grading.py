"""Grading an answer: by the truth, by the results of known mistakes, then by the first case."""

import pytest

from fshard.testing.grading import Cases, Exercise, WrongAnswer, mistake


def area(width, height):
    return width * height


@mistake("That is the circumference.")
def circumference(width, height):
    return 2 * (width + height)


@mistake("That is half of it.")
def half_circumference(width, height):
    return width + height


AREA = Cases(
    cases=[(2, 2), (3, 5)],
    truth=area,
    mistakes=(circumference, half_circumference),
)


def run_of_square(answer, side):
    return answer(side, side)


def area_of_square(side):
    return side**2


SQUARE = Cases(
    cases=[(2,), (3,)],
    truth=area_of_square,
    mistakes=(circumference, half_circumference),
    run=run_of_square,
)


def message_of(cases, answer):
    with pytest.raises(WrongAnswer) as raised:
        cases(answer)
    return str(raised.value)


def test_cases_take_an_answer_with_the_results_of_the_truth():
    AREA(lambda a, b: b * a)


def test_cases_give_the_hint_of_the_mistake_with_the_same_results():
    assert message_of(AREA, lambda a, b: a + b) == "That is half of it."


def test_cases_do_not_give_a_hint_if_one_case_differs():
    message = message_of(AREA, lambda a, b: 4 * a)  # as the circumference in the first case alone

    assert message == "For width = 2, height = 2 the answer is 8; the program has 4."


def test_cases_call_a_mistake_as_they_call_the_answer():
    assert message_of(SQUARE, lambda a, b: 2 * a + 2 * b) == "That is the circumference."


def test_cases_name_the_values_of_a_case_by_the_truth():
    message = message_of(SQUARE, lambda a, b: a * b + 1)

    assert message == "For side = 2 the answer is 5; the program has 4."


@pytest.mark.parametrize(("form", "kind"), [("answer(n)", "not yet"), ("answer = 1", "right")])
def test_exercise_requires_a_function_only_if_its_form_is_a_call(form, kind):
    one = Exercise(
        name="numbers.one",
        question="Which number is one?",
        form=form,
        hints=("It is the first.", "1."),
        why="All others are made of it.",
        grade=lambda answer: None,
    )

    assert one.check(1).kind == kind
