# SPDX-License-Identifier: Apache-2.0
"""Config of data: the `data` section. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from nemo_rl.utils.config_model import ConfigModel, NotYet, Violation


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

    gone: ClassVar[Mapping[str, str]] = {
        "dataset_name": "has moved: write data.train.dataset_name, and data.validation",
        "prompt_file": "has moved: write data.default.prompt_file",
        "system_prompt_file": "has moved: write data.default.system_prompt_file",
        "train_data_path": "has moved: write data.train.data_path",
        "val_data_path": "has moved: write data.validation.data_path",
    }

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
        True, description="Keep the assistant's header out of the loss, as in a prompt for sampling (SFT)."
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

    @model_validator(mode="before")
    @classmethod
    def _merge_default(cls, data: Any) -> Any:
        """Give every data set the keys of `default` that it lacks, so that the resolved tree says all."""
        if not isinstance(data, Mapping) or not data.get("default"):
            return data
        default = _given(data["default"])
        if not isinstance(default, Mapping):
            return data
        merged = dict(data)
        for key in ("train", "validation"):
            entries = merged.get(key)
            if isinstance(entries, list):
                merged[key] = [_with_default(entry, default) for entry in entries]
            elif entries is not None:
                merged[key] = _with_default(entries, default)
        return merged

    def train_sets(self) -> list[ResponseDatasetConfig]:
        """Give the training data sets as a list."""
        return self.train if isinstance(self.train, list) else [self.train]

    def validation_sets(self) -> list[ResponseDatasetConfig]:
        """Give the validation data sets as a list."""
        if self.validation is None:
            return []
        return self.validation if isinstance(self.validation, list) else [self.validation]

    def has_validation(self) -> bool:
        """Whether there is validation data: a set of its own, or a part split off a training set."""
        default = self.default.split_validation_size if self.default else 0
        return bool(self.validation_sets()) or any(
            (c.split_validation_size or default) > 0 for c in self.train_sets()
        )

    def violations(self) -> Iterator[Violation]:
        """Data sets that name no data."""
        default = self.default
        for key, item in self._named_sets():
            names = [item.dataset_name, item.data_path]
            names += [default.dataset_name, default.data_path] if default else []
            if not any(names):
                yield Violation(key, "names no data; set dataset_name or data_path", ("default",))

    def environment_violations(self, environments: Sequence[str]) -> Iterator[Violation]:
        """Give the data sets whose environment does not exist; keys are relative to the whole tree."""
        default = self.default.env_name if self.default else None
        for key, item in self._named_sets():
            name = item.env_name or default
            known = ", ".join(environments) or "none"
            if name is not None and name not in environments:
                yield Violation(
                    f"data.{key}.env_name",
                    f"there is no env.{name} (environments: {known})",
                    ("env", "data.default"),
                )

    def _named_sets(self) -> Iterator[tuple[str, ResponseDatasetConfig]]:
        for name, value, items in (
            ("train", self.train, self.train_sets()),
            ("validation", self.validation, self.validation_sets()),
        ):
            yield from (
                (f"{name}.{i}" if isinstance(value, list) else name, item) for i, item in enumerate(items)
            )


def _given(section: Any) -> Any:
    """Give a section as a mapping of the keys that were set."""
    return section.model_dump(exclude_unset=True) if isinstance(section, ConfigModel) else section


def _with_default(entry: Any, default: Mapping[str, Any]) -> Any:
    given = _given(entry)
    return {**default, **given} if isinstance(given, Mapping) else entry
