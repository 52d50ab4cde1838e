# SPDX-License-Identifier: Apache-2.0
"""Saving and converting: what transformers loads, what the CLI says, what is left after a failure."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_bridge import AutoBridge
from megatron_bridge.cli import main
from tests.support.models import tiny_hf_dir, tiny_model
from tests.support.world import run_world

WORLDS = "tests.integration.worlds_bridge:"


def cli(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_bridge.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_hf_dir(tmp_path_factory.mktemp("hf") / "tied", "qwen3", tied=True)


@pytest.fixture(scope="module")
def imported(tied: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mcore") / "checkpoint"
    done = cli("import", tied, out)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return out


@pytest.mark.parametrize(("family", "tie", "tp", "pp"), [("qwen3", True, 1, 2), ("qwen2", False, 2, 1)])
def test_saved_directory_loads_in_transformers(
    tmp_path: Path, family: str, tie: bool, tp: int, pp: int
) -> None:
    path, target = tiny_hf_dir(tmp_path / "m", family, tied=tie), tmp_path / "out"
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages }}")
    run_world(tp * pp, WORLDS + "save", path=path, target=str(target), tp=tp, pp=pp, max_shard_size="20KB")
    assert len(list(target.glob("*.safetensors"))) > 1
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    _, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ids = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        before, after = (AutoModelForCausalLM.from_pretrained(p)(ids).logits for p in (path, target))
    assert torch.equal(before, after)
    code = (
        "import warnings, sys; warnings.simplefilter('error')\n"
        "from transformers import AutoModelForCausalLM, logging\n"
        "logging.disable_progress_bar()\n"
        "AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, str(target)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_changed_config_is_written_not_copied(tied: str, tmp_path: Path) -> None:
    change = {"max_position_embeddings": 123}
    run_world(1, WORLDS + "save", path=tied, target=str(tmp_path / "out"), tp=1, pp=1, change=change)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 123


def test_lm_head_of_a_tied_checkpoint_is_not_needed_and_not_written(tied: str, tmp_path: Path) -> None:
    shutil.copytree(tied, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        tmp_path / "m" / "model.safetensors",
    )
    run_world(2, WORLDS + "save", path=str(tmp_path / "m"), target=str(tmp_path / "out"), tp=1, pp=2)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


def test_save_refuses_a_full_directory_on_every_rank(tied: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(AssertionError) as caught:
        run_world(2, WORLDS + "save", path=tied, target=str(tmp_path), tp=1, pp=2, deadline=60)
    assert str(caught.value).count("exists and is not an empty directory") >= 2
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_imported_checkpoint_loads_at_any_layout(tied: str, imported: Path, tp: int, pp: int) -> None:
    for result in run_world(
        tp * pp, WORLDS + "load_distributed", path=tied, checkpoint=str(imported), tp=tp, pp=pp
    ):
        assert result == {"wrong": [], "padding": 0.0}


def test_import_then_export_is_bit_equal(tied: str, imported: Path, tmp_path: Path) -> None:
    done = cli("export", imported, tmp_path / "out", "--hf", tied)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    source, back = (
        load_file(Path(tied) / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    assert source.keys() == back.keys()
    assert all(torch.equal(source[name], back[name]) for name in source)
    assert (tmp_path / "out" / "config.json").read_text() == (Path(tied) / "config.json").read_text()


def test_a_step_of_a_parallel_run_is_exported(tmp_path: Path) -> None:
    path = tiny_hf_dir(tmp_path / "m", "llama")
    step = tmp_path / "step_3"
    run_world(
        4, WORLDS + "save_distributed", path=path, checkpoint=str(step / "policy" / "weights"), tp=2, pp=2
    )
    arguments = ["export", str(step), str(tmp_path / "out"), "--hf", path, "--dtype", "bfloat16"]
    assert main([*arguments, "--max-shard-size", "30KB"]) == 0
    back: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        back.update(load_file(file))
    source = load_file(Path(path) / "model.safetensors")
    assert source.keys() == back.keys()
    assert all(torch.equal((2 * source[name]).to(torch.bfloat16), back[name]) for name in source)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_dtype_of_an_import_is_the_files(tmp_path: Path) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    AutoBridge.import_ckpt(tmp_path / "m", tmp_path / "c")
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert stored["embedding.word_embeddings.weight"].properties.dtype == torch.bfloat16
    AutoBridge.from_hf_pretrained(tmp_path / "m").export_ckpt(tmp_path / "c", tmp_path / "back")
    source, back = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "back"))
    assert source.keys() == back.keys()
    assert all(torch.equal(source[name], back[name]) for name in source)


def damaged(tied: str, target: Path, damage: str) -> None:
    shutil.copytree(tied, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
        return
    if damage == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif damage == "unexpected":
        tensors["model.layers.7.extra"] = torch.ones(1)
    elif damage == "shape":
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(8, 32)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("truncated", "model.safetensors is not a complete safetensors file"),
        ("missing", "lacks 1 tensors of the model: model.layers.1.mlp.up_proj.weight"),
        ("unexpected", "holds 1 tensors that the model does not use: model.layers.7.extra"),
        (
            "shape",
            "model.layers.0.self_attn.k_proj.weight has shape (8, 32), but the model's config.json asks for (16, 32)",
        ),
    ],
)
def test_import_of_a_damaged_directory_names_the_fault_and_leaves_nothing(
    tied: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, words: str
) -> None:
    damaged(tied, tmp_path / "m", damage)
    assert main(["import", str(tmp_path / "m"), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert len(message.splitlines()) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "{tmp}", "{tmp}/out", "--hf", "{tied}"], "no megatron-core distributed checkpoint in"),
        (["import", "{tmp}", "{tmp}/out"], "has no config.json"),
        (
            ["export", "{imported}", "{tmp}/out", "--hf", "{other}"],
            "has shape (97, 32), but the model asks for (97, 64)",
        ),
        (
            ["export", "{imported}", "{tmp}/out", "--hf", "{deeper}"],
            "does not hold this model: decoder.layers.",
        ),
        (
            ["export", "{imported}", "{tmp}/out", "--hf", "{untied}"],
            "output_layer.weight is missing (the model has it with shape (97, 32))",
        ),
        (
            ["export", "{imported}", "{tmp}/out", "--hf", "{larger}"],
            "has shape (97, 32), but the model has a vocabulary of 101: (101, 32)",
        ),
        (
            ["export", "{imported}", "{tmp}/out", "--hf", "{tied}", "--max-shard-size", "big"],
            "'big' is not a size",
        ),
    ],
)
def test_mistakes_exit_with_2_and_say_what_is_wrong(
    tied: str,
    imported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    places = {"tied": tied, "imported": imported, "tmp": tmp_path}
    if "{other}" in arguments:
        places["other"] = tiny_hf_dir(tmp_path / "other", "qwen3", tied=True, hidden=64)
    if "{deeper}" in arguments:
        places["deeper"] = tiny_hf_dir(tmp_path / "deeper", "qwen3", tied=True, layers=3)
    if "{untied}" in arguments:
        places["untied"] = tiny_hf_dir(tmp_path / "untied", "qwen3", tied=False)
    if "{larger}" in arguments:
        places["larger"] = tiny_hf_dir(tmp_path / "larger", "qwen3", tied=True, vocab=101)
    capsys.readouterr()
    assert main([argument.format(**places) for argument in arguments]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out.splitlines()
