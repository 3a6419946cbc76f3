-- Submitting.

-- name: enqueue :one
-- The function decides everything; the moments are repeated here because a statement does not see the
-- rows that a function inside it inserts, and a second statement would cost a round trip. now() is the
-- same in both, being the start of the transaction.
-- Index: none; inserts into the primary key and jobs_ready.
select aqd.enqueue(:type::text, :payload::text::jsonb, q.queue, :priority::integer, :run_at::timestamptz,
                   :delay_s::double precision, :max_attempts::integer, :timeout_s::double precision) as id,
       'QUEUED' as state,
       greatest(coalesce(:run_at::timestamptz, now() + :delay_s::double precision * interval '1 second'),
                now()) as run_at,
       now() as created_at,
       q.queue
from (select coalesce(:queue::text, aqd.queue_of(:type::text)) as queue) as q
