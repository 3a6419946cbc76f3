-- aqd: online
--
-- What applications need: tags and meta, idempotency keys, waiting, limits of queues, looking.
--
-- Online: a node of the version before names its columns and calls aqd.enqueue by position, so it goes on. What it
-- does not know it does not do: a job that it completes loses its tags and meta on the way to history, it does not
-- keep a queue's limit, it tells nobody who waits (they look themselves every few seconds) and shows no figures.
-- New columns are null without a default: catalogue only. Who waits, with 1 M live jobs and 800,000 records of failures:
-- everybody who writes jobs (enqueue, claim, record) for 1.2 s, while indexes on aqd.jobs and aqd.failed_jobs are built;
-- those who read (the API, the figures) for the last 0.3 s of it. Both grow with the tables. What needs no lock
-- on a table in use comes before. A role of an application's keeps its right to call aqd.enqueue; a view or a
-- function (begin atomic) of an application's that depends on it must be dropped and made again.

-- --- idempotency keys

-- Which job a key stands for, and what was asked for under it. A key is free again when it has expired, whether or
-- not its row is still there; the keeper only cleans.
create table aqd.idempotency_keys (
    scope      text collate "C" not null,  -- the API key's name; '' for SQL and for requests without one
    key        text collate "C" not null,
    job_id     bigint not null,
    expires_at timestamptz not null,
    request    jsonb not null,             -- as asked for, the payload as its digest
    primary key (scope, key)
);
create index idempotency_keys_expires_at on aqd.idempotency_keys (expires_at);

-- Whether a value is at most so many bytes long as PostgreSQL writes it out, which is how jobs are handed out.
-- What is stored says nothing about that: 1e130000 takes 16 bytes and is written with 130,001 digits, and a text of
-- more than 1 GB cannot be written at all: every claim that met such a job would fail.
create function aqd.fits(value jsonb, most bigint) returns boolean
language plpgsql immutable as $$
begin
    return octet_length(value::text) <= most;
exception when program_limit_exceeded then
    return false;
end
$$;

-- The value itself if it fits, as aqd.fits; otherwise refused as by aqd.enqueue, in the name of "field".
create function aqd.fitting(field text, value jsonb, most bigint) returns jsonb
language plpgsql immutable as $$
begin
    if value is null or aqd.fits(value, most) then
        return value;
    end if;
    raise exception using
        errcode = '22023',
        message = format('aqd.enqueue: %s must not be longer than %s bytes as PostgreSQL writes it', field, most),
        detail = format('must not be longer than %s bytes as PostgreSQL writes it', most),
        column = field;
end
$$;

-- Locks the keys in their order, and then what is QUEUED behind them in the order of ids, which is that of everybody
-- who changes many jobs: for a batch that replaces (its jobs in the order of the keys would deadlock with those).
-- A key that is free is taken by a row that has expired; aqd.enqueue_keyed makes it the real one. Returns how many
-- jobs are locked.
create function aqd.hold_keys(key_scope text, keys text[]) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
    held bigint;
begin
    insert into aqd.idempotency_keys as k (scope, key, job_id, expires_at, request)
    select key_scope, u.key, 0, '-infinity', 'null'
    from (select distinct u.key collate "C" as key from unnest(hold_keys.keys) as u(key) order by 1) as u
    on conflict on constraint idempotency_keys_pkey do update set job_id = k.job_id where false;
    select count(l.id) into held
    from (select k.job_id
          from aqd.idempotency_keys k
          where k.scope = key_scope and k.key = any(hold_keys.keys) and k.expires_at > now()
          order by k.job_id) as i
    cross join lateral (
        select j.id from aqd.jobs j where j.id = i.job_id and j.state = 'QUEUED' for no key update
    ) as l;
    return held;
end
$$;

