-- aqd: online
--
-- Rights: roles of their own for daemons, the API, applications and whoever migrates.
--
-- Online: the version before goes on, and who could submit before can submit afterwards. Catalogue entries only; no
-- table in use is locked. Roles belong to the whole server and not every owner may make them, so none is made here:
-- "aqd db roles" does that, and without it everything goes on under one user.

-- --- submitting without a right to any table

-- The bounds of a job as one condition (null: no), which the planner puts into what calls it; tags would keep it from
-- that. A class of characters and a length: as one pattern with {1,128} a name costs 9 us instead of 0.5.
create function aqd.is_job(
    type text, payload_given boolean, queue text, priority integer, run_at timestamptz, delay_s double precision,
    max_attempts integer, timeout_s double precision, meta jsonb
) returns boolean
language sql immutable parallel safe as $$
    select length(type) between 1 and 128 and type !~ '[^A-Za-z0-9_.:/-]'
       and payload_given and priority between -100 and 100
       and (queue is null or length(queue) between 1 and 128 and queue !~ '[^A-Za-z0-9_.:/-]')
       and (run_at is null or delay_s is null
                              and run_at between '1970-01-01 00:00:00+00' and '9998-12-31 00:00:00+00')
       and (delay_s is null or delay_s between 0 and 316224000)
       and (max_attempts is null or max_attempts between 1 and 1000)
       and (timeout_s is null or timeout_s between 0.1 and 2592000)
       and (meta is null or jsonb_typeof(meta) = 'object')
$$;

create function aqd.are_tags(tags text[]) returns boolean
language sql immutable parallel safe as $$
    select coalesce(array_ndims(tags), 1) = 1 and count(*) <= 32 and count(distinct t) = count(*)
       and coalesce(bool_and(length(t) between 1 and 128 and t !~ '[^A-Za-z0-9_.:/-]'), true)
    from unnest(tags) as t
$$;

-- Refuses a request that is not as it should be, as aqd.enqueue does and in its words.
create function aqd.refuse_job(
    type text, payload_given boolean, queue text, priority integer, run_at timestamptz, delay_s double precision,
    max_attempts integer, timeout_s double precision, tags text[]
) returns void
language plpgsql immutable as $$
declare
    field  text := 'meta';
    reason text := 'must be a JSON object of at most 65536 bytes as PostgreSQL writes it';
begin
    if (length(type) between 1 and 128 and type !~ '[^A-Za-z0-9_.:/-]') is not true then
        field := 'type';
        reason := 'must be 1..128 characters of A-Z a-z 0-9 _ . : / -';
    elsif payload_given is not true then
        field := 'payload';
        reason := 'must not be the SQL null; the JSON null is ''null''::jsonb';
    elsif not (length(queue) between 1 and 128 and queue !~ '[^A-Za-z0-9_.:/-]') then
        field := 'queue';
        reason := 'must be 1..128 characters of A-Z a-z 0-9 _ . : / -';
    elsif (priority between -100 and 100) is not true then
        field := 'priority';
        reason := 'must be between -100 and 100';
    elsif num_nonnulls(run_at, delay_s) = 2 then
        field := 'delay_s';
        reason := 'must not be given together with run_at';
    elsif run_at not between '1970-01-01 00:00:00+00' and '9998-12-31 00:00:00+00' then
        field := 'run_at';
        reason := 'must be between 1970-01-01 and 9998-12-31';
    elsif delay_s not between 0 and 316224000 then
        field := 'delay_s';
        reason := 'must be between 0 and 316224000 seconds';
    elsif max_attempts not between 1 and 1000 then
        field := 'max_attempts';
        reason := 'must be between 1 and 1000';
    elsif timeout_s not between 0.1 and 2592000 then
        field := 'timeout_s';
        reason := 'must be between 0.1 and 2592000 seconds';
    elsif not aqd.are_tags(tags) then
        field := 'tags';
        reason := 'must be at most 32 different tags, each 1..128 characters of A-Z a-z 0-9 _ . : / -';
    end if;
    raise exception using
        errcode = '22023',
        message = format('aqd.enqueue: %s %s', field, reason),
        detail = reason,
        column = field;
end
$$;

