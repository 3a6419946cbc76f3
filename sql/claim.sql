-- Taking jobs, and sleeping until there are some.

-- name: claim_jobs :many
-- All lanes in one statement, in the order of the arrays, each from its floor on (aqd/lanes.py).
-- - The floor keeps the scan from walking over dead entries that vacuum may not remove yet. It is
--   moved back to now() - slack if it is later than that: run_at = now() is the start of the
--   enqueueing transaction, so a row with an earlier run_at may appear later.
-- - LIMIT stands in a MATERIALIZED step of its own: in "update ... where id in (select ... limit n for
--   update skip locked)" a join may run the inner part again, which skips what it has just locked and
--   takes the next rows, in the end the whole queue.
-- - The LIMIT inside the lateral step bounds a lane, the one outside the whole; rows are locked one
--   by one as they are pulled, so nothing beyond the outer limit is locked.
-- - The rows are then named by their places, which nobody can change while we hold them: a TID scan, in the order of
--   the pages (by the primary key 0.5 us and a buffer a job more). What somebody had changed between our
--   snapshot and our lock has a place that the snapshot does not see, and stays QUEUED: fewer rows than picked.
-- - Arrays and types come through sub-selects, so that a plan for values looks no cheaper than one for any: it is
--   planned once, not at each claim (0.35 ms).
-- - Known types only: an unknown type costs nobody an attempt.
-- - Of a queue with a limit (:limited, its lanes alone) no more than aqd.queue_room allows, which holds the
--   queue's row until the end. The sub-select of a LIMIT is evaluated once, before the first row.
-- - Always at least one row. Its last columns are now_us, the database's clock, which the floors are made of, and, as one
--   text because each column costs every row 0.1 us: how many might have been taken, how many were picked, and
--   what finding the rows has cost the server in microseconds (a sub-select is evaluated once, at the first row).
-- Dropped, each measured: no second store of the rows by RETURNING at the top (0.5 us a job, but says nothing where
-- there are no rows); the trigger jobs_cancelled (0.2; old nodes need it); moments not converted here (0.1).
-- Index: jobs_ready, one range per lane.
with lane as (
    select l.queue, l.priority,
           least(l.floor_at, l.slack_at) as from_at,
           case when l.floor_at <= l.slack_at then l.floor_id else 0 end as from_id
    from (
        select u.queue, u.priority, u.floor_id,
               timestamptz 'epoch' + u.floor_us * interval '1 microsecond' as floor_at,
               now() - :slack_s::double precision * interval '1 second' as slack_at
        from unnest((select :queues::text[]), (select :priorities::smallint[]), (select :floors_us::bigint[]),
                    (select :floor_ids::bigint[])) as u(queue, priority, floor_us, floor_id)
    ) as l
), room as materialized (
    select case when :limited::text is null then :limit::bigint
                else aqd.queue_room(:limited::text, :limit::bigint) end as jobs,
           clock_timestamp() as began_at  -- after that: waiting for the queue's row is no walking
), picked as materialized (
    select ready.place
    from lane cross join lateral (
        select j.ctid as place
        from aqd.jobs j
        where j.state = 'QUEUED'
          and j.queue = lane.queue
          and j.priority = lane.priority
          and (j.run_at, j.id) > (lane.from_at, lane.from_id)
          and j.run_at <= now()
          and j.type = any((select :types::text[])::text[])
        order by j.run_at, j.id
        limit (select r.jobs from room r)
        for no key update skip locked
    ) as ready
    limit (select r.jobs from room r)
), claimed as (
    update aqd.jobs j
    set state = 'PROCESSING',
        attempt = j.attempt + 1,
        claimed_at = now(),
        lease_token = :token::bigint,
        lease_expires_at = now() + :lease_s::double precision * interval '1 second',
        node_id = :node_id::text,
        progress_at = null, progress_percent = null, progress_message = null
    where j.ctid = any(array(select p.place from picked p))
    returning j.id, j.lease_token, j.type, j.queue, j.priority, j.payload::text as payload, j.attempt,
              j.max_attempts, j.timeout_s,
              (date_part('epoch', j.created_at) * 1000000::double precision)::bigint as created_at_us,
              j.interruptions, j.crashes,
              (date_part('epoch', j.run_at) * 1000000::double precision)::bigint as run_at_us,
              array_to_json(j.tags)::text as tags, j.meta::text as meta
)
select c.*, clock.now_us, clock.said
from (
    select (date_part('epoch', now()) * 1000000::double precision)::bigint as now_us,
           (select concat_ws(' ', r.jobs, (select count(*) from picked),
                             (date_part('epoch', clock_timestamp() - r.began_at) * 1000000::double precision)::bigint)
            from room r) as said
) as clock
left join claimed c on true

