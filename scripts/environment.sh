# shellcheck shell=sh
# Sourced by train, test and .ci/run: makes .venv hold what requirements.txt asks for, silent when it does.
#
# .venv/ready says which folder, Python and requirements .venv was made for. It is written last, so an
# install that was interrupted is repeated, and a .venv that was moved or lost its Python is made anew.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=$root/.venv/bin/python
ready=$root/.venv/ready

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

version() { "$1" -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
place() { echo "$root with Python $(version "$python")"; }
requirements() { cksum <"$root/requirements.txt"; }

is_usable() {
    [ "$(head -n 1 "$ready" 2>/dev/null)" = "$(place)" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version "$PYTHON")" = "$(version "$python")" ]
}
is_ready() { is_usable && [ "$(sed 1d "$ready")" = "$(requirements)" ]; }

choose_python() {
    [ -z "${PYTHON:-}" ] || set -- "$PYTHON"
    for candidate in "$@"; do
        case $(version "$candidate") in 3.[1-9][0-9]) return ;; esac
    done
    fail "Python 3.10 or newer is needed, and $1 is $(version "$1" || echo missing):" \
        "install one, or name one as in PYTHON=python3.12 $0."
}

make_venv() {
    choose_python python3 python3.13 python3.12 python3.11 python3.10
    "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$candidate has no venv module: on Debian or Ubuntu, apt install python$(version "$candidate")-venv."

    rm -rf "$root/.venv"
    # 6 or 7 GB stay; the rest of the 10 is for what pip downloads and removes.
    free=$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
    [ "$free" -ge "${VENV_GB:-10}" ] ||
        fail "$root has $free GB free, and making .venv takes ${VENV_GB:-10} GB:" \
            "make room, or set VENV_GB=0 to try anyway."

    say "Making .venv with $candidate: PyTorch and the rest, 6 GB, a few minutes, once."
    "$candidate" -m venv "$root/.venv" || fail "$candidate could not make $root/.venv: its reason is above."
}

install_requirements() {
    wanted=$(requirements)
    if is_usable; then
        say "requirements.txt has changed: bringing .venv up to date."
        place >"$ready"
    else
        make_venv
    fi
    "$python" -m pip install --disable-pip-version-check -r "$root/requirements.txt" >&2 ||
        fail "pip could not install requirements.txt: see its reason above (network? disk?), then run this again."
    printf '%s\n' "$(place)" "$wanted" >"$ready"
}

# One at a time: a second run waits for the first, and then finds everything ready.
install_alone() (
    if command -v flock >/dev/null; then
        flock -n 9 || say "Another run is installing into .venv: waiting for it."
        flock 9
    fi
    is_ready || install_requirements
) 9>>"$root/.venv.lock"

is_ready || install_alone || exit 1
