# SPDX-License-Identifier: Apache-2.0
"""Cutting into micro-batches, heads on hidden states, counts and metrics, without any backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_rl.algorithms.interfaces import LossInputType, LossType, Metric
from nemo_rl.algorithms.loss_functions import ClippedPGLossFn, DistillationLossFn, NLLLoss
from nemo_rl.distributed.parallel_dims import ParallelDims, single_process_dims
from nemo_rl.distributed.vocab_parallel import Projection
from nemo_rl.models.policy import microbatch
from nemo_rl.models.policy.heads import LogprobHead, LossHead, TopKHead
from nemo_rl.models.policy.microbatch import Microbatch, MicrobatchSpec
from nemo_rl.models.policy.results import GlobalCounts, MetricAccumulator, global_counts

CPU = torch.device("cpu")
VOCAB, HIDDEN = 13, 6


def make_batch(lengths: tuple[int, ...] = (3, 5, 2), width: int = 7) -> dict[str, Any]:
    sizes = torch.tensor(lengths)
    rows = len(lengths)
    ids = torch.arange(1, rows * width + 1).reshape(rows, width) % VOCAB
    mask = (torch.arange(width) < sizes[:, None]).float()
    mask[:, 1] = 0  # token 1 of each row is a prompt token
    return {
        "input_ids": ids,
        "input_lengths": sizes,
        "token_mask": mask,
        "sample_mask": torch.ones(rows),
        "names": [f"row {i}" for i in range(rows)],
    }


def build(data: dict[str, Any], **spec: Any) -> list[Microbatch]:
    return microbatch.build(data, MicrobatchSpec(**{"size": 2, "selection": "next_tokens", **spec}), CPU)


class TestMicrobatches:
    def test_rows_are_cut_in_order_and_trimmed_to_the_longest(self) -> None:
        first, second = build(make_batch())
        assert first.input_ids.tolist() == make_batch()["input_ids"][:2, :5].tolist()
        assert second.input_ids.shape == (1, 2)
        assert first.position_ids.tolist() == [list(range(5))] * 2
        assert second.rows["names"] == ["row 2"]
        assert second.rows["token_mask"].shape == (1, 7)  # columns keep their width

    def test_lengths_are_rounded_up(self) -> None:
        first, second = build(make_batch(), length_multiple=4)
        assert first.input_ids.shape == (2, 8)  # wider than the data's own 7
        assert second.input_ids.shape == (1, 4)

    def test_uniform_shapes_fill_up_with_dummy_rows(self) -> None:
        first, second = build(make_batch(), uniform=True)
        assert first.input_ids.shape == second.input_ids.shape == (2, 5)
        assert second.num_rows == 1
        assert second.rows["input_ids"].shape == (1, 7)
        assert second.scored.rows.max() == 0

    @pytest.mark.parametrize(
        ("selection", "expected"),
        [
            ("next_tokens", [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]),
            ("positions", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]),
            ("masked", [(0, 1), (1, 1), (1, 2), (1, 3)]),
        ],
    )
    def test_selection(self, selection: str, expected: list[tuple[int, int]]) -> None:
        first, _ = build(make_batch(), selection=selection)
        pairs = list(zip(first.scored.rows.tolist(), first.scored.positions.tolist(), strict=True))
        assert pairs == expected
        ids = make_batch()["input_ids"]
        for (row, position), target in zip(pairs, first.scored.targets.tolist(), strict=True):
            assert target == ids[row, position + 1]

    def test_masked_rows_are_not_scored(self) -> None:
        data = make_batch()
        data["sample_mask"][1] = 0
        first, _ = build(data, selection="masked")
        assert set(first.scored.rows.tolist()) == {0}

    def test_full_width_rows(self) -> None:
        """A row that fills the width has no next token at its last position."""
        data = make_batch((7, 7))
        (only,) = build(data, selection="masked")
        assert only.scored.positions.max() == 5
        (positions,) = build(data, selection="positions")
        assert positions.scored.positions.max() == 6
        assert positions.scored.targets[6] == 0

    def test_unpack_puts_each_value_at_its_token(self) -> None:
        first, _ = build(make_batch())
        values = torch.arange(1.0, 7.0)
        assert first.unpack(values, shift=1).tolist() == [[0, 1, 2, 0, 0, 0, 0], [0, 3, 4, 5, 6, 0, 0]]
        assert first.unpack(values, shift=0)[1].tolist() == [3, 4, 5, 6, 0, 0, 0]

    def test_no_rows(self) -> None:
        with pytest.raises(ValueError, match="no rows"):
            build(microbatch.take_rows(make_batch(), 0, 0))


def hidden_and_projection(batch: Microbatch) -> tuple[Tensor, Projection]:
    generator = torch.Generator().manual_seed(0)
    rows, length = batch.input_ids.shape
    hidden = torch.randn(rows, length, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, requires_grad=True)
    return hidden, Projection(weight, 0, VOCAB)


def select(hidden: Tensor, batch: Microbatch) -> Tensor:
    return hidden[batch.scored.rows, batch.scored.positions]


def naive_logprobs(
    hidden: Tensor, projection: Projection, data: dict[str, Any], temperature: float = 1.0
) -> Tensor:
    out = torch.zeros(data["input_ids"].shape)
    for row, length in enumerate(data["input_lengths"].tolist()):
        logprobs = torch.log_softmax(hidden[row, : length - 1] @ projection.weight.T / temperature, -1)
        out[row, 1:length] = logprobs.gather(-1, data["input_ids"][row, 1:length, None])[:, 0]
    return out


def test_logprob_head() -> None:
    data = make_batch()
    (batch,) = build(data, size=3)
    hidden, projection = hidden_and_projection(batch)
    for chunk in (None, 2):
        output = LogprobHead(0.7, chunk)(select(hidden, batch), projection, batch, single_process_dims(CPU))
        assert output.loss is None
        assert torch.allclose(
            output.tensors["logprobs"], naive_logprobs(hidden, projection, data, 0.7), atol=1e-6
        )


def test_top_k_head() -> None:
    data = make_batch()
    (batch,) = build(data, size=3, selection="positions")
    hidden, projection = hidden_and_projection(batch)
    output = TopKHead(3)(select(hidden, batch), projection, batch, single_process_dims(CPU))
    expected = (hidden[1, 4] @ projection.weight.T).topk(3)
    assert output.tensors["topk_indices"][1, 4].tolist() == expected.indices.tolist()
    assert output.tensors["topk_indices"][0, 3:].tolist() == [[0, 0, 0]] * 4


def counts(data: dict[str, Any]) -> GlobalCounts:
    return global_counts([data], single_process_dims(CPU))[0]


class LogprobForm:
    """A loss of the documented LOGPROB form."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Any:
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = -(next_token_logprobs * mask).sum() / global_valid_toks
        return loss, {"rows": float(data.size)}


