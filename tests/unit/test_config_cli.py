# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl config` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml

from nemo_rl.cli.main import COMMANDS, main

TREE = """
policy: {model_name: tiny, train_global_batch_size: 8, generation: {max_new_tokens: 8}}
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4, val_period: 0}
data: {train: {dataset_name: arithmetic}}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "grpo.yaml"
    file.write_text(TREE)
    return str(file)


def test_show_prints_the_resolved_tree(path, capsys):
    assert main(["config", "show", "--config", path, "logger.log_dir=a/b"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["checkpointing"]["checkpoint_dir"] == "a/b/checkpoints"
    assert tree["policy"]["dtensor_cfg"]["_v2"] is True
    assert main(["config", "show", path, "--key", "policy.generation.temperature"]) == 0
    assert capsys.readouterr().out == "1.0\n"
    assert main(["config", "show", path, "--key", "policy.nothing"]) == 2


def test_check_prints_the_batch_equation_or_every_violation(path, capsys):
    assert main(["config", "check", path]) == 0
    assert "2 prompts x 4 generations = 8 rows per step" in capsys.readouterr().out
    assert main(["config", "check", path, "polcy.lr=1", "grpo.seed=x", "~grpo.val_period"]) == 2
    message = capsys.readouterr().err
    assert "3 problems" in message
    assert "polcy.lr: unknown key; did you mean policy.lr?" in message
    assert "grpo.seed" in message and "data.validation" in message


def test_check_chooses_the_algorithm_by_its_section(path, tmp_path, capsys):
    assert main(["config", "check", path, "~grpo", "dpo.max_num_steps=1"]) == 2
    assert "dpo: this algorithm is not supported yet; use grpo or sft" in capsys.readouterr().err
    assert main(["config", "check", path, "~grpo"]) == 2
    assert "no section grpo or sft" in capsys.readouterr().err
    assert main(["config", "check", path, "sft.val_batches=1"]) == 2
    assert "two algorithms" in capsys.readouterr().err
    assert main(["config", "check", path, "~grpo", "grppo.seed=1"]) == 2
    assert "grppo.seed: unknown key; did you mean grpo.seed?" in capsys.readouterr().err
    assert main(["config", "check"]) == 2
    assert "--config" in capsys.readouterr().err


def test_explain_says_type_default_meaning_and_use(capsys):
    assert main(["config", "explain", "policy.megatron_cfg.optimizer.lr"]) == 0
    text = capsys.readouterr().out
    assert "float (>= 0)" in text and "5e-06" in text and "Peak learning rate." in text
    assert "nemo_rl/models/megatron/" in text
    assert main(["config", "explain", "checkpointing.checkpoint_dir", "policy.tokenizer.name"]) == 0
    text = capsys.readouterr().out
    assert "if left out: ${logger.log_dir}/checkpoints" in text
    assert "if left out: ${policy.model_name}" in text
    assert main(["config", "explain", "policy.precision"]) == 0
    assert "bfloat16 | float16 | float32" in capsys.readouterr().out
    assert main(["config", "explain", "policy.sequence_packing.enabled"]) == 0
    assert "not supported yet, except false" in capsys.readouterr().out
    assert main(["config", "explain", "num_prompts_per_step", "env.math.num_workers", "cluster"]) == 0
    text = capsys.readouterr().out
    assert "grpo.num_prompts_per_step" in text and "Verifier processes." in text and "gpus_per_node" in text
    assert main(["config", "explain", "enabled"]) == 0
    assert "last part of several keys" in capsys.readouterr().out
    assert main(["config", "explain", "sft.val_batches"]) == 0


def test_explain_unknown_key_suggests(capsys):
    assert main(["config", "explain", "policy.temperture"]) == 2
    assert "did you mean policy.generation.temperature" in capsys.readouterr().err


def test_dispatcher(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main(["grppo"]) == 2
    assert "did you mean grpo?" in capsys.readouterr().err
    assert main(["--version"]) == 0


def test_an_interrupt_is_one_line(path, capsys, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("nemo_rl.cli.grpo.run", interrupt)
    assert main(["grpo", "--config", path]) == 130
    error = capsys.readouterr().err
    assert error == "nemo-rl grpo: interrupted; the same command goes on from the last checkpoint\n"


@pytest.mark.parametrize("argv", [["--help"], ["config", "check", "PATH"]])
def test_answers_in_half_a_second_without_importing_torch(path, argv):
    argv = [path if word == "PATH" else word for word in argv]
    code = f"import sys; from nemo_rl.cli.main import main; main({argv!r}); sys.exit('torch' in sys.modules)"
    before = os.times()
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    after = os.times()  # processor time: wall time says little on a shared machine
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.5


def test_exit_code_of_the_process(path):
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl.cli.main", "config", "check", path, "polcy.lr=1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "did you mean policy.lr?" in done.stderr and "Traceback" not in done.stderr
