#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job from nothing, on a laptop: set up, make a small Qwen3 checkpoint, teach it arithmetic a little (SFT),
# improve it with GRPO on a tensor-parallel Megatron policy through Ray, export HuggingFace weights, and score every
# stage with plain transformers on problems that no stage has trained on.
# usage: bash scripts/quickstart.sh [OUT] [grpo key=value ...]      default OUT: results/quickstart
set -euo pipefail
cd "$(dirname "$0")/.."
out=results/quickstart
if [ $# -gt 0 ] && [[ $1 != *=* ]]; then
  out=$1
  shift
fi
bash scripts/setup.sh
bin=.venv/bin
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

say() { printf '\n== %s\n' "$*"; }

latest() { # newest complete checkpoint of a run directory
  ls -d "$1"/checkpoints/step_* | sort -t_ -k2 -n | tail -1
}

if [ ! -f "$out/base/config.json" ]; then
  say "1/6 a random Qwen3 checkpoint in $out/base"
  $bin/nemo-rl tiny-model "$out/base" --layers 2
fi
say "2/6 SFT on arithmetic: $out/sft"
$bin/nemo-rl sft --config configs/cpu/sft_arithmetic.yaml policy.model_name="$out/base" logger.log_dir="$out/sft"
say "3/6 the SFT weights as a HuggingFace checkpoint: $out/sft_hf"
if [ ! -d "$out/sft_hf" ]; then
  $bin/megatron-bridge export "$(latest "$out/sft")" "$out/sft_hf" --hf "$out/base"
fi
say "4/6 GRPO with TP=2: $out/grpo"
$bin/nemo-rl grpo --config configs/cpu/grpo_arithmetic.yaml policy.model_name="$out/sft_hf" \
  logger.log_dir="$out/grpo" "$@"
say "5/6 the GRPO weights as a HuggingFace checkpoint: $out/grpo_hf"
rm -rf "$out/grpo_hf"
$bin/megatron-bridge export "$(latest "$out/grpo")" "$out/grpo_hf" --hf "$out/sft_hf"
say "6/6 held-out accuracy of each stage, by plain transformers"
$bin/nemo-rl plot "$out/grpo" > /dev/null
$bin/python scripts/quickstart_report.py "$out"