-- The same for what goes with a key, if anything is wrong with it.
create function aqd.refuse_key(
    idempotency_key text, on_conflict text, idempotency_ttl_hours double precision, key_scope text
) returns void
language plpgsql immutable as $$
declare
    field  text;
    reason text;
begin
    if (idempotency_key ~ '^[!-~]([ -~]*[!-~])?$' and length(idempotency_key) <= 255) is not true then
        field := 'idempotency_key';
        reason := 'must be 1..255 visible ASCII characters, with spaces only between them';
    elsif (on_conflict in ('return', 'replace', 'reject')) is not true then
        field := 'on_conflict';
        reason := 'must be return, replace or reject';
    elsif (idempotency_ttl_hours between 0.01 and 87600) is not true then
        field := 'idempotency_ttl_hours';
        reason := 'must be between 0.01 and 87600';
    elsif (length(key_scope) <= 128) is not true then
        field := 'key_scope';
        reason := 'must be at most 128 characters';
    else
        return;
    end if;
    raise exception using
        errcode = '22023',
        message = format('aqd.enqueue: %s %s', field, reason),
        detail = reason,
        column = field;
end
$$;

-- As in 0003, with its owner's rights: who may call it needs no others, and can do nothing with the tables but this. The
-- path is pinned, or the names in it would mean what the caller's path says. That costs 15 us of 207 a call in a transaction
-- of its own; the cheaper patterns (aqd.is_job) bring them back.
create or replace function aqd.enqueue(
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
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    field  text;
    reason text;
    due_at timestamptz;
    new_id bigint;
    made   record;
begin
    if aqd.is_job(enqueue.type, true, enqueue.queue, enqueue.priority, enqueue.run_at, enqueue.delay_s,
                  enqueue.max_attempts, enqueue.timeout_s, null) is not true then
        perform aqd.refuse_job(enqueue.type, true, enqueue.queue, enqueue.priority, enqueue.run_at, enqueue.delay_s,
                               enqueue.max_attempts, enqueue.timeout_s, null);
    -- Nothing grows more than 9,216 times when it is written (a number of 16 bytes has at most 131,072 digits before
    -- its point and 16,383 after it), so 7,000 bytes that are not compressed always fit. More are written out for
    -- it: 180 us for 100 kB, where the whole call takes 490.
    elsif ((pg_column_size(enqueue.payload) <= 7000 and pg_column_compression(enqueue.payload) is null)
           or aqd.fits(enqueue.payload, 67108864)) is not true then
        field := 'payload';
        reason := case when enqueue.payload is null then 'must not be the SQL null; the JSON null is ''null''::jsonb'
                       else 'must not be larger than 64 MiB as PostgreSQL writes it' end;
    -- Each test costs 0.5 us, so what most calls do not give is tested together first.
    elsif (enqueue.tags is null and enqueue.meta is null and enqueue.idempotency_key is null
           and enqueue.on_conflict = 'return' and enqueue.idempotency_ttl_hours = 24 and enqueue.key_scope = ''
          ) is not true then
        if enqueue.tags is not null and not aqd.are_tags(enqueue.tags) then
            field := 'tags';
            reason := 'must be at most 32 different tags, each 1..128 characters of A-Z a-z 0-9 _ . : / -';
        elsif enqueue.meta is not null
                and (jsonb_typeof(enqueue.meta) <> 'object' or not aqd.fits(enqueue.meta, 65536)) then
            field := 'meta';
            reason := 'must be a JSON object of at most 65536 bytes as PostgreSQL writes it';
        elsif enqueue.on_conflict <> 'return' and enqueue.idempotency_key is null then
            field := 'on_conflict';
            reason := 'must not be given without an idempotency_key';
        else
            perform aqd.refuse_key(coalesce(enqueue.idempotency_key, '-'), enqueue.on_conflict,
                                   enqueue.idempotency_ttl_hours, enqueue.key_scope);
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

-- Many requests without keys, in their order, as aqd.enqueue takes one (which costs 152 us a job; this 13). tags and
-- metas are texts, because arrays of arrays are not ragged. How long JSON is as PostgreSQL writes it only PostgreSQL
-- knows; a payload grows at most 2,100 times (0e-16383).
create function aqd.submit_many(
    types text[], payloads text[], queues text[], priorities integer[], run_ats timestamptz[],
    delays_s double precision[], max_attempts integer[], timeouts_s double precision[], tags text[], metas text[]
) returns table (id bigint, state text, run_at timestamptz, created_at timestamptz, queue text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    stored bigint;
begin
    return query
    insert into aqd.jobs as j (type, payload, queue, priority, run_at, max_attempts, timeout_s, tags, meta)
    select g.type,
           case when octet_length(g.payload) <= 30000 then g.payload::jsonb
                else aqd.fitting('payload', g.payload::jsonb, 67108864) end,
           coalesce(g.queue, h.queue, 'default'), g.priority::smallint,
           greatest(coalesce(g.run_at, now() + g.delay_s * interval '1 second'), now()),
           g.max_attempts, g.timeout_s, nullif(g.tags::text[], '{}'),
           nullif(aqd.fitting('meta', g.meta::jsonb, 65536), '{}')
    from unnest(types, payloads, queues, priorities, run_ats, delays_s, submit_many.max_attempts, timeouts_s,
                submit_many.tags, metas)
        with ordinality
        as g(type, payload, queue, priority, run_at, delay_s, max_attempts, timeout_s, tags, meta, place)
    left join aqd.handlers h on h.type = g.type
    where aqd.is_job(g.type, g.payload is not null, g.queue, g.priority, g.run_at, g.delay_s, g.max_attempts,
                     g.timeout_s, g.meta::jsonb)
      and (g.tags is null or aqd.are_tags(g.tags::text[]))
    order by g.place
    returning j.id, j.state, j.run_at, j.created_at, j.queue;
    get diagnostics stored = row_count;
    if stored < cardinality(types) then
        perform aqd.refuse_job(g.type, g.payload is not null, g.queue, g.priority, g.run_at, g.delay_s,
                               g.max_attempts, g.timeout_s, g.tags::text[])
        from unnest(types, payloads, queues, priorities, run_ats, delays_s, submit_many.max_attempts, timeouts_s,
                    submit_many.tags, metas)
            as g(type, payload, queue, priority, run_at, delay_s, max_attempts, timeout_s, tags, meta)
        where (aqd.is_job(g.type, g.payload is not null, g.queue, g.priority, g.run_at, g.delay_s, g.max_attempts,
                          g.timeout_s, g.meta::jsonb)
               and (g.tags is null or aqd.are_tags(g.tags::text[]))) is not true;
    end if;
    -- Whoever sleeps is woken for what is due.
    if (select bool_or(coalesce(u.run_at, now() + u.delay_s * interval '1 second', now()) <= now())
        from unnest(run_ats, delays_s) as u(run_at, delay_s)) then
        perform aqd.wake();
    end if;
end
$$;

-- One request under a key: aqd.enqueue_keyed for everybody.
create function aqd.submit_keyed(
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
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if aqd.is_job(type, payload is not null, queue, priority, run_at, delay_s, max_attempts, timeout_s, meta)
           is not true or tags is not null and not aqd.are_tags(tags) then
        perform aqd.refuse_job(type, payload is not null, queue, priority, run_at, delay_s, max_attempts, timeout_s,
                               tags);
    end if;
    if (length(idempotency_key) <= 255 and idempotency_key ~ '^[!-~]([ -~]*[!-~])?$'
        and on_conflict in ('return', 'replace', 'reject') and idempotency_ttl_hours between 0.01 and 87600
        and length(key_scope) <= 128) is not true then
        perform aqd.refuse_key(idempotency_key, on_conflict, idempotency_ttl_hours, key_scope);
    end if;
    select k.id, k.outcome, k.differs, k.state, k.due_at, k.made_at, k.goes_to
    into id, outcome, differs, state, due_at, made_at, goes_to
    from aqd.enqueue_keyed(
        type, aqd.fitting('payload', payload, 67108864), queue, priority, run_at, delay_s, max_attempts, timeout_s,
        nullif(tags, '{}'), nullif(aqd.fitting('meta', meta, 65536), '{}'), idempotency_key, on_conflict,
        idempotency_ttl_hours, key_scope) as k;
end
$$;

-- As in 0003, for keys that aqd.submit_keyed would take: what it leaves behind stays until they expire.
create or replace function aqd.hold_keys(key_scope text, keys text[]) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
declare
    held bigint;
begin
    perform aqd.refuse_key(u.key, 'return', 24, key_scope) from unnest(hold_keys.keys) as u(key);
    insert into aqd.idempotency_keys as k (scope, key, job_id, expires_at, request)
    select key_scope, u.key, 0, '-infinity', 'null'
    from (select distinct u.key collate "C" as key from unnest(hold_keys.keys) as u(key) order by 1) as u
    on conflict on constraint idempotency_keys_pkey do update set job_id = k.job_id where false;
    select count(l.id) into held
    from (select k.job_id from aqd.idempotency_keys k
          where k.scope = key_scope and k.key = any(hold_keys.keys) and k.expires_at > now()
          order by k.job_id) as i
    cross join lateral (select j.id from aqd.jobs j
                        where j.id = i.job_id and j.state = 'QUEUED' for no key update) as l;
    return held;
end
$$;

-- --- what a daemon must do with the owner's rights

-- As in 0001, for days that may be days of history.
create or replace function aqd.create_history_partition(day date) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    partition_name constant text := 'job_history_' || to_char(day, 'YYYYMMDD');
begin
    if (day between current_date - 4000 and current_date + 400) is not true then
        raise exception using errcode = '22023', message = format('%s is no day of the history', day);
    end if;
    perform pg_advisory_xact_lock(1634821120, 2);
    if to_regclass('aqd.' || partition_name) is not null then
        return false;
    end if;
    execute format('create table aqd.%I (like aqd.job_history including all)', partition_name);
    execute format('alter table aqd.%I add primary key (id)', partition_name);
    execute format('alter table aqd.job_history attach partition aqd.%I for values from (%L) to (%L)',
                   partition_name,
                   day::timestamp at time zone 'UTC',
                   (day + 1)::timestamp at time zone 'UTC');
    return true;
end
$$;

-- Drops the partition of one day that retention has passed; false if there is none. For whoever does not own the
-- history: the owner detaches CONCURRENTLY, which no function can. This locks the whole history, so it waits for those
-- who use it 0.2 s at most, and as long do others wait behind it; 55P03 then.
create function aqd.drop_history_partition(day date, history_days integer) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
declare
    partition_name constant text := 'job_history_' || to_char(day, 'YYYYMMDD');
    pending boolean;
begin
    if (history_days >= 1 and day < (now() at time zone 'UTC')::date - history_days) is not true then
        raise exception using errcode = '22023', message = format('%s is not older than %s days', day, history_days);
    end if;
    perform pg_advisory_xact_lock(1634821120, 2);
    if to_regclass('aqd.' || partition_name) is null then
        return false;
    end if;
    select i.inhdetachpending into pending
    from pg_inherits i
    where i.inhrelid = to_regclass('aqd.' || partition_name) and i.inhparent = 'aqd.job_history'::regclass;
    if found then
        execute format('alter table aqd.job_history detach partition aqd.%I %s', partition_name,
                       case when pending then 'finalize' else '' end);
    end if;
    execute format('drop table aqd.%I', partition_name);
    return true;
end
$$;

-- It locks the queue's row.
alter function aqd.queue_room security definer set search_path = pg_catalog, pg_temp;

-- So far everybody could call all these, and needed rights to the tables. Who has those may from now on: to INSERT, who
-- submits; to UPDATE what a claim writes, a daemon; to DELETE from the history, who drops old days of it. Where somebody
-- has said who may call aqd.enqueue, that stays. A list of rights that is null says: the owner's alone.
do $$
declare
    open_to_all constant boolean := exists (
        select from pg_proc p cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as e
        where p.oid = 'aqd.enqueue'::regproc and e.grantee = 0 and e.privilege_type = 'EXECUTE');
    given record;
begin
    revoke execute on function aqd.submit_many, aqd.submit_keyed, aqd.hold_keys, aqd.queue_room,
        aqd.create_history_partition, aqd.drop_history_partition from public;
    if open_to_all then
        revoke execute on function aqd.enqueue from public;
    end if;
    for given in
        with needed (object, privilege, functions) as (
            values ('aqd.jobs'::regclass, 'INSERT', 'aqd.submit_many'),
                   ('aqd.idempotency_keys', 'INSERT', 'aqd.submit_keyed, aqd.hold_keys'),
                   ('aqd.jobs', 'UPDATE', 'aqd.queue_room, aqd.create_history_partition'),
                   ('aqd.job_history', 'DELETE', 'aqd.drop_history_partition')
            union all
            select 'aqd.jobs', 'INSERT', 'aqd.enqueue' where open_to_all
        ), may (object, privilege, grantee) as (
            select c.oid, e.privilege_type, e.grantee
            from pg_class c cross join lateral aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) as e
            union
            select a.attrelid, e.privilege_type, e.grantee
            from pg_attribute a cross join lateral aclexplode(a.attacl) as e
            where e.privilege_type = 'INSERT' or a.attname = 'lease_token'
        )
        select n.functions, case when m.grantee = 0 then 'public' else quote_ident(r.rolname) end as role
        from needed n
        join may m on m.object = n.object and m.privilege = n.privilege
        left join pg_roles r on r.oid = m.grantee
        where m.grantee = 0 or r.oid is not null
        union
        select n.functions, 'pg_write_all_data' from needed n  -- may INSERT, UPDATE and DELETE anywhere
    loop
        execute format('grant execute on function %s to %s', given.functions, given.role);
    end loop;
end
$$;

-- --- roles

-- Which role of the server has which duty in this database: owner (migrates), daemon, api, submit. Filled by
-- "aqd db roles". Each is a group, without a password, that users are made members of.
create table aqd.roles (
    duty text primary key,
    role text not null unique,
    constraint roles_duty check (duty in ('owner', 'daemon', 'api', 'submit'))
);

-- What a duty may do, as GRANT and ON name it: the one list, to which a migration that makes something adds. The owner
-- needs none. "since" is the version of PostgreSQL that knows the right.
create table aqd.rights (
    duty   text not null,
    object text not null,
    rights text not null,
    since  bigint not null default 0,
    primary key (duty, object, rights)
);

insert into aqd.rights (duty, object, rights) values
    ('daemon', 'table aqd.jobs', 'select, delete, update (state, run_at, attempt, crashes, interruptions, last_error,
        claimed_at, lease_token, lease_expires_at, node_id, cancel_requested_at, progress_at, progress_percent,
        progress_message)'),
    ('daemon', 'table aqd.job_history', 'select, insert'),
    ('daemon', 'table aqd.all_jobs', 'select'),
    ('daemon', 'table aqd.job_attempts', 'select, insert, delete, update (finished_at)'),  -- an update right, to lock
    ('daemon', 'table aqd.failed_jobs', 'select, insert, delete, update (failed_at, attempts, kind, reason, error,
        traceback, failures, resolved_at, resolution)'),
    ('daemon', 'table aqd.idempotency_keys', 'select, delete, update (expires_at)'),  -- to lock
    ('daemon', 'table aqd.handlers', 'select, insert, update (queue, max_attempts)'),
    ('daemon', 'table aqd.queues', 'select'),
    ('daemon', 'table aqd.nodes', 'select, insert, update, delete'),
    ('daemon', 'table aqd.unknown_types', 'select, insert, update, delete'),
    ('daemon', 'table aqd.node_figures', 'select, insert, update, delete'),
    ('daemon', 'table aqd.minutes', 'select, insert, update, delete'),
    ('daemon', 'table aqd.stats', 'select, insert, update, delete'),
    ('daemon', 'table aqd.migrations', 'select'),
    ('daemon', 'sequence aqd.sleeps', 'select, usage'),
    ('daemon', 'sequence aqd.wakes', 'select, update'),
    ('daemon', 'sequence aqd.waits', 'select'),
    ('daemon', 'function aqd.queue_room', 'execute'),
    ('daemon', 'function aqd.create_history_partition', 'execute'),
    ('daemon', 'function aqd.drop_history_partition', 'execute'),
    ('api', 'table aqd.jobs', 'select, delete, update (state, run_at, priority, attempt, crashes, interruptions,
        retries, last_error, claimed_at, cancel_requested_at, progress_at, progress_percent, progress_message)'),
    ('api', 'table aqd.job_history', 'select, delete, update (output)'),  -- to lock
    ('api', 'table aqd.all_jobs', 'select'),
    ('api', 'table aqd.job_attempts', 'select, delete'),
    ('api', 'table aqd.failed_jobs', 'select, delete, update (retried_at, resolved_at, resolution, note,
        discarded_by)'),
    ('api', 'table aqd.handlers', 'select'),
    ('api', 'table aqd.queues', 'select, insert, update'),
    ('api', 'table aqd.nodes', 'select'),
    ('api', 'table aqd.node_figures', 'select'),
    ('api', 'table aqd.minutes', 'select'),
    ('api', 'table aqd.stats', 'select'),
    ('api', 'table aqd.migrations', 'select'),
    ('api', 'sequence aqd.sleeps', 'select'),
    ('api', 'sequence aqd.wakes', 'select'),
    ('api', 'sequence aqd.waits', 'select, update'),
    ('api', 'function aqd.enqueue', 'execute'),
    ('api', 'function aqd.submit_many', 'execute'),
    ('api', 'function aqd.submit_keyed', 'execute'),
    ('api', 'function aqd.hold_keys', 'execute'),
    ('submit', 'table aqd.handlers', 'select (type, queue)'),  -- to which queue a job will go
    ('submit', 'function aqd.enqueue', 'execute'),
    ('submit', 'function aqd.submit_many', 'execute'),
    ('submit', 'function aqd.submit_keyed', 'execute'),
    ('submit', 'function aqd.hold_keys', 'execute');

insert into aqd.rights (duty, object, rights, since) values
    ('daemon', 'table aqd.jobs', 'maintain', 170000);  -- to vacuum it; before 17 only its owner may

-- Takes from the roles whatever they have in this schema.
create function aqd.revoke_rights() returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    given record;
begin
    for given in
        select r.role from aqd.roles r
        where r.duty <> 'owner' and exists (select from pg_roles p where p.rolname = r.role)
        order by r.role
    loop
        execute format('revoke all on all tables in schema aqd from %I', given.role);
        execute format('revoke all on all sequences in schema aqd from %I', given.role);
        execute format('revoke all on all functions in schema aqd from %I', given.role);
        execute format('revoke all on schema aqd from %I', given.role);
    end loop;
end
$$;

-- Takes from everybody the functions that have their owner's rights: a new function is everybody's, and so is each one
-- of a dump without rights. For the owner of the schema.
create function aqd.revoke_public() returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    everybodys regprocedure;
begin
    for everybodys in
        select p.oid
        from pg_proc p cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as e
        where p.pronamespace = 'aqd'::regnamespace and p.prosecdef and e.grantee = 0
    loop
        execute format('revoke execute on routine %s from public', everybodys);
    end loop;
end
$$;

-- Gives each role that is there what its duty needs, and nothing else, and leaves nothing to everybody. For the owner of
-- the schema, who needs no right over the roles.
create function aqd.grant_rights() returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    given record;
begin
    perform aqd.revoke_public() from aqd.roles limit 1;  -- where there are none, somebody else says who may do what
    perform aqd.revoke_rights();
    for given in
        select 'schema aqd' as object, 'usage' as rights, r.role, 0 as place
        from aqd.roles r
        where r.duty <> 'owner' and exists (select from pg_roles p where p.rolname = r.role)
        union all
        select g.object, g.rights, r.role, 1
        from aqd.rights g join aqd.roles r on r.duty = g.duty
        where g.since <= current_setting('server_version_num')::bigint
          and exists (select from pg_roles p where p.rolname = r.role)
        order by 4, 3, 1, 2
    loop
        execute format('grant %s on %s to %I', given.rights, given.object, given.role);
    end loop;
end
$$;

-- The schema and all that is in it belong to that role from now on. For a member of it.
create function aqd.hand_over(new_owner text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    thing text;
begin
    execute format('alter schema aqd owner to %I', new_owner);
    for thing in
        select format('alter table %s owner to %I', c.oid::regclass, new_owner)  -- also views and sequences
        from pg_class c
        where c.relnamespace = 'aqd'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')
          and c.relowner <> new_owner::regrole
          and not exists (select from pg_depend d  -- sequences of columns go with their tables
                          where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype in ('a', 'i')
                            and c.relkind = 'S')
        union all
        select format('alter routine %s owner to %I', p.oid::regprocedure, new_owner)
        from pg_proc p
        where p.pronamespace = 'aqd'::regnamespace and p.proowner <> new_owner::regrole
    loop
        execute thing;
    end loop;
end
$$;