class LogitForm:
    """A loss of the older documented form: whole logits, first."""

    loss_type = LossType.TOKEN_LEVEL

    def __call__(
        self, next_token_logits: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Any:
        logprobs = torch.log_softmax(next_token_logits[:, :-1], -1)
        chosen = logprobs.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        return -(chosen * mask).sum() / global_valid_toks, {}


class VocabParallelForm(NLLLoss):
    """The older form with `vocab_parallel_*` arguments, handed on to ours."""

    input_type = LossInputType.LOGIT

    def __call__(  # type: ignore[override]
        self,
        next_token_logits: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: Any = None,
        context_parallel_group: Any = None,
    ) -> Any:
        assert vocab_parallel_rank is not None
        return super().__call__(
            next_token_logits,
            data,
            global_valid_seqs,
            global_valid_toks,
            vocab_parallel_rank=vocab_parallel_rank,
            vocab_parallel_group=vocab_parallel_group,
            context_parallel_group=context_parallel_group,
        )


@pytest.mark.parametrize("loss_fn", [NLLLoss(), LogprobForm(), LogitForm(), VocabParallelForm()])
def test_every_loss_form_gives_the_same_gradient(loss_fn: Any) -> None:
    data = make_batch()
    head = LossHead(loss_fn, counts(data), temperature=0.5)
    (batch,) = build(data, size=3, selection=head.selection)
    hidden, projection = hidden_and_projection(batch)
    output = head(select(hidden, batch), projection, batch, single_process_dims(CPU))
    mask = data["token_mask"][:, 1:]
    expected = -(naive_logprobs(hidden, projection, data, 0.5)[:, 1:] * mask).sum() / mask.sum()
    assert output.loss is not None
    assert torch.isclose(output.loss, expected, rtol=1e-6)
    for leaf in (hidden, projection.weight):
        (mine,) = torch.autograd.grad(output.loss, leaf, retain_graph=True)
        (theirs,) = torch.autograd.grad(expected, leaf, retain_graph=True)
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert all(isinstance(metric, Metric) for metric in output.metrics.values())


@pytest.mark.parametrize("loss_fn", [NLLLoss(), LogprobForm(), LogitForm()])
def test_a_batch_without_weight_has_loss_zero(loss_fn: Any) -> None:
    """Case 3, also for losses that divide by the count they are given."""
    data = make_batch() | {"sample_mask": torch.zeros(3)}
    head = LossHead(loss_fn, counts(data))
    (batch,) = build(data, size=3, selection=head.selection)
    hidden, projection = hidden_and_projection(batch)
    output = head(select(hidden, batch), projection, batch, single_process_dims(CPU))
    assert output.loss is not None
    assert float(output.loss.detach()) == 0.0
    for leaf in (hidden, projection.weight):
        (grad,) = torch.autograd.grad(output.loss, leaf, retain_graph=True)
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_our_losses_score_masked_tokens_only() -> None:
    data = make_batch()
    assert LossHead(NLLLoss(), counts(data)).selection == "masked"
    assert LossHead(LogprobForm(), counts(data)).selection == "next_tokens"
    assert LossHead(LogitForm(), counts(data)).selection == "positions"
    distillation = DistillationLossFn({})
    distillation.input_type = LossInputType.DISTILLATION  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="input_type"):
        LossHead(distillation, counts(data))


