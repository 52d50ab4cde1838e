# SPDX-License-Identifier: Apache-2.0
"""``dataset_name: arithmetic``: arithmetic problems made on the fly, without a download.

A problem is in training or in validation by a hash of the problem itself. The two parts are therefore disjoint
whatever the seeds, ranges or sizes of the two data sets are, and ``3+5`` never stands in one part while ``5+3`` stands
in the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl.utils.hashing import hash64

Split = Literal["train", "validation"]

OPERATIONS = ("+", "-", "*")
VALIDATION_SHARE = 8
"""One problem in so many is a validation problem."""

ENUMERATED = 1 << 18
"""Up to so many problems the whole range is listed and shuffled; beyond, problems are drawn."""

DEFAULT_NUM_EXAMPLES = 50_000


@dataclass(frozen=True)
class Problem:
    """``operands[0] operations[0] operands[1] operations[1] ...``; ``*`` binds more tightly than ``+`` and ``-``."""

    operands: tuple[int, ...]
    operations: tuple[str, ...]

    @property
    def expression(self) -> str:
        """The problem as text, such as ``3+8*5``; negative operands stand in brackets."""
        texts = [str(value) if value >= 0 else f"({value})" for value in self.operands]
        return texts[0] + "".join(op + text for op, text in zip(self.operations, texts[1:], strict=True))

    @property
    def answer(self) -> int:
        """The value."""
        total, product = 0, self.operands[0]
        for op, value in zip(self.operations, self.operands[1:], strict=True):
            if op == "*":
                product *= value
            else:
                total, product = total + product, value if op == "+" else -value
        return total + product

    @property
    def answer_without_carries(self) -> int:
        """The sum as somebody gets it who adds column by column and forgets every carry: ``57+68`` gives 15."""
        total, place = 0, 1
        while any(value >= place for value in self.operands):
            total += sum(value // place % 10 for value in self.operands) % 10 * place
            place *= 10
        return total

    @property
    def is_validation(self) -> bool:
        """Whether it is a validation problem; sums and products of the same operands in any order go together."""
        operands: Sequence[int] = self.operands
        if set(self.operations) in ({"+"}, {"*"}):
            operands = sorted(operands)
        return hash64("arithmetic", "".join(self.operations), *operands) % VALIDATION_SHARE == 0


class ArithmeticDataset(Sequence[dict[str, Any]]):
    """Rows ``{"messages": [user, assistant], "task_name": ...}`` of one part; each problem occurs at most once.

    Args:
        split: Which part.
        operations: Subset of ``+ - *``, as a string or a list; each place between operands takes any of them.
        num_terms: Operands of a problem.
        min_operand: Smallest operand.
        max_operand: Largest operand.
        num_examples: Rows; ``None`` takes all problems of this part, at most :data:`DEFAULT_NUM_EXAMPLES`.
        seed: Order of the rows, and which problems are taken if not all are.
        prompt_format: Text of the prompt, with ``{expression}``.
        answer_format: Text of the assistant's message, with ``{answer}``.
        forgotten_carries: Share of rows whose answer forgets the carries: demonstrations of an imperfect teacher, for
            supervised learning. Sums only; leave it at 0 wherever answers are compared with.
        task_name: Name that the rows carry.

    Raises:
        ValueError: For an unknown operation, an empty range, or fewer problems than ``num_examples``.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        operations: str | Sequence[str] = "+",
        num_terms: int = 2,
        min_operand: int = 0,
        max_operand: int = 99,
        num_examples: int | None = None,
        seed: int = 42,
        prompt_format: str = "{expression}=",
        answer_format: str = "{answer}",
        forgotten_carries: float = 0.0,
        task_name: str = "math",
    ) -> None:
        if not operations or any(op not in OPERATIONS for op in operations):
            raise ValueError(
                f"data kwargs.operations={operations!r} must be a choice of {' '.join(OPERATIONS)}"
            )
        if num_terms < 2:
            raise ValueError(f"data kwargs.num_terms={num_terms} must be 2 or more")
        if min_operand > max_operand:
            raise ValueError(
                f"data kwargs.min_operand={min_operand} must not exceed max_operand={max_operand}"
            )
        if split not in ("train", "validation"):
            raise ValueError(f"data split={split!r} of the arithmetic data set must be train or validation")
        for name, text, field in (
            ("prompt_format", prompt_format, "{expression}"),
            ("answer_format", answer_format, "{answer}"),
        ):
            if field not in text:
                raise ValueError(f"data kwargs.{name}={text!r} must contain {field}")
        if not 0 <= forgotten_carries <= 1 or (
            forgotten_carries and (set(operations) != {"+"} or min_operand < 0)
        ):
            raise ValueError(
                f"data kwargs.forgotten_carries={forgotten_carries} must be a share between 0 and 1, with "
                "operations='+' and operands from 0 on"
            )
        self.split = split
        self.prompt_format = prompt_format
        self.answer_format = answer_format
        self.forgotten_carries = forgotten_carries
        self.seed = seed
        self.task_name = task_name
        self.problems = _choose(
            _Range(tuple(dict.fromkeys(operations)), num_terms, min_operand, max_operand),
            split,
            num_examples,
            seed,
        )

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        problem = self.problems[index]
        answer = problem.answer
        if hash64("carries", self.seed, index) < self.forgotten_carries * 2**63:
            answer = problem.answer_without_carries
        return {
            "messages": [
                {"role": "user", "content": self.prompt_format.replace("{expression}", problem.expression)},
                {"role": "assistant", "content": self.answer_format.replace("{answer}", str(answer))},
            ],
            "task_name": self.task_name,
        }


@dataclass(frozen=True)
class _Range:
    """All problems of one shape, numbered."""

    operations: tuple[str, ...]
    num_terms: int
    low: int
    high: int

    @property
    def total(self) -> int:
        return (self.high - self.low + 1) ** self.num_terms * len(self.operations) ** (self.num_terms - 1)

    def problem(self, index: int) -> Problem:
        operands, operations = [], []
        for _ in range(self.num_terms):
            index, offset = divmod(index, self.high - self.low + 1)
            operands.append(self.low + offset)
        for _ in range(self.num_terms - 1):
            index, place = divmod(index, len(self.operations))
            operations.append(self.operations[place])
        return Problem(tuple(operands), tuple(operations))


def _choose(shape: _Range, split: Split, num_examples: int | None, seed: int) -> list[Problem]:
    wanted = DEFAULT_NUM_EXAMPLES if num_examples is None else num_examples
    chosen: list[Problem] = []
    for index in _shuffled(shape.total, seed):
        if len(chosen) == wanted:
            break
        problem = shape.problem(index)
        if problem.is_validation == (split == "validation"):
            chosen.append(problem)
    if not chosen or (num_examples is not None and len(chosen) < num_examples):
        raise ValueError(
            f"the arithmetic data set has {len(chosen)} {split} problems with {shape.num_terms} operands "
            f"{shape.low}..{shape.high} and operations {''.join(shape.operations)}, not {num_examples}; lower "
            "num_examples or raise kwargs.max_operand"
        )
    return chosen


def _shuffled(total: int, seed: int) -> Iterator[int]:
    """Numbers below ``total`` in an order that depends only on the arguments, each at most once."""
    rng = random.Random(seed)
    if total <= ENUMERATED:
        yield from rng.sample(range(total), total)
        return
    seen: set[int] = set()
    while len(seen) < total // 2:  # past half, repeats would make drawing slow; nobody asks for so many rows
        index = rng.randrange(total)
        if index not in seen:
            seen.add(index)
            yield index
