# SPDX-License-Identifier: Apache-2.0
"""One GRPO step against trl's GRPOTrainer and transformers, side by side, as a table.

4 prompts x 4 samples x 64 tokens after prompts of 8, on `nemo-rl tiny-model --family llama` (0.8 M parameters) in fp32
at TP=PP=DP=1, with a KL penalty towards the reference, Adam and clipping to norm 1, on the same number of threads.

First the engine alone: the undecorated worker in this process takes turns with transformers (same process) and trl
(its own process, see peer_trl_grpo.py). Then whole steps as `nemo-rl grpo` runs them, through Ray, Policy, rollouts,
environment, metrics and logging, taking turns with trl's. Medians over the turns.

trl does not compute the log-probs of the policy before the update when there is one update per batch. We do by
default; loss_fn.force_on_policy_ratio=true leaves them out like trl. Both are measured.

usage: python -m tests.benchmarks.grpo_step --peer-python PATH [--turns N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.algorithms.config import GRPOMasterConfig
from nemo_rl.algorithms.context import Context
from nemo_rl.algorithms.grpo import GRPO
from nemo_rl.algorithms.loop import StepResult, TrainLoop
from nemo_rl.algorithms.loss.clipped_pg import ClippedPGLossFn
from nemo_rl.algorithms.setup import build_grpo
from nemo_rl.cli.tiny_model import make_tiny_checkpoint
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.models.policy.megatron_policy_worker import MegatronPolicyWorkerImpl
from nemo_rl.utils.config import load
from nemo_rl.utils.timer import Timer

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 4, 4, 8, 64
ROWS, LENGTH = PROMPTS * SAMPLES, PROMPT_TOKENS + NEW_TOKENS
WARM_UP = 3
REPO = Path(__file__).resolve().parents[2]

Samples = dict[str, list[float]]


class Peer:
    """trl in its own process; steps when told to."""

    def __init__(self, python: str, model_dir: str, steps: int, threads: int, log: Path) -> None:
        """Start it and wait until it is ready for its first step."""
        self._log = log
        self._process = subprocess.Popen(
            [python, str(REPO / "tests/benchmarks/peer_trl_grpo.py"), model_dir, str(steps), str(threads)],
            env=dict(os.environ, OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false"),
            cwd=log.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            start_new_session=True,  # as Ray is: Linux shares the CPU between sessions first
        )
        self._answer()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def step(self) -> dict[str, float]:
        """Seconds of one step by phase: generation, reference, rollout, train, step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)


