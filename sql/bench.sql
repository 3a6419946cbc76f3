-- For aqd bench only: databases of its own, jobs by the hundred thousand, and what the server knows of a run.

-- name: create_bench_database :ddl
-- Empty; the migrations are applied to it.
create database {name}

-- name: drop_bench_database :ddl
-- A connection of a node that was killed may still be open.
drop database if exists {name} with (force)

-- name: list_bench_databases :many
-- Those of other runs: one that is killed on somebody's server cannot drop its own.
-- Index: none, a handful of databases.
select d.datname from pg_database d where d.datname like 'aqd\_bench\_%' order by d.datname

-- name: bench_server :one
-- Version, this session's process, and whether the role may ask for a checkpoint (15 and later have a role for that).
-- Index: none.
select current_setting('server_version'), pg_backend_pid(),
       (select r.rolsuper from pg_roles r where r.rolname = current_user)
       or (current_setting('server_version_num')::integer >= 150000
           and pg_has_role(current_user, (select r.oid from pg_roles r where r.rolname = 'pg_checkpoint'), 'usage'))

-- name: bench_settings :many
-- Settings as SHOW gives them; in the order asked for, and those that this version has.
-- Index: none.
select s.name, current_setting(s.name)
from unnest(:names::text[]) with ordinality as w(name, place)
join pg_settings s on s.name = w.name
order by w.place

-- name: bench_checkpoint :ddl
-- So that each run begins with the same distance to the next one, and pays for page images like every other.
checkpoint

-- name: bench_analyze :ddl
-- After a fill: a plan must not rest on an empty table.
analyze aqd.jobs, aqd.job_history

-- name: bench_last_id :one
-- The newest job: a measured one has a higher id.
-- Index: none, the sequence.
select s.last_value - (not s.is_called)::integer from aqd.jobs_id_seq s

-- name: bench_fill :rows
-- Equal jobs, each :every-th of another type (0: none), due since (or in) so many seconds. QUEUED, or FAILED with the
-- record that goes with it.
-- Index: inserts into the primary key and jobs_ready.
with made as (
    insert into aqd.jobs (type, payload, queue, priority, run_at, state, attempt)
    select case when :every::integer > 0 and g.n % greatest(:every::integer, 1) = 0 then :other::text else :type::text end,
           :payload::text::jsonb, :queue::text, :priority::smallint,
           now() + :in_s::double precision * interval '1 second', :state::text, (:state::text = 'FAILED')::integer
    from generate_series(1, :number::integer) as g(n)
    returning id, state, type, queue
), dead as (
    insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, reason, error)
    select m.id, now(), 1, m.type, m.queue, 'failed', 'exception', 'RuntimeError: made by aqd bench'
    from made m where m.state = 'FAILED'
)
select m.id from made m where false

-- name: bench_fill_history :exec
-- Completed jobs with small results, finished within the day that began so many days ago (UTC).
-- Index: inserts into those of the day's partition.
insert into aqd.job_history (id, finished_at, run_at, created_at, claimed_at, lease_token, wall_s, cpu_s, peak_kb,
                             attempt, crashes, interruptions, retries, priority, state, type, queue, node_id, payload,
                             result)
select nextval('aqd.jobs_id_seq'), e.at, e.at, e.at, e.at, g.n, 0.001, 0.001, 40000,
       1, 0, 0, 0, 0, 'COMPLETED', :type::text, :queue::text, 'aqd bench', '{}', '{"ok": true}'
from generate_series(1, :number::integer) as g(n)
cross join lateral (
    select (date_trunc('day', now() at time zone 'UTC') at time zone 'UTC')
           - :days_ago::integer * interval '1 day'
           + g.n * (interval '86399 seconds' / :number::integer) as at
) as e

-- name: bench_partition :exec
-- The history partition of the day that began so many days ago.
-- Index: none.
select aqd.create_history_partition((now() at time zone 'UTC')::date - :days_ago::integer)

-- name: bench_vacuum :ddl
-- After a fill of history: what vacuum has to do with new rows once must not fall into a measurement.
vacuum (analyze) aqd.job_history

-- name: bench_waits :one
-- Whether a job of the lane still waits (also for a retry) or runs. Asked at the end of a run only: under an old snapshot it walks
-- over all that has been.
-- Index: jobs_ready, jobs_running.
select exists (select from aqd.jobs j
               where j.state = 'QUEUED' and j.queue = :queue::text and j.priority = :priority::smallint
                 and j.run_at <= now() + interval '1 hour' and j.id > :after::bigint)
       or exists (select from aqd.jobs j
                  where j.state = 'PROCESSING' and j.queue = :queue::text and j.priority = :priority::smallint)

