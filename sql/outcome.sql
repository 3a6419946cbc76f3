-- Writing outcomes down. In the two shapes of lease.sql, and never with the state in a condition: with
-- state = 'PROCESSING' the planner may take jobs_running, full of dead entries.
--
-- A job that was asked to end (cancel_requested_at) is never QUEUED or FAILED again: the trigger jobs_cancelled
-- (migration 0002) moves it to history as CANCELLED at the end of whatever statement writes one of the two.
-- What is left to do here and in lease.sql is to call the attempt cancelled, open no failed_jobs record,
-- and say so to the caller.

-- name: record_completed :many
-- Delete from jobs, insert what was deleted into history: one statement, so that a job is in exactly one of the two
-- whatever happens. A bad row or a missing partition leaves all of them PROCESSING.
-- - Not locked before: each row is looked up, locked and deleted in one visit, in the order of ids, because the
--   sorted batch is the outer side of a nested loop. (Locked first, then named by an array as in lease.sql: 2.0 us,
--   56 bytes of WAL and 5 buffers a job more.)
-- - "id = any(array[g.id])" is what makes the batch the outer side: it can be looked up in the index, but not merged or
--   hashed, so that the table is the inner side or read sequentially, which the dispatcher's connections never do. With
--   "j.id = g.id" a plan made while the queue is empty walks the whole primary key, for ever.
-- - Who changes a row at the same time (a request to cancel) is waited for; id and token are compared again with what
--   he leaves, and that is what is deleted and kept.
-- - SRFs in the select list run in step; from unnest(a, b, ...) writes eight tables first (0.5 us a job).
-- A failed_jobs record can be open only if the job was retried by hand. COMPLETED also where the job was asked to end: the
-- work was done. One row: how many, which (null: all), and waited: somebody wants to be told (wait.sql).
-- Index: primary key; failed_jobs_open.
with gone as (
    delete from aqd.jobs j
    using (
        select unnest(:ids::bigint[]) as id, unnest(:tokens::bigint[]) as token,
               unnest(:results::text[]) as result, unnest(:ages_s::double precision[]) as age_s,
               unnest(:walls_s::double precision[]) as wall_s, unnest(:cpus_s::double precision[]) as cpu_s,
               unnest(:peaks_kb::bigint[]) as peak_kb, unnest(:outputs::text[]) as output
        order by 1
    ) as g
    where j.id = any(array[g.id]) and j.lease_token = g.token
    returning j.id, j.run_at, j.created_at, j.claimed_at, j.lease_token, j.timeout_s, j.max_attempts, j.attempt,
              j.crashes, j.interruptions, j.retries, j.priority, j.type, j.queue, j.node_id, j.payload,
              j.cancel_requested_at, j.tags, j.meta, g.result, g.output, g.wall_s, g.cpu_s, g.peak_kb,
              now() - least(greatest(g.age_s, 0), 86400) * interval '1 second' as finished_at
), kept as (
    insert into aqd.job_history (
        id, finished_at, run_at, created_at, claimed_at, lease_token, timeout_s, wall_s, cpu_s, peak_kb,
        max_attempts, attempt, crashes, interruptions, retries, priority, state, type, queue, node_id,
        payload, result, cancel_requested_at, output, tags, meta)
    select g.id, g.finished_at, g.run_at, g.created_at, g.claimed_at, g.lease_token, g.timeout_s, g.wall_s,
           g.cpu_s, g.peak_kb, g.max_attempts, g.attempt, g.crashes, g.interruptions, g.retries, g.priority,
           'COMPLETED', g.type, g.queue, g.node_id, g.payload, g.result::jsonb, g.cancel_requested_at, g.output,
           g.tags, g.meta
    from gone g
), retried as materialized (
    select array(select g.id from gone g where g.retries > 0) as ids
), resolved as (
    update aqd.failed_jobs f
    set resolved_at = now(), resolution = 'completed'
    where f.job_id = any((select r.ids from retried r)::bigint[]) and f.resolved_at is null
      and (select cardinality(r.ids) > 0 from retried r)
)
select n.jobs, case when n.jobs < cardinality(:ids::bigint[]) then array(select g.id from gone g) end as recorded,
       (select w.last_value > date_part('epoch', now()) from aqd.waits w) as waited
from (select count(*) as jobs from gone) as n

-- name: find_completed :many
-- "0 rows" means lost, or already written by a COMMIT whose answer was lost: the token tells. The
-- bound on finished_at leaves two or three partitions to look at.
-- Index: the primary key of each partition.
select h.id
from unnest(:ids::bigint[], :tokens::bigint[]) as i(id, token)
cross join lateral (
    select h.id
    from aqd.job_history h
    where h.id = i.id and h.lease_token = i.token and h.state = 'COMPLETED' and h.finished_at > now() - interval '2 days'
    limit 1
) as h