-- Submits under a key, once. For checked values: whoever is not aqd calls aqd.enqueue.
--
-- The upsert does it all: of many callers one inserts, and the others wait for its transaction. If that rolls
-- back, the next of them inserts. DO UPDATE locks the row even where its condition is false, so what is read
-- afterwards cannot change or go until this transaction ends. (100 waiters behind a winner that was held for 2 s
-- and rolled back: one job, one id, no errors.) At REPEATABLE READ a caller that comes second gets 40001.
--
-- outcome: created; existing (the same request); conflict (another request: "differs" names the fields);
-- rejected (on_conflict = 'reject'); replaced (on_conflict = 'replace' and the job was still QUEUED). With
-- 'replace' a job that has begun is not touched: it may not see what the new request brings, so a new job is
-- made and the key stands for that one from then on. state, due_at, made_at and goes_to are the job's as it is now;
-- null where it has been deleted.
create function aqd.enqueue_keyed(
    type                  text,
    payload               jsonb,
    queue                 text,
    priority              integer,
    run_at                timestamptz,
    delay_s               double precision,
    max_attempts          integer,
    timeout_s             double precision,
    tags                  text[],
    meta                  jsonb,
    idempotency_key       text,
    on_conflict           text,
    idempotency_ttl_hours double precision,
    key_scope             text,
    out id                bigint,
    out outcome           text,
    out differs           text[],
    out state             text,
    out due_at            timestamptz,
    out made_at           timestamptz,
    out goes_to           text
)
language plpgsql as $$
declare
    asked   constant jsonb := jsonb_build_object(
        'type', type, 'payload', encode(sha256(convert_to(payload::text, 'UTF8')), 'hex'), 'queue', queue,
        'priority', priority, 'run_at', date_part('epoch', run_at), 'delay_s', delay_s,
        'max_attempts', max_attempts, 'timeout_s', timeout_s, 'tags', to_jsonb(tags), 'meta', meta);
    new_id  constant bigint := nextval('aqd.jobs_id_seq');
    until   constant timestamptz := now() + idempotency_ttl_hours * interval '1 hour';
    held    record;
begin
    due_at := greatest(coalesce(run_at, now() + delay_s * interval '1 second'), now());
    goes_to := coalesce(queue, (select h.queue from aqd.handlers h where h.type = enqueue_keyed.type), 'default');
    insert into aqd.idempotency_keys as k (scope, key, job_id, expires_at, request)
    values (key_scope, idempotency_key, new_id, until, asked)
    on conflict on constraint idempotency_keys_pkey do update
    set job_id = excluded.job_id, expires_at = excluded.expires_at, request = excluded.request
    where k.expires_at <= now()
    returning k.job_id into id;

    if found then
        outcome := 'created';
    else
        select k.job_id, k.request into held
        from aqd.idempotency_keys k
        where k.scope = key_scope and k.key = idempotency_key;
        id := held.job_id;
        if enqueue_keyed.on_conflict = 'reject' then
            outcome := 'rejected';
        elsif enqueue_keyed.on_conflict = 'replace' then
            update aqd.jobs j
            set type = enqueue_keyed.type, payload = enqueue_keyed.payload, queue = goes_to,
                priority = enqueue_keyed.priority::smallint, run_at = due_at,
                max_attempts = enqueue_keyed.max_attempts, timeout_s = enqueue_keyed.timeout_s,
                tags = enqueue_keyed.tags, meta = enqueue_keyed.meta,
                attempt = 0, crashes = 0, interruptions = 0, last_error = null
            where j.id = held.job_id and j.state = 'QUEUED'
            returning j.created_at into made_at;
            if found then
                outcome := 'replaced';
            else
                id := new_id;
                outcome := 'created';
            end if;
            update aqd.idempotency_keys k
            set job_id = enqueue_keyed.id, expires_at = until, request = asked
            where k.scope = key_scope and k.key = idempotency_key;
        elsif held.request = asked then
            outcome := 'existing';
        else
            outcome := 'conflict';
            differs := array(select n.key from jsonb_each(asked) n
                             where n.value is distinct from held.request -> n.key order by n.key);
        end if;
    end if;

    if outcome = 'created' then
        insert into aqd.jobs (id, type, payload, queue, priority, run_at, max_attempts, timeout_s, tags, meta)
        values (enqueue_keyed.id, enqueue_keyed.type, enqueue_keyed.payload, goes_to,
                enqueue_keyed.priority::smallint, due_at, enqueue_keyed.max_attempts, enqueue_keyed.timeout_s,
                enqueue_keyed.tags, enqueue_keyed.meta)
        returning created_at into made_at;
    end if;
    if outcome in ('created', 'replaced') then
        state := 'QUEUED';
        if due_at <= now() then
            perform aqd.wake();
        end if;
    else
        select j.state, j.run_at, j.created_at, j.queue into state, due_at, made_at, goes_to
        from aqd.jobs j where j.id = enqueue_keyed.id;
        if not found then
            select j.state, j.run_at, j.created_at, j.queue into state, due_at, made_at, goes_to
            from aqd.all_jobs j where j.id = enqueue_keyed.id;
        end if;
    end if;
