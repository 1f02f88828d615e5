#!/bin/sh
# Makes a virtual environment with a Python that is new enough, or says clearly what is missing.
#   make_venv.sh <directory> [interpreter]
set -eu

venv=$1
wanted=${2:-}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${wanted:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

python=$(find_python)
if [ -z "$python" ]; then
    echo "seqmesh needs Python 3.11 or newer; found: $(${wanted:-python3} --version 2>&1 || true)." >&2
    echo "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "$python has no venv module. Install it (Debian, Ubuntu: apt install python3-venv) and try again." >&2
    exit 1
fi
echo "making $venv with $python ($("$python" --version))"
"$python" -m venv "$venv"
