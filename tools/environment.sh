# shellcheck shell=bash
# Sourced by examples/quickstart.sh and tests/run.sh: gives them `python` with our requirements installed.
#   source tools/environment.sh REQUIREMENTS_FILE
# Uses the virtual environment that is active; otherwise makes and uses .venv in the root of the repository.

requirements="$1"

fail() {
    echo "error: $*" >&2
    exit 64
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -x .venv/bin/python ]; then
        if found=$(find_python); then
            echo "== making .venv with $("$found" --version)"
            "$found" -m venv .venv
        elif command -v uv >/dev/null 2>&1; then
            echo "== making .venv with uv"
            uv venv --quiet --seed --python 3.12 .venv
        else
            fail "no Python 3.12 (with venv) was found. Install it (Debian/Ubuntu: apt install python3.12-venv;" \
                "anywhere: pyenv install 3.12, or uv), or name one: PYTHON=/path/to/python3.12 bash $0"
        fi
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi
python -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
    fail "the active environment $VIRTUAL_ENV has $(python --version 2>&1), 3.12 or later is needed. Leave it (deactivate) and start again."

# Installing takes a minute and 5 GB the first time; a stamp spares asking pip again.
stamp="$VIRTUAL_ENV/.installed-$(basename "$requirements")-$(cat requirements*.txt | cksum | cut -d' ' -f1)"
if [ ! -e "$stamp" ]; then
    echo "== installing $requirements (about 5 GB the first time)"
    python -m pip install --quiet --disable-pip-version-check -r "$requirements" 2> >(grep -v '^WARNING: Location' >&2)
    touch "$stamp"
fi