end
$$;

-- Submits a job inside the caller's transaction and returns its id. Meant for any language:
--     select aqd.enqueue('send_mail', '{"to": 1}', queue => 'mail', delay_s => 30, tags => '{"customer:7"}')
-- run_at in the past means now. Not both run_at and delay_s. Refuses with SQLSTATE 22023, the
-- argument's name as the error's column. With an idempotency_key (see aqd.enqueue_keyed) it returns the first
-- job's id again; another request under the same key, and any with on_conflict => 'reject', is refused with
-- SQLSTATE 23505. plpgsql, because a SQL function is planned again at each call (4,600 against 3,600 calls/s).
--
-- Replaces the function of 0001, which a second one with more arguments would make ambiguous. Processor time of a
-- call without key, tags and meta, beside that one's (a transaction each, 40 rounds of 300 in turn): 0.57 without a
-- queue, because aqd.queue_of is planned anew in each transaction and a subquery is not; 1.00 with queue, priority
-- and delay_s. With a key 2.5 times as much.
-- Who may call it is kept.
do $$
begin
    perform set_config('aqd.enqueue_acl', coalesce(p.proacl::text, ''), true)
    from pg_proc p
    where p.oid = 'aqd.enqueue(text, jsonb, text, integer, timestamptz, double precision, integer,
                               double precision)'::regprocedure;
    drop function aqd.enqueue(text, jsonb, text, integer, timestamptz, double precision, integer, double precision);
end
$$;

create function aqd.enqueue(
    type                  text,
    payload               jsonb            default '{}',
    queue                 text             default null,
    priority              integer          default 0,
    run_at                timestamptz      default null,
    delay_s               double precision default null,
    max_attempts          integer          default null,
    timeout_s             double precision default null,
    idempotency_key       text             default null,
    on_conflict           text             default 'return',
    tags                  text[]           default null,
    meta                  jsonb            default null,
    idempotency_ttl_hours double precision default 24,
    key_scope             text             default ''
) returns bigint
language plpgsql as $$
declare
    field  text;
    reason text;
    due_at timestamptz;
    new_id bigint;
    made   record;
