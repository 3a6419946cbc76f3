-- aqd: online
--
-- Cancelling, progress, machine-readable reasons and kept output.
--
-- Online, because a node of the version before needs to know nothing of it. Its statements name their
-- columns, and the one thing that they would do wrong is mended here: they turn a job that failed, was
-- given back or lost its lease into QUEUED (or FAILED) without looking at cancel_requested_at. The trigger
-- jobs_cancelled makes that CANCELLED at the end of the very statement, whoever wrote it, so that no row
-- outside of PROCESSING ever carries the request and no claim, of either version, can run the job again. What an
-- older node cannot do is end a *running* job because it was asked to; it runs to its end.
-- Columns without a default are catalogue entries only: the tables are locked for a moment, not rewritten, and
-- the partitions of job_history follow their parent.

alter table aqd.jobs
    add column cancel_requested_at timestamptz,  -- only while PROCESSING
    add column progress_at         timestamptz,
    add column progress_percent    real,
    add column progress_message    text;

alter table aqd.job_history
    add column cancel_requested_at timestamptz,
    add column output              text;         -- of a completed attempt whose handler keeps it

-- One of aqd.outcomes.REASONS; kind says what counts, reason what happened.
alter table aqd.job_attempts add column reason text collate "C";
alter table aqd.failed_jobs add column reason text collate "C";

-- Ends a job that was asked to end and is not running any more: out of jobs, into job_history. The figures
-- are those of the attempt that the same statement has written down, if any: an AFTER trigger sees all that
-- its statement did, in every WITH branch. With its owner's rights, so that a role that may ask a job to end
-- (update of cancel_requested_at) needs no right to delete jobs or to write history and records.
create function aqd.end_cancelled() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    -- Otherwise missing only where no daemon has run for a week.
    if to_regclass('aqd.job_history_' || to_char(now() at time zone 'UTC', 'YYYYMMDD')) is null then
        perform aqd.create_history_partition((now() at time zone 'UTC')::date);
    end if;
    delete from aqd.jobs j where j.id = new.id;
    insert into aqd.job_history (
        id, finished_at, run_at, created_at, claimed_at, lease_token, timeout_s, wall_s, cpu_s, peak_kb,
        max_attempts, attempt, crashes, interruptions, retries, priority, state, type, queue, node_id,
        payload, result, cancel_requested_at, output)
    select new.id, now(), new.run_at, new.created_at, old.claimed_at, old.lease_token, new.timeout_s, a.wall_s,
           a.cpu_s, a.peak_kb, new.max_attempts, new.attempt, new.crashes, new.interruptions, new.retries,
           new.priority, 'CANCELLED', new.type, new.queue, old.node_id, new.payload, null,
           new.cancel_requested_at, null
    from (select) as always
    left join aqd.job_attempts a on a.job_id = new.id and a.lease_token = old.lease_token;
    update aqd.failed_jobs f
    set resolved_at = now(), resolution = 'cancelled'
    where f.job_id = new.id and f.resolved_at is null;
    return null;
end
$$;

-- Or anybody could make it the trigger of a table of his own, and with its owner's rights remove our jobs and write
-- history. Whoever fires a trigger needs no right to its function.
revoke execute on function aqd.end_cancelled() from public;

-- Only statements that name one of the two columns look at the condition (a renewal does not).
create trigger jobs_cancelled
    after update of state, cancel_requested_at on aqd.jobs
    for each row
    when (new.cancel_requested_at is not null and new.state <> 'PROCESSING')
    execute function aqd.end_cancelled();

-- Cancels a job inside the caller's transaction and returns its state afterwards; null: there is no such
-- job. CANCELLED: it will not run (again). PROCESSING: whoever runs it was told to end it; it will be
-- CANCELLED, or COMPLETED if it gets done before. COMPLETED, FAILED: it had ended, nothing is changed.
-- Repeating it is harmless, and tells the node once more.
-- The row is locked before it is looked at, so whatever races with it comes wholly before or wholly after.
-- Rows only ever move from jobs to job_history, so looking in that order misses none. In a transaction at
-- REPEATABLE READ a job that changed meanwhile is an error, 40001, as for any other change.
create function aqd.cancel(job_id bigint) returns text
language plpgsql as $$
declare
    job record;
begin
    select j.state, j.node_id, j.cancel_requested_at into job
    from aqd.jobs j where j.id = cancel.job_id
    for no key update;
    if not found then
        return (select h.state from aqd.job_history h where h.id = cancel.job_id limit 1);
    end if;
    if job.state = 'FAILED' then
        return job.state;
    end if;
    if job.cancel_requested_at is null then
        update aqd.jobs j set cancel_requested_at = now() where j.id = cancel.job_id;
    end if;
    if job.state = 'QUEUED' then
        return 'CANCELLED';  -- by the trigger
    end if;
    if coalesce(current_setting('aqd.notify', true), '') not in ('off', 'false', '0', 'no') then
        perform pg_notify('aqd_cancel', job.node_id);
    end if;
    return job.state;
end
$$;

create or replace view aqd.all_jobs as
    select id, state, type, queue, priority, payload, null::jsonb as result, attempt, max_attempts,
           timeout_s, run_at, created_at, claimed_at, null::timestamptz as finished_at, last_error,
           node_id, crashes, interruptions, retries,
           null::double precision as wall_s, null::double precision as cpu_s, null::bigint as peak_kb,
           cancel_requested_at, progress_percent, progress_message, null::text as output
    from aqd.jobs
    union all
    select id, state, type, queue, priority, payload, result, attempt, max_attempts,
           timeout_s, run_at, created_at, claimed_at, finished_at, null::text,
           node_id, crashes, interruptions, retries, wall_s, cpu_s, peak_kb,
           cancel_requested_at, null::real, null::text, output
    from aqd.job_history;
