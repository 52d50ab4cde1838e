# SPDX-License-Identifier: Apache-2.0
"""``dataset_name: arithmetic``: arithmetic problems made on the fly, without a download.

A problem is in training or in validation by a hash of the problem itself. The two parts are therefore
disjoint whatever the seeds, ranges or sizes of the two data sets are, and ``3+5`` never stands in one part
while ``5+3`` stands in the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from nemo_rl.utils.hashing import hash64

Split = Literal["train", "validation"]
Problem = tuple[int, str, int]

OPERATIONS = ("+", "-", "*")
VALIDATION_SHARE = 8
"""One problem in so many is a validation problem."""

ENUMERATED = 1 << 18
"""Up to so many problems the whole range is listed and shuffled; beyond, problems are drawn."""

DEFAULT_NUM_EXAMPLES = 50_000


class ArithmeticDataset(Sequence[dict[str, Any]]):
    """Rows ``{"messages": [user, assistant], "task_name": ...}`` of one part; each problem occurs at most
    once.

    Args:
        split: Which part.
        operations: Subset of ``+ - *``, as a string or a list.
        min_operand: Smallest operand.
        max_operand: Largest operand.
        num_examples: Rows; ``None`` takes all problems of this part, at most :data:`DEFAULT_NUM_EXAMPLES`.
        seed: Order of the rows, and which problems are taken if not all are.
        prompt_format: Text of the prompt, with ``{a}``, ``{op}`` and ``{b}``.
        answer_format: Text of the assistant's message, with ``{answer}``.
        task_name: Name that the rows carry.

    Raises:
        ValueError: For an unknown operation, an empty range, or fewer problems than ``num_examples``.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        operations: str | Sequence[str] = "+",
        min_operand: int = 0,
        max_operand: int = 99,
        num_examples: int | None = None,
        seed: int = 42,
        prompt_format: str = "{a}{op}{b}=",
        answer_format: str = "{answer}",
        task_name: str = "math",
    ) -> None:
        unknown = [op for op in operations if op not in OPERATIONS]
        if unknown or not operations:
            raise ValueError(
                f"data kwargs.operations={operations!r} must be a choice of {' '.join(OPERATIONS)}"
            )
        if min_operand > max_operand:
            raise ValueError(
                f"data kwargs.min_operand={min_operand} must not exceed max_operand={max_operand}"
            )
        if split not in ("train", "validation"):
            raise ValueError(f"data split={split!r} of the arithmetic data set must be train or validation")
        self.split = split
        self.prompt_format = prompt_format
        self.answer_format = answer_format
        self.task_name = task_name
        self._problems = _choose(
            tuple(dict.fromkeys(operations)), min_operand, max_operand, split, num_examples, seed
        )

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        a, op, b = self._problems[index]
        answer = self.answer_format.format(answer=solve(a, op, b))
        return {
            "messages": [
                {"role": "user", "content": self.prompt_format.format(a=a, op=op, b=b)},
                {"role": "assistant", "content": answer},
            ],
            "task_name": self.task_name,
        }


def solve(a: int, op: str, b: int) -> int:
    """The answer of a problem."""
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def is_validation_problem(a: int, op: str, b: int) -> bool:
    """Whether a problem is a validation problem; operands of ``+`` and ``*`` may be swapped."""
    first, second = (a, b) if op == "-" else (min(a, b), max(a, b))
    return hash64("arithmetic", op, first, second) % VALIDATION_SHARE == 0


def _choose(
    operations: tuple[str, ...], low: int, high: int, split: Split, num_examples: int | None, seed: int
) -> list[Problem]:
    wanted = DEFAULT_NUM_EXAMPLES if num_examples is None else num_examples
    chosen: list[Problem] = []
    for problem in _shuffled(operations, low, high, seed):
        if len(chosen) == wanted:
            break
        if is_validation_problem(*problem) == (split == "validation"):
            chosen.append(problem)
    if not chosen or (num_examples is not None and len(chosen) < num_examples):
        raise ValueError(
            f"the arithmetic data set has {len(chosen)} {split} problems with operands {low}..{high} and "
            f"operations {''.join(operations)}, not {num_examples}; lower num_examples or "
            "raise kwargs.max_operand"
        )
    return chosen


def _shuffled(operations: tuple[str, ...], low: int, high: int, seed: int) -> Iterator[Problem]:
    """Every problem once, in an order that depends only on the arguments."""
    rng = random.Random(seed)
    width = high - low + 1
    total = len(operations) * width * width
    if total <= ENUMERATED:
        order: Iterator[int] = iter(rng.sample(range(total), total))
    else:
        order = _draw_without_repeats(rng, total)
    for index in order:
        rest, op = divmod(index, len(operations))
        a, b = divmod(rest, width)
        yield low + a, operations[op], low + b


def _draw_without_repeats(rng: random.Random, total: int) -> Iterator[int]:
    seen: set[int] = set()
    while len(seen) < total // 2:  # past half, repeats would make drawing slow; nobody asks for so many rows
        index = rng.randrange(total)
        if index not in seen:
            seen.add(index)
            yield index