begin
    if enqueue.type is null or enqueue.type !~ '^[A-Za-z0-9_.:/-]{1,128}$' then
        field := 'type';
        reason := 'must be 1..128 characters of A-Z a-z 0-9 _ . : / -';
    -- Nothing grows more than 9,216 times when it is written (a number of 16 bytes has at most 131,072 digits before
    -- its point and 16,383 after it), so 7,000 bytes that are not compressed always fit. More are written out for
    -- it: 180 us for 100 kB, where the whole call takes 490.
    elsif ((pg_column_size(enqueue.payload) <= 7000 and pg_column_compression(enqueue.payload) is null)
           or aqd.fits(enqueue.payload, 67108864)) is not true then
        field := 'payload';
        reason := case when enqueue.payload is null then 'must not be the SQL null; the JSON null is ''null''::jsonb'
                       else 'must not be larger than 64 MiB as PostgreSQL writes it' end;
    elsif enqueue.queue !~ '^[A-Za-z0-9_.:/-]{1,128}$' then
        field := 'queue';
        reason := 'must be 1..128 characters of A-Z a-z 0-9 _ . : / -';
    elsif enqueue.priority is null or enqueue.priority not between -100 and 100 then
        field := 'priority';
        reason := 'must be between -100 and 100';
    end if;
    -- Each test costs 0.5 us, so what most calls do not give is tested together first.
    if num_nonnulls(enqueue.run_at, enqueue.delay_s, enqueue.max_attempts, enqueue.timeout_s) > 0 then
        if enqueue.run_at is not null and enqueue.delay_s is not null then
            field := 'delay_s';
            reason := 'must not be given together with run_at';
        elsif enqueue.run_at < '1970-01-01 00:00:00+00' or enqueue.run_at > '9998-12-31 00:00:00+00' then
            field := 'run_at';
            reason := 'must be between 1970-01-01 and 9998-12-31';
        elsif enqueue.delay_s not between 0 and 316224000 then
            field := 'delay_s';
            reason := 'must be between 0 and 316224000 seconds';
        elsif enqueue.max_attempts not between 1 and 1000 then
            field := 'max_attempts';
            reason := 'must be between 1 and 1000';
        elsif enqueue.timeout_s not between 0.1 and 2592000 then
            field := 'timeout_s';
            reason := 'must be between 0.1 and 2592000 seconds';
        end if;
    end if;
    if (enqueue.tags is null and enqueue.meta is null and enqueue.idempotency_key is null
           and enqueue.on_conflict = 'return' and enqueue.idempotency_ttl_hours = 24 and enqueue.key_scope = ''
          ) is not true then
        if enqueue.tags is not null and (
                cardinality(enqueue.tags) > 32
                or array_ndims(enqueue.tags) > 1
                or exists (select from unnest(enqueue.tags) t where t is null or t !~ '^[A-Za-z0-9_.:/-]{1,128}$')
                or cardinality(enqueue.tags) > (select count(distinct t) from unnest(enqueue.tags) t)) then
            field := 'tags';
            reason := 'must be at most 32 different tags, each 1..128 characters of A-Z a-z 0-9 _ . : / -';
        elsif enqueue.meta is not null
                and (jsonb_typeof(enqueue.meta) <> 'object' or not aqd.fits(enqueue.meta, 65536)) then
            field := 'meta';
            reason := 'must be a JSON object of at most 65536 bytes as PostgreSQL writes it';
        elsif enqueue.idempotency_key !~ '^[!-~]([ -~]{0,253}[!-~])?$' then
            field := 'idempotency_key';
            reason := 'must be 1..255 visible ASCII characters, with spaces only between them';
        elsif enqueue.on_conflict is null or enqueue.on_conflict not in ('return', 'replace', 'reject') then
            field := 'on_conflict';
            reason := 'must be return, replace or reject';
        elsif enqueue.on_conflict <> 'return' and enqueue.idempotency_key is null then
            field := 'on_conflict';
            reason := 'must not be given without an idempotency_key';
        elsif enqueue.idempotency_ttl_hours is null or enqueue.idempotency_ttl_hours not between 0.01 and 87600 then
            field := 'idempotency_ttl_hours';
            reason := 'must be between 0.01 and 87600';
        elsif enqueue.key_scope is null or length(enqueue.key_scope) > 128 then
            field := 'key_scope';
            reason := 'must be at most 128 characters';
        end if;
        if cardinality(enqueue.tags) = 0 then
            enqueue.tags := null;
        end if;
        if enqueue.meta = '{}' then
            enqueue.meta := null;
        end if;
        if field is null and enqueue.idempotency_key is not null then
            select * into made from aqd.enqueue_keyed(
                enqueue.type, enqueue.payload, enqueue.queue, enqueue.priority, enqueue.run_at, enqueue.delay_s,
                enqueue.max_attempts, enqueue.timeout_s, enqueue.tags, enqueue.meta, enqueue.idempotency_key,
                enqueue.on_conflict, enqueue.idempotency_ttl_hours, enqueue.key_scope);
            if made.outcome in ('conflict', 'rejected') then
                raise exception using
                    errcode = '23505',
                    message = format('aqd.enqueue: the idempotency_key "%s" stands for job %s', enqueue.idempotency_key,
                                     made.id)
                        || case when made.outcome = 'conflict'
                                then ', which was asked for with another ' || array_to_string(made.differs, ', ')
                                else '' end,
                    detail = coalesce(array_to_string(made.differs, ', '), ''),
                    column = 'idempotency_key';
            end if;
            return made.id;
        end if;
    end if;
    if field is not null then
        raise exception using
            errcode = '22023',
            message = format('aqd.enqueue: %s %s', field, reason),
            detail = reason,
            column = field;
    end if;

    if enqueue.queue is null then
        enqueue.queue := coalesce((select h.queue from aqd.handlers h where h.type = enqueue.type), 'default');
    end if;
    due_at := greatest(coalesce(enqueue.run_at, now() + enqueue.delay_s * interval '1 second'), now());
    insert into aqd.jobs (type, payload, queue, priority, run_at, max_attempts, timeout_s, tags, meta)
    values (enqueue.type, enqueue.payload, enqueue.queue, enqueue.priority::smallint, due_at,
            enqueue.max_attempts, enqueue.timeout_s, enqueue.tags, enqueue.meta)
    returning id into new_id;

    -- As aqd.wake(), written out: a nested call costs as much as the rest of the function. A job for
    -- later wakes nobody; whoever sleeps asks for the next due moment before.
    if due_at <= now()
       and (select s.last_value > w.last_value from aqd.sleeps s, aqd.wakes w)
       and coalesce(current_setting('aqd.notify', true), '') not in ('off', 'false', '0', 'no') then
        perform pg_notify('aqd_jobs', '');
    end if;
    return new_id;
