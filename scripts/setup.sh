#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build .venv with the pinned requirements and this package. Returns at once where nothing has changed.
# usage: bash scripts/setup.sh [--dev]      --dev adds what the checks and tests need
# PYTHON=/path/to/python3.12 chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=base
for word in "$@"; do
  case $word in
    --dev) kind=dev ;;
    -h | --help) sed -n '3,5s/^# //p' "$0"; exit 0 ;;
    *) echo "setup.sh: unknown argument $word (there is only --dev)" >&2; exit 2 ;;
  esac
done

works() { # whether $1 is a Python that we support, with venv
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3.13 python3 python \
    "$HOME"/.pyenv/versions/3.12.*/bin/python "$HOME"/.pyenv/versions/3.13.*/bin/python; do
    if [ -n "$candidate" ] && works "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  if command -v uv >/dev/null 2>&1; then
    for candidate in 3.12 3.13; do
      uv python find "$candidate" 2>/dev/null && return
      uv python install --quiet "$candidate" 2>/dev/null && uv python find "$candidate" && return
    done
  fi
  echo "setup.sh: no Python 3.12 or 3.13 with venv found; install one (for example python3.12 and python3.12-venv, pyenv" >&2
  echo "install 3.12, or uv), or name one: PYTHON=/path/to/python3.12 bash scripts/setup.sh" >&2
  return 1
}

stamp() { # what the environment depends on
  { echo "$PWD"; sed "/^.tool.pytest/,\$d" pyproject.toml; cat requirements/base.txt; [ $kind = base ] || cat requirements/dev.txt; } |
    if command -v sha256sum >/dev/null 2>&1; then sha256sum; else shasum -a 256; fi | cut -d' ' -f1
}

up_to_date() { # a dev environment serves as a base one
  works .venv/bin/python && { [ "$(cat ".venv/.stamp-$kind" 2>/dev/null)" = "$(stamp)" ]; }
}

if up_to_date; then
  exit 0
fi
if command -v flock >/dev/null 2>&1; then # two set-ups at once would break each other
  exec 9>.setup.lock
  if ! flock -n 9; then
    echo "setup.sh: waiting up to 20 minutes for another set-up of this folder"
    flock -w 1200 9
  fi
  if up_to_date; then
    exit 0
  fi
fi

started=$SECONDS
if ! works .venv/bin/python; then
  python=$(find_python)
  echo "setup.sh: $("$python" --version) -> .venv"
  rm -rf .venv
  "$python" -m venv .venv
fi
rm -f .venv/.stamp-base .venv/.stamp-dev
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
echo "setup.sh: installing requirements/$kind.txt (torch and its CUDA libraries are 2 to 3 GB; the first time takes minutes)"
pip install --quiet --quiet --progress-bar off --no-compile -r "requirements/$kind.txt"
pip install --quiet --quiet --no-deps --no-build-isolation --editable .
pip check >/dev/null || { echo "setup.sh: the installed packages contradict each other:" >&2; pip check >&2; exit 1; }
stamp >".venv/.stamp-$kind"
if [ $kind = dev ]; then
  (kind=base && stamp) >.venv/.stamp-base
fi
echo "setup.sh: done in $((SECONDS - started)) s"
