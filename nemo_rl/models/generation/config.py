# SPDX-License-Identifier: Apache-2.0
"""Config of generation: `policy.generation`. Torch-free; `generation.interfaces` re-exports it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, Derived, Hint, NotYet, OptionOf

_ENGINE = Hint("an option of another inference engine; ours has no counterpart")


class ResourcesConfig(ConfigModel):
    """Devices of a cluster part."""

    gpus_per_node: int = Field(description="Devices (on CPU: workers) per node.")
    num_nodes: int = Field(description="Nodes.")


class OptionalResourcesConfig(ConfigModel):
    """`generation.colocated.resources`: devices set aside for generation."""

    gpus_per_node: int | None = Field(None, ge=1, description="Devices per node set aside.")
    num_nodes: int | None = Field(None, ge=1, description="Nodes set aside.")


class ColocationConfig(ConfigModel):
    """`generation.colocated`: generation on the policy's devices or on its own."""

    enabled: Annotated[bool, NotYet((True,), "colocated.enabled=true")] = Field(
        True, description="Generate on the policy's devices."
    )
    resources: OptionalResourcesConfig = Field(
        default_factory=OptionalResourcesConfig,
        description="Devices of generation where it is not colocated.",
    )


class MCoreGenerationConfig(ConfigModel):
    """`generation.mcore_generation_config`: the engine on the policy's own Megatron model."""

    num_slots: int | None = Field(
        None,
        ge=1,
        description="Rows decoded at the same time per data-parallel rank, a multiple of TP; "
        "null follows policy.generation_batch_size.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="KV rows per slot; null follows policy.max_total_sequence_length."
    )
    cuda_graph_impl: Annotated[str, _ENGINE] = Field("local", description="CUDA graphs of mcore's engine.")
    inference_cuda_graph_scope: Annotated[str, _ENGINE] = Field(
        "block", description="Scope of the CUDA graphs."
    )
    buffer_size_gb: float = Field(
        10.0, gt=0, description="Most KV memory per rank; fewer rows are decoded at a time if they need more."
    )
    num_cuda_graphs: Annotated[int, _ENGINE] = Field(4, description="Number of CUDA graphs.")
    block_size_tokens: Annotated[int, _ENGINE] = Field(256, description="Tokens of a KV block.")
    use_cuda_graphs_for_non_decode_steps: Annotated[bool, _ENGINE] = Field(
        True, description="CUDA graphs in prefill."
    )
    enable_chunked_prefill: Annotated[bool, _ENGINE] = Field(True, description="Split long prompts.")
    enable_prefix_caching: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Reuse KV rows of equal prefixes."
    )
    max_tokens: int = Field(16384, ge=1, description="Most prompt tokens of one prefill pass.")
    kv_cache_management_mode: Annotated[str, _ENGINE] = Field(
        "persist", description="KV memory between steps."
    )
    materialize_only_last_token_logits: Annotated[bool, _ENGINE] = Field(
        True, description="Compute logits of the last prompt token only; always the case here."
    )
    num_speculative_tokens: Annotated[int, NotYet((0,), "0")] = Field(0, description="Speculative decoding.")
    refit_backend: Annotated[str, _ENGINE] = Field("gloo", description="Transport of a resharding refit.")
    parsers: Annotated[list[str], NotYet(([],), "[]")] = Field(
        default_factory=list, description="Output parsers."
    )
    expose_http_server: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Serve over HTTP."
    )
    logging_step_interval: Annotated[int | None, _ENGINE] = Field(
        None, description="Steps between engine logs."
    )