end
$$;

do $$
declare
    given record;
begin
    if current_setting('aqd.enqueue_acl') = '' then
        return;
    end if;
    revoke all on function aqd.enqueue from public;
    for given in
        select case when a.grantee = 0 then 'public' else quote_ident(r.rolname) end as grantee,
               case when a.is_grantable then ' with grant option' else '' end as more
        from aclexplode(current_setting('aqd.enqueue_acl')::aclitem[]) a
        left join pg_roles r on r.oid = a.grantee
        where a.grantee = 0 or r.oid is not null
    loop
        execute format('grant execute on function aqd.enqueue to %s%s', given.grantee, given.more);
    end loop;
end
$$;

-- --- waiting for a job to end

-- Until which moment (unix seconds) somebody waits. Whoever waits sets it a little into the future, again and
-- again; whoever ends jobs notifies only until then. A sequence, for the reason given at aqd.sleeps.
create sequence aqd.waits;

-- Tells whoever waits that these jobs have ended, when the transaction commits. Several ids to a notification:
-- NOTIFY takes one lock for the whole server. A payload may have 7,999 bytes.
create function aqd.tell_ended(ids bigint[]) returns void
language plpgsql as $$
begin
    if (select w.last_value from aqd.waits w) <= date_part('epoch', clock_timestamp())
       or coalesce(current_setting('aqd.notify', true), '') in ('off', 'false', '0', 'no') then
        return;
    end if;
    perform pg_notify('aqd_ended', chunk.payload)
    from (select string_agg(i.id::text, ',') as payload
          from unnest(ids) with ordinality as i(id, place)
          group by (i.place - 1) / 350) as chunk;
end
$$;

-- --- queues

-- How many jobs of a queue may be claimed now, at most "wanted", and nobody else may claim any of it until the
-- transaction ends. Locked first, *then* counted: a volatile function's statements each have a snapshot of their own, so
-- the count sees what others claimed while this one waited for the lock. (Counted before the wait, 50 ran at
-- a limit of 20.) Other claims hold the lock for milliseconds. Whoever holds it for longer (a transaction by hand
-- that has changed the queue) must not hold up the claims of other queues on the same connection: there is no room
-- then.
-- Counts in jobs_running, in which the jobs of all queues stay that ended after the oldest snapshot began: 15 ms a claim
-- with 100,000 of them, while somebody holds one. An index (queue, id) where state = 'PROCESSING' beside it is not
-- taken reliably (2.5 ms instead of 4.7 with 30,000) and costs every job 75 bytes of WAL more (1,070); instead of it
-- (0.1 ms, 10 bytes) it would leave rescue and pages of PROCESSING jobs, which go by id, to the primary key whenever
-- statistics are old.
create function aqd.queue_room(queue text, wanted bigint) returns bigint
language plpgsql volatile set lock_timeout = '200ms' as $$
declare
    most integer;
