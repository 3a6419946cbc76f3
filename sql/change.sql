-- What operators change by hand: jobs, one or many at a time, and queues.
--
-- All that changes many jobs has the shape of lease.sql: locked in id order by a first, materialised step, so that
-- nothing here deadlocks with a running daemon or with itself, then named by an array. The state is a
-- condition of the lock: PostgreSQL asks it again on the row's newest version once it has the lock, so
-- whoever comes second finds another state and changes nothing. Each gives the jobs that it has changed.
--
-- All are "fresh", because a service may have been started, and have prepared them, while the queue was empty: a
-- plan made then reads the whole table later. Planning costs 0.5 ms for up to 500 jobs.

-- name: find_named :many fresh
-- The jobs of these ids, live or finished, as one snapshot sees them: each is in one place.
-- Index: primary keys of jobs and of each partition.
select j.id, j.state, null::timestamptz as finished_at
from aqd.jobs j
where j.id = any(:ids::bigint[])
union all
select h.id, h.state, h.finished_at
from aqd.job_history h
where h.id = any(:ids::bigint[])

-- name: find_changeable :many fresh
-- The jobs of a filter, in id order: a set that is chosen once.
-- Index: what aqd.find_jobs can use; the primary keys, for the order.
select f.id, f.state, f.finished_at
from aqd.find_jobs(
    states => :states::text[], type => :type::text, queue => :queue::text, tag => :tag::text,
    created_after => :created_after::timestamptz, created_before => :created_before::timestamptz,
    finished_after => :finished_after::timestamptz, finished_before => :finished_before::timestamptz,
    error => :error::text, error_hash => :error_hash::text, ids => :ids::bigint[],
    history_after => :history_after::timestamptz, history_before => :history_before::timestamptz) as f
order by f.id
limit :limit::bigint

-- name: count_changeable :one fresh
-- How many they are.
-- Index: what aqd.find_jobs can use.
select count(*)
from aqd.find_jobs(
    states => :states::text[], type => :type::text, queue => :queue::text, tag => :tag::text,
    created_after => :created_after::timestamptz, created_before => :created_before::timestamptz,
    finished_after => :finished_after::timestamptz, finished_before => :finished_before::timestamptz,
    error => :error::text, error_hash => :error_hash::text, ids => :ids::bigint[],
    history_after => :history_after::timestamptz, history_before => :history_before::timestamptz) as f

-- name: retry_jobs :many fresh
-- FAILED to QUEUED, as retry_job does with one (migration 0004).
-- Index: primary key; failed_jobs_open.
select r.id, 'QUEUED' from aqd.retry_jobs(:ids::bigint[]) as r(id)

-- name: cancel_jobs :many fresh
-- As aqd.cancel: what waits leaves at once by the trigger jobs_cancelled, what runs is asked to end. Each node is
-- told once, also of requests that it was told of before.
-- Index: primary key.
with locked as materialized (
    select held.id, held.state, held.node_id, held.cancel_requested_at
    from (select u.id from unnest(:ids::bigint[]) as u(id) order by u.id) as i
    cross join lateral (
        select j.id, j.state, j.node_id, j.cancel_requested_at
        from aqd.jobs j
        where j.id = i.id and j.state in ('QUEUED', 'PROCESSING')
        for no key update
    ) as held
), asked as (
    update aqd.jobs j
    set cancel_requested_at = now()
    where j.id = any(array(select l.id from locked l where l.cancel_requested_at is null))
)
select l.id, case when l.state = 'QUEUED' then 'CANCELLED' else l.state end
from locked l
where (select count(pg_notify('aqd_cancel', n.node_id)::text)
       from (select distinct o.node_id from locked o where o.state = 'PROCESSING') as n
       where coalesce(current_setting('aqd.notify', true), '') not in ('off', 'false', '0', 'no')) is not null

