#!/usr/bin/env bash
# Runs checks and tests; CONTRIBUTING.md (Tiers of tests) says what each tier guards. Other arguments go to pytest.
#   bash tests/run.sh                      checks of style, types, the first tier: minutes
#   bash tests/run.sh --full               the second tier, and numeric files as a processor without AVX-512 computes
#   bash tests/run.sh --slow, --all        what repeats promises over more layouts: an hour; everything: hours
#   bash tests/run.sh --changed [COMMIT]   of the first tier the files that a change since a commit (HEAD) may concern
#   bash tests/run.sh tests/unit/train     the tests of a folder or file, but the slow ones
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh requirements-dev.txt
export OMP_NUM_THREADS=1
# Tests start some hundred interpreters, and each would compile the package anew.
unset PYTHONDONTWRITEBYTECODE

part=""
if [[ "${1:-}" == --changed ]]; then
    shift
    commit=HEAD
    if [[ -n "${1:-}" && "$1" != -* ]]; then
        commit="$1"
        shift
    fi
    found="$(python -m tests.support.changed "$commit")"
    mapfile -t chosen < <(printf '%s' "$found")
    echo "== ${#chosen[@]} files of tests concern what has changed since $commit"
    if ((${#chosen[@]} == 0)); then exec bash tests/checks.sh; fi
    set -- --quick "$@" "${chosen[@]}"
fi
for argument in "$@"; do
    [[ -e "${argument%%::*}" ]] && part="$argument"
done
checker=""
types="$(mktemp)"
trap 'kill $checker 2>/dev/null || true; rm -f "$types"' EXIT
if (($# == 0)); then
    bash tests/checks.sh
    echo "== pyright, while the tests run"
    python -m pyright --pythonpath "$(command -v python)" >"$types" 2>&1 &
    checker=$!
fi
echo "== pytest"
# Three files at a time on two cores, for some wait; in the order of tests/conftest.py. A file's tests stay together:
# they share what they trained.
code=0
tested=(python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder)
[[ -n "$part" ]] || tested+=(--ignore tests/checks)
"${tested[@]}" "$@" || code=$?
if [[ "$*" == --full ]] && python -c 'import sys, torch; sys.exit(torch.backends.cpu.get_cpu_capability() != "AVX512")'; then
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
