-- aqd: online
--
-- Changing many jobs by hand; figures. New functions and tables, and one column: some milliseconds.
--
-- Online: a node of the version before does not say what it is doing and counts nothing. That is shown as unknown.

-- --- changing by hand

-- Puts those of the jobs that are FAILED back into the queue as if new, and returns their ids; attempts and the failure's
-- record stay. Meant for any language, as aqd.cancel:
--     select aqd.retry_jobs('{4711}')
--     select aqd.retry_jobs(array(select id from aqd.find_jobs(states => '{FAILED}', type => 'send_mail')))
-- Locked in id order before anything is changed, so that it deadlocks with nobody; of many simultaneous callers one
-- changes a row, the others find it QUEUED. Without enable_seqscan = off 500 ids out of 100,000 are looked for
-- by reading them all (30 ms instead of 2).
create function aqd.retry_jobs(ids bigint[]) returns setof bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
    held constant bigint[] := array(
        select l.id
        from (select u.id from unnest(retry_jobs.ids) as u(id) order by u.id) as i
        cross join lateral (
            select j.id from aqd.jobs j where j.id = i.id and j.state = 'FAILED' for no key update
        ) as l);
begin
    update aqd.jobs j
    set state = 'QUEUED', run_at = now(), attempt = 0, crashes = 0, interruptions = 0, last_error = null,
        claimed_at = null, retries = j.retries + 1, cancel_requested_at = null,
        progress_at = null, progress_percent = null, progress_message = null
    where j.id = any(held);
    update aqd.failed_jobs f set retried_at = now() where f.job_id = any(held) and f.resolved_at is null;
    if cardinality(held) > 0 then
        perform aqd.wake();
    end if;
    return query select h.id from unnest(held) as h(id);
end
$$;

-- Deletes those of the jobs that are QUEUED or FAILED, with their attempts and records, and returns their ids. Each
-- statement of a volatile function has a snapshot of its own. That matters: a job that was QUEUED when one
-- statement for all of it began may be FAILED once it is locked, and its record was not there when it began: it would
-- stay open for ever. Whoever waits for one of the jobs is told.
create function aqd.delete_jobs(ids bigint[]) returns setof bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
    held constant bigint[] := array(
        select l.id
        from (select u.id from unnest(delete_jobs.ids) as u(id) order by u.id) as i
        cross join lateral (
            select j.id from aqd.jobs j where j.id = i.id and j.state in ('QUEUED', 'FAILED') for update
        ) as l);
begin
    delete from aqd.jobs j where j.id = any(held);
    delete from aqd.job_attempts a where a.job_id = any(held);
    delete from aqd.failed_jobs f where f.job_id = any(held);
    perform aqd.tell_ended(held);
    return query select h.id from unnest(held) as h(id);
end
$$;

-- --- figures

-- What nodes have counted since they were first started, by what it is (aqd/figures.py says which labels each metric
-- has) and by node, so that no two nodes wait for each other. Nodes add differences every few seconds. The rows of
-- nodes that are gone are added to those of node '' by the keeper: sums over all nodes never go down.
create table aqd.node_figures (
    node_id text not null,
    metric  text collate "C" not null,
    labels  text[] collate "C" not null,
    count   bigint not null,
    total   double precision not null,
    buckets bigint[] not null,
    primary key (node_id, metric, labels)
) with (fillfactor = 50);

-- The same by minute, for the last hour.
create table aqd.minutes (
    minute  timestamptz not null,
    node_id text not null,
    metric  text collate "C" not null,
    labels  text[] collate "C" not null,
    count   bigint not null,
    total   double precision not null,
    buckets bigint[] not null,
    primary key (minute, node_id, metric, labels)
) with (fillfactor = 50);

-- What the keeper has found out about each queue and type ("queue", "type"), and about the database ("table"), so
-- that nobody counts jobs to answer a request (2 M live jobs: 1 s).
create table aqd.stats (
    kind text collate "C" not null,
    name text collate "C" not null,
    at   timestamptz not null,
    data jsonb not null,
    primary key (kind, name)
) with (fillfactor = 50);

-- Adds histograms place by place; versions may differ in how many places they have.
create function aqd.add_buckets(one bigint[], other bigint[]) returns bigint[]
language sql immutable parallel safe as $$
    select coalesce(array_agg(coalesce(u.a, 0) + coalesce(u.b, 0) order by u.place), '{}')
    from unnest(one, other) with ordinality as u(a, b, place)
$$;

create aggregate aqd.sum_buckets(bigint[]) (
    sfunc = aqd.add_buckets, stype = bigint[], combinefunc = aqd.add_buckets, initcond = '{}', parallel = safe
);

-- What a node says of itself beside what claims depend on: busy slots, plugins.
alter table aqd.nodes add column info jsonb;