def grpo_config(model_dir: str, run_dir: Path, steps: int, overrides: list[str]) -> GRPOMasterConfig:
    """What `nemo-rl grpo` would load."""
    data = run_dir.parent / "prompts.jsonl"
    rows = [{"input": f"{i % 10}+{i // 10}=?", "output": str(i % 10 + i // 10)} for i in range(100)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(
        REPO / "tests/benchmarks/grpo_step.yaml",
        [
            f"policy.model_name={model_dir}",
            f"grpo.max_num_steps={steps}",
            f"data.train.data_path={data}",
            f"logger.log_dir={run_dir}",
            *overrides,
        ],
        GRPOMasterConfig,
    )


# -- the engine alone ------------------------------------------------------------------------------------------


def engine_calls(model_dir: str, config: GRPOMasterConfig) -> dict[str, Callable[[], Any]]:
    """What is timed in this process: our worker's phases, and transformers' counterparts."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    policy = config.policy.with_runtime(
        generation=configure_generation_config(config.policy.generation, tokenizer)
    )
    worker = MegatronPolicyWorkerImpl(policy, tokenizer)
    peer = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    torch.manual_seed(0)
    ids = torch.randint(7, 103, (ROWS, LENGTH))
    prompts = ids[:, :PROMPT_TOKENS].contiguous()
    data: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.full((ROWS,), LENGTH),
        token_mask=(torch.arange(LENGTH) >= PROMPT_TOKENS).float().expand(ROWS, LENGTH).contiguous(),
        sample_mask=torch.ones(ROWS),
        advantages=torch.randn(ROWS, 1).expand(ROWS, LENGTH).contiguous(),
    )
    columns = BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")})
    ours = worker.get_logprobs(data=columns)["logprobs"]
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[name] = ours
    request: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=prompts, input_lengths=torch.full((ROWS,), PROMPT_TOKENS), seeds=torch.arange(ROWS)
    )
    loss_fn = ClippedPGLossFn(config.loss_fn)

    @torch.no_grad()
    def forward_log_softmax() -> torch.Tensor:
        logits = peer(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, :-1]
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]

    def transformers_generate() -> None:
        peer.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip

    torch.testing.assert_close(forward_log_softmax(), ours[:, 1:], atol=1e-4, rtol=0)  # the same work
    return {
        "generation": lambda: worker.generate(data=request),
        "transformers generation": transformers_generate,
        "logprobs": lambda: worker.get_logprobs(data=columns),
        "transformers logprobs": forward_log_softmax,
        "reference": lambda: worker.get_reference_policy_logprobs(data=columns),
        "train": lambda: worker.train(data, loss_fn),
        "end": worker.shutdown,
    }


def measure_engine(model_dir: str, config: GRPOMasterConfig, peer: Peer, turns: int) -> Samples:
    """Seconds of every phase, in turns."""
    calls = engine_calls(model_dir, config)
    end = calls.pop("end")
    samples: Samples = defaultdict(list)
    for turn in range(WARM_UP + turns):
        seconds = {f"trl {name}": value for name, value in peer.step().items()}
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name] = time.perf_counter() - start
        if turn >= WARM_UP:
            for name, value in seconds.items():
                samples[name].append(value)
    end()
    return samples


# -- whole steps -----------------------------------------------------------------------------------------------


class TakingTurns(GRPO):
    """GRPO that lets the peer step before each of its own steps."""

    def __init__(self, context: Context, config: GRPOMasterConfig, peer: Peer) -> None:
        """Measure from the end of the peer's step to the beginning of its next one."""
        super().__init__(context, config)
        self.samples: Samples = defaultdict(list)
        self._peer = peer
        self._begun = 0.0
        self._peer_seconds: dict[str, float] = {}
        self._phases: dict[str, float] = {}

    def step(self, batch: BatchedDataDict[Any], step: int, timer: Timer) -> StepResult:
        """One step of each."""
        now = time.perf_counter()
        if step > WARM_UP:
            self._take({"step": now - self._begun} | self._phases, self._peer_seconds)
        self._peer_seconds = self._peer.step()
        before = timer.seconds()
        self._begun = time.perf_counter()
        result = super().step(batch, step, timer)
        self._phases = {name: value - before.get(name, 0.0) for name, value in timer.seconds().items()}
        assert result.metrics["mean_response_length"] == NEW_TOKENS, result.metrics
        assert result.metrics["mean_prompt_length"] == PROMPT_TOKENS, result.metrics
        return result

    def _take(self, ours: dict[str, float], theirs: dict[str, float]) -> None:
        for name, value in ours.items():
            self.samples[name].append(value)
        for name, value in theirs.items():
            self.samples[f"trl {name}"].append(value)


def measure_steps(config: GRPOMasterConfig, peer: Peer) -> Samples:
    """Seconds of whole steps and their phases through Ray."""
    with ExitStack() as stack:
        run_dir = Path(config.logger.log_dir)
        run_dir.mkdir(parents=True)
        context, cadence, state = build_grpo(config, run_dir)
        stack.callback(context.close)
        algorithm = TakingTurns(context, config, peer)
        TrainLoop(context, algorithm, cadence, state).run()
        return algorithm.samples


# -- report ----------------------------------------------------------------------------------------------------


def table(engine: Samples, default: Samples, on_policy: Samples) -> str:
    """Markdown: ours, theirs, ratio and target of each line."""
    rows = [
        ("generation", engine, ["generation"], ["transformers generation"], "transformers `generate`", 1.5),
        ("one log-prob pass", engine, ["logprobs"], ["transformers logprobs"], "transformers + log_softmax", 1.3),
        ("reference log-probs", engine, ["reference"], ["trl reference"], "trl", 1.0),
        ("train (forward, backward, clip, Adam)", engine, ["train"], ["trl train"], "trl", 1.0),
        ("train + reference log-probs", engine, ["train", "reference"], ["trl train", "trl reference"], "trl", 1.0),
        (
            "train + reference + previous log-probs", engine,
            ["train", "reference", "logprobs"], ["trl train", "trl reference"], "trl, which skips the last", 1.0,
        ),
        ("whole step through Ray, same work", on_policy, ["step"], ["trl step"], "trl", 1.0),
        ("whole step through Ray, with previous log-probs", default, ["step"], ["trl step"], "trl, without", 1.0),
    ]  # fmt: skip
    lines = [
        "| what | ours, ms | theirs, ms | ratio | best ratio | target | against |",
        "|---|---|---|---|---|---|---|",
    ]
    for what, samples, ours, theirs, against, target in rows:
        mine = [sum(parts) for parts in zip(*(samples[name] for name in ours), strict=True)]
        other = [sum(parts) for parts in zip(*(samples[name] for name in theirs), strict=True)]
        lines.append(
            f"| {what} | {1e3 * median(mine):.1f} | {1e3 * median(other):.1f} | {median(mine) / median(other):.2f} "
            f"| {min(mine) / min(other):.2f} | {target} | {against} |"
        )
    return "\n".join(lines)


def phases(samples: Samples) -> str:
    """Medians of all phases of a run."""
    return "  ".join(f"{name} {1e3 * median(values):.1f}" for name, values in samples.items())


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder with the model, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="nrl-bench-", ignore_cleanup_errors=True) as folder:
        make_tiny_checkpoint(Path(folder) / "model", family="llama")
        yield Path(folder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True, help="python of the environment with trl")
    parser.add_argument("--turns", type=int, default=20, help="turns of each part (default: 20)")
    parser.add_argument("--threads", type=int, default=1, help="threads of both (default: 1)")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--only", choices=["engine", "steps"], help="measure one part, print its phases")
    args = parser.parse_args()
    os.environ |= {"NRL_DEVICE": "cpu", "NRL_NUM_THREADS": str(args.threads), "TORCHDYNAMO_DISABLE": "1"}
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    # Ray's default is 15: on a busy machine that would measure the others.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    torch.set_num_threads(args.threads)
    count = WARM_UP + args.turns
    results: dict[str, Samples] = {}
    with workplace() as folder:
        model_dir = str(folder / "model")
        with Peer(args.peer_python, model_dir, 3 * count + 3, args.threads, folder / "peer.log") as peer:
            if args.only != "steps":
                config = grpo_config(model_dir, folder / "unused", count, [])
                results["engine"] = measure_engine(model_dir, config, peer, args.turns)
            if args.only != "engine":
                for name, value in (("default", "false"), ("on_policy", "true")):
                    override = [f"loss_fn.force_on_policy_ratio={value}"]
                    config = grpo_config(model_dir, folder / name, count + 1, override)
                    results[name] = measure_steps(config, peer)
    sys.stdout.write(f"{args.turns} turns, {args.threads} thread(s), load {os.getloadavg()[0]:.1f}\n\n")
    if args.json:
        args.json.write_text(json.dumps(results))
    for name, samples in results.items():
        sys.stdout.write(f"{name}: {phases(samples)}\n\n")
    if args.only is None:
        sys.stdout.write(table(**results) + "\n")


if __name__ == "__main__":
    main()
