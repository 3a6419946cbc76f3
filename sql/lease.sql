-- Keeping, returning and taking back leases. Every change names id and token; the token is new for
-- every claim, so whoever lost a lease matches no row. Two shapes that recur here and in outcome.sql:
--
-- 1. Locks are taken in id order by a first, materialised step. The order of an array does not order them,
--    the plan does: without it 22 deadlocks against 30 successes. FOR UPDATE inside the lateral step
--    keeps the planner from turning the join round.
-- 2. What is changed is named by "id = any(array(select ...))", not by a join alone. A queue is often empty
--    when a statement is planned; a generic plan made then joins from aqd.jobs outwards, and later reads all
--    of it for each batch: 15 s for 500 rows out of 20,000. An array can only be looked up in the index.
--    Where each row gets values of its own, a join is needed, and the statement is marked "fresh": planned
--    at each call, with the table as it is (about 0.5 ms).

-- name: renew_leases :many
-- Touches no indexed column, so that the update is HOT. A row that somebody else has locked is passed over:
-- waiting for one would let all the others run out.
-- Index: primary key.
with locked as materialized (
    select held.id
    from (select u.id, u.token from unnest(:ids::bigint[], :tokens::bigint[]) as u(id, token) order by u.id) as i
    cross join lateral (
        select j.id from aqd.jobs j where j.id = i.id and j.lease_token = i.token
        for no key update skip locked
    ) as held
)
update aqd.jobs j
set lease_expires_at = now() + :lease_s::double precision * interval '1 second'
where j.id = any(array(select l.id from locked l))
returning j.id, j.lease_token, j.cancel_requested_at is not null

-- name: still_held :many
-- Which of the leases that were not renewed are still ours: somebody had locked their rows.
-- Index: primary key.
select held.id, held.lease_token, held.cancelled
from unnest(:ids::bigint[], :tokens::bigint[]) as i(id, token)
cross join lateral (
    select j.id, j.lease_token, j.cancel_requested_at is not null as cancelled from aqd.jobs j where j.id = i.id and j.lease_token = i.token offset 0
) as held

-- name: store_progress :many fresh
-- What handlers say about how far they are. As a renewal: HOT, and rows in other hands are passed over.
-- Index: primary key.
with locked as materialized (
    select held.id, i.percent, i.message
    from (
        select u.*
        from unnest(:ids::bigint[], :tokens::bigint[], :percents::real[], :messages::text[])
             as u(id, token, percent, message)
        order by u.id
    ) as i
    cross join lateral (
        select j.id from aqd.jobs j where j.id = i.id and j.lease_token = i.token
        for no key update skip locked
    ) as held
)
update aqd.jobs j
set progress_percent = l.percent, progress_message = l.message, progress_at = now()
from locked l
where j.id = l.id
returning j.id

-- name: release_jobs :many fresh
-- Back to QUEUED with the attempt returned; run_at stays, so that the job keeps its place. Interrupted
-- ones (started, then stopped by us) are counted by themselves, and beyond the bound FAILED: without
-- it a job that never survives a drain would run for ever. CANCELLED where the job was asked to end
-- (outcome.sql); a cancelled attempt that had begun is no interruption. Gives the state after.
-- Index: primary key; failed_jobs_open.
with locked as materialized (
    select held.*, i.interrupted as begun, i.interrupted and not held.cancelled as interrupted, i.reason,
           i.reason_code, i.traceback, i.output, i.wall_s, i.cpu_s, i.peak_kb, i.signal, now() - greatest(i.age_s, 0) * interval '1 second' as finished_at,
           i.interrupted and not held.cancelled and held.interruptions >= :max_interruptions::integer as exhausted
    from (
        select u.*
        from unnest(:ids::bigint[], :tokens::bigint[], :interrupted::boolean[], :reasons::text[],
                    :reason_codes::text[], :ages_s::double precision[], :tracebacks::text[], :outputs::text[],
                    :walls_s::double precision[], :cpus_s::double precision[], :peaks_kb::bigint[],
                    :signals::integer[])
             as u(id, token, interrupted, reason, reason_code, age_s, traceback, output, wall_s, cpu_s, peak_kb,
                  signal)
        order by u.id
    ) as i
    cross join lateral (
        select j.id, j.attempt, j.node_id, j.claimed_at, j.lease_token, j.type, j.queue, j.interruptions,
               j.cancel_requested_at is not null as cancelled
        from aqd.jobs j where j.id = i.id and j.lease_token = i.token
        for no key update
    ) as held
), changed as (
    update aqd.jobs j
    set state = case when l.exhausted then 'FAILED' else 'QUEUED' end,
        attempt = case when l.exhausted or l.begun and l.cancelled then j.attempt
                       else greatest(j.attempt - 1, 0) end,
        interruptions = j.interruptions + l.interrupted::integer,
        last_error = case when l.interrupted then l.reason else j.last_error end,
        claimed_at = null, lease_token = null, lease_expires_at = null, node_id = null
    from locked l
    where j.id = l.id
    returning j.id, case when l.cancelled then 'CANCELLED' else j.state end as state
), noted as (
    insert into aqd.job_attempts (job_id, attempt, kind, reason, error, traceback, output, signal, started_at,
                                  finished_at, wall_s, cpu_s, peak_kb, node_id, lease_token)
    select l.id, l.attempt, case when l.cancelled then 'cancelled' else 'interrupted' end, l.reason_code,
           l.reason, l.traceback, l.output, l.signal,
           coalesce(l.finished_at - l.wall_s * interval '1 second', l.claimed_at), l.finished_at, l.wall_s,
           l.cpu_s, l.peak_kb, l.node_id, l.lease_token
    from locked l
    where l.begun
), dead as (
    insert into aqd.failed_jobs as f (job_id, failed_at, attempts, type, queue, kind, reason, error)
    select l.id, now(), l.attempt, l.type, l.queue, 'interrupted', l.reason_code,
           format('interrupted more than %s times; the last time: %s', :max_interruptions::integer, l.reason)
    from locked l
    where l.exhausted
    on conflict (job_id) where resolved_at is null do update
    set failed_at = excluded.failed_at, attempts = excluded.attempts, kind = excluded.kind,
        reason = excluded.reason, error = excluded.error, traceback = null, failures = f.failures + 1
)
select c.id, c.state from changed c where case when c.id is not null then (select aqd.wake()) end is not null

