-- Pages: of jobs by a filter, of the records of failed jobs, of a job's attempts. All are planned with their values
-- (fresh), so that conditions on null vanish and days out of range are not opened.

-- name: list_jobs_newest :many fresh
-- Live and finished jobs alike, newest first, from below the last id of the page before: ids never change, so a page
-- does not shift while jobs come and go. What a filter means says aqd.find_jobs.
--
-- A page has a bound in bytes: it may end early, but not before its first job. First by sizes as stored, which are
-- known without reading large values; then, for those that are left, by the texts. "picked" is how many there were
-- before that.
-- Index: primary keys, merged in id order (8 days of history opened: 2 ms, most of it planning; 33 days: 6 ms);
-- jobs_failed, jobs_running; (type, id) of each day; jobs_tags and the days' indexes on tags, sorted.
select q.id, q.state, q.type, q.queue, q.priority, q.payload, q.result, q.attempt, q.max_attempts, q.timeout_s,
       q.run_at, q.created_at, q.claimed_at, q.finished_at, q.last_error, q.node_id, q.crashes, q.interruptions,
       q.retries, q.wall_s, q.cpu_s, q.peak_kb, q.cancel_requested_at, q.progress_percent, q.progress_message,
       q.output, q.tags, q.meta, q.picked
from (
    select p.id, p.state, p.type, p.queue, p.priority, t.payload, t.result, p.attempt, p.max_attempts, p.timeout_s,
           p.run_at, p.created_at, p.claimed_at, p.finished_at, p.last_error, p.node_id, p.crashes,
           p.interruptions, p.retries, p.wall_s, p.cpu_s, p.peak_kb, p.cancel_requested_at, p.progress_percent,
           p.progress_message, t.output, p.tags, t.meta, p.place, p.picked,
           sum(coalesce(octet_length(t.payload), 0) + coalesce(octet_length(t.result), 0)
               + coalesce(octet_length(t.output), 0) + coalesce(octet_length(t.meta), 0)
               + coalesce(octet_length(p.last_error), 0)) over (order by p.place) as bytes
    from (
        select a.*, row_number() over by_id as place, count(*) over () as picked,
               sum(coalesce(case when :with_payload::boolean then pg_column_size(a.payload) end, 0)
                   + coalesce(case when :with_result::boolean then pg_column_size(a.result) end, 0)
                   + coalesce(case when :with_output::boolean then pg_column_size(a.output) end, 0)
                   + coalesce(case when :with_meta::boolean then pg_column_size(a.meta) end, 0)
                   ) over by_id as stored_bytes
        from (
            select f.*
            from aqd.find_jobs(
                :states::text[], :type::text, :queue::text, :tag::text,
                :created_after::timestamptz, :created_before::timestamptz,
                :finished_after::timestamptz, :finished_before::timestamptz,
                :error::text, :error_hash::text, :ids::bigint[],
                :history_after::timestamptz, :history_before::timestamptz) f
            where :cursor::bigint is null or f.id < :cursor::bigint
            order by f.id desc
            limit :limit::bigint
        ) a
        window by_id as (order by a.id desc)
    ) p
    cross join lateral (
        select case when :with_payload::boolean then p.payload::text end as payload,
               case when :with_result::boolean then p.result::text end as result,
               case when :with_output::boolean then p.output end as output,
               case when :with_meta::boolean then p.meta::text end as meta
        offset 0  -- each text is made once
    ) t
    where p.stored_bytes <= :max_bytes::bigint or p.place = 1
) q
where q.bytes <= :max_bytes::bigint or q.place = 1
order by q.place

-- name: list_jobs_oldest :many fresh
-- The same, oldest first, from above the last id of the page before.
-- Index: as list_jobs_newest.
select q.id, q.state, q.type, q.queue, q.priority, q.payload, q.result, q.attempt, q.max_attempts, q.timeout_s,
       q.run_at, q.created_at, q.claimed_at, q.finished_at, q.last_error, q.node_id, q.crashes, q.interruptions,
       q.retries, q.wall_s, q.cpu_s, q.peak_kb, q.cancel_requested_at, q.progress_percent, q.progress_message,
       q.output, q.tags, q.meta, q.picked
from (
    select p.id, p.state, p.type, p.queue, p.priority, t.payload, t.result, p.attempt, p.max_attempts, p.timeout_s,
           p.run_at, p.created_at, p.claimed_at, p.finished_at, p.last_error, p.node_id, p.crashes,
           p.interruptions, p.retries, p.wall_s, p.cpu_s, p.peak_kb, p.cancel_requested_at, p.progress_percent,
           p.progress_message, t.output, p.tags, t.meta, p.place, p.picked,
           sum(coalesce(octet_length(t.payload), 0) + coalesce(octet_length(t.result), 0)
               + coalesce(octet_length(t.output), 0) + coalesce(octet_length(t.meta), 0)
               + coalesce(octet_length(p.last_error), 0)) over (order by p.place) as bytes
    from (
        select a.*, row_number() over by_id as place, count(*) over () as picked,
               sum(coalesce(case when :with_payload::boolean then pg_column_size(a.payload) end, 0)
                   + coalesce(case when :with_result::boolean then pg_column_size(a.result) end, 0)
                   + coalesce(case when :with_output::boolean then pg_column_size(a.output) end, 0)
                   + coalesce(case when :with_meta::boolean then pg_column_size(a.meta) end, 0)
                   ) over by_id as stored_bytes
        from (
            select f.*
            from aqd.find_jobs(
                :states::text[], :type::text, :queue::text, :tag::text,
                :created_after::timestamptz, :created_before::timestamptz,
                :finished_after::timestamptz, :finished_before::timestamptz,
                :error::text, :error_hash::text, :ids::bigint[],
                :history_after::timestamptz, :history_before::timestamptz) f
            where :cursor::bigint is null or f.id > :cursor::bigint
            order by f.id
            limit :limit::bigint
        ) a
        window by_id as (order by a.id)
    ) p
    cross join lateral (
        select case when :with_payload::boolean then p.payload::text end as payload,
               case when :with_result::boolean then p.result::text end as result,
               case when :with_output::boolean then p.output end as output,
               case when :with_meta::boolean then p.meta::text end as meta
        offset 0  -- each text is made once
    ) t
    where p.stored_bytes <= :max_bytes::bigint or p.place = 1
) q
where q.bytes <= :max_bytes::bigint or q.place = 1
order by q.place

