-- Roles for duties: "aqd db roles". Rights themselves: aqd.rights and aqd.grant_rights (migration 0006).

-- name: roles_of_server :many
-- Which of these roles are there; whether we may act as them, and whether the schema's owner belongs to them.
-- Index: none; catalogue only.
select r.rolname::text,
       pg_has_role(r.oid, case when current_setting('server_version_num')::integer >= 160000
                               then 'SET' else 'MEMBER' end),
       pg_has_role(:owner::text, r.oid, 'MEMBER')
from pg_roles r
where r.rolname = any(:roles::text[])

-- name: roles_session :one
-- Who we are, whether a superuser, and whether we may make roles; the schema's owner, and whether he is a superuser; whether we may let others create
-- in this database, and its name.
-- Index: none; catalogue only.
select current_user::text, me.rolsuper, me.rolsuper or me.rolcreaterole, owner.rolname::text, owner.rolsuper,
       pg_has_role(d.datdba, 'USAGE'), d.datname::text
from pg_roles me, pg_database d, pg_namespace n
join pg_roles owner on owner.oid = n.nspowner
where me.rolname = current_user and d.datname = current_database() and n.nspname = 'aqd'

-- name: may_create :one
-- Index: none; catalogue only.
select has_database_privilege(:role::text, current_database(), 'CREATE')

-- name: create_role :ddl
-- A group: its members log in.
create role {role} nologin

-- name: join_role :ddl
-- Who hands the schema over must belong to its new owner, and who owned it before goes on by it.
grant {role} to {member}

-- name: allow_create :ddl
-- Who owns a schema needs it, to take it over and to make it anew.
grant create on database {database} to {role}

-- name: hand_over :exec
-- Index: none; catalogue only.
select aqd.hand_over(:role::text)

-- name: note_roles :exec
-- Index: primary key of roles.
insert into aqd.roles as r (duty, role)
select g.duty, g.role from unnest(:duties::text[], :roles::text[]) as g(duty, role)
on conflict (duty) do update set role = excluded.role

-- name: forget_roles :exec
-- Before others are noted: a role may change its duty.
-- Index: none, four rows.
delete from aqd.roles

-- name: list_roles :many
-- Index: primary key of roles.
select r.duty, r.role from aqd.roles r order by r.duty

-- name: grant_rights :exec
-- Index: none; catalogue only.
select aqd.grant_rights()

-- name: revoke_rights :exec
-- Of the roles that were noted so far.
-- Index: none; catalogue only.
select aqd.revoke_rights()
