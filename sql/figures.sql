-- Figures: what nodes have counted, and what the keeper makes of it so that reading costs nothing.

-- name: add_figures :exec
-- Differences since the last time, added up per node and per minute in one statement. Nobody else writes rows of this
-- node but the keeper that finds it gone, which does not wait. If a COMMIT gets no answer, a few seconds
-- are counted twice or not at all. A node has many dispatchers, one after the other, each with its own first pairs (queue,
-- type): once pairs_max are kept, further ones are kept together.
-- Index: primary keys of node_figures and minutes.
with kept as materialized (
    select distinct f.labels[1:2] as pair
    from aqd.node_figures f where f.node_id = :node_id::text and f.metric = 'attempts'
), named as (
    select g.metric, g.count, g.total, g.buckets,
           case when g.metric not in ('attempts', 'duration', 'waiting')
                     or (select count(*) from kept) < :pairs_max::bigint
                     or g.labels[1:2] in (select k.pair from kept k)
                then g.labels else array['other', 'other'] || g.labels[3:] end as labels
    from jsonb_to_recordset(:cells::jsonb)
         as g(metric text, labels text[], count bigint, total double precision, buckets bigint[])
), given as materialized (
    select n.metric, n.labels, sum(n.count)::bigint as count, sum(n.total) as total,
           aqd.sum_buckets(n.buckets) as buckets
    from named n
    group by n.metric, n.labels
    order by n.metric, n.labels
), by_minute as (
    insert into aqd.minutes as m (minute, node_id, metric, labels, count, total, buckets)
    select date_trunc('minute', now()), :node_id::text, g.metric, g.labels, g.count, g.total, g.buckets
    from given g
    where g.metric in ('attempts', 'duration', 'waiting')
    on conflict (minute, node_id, metric, labels) do update
    set count = m.count + excluded.count, total = m.total + excluded.total,
        buckets = aqd.add_buckets(m.buckets, excluded.buckets)
)
insert into aqd.node_figures as f (node_id, metric, labels, count, total, buckets)
select :node_id::text, g.metric, g.labels, g.count, g.total, g.buckets
from given g
on conflict (node_id, metric, labels) do update
set count = f.count + excluded.count, total = f.total + excluded.total,
    buckets = aqd.add_buckets(f.buckets, excluded.buckets)

-- name: job_labels :many
-- What the figures count jobs under that a dead dispatcher had claimed.
-- Index: primary key.
select j.id, j.queue, j.type,
       greatest(date_part('epoch', j.claimed_at - greatest(j.run_at, j.created_at)), 0)
from aqd.jobs j
where j.id = any(:ids::bigint[]) and j.claimed_at is not null

-- name: fold_figures :rows
-- The rows of nodes that are gone become those of node ''. A node that was only taken for gone makes new ones. Once
-- pairs_max pairs (queue, type) are kept there, further ones are kept together, as nodes do it: queues may come and
-- go by the thousand.
-- Index: none, a few hundred rows a node.
with orphaned as materialized (
    select f.node_id, f.metric, f.labels
    from aqd.node_figures f
    where f.node_id <> '' and not exists (select from aqd.nodes n where n.node_id = f.node_id)
    for update skip locked
), gone as (
    delete from aqd.node_figures f using orphaned o
    where f.node_id = o.node_id and f.metric = o.metric and f.labels = o.labels
    returning f.metric, f.labels, f.count, f.total, f.buckets
), kept as materialized (
    select distinct f.labels[1:2] as pair from aqd.node_figures f where f.node_id = '' and f.metric = 'attempts'
), named as (
    select g.metric, g.count, g.total, g.buckets,
           case when g.metric not in ('attempts', 'duration', 'waiting')
                     or (select count(*) from kept) < :pairs_max::bigint
                     or g.labels[1:2] in (select k.pair from kept k)
                then g.labels else array['other', 'other'] || g.labels[3:] end as labels
    from gone g
)
insert into aqd.node_figures as f (node_id, metric, labels, count, total, buckets)
select '', g.metric, g.labels, sum(g.count), sum(g.total), aqd.sum_buckets(g.buckets)
from named g
group by g.metric, g.labels
on conflict (node_id, metric, labels) do update
set count = f.count + excluded.count, total = f.total + excluded.total,
    buckets = aqd.add_buckets(f.buckets, excluded.buckets)

-- name: prune_minutes :rows
-- Index: primary key of minutes.
delete from aqd.minutes m where m.minute < now() - interval '70 minutes'

-- name: allow_scans :exec
-- For the transaction: counting all jobs is a scan, which the dispatcher's connections avoid otherwise.
-- Index: none.
select set_config('enable_seqscan', 'on', true), set_config('enable_hashjoin', 'on', true)

-- name: count_jobs :many fresh
-- All live jobs by queue, type and state; of the QUEUED ones how many are due, and for how many seconds the oldest
-- has been (2 M rows: 0.9 s, 0.4 s on two cores).
-- Index: none, a scan of aqd.jobs by one keeper every ten seconds, or every fifty times as long as it takes.
select j.queue, j.type, j.state, count(*),
       count(*) filter (where j.state = 'QUEUED' and j.run_at <= now()),
       date_part('epoch', now() - min(j.run_at) filter (where j.state = 'QUEUED' and j.run_at <= now()))
