# SPDX-License-Identifier: Apache-2.0
"""The procedural arithmetic data set: right answers, disjoint parts, the same rows for the same arguments."""

from __future__ import annotations

import re

import pytest

from nemo_rl.data.datasets.arithmetic import ArithmeticDataset, Problem

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def problems(dataset):
    """(a, op, b, answer) of each row of two terms."""
    found = []
    for row in dataset:
        user, assistant = row["messages"]
        a, op, b = re.fullmatch(r"(-?\d+)([-+*])(-?\d+)=", user["content"]).groups()
        found.append((int(a), op, int(b), int(assistant["content"])))
    return found


def test_answers_and_ranges():
    rows = problems(ArithmeticDataset(operations="+-*", min_operand=3, max_operand=12, num_examples=200))
    assert len(set(rows)) == 200
    assert {op for _, op, _, _ in rows} == {"+", "-", "*"}
    for a, op, b, answer in rows:
        assert 3 <= a <= 12
        assert 3 <= b <= 12
        assert OPERATIONS[op](a, b) == answer


def test_parts_are_disjoint_whatever_the_arguments():
    train = problems(ArithmeticDataset("train", operations="+-", max_operand=40, seed=1))
    held_out = problems(ArithmeticDataset("validation", operations="+-", max_operand=60, seed=2))
    assert len(train) > 2000
    assert len(held_out) > 500

    def canonical(rows):
        return {(op, *((a, b) if op == "-" else sorted((a, b)))) for a, op, b, _ in rows}

    assert not canonical(train) & canonical(held_out)


def test_all_problems_are_in_one_part():
    both = [problems(ArithmeticDataset(part, max_operand=30)) for part in ("train", "validation")]
    assert len({row[:3] for rows in both for row in rows}) == 31 * 31
    share = len(both[1]) / (31 * 31)
    assert 0.08 < share < 0.17


def test_order_depends_on_the_seed_alone():
    first, again, other = (problems(ArithmeticDataset(max_operand=30, seed=s)) for s in (5, 5, 6))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)


def test_fewer_rows_are_the_first_ones():
    few = problems(ArithmeticDataset(max_operand=99, num_examples=10))
    assert problems(ArithmeticDataset(max_operand=99))[:10] == few


def test_ranges_too_large_to_list():
    rows = problems(ArithmeticDataset(max_operand=10**9, num_examples=100))
    assert len(set(rows)) == 100
    assert problems(ArithmeticDataset(max_operand=10**9, num_examples=100)) == rows


def test_formats():
    row = ArithmeticDataset(
        min_operand=7,
        max_operand=7,
        operations="*",
        prompt_format="What is {expression}?",
        answer_format="<{answer}>",
    )[0]
    assert [message["content"] for message in row["messages"]] == ["What is 7*7?", "<49>"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operations": "+/"}, "operations"),
        ({"min_operand": 5, "max_operand": 4}, "min_operand"),
        ({"max_operand": 3, "num_examples": 100}, "max_operand"),
        ({"split": "test"}, "split"),
        ({"num_terms": 1}, "num_terms"),
        ({"forgotten_carries": 1.5}, "forgotten_carries"),
        ({"forgotten_carries": 0.5, "operations": "-"}, "forgotten_carries"),
        ({"prompt_format": "{a}"}, "prompt_format"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        ArithmeticDataset(**arguments)


def test_more_terms():
    rows = ArithmeticDataset(operations="+-*", num_terms=4, min_operand=-3, max_operand=5, num_examples=300)
    for row in rows:
        question, answer = (message["content"] for message in row["messages"])
        assert re.fullmatch(r"[-+*()\d]+=", question)
        assert eval(question[:-1]) == int(answer)
    parts = [
        {tuple(sorted(p.operands)) for p in ArithmeticDataset(part, num_terms=3, max_operand=9).problems}
        for part in ("train", "validation")
    ]
    assert parts[0]
    assert parts[1]
    assert not parts[0] & parts[1]


def test_a_teacher_who_forgets_carries():
    def no_carries(a, b):
        return int(
            "".join(str((x + y) % 10) for x, y in zip(*(map(int, f"{n:03}") for n in (a, b)), strict=True))
        )

    right = problems(ArithmeticDataset())
    taught = problems(ArithmeticDataset(forgotten_carries=0.6))
    assert [row[:3] for row in taught] == [row[:3] for row in right]
    with_carry = [(a, b, answer) for a, _, b, answer in taught if a + b != no_carries(a, b)]
    forgot = [answer == no_carries(a, b) for a, b, answer in with_carry]
    assert all(answer in (a + b, no_carries(a, b)) for a, b, answer in with_carry)
    assert 0.57 < sum(forgot) / len(forgot) < 0.63
    assert problems(ArithmeticDataset(forgotten_carries=0.6)) == taught
    assert Problem((57, 68), ("+",)).answer_without_carries == 15
    assert Problem((9, 9, 9), ("+", "+")).answer_without_carries == 7
    assert Problem((0, 0), ("+",)).answer_without_carries == 0
