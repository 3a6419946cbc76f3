-- For aqd.testing only: databases for tests, and time that passes when a test says so.

-- name: create_test_template :ddl
-- Empty; the migrations are applied to it, and databases for tests are copies of it.
create database {name}

-- name: create_test_database :ddl
-- A copy takes 40 ms where the migrations take 200.
create database {name} template {template}

-- name: drop_test_database :ddl
-- An application's connections may still be open.
drop database if exists {name} with (force)

-- name: list_all_ids :many
-- Every job of a test's own database, oldest first.
-- Index: none, all is read.
select j.id from aqd.all_jobs j order by j.id

-- name: bring_forward :many
-- Let time pass: what waits is due so many seconds sooner. Nothing else moves, so no lease runs out.
-- Index: none, all that waits is changed.
update aqd.jobs j
set run_at = j.run_at - :seconds::double precision * interval '1 second'
where j.state = 'QUEUED'
returning j.id

-- name: make_due :many
-- The same for some jobs, up to the present moment.
-- Index: primary key.
update aqd.jobs j
set run_at = now()
where j.id = any(:ids::bigint[]) and j.state = 'QUEUED' and j.run_at > now()
returning j.id

-- name: list_unserved_types :many
-- Types of due jobs that are not among :types.
-- Index: none, what waits is read.
select j.type, count(*)
from aqd.jobs j
where j.state = 'QUEUED' and j.run_at <= now() and not j.type = any(:types::text[])
group by j.type
order by j.type