from aqd.jobs j
group by j.queue, j.type, j.state

-- name: recent_minutes :many
-- The last five whole minutes and the present one, over all nodes, and the seconds since when anything is known of
-- them.
-- Index: primary key of minutes.
select m.metric, m.labels, sum(m.count)::bigint, sum(m.total), aqd.sum_buckets(m.buckets),
       date_part('epoch', now() - (select min(first.minute) from aqd.minutes first
                                   where first.minute >= date_trunc('minute', now()) - interval '5 minutes'))
from aqd.minutes m
where m.minute >= date_trunc('minute', now()) - interval '5 minutes'
group by m.metric, m.labels

-- name: last_hour :many
-- Attempts by queue, type and outcome.
-- Index: primary key of minutes.
select m.labels[1], m.labels[2], m.labels[3], sum(m.count)::bigint
from aqd.minutes m
where m.metric = 'attempts' and m.minute > now() - interval '1 hour'
group by m.labels[1], m.labels[2], m.labels[3]

-- name: table_health :one
-- Dead rows, and for how many seconds the oldest transaction of this database has held back vacuum, and whose it
-- is. Other sessions' moments need pg_read_all_stats.
-- Index: none; statistics only.
select coalesce((select s.n_dead_tup from pg_stat_user_tables s where s.relid = 'aqd.jobs'::regclass), 0),
       oldest.age_s, oldest.what
from (select true) as always
left join lateral (
    select date_part('epoch', clock_timestamp() - a.xact_start) as age_s,
           format('session %s of %s (%s), %s', a.pid, a.usename, a.application_name, a.state) as what
    from pg_stat_activity a
    where a.datname = current_database() and a.pid <> pg_backend_pid() and a.xact_start is not null
      and (a.backend_xmin is not null or a.backend_xid is not null)
      and a.backend_type in ('client backend', 'walsender')
    union all
    select date_part('epoch', clock_timestamp() - p.prepared), format('prepared transaction %s of %s', p.gid, p.owner)
    from pg_prepared_xacts p where p.database = current_database()
    order by 1 desc
    limit 1
) as oldest on true

-- name: store_stats :exec
-- A whole snapshot: what it does not name is gone.
-- Index: primary key of stats.
with given as materialized (
    select g.kind, g.name, g.data from jsonb_to_recordset(:rows::jsonb) as g(kind text, name text, data jsonb)
    order by g.kind, g.name
), gone as (
    delete from aqd.stats s where not exists (select from given g where g.kind = s.kind and g.name = s.name)
)
insert into aqd.stats as s (kind, name, at, data)
select g.kind, g.name, now(), g.data from given g
on conflict (kind, name) do update set at = now(), data = excluded.data

-- name: list_queues :many
-- By name. A queue is known if it has had jobs lately, or settings.
-- Index: primary keys of stats and queues.
select coalesce(s.name, q.queue) as name, coalesce(q.paused, false), q.max_running, q.changed_at, q.changed_by,
       s.at, s.data::text
from (select * from aqd.stats where kind = 'queue') as s
full join aqd.queues q on q.queue = s.name
where coalesce(s.name, q.queue) > :after::text collate "C"
  and (:name::text is null or coalesce(s.name, q.queue) = :name::text)
order by 1
limit :limit::bigint

-- name: list_types :many
-- By name. A type is known if it has had jobs lately, or if a node has ever declared it; "nodes" serve it now.
-- Index: primary keys of stats and handlers.
select coalesce(s.name, h.type) as name, h.queue, h.max_attempts,
       (select count(*) from aqd.nodes n
        where coalesce(s.name, h.type) = any(n.types)
          and n.seen_at > now() - :node_ttl_s::double precision * interval '1 second'),
       s.at, s.data::text
from (select * from aqd.stats where kind = 'type') as s
full join aqd.handlers h on h.type = s.name
where coalesce(s.name, h.type) > :after::text collate "C"
  and (:name::text is null or coalesce(s.name, h.type) = :name::text)
order by 1
limit :limit::bigint

-- name: list_nodes :many
-- Index: none, a handful of rows.
select n.node_id, n.name, n.pid, n.version, n.generation, n.slots, n.types, n.state, n.started_at, n.seen_at,
       n.seen_at > now() - :node_ttl_s::double precision * interval '1 second', n.info::text
from aqd.nodes n
order by n.name, n.node_id

-- name: sum_figures :many
-- What all nodes have counted since the beginning.
-- Index: none, a few hundred rows a node.
select f.metric, f.labels, sum(f.count)::bigint, sum(f.total), aqd.sum_buckets(f.buckets)
from aqd.node_figures f
group by f.metric, f.labels
order by f.metric, f.labels

-- name: busiest_queues :many
-- The queues with most live jobs: a gauge for each of a hundred thousand queues would be nobody's.
-- Index: primary key of stats.
select s.name, s.data::text, date_part('epoch', now() - s.at)
from aqd.stats s
where s.kind = 'queue'
order by (s.data -> 'counts' ->> 'live')::bigint desc, s.name
limit :limit::bigint

-- name: get_stats :many
-- Index: primary key of stats.
select s.name, s.data::text, date_part('epoch', now() - s.at) from aqd.stats s where s.kind = :kind::text
