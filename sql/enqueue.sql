-- Submitting.

-- name: enqueue :one
-- The function decides everything; the moments are repeated here because a statement does not see the
-- rows that a function inside it inserts, and a second statement would cost a round trip. now() is the
-- same in both, being the start of the transaction.
-- Index: none; inserts into the primary key and jobs_ready.
select aqd.enqueue(:type::text, :payload::text::jsonb, q.queue, :priority::integer, :run_at::timestamptz,
                   :delay_s::double precision, :max_attempts::integer, :timeout_s::double precision,
                   tags => :tags::text[], meta => :meta::text::jsonb) as id,
       'QUEUED' as state,
       greatest(coalesce(:run_at::timestamptz, now() + :delay_s::double precision * interval '1 second'),
                now()) as run_at,
       now() as created_at,
       q.queue,
       'created' as outcome
from (select coalesce(:queue::text, aqd.queue_of(:type::text)) as queue) as q

-- name: enqueue_keyed :one
-- Under an idempotency key, for a request that is checked already. What the job is now is asked afterwards: the
-- statement does not see what the function inserts, and the first job may have gone far.
-- Index: primary key of idempotency_keys.
select k.id, k.outcome, k.differs
from aqd.enqueue_keyed(:type::text, :payload::text::jsonb, :queue::text, :priority::integer, :run_at::timestamptz,
                       :delay_s::double precision, :max_attempts::integer, :timeout_s::double precision,
                       :tags::text[], :meta::text::jsonb, :idempotency_key::text, :on_conflict::text,
                       :ttl_hours::double precision, :scope::text) as k
