-- Waiting for jobs to end. Whoever ends jobs tells so on the channel aqd_ended while somebody waits, which
-- aqd.waits says (migration 0003). Telling is a hint: who waits also looks, every second or two.

-- name: announce_wait :one
-- For a few seconds whoever ends jobs tells. By the database's clock, which is the one that is asked.
-- Index: none.
select setval('aqd.waits', ceil(date_part('epoch', clock_timestamp()) + :for_s::double precision)::bigint)

-- name: find_ended :many fresh
-- Which of these jobs have ended or are gone. For all that wait in one process together, and only among live
-- jobs: an ended one is FAILED there, or not there. A subquery a job, planned at each call: a join may read the
-- whole table, and so may a plan from when it was small.
-- Index: primary key.
select i.id
from unnest(:ids::bigint[]) as i(id)
where coalesce((select j.state from aqd.jobs j where j.id = i.id), 'FAILED') not in ('QUEUED', 'PROCESSING')

-- name: tell_ended :one
-- After the transaction that ended them: NOTIFY holds a lock of the whole server from before the commit
-- until after it, and this one has nothing to write. Asking in the recording statement whether anybody waits
-- costs nothing that can be seen (batches of 1 / 50 / 500, the best of many, before and after: 412 / 930 / 10,300 and
-- 407 / 925 / 10,700 µs); telling, 0.16 / 0.25 / 1.1 ms a batch.
-- Index: none.
select aqd.tell_ended(:ids::bigint[])

-- name: is_listening :one
-- Whether this session listens to the channel already, for its own purposes; and whether it is another one than the
-- client was told of (:pid) when it connected, so that a pooler is in between.
-- Index: none.
select exists (select from pg_listening_channels() as c(channel) where c.channel = 'aqd_ended'),
       :pid::bigint <> pg_backend_pid()
