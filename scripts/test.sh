#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that must hold before a commit: format, lint, types, layers, tests. Non-zero if anything fails.
# usage: bash scripts/test.sh [--all] [pytest arguments]      --all adds the tests marked slow
set -uo pipefail
cd "$(dirname "$0")/.."

marks="not slow"
arguments=()
for word in "$@"; do
  case $word in
    --all) marks="" ;;
    -h | --help) sed -n '3,4s/^# //p' "$0"; exit 0 ;;
    *) arguments+=("$word") ;;
  esac
done

bash scripts/setup.sh --dev || exit 1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

failed=()
check() { # name, command...
  local name=$1 started=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  if "$@"; then
    echo "-- $name: ok, $((SECONDS - started)) s"
  else
    echo "-- $name: FAILED, $((SECONDS - started)) s"
    failed+=("$name")
  fi
}

check "format (ruff)" .venv/bin/ruff format --check .
check "lint (ruff)" .venv/bin/ruff check --output-format=concise .
check "types (pyrefly)" .venv/bin/pyrefly check
check "layers (import-linter)" .venv/bin/lint-imports
check "tests (pytest)" .venv/bin/python -m pytest --durations=10 ${marks:+-m "$marks"} ${arguments[@]+"${arguments[@]}"}

if [ ${#failed[@]} -gt 0 ]; then
  printf '\nfailed: %s\n' "$(IFS=,; echo "${failed[*]}")"
  exit 1
fi
printf '\nall checks passed in %s s\n' "$SECONDS"
