# shellcheck shell=sh
# Sourced by train, test and .ci/run: installs requirements.txt into .venv. Prints nothing if that is already done.
#
# .venv/ready marks a .venv that this script made, and records the folder, Python and requirements that it was made for.
# The record is written last, so an interrupted install is repeated, and a .venv that was moved is made again.
# A .venv without that file is yours: it is used if it fits, and this script never changes or deletes it.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python
ready=$venv/ready
newest=3.14 # Python that the tests run on

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

version() { "$1" -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_new_enough() { case $(version "$1") in 3.[1-9][0-9]) ;; *) return 1 ;; esac }
is_chosen() { [ -z "${PYTHON:-}" ] || [ "$(version "$PYTHON")" = "$(version "$python")" ]; }
has_uv() { command -v uv >/dev/null; }

made_for() { echo "$root with Python $(version "$python")"; }
requirements() { cksum <"$root/requirements.txt"; }
is_usable() { [ "$(head -n 1 "$ready" 2>/dev/null)" = "$(made_for)" ] && is_chosen; }
is_ready() { is_usable && [ "$(sed 1d "$ready")" = "$(requirements)" ]; }
is_yours() { [ -L "$venv" ] || { [ -e "$venv" ] && [ ! -f "$ready" ]; }; }

refuse() {
    fail "$venv $*. This script did not make it and does not change it:" \
        "install requirements.txt into it, or move it away to have a new one made."
}

check_yours() {
    found=$(version "$python") || refuse "has no bin/python that runs"
    is_new_enough "$python" || refuse "has Python $found, and 3.10 or newer is needed"
    is_chosen || refuse "has Python $found, and PYTHON=$PYTHON asks for another"
    missing=$("$python" -c "$first_missing" <"$root/requirements.txt") ||
        refuse "lacks ${missing:-what requirements.txt asks for}"
}

# Prints the first line of requirements.txt that is not met.
first_missing='
import sys
from importlib.metadata import PackageNotFoundError, version
from packaging.requirements import Requirement  # which pytest and matplotlib install

for text in filter(None, (line.partition("#")[0].strip() for line in sys.stdin)):
    wanted = Requirement(text)
    if wanted.marker is None or wanted.marker.evaluate():
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            found = "none"
        if found == "none" or not wanted.specifier.contains(found, prereleases=True):
            print(f"{text} (it has {found})")
            sys.exit(1)
'

choose_python() {
    [ -z "${PYTHON:-}" ] || set -- "$PYTHON"
    for candidate in "$@"; do
        if is_new_enough "$candidate"; then return; fi
    done
    candidate=$newest # uv finds or downloads it
    if has_uv && [ -z "${PYTHON:-}" ]; then return; fi
    fail "Python 3.10 or newer is needed, and $1 is $(version "$1" || echo missing):" \
        "install one, or name one as in PYTHON=python3.12 $0."
}

make_venv() {
    choose_python python3 python3.14 python3.13 python3.12 python3.11 python3.10
    has_uv || "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$candidate has no venv module: on Debian or Ubuntu, apt install python$(version "$candidate")-venv."

    mkdir -p "$venv"
    : >"$ready" # before anything else: an interrupted run leaves a .venv that is known to be this script's
    find "$venv" -mindepth 1 ! -path "$ready" -delete
    # The environment takes 6 or 7 GB. pip needs the rest of the 10 for files that it removes again.
    free=$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
    [ "$free" -ge "${VENV_GB:-10}" ] ||
        fail "$root has $free GB free, and making .venv takes ${VENV_GB:-10} GB:" \
            "make room, or set VENV_GB=0 to try anyway."

    say "Making .venv with $candidate: PyTorch and the rest, 6 GB, a few minutes, once."
    if has_uv; then
        uv venv --quiet --seed --allow-existing --python "$candidate" "$venv" >&2
    else
        "$candidate" -m venv "$venv"
    fi || fail "$candidate could not make $venv: see the reason above."

    found=$(version "$python")
    [ "${found#3.}" -le "${newest#3.}" ] ||
        say "The tests run on Python 3.10 to $newest, and this is $found: if a package does not exist for it yet," \
            "choose another, as in PYTHON=python$newest $0."
}

install_requirements() {
    wanted=$(requirements)
    if is_usable; then
        say "requirements.txt has changed: bringing .venv up to date."
        made_for >"$ready"
    else
        make_venv
    fi
    if has_uv; then
        uv pip install --python "$python" -r "$root/requirements.txt" >&2
    else
        "$python" -m pip install --disable-pip-version-check -r "$root/requirements.txt" >&2
    fi || fail "requirements.txt could not be installed: see the reason above (network? disk?), then run this again."
    printf '%s\n' "$(made_for)" "$wanted" >"$ready"
}

# One run installs at a time. The others wait, and then find everything ready.
prepare() (
    if command -v flock >/dev/null; then
        flock -n 9 || say "Another run is installing into .venv: waiting for it."
        flock 9
    fi
    if is_yours; then
        check_yours
    elif ! is_ready; then
        install_requirements
    fi
) 9>>"$root/.venv.lock"

is_ready || prepare || exit 1
