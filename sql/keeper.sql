-- House-keeping. Every duty may run on several nodes at once without harm; the election
-- (session.sql) only saves work.

-- name: node_seen :rows
-- None of a node that cannot work with the schema: while a breaking migration is applied it holds the table (lock_nodes),
-- and whoever has waited for that looks at what is committed by then.
-- Index: primary key of nodes; HOT, because nothing indexed changes. Primary key of migrations, a handful of rows.
insert into aqd.nodes as n (node_id, name, pid, version, generation, slots, types, state, info)
select :node_id::text, :name::text, :pid::integer, :version::text, :generation::integer, :slots::integer,
       :types::text[], :state::text, :info::jsonb
where not exists (select from aqd.migrations m where m.kind = 'breaking' and m.version > :schema::integer)
on conflict (node_id) do update
set seen_at = now(), name = excluded.name, pid = excluded.pid, version = excluded.version,
    generation = excluded.generation, slots = excluded.slots, types = excluded.types, state = excluded.state,
    info = excluded.info

-- name: declare_handlers :exec
-- In the order of types: nodes that start at the same time lock rows in the same order.
-- Index: primary key of handlers.
insert into aqd.handlers as h (type, queue, max_attempts)
select g.type, g.queue, g.max_attempts
from unnest(:types::text[], :queues::text[], :max_attempts::integer[]) as g(type, queue, max_attempts)
order by g.type
on conflict (type) do update set queue = excluded.queue, max_attempts = excluded.max_attempts
where (h.queue, h.max_attempts) is distinct from (excluded.queue, excluded.max_attempts)

-- name: node_gone :exec
-- Its jobs, if any are left, are found by their leases.
-- Index: primary key of nodes.
delete from aqd.nodes n where n.node_id = :node_id::text

-- name: expire_nodes :many
-- Nodes that ended without saying so.
-- Index: none, a handful of rows.
delete from aqd.nodes n
where n.seen_at < now() - :ttl_s::double precision * interval '1 second'
returning n.node_id, n.name

-- name: note_unknown_types :many
-- Types of due jobs that no live node declares, each with the seconds since when that is so. The clock
-- runs only while a keeper watches (checked_at): after a night without any node, the first one to start
-- must not condemn what the second one knows. Without any live node nothing is noted.
-- Looks at the front of each lane only: what nobody can claim comes to the front by itself.
-- Index: jobs_ready, a bounded number of entries per lane.
with live as materialized (
    select n.types from aqd.nodes n
    where n.seen_at > now() - :node_ttl_s::double precision * interval '1 second'
), front as materialized (
    select distinct due.type
    from aqd.ready_lanes(1000) as l
    cross join lateral (
        select j.type from aqd.jobs j
        where j.state = 'QUEUED' and j.queue = l.queue and j.priority = l.priority and j.run_at <= now()
        order by j.run_at, j.id
        limit 200
    ) as due
), unknown as materialized (
    select f.type from front f
    where exists (select from live) and not exists (select from live where f.type = any(live.types))
), forgotten as (
    delete from aqd.unknown_types u
    where exists (select from live where u.type = any(live.types))
       or u.checked_at < now() - interval '1 day'
)
insert into aqd.unknown_types as u (type, since, checked_at)
select unknown.type, now(), now() from unknown order by unknown.type
on conflict (type) do update
set since = case when u.checked_at < now() - :stale_s::double precision * interval '1 second'
                 then now() else u.since end,
    checked_at = now()
returning u.type, date_part('epoch', now() - u.since)

