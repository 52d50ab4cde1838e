# SPDX-License-Identifier: Apache-2.0
"""What generation backends take and return, and the interface that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch

from nemo_rl.models.generation.config import (
    ColocationConfig,
    GenerationConfig,
    OptionalResourcesConfig,
    ResourcesConfig,
)

if TYPE_CHECKING:
    import ray

    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

__all__ = [
    "ColocationConfig",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "GenerationSamplingParams",
    "OptionalResourcesConfig",
    "ResourcesConfig",
    "sampling_params",
    "verify_right_padding",
]


class GenerationDatumSpec(TypedDict):
    """Prompts of a generation call; B rows, padded on the right to S.

    Fields:
        input_ids: int64 [B, S].
        input_lengths: int64 [B], tokens of each prompt.
        stop_strings: one item a row, each None or a list of texts that end the row, besides the configured
            ones.
        seeds: int64 [B]; what row i draws depends on `seeds[i]` and the token index alone. Left out: drawn.
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[str]]
    seeds: NotRequired[torch.Tensor]
    __extra__: Any


class GenerationOutputSpec(TypedDict):
    """Prompts with their responses, padded on the right to S'.

    Fields:
        output_ids: int64 [B, S'], prompt, then response (the token that ended it included), then the pad
            token.
        generation_lengths: int64 [B], tokens of each response.
        unpadded_sequence_lengths: int64 [B], prompt plus response.
        logprobs: float32 [B, S'], of the response's tokens under the distribution they were drawn from; 0
            elsewhere.
        truncated: bool [B], the response was ended by a length limit, not by a stop token or a stop string.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: NotRequired[torch.Tensor]
    __extra__: Any


@dataclass(frozen=True)
class GenerationSamplingParams:
    """How a token is drawn from the model's distribution.

    Attributes:
        temperature: the logits are divided by it; 0 is greedy.
        top_p: keep the smallest set of tokens with at least this mass; 1.0 keeps all.
        top_k: keep this many tokens; None keeps all.

    Raises:
        ValueError: a value out of range, named as its configuration key.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(
                f"generation.temperature is {self.temperature}; use 0 (greedy) or a positive number"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"generation.top_p is {self.top_p}; use a number in (0, 1], 1.0 for no filter")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"generation.top_k is {self.top_k}; use null for no filter, or a positive number"
            )


def sampling_params(config: GenerationConfig, *, validation: bool = False) -> GenerationSamplingParams:
    """The sampling parameters of a configuration: those of training, or the `val_*` ones."""
    if validation:
        temperature, top_p, top_k = config.val_temperature, config.val_top_p, config.val_top_k
    else:
        temperature, top_p, top_k = config.temperature, config.top_p, config.top_k
    return GenerationSamplingParams(temperature, top_p, None if top_k in (-1, 0) else top_k)


class GenerationInterface(ABC):
    """A generation backend, as the algorithms see it."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef]:
        """Start joining the process group over which weights are broadcast.

        Args:
            ip: address of its first rank.
            port: port of its store.
            world_size: ranks of trainer and generation together.
        """

    @abstractmethod
    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool,
        sampling: GenerationSamplingParams | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate one response to each prompt; rows of the result stand in the order of `data`.

        Args:
            data: prompts.
            greedy: take the most likely token instead of drawing one.
            sampling: other temperature, top-p and top-k than the configuration's (validation has its own).
        """

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Get ready to generate (wake up, allocate); True on success."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Give back what only generation needs (KV cache); True on success."""

    @property
    def requires_kv_scale_sync(self) -> bool:
        """Whether a refit must carry scales of a quantised KV cache."""
        return False

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Take names, shapes and types of the weights that refits will bring.

        Raises:
            NotImplementedError: a backend without refit.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights by refit")

    def update_weights_via_ipc_zmq(self) -> list[ray.ObjectRef]:
        """Receive weights from the trainer's processes of the same devices."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights over IPC")

    def update_weights_from_collective(self) -> list[ray.ObjectRef]:
        """Receive weights over the group of :meth:`init_collective`."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights over a process group")

    def invalidate_kv_cache(self) -> bool:
        """Forget cached keys and values of older weights; False where there is nothing to forget."""
        return False

    def get_logger_metrics(self) -> dict[str, Any]:
        """Metrics gathered since :meth:`clear_logger_metrics`."""
        return {}

    def clear_logger_metrics(self) -> None:
        """Start gathering metrics anew."""
        return


def verify_right_padding(
    data: BatchedDataDict[GenerationDatumSpec] | BatchedDataDict[GenerationOutputSpec],
    pad_value: int = 0,
    raise_error: bool = True,
) -> tuple[bool, str | None]:
    """Check that the rows of a generation batch are padded on the right, and only there.

    Args:
        data: prompts (`input_ids`, `input_lengths`) or results (`output_ids`, `unpadded_sequence_lengths`).
        pad_value: the pad token.
        raise_error: raise instead of returning False.

    Returns:
        Whether it holds, and what is wrong if not.

    Raises:
        ValueError: it does not hold and `raise_error` is set.
    """
    message = _padding_fault(data, pad_value)
    if message is not None and raise_error:
        raise ValueError(message)
    return message is None, message


def _padding_fault(data: Any, pad_value: int) -> str | None:
    if "input_ids" in data and "input_lengths" in data:
        name, ids, lengths = "input_ids", data["input_ids"], data["input_lengths"]
    elif "output_ids" in data and "unpadded_sequence_lengths" in data:
        name, ids, lengths = "output_ids", data["output_ids"], data["unpadded_sequence_lengths"]
    else:
        return (
            "expected the columns input_ids and input_lengths, or output_ids and unpadded_sequence_lengths; "
            f"the batch has {sorted(map(str, data))}"
        )
    if ids.ndim != 2:
        return f"{name} has shape {list(ids.shape)}, expected [B, S]"
    if lengths.shape != ids.shape[:1]:
        return f"{name} has {ids.shape[0]} rows, but there are lengths of shape {list(lengths.shape)}"
    outside = ((lengths < 0) | (lengths > ids.shape[1])).nonzero()
    if len(outside):
        row = int(outside[0, 0])
        return f"row {row} of {name}: length {int(lengths[row])} is outside 0 to {ids.shape[1]}"
    padding = torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None]
    wrong = (padding & (ids != pad_value)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        return (
            f"row {row} of {name} has token {int(ids[row, column])} at position {column}, after its length "
            f"{int(lengths[row])}, where the pad value {pad_value} is expected"
        )
    return None
