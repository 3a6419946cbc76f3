-- Bookkeeping of migrations. migrate.py runs these and the files of migrations/ in one transaction.

-- name: lock_migrations :exec
-- One migrator at a time. A transaction's lock: it ends with the process, and is valid behind a pooler.
select pg_advisory_xact_lock(:class::integer, :what::integer)

-- name: limit_migration :exec
-- A bound on waiting for the lock above, then for tables; no bound on the work itself, which may be long.
select set_config('lock_timeout', :lock_timeout::text, true), set_config('statement_timeout', '0', true)

-- name: become_owner :one
-- For the transaction, so that what is made belongs to the schema's owner, whichever of its members (or a superuser)
-- migrates. Always one row: whether there is a schema, its owner, and whether we are he now; who we were, as SQL names him.
-- Index: none; catalogue only.
select o.name is not null, o.name,
       case when o.name is null then true
            when pg_has_role(o.name, case when current_setting('server_version_num')::integer >= 160000
                                          then 'SET' else 'MEMBER' end)
                then set_config('role', o.name, true) is not null
            else false end,
       quote_ident(current_user)
from (select true) as always
left join (select pg_get_userbyid(n.nspowner)::text as name from pg_namespace n where n.nspname = 'aqd') as o on true

-- name: create_migrations_schema :exec
-- Only under the lock: "if not exists" is not safe against a second session.
create schema if not exists aqd

-- name: lock_nodes :exec
-- Whoever is about to register is waited for, and until we commit nobody else registers or gives a sign of life.
lock table aqd.nodes in share row exclusive mode

-- name: live_nodes :many
-- Who has given a sign of life lately; each that ends in good order takes its row along.
-- Index: none, a handful of rows.
select n.name, n.version
from aqd.nodes n
where n.seen_at > now() - :ttl_s::double precision * interval '1 second'
order by n.name

-- name: create_migrations :exec
-- Only under the lock.
create table if not exists aqd.migrations (
    version    integer primary key,
    name       text not null,
    kind       text not null check (kind in ('online', 'breaking')),
    checksum   text not null,
    applied_at timestamptz not null default now()
)

-- name: has_migrations :one
-- Index: none; catalogue only.
select to_regclass('aqd.migrations') is not null

-- name: has_roles :one
-- Index: none; catalogue only.
select to_regclass('aqd.roles') is not null

-- name: list_migrations :many
-- Index: primary key.
select m.version, m.name, m.kind, m.checksum, m.applied_at from aqd.migrations m order by m.version

-- name: note_migration :exec
-- Index: primary key.
insert into aqd.migrations (version, name, kind, checksum)
values (:version::integer, :name::text, :kind::text, :checksum::text)

-- name: drop_schema :exec
-- "aqd db reset": every job is lost.
drop schema if exists aqd cascade
