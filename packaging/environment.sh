# Sourced by packaging/demo and packaging/test: finds a Python, makes the virtual environment and
# installs this checkout into it (editable). Prints what it does. Works for root and for others.
#
#   environment NAME EXTRAS
#
# installs aqd[EXTRAS] unless that was done already for this pyproject.toml, and sets $python to the
# environment's interpreter. The environment is $AQD_VENV, or .venv in the checkout, or below the user's
# data directory when the checkout belongs to somebody else.

say() {
    printf '%s\n' "aqd: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

# The first Python that is new enough.
find_python() {
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# venv needs ensurepip, which Debian and Ubuntu keep in a package of its own.
need_ensurepip() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null && return 0
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if command -v apt-get >/dev/null; then
        install="apt-get update && apt-get install --yes --no-install-recommends $package"
        [ "$(id -u)" = 0 ] || fail "$1 has no ensurepip. Run as root, then start again: $install"
        say "$install"
        sh -c "$install" >&2 || fail "that did not work; $1 needs the package $package"
    else
        fail "$1 has no ensurepip: install your distribution's package of it ($package on Debian), then start again"
    fi
}

choose_venv() {
    if [ -n "${AQD_VENV:-}" ]; then
        printf '%s\n' "$AQD_VENV"
    elif [ -w "$root" ] && { [ ! -e "$root/.venv" ] || [ -w "$root/.venv" ]; }; then
        printf '%s\n' "$root/.venv"
    else
        printf '%s\n' "${XDG_DATA_HOME:-$HOME/.local/share}/aqd/venv"
    fi
}

environment() {
    name=$1
    extras=$2
    unset PYTHONHOME PYTHONPATH
    venv=$(choose_venv)
    python=$venv/bin/python
    stamp=$venv/.aqd-$name
    # What was installed for which checkout; a moved checkout needs a new editable installation.
    wanted="$root $(cksum <"$root/pyproject.toml")"
    if "$python" -c '' 2>/dev/null && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    if ! "$python" -c 'import pip' 2>/dev/null; then
        base=$(find_python) || fail "no Python 3.11 or newer found: install one, or name it: PYTHON=/path/to/python3 $0"
        need_ensurepip "$base"
        say "making a virtual environment in $venv with $base"
        rm -rf "$venv"
        "$base" -m venv "$venv" || fail "could not make the virtual environment $venv"
    fi
    say "installing aqd[$extras] into $venv"
    "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
        --editable "$root[$extras]" || fail "the installation failed; the reason is above"
    printf '%s\n' "$wanted" >"$stamp"
}
