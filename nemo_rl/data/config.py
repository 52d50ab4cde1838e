# SPDX-License-Identifier: Apache-2.0
"""Config of data: the `data` section. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, NotYet


class ResponseDatasetConfig(ConfigModel):
    """One data set of `data.train`, `data.validation` or the defaults of both."""

    dataset_name: str | None = Field(None, description="Registered name of the data set, or ResponseDataset.")
    data_path: str | None = Field(None, description="JSONL file, folder or HuggingFace data set to read.")
    split: str | None = Field(None, description="Split to read.")
    subset: str | None = Field(None, description="Named subset of a HuggingFace data set.")
    input_key: str | None = Field(None, description="Column with the prompt.")
    output_key: str | None = Field(None, description="Column with the answer.")
    chat_key: str | None = Field(None, description="Column with a list of messages.")
    prompt_file: str | None = Field(None, description="Text file whose {} is replaced by the prompt.")
    system_prompt_file: str | None = Field(None, description="Text file with the system message.")
    processor: str | None = Field(None, description="Registered name of the processor that makes rows.")
    env_name: str | None = Field(None, description="Environment that scores the rows: a key of `env`.")
    split_validation_size: float = Field(
        0, ge=0, description="Part (below 1) or rows split off for validation."
    )
    seed: int = Field(42, description="Seed of the split and of procedural data.")
    num_examples: int | None = Field(None, ge=1, description="Rows to keep or to make; null is all.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of the data set class.")


class DataConfig(ConfigModel):
    """The `data` section."""

    max_input_seq_length: int = Field(
        512, ge=1, description="Most tokens of a prompt; follows policy.max_total_sequence_length."
    )
    shuffle: bool = Field(True, description="Shuffle the training rows, anew each epoch.")
    num_workers: int = Field(0, ge=0, description="Loader processes.")
    default: ResponseDatasetConfig | None = Field(
        None, description="Keys for every data set that lacks them."
    )
    train: ResponseDatasetConfig | list[ResponseDatasetConfig] = Field(description="Training data.")
    validation: ResponseDatasetConfig | list[ResponseDatasetConfig] | None = Field(
        None, description="Validation data."
    )
    add_bos: bool = Field(
        True, description="Put the tokenizer's BOS in front where its template does not (SFT)."
    )
    add_eos: bool = Field(True, description="End the last message with the tokenizer's EOS (SFT).")
    add_generation_prompt: bool = Field(
        False, description="Open the assistant turn in front of its text (SFT)."
    )
    use_multiple_dataloader: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="One loader per data set."
    )
    num_prompts_per_dataloader: Annotated[int | None, NotYet((None,), "null")] = Field(
        None, description="Prompts per loader and step."
    )
    custom_dataloader: Annotated[str | None, NotYet((None,), "null")] = Field(
        None, description="Dotted path to a loader."
    )