-- name: fail_unknown_types :many
-- Due jobs of types that have been unknown for the grace: FAILED without an attempt, so that the mistake
-- in the configuration shows. The conditions are those of note_unknown_types, asked again.
-- Index: jobs_ready, a bounded number of entries per lane; primary key; failed_jobs_open.
with condemned as materialized (
    select u.type from aqd.unknown_types u
    where u.since <= now() - :grace_s::double precision * interval '1 second'
      and u.checked_at >= now() - :stale_s::double precision * interval '1 second'
      and not exists (
          select from aqd.nodes n
          where n.seen_at > now() - :node_ttl_s::double precision * interval '1 second'
            and u.type = any(n.types))
), front as materialized (
    select due.id
    from aqd.ready_lanes(1000) as l
    cross join lateral (
        select j.id, j.type from aqd.jobs j
        where j.state = 'QUEUED' and j.queue = l.queue and j.priority = l.priority and j.run_at <= now()
        order by j.run_at, j.id
        limit 1000
    ) as due
    where exists (select from condemned) and due.type in (select c.type from condemned c)
    limit :limit::bigint
), locked as materialized (
    select j.id, j.type, j.queue, j.attempt
    from aqd.jobs j
    where j.id = any(array(select f.id from front f)) and j.state = 'QUEUED' and j.run_at <= now()
    order by j.id
    for no key update skip locked
), changed as (
    update aqd.jobs j
    set state = 'FAILED',
        last_error = format('no node knows the type "%s"', j.type)
    where j.id = any(array(select l.id from locked l))
    returning j.id, j.type
), dead as (
    insert into aqd.failed_jobs as f (job_id, failed_at, attempts, type, queue, kind, error)
    select l.id, now(), l.attempt, l.type, l.queue, 'unknown_type',
           format('no node knows the type "%s"; is the plugin missing, or the name misspelt?', l.type)
    from locked l
    on conflict (job_id) where resolved_at is null do update
    set failed_at = excluded.failed_at, attempts = excluded.attempts, kind = excluded.kind, reason = null,
        error = excluded.error, traceback = null, failures = f.failures + 1
)
select c.id, c.type from changed c

-- name: create_history_partitions :many
-- The days that had no partition and have one now. Yesterday too: an outcome may be written after
-- midnight with the moment at which it was reached. Safe on all nodes at once (a lock inside).
-- Index: none.
select to_char(d.day, 'YYYY-MM-DD')
from (select (now() at time zone 'UTC')::date + g.n as day
      from generate_series(-1, :days_ahead::integer) as g(n)) as d
where to_regclass('aqd.job_history_' || to_char(d.day, 'YYYYMMDD')) is null
  and aqd.create_history_partition(d.day)

-- name: expired_partitions :many
-- Partitions of days that retention has passed, with what is left to do: attached, pending (a
-- detach was cut short), detached (only to be dropped); foreign, if it is the owner's and we are not he.
-- Index: none; catalogue only.
select c.relname::text,
       case when not pg_has_role(c.relowner, 'USAGE') then 'foreign'
            when i.inhrelid is null then 'detached' when i.inhdetachpending then 'pending' else 'attached' end
from pg_class c
join pg_namespace n on n.oid = c.relnamespace and n.nspname = 'aqd'
left join pg_inherits i on i.inhrelid = c.oid and i.inhparent = 'aqd.job_history'::regclass
where c.relkind = 'r'
  and c.relname ~ '^job_history_[0-9]{8}$'
  and to_date(right(c.relname, 8), 'YYYYMMDD') < (now() at time zone 'UTC')::date - :history_days::integer
order by c.relname
limit :limit::bigint

-- name: detach_partition :ddl
-- Waits for readers of the partition, not for those of the parent, and nobody waits for it.
alter table aqd.job_history detach partition aqd.{partition} concurrently

-- name: detach_partition_at_once :ddl
-- In a transaction, with a short lock_timeout: while it waits for a reader of the history, everybody waits for it.
alter table aqd.job_history detach partition aqd.{partition}

-- name: limit_lock_waits :exec
-- For this transaction.
-- Index: none.
select set_config('lock_timeout', :value::text, true)

-- name: finish_detach :ddl
-- After a detach that ran into lock_timeout.
alter table aqd.job_history detach partition aqd.{partition} finalize

-- name: drop_partition :ddl
-- Only once it is detached: a DROP of an attached partition locks the parent exclusively.
drop table if exists aqd.{partition}

-- name: drop_foreign_partition :one
-- With the owner's rights (migration 0006).
-- Index: none; catalogue only.
select aqd.drop_history_partition(to_date(right(:partition::text, 8), 'YYYYMMDD'), :history_days::integer)

-- name: set_lock_timeout :exec
-- Around detaching, which must not queue behind a long reader for ever.
-- Index: none.
select set_config('lock_timeout', :value::text, false)