class GenerationConfig(ConfigModel):
    """`policy.generation`: how rows are sampled."""

    derived: ClassVar[tuple[Derived, ...]] = (
        Derived("val_temperature", "temperature"),
        Derived("val_top_p", "top_p"),
        Derived("val_top_k", "top_k"),
    )

    backend: Annotated[
        Literal["megatron", "vllm", "sglang", "trtllm", "dynamo"],
        NotYet(("megatron",), "generation.backend=megatron"),
    ] = Field("megatron", description="Inference engine.")
    max_new_tokens: int = Field(512, ge=1, description="Most tokens sampled per turn.")
    temperature: float = Field(1.0, ge=0, description="Softmax temperature of sampling; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the smallest set of tokens with this mass.")
    top_k: int | None = Field(None, description="Keep this many tokens; null or -1 keeps all.")
    val_temperature: float = Field(1.0, ge=0, description="Temperature in validation; follows temperature.")
    val_top_p: float = Field(1.0, gt=0, le=1, description="top_p in validation; follows top_p.")
    val_top_k: int | None = Field(None, description="top_k in validation; follows top_k.")
    model_name: str | None = Field(None, description="Model of the engine; the policy's own with `megatron`.")
    stop_token_ids: list[int] | None = Field(
        None, description="Tokens that end a row; null is the tokenizer's EOS."
    )
    stop_strings: list[str] | None = Field(None, description="Texts that end a row.")
    bad_words: Annotated[list[str] | None, NotYet((None, []), "null")] = Field(
        None, description="Texts never sampled."
    )
    colocated: ColocationConfig = Field(
        default_factory=ColocationConfig, description="Generation on the policy's devices or on its own."
    )
    port_range_low: Annotated[int, _ENGINE] = Field(3000, description="First port of engine servers.")
    port_range_high: Annotated[int, _ENGINE] = Field(4999, description="Last port of engine servers.")
    use_async_rollouts: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Roll out row by row without lock-step turns."
    )
    mcore_generation_config: MCoreGenerationConfig = Field(
        default_factory=MCoreGenerationConfig, description="Engine on the policy's own Megatron model."
    )
    vllm_cfg: Annotated[dict[str, Any] | None, OptionOf("policy.generation.backend=vllm")] = Field(
        None, description="Options of the vLLM engine (backend vllm only)."
    )
    vllm_kwargs: Annotated[dict[str, Any] | None, OptionOf("policy.generation.backend=vllm")] = Field(
        None, description="Arguments passed to vLLM (backend vllm only)."
    )
    refit_transport: Annotated[str | None, NotYet((None,), "null")] = Field(
        None, description="How weights reach the engine."
    )
    refit_cfg: Annotated[dict[str, Any] | None, OptionOf("policy.generation.refit_transport")] = Field(
        None, description="Options of the refit transport."
    )
    sglang_cfg: Annotated[dict[str, Any] | None, OptionOf("policy.generation.backend=sglang")] = Field(
        None, description="Options of SGLang (backend sglang only)."
    )
    sglang_server_config: Annotated[dict[str, Any] | None, OptionOf("policy.generation.backend=sglang")] = (
        Field(None, description="SGLang servers (backend sglang only).")
    )
    sglang_router_config: Annotated[dict[str, Any] | None, OptionOf("policy.generation.backend=sglang")] = (
        Field(None, description="SGLang router (backend sglang only).")
    )
    trtllm_cfg: Annotated[dict[str, Any] | None, OptionOf("policy.generation.backend=trtllm")] = Field(
        None, description="Options of TensorRT-LLM (backend trtllm only)."
    )
    dynamo_cfg: Annotated[dict[str, Any] | None, OptionOf("policy.generation.backend=dynamo")] = Field(
        None, description="Options of Dynamo (backend dynamo only)."
    )
    pad_token_id: int | None = Field(
        None, alias="_pad_token_id", description="Padding token; filled in from the tokenizer at run time."
    )
    mtp_weights_from_refit: Annotated[bool, NotYet((False,), "false")] = Field(
        False,
        alias="_mtp_weights_from_refit",
        description="Multi-token prediction weights come from the refit.",
    )
    debug_payload_metrics: Annotated[bool, NotYet((False,), "false")] = Field(
        False, alias="_debug_payload_metrics", description="Log payload sizes."
    )