def test_global_counts() -> None:
    data = make_batch()
    found = counts(data)
    assert float(found.valid_seqs) == 3
    assert float(found.valid_toks) == 1 + 3  # lengths 3, 5, 2 without positions 0 and 1
    assert found.real_toks == 10
    assert not found.is_empty
    bare = {key: data[key] for key in ("input_ids", "input_lengths")}
    assert float(counts(bare).valid_toks) == 2 + 4 + 1
    assert counts(data | {"sample_mask": torch.zeros(3)}).is_empty
    assert counts(data | {"token_mask": torch.zeros(3, 7)}).is_empty
    half = counts(data | {"sample_mask": torch.tensor([0.5, 0.0, 1.0])})
    assert float(half.valid_seqs) == 1.5
    assert float(half.valid_toks) == 0.5


def test_metrics_reduce_as_declared() -> None:
    accumulator = MetricAccumulator(2)
    for batch, value in ((0, 1.0), (0, 4.0), (1, 10.0)):
        tensor = torch.tensor(value)
        accumulator.add(
            batch,
            {
                "summed": Metric(tensor),
                "mean": Metric(tensor, "mean"),
                "low_min": Metric(tensor, "min"),
                "high_max": Metric(tensor, "max"),
                "min_of_name_means_nothing": Metric(tensor, "last"),
                "unmasked_min": Metric(torch.tensor(math.inf), "min"),
            },
        )
    first, second = accumulator.reduce(single_process_dims(CPU))
    assert first == {
        "summed": 5.0,
        "mean": 2.5,
        "low_min": 1.0,
        "high_max": 4.0,
        "min_of_name_means_nothing": 4.0,
        "unmasked_min": math.inf,
    }
    assert second["summed"] == 10.0


def test_an_unknown_reduction_is_refused() -> None:
    accumulator = MetricAccumulator(1)
    accumulator.add(0, {"a": Metric(torch.tensor(1.0), "median")})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="median"):
        accumulator.reduce(single_process_dims(CPU))


def test_parallel_dims_coordinates() -> None:
    """Rank order: pp slowest, then dp, cp, tp."""
    seen = set()
    for rank in range(24):
        dims = ParallelDims(
            tp=2, pp=3, cp=2, dp=2, ep=1, etp=1, sequence_parallel=False, rank=rank, device=CPU,
            tp_group=None, pp_group=None, cp_group=None, dp_group=None, dp_cp_group=None, mp_group=None,
        )  # fmt: skip
        coordinates = (dims.pp_rank, dims.dp_rank, dims.cp_rank, dims.tp_rank)
        assert rank == ((coordinates[0] * 2 + coordinates[1]) * 2 + coordinates[2]) * 2 + coordinates[3]
        assert dims.pp_ranks[dims.pp_rank] == rank
        assert dims.tp_ranks[dims.tp_rank] == rank
        assert dims.is_last_stage == (dims.last_stage_rank == rank)
        seen.add(coordinates)
    assert len(seen) == 24


@pytest.mark.parametrize(
    "loss_fn", [NLLLoss(), ClippedPGLossFn({"ratio_clip_c": 3.0}), LogitForm(), LogprobForm()]
)
def test_losses_and_heads_stay_on_the_device(loss_fn: Any) -> None:
    """Under FakeTensorMode with device "cuda", an operation over two devices fails."""
    data = make_batch()
    for name in ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[name] = torch.zeros(3, 7)
    norm = counts(data)
    head = LossHead(loss_fn, norm, temperature=0.5)
    (batch,) = build(data, size=3, selection=head.selection)
    (every,) = build(data, size=3)
    cuda = torch.device("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def to_cuda(batch: Microbatch) -> Microbatch:
            def move(value: Any) -> Any:
                return mode.from_tensor(value).to(cuda) if isinstance(value, Tensor) else value

            scored = microbatch.Scored(
                move(batch.scored.rows), move(batch.scored.positions), move(batch.scored.targets)
            )
            return Microbatch(
                input_ids=move(batch.input_ids),
                position_ids=move(batch.position_ids),
                cu_seqlens=None,
                scored=scored,
                rows={key: move(value) for key, value in batch.rows.items()},
                num_rows=batch.num_rows,
                width=batch.width,
            )

        weight = torch.randn(VOCAB + 3, HIDDEN, device=cuda, requires_grad=True)
        dims = single_process_dims(cuda)
        moved, all_moved = to_cuda(batch), to_cuda(every)
        hidden = torch.randn(batch.scored.rows.shape[0], HIDDEN, device=cuda, requires_grad=True)
        output = head(hidden, Projection(weight, 0, VOCAB), moved, dims)
        assert output.loss is not None
        assert output.loss.device.type == "cuda"
        assert all(metric.value.device.type == "cuda" for metric in output.metrics.values())
        hidden = torch.randn(every.scored.rows.shape[0], HIDDEN, device=cuda)
        scored = LogprobHead()(hidden, Projection(weight, 0, VOCAB), all_moved, dims)
        assert scored.tensors["logprobs"].device.type == "cuda"