-- name: prune_failed :rows
-- Failed jobs that nobody retried within retention, with their records and attempts.
-- Index: failed_jobs_failed_at (BRIN); primary keys of jobs and job_attempts.
with old as materialized (
    select f.id, f.job_id, f.resolved_at is null as open
    from aqd.failed_jobs f
    where f.failed_at < now() - :failed_days::integer * interval '1 day'
      and (f.resolved_at is not null
           or not exists (select from aqd.jobs j where j.id = f.job_id and j.state <> 'FAILED'))
    order by f.id
    limit :limit::bigint
), locked as materialized (
    select j.id
    from aqd.jobs j
    where j.id = any(array(select o.job_id from old o where o.open)) and j.state = 'FAILED'
    order by j.id
    for update skip locked
), jobs_gone as (
    delete from aqd.jobs j where j.id = any(array(select l.id from locked l)) returning j.id
), attempts_gone as (
    delete from aqd.job_attempts a where a.job_id = any(array(select l.id from locked l))
)
delete from aqd.failed_jobs f
where f.id = any(array(select o.id from old o))
  and (f.resolved_at is not null
       or f.job_id in (select g.id from jobs_gone g)
       or not exists (select from aqd.jobs j where j.id = f.job_id))

-- name: prune_attempts :rows
-- Attempts whose job has left: its history is dropped by day, its failure by prune_failed.
-- Index: job_attempts_finished_at (BRIN); primary keys.
with old as materialized (
    select a.job_id, a.id
    from aqd.job_attempts a
    where a.finished_at < now() - :days::integer * interval '1 day'
      and not exists (select from aqd.jobs j where j.id = a.job_id)
    order by a.job_id, a.id
    limit :limit::bigint
    for update of a skip locked
)
delete from aqd.job_attempts a using old o where a.job_id = o.job_id and a.id = o.id

-- name: prune_keys :rows
-- Idempotency keys that have expired. A submission that takes such a key over at this moment holds its row: skipped.
-- Index: idempotency_keys_expires_at; by ctid, because the lock makes sure that the rows stay where they are.
with old as materialized (
    select k.ctid as place
    from aqd.idempotency_keys k
    where k.expires_at < now()
    order by k.expires_at
    limit :limit::bigint
    for update skip locked
)
delete from aqd.idempotency_keys k where k.ctid = any(array(select o.place from old o))

-- name: dead_tuples :one
-- Whether aqd.jobs wants a vacuum, and whether we may run one.
-- Index: none; statistics only.
select s.n_dead_tup,
       pg_has_role(c.relowner, 'USAGE')
       or case when current_setting('server_version_num')::integer >= 170000
               then has_table_privilege(c.oid, 'MAINTAIN') else false end
from pg_stat_user_tables s join pg_class c on c.oid = s.relid
where s.relid = 'aqd.jobs'::regclass

-- name: oldest_snapshot :many
-- Who holds back vacuum: the oldest horizon of this database's sessions, of replication and of
-- prepared transactions. Other sessions' details need pg_read_all_stats.
-- Index: none.
select h.xmin, h.age, h.what
from (
    select a.backend_xmin::text as xmin, age(a.backend_xmin) as age,
           format('session %s of %s (%s), %s for %s s', a.pid, a.usename, a.application_name, a.state,
                  round(date_part('epoch', clock_timestamp() - a.xact_start)::numeric)) as what
    from pg_stat_activity a
    where a.backend_xmin is not null and a.pid <> pg_backend_pid()
      and (a.datname = current_database() or a.backend_type = 'walsender')
    union all
    select s.xmin::text, age(s.xmin), format('replication slot %s', s.slot_name)
    from pg_replication_slots s where s.xmin is not null
    union all
    select p.transaction::text, age(p.transaction), format('prepared transaction %s of %s', p.gid, p.owner)
    from pg_prepared_xacts p where p.database = current_database()
) as h
order by h.age desc
limit 1

-- name: vacuum_jobs :ddl
-- The heap stays flat at 32 MB where autovacuum, which looks once a minute, leaves 564 MB. Never
-- truncates (exclusive lock); never waits for another vacuum.
vacuum (truncate off, index_cleanup on, skip_locked on) aqd.jobs