begin
    begin
        select q.max_running into most from aqd.queues q where q.queue = queue_room.queue for no key update;
    exception when lock_not_available then
        return 0;
    end;
    if most is null then
        return wanted;
    end if;
    return least(wanted, greatest(0, most - (
        select count(*) from aqd.jobs j where j.state = 'PROCESSING' and j.queue = queue_room.queue)));
end
$$;

-- --- looking

-- What errors of one kind have in common: the first line, numbers as "#", at most 200 characters.
create function aqd.error_line(error text) returns text
language sql immutable parallel safe as $$
    select rtrim(left(regexp_replace(
        split_part(ltrim(left(coalesce(error, ''), 1000), E' \t\r\n'), E'\n', 1),
        '\m(0x[0-9a-f]+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})\M|[0-9]+', '#', 'gi'), 200), E' \t\r')
$$;

-- The same as 16 digits, by which to ask for them; of the line as of the whole error.
create function aqd.error_hash(error text) returns text
language sql immutable parallel safe as $$
    select left(encode(sha256(convert_to(aqd.error_line(error), 'UTF8')), 'hex'), 16)
$$;

-- --- what holds others up
--
-- From here to the end. Jobs first, as everybody who writes them and what goes with them does: the other way round
-- this and a node that records a failure would wait for each other.

-- A page of FAILED jobs, newest first; and the lock that all who write jobs wait for.
create index jobs_failed on aqd.jobs (id) where state = 'FAILED';
-- Open records, newest first, however many settled ones lie between.
create index failed_jobs_open_id on aqd.failed_jobs (id) where resolved_at is null;
-- Deleting a job takes its records with it, also the resolved ones, which failed_jobs_open does not hold. Only
-- failures write here: 5 µs each, of 25 for the whole row.
create index failed_jobs_job_id on aqd.failed_jobs (job_id);

-- Here those who read begin to wait, too.
alter table aqd.jobs
    add column tags text[] collate "C",
    add column meta jsonb;

alter table aqd.job_history
    add column tags text[] collate "C",
    add column meta jsonb;

alter table aqd.queues
    add column max_running integer,  -- jobs that may run at the same time on all nodes together; null: any number
    add column changed_at  timestamptz,
    add column changed_by  text,     -- the API key's name, or what the command line says
    add constraint queues_max_running check (max_running >= 1);

-- Why a failed job was given up, and by whom (the API key's name, or what the command line says).
alter table aqd.failed_jobs
    add column note         text,
    add column discarded_by text;

-- As in 0002, with the two new columns, and whoever waits for the job is told.
create or replace function aqd.end_cancelled() returns trigger
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
        payload, result, cancel_requested_at, output, tags, meta)
    select new.id, now(), new.run_at, new.created_at, old.claimed_at, old.lease_token, new.timeout_s, a.wall_s,
           a.cpu_s, a.peak_kb, new.max_attempts, new.attempt, new.crashes, new.interruptions, new.retries,
           new.priority, 'CANCELLED', new.type, new.queue, old.node_id, new.payload, null,
           new.cancel_requested_at, null, new.tags, new.meta
    from (select) as always
    left join aqd.job_attempts a on a.job_id = new.id and a.lease_token = old.lease_token;
    update aqd.failed_jobs f
    set resolved_at = now(), resolution = 'cancelled'
    where f.job_id = new.id and f.resolved_at is null;
    perform aqd.tell_ended(array[new.id]);
    return null;
end
$$;

