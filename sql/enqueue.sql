-- Submitting.

-- name: enqueue :one
-- The function decides everything; the moments are repeated here because a statement does not see the
-- rows that a function inside it inserts, and a second statement would cost a round trip. now() is the
-- same in both, being the start of the transaction.
-- Not aqd.queue_of, which would be planned at each call (80 us).
-- Index: primary key of handlers; inserts into the primary key and jobs_ready.
select aqd.enqueue(:type::text, :payload::text::jsonb, q.queue, :priority::integer, :run_at::timestamptz,
                   :delay_s::double precision, :max_attempts::integer, :timeout_s::double precision,
                   tags => :tags::text[], meta => :meta::text::jsonb) as id,
       'QUEUED' as state,
       greatest(coalesce(:run_at::timestamptz, now() + :delay_s::double precision * interval '1 second'),
                now()) as run_at,
       now() as created_at,
       q.queue,
       'created' as outcome
from (select coalesce(:queue::text, (select h.queue from aqd.handlers h where h.type = :type::text), 'default')
          as queue) as q

-- name: enqueue_keyed :one
-- Under an idempotency key (migration 0006). One statement: what the job is now is the
-- function's answer too, so that nothing can fail between the change and the look at it.
-- Index: primary key of idempotency_keys; of jobs for the job that was there already.
select k.id, k.state, k.due_at, k.made_at, k.goes_to, k.outcome, k.differs
from aqd.submit_keyed(:type::text, :payload::text::jsonb, :queue::text, :priority::integer, :run_at::timestamptz,
                      :delay_s::double precision, :max_attempts::integer, :timeout_s::double precision,
                      :tags::text[], :meta::text::jsonb, :idempotency_key::text, :on_conflict::text,
                      :ttl_hours::double precision, :scope::text) as k

-- name: enqueue_many :many
-- Many requests without keys, in their order (migration 0006); answers in the order of ids, which is the same one.
-- Index: primary key of handlers; inserts into the primary key and jobs_ready.
select m.id, m.state, m.run_at, m.created_at, m.queue, 'created' as outcome
from aqd.submit_many(:types::text[], :payloads::text[], :queues::text[], :priorities::integer[],
                     :run_ats::timestamptz[], :delays_s::double precision[], :max_attempts::integer[],
                     :timeouts_s::double precision[], :tags::text[], :metas::text[]) as m
order by m.id

-- name: enqueue_many_keyed :many
-- Many checked requests under keys, one after the other in the order given, which must be that of the keys: two
-- batches with the same keys in opposite orders would wait for each other. A key that stands twice makes one job.
-- Where jobs may be replaced, :hold names all the keys (aqd.hold_keys); the scope depends on it so that it is first.
-- Index: primary key of idempotency_keys; of jobs for jobs that were there already.
with held as materialized (
    select case when cardinality(:hold::text[]) > 0 then aqd.hold_keys(:scope::text, :hold::text[]) else 0 end as jobs
)
select k.id, k.state, k.due_at, k.made_at, k.goes_to, k.outcome, k.differs
from held
cross join unnest(:types::text[], :payloads::text[], :queues::text[], :priorities::integer[],
            :run_ats::timestamptz[], :delays_s::double precision[], :max_attempts::integer[],
            :timeouts_s::double precision[], :tags::text[], :metas::text[],
            :keys::text[], :on_conflicts::text[]) with ordinality
    as g(type, payload, queue, priority, run_at, delay_s, max_attempts, timeout_s, tags, meta, key, on_conflict,
         place)
cross join lateral aqd.submit_keyed(
    g.type, g.payload::jsonb, g.queue, g.priority, g.run_at, g.delay_s, g.max_attempts, g.timeout_s, g.tags::text[],
    g.meta::jsonb, g.key, g.on_conflict, :ttl_hours::double precision, case when held.jobs >= 0 then :scope::text end) as k
order by g.place

-- name: limit_lock_wait :exec
-- Until the end of the transaction: a batch tries each of its keys, and waits for none of those that others hold.
-- Index: none.
select set_config('lock_timeout', :value::text, true)
