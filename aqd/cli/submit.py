"""``aqd submit``: one job, or many from a file, directly in the database.

The same validation and the same statements as the HTTP service and the Python client; ``--json`` prints the
same documents as the service. Many are stored in one transaction: all of them, or none and the line that is wrong. It
begins when the last line has been read and checked, because it holds the keys of its jobs, and what writes the lines
may be slow; until then they are kept in memory.
"""

import os
import sys
from collections.abc import Iterator
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

import click

from aqd.cli.command import App
from aqd.errors import IdempotencyConflict, InputError

if TYPE_CHECKING:
    from aqd.config import Config
    from aqd.job import JobRequest
    from aqd.store import EnqueuedJob


@click.command("submit")
@click.argument("type_", metavar="TYPE", required=False)
@click.argument("payload", default="{}")
@click.option("--queue", help='The queue; default: that of the handler, or "default".')
@click.option("--priority", type=int, help="-100 to 100, higher first; default 0.")
@click.option("--run-at", metavar="TIME", help="Not before this moment, such as 2026-11-29T17:40:01Z.")
@click.option("--delay", "delay_s", type=float, metavar="SECONDS", help="Not before that many seconds.")
@click.option("--max-attempts", type=int, help="How often to try it, 1 to 1000.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="How long one attempt may take.")
@click.option("--tag", "tags", multiple=True, help="To find the job by; may be given up to 32 times.")
@click.option("--meta", "meta_json", metavar="JSON", help="An object that is kept with the job.")
@click.option("--idempotency-key", metavar="KEY", help="Of all jobs submitted under it one is made.")
@click.option(
    "--on-conflict",
    metavar="return|replace|reject",
    help="If the key stands for a job already: print that one (the default), replace it while it waits, fail.",
)
@click.option(
    "--batch", metavar="FILE", help="Many jobs: a file, or -, with one JSON object as for the API a line."
)
@click.option("--json", "as_json", is_flag=True, help="Print the job as JSON, not only its id.")
@click.pass_context
def submit_command(
    ctx: click.Context, /, type_: str | None, payload: str, batch: str | None, as_json: bool, **options: Any
) -> None:
    """Submit a job of TYPE and print its id. PAYLOAD is JSON text, or - to read it from standard input.

    With --batch, submit all jobs of a file in one transaction and print their ids in its order.
    """
    from aqd import config, job, store
    from aqd.api import render
    from aqd.cli.output import print_json

    app: App = ctx.obj
    if (type_ is None) == (batch is None):
        ctx.fail(
            "Missing argument 'TYPE'." if batch is None else "--batch stands alone: its lines say everything."
        )
    cfg = config.load(app.config_path, os.environ)
    if batch is not None:
        if given := [name for name, value in options.items() if value not in (None, ())]:
            ctx.fail(f"--batch stands alone, without {', '.join(given)}: its lines say everything.")
        answers = _submit_file(cfg, batch)
        if as_json:
            print_json([render.submitted(made, request) for made, request in answers])
        else:
            click.echo("".join(f"{made.id}\n" for made, _ in answers), nl=False)
        return
    limit = cfg.jobs.max_payload_bytes
    if payload == "-":
        payload = _read_stdin(limit)
    request = job.validate(type_ or "", payload_json=payload, max_payload_bytes=limit, **options)
    with store.connect(cfg.database, "aqd submit") as conn:
        made = store.enqueue(conn, request, ttl_hours=cfg.jobs.idempotency_ttl_hours)
    if as_json:
        print_json(render.submitted(made, request))
    else:
        click.echo(made.id)


def _read_stdin(limit: int) -> str:
    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise InputError("payload", f"is larger than {limit} bytes", limit)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError("payload", f"is not UTF-8: {error.reason} at byte {error.start}", "UTF-8") from None


def _submit_file(cfg: "Config", name: str) -> "list[tuple[EnqueuedJob, JobRequest]]":
    from aqd import store
    from aqd.store import submit
    from aqd.strict_json import show

    try:
        with click.open_file(name, "rb") as file:
            read = list(_requests(file, cfg.jobs.max_payload_bytes))
    except OSError as error:
        raise InputError("--batch", f"{show(name)} cannot be read: {error.strerror or error}") from None
    answers = []
    with store.connect(cfg.database, "aqd submit") as conn, conn.transaction():
        numbered = iter(read)
        while some := list(islice(numbered, submit.CHUNK_JOBS)):
            made = store.enqueue_many(
                conn, [request for _, request in some], ttl_hours=cfg.jobs.idempotency_ttl_hours
            )
            for found, (number, request) in zip(made, some, strict=True):
                if isinstance(found, IdempotencyConflict):
                    raise IdempotencyConflict(f"line {number}: {found}", found.id, found.differs)
                answers.append((found, request))
    return answers


def _requests(file: IO[bytes], max_payload_bytes: int) -> "Iterator[tuple[int, JobRequest]]":
    """The jobs of the lines, with their numbers; empty lines are passed over. A line is bounded as a request is."""
    from aqd import job
    from aqd.strict_json import MAX_JSON_BYTES

    limit = max(MAX_JSON_BYTES, max_payload_bytes)
    number = 0
    while line := file.readline(limit + 2):
        number += 1
        if not line.strip():
            continue
        try:
            if len(line.rstrip(b"\r\n")) > limit:
                raise InputError("", f"is longer than {limit} bytes", limit)
            yield number, job.parse_request(line, max_payload_bytes=max_payload_bytes)
        except InputError as error:
            raise InputError(f"line {number}", str(error), error.bound) from None