-- name: list_lanes :many
-- The lanes with QUEUED jobs; and, without a priority, the queues that are paused or have a limit, whether or not
-- they have jobs now: a claimer that knows a lane goes on looking into it. An empty array of queues means all. Always
-- at least one row, the last of which says what the look has cost the server.
-- Index: jobs_ready, one probe a lane; a handful of queues.
select l.queue, l.priority, false as paused, false as limited, null::double precision as cost_s
from aqd.ready_lanes(:max_lanes::integer) as l
where cardinality(:queues::text[]) = 0 or l.queue = any(:queues::text[])
union all
select q.queue, null, q.paused, q.max_running is not null, null
from aqd.queues q
where q.paused or q.max_running is not null
union all
select null, null, false, false, date_part('epoch', clock_timestamp() - statement_timestamp())

-- name: list_lanes_distinct :many
-- The same for thousands of lanes, where one pass over the index is cheaper than a probe for each.
-- Index: jobs_ready, the whole of it.
(select distinct j.queue, j.priority, false as paused, false as limited, null::double precision as cost_s
 from aqd.jobs j
 where j.state = 'QUEUED' and (cardinality(:queues::text[]) = 0 or j.queue = any(:queues::text[])))
union all
select q.queue, null, q.paused, q.max_running is not null, null
from aqd.queues q
where q.paused or q.max_running is not null
union all
select null, null, false, false, date_part('epoch', clock_timestamp() - statement_timestamp())

-- name: queue_settings :many
-- The queues that are paused or have a limit, as list_lanes gives them: for when it is too dear to be asked often.
-- Index: none, a handful of queues.
select q.queue, q.paused, q.max_running is not null
from aqd.queues q
where q.paused or q.max_running is not null

-- name: lane_heads :many
-- For how many seconds the first job of each of these lanes that this node could run has been due; only lanes that
-- have one among their first twenty. One more row, at the end, says what the look has cost the server.
-- Index: jobs_ready, one probe a lane.
(select l.queue, l.priority, date_part('epoch', now() - head.run_at), null::double precision
 from unnest(:queues::text[], :priorities::smallint[]) as l(queue, priority)
 cross join lateral (
     select min(front.run_at) as run_at
     from (
         select j.run_at, j.type
         from aqd.jobs j
         where j.state = 'QUEUED' and j.queue = l.queue and j.priority = l.priority
         order by j.run_at, j.id
         limit 20
     ) as front
     where front.type = any(:types::text[])
 ) as head
 where head.run_at <= now())
union all
select null, null, null, date_part('epoch', clock_timestamp() - statement_timestamp())

-- name: next_due :one
-- Seconds until the first job falls due that was not yet due at the last claim (its now_us); null if
-- there is none. One probe a lane: a single min(run_at) over all lanes reads the whole index.
-- Index: jobs_ready.
select date_part('epoch', min(due.run_at) - now())
from unnest(:queues::text[], :priorities::smallint[]) as l(queue, priority)
cross join lateral (
    select j.run_at
    from aqd.jobs j
    where j.state = 'QUEUED'
      and j.queue = l.queue
      and j.priority = l.priority
      and j.run_at > timestamptz 'epoch' + :since_us::bigint * interval '1 microsecond'
    order by j.run_at
    limit 1
) as due

-- name: announce_sleep :one
-- From now on enqueue notifies. Sequences do not roll back and leave no dead rows.
-- Index: none.
select nextval('aqd.sleeps')

-- name: note_wake :exec
-- Strikes off whoever has announced sleep, also nodes that are gone, and tells so those who sleep on. By what aqd.sleeps
-- says now, not by the node's own number: of two nodes the later one would set wakes back, and a successor that has
-- announced nothing could not strike off its predecessor. A hint may be lost in a crash, so nobody waits for the disk.
-- Index: none.
select set_config('synchronous_commit', 'off', true),
       setval('aqd.wakes', greatest(sleeps.last_value, wakes.last_value)),
       pg_notify('aqd_jobs', :node_id::text)
from aqd.sleeps as sleeps, aqd.wakes as wakes

-- name: pending_writers :many
-- Transactions that may have inserted jobs which nobody can see yet. The lock is the one that INSERT
-- takes and keeps until the transaction ends; enqueuers pay nothing for it.
-- Index: none (the lock table is in memory).
select l.virtualtransaction
from pg_locks l
where l.locktype = 'relation'
  and l.database = (select d.oid from pg_database d where d.datname = current_database())
  and l.relation = 'aqd.jobs'::regclass
  and l.mode = 'RowExclusiveLock'
  and l.granted
  and l.pid <> pg_backend_pid()