-- name: reconcile_node :many
-- Jobs that this node holds in the database but not in its hands: claimed by a dispatcher that died
-- before it could tell anybody. Younger claims are left alone, their owner may be just about to know.
-- CANCELLED where the job was asked to end (outcome.sql).
-- The CASE keeps wake() from being called where nothing has changed: a condition without a column is evaluated
-- before there is a row.
-- Index: jobs_running.
with held as materialized (
    select h.id, h.token from unnest(:ids::bigint[], :tokens::bigint[]) as h(id, token)
), locked as materialized (
    select j.id
    from aqd.jobs j
    where j.state = 'PROCESSING'
      and j.node_id = :node_id::text
      and j.claimed_at < now() - :older_than_s::double precision * interval '1 second'
      and (j.id, j.lease_token) not in (select h.id, h.token from held h)
    order by j.id
    for no key update skip locked
), changed as (
    update aqd.jobs j
    set state = 'QUEUED',
        attempt = greatest(j.attempt - 1, 0),
        claimed_at = null, lease_token = null, lease_expires_at = null, node_id = null
    where j.id = any(array(select l.id from locked l))
    returning j.id
)
select c.id from changed c where case when c.id is not null then (select aqd.wake()) end is not null

-- name: rescue_jobs :many fresh
-- Expired leases, judged by the database's clock. One statement: whatever was completed, released or
-- claimed afresh in between is skipped or fails the condition, which is evaluated again on the row's
-- newest version when its lock is taken. The attempt stays counted (a job that kills its node must
-- end some time); the delay is drawn between the base and the exponential bound (full jitter).
-- CANCELLED where the job was asked to end (outcome.sql). Gives the state after.
-- Index: jobs_running; then the primary keys of jobs and handlers; failed_jobs_open.
with locked as materialized (
    select j.id, j.attempt, j.node_id, j.claimed_at, j.lease_token, j.type, j.queue,
           j.cancel_requested_at is not null as cancelled,
           j.cancel_requested_at is null and j.attempt >= coalesce(
               j.max_attempts,
               (select h.max_attempts from aqd.handlers h where h.type = j.type),
               :default_max_attempts::integer) as exhausted,
           format('the lease of node %s expired at %s', j.node_id, j.lease_expires_at) as reason
    from aqd.jobs j
    where j.state = 'PROCESSING' and j.lease_expires_at < now()
    order by j.id
    limit :limit::bigint
    for no key update skip locked
), changed as (
    update aqd.jobs j
    set state = case when l.exhausted then 'FAILED' else 'QUEUED' end,
        run_at = case when l.exhausted then j.run_at else now() + interval '1 second' * (
            :backoff_base_s::double precision + random() * greatest(0,
                least(:backoff_max_s::double precision,
                      :backoff_base_s::double precision * power(2::double precision, least(l.attempt - 1, 60)))
                - :backoff_base_s::double precision)) end,
        last_error = l.reason,
        claimed_at = null, lease_token = null, lease_expires_at = null, node_id = null
    from locked l
    where j.id = l.id and j.lease_token = l.lease_token
    returning j.id, case when l.cancelled then 'CANCELLED' else j.state end as state
), noted as (
    insert into aqd.job_attempts (job_id, attempt, kind, reason, error, started_at, finished_at, node_id,
                                  lease_token)
    select l.id, l.attempt, case when l.cancelled then 'cancelled' else 'lost' end, 'lease', l.reason,
           l.claimed_at, now(), l.node_id, l.lease_token
    from locked l
), dead as (
    insert into aqd.failed_jobs as f (job_id, failed_at, attempts, type, queue, kind, reason, error)
    select l.id, now(), l.attempt, l.type, l.queue, 'lost', 'lease', l.reason
    from locked l
    where l.exhausted
    on conflict (job_id) where resolved_at is null do update
    set failed_at = excluded.failed_at, attempts = excluded.attempts, kind = excluded.kind,
        reason = excluded.reason, error = excluded.error, traceback = null, failures = f.failures + 1
)
select c.id, c.state from changed c
