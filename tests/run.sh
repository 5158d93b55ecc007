#!/usr/bin/env bash
# Runs all checks and tests: lint, types, pytest. Arguments go to pytest, e.g. `bash tests/run.sh -k parity`.
# Where an argument is a file or folder, as in `bash tests/run.sh tests/unit/train`, the types are left to a plain run.
# With --all it also runs the tests that are marked slow, with -m slow these alone; CONTRIBUTING.md says when.
# On a processor with AVX-512, a run without arguments repeats the numeric files as a processor without it computes.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh requirements-dev.txt
export OMP_NUM_THREADS=1
# Tests start some hundred interpreters, and each would compile the package anew.
unset PYTHONDONTWRITEBYTECODE

echo "== ruff"
python -m ruff check .
python -m ruff format --check .
checker=""
types="$(mktemp)"
trap 'kill $checker 2>/dev/null || true; rm -f "$types"' EXIT
part=""
for argument in "$@"; do
    [[ -e "${argument%%::*}" ]] && part="$argument"
done
if [[ -z "$part" ]]; then
    echo "== pyright, while the tests run"
    python -m pyright --pythonpath "$(command -v python)" >"$types" 2>&1 &
    checker=$!
fi
echo "== pytest"
# Three files at a time on two cores, for some wait; in the order of tests/conftest.py. A file's tests stay together:
# they share what they trained.
code=0
tested=(python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder)
"${tested[@]}" "$@" || code=$?
if (($# == 0)) && python -c 'import sys, torch; sys.exit(torch.backends.cpu.get_cpu_capability() != "AVX512")'; then
    # Numeric is what is compared with a tolerance: found by how that is written, lest a list of files goes stale.
    tolerance='approx\(|assert_close|allclose|TOLERANCE|CLEAR|[<>]=? [^"]*[0-9]e-[0-9]'
    mapfile -t numeric < <(grep -rlE --include='test_*.py' "$tolerance" tests/distributed tests/unit/{model,optim,parts} tests/plugins)
    echo "== pytest again, with AVX2 in place of AVX-512: tests/parity and ${#numeric[@]} files that name a tolerance"
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
        "${tested[@]}" tests/parity "${numeric[@]}" || code=$?
fi
if [[ -n "$checker" ]] && ! wait "$checker"; then
    echo "== pyright"
    cat "$types"
    code=1
fi
exit "$code"
