-- Once per connection.

-- name: configure_session :exec
-- All settings in one round trip, after connecting: a pooler may refuse them as start-up options.
-- Index: none.
select set_config(s.name, s.value, false)
from unnest(:names::text[], :values::text[]) as s(name, value)

-- name: elect :one
-- One node at a time for a duty; the lock ends with the transaction, so also behind a pooler.
-- Index: none.
select pg_try_advisory_xact_lock(:class::integer, :duty::integer)