-- name: record_failed :many fresh
-- A failed attempt: QUEUED again after retry_in_s, or FAILED where that is null. The FAILED row stays
-- in jobs, to be retried by hand, and gets a failed_jobs record, with final_error instead of error where
-- that is given. CANCELLED where the job was asked to end, or the attempt's kind says so. Gives the state after, and
-- whether somebody wants to be told (wait.sql).
-- Index: primary key; failed_jobs_open.
with locked as materialized (
    select held.*, i.error, i.traceback, i.retry_in_s, i.wall_s, i.cpu_s, i.peak_kb, i.signal, i.exit_code,
           i.reason, i.output, now() - greatest(i.age_s, 0) * interval '1 second' as finished_at,
           case when held.cancel_requested_at is not null then 'cancelled' else i.kind end as kind,
           case when i.retry_in_s is null then coalesce(i.final_error, i.error) else i.error end as last_error
    from (
        select u.*
        from unnest(:ids::bigint[], :tokens::bigint[], :kinds::text[], :errors::text[], :tracebacks::text[],
                    :retries_in_s::double precision[], :ages_s::double precision[],
                    :walls_s::double precision[], :cpus_s::double precision[], :peaks_kb::bigint[],
                    :signals::integer[], :exit_codes::integer[], :reasons::text[], :outputs::text[],
                    :final_errors::text[])
             as u(id, token, kind, error, traceback, retry_in_s, age_s, wall_s, cpu_s, peak_kb, signal,
                  exit_code, reason, output, final_error)
        order by u.id
    ) as i
    cross join lateral (
        select j.id, j.attempt, j.node_id, j.claimed_at, j.lease_token, j.type, j.queue, j.cancel_requested_at
        from aqd.jobs j where j.id = i.id and j.lease_token = i.token
        for no key update
    ) as held
), changed as (
    update aqd.jobs j
    set state = case when l.retry_in_s is null then 'FAILED' else 'QUEUED' end,
        run_at = case when l.retry_in_s is null then j.run_at
                      else now() + greatest(l.retry_in_s, 0) * interval '1 second' end,
        crashes = j.crashes + (l.kind = 'crashed')::integer,
        last_error = left(l.last_error, 1000),
        cancel_requested_at = case when l.kind = 'cancelled' then coalesce(j.cancel_requested_at, now()) end,
        claimed_at = null, lease_token = null, lease_expires_at = null, node_id = null
    from locked l
    where j.id = l.id
    returning j.id, case when j.cancel_requested_at is null then j.state else 'CANCELLED' end as state
), noted as (
    insert into aqd.job_attempts (job_id, attempt, kind, error, traceback, signal, exit_code,
                                  started_at, finished_at, wall_s, cpu_s, peak_kb, node_id, lease_token,
                                  reason, output)
    select l.id, l.attempt, l.kind, l.error, l.traceback, l.signal, l.exit_code,
           coalesce(l.finished_at - l.wall_s * interval '1 second', l.claimed_at), l.finished_at,
           l.wall_s, l.cpu_s, l.peak_kb, l.node_id, l.lease_token, l.reason, l.output
    from locked l
), dead as (
    insert into aqd.failed_jobs as f (job_id, failed_at, attempts, type, queue, kind, reason, error, traceback)
    select l.id, now(), l.attempt, l.type, l.queue, l.kind, l.reason, l.last_error, l.traceback
    from locked l
    where l.retry_in_s is null and l.kind <> 'cancelled'
    on conflict (job_id) where resolved_at is null do update
    set failed_at = excluded.failed_at, attempts = excluded.attempts, kind = excluded.kind,
        reason = excluded.reason, error = excluded.error, traceback = excluded.traceback,
        failures = f.failures + 1
)
select c.id, c.state, (select w.last_value > date_part('epoch', now()) from aqd.waits w) as waited from changed c

-- name: find_attempts :many
-- The same question as find_completed, for attempts that did not complete. What rescue has written ("lost",
-- or "cancelled" with the reason "lease") is no answer: what the owner has to say comes too late.
-- Index: job_attempts' primary key.
select i.id
from unnest(:ids::bigint[], :tokens::bigint[]) as i(id, token)
where exists (
    select from aqd.job_attempts a
    where a.job_id = i.id and a.lease_token = i.token and a.kind <> 'lost' and a.reason is distinct from 'lease')
