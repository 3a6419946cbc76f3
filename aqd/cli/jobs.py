"""``aqd submit``, ``jobs list|show|retry``, ``failed list``: jobs, directly in the database.

The same validation and the same statements as the HTTP service and the Python client.
"""

import os
import sys
from typing import Any

import click

from aqd.cli.command import App

STATES = ("QUEUED", "PROCESSING", "COMPLETED", "FAILED", "CANCELLED")


@click.command("submit")
@click.argument("type_", metavar="TYPE")
@click.argument("payload", default="{}")
@click.option("--queue", help='The queue; default: "default".')
@click.option("--priority", type=int, help="-100 to 100, higher first; default 0.")
@click.option("--run-at", metavar="TIME", help="Not before this moment, such as 2026-11-29T17:40:01Z.")
@click.option("--delay", "delay_s", type=float, metavar="SECONDS", help="Not before that many seconds.")
@click.option("--max-attempts", type=int, help="How often to try it, 1 to 1000.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="How long one attempt may take.")
@click.option("--json", "as_json", is_flag=True, help="Print the job as JSON, not only its id.")
@click.pass_obj
def submit_command(app: App, type_: str, payload: str, as_json: bool, **options: Any) -> None:
    """Submit a job of TYPE and print its id. PAYLOAD is JSON text, or - to read it from standard input."""
    from aqd import config, job, store
    from aqd.cli.output import print_json

    cfg = config.load(app.config_path, os.environ)
    limit = cfg.jobs.max_payload_bytes
    if payload == "-":
        payload = _read_stdin(limit)
    request = job.validate(type_, payload_json=payload, max_payload_bytes=limit, **options)
    with store.connect(cfg.database, "aqd submit") as conn:
        made = store.enqueue(conn, request)
    if as_json:
        print_json(
            {"id": str(made.id), "status": made.state, "run_at": made.run_at, "created_at": made.created_at}
        )
    else:
        click.echo(made.id)


def _read_stdin(limit: int) -> str:
    from aqd.errors import InputError

    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise InputError("payload", f"is larger than {limit} bytes", limit)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError("payload", f"is not UTF-8: {error.reason} at byte {error.start}", "UTF-8") from None


@click.group("jobs")
def jobs_command() -> None:
    """Look at jobs, try failed ones again."""
