# SPDX-License-Identifier: Apache-2.0
"""HuggingFace directories: lazy reading, and streaming, size-bounded, atomic writing."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_bridge.errors import CheckpointError

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx|ot)$|.*\.index\.json$")
_TRAVELS = re.compile(r".*\.(json|txt|model|jinja|py|tiktoken)$|LICENSE.*|NOTICE.*|USE_POLICY.*")
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class FileTensor:
    """One tensor of a safetensors file; indexing reads that part only."""

    def __init__(self, checkpoint: HFCheckpoint, name: str) -> None:
        self.checkpoint = checkpoint
        self.name = name
        self._slice = checkpoint.slice_of(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file."""
        return _DTYPES[self._slice.get_dtype()]

    def __getitem__(self, index: Any) -> Tensor:
        try:
            return self._slice[index]
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.checkpoint.file_of(self.name)}: cannot read {self.name}: {error}"
            ) from error


class HFCheckpoint:
    """Weights of a HuggingFace directory by tensor name; files are opened when first needed.

    Raises:
        CheckpointError: if weights, or files that the index names, are missing or unreadable.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open_files: dict[Path, Any] = {}
        self._files = self._find()

    def _find(self) -> dict[str, Path]:
        index, single = self.path / _INDEX, self.path / _SINGLE
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
            missing = sorted({file for file in weight_map.values() if not (self.path / file).is_file()})
            if missing:
                raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
            return {name: self.path / file for name, file in weight_map.items()}
        if single.is_file():
            return dict.fromkeys(self._handle(single).keys(), single)
        raise CheckpointError(
            f"{self.path} holds neither {_SINGLE} nor {_INDEX} (other weight formats are not read)"
        )

    def _handle(self, file: Path) -> Any:
        if file not in self._open_files:
            try:
                self._open_files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from error
        return self._open_files[file]

    @property
    def names(self) -> list[str]:
        """Tensor names, in the order of the files."""
        return list(self._files)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._files[name]

    def slice_of(self, name: str) -> Any:
        """The lazy slice of a tensor, as safetensors gives it."""
        file = self.file_of(name)
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} has no tensor {name}, though the index says so: {error}"
            ) from error

    def __getitem__(self, name: str) -> FileTensor:
        return FileTensor(self, name)


def parse_size(text: str | int) -> int:
    """Bytes of a size like "5GB", "500MB" or "2GiB"."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a size; write for example 5GB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class ShardedWriter:
    """Writes safetensors files of bounded size from a stream of tensors, holding one tensor at a time.

    The tensors must come in the order of ``specs``, which are known beforehand: headers are written first.

    Args:
        directory: where to write.
        specs: name -> (shape, dtype), in order.
        max_shard_bytes: upper bound of a file's data (a larger tensor gets a file of its own).
    """

    def __init__(self, directory: Path, specs: Specs, max_shard_bytes: int) -> None:
        self.directory = directory
        self.specs = specs
        self.shards = _plan_shards(specs, max_shard_bytes)

    def file_name(self, index: int) -> str:
        """Name of the file with this index, in transformers' numbering."""
        count = len(self.shards)
        return _SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Consumes the stream, then writes the index (if there are several files).

        Raises:
            CheckpointError: if a tensor is unexpected, out of order, missing or of another shape or dtype.
        """
        stream = iter(tensors)
        for index, names in enumerate(self.shards):
            with open(self.directory / self.file_name(index), "wb") as file:
                file.write(_header({name: self.specs[name] for name in names}))
                for name in names:
                    self._write_next(file, name, stream)
                _sync(file)
        extra = next(stream, None)
        if extra is not None:
            raise CheckpointError(f"unexpected tensor {extra[0]}")
        if len(self.shards) > 1:
            weight_map = {name: self.file_name(i) for i, names in enumerate(self.shards) for name in names}
            total = sum(nbytes(*spec) for spec in self.specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_file(self.directory / _INDEX, json.dumps(index, indent=2) + "\n")

    def _write_next(self, file: BinaryIO, name: str, stream: Iterator[tuple[str, Tensor]]) -> None:
        got = next(stream, None)
        if got is None:
            raise CheckpointError(f"the stream of tensors ended before {name}")
        if got[0] != name:
            raise CheckpointError(f"expected tensor {name}, got {got[0]}")
        tensor = got[1].detach()
        if (tuple(tensor.shape), tensor.dtype) != self.specs[name]:
            raise CheckpointError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected {self.specs[name][0]} {self.specs[name][1]}"
            )
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        file.write(memoryview(data))


def _plan_shards(specs: Specs, max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        bytes_ = nbytes(*spec)
        if shards[-1] and size + bytes_ > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    return shards


def _header(specs: Specs) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, dtype) in specs.items():
        end = offset + nbytes(shape, dtype)
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_file(path: Path, text: str) -> None:
    """Writes a text file and waits until it is on disk."""
    with open(path, "wb") as file:
        file.write(text.encode())
        _sync(file)


@contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Generator[Path]:
    """A directory that appears under ``path`` complete, or not at all.

    Yields a temporary sibling to write into; it is renamed when the block ends well and removed when it does not.
    What killed processes of this host have left of the same target is removed first.

    Raises:
        CheckpointError: if ``path`` exists and is not an empty directory.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"{target} exists and is not an empty directory; choose another path or remove it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-{platform.node()}-"
    temporary = target.parent / f"{prefix}{os.getpid()}"
    _remove_leftovers(target.parent, prefix)
    temporary.mkdir()
    try:
        yield temporary
        _sync_directory(temporary)
        os.replace(temporary, target)  # also replaces an empty directory
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Removes directories named ``<prefix><process id>`` whose process is gone, and this process's own."""
    for entry in parent.iterdir():
        owner = entry.name.removeprefix(prefix)
        if entry.name.startswith(prefix) and owner.isdecimal() and not _is_other_process(int(owner)):
            logger.info("removing %s, left by an interrupted run", entry)
            shutil.rmtree(entry, ignore_errors=True)


def _is_other_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_companions(source: Path, target: Path) -> None:
    """Copies what belongs to a model beside its weights: config, tokenizer, chat template, generation config, code."""
    for entry in sorted(source.iterdir()):
        if entry.is_file() and _TRAVELS.fullmatch(entry.name) and not _WEIGHTS.fullmatch(entry.name):
            shutil.copyfile(entry, target / entry.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)


def set_config_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Makes config.json name the dtype of the weights beside it; leaves the file alone if it does."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    name = str(dtype).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != name:
        write_file(file, json.dumps({**config, key: name}, indent=2) + "\n")
