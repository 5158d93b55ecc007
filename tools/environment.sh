# shellcheck shell=bash
# Sourced by the scripts of examples/, benchmarks/ and tests/ in the root of the repository: gives them `python`,
# `torchrun` and `megatron-ext`.
#   source tools/environment.sh REQUIREMENTS_FILE    makes .venv where it is missing, and installs the requirements
#   source tools/environment.sh --no-install         makes and installs nothing: for launches, on many machines at once
# Uses the virtual environment that is active, or else .venv in the root of the repository; the second form goes on with
# the `python` of $PATH where neither is there, as in an image.

case "${1:?a file of requirements, or --no-install}" in
    --no-install) requirements="" ;;
    *) requirements="$1" ;;
esac

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

make_environment() {
    local found
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
}

install_requirements() {
    # Installing takes minutes and 5 GB the first time, which pip reports; a stamp spares asking pip again.
    local stamp
    if [ ! -f "$requirements" ] || [ ! -f pyproject.toml ]; then
        fail "there is no $requirements with a pyproject.toml in $PWD: run this in the root of the repository"
    fi
    stamp="$VIRTUAL_ENV/.installed-$(basename "$requirements")-$( (pwd && cat requirements*.txt pyproject.toml) | cksum | cut -d' ' -f1)"
    if [ -e "$stamp" ]; then return; fi
    echo "== installing $requirements (about 5 GB the first time), and megatron-ext"
    local pip=(python -m pip install --disable-pip-version-check -r "$requirements")
    if [ -t 1 ]; then  # with pip's bar for each download, which needs the terminal itself
        "${pip[@]}" 2> >(grep -v '^WARNING: Location' >&2) || fail "pip could not install $requirements; it says why above"
    else
        "${pip[@]}" --progress-bar off 2> >(grep -v '^WARNING: Location' >&2) \
            > >(sed -un -E 's/^ *(Downloading|Processing|Building wheel for|Installing) (.{0,140}).*/   \1 \2/p') ||
            fail "pip could not install $requirements; it says why above"
    fi
    # The command megatron-ext, of the sources as they are here. All that building it needs is installed by now.
    python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . ||
        fail "pip could not install megatron-ext; it says why above"
    touch "$stamp"
}

if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ -n "$requirements" ] && [ ! -x .venv/bin/python ]; then make_environment; fi
    # shellcheck disable=SC1091
    if [ -x .venv/bin/python ]; then source .venv/bin/activate; fi
fi
python -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 ||
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        fail "the active environment $VIRTUAL_ENV has $(python --version 2>&1), 3.12 or later is needed. Leave it (deactivate) and start again."
    else
        fail "no Python environment: there is no .venv in $PWD, and no python of 3.12 or later in \$PATH. Make one first:" \
            "bash tools/environment.sh requirements.txt"
    fi
if [ -n "$requirements" ]; then install_requirements; fi