create or replace view aqd.all_jobs as
    select id, state, type, queue, priority, payload, null::jsonb as result, attempt, max_attempts,
           timeout_s, run_at, created_at, claimed_at, null::timestamptz as finished_at, last_error,
           node_id, crashes, interruptions, retries,
           null::double precision as wall_s, null::double precision as cpu_s, null::bigint as peak_kb,
           cancel_requested_at, progress_percent, progress_message, null::text as output, tags, meta
    from aqd.jobs
    union all
    select id, state, type, queue, priority, payload, result, attempt, max_attempts,
           timeout_s, run_at, created_at, claimed_at, finished_at, null::text,
           node_id, crashes, interruptions, retries, wall_s, cpu_s, peak_kb,
           cancel_requested_at, null::real, null::text, output, tags, meta
    from aqd.job_history;

-- Jobs by their tag. Those without tags are not in it and pay nothing for it; with two tags, claim and record take a
-- third more (57 and 77 us a job together).
create index jobs_tags on aqd.jobs using gin (tags) where tags is not null;

-- On the parent only, so that no partition is locked; the days to come have it by LIKE. Days that hold no rows get it
-- here. Those that do are not made to wait for it: their jobs have no tags but for the rest of today, which is read
-- without it.
create index job_history_tags on only aqd.job_history using gin (tags) where tags is not null;

do $$
declare
    day  text;
    used boolean;
begin
    for day in
        select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'aqd.job_history'::regclass
    loop
        execute format('select exists (select from aqd.%I)', day) into used;
        if not used then
            execute format('create index %I on aqd.%I using gin (tags) where tags is not null',
                           day || '_tags_idx', day);
            execute format('alter index aqd.job_history_tags attach partition aqd.%I', day || '_tags_idx');
        end if;
    end loop;
end
$$;

-- The jobs, live and finished, for which all that is not null holds. The one meaning of a filter, for pages, counts and
-- changes of many. "_after" is inclusive, "_before" exclusive; error: is contained in the last error, whatever the
-- case. history_after and history_before bound the finished jobs among them and leave live ones alone:
-- a caller that knows that it wants no finished ones says history_after => 'infinity', and no partition is opened.
--
-- A SQL function of one SELECT, neither strict nor with settings, so that the planner puts it into the statement that
-- calls it: conditions on null vanish, days out of range are pruned, ORDER BY id LIMIT reads the keys in order. Only
-- in a statement that is planned with its values ("fresh" in sql/), or written with constants.
create function aqd.find_jobs(
    states          text[]      default null,
    type            text        default null,
    queue           text        default null,
    tag             text        default null,
    created_after   timestamptz default null,
    created_before  timestamptz default null,
    finished_after  timestamptz default null,
    finished_before timestamptz default null,
    error           text        default null,
    error_hash      text        default null,
    ids             bigint[]    default null,
    history_after   timestamptz default null,
    history_before  timestamptz default null
) returns setof aqd.all_jobs
language sql stable as $$
    select a.*
    from aqd.all_jobs a
    where (find_jobs.states is null or a.state = any(find_jobs.states))
      and (find_jobs.type is null or a.type = find_jobs.type)
      and (find_jobs.queue is null or a.queue = find_jobs.queue)
      and (find_jobs.tag is null or a.tags @> array[find_jobs.tag])
      and (find_jobs.created_after is null or a.created_at >= find_jobs.created_after)
      and (find_jobs.created_before is null or a.created_at < find_jobs.created_before)
      and (find_jobs.finished_after is null or a.finished_at >= find_jobs.finished_after)
      and (find_jobs.finished_before is null or a.finished_at < find_jobs.finished_before)
      and (find_jobs.error is null or strpos(lower(a.last_error), lower(find_jobs.error)) > 0)
      and (find_jobs.error_hash is null
           or ((a.last_error is not null or a.state = 'FAILED')
               and aqd.error_hash(a.last_error) = find_jobs.error_hash))
      and (find_jobs.ids is null or a.id = any(find_jobs.ids))
      and (find_jobs.history_after is null or a.finished_at is null or a.finished_at >= find_jobs.history_after)
      and (find_jobs.history_before is null or a.finished_at is null or a.finished_at < find_jobs.history_before)
$$;
