# SPDX-License-Identifier: Apache-2.0
"""Reading and writing HuggingFace directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_bridge.errors import CheckpointError
from megatron_bridge.hf_io import (
    HFCheckpoint,
    ShardedWriter,
    atomic_directory,
    copy_companions,
    parse_size,
    set_config_dtype,
)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(4, 6, generator=generator),
        "b": torch.randn(3, generator=generator).to(torch.bfloat16),
        "c": torch.randn(10, 10, generator=generator),
        "d": torch.arange(5),
        "scalar": torch.tensor(2.5),
    }


def specs(values: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in values.items()}


@pytest.mark.parametrize("limit", [10**9, 200, 1])
def test_what_is_written_is_read_by_safetensors_and_by_us(tmp_path: Path, limit: int) -> None:
    values = tensors()
    writer = ShardedWriter(tmp_path, specs(values), limit)
    writer.write(values.items())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {10**9: 1, 200: 3, 1: 5}[limit]
    read: dict[str, torch.Tensor] = {}
    for file in files:
        read.update(load_file(file))
    ours = HFCheckpoint(tmp_path)
    assert read.keys() == values.keys() == set(ours.names)
    for name, tensor in values.items():
        assert torch.equal(read[name], tensor)
        assert ours[name].shape == tuple(tensor.shape)
        assert ours[name].dtype == tensor.dtype
    assert torch.equal(ours["a"][1:3], values["a"][1:3])
    assert torch.equal(ours["a"][:, 2:5], values["a"][:, 2:5])
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in values.values())


def test_a_wrong_stream_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    values = tensors()
    writer = ShardedWriter(tmp_path, specs(values), 10**9)
    with pytest.raises(CheckpointError, match="ended before c"):
        writer.write(list(values.items())[:2])
    with pytest.raises(CheckpointError, match="expected tensor a, got b"):
        writer.write(list(values.items())[1:])
    with pytest.raises(CheckpointError, match="unexpected tensor x"):
        writer.write([*values.items(), ("x", torch.ones(1))])
    with pytest.raises(CheckpointError, match=r"a is \(6, 4\)"):
        writer.write([("a", values["a"].t())])


def test_damaged_checkpoints_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors"):
        HFCheckpoint(tmp_path)
    save_file(tensors(), tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
        HFCheckpoint(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not there: model-00001-of-00002\.safetensors, model-00002"):
        HFCheckpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        HFCheckpoint(tmp_path)


def test_index_that_names_a_tensor_that_is_not_in_its_file(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"zz": "m.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="has no tensor zz"):
        HFCheckpoint(tmp_path)["zz"]


def test_a_directory_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(IsADirectoryError), atomic_directory(target) as temporary:
        (temporary / ".." / temporary.name).write_text("x")
    assert list(tmp_path.iterdir()) == []
    with atomic_directory(target) as temporary:
        (temporary / "whole").write_text("x")
        assert not target.exists()
    assert [entry.name for entry in target.iterdir()] == ["whole"]
    with (
        pytest.raises(CheckpointError, match="exists and is not an empty directory"),
        atomic_directory(target),
    ):
        pass
    assert (target / "whole").read_text() == "x"


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from megatron_bridge.hf_io import atomic_directory\n"
        "with atomic_directory(sys.argv[1]) as temporary:\n"
        "    (temporary / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target, other = tmp_path / "out", tmp_path / "out2"
    for path in (target, other):
        assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=120).returncode == -9
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert len(left) == 2
    of_target = left[0]
    assert of_target.startswith(".out.partial-")
    pid = of_target.rsplit("-", 1)[1]
    alive = tmp_path / of_target.replace(pid, str(os.getppid()))
    elsewhere = tmp_path / f".out.partial-another-host-{pid}"
    for path in (alive, elsewhere):
        path.mkdir()
    with atomic_directory(target) as temporary:
        (temporary / "whole").write_text("x")
    assert {entry.name for entry in tmp_path.iterdir()} == {"out", alive.name, elsewhere.name, left[1]}


def test_companions_travel_and_weights_do_not(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    stay = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "x.gguf", ".hidden"]
    go = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "modeling_x.py",
    ]
    go += ["merges.txt", "tokenizer.model", "LICENSE"]
    for name in stay + go:
        (source / name).write_text(name)
    (source / "config.json").write_text(json.dumps({"dtype": "float32", "x": 1}))
    copy_companions(source, target)
    set_config_dtype(target, torch.bfloat16)
    assert {entry.name for entry in target.iterdir()} == {*go, "config.json"}
    assert json.loads((target / "config.json").read_text()) == {"dtype": "bfloat16", "x": 1}
    copy_companions(source, target)
    set_config_dtype(target, torch.float32)
    assert (target / "config.json").read_text() == (source / "config.json").read_text(), "unchanged bytes"


def test_sizes() -> None:
    assert parse_size("5GB") == 5 * 10**9
    assert parse_size("2 GiB") == 2 << 30
    assert parse_size("1.5MB") == 1_500_000
    assert parse_size("100") == 100
    assert parse_size(7) == 7
    for wrong in ("five", "-1GB", "0", "5XB", ""):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(wrong)
