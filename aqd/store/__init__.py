"""Everything that is read and written about jobs: one module a duty, as the files of ``sql/``.

Used by the dispatcher (leases, outcomes, nodes), the API, the client and the command line (submitting, looking,
changing). Each function is one statement in autocommit unless it says otherwise, so it has happened or not; a
deadlock or serialisation conflict is repeated inside (``database.run``). Functions return what was changed, so
that the caller sees what it has lost.

How it fails: :class:`InputError` for a refused job; errors of psycopg otherwise, with nothing changed.
"""

from aqd.database import Connection, connect, is_disconnect
from aqd.store.lease import (
    Lease,
    Progress,
    Release,
    RescueResult,
    reconcile,
    release,
    renew,
    rescue,
    store_progress,
)
from aqd.store.look import (
    AttemptRow,
    Cancelled,
    EnqueuedJob,
    FailedJobRow,
    Health,
    JobFacts,
    JobFilter,
    JobRow,
    NodeRow,
    cancel_job,
    cancelled,
    get_attempts,
    get_job,
    health,
    job_facts,
    list_failed,
    list_jobs,
    list_nodes,
    retry_job,
)
from aqd.store.nodes import (
    NodeState,
    declare_handlers,
    fail_unknown,
    limit_lock_waits,
    node_gone,
    node_seen,
)
from aqd.store.outcome import Completion, Failure, create_partitions, record_completed, record_failed
from aqd.store.submit import enqueue
from aqd.store.text import MAX_ERROR, MAX_OUTPUT, MAX_PROGRESS, MAX_TRACEBACK
from aqd.store.wait import announce_wait, find_ended, tell_ended

__all__ = [
    "MAX_ERROR",
    "MAX_OUTPUT",
    "MAX_PROGRESS",
    "MAX_TRACEBACK",
    "AttemptRow",
    "Cancelled",
    "Completion",
    "Connection",
    "EnqueuedJob",
    "FailedJobRow",
    "Failure",
    "Health",
    "JobFacts",
    "JobFilter",
    "JobRow",
    "Lease",
    "NodeRow",
    "NodeState",
    "Progress",
    "Release",
    "RescueResult",
    "announce_wait",
    "cancel_job",
    "cancelled",
    "connect",
    "create_partitions",
    "declare_handlers",
    "enqueue",
    "fail_unknown",
    "find_ended",
    "get_attempts",
    "get_job",
    "health",
    "is_disconnect",
    "job_facts",
    "limit_lock_waits",
    "list_failed",
    "list_jobs",
    "list_nodes",
    "node_gone",
    "node_seen",
    "reconcile",
    "record_completed",
    "record_failed",
    "release",
    "renew",
    "rescue",
    "retry_job",
    "store_progress",
    "tell_ended",
]