-- name: list_failed :many fresh
-- Records of failed jobs, newest first; by default the open ones. Bounded in bytes as list_jobs_newest.
-- Index: failed_jobs_open_id, the primary key with the settled ones; primary key of jobs.
select q.id, q.job_id, q.type, q.queue, q.kind, q.error, q.traceback, q.attempts, q.failures, q.failed_at,
       q.retried_at, q.resolved_at, q.resolution, j.state, q.reason, q.note, q.discarded_by, q.picked
from (
    select f.*, row_number() over by_id as place, count(*) over () as picked,
           sum(coalesce(octet_length(f.error), 0) + coalesce(octet_length(f.traceback), 0)) over by_id as bytes
    from (
        select r.*
        from aqd.failed_jobs r
        where (:cursor::bigint is null or r.id < :cursor::bigint)
          and (:resolved::boolean or r.resolved_at is null)
          and (:type::text is null or r.type = :type::text)
          and (:queue::text is null or r.queue = :queue::text)
          and (:kind::text is null or r.kind = :kind::text)
          and (:reason::text is null or r.reason = :reason::text)
          and (:error::text is null or strpos(lower(r.error), lower(:error::text)) > 0)
          and (:failed_after::timestamptz is null or r.failed_at >= :failed_after::timestamptz)
          and (:failed_before::timestamptz is null or r.failed_at < :failed_before::timestamptz)
        order by r.id desc
        limit :limit::bigint
    ) f
    window by_id as (order by f.id desc)
) q
left join aqd.jobs j on j.id = q.job_id
where q.bytes <= :max_bytes::bigint or q.place = 1
order by q.place

-- name: group_failed :many fresh
-- The newest records that match, at most :most of them, by type or kind of error or both; the largest groups first. Of a
-- job that is FAILED now its own error counts, by which a filter finds it: the record may say more.
-- failed_now: how many of the jobs are FAILED at the moment, so could be retried. grouped: how many were looked at,
-- one more than :most if there are more; the same in each row.
-- Index: failed_jobs_open_id, the primary key with the settled ones; primary key of jobs.
with picked as materialized (
    select r.id, r.job_id, r.failed_at, r.type, r.error, row_number() over (order by r.id desc) as place
    from aqd.failed_jobs r
    where (:resolved::boolean or r.resolved_at is null)
      and (:type::text is null or r.type = :type::text)
      and (:queue::text is null or r.queue = :queue::text)
      and (:kind::text is null or r.kind = :kind::text)
      and (:reason::text is null or r.reason = :reason::text)
      and (:error::text is null or strpos(lower(r.error), lower(:error::text)) > 0)
      and (:failed_after::timestamptz is null or r.failed_at >= :failed_after::timestamptz)
      and (:failed_before::timestamptz is null or r.failed_at < :failed_before::timestamptz)
    order by r.id desc
    limit :most::bigint + 1
), lined as (
    select p.id, p.job_id, p.failed_at, coalesce(j.state = 'FAILED', false) as is_failed,
           case when :by_type::boolean then p.type end as type,
           case when :by_error::boolean
               then aqd.error_line(case when j.state = 'FAILED' then j.last_error else p.error end) end as error
    from picked p
    left join aqd.jobs j on j.id = p.job_id
    where p.place <= :most::bigint
)
select l.type, l.error, case when l.error is not null then aqd.error_hash(l.error) end as error_hash,
       count(*) as size, count(*) filter (where l.is_failed) as failed_now,
       min(l.failed_at) as first_failed_at, max(l.failed_at) as last_failed_at,
       (array_agg(l.job_id order by l.id desc))[1] as sample_job_id,
       (select count(*) from picked) as grouped
from lined l
group by l.type, l.error
order by count(*) desc, max(l.id) desc
limit :limit::bigint

-- name: list_attempts :many
-- A job's attempts that did not complete, oldest first, from above the last record of the page before. Bounded in
-- bytes as list_jobs_newest.
-- Index: job_attempts' primary key.
select q.id, q.attempt, q.kind, q.error, q.traceback, q.signal, q.exit_code, q.started_at, q.finished_at,
       q.wall_s, q.cpu_s, q.peak_kb, q.node_id, q.output, q.reason, q.picked
from (
    select a.*, row_number() over by_id as place, count(*) over () as picked,
           sum(coalesce(octet_length(a.error), 0) + coalesce(octet_length(a.traceback), 0)
               + coalesce(octet_length(a.output), 0)) over by_id as bytes
    from (
        select r.*
        from aqd.job_attempts r
        where r.job_id = :job_id::bigint and r.id > coalesce(:cursor::bigint, 0)
        order by r.id
        limit :limit::bigint
    ) a
    window by_id as (order by a.id)
) q
where q.bytes <= :max_bytes::bigint or q.place = 1
order by q.place
