# SPDX-License-Identifier: Apache-2.0
"""A model that can be built: architecture from HuggingFace, layout from the user, checked before anything is built."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from megatron_bridge.config_map import model_fields
from megatron_bridge.layers.attention import RotaryTable
from megatron_bridge.layers.spec import decoder_block_spec
from megatron_bridge.mapping.base import Geometry
from megatron_bridge.platform import on_cpu
from megatron_bridge.registry import Family
from megatron_bridge.rope import rotary_table

_KEY = "policy.megatron_cfg."
# What the local layers cannot do, or what needs CUDA kernels that are not there; overrides may switch some on
# again.
_LOCAL_LAYERS: dict[str, Any] = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
    "tp_comm_overlap": False,
    # Batched p2p between two stages pairs messages by posting order: silently wrong with virtual stages on
    # gloo.
    "batch_p2p_comm": False,
    "deallocate_pipeline_outputs": False,
}


@dataclass
class BridgeTransformerConfig(TransformerConfig):
    """Megatron-core's config plus what our own layers need."""

    rotary: RotaryTable | None = None


@dataclass
class ModelProvider:
    """Builds the model chunks of this rank.

    Set the layout, then call :meth:`finalize` (the builders do): it refuses, with a reason and sizes that
    work.

    Attributes:
        hf_config: HuggingFace config of the model.
        family: its tables.
        tensor_model_parallel_size: ranks that share one layer.
        pipeline_model_parallel_size: ranks that share the stack of layers.
        virtual_pipeline_model_parallel_size: chunks of layers per pipeline rank; None for one.
        context_parallel_size: ranks that share one sequence (only 1 so far).
        expert_model_parallel_size: ranks that share the experts (only 1 for dense models).
        expert_tensor_parallel_size: ranks that share one expert; None: as tensor_model_parallel_size.
        sequence_parallel: split activations between the parallel linears along the sequence.
        num_layers_in_first_pipeline_stage: uneven split; None: even.
        num_layers_in_last_pipeline_stage: the same for the last stage.
        params_dtype: dtype of the parameters.
        pipeline_dtype: dtype sent between stages; None: params_dtype.
        perform_initialization: draw initial weights (wasted where weights are loaded).
        overrides: any other field of megatron-core's TransformerConfig.
    """

    hf_config: PreTrainedConfig
    family: Family
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    params_dtype: torch.dtype = torch.float32
    pipeline_dtype: torch.dtype | None = None
    perform_initialization: bool = True
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = model_fields(self.hf_config, self.family.fields, self.family.fixed, self.family.only)
        self.rotary = rotary_table(self.hf_config)

    @property
    def vocab_size(self) -> int:
        """Tokens of the HuggingFace model."""
        return self.hf_config.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all ranks: the vocabulary, padded to a multiple of the ranks that share it."""
        tp = self.tensor_model_parallel_size
        return -(-self.vocab_size // tp) * tp

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.hf_config.tie_word_embeddings)

    @property
    def geometry(self) -> Geometry:
        """The sizes that the mappings need."""
        return Geometry(
            num_heads=self.model["num_attention_heads"],
            num_groups=self.model["num_query_groups"],
            head_dim=self.model["kv_channels"],
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
        )

    def finalize(self) -> None:
        """Checks the layout against the model.

        Raises:
            ValueError: says why a size does not work, which sizes do, and the config key.
        """
        self._check_tensor_parallel()
        self._check_pipeline_parallel()
        if self.context_parallel_size != 1:
            raise ValueError(
                f"{_KEY}context_parallel_size={self.context_parallel_size} is not supported yet; set it to 1"
            )
        if self.expert_model_parallel_size != 1:
            raise ValueError(
                f"{_KEY}expert_model_parallel_size={self.expert_model_parallel_size}, but "
                f"{self.family.architecture} has no experts; set it to 1"
            )
        known = {f.name for f in fields(BridgeTransformerConfig)}
        for name in self.overrides:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{name!r} is no field of megatron-core's TransformerConfig{hint}")

    def transformer_config(self) -> BridgeTransformerConfig:
        """Megatron-core's config of this model in this layout."""
        self.finalize()
        values: dict[str, Any] = {
            **self.model,
            **_LOCAL_LAYERS,
            "use_cpu_initialization": on_cpu(),
            "bf16": self.params_dtype == torch.bfloat16,
            "fp16": self.params_dtype == torch.float16,
            "pipeline_dtype": self.pipeline_dtype or self.params_dtype,
            "rotary": self.rotary,
        }
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "params_dtype",
            "perform_initialization",
        ):
            values[name] = getattr(self, name)
        values.update(self.overrides)
        return BridgeTransformerConfig(**values)

    def provide(self) -> list[GPTModel]:
        """Builds this rank's chunks (one, or one per virtual stage). ``parallel_state`` must be initialised."""
        self._check_world()
        config = self.transformer_config()
        stages = range(self.virtual_pipeline_model_parallel_size or 1)
        chunks = [self._chunk(config, vp_stage) for vp_stage in stages]
        if not on_cpu():
            chunks = [chunk.cuda() for chunk in chunks]
        return chunks

    def _chunk(self, config: BridgeTransformerConfig, stage: int) -> GPTModel:
        vp_stage = None if self.virtual_pipeline_model_parallel_size is None else stage
        model = GPTModel(
            config=config,
            transformer_layer_spec=decoder_block_spec(config, vp_stage),  # type: ignore[arg-type]
            vocab_size=self.padded_vocab_size,
            max_sequence_length=self.hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type="none",  # type: ignore[arg-type]
            vp_stage=vp_stage,
        )
        return model

    # -- checks ----------------------------------------------------------------------------------------------

    def _tensor_parallel_fault(self, size: int) -> str | None:
        """Why the model cannot be split over ``size`` ranks, or None."""
        m = self.model
        heads, groups, ffn = m["num_attention_heads"], m["num_query_groups"], m["ffn_hidden_size"]
        if heads % size:
            return f"its {heads} attention heads do not divide by {size}"
        if groups % size and size % groups:
            return f"its {groups} key/value heads and {size} ranks do not divide each other"
        if ffn % size:
            return f"its feed-forward size {ffn} does not divide by {size}"
        return None

    def _check_tensor_parallel(self) -> None:
        size = self.tensor_model_parallel_size
        fault = self._tensor_parallel_fault(size) if size >= 1 else f"{size} is not a number of ranks"
        if fault is not None:
            working = [
                n
                for n in range(1, self.model["num_attention_heads"] + 1)
                if not self._tensor_parallel_fault(n)
            ]
            raise ValueError(
                f"{self.family.architecture} cannot be split over {_KEY}tensor_model_parallel_size={size} ranks: "
                f"{fault}. Sizes that work: {', '.join(map(str, working))}"
            )
        if self.sequence_parallel and size == 1:
            raise ValueError(
                f"{_KEY}sequence_parallel=true needs {_KEY}tensor_model_parallel_size > 1; "
                f"set sequence_parallel to false"
            )

    def _check_pipeline_parallel(self) -> None:
        pp, layers = self.pipeline_model_parallel_size, self.model["num_layers"]
        key = f"{_KEY}pipeline_model_parallel_size={pp}"
        if not 1 <= pp <= layers:
            raise ValueError(f"{key}: the model has {layers} layers; sizes from 1 to {layers} can work")
        ends = [self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage]
        given = [n for n in ends if n is not None]
        if pp == 1:
            if given:
                raise ValueError(
                    f"{_KEY}num_layers_in_first/last_pipeline_stage need {key} > 1; leave them unset"
                )
            return
        rest, stages = layers - sum(given), pp - len(given)
        chunks = stages * (self.virtual_pipeline_model_parallel_size or 1)
        if min([rest, *given]) < 0 or (stages == 0 and rest) or (stages and (rest % chunks or rest < chunks)):
            even = [n for n in range(1, layers + 1) if layers % n == 0]
            raise ValueError(
                f"{key}: {rest} of {layers} layers are left for {chunks} equal pieces. Sizes that divide evenly: "
                f"{', '.join(map(str, even))}; or set {_KEY}num_layers_in_first_pipeline_stage / "
                f"num_layers_in_last_pipeline_stage"
            )

    def _check_world(self) -> None:
        """The process groups must have the sizes that the provider was told; a mismatch is a bug of the caller."""
        actual = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        asked = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size)
        assert actual == asked, f"parallel_state has (tp, pp) = {actual}, the provider {asked}"
