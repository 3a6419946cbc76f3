-- Looking, and the two changes that are made by hand.

-- name: get_job_live :one
-- Index: primary key.
select j.id, j.state, j.type, j.queue, j.priority, j.payload::text, null::text as result, j.attempt,
       j.max_attempts, j.timeout_s, j.run_at, j.created_at, j.claimed_at, null::timestamptz as finished_at,
       j.last_error, j.node_id, j.crashes, j.interruptions, j.retries,
       null::double precision as wall_s, null::double precision as cpu_s, null::bigint as peak_kb,
       j.cancel_requested_at, j.progress_percent, j.progress_message, null::text as output,
       j.tags, j.meta::text
from aqd.jobs j
where j.id = :id::bigint

-- name: get_job_finished :one fresh
-- Asked twice: first with a bound on finished_at, which leaves two or three partitions, then without.
-- Index: the primary key of each partition.
select h.id, h.state, h.type, h.queue, h.priority, h.payload::text, h.result::text, h.attempt,
       h.max_attempts, h.timeout_s, h.run_at, h.created_at, h.claimed_at, h.finished_at,
       null::text as last_error, h.node_id, h.crashes, h.interruptions, h.retries, h.wall_s, h.cpu_s, h.peak_kb,
       h.cancel_requested_at, null::real as progress_percent, null::text as progress_message, h.output,
       h.tags, h.meta::text
from aqd.job_history h
where h.id = :id::bigint
  and h.finished_at > coalesce(now() - :within_s::double precision * interval '1 second', '-infinity')
limit 1

-- name: retry_job :one
-- FAILED to QUEUED as if new: attempt, error and counters start again; attempts and the failure's record
-- stay. One of many simultaneous callers changes the row, the others find it QUEUED.
-- Index: primary key; failed_jobs_open.
with changed as (
    update aqd.jobs j
    set state = 'QUEUED', run_at = now(), attempt = 0, crashes = 0, interruptions = 0, last_error = null,
        claimed_at = null, retries = j.retries + 1, cancel_requested_at = null,
        progress_at = null, progress_percent = null, progress_message = null
    where j.id = :id::bigint and j.state = 'FAILED'
    returning j.id, j.state, j.run_at, j.created_at, j.queue
), marked as (
    update aqd.failed_jobs f set retried_at = now()
    from changed c
    where f.job_id = c.id and f.resolved_at is null
)
select c.id, c.state, c.run_at, c.created_at, c.queue, 'created' from changed c where case when c.id is not null then (select aqd.wake()) end is not null

-- name: cancel_job :one
-- The function decides everything (migration 0002); null: there is no such job. Its writes are not visible to the
-- statement that calls it: what else there is to say about the job is asked afterwards.
-- Index: primary key; for finished jobs the primary key of each partition.
select aqd.cancel(:id::bigint)

-- name: get_attempts :many
-- Attempts that did not complete, oldest first; of very many the last hundred, which may have 14 MB of texts.
-- Index: job_attempts' primary key.
select a.attempt, a.kind, a.error, a.traceback, a.signal, a.exit_code, a.started_at, a.finished_at,
       a.wall_s, a.cpu_s, a.peak_kb, a.node_id, a.output, a.reason
from (
    select r.* from aqd.job_attempts r where r.job_id = :job_id::bigint order by r.id desc limit 100
) a
order by a.id

-- name: count_live_nodes :one
-- Index: none, a handful of rows.
select count(*)
from aqd.nodes n
where n.seen_at > now() - :node_ttl_s::double precision * interval '1 second'

-- name: job_facts :many
-- What the recorder must know about a job that it has not claimed itself (a predecessor's).
-- Index: primary key.
select j.id, j.type, j.max_attempts, j.crashes
from aqd.jobs j
where j.id = any(:ids::bigint[])