-- name: bench_live :one
-- How many jobs are in the table, and how long its file is.
-- Index: none, the whole table; through an index this would walk over all that has been.
select count(*), pg_relation_size('aqd.jobs') from aqd.jobs j

-- name: bench_states :many
-- What has become of the jobs after :after.
-- Index: primary keys.
select a.state, count(*) from aqd.all_jobs a where a.queue = :queue::text and a.id > :after::bigint group by a.state

-- name: bench_span :one
-- From the first claim to the commit of the last outcome, in seconds since 1970; where the server keeps no moments of
-- commits (track_commit_timestamp) the last finished_at stands for it, which is a little earlier: a completion is
-- written down after its handler has ended. And how many completed.
-- Index: primary key of the partitions.
select count(*),
       date_part('epoch', min(h.claimed_at)),
       date_part('epoch', max(case when current_setting('track_commit_timestamp')::boolean
                                   then pg_xact_commit_timestamp(h.xmin) end)),
       date_part('epoch', max(h.finished_at))
from aqd.job_history h
where h.queue = :queue::text and h.id > :after::bigint and h.state = 'COMPLETED'

-- name: bench_failed_at :one
-- When the last of the jobs that ended as FAILED did, in seconds since 1970.
-- Index: none, a run's few records.
select date_part('epoch', max(f.failed_at))
from aqd.failed_jobs f
where f.queue = :queue::text and f.job_id > :after::bigint

-- name: bench_slices :many
-- Moments (seconds since 1970) at which each further :size jobs had finished.
-- Index: primary key of the partitions.
select s.slice, count(*), date_part('epoch', max(s.finished_at))
from (
    select h.finished_at, (row_number() over (order by h.finished_at) - 1) / :size::integer as slice
    from aqd.job_history h
    where h.queue = :queue::text and h.id > :after::bigint and h.state = 'COMPLETED'
) as s
group by s.slice
order by s.slice

-- name: bench_stamps :many
-- For each job of the handler bench_stamp: when it was to be sent, and when its handler began (nanoseconds of
-- CLOCK_MONOTONIC, the same on the whole machine).
-- Index: primary key of the partitions.
select (h.payload ->> 'at')::bigint, (h.result ->> 'at')::bigint
from aqd.job_history h
where h.queue = :queue::text and h.id > :after::bigint and h.state = 'COMPLETED'

-- name: bench_is_completed :one
-- Whether a job has completed.
-- Index: primary key of each partition.
select exists (select from aqd.job_history h where h.id = :id::bigint and h.state = 'COMPLETED')

-- name: bench_ends :many
-- How attempts ended that did not complete.
-- Index: none, all of a run.
select a.kind, a.reason, a.signal, count(*)
from aqd.job_attempts a
where a.job_id > :after::bigint
group by a.kind, a.reason, a.signal
order by count(*) desc

-- name: bench_counters :one
-- What the server has counted. Transactions of this database, as its sessions have reported them (within ten seconds,
-- and when they end); the next transaction id and the position in the WAL, which are exact, but the whole server's;
-- rows of jobs and history that were updated or deleted, each of which leaves a dead tuple.
-- Index: none.
select (select d.xact_commit + d.xact_rollback from pg_stat_database d where d.datname = current_database()),
       txid_snapshot_xmax(txid_current_snapshot()),
       pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint,
       (select coalesce(sum(t.n_tup_upd + t.n_tup_del), 0)::bigint from pg_stat_user_tables t
        where t.schemaname = 'aqd' and (t.relname = 'jobs' or t.relname like 'job\_history%')),
       (select w.wal_fpi from pg_stat_wal w),
       pg_relation_size('aqd.jobs')

-- name: bench_insert :ddl
-- The row that aqd.enqueue makes, without aqd.enqueue: what the database itself can do (for pgbench).
insert into aqd.jobs (type, payload, queue, priority, run_at) values ({type}, {payload}, {queue}, 0, now())

-- name: bench_enqueue :ddl
-- The same by the function (for pgbench).
select aqd.enqueue({type}, {payload}, queue => {queue})

-- name: bench_copy :ddl
-- The same by COPY. It wakes nobody, so a node finds them when it next looks.
copy aqd.jobs (type, payload, queue, run_at) from stdin
