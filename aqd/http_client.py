"""Jobs over HTTP, for applications without a connection to the database. Needs the extra ``aqd[http]`` (httpx).

Runs in applications::

    with Client("http://127.0.0.1:4000", key="…") as aqd:
        made = aqd.enqueue("send_mail", {"order": 42})
        print(aqd.wait(made.id, timeout_s=30).result)

:class:`AsyncClient` has the same methods as coroutines. Both may be shared by threads or tasks.

Promises: a job is checked before anything is sent, as by the other clients. What may be sent twice without harm is
sent again, ``retries`` times at most with growing pauses, when the service cannot be reached, breaks off, or says
503 (then not before its ``Retry-After``; so it is where somebody holds a lock or the key): looking, changes that are the same when done twice, and submitting, because
every job has an idempotency key: yours, or one drawn at random. So an answer that is lost doubles no job. Not repeated,
once they may have changed something: ``retry``, ``discard``, ``delete``, ``change_jobs``, and submitting with ``on_conflict``
``replace`` or ``reject``. Where a change may have been made although nobody can say so (its answer was lost, a proxy
answered instead), the error is :class:`OutcomeUnknown`, with the idempotency keys of what was being submitted.

Fails with the errors of the other clients: :class:`InputError`, :class:`NotFoundError`, :class:`ConflictError`,
:class:`IdempotencyConflict`, :class:`NotEnded`, :class:`DatabaseUnavailable`, :class:`OutcomeUnknown`,
:class:`Locked` (:class:`KeyInProgress` where it is an idempotency key), :class:`SchemaMismatch`; and with :class:`NotAllowedError` and :class:`ServiceUnavailable`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar, Unpack

try:
    import httpx
except ImportError as error:  # pragma: no cover
    raise ImportError("aqd.http_client needs httpx: install aqd[http]") from error
from msgspec import UNSET

from aqd import http_calls as calls
from aqd.errors import AqdError
from aqd.http_calls import RETRIES, TIMEOUT_S, Job, JobOptions, NewJob, Submitted

__all__ = ["AsyncClient", "Client", "Job", "JobOptions", "NewJob", "Submitted"]

T = TypeVar("T")


class Client:
    """A client for threads. ``base_url`` may end in a path, where a proxy has put one; ``timeout_s`` is for each step
    of one request (connecting, each pause of an answer); further arguments go to :class:`httpx.Client`."""

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        **transport: Any,
    ) -> None:
        self._options = calls.Options(base_url, key, timeout_s, retries, transport)
        self._http = httpx.Client(**self._options.http)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def enqueue(self, type: str, payload: Any = UNSET, **options: Unpack[JobOptions]) -> Submitted:
        """Submit a job; ``payload`` is any JSON value, without one ``{}``."""
        return self._run(calls.enqueue(type, payload, options))

    def enqueue_many(self, jobs: Iterable[NewJob | Mapping[str, Any]]) -> list[Submitted]:
        """Submit many, up to a thousand in a request, which are stored all or none. When a request fails those
        before it have been stored: with keys of your own all of it may be done again."""
        made: list[Submitted] = []
        for first, call in calls.batches(jobs):
            try:
                stored: list[Submitted] = self._run(call)
            except AqdError as error:
                raise calls.renumbered(error, first) from None
            made += stored
        return made

    def get(self, id: int | str) -> Job:
        """Everything about a job."""
        return self._run(calls.Call("GET", calls.one_job(id), calls.JOB))

    def jobs(self, **filters: Any) -> Iterator[Job]:
        """All that match, page by page: the parameters of ``GET /jobs``, moments as datetimes, several states or
        fields as lists."""
        page: dict[str, Any] = {"limit": calls.PAGE} | filters
        while True:
            found = self._run(calls.Call("GET", "/v1/jobs", calls.decoded(calls.Page), calls.query(page)))
            yield from found.jobs
            if found.next_cursor is None:
                return
            page["cursor"] = found.next_cursor

    def wait(self, id: int | str, timeout_s: float | None = None) -> Job:
        """Wait until a job has ended. :class:`NotEnded` after ``timeout_s`` (None: never; 0: a look)."""
        until = time.monotonic() + calls.check_timeout(timeout_s)
        while True:
            found, again_s = self._run(calls.waiting(id, until - time.monotonic()))
            if found.ended:
                return found
            if time.monotonic() >= until:
                raise calls.not_ended(found, timeout_s)
            time.sleep(max(0.0, min(again_s, until - time.monotonic())))

    def cancel(self, id: int | str) -> dict[str, Any]:
        """Cancel a job; ``status`` is PROCESSING if it was asked to end."""
        return self._run(calls.change("POST", f"{calls.one_job(id)}/cancel"))

    def retry(self, id: int | str) -> dict[str, Any]:
        """Make a FAILED job QUEUED again."""
        return self._run(calls.change("POST", f"{calls.one_job(id)}/retry", again=False))

    def update(self, id: int | str, **changes: Any) -> dict[str, Any]:
        """Change ``priority``, ``run_at`` or ``delay_s`` of a QUEUED job; what is None stays as it is."""
        return self._run(calls.update(id, changes))

    def discard(self, id: int | str, reason: str) -> dict[str, Any]:
        """Give up a FAILED job."""
        return self._run(
            calls.change("POST", f"{calls.one_job(id)}/discard", {"reason": reason}, again=False)
        )

    def delete(self, id: int | str) -> dict[str, Any]:
        """Remove a job that does not run."""
        return self._run(calls.change("DELETE", calls.one_job(id), again=False))

    def change_jobs(
        self,
        action: str,
        *,
        ids: Iterable[int | str] | None = None,
        filter: Mapping[str, Any] | None = None,
        all: bool = False,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """``retry``, ``cancel``, ``delete`` or ``discard`` many: ``POST /jobs/{action}``."""
        given = {"ids": ids, "filter": filter, "all": all, "reason": reason}
        return self._run(calls.change_jobs(action, given, dry_run))

    def failed_jobs(self, **params: Any) -> dict[str, Any]:
        """A page of ``GET /admin/failed-jobs``, or its groups with ``group_by``."""
        return self._run(calls.get("/v1/admin/failed-jobs", **params))

    def queues(self, **params: Any) -> dict[str, Any]:
        """``GET /queues``."""
        return self._run(calls.get("/v1/queues", **params))

    def types(self, **params: Any) -> dict[str, Any]:
        """``GET /types``."""
        return self._run(calls.get("/v1/types", **params))

    def nodes(self, **params: Any) -> dict[str, Any]:
        """``GET /nodes``."""
        return self._run(calls.get("/v1/nodes", **params))

    def pause(self, queue: str) -> dict[str, Any]:
        """Begin no job of the queue."""
        return self._run(calls.change("POST", f"{calls.one_queue(queue)}/pause"))

    def resume(self, queue: str) -> dict[str, Any]:
        """Begin the queue's jobs again."""
        return self._run(calls.change("POST", f"{calls.one_queue(queue)}/resume"))

    def set_limit(self, queue: str, max_running: int | None) -> dict[str, Any]:
        """At most so many jobs of the queue run at the same time on all nodes; None: any number."""
        return self._run(calls.change("PATCH", calls.one_queue(queue), {"max_running": max_running}))

    def _run(self, call: calls.Call[T]) -> T:
        tries = calls.Tries(call, self._options.retries)
        while True:
            try:
                answer = self._http.send(call.of(self._http, self._options.timeout_s))
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                pause_s = tries.broken(error)
            else:
                if answer.is_success:
                    return tries.read(answer)
                pause_s = tries.refused(answer)
            time.sleep(pause_s)