-- name: discard_jobs :many fresh
-- FAILED to CANCELLED: given up, with a reason. The record is resolved here, before the trigger jobs_cancelled, which
-- moves the job to history at the end of the statement, finds it open.
-- Index: primary key; failed_jobs_open.
with locked as materialized (
    select held.id
    from (select u.id from unnest(:ids::bigint[]) as u(id) order by u.id) as i
    cross join lateral (
        select j.id from aqd.jobs j where j.id = i.id and j.state = 'FAILED' for no key update
    ) as held
), resolved as (
    update aqd.failed_jobs f
    set resolved_at = now(), resolution = 'discarded', note = :reason::text, discarded_by = :by::text
    where f.job_id = any(array(select l.id from locked l)) and f.resolved_at is null
)
update aqd.jobs j
set cancel_requested_at = now()
where j.id = any(array(select l.id from locked l))
returning j.id, 'CANCELLED'

-- name: delete_jobs :many fresh
-- Jobs that wait or have failed, with all that was written down about them (migration 0004).
-- Index: primary keys of jobs and job_attempts; failed_jobs_job_id.
select d.id, null::text from aqd.delete_jobs(:ids::bigint[]) as d(id)

-- name: delete_finished :many fresh
-- The same for jobs that have ended, about which nothing is written down any more. The bounds on finished_at are those of the very jobs, and known when the
-- statement is planned (fresh), so that only their partitions are opened and locked.
-- Index: the primary key of the partitions; that of job_attempts; failed_jobs_job_id.
with locked as materialized (
    select held.id
    from (select u.id from unnest(:ids::bigint[]) as u(id) order by u.id) as i
    cross join lateral (
        select h.id
        from aqd.job_history h
        where h.id = i.id
          and h.finished_at between :first_at::timestamptz and :last_at::timestamptz
        for update
    ) as held
), gone as (
    delete from aqd.job_history h
    where h.id = any(array(select l.id from locked l))
      and h.finished_at between :first_at::timestamptz and :last_at::timestamptz
    returning h.id
), attempts_gone as (
    delete from aqd.job_attempts a where a.job_id = any(array(select g.id from gone g))
), records_gone as (
    delete from aqd.failed_jobs f where f.job_id = any(array(select g.id from gone g))
)
select g.id, null::text from gone g

-- name: update_job :one
-- While it is QUEUED. A moment in the past means now, as it does for aqd.enqueue: anything earlier would lie behind
-- the floors of the nodes. They are woken also for a later moment, because whoever sleeps has asked for
-- the next due moment before. A changed priority alone leaves run_at, and with it the job's age: if that lies
-- behind a floor of its new lane, the nodes' next sweep finds it.
-- Index: primary key.
with changed as (
    update aqd.jobs j
    set priority = coalesce(:priority::smallint, j.priority),
        run_at = case when coalesce(:run_at::timestamptz, now() + :delay_s::double precision * interval '1 second') is null
                      then j.run_at
                      else greatest(:run_at::timestamptz,
                                    now() + :delay_s::double precision * interval '1 second', now()) end
    where j.id = :id::bigint and j.state = 'QUEUED'
    returning j.id, j.state, j.type, j.queue, j.priority, j.run_at, j.created_at
)
select c.* from changed c where case when c.id is not null then (select aqd.wake()) end is not null

-- --- queues

-- name: set_queue :exec
-- Null leaves paused as it is, "limited" says whether max_running is to be set. Nothing is written, nor anybody
-- woken, where nothing changes; a queue with the defaults needs no row.
-- Index: primary key.
with changed as (
    insert into aqd.queues as q (queue, paused, max_running, changed_at, changed_by)
    select :queue::text, coalesce(:paused::boolean, false), :max_running::integer, now(), :by::text
    where coalesce(:paused::boolean, false) or :max_running::integer is not null
       or exists (select from aqd.queues o where o.queue = :queue::text)
    on conflict (queue) do update
    set paused = coalesce(:paused::boolean, q.paused),
        max_running = case when :limited::boolean then excluded.max_running else q.max_running end,
        changed_at = excluded.changed_at,
        changed_by = excluded.changed_by
    where (q.paused, q.max_running) is distinct from (
        coalesce(:paused::boolean, q.paused),
        case when :limited::boolean then excluded.max_running else q.max_running end)
    returning q.queue
)
select c.queue from changed c where case when c.queue is not null then (select aqd.wake()) end is not null

-- name: get_queue_settings :one
-- Always one row: a queue that was never changed has the defaults.
-- Index: primary key.
select n.queue, coalesce(q.paused, false), q.max_running, q.changed_at, q.changed_by
from (select :queue::text as queue) as n
left join aqd.queues q on q.queue = n.queue
