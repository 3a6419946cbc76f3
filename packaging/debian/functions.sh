# The part of the maintainer scripts that stops and starts the services.
#
# The daemon is stopped before its files are replaced and started when the new ones are configured. Going on over the
# replacement would keep the node for some seconds more, but its processes start others from the files (a dispatcher
# that has died, modules imported late), and the two versions do not speak the same language. A stop is a drain: jobs
# have drain_s to end; longer ones are interrupted, their attempt is given back, and another node or the new version
# runs them. The HTTP service holds no job; it goes on over the replacement and is restarted at the end. Only a removal
# stops it, too.

# What has been stopped and is to be started again, in this order: a socket before its service, which it cannot be opened
# behind.
ran=/run/aqd.upgrade

# Stops what runs of these units, and remembers it beside what an earlier call has stopped: dpkg may run a script twice.
stop_units() {
    [ -d /run/systemd/system ] || return 0
    running=$(systemctl list-units --no-legend --plain --full --state=active,activating,reloading "$@" | cut -d ' ' -f 1)
    { cat "$ran" 2>/dev/null || :; printf '%s\n' "$running"; } | sed '/^$/d' | LC_ALL=C sort -ru >"$ran.new"
    mv "$ran.new" "$ran"
    [ -s "$ran" ] || return 0
    echo "aqd: waiting for running jobs, up to drain_s ($(tr '\n' ' ' <"$ran" | sed 's/ $//'))"
    # shellcheck disable=SC2046
    systemctl stop $(cat "$ran")
}

stop_daemons() {
    stop_units aqd.service 'aqd@*.service'
}

stop_all() {
    stop_units aqd.service 'aqd@*.service' aqd-api.socket aqd-api.service
}

# What has run before; those that were stopped or broken stay so.
start_again() {
    if [ -d /run/systemd/system ] && [ -s "$ran" ]; then
        # shellcheck disable=SC2046
        begin $(cat "$ran")
    fi
    rm -f "$ran"
}

begin() {
    if command -v policy-rc.d >/dev/null && ! policy-rc.d aqd start; then
        echo "aqd: policy-rc.d forbids to start $*"
        return 0
    fi
    # A daemon without its database waits for it, and the installation of other packages (the database's, maybe) must not
    # wait with it. The start goes on when systemctl has gone.
    timeout 60 systemctl start "$@" ||
        echo "aqd: $* did not start within a minute, or not at all: see systemctl status $*" >&2
}