class AsyncClient:
    """As :class:`Client`, for asyncio."""

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        **transport: Any,
    ) -> None:
        self._options = calls.Options(base_url, key, timeout_s, retries, transport)
        self._http = httpx.AsyncClient(**self._options.http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def enqueue(self, type: str, payload: Any = UNSET, **options: Unpack[JobOptions]) -> Submitted:
        """As :meth:`Client.enqueue`, and so on."""
        return await self._run(calls.enqueue(type, payload, options))

    async def enqueue_many(self, jobs: Iterable[NewJob | Mapping[str, Any]]) -> list[Submitted]:
        made: list[Submitted] = []
        for first, call in calls.batches(jobs):
            try:
                stored: list[Submitted] = await self._run(call)
            except AqdError as error:
                raise calls.renumbered(error, first) from None
            made += stored
        return made

    async def get(self, id: int | str) -> Job:
        return await self._run(calls.Call("GET", calls.one_job(id), calls.JOB))

    async def jobs(self, **filters: Any) -> AsyncIterator[Job]:
        page: dict[str, Any] = {"limit": calls.PAGE} | filters
        while True:
            found = await self._run(
                calls.Call("GET", "/v1/jobs", calls.decoded(calls.Page), calls.query(page))
            )
            for each in found.jobs:
                yield each
            if found.next_cursor is None:
                return
            page["cursor"] = found.next_cursor

    async def wait(self, id: int | str, timeout_s: float | None = None) -> Job:
        until = time.monotonic() + calls.check_timeout(timeout_s)
        while True:
            found, again_s = await self._run(calls.waiting(id, until - time.monotonic()))
            if found.ended:
                return found
            if time.monotonic() >= until:
                raise calls.not_ended(found, timeout_s)
            await asyncio.sleep(max(0.0, min(again_s, until - time.monotonic())))

    async def cancel(self, id: int | str) -> dict[str, Any]:
        return await self._run(calls.change("POST", f"{calls.one_job(id)}/cancel"))

    async def retry(self, id: int | str) -> dict[str, Any]:
        return await self._run(calls.change("POST", f"{calls.one_job(id)}/retry", again=False))

    async def update(self, id: int | str, **changes: Any) -> dict[str, Any]:
        return await self._run(calls.update(id, changes))

    async def discard(self, id: int | str, reason: str) -> dict[str, Any]:
        return await self._run(
            calls.change("POST", f"{calls.one_job(id)}/discard", {"reason": reason}, again=False)
        )

    async def delete(self, id: int | str) -> dict[str, Any]:
        return await self._run(calls.change("DELETE", calls.one_job(id), again=False))

    async def change_jobs(
        self,
        action: str,
        *,
        ids: Iterable[int | str] | None = None,
        filter: Mapping[str, Any] | None = None,
        all: bool = False,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        given = {"ids": ids, "filter": filter, "all": all, "reason": reason}
        return await self._run(calls.change_jobs(action, given, dry_run))

    async def failed_jobs(self, **params: Any) -> dict[str, Any]:
        return await self._run(calls.get("/v1/admin/failed-jobs", **params))

    async def queues(self, **params: Any) -> dict[str, Any]:
        return await self._run(calls.get("/v1/queues", **params))

    async def types(self, **params: Any) -> dict[str, Any]:
        return await self._run(calls.get("/v1/types", **params))

    async def nodes(self, **params: Any) -> dict[str, Any]:
        return await self._run(calls.get("/v1/nodes", **params))

    async def pause(self, queue: str) -> dict[str, Any]:
        return await self._run(calls.change("POST", f"{calls.one_queue(queue)}/pause"))

    async def resume(self, queue: str) -> dict[str, Any]:
        return await self._run(calls.change("POST", f"{calls.one_queue(queue)}/resume"))

    async def set_limit(self, queue: str, max_running: int | None) -> dict[str, Any]:
        return await self._run(calls.change("PATCH", calls.one_queue(queue), {"max_running": max_running}))

    async def _run(self, call: calls.Call[T]) -> T:
        tries = calls.Tries(call, self._options.retries)
        while True:
            try:
                answer = await self._http.send(call.of(self._http, self._options.timeout_s))
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                pause_s = tries.broken(error)
            else:
                if answer.is_success:
                    return tries.read(answer)
                pause_s = tries.refused(answer)
            await asyncio.sleep(pause_s)
