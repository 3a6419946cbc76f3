"""Roles for duties: whoever migrates, daemons, the API, applications.

Run by ``aqd db roles``. Roles belong to the whole server, so they are made only when asked for, under names of one's own
(``PREFIX_owner``, ``PREFIX_daemon``, …): groups without a login, of which users are made members. A second database of
the same server may use the same ones or others. What each may do stands in ``aqd.rights`` (migration 0006), and every
migration gives it to the roles that are noted in ``aqd.roles``.

Promises: one transaction under the lock of migrations; doing it again is harmless. The owner before becomes a member of
the new one, so that a daemon that runs as him goes on.

Fails with :class:`MayNot` where this user may not make roles: its ``script`` is what somebody who may has to
run before.
"""

import re
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from aqd import migrate, statements
from aqd.database import Connection, define, run, text_array
from aqd.errors import DatabaseUnavailable, InputError, SchemaMismatch

DUTIES: Final = ("owner", "daemon", "api", "submit")
PREFIX: Final = "aqd"

# With "_daemon" it is a name of at most 63 bytes that needs no quotes.
_PREFIX = re.compile(r"[a-z_][a-z0-9_]{0,50}")


class MayNot(DatabaseUnavailable):
    """This user may not make the roles. ``script``: SQL for one who may."""

    def __init__(self, user: str, script: list[str]) -> None:
        super().__init__(
            f"{user} may not make roles or take part in them. Let a superuser run this in the same database, then "
            "'aqd db roles' again:\n" + "\n".join(script)
        )
        self.script = script


class Made(NamedTuple):
    """``created`` are the roles that were not there before; ``roles`` all four by duty."""

    created: list[str]
    roles: dict[str, str]


class _Step(NamedTuple):
    """A statement of sql/roles.sql for the administrator of the server, with the names in it."""

    name: str
    names: dict[str, str]
    allowed: bool

    def text(self) -> str:
        template = statements.get(self.name).text.decode().partition("*/")[2].strip()
        names = {key: sql.Identifier(value) for key, value in self.names.items()}
        return sql.SQL(template).format(**names).as_string() + ";"


def set_up(conn: Connection, prefix: str = PREFIX) -> Made:
    """Make the roles that are missing, hand the schema over to the owner among them, and give each its rights.

    Raises :class:`InputError` for a prefix that is no name, :class:`SchemaMismatch` for a schema that wants migrating,
    :class:`MayNot`.
    """
    roles = _names(prefix)
    found = migrate.check(conn)
    if found.unknown:
        raise SchemaMismatch("the schema is newer than this aqd: use the one that it was migrated with")
    return migrate.locked(conn, lambda: _set_up(conn, roles))


def script(conn: Connection, prefix: str = PREFIX) -> list[str]:
    """What a superuser has to run so that the schema's owner can do the rest without any right of that kind."""
    return [step.text() for step in _steps(conn, _names(prefix))]


def _names(prefix: str) -> dict[str, str]:
    if not _PREFIX.fullmatch(prefix):
        raise InputError("prefix", "must be 1..51 characters of a-z 0-9 _, the first of them no digit")
    return {duty: f"{prefix}_{duty}" for duty in DUTIES}


def _set_up(conn: Connection, roles: dict[str, str]) -> Made:
    steps = _steps(conn, roles)
    try:
        if all(step.allowed for step in steps):
            with conn.transaction():
                for step in steps:
                    define(conn, step.name, **step.names)
        else:
            raise psycopg.errors.InsufficientPrivilege
    except psycopg.errors.InsufficientPrivilege as error:
        user = str(run(conn, "roles_session")[0][0])
        raise MayNot(user, [step.text() for step in steps]) from error
    run(conn, "hand_over", role=roles["owner"])
    run(conn, "become_owner")
    run(conn, "revoke_rights")  # from those that have had the duties so far
    run(conn, "forget_roles")
    run(conn, "note_roles", duties=text_array(roles), roles=text_array(roles.values()))
    run(conn, "grant_rights")
    return Made([step.names["role"] for step in steps if step.name == "create_role"], roles)


def _steps(conn: Connection, roles: dict[str, str]) -> list[_Step]:
    """What is missing on the server's side."""
    user, superuser, may_make, owner, owner_superuser, owns_database, database = run(conn, "roles_session")[0]
    found = {
        name: (ours, belongs)
        for name, ours, belongs in run(conn, "roles_of_server", roles=text_array(roles.values()), owner=owner)
    }
    steps = [_Step("create_role", {"role": role}, may_make) for role in roles.values() if role not in found]
    new_owner = roles["owner"]
    if owner == new_owner:
        return steps
    ours, belongs = found.get(new_owner, (False, False))
    if not superuser and not ours:
        steps.append(_Step("join_role", {"role": new_owner, "member": user}, may_make))
    if owner not in (user, new_owner) and not owner_superuser and not belongs:
        steps.append(_Step("join_role", {"role": new_owner, "member": owner}, may_make))
    if new_owner not in found or not run(conn, "may_create", role=new_owner)[0][0]:
        steps.append(
            _Step("allow_create", {"role": new_owner, "database": database}, superuser or owns_database)
        )
    return steps
