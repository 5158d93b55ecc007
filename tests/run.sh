#!/usr/bin/env bash
# Runs all checks and tests: lint, types, pytest. Arguments go to pytest, e.g. `bash tests/run.sh -k parity`.
# With --all it also runs the tests that are marked slow; CONTRIBUTING.md says when to run them.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh requirements-dev.txt
export OMP_NUM_THREADS=1
# Tests start some hundred interpreters, and each would compile the package anew.
unset PYTHONDONTWRITEBYTECODE

echo "== ruff"
python -m ruff check .
python -m ruff format --check .
echo "== pyright, while the tests run"
types="$(mktemp)"
python -m pyright --pythonpath "$(command -v python)" >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
echo "== pytest"
# Three files at a time on two cores, for some wait; in the order of tests/conftest.py. A file's tests stay together:
# they share what they trained.
code=0
python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@" || code=$?
if ! wait "$checker"; then
    echo "== pyright"
    cat "$types"
    code=1
fi
exit "$code"
