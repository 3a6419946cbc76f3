-- Bookkeeping of migrations. migrate.py runs these and the files of migrations/ in one transaction.

-- name: lock_migrations :exec
-- One migrator at a time. A transaction's lock: it ends with the process, and is valid behind a pooler.
select pg_advisory_xact_lock(:class::integer, :what::integer)

-- name: limit_migration :exec
-- A bound on waiting for the lock above, then for tables; no bound on the work itself, which may be long.
select set_config('lock_timeout', :lock_timeout::text, true), set_config('statement_timeout', '0', true)

-- name: create_migrations_schema :exec
-- Only under the lock: "if not exists" is not safe against a second session.
create schema if not exists aqd

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
