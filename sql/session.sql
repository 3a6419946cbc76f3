-- Once per connection.

-- name: configure_session :one
-- All settings in one round trip, after connecting: a pooler may refuse them as start-up options. Returns whether the
-- session is not ours, because it is not the one (:pid) that we were told of; then nothing is set for longer than this
-- statement. Without :pid it is ours.
-- Index: none.
select bool_and(pooled.pooled)
from unnest(:names::text[], :values::text[]) as s(name, value)
cross join (select coalesce(:pid::bigint <> pg_backend_pid(), false)) as pooled(pooled)
where set_config(s.name, s.value, pooled.pooled) is not null

-- name: which_database :one
-- The same for a standby; another one for a restored copy.
-- Index: none.
select c.system_identifier, current_database()::text from pg_control_system() as c

-- name: elect :one
-- One node at a time for a duty; the lock ends with the transaction, so also behind a pooler.
-- Index: none.
select pg_try_advisory_xact_lock(:class::integer, :duty::integer)
