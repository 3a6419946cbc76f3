"""README.md says what is true: its examples are run, its tables are compared with the code.

A block is either part of the story (``readme_story.py``), compared by a test of its own, or named in
:data:`NOT_RUN` with the reason.
"""

from __future__ import annotations

import inspect
import re
import signal
import tomllib
from collections.abc import Callable
from typing import Any

import pytest

import aqd
from aqd import (
    __version__,
    admin,
    client,
    config,
    failures,
    figures,
    hookspecs,
    job,
    keys,
    log,
    outcomes,
    output,
    page,
    plugin_files,
    process,
    strict_json,
)
from aqd.api import body, documents, problems, query
from aqd.api.filters import FilterBody
from aqd.api.routes import ENDPOINTS
from aqd.api.routes.jobs import WaitParams
from aqd.errors import Exit
from aqd.hookspecs import HOOK_NAMES, HandlerOptions, Hooks, JobContext
from aqd.job import JobRequest, State
from aqd.store import change, listing
from tests.fixtures.daemon import Daemon
from tests.fixtures.jobs import Jobs
from tests.fixtures.postgres import free_port
from tests.system import readme_code
from tests.system.readme_page import PAGE, ROOT, Block, code, only
from tests.system.readme_story import CHECKS, KEY, World

RUN = ("sh", "python", "sql", "toml")
NOT_RUN = {
    ("Two commands", "sh", 0): "packaging/demo is run by test_demo.py; packaging/test runs this test",
    ("Two commands", "sh", 1): "names the environment that packaging/demo makes; the story has its own",
    (
        "Packages of plugins",
        "sh",
        0,
    ): "installs from the index as root; tests/unit/test_plugin_env.py does it",
    ("Debian's package", "sh", 0): "takes minutes; tests/system/test_deb.py builds the packages",
    (
        "Debian's package",
        "sh",
        1,
    ): "changes the machine as root; tests/system/test_deb.py does it in one of its own",
    ("Debian's package", "sh", 2): "wants systemd; tests/system/test_deb.py runs the same of README.Debian",
    (
        "Debian's package",
        "sh",
        3,
    ): "unpacks a package that is not there; what it runs is tried in test_deb.py",
    ("On a server", "sh", 0): "changes the machine as root; its files are looked for below",
    ("On a server", "sh", 1): "changes the machine as root; its files are looked for below",
    ("On a server", "sh", 2): "changes the machine's PostgreSQL as root",
    ("On a server", "sh", 3): "changes the machine as root; its commands are looked for below",
    ("A proxy in front", "nginx", 0): "the configuration of another program; its numbers are looked at below",
    (
        "Testing handlers",
        "python",
        1,
    ): "a test of somebody's project: tests/system/test_testing_kit.py has such projects",
    ("In containers", "dockerfile", 0): "built by test_containers.py",
    ("In containers", "sh", 0): "run by test_compose.py, with images of its own",
    ("In containers", "sh", 1): "as test_containers.py runs the image",
    ("On a server", "sh", 4): "looks into the journal of a server: tests/system/test_systemd_journal.py does",
    ("Roles", "sh", 0): "makes roles of the whole server: tests/sql/test_roles.py",
    ("Roles", "sh", 1): "changes the machine's PostgreSQL as root: tests/sql/test_roles_made.py",
    ("Backup and restore", "sh", 0): "needs another database: tests/sql/test_backup.py",
    ("On a server", "ini", 0): "a drop-in of systemd; its variable is looked for below",
    ("Beside other queues", "sh", 0): "installs other projects and takes ten minutes",
    ("Working on the code", "sh", 0): "runs this suite; the files are looked for below",
}
COMPARED = {
    ("Submit a job", "json", 0): "the story: the_literal_example",
    ("Submit a job", "json", 1): "the story: its_result",
    ("Keys", "toml", 0): "test_the_scopes_of_keys",
    ("The processes of one machine", "text", 0): "the story: the_processes",
    ("The life of a job", "text", 0): "test_the_states",
    ("Operations", "text", 0): "test_the_status",
    ("Working on the code", "text", 0): "test_the_layers",
}


def test_every_block_is_accounted_for() -> None:
    here = {block.key for block in PAGE.blocks}
    assert set(NOT_RUN) <= here
    assert set(COMPARED) <= here
    assert set(CHECKS) <= here - set(NOT_RUN)
    for block in PAGE.blocks:
        if block.key not in NOT_RUN and block.key not in COMPARED:
            assert block.language in RUN, f"line {block.line}: nobody runs this block"


@pytest.mark.timeout(420)
def test_the_examples(start_daemon: Callable[..., Daemon], jobs: Jobs) -> None:
    port = free_port()
    settings = {
        "daemon": {"slots": 4},
        "api": {"port": port, "workers": 1, "admin_api_key": KEY},
        "log": {"level": "info"},
    }
    daemon = start_daemon(settings, with_api=True, start=False)
    daemon.configure(
        {"plugins": {"settings": {"generate_pdf": {"output_dir": str(daemon.directory / "pdf")}}}}
    )
    for fixture in daemon.plugins_dir.glob("*.py"):
        fixture.unlink()  # the page knows the shipped plugins only
    world = World(daemon, jobs, port)
    daemon.start()
    try:
        for block in PAGE.blocks:
            if block.key in NOT_RUN or block.key in COMPARED:
                continue
            output = world.run(block)
            if block.key in CHECKS:
                CHECKS[block.key](world, output)
        the_status(world)
    finally:
        world.drop_roles()


def the_status(world: World) -> None:
    """The example of ``aqd status`` has the lines and columns of a real one."""

    def form(text: str) -> list[list[str]]:
        heads = (
            "aqd ",
            "configuration:",
            "database:",
            "since the start:",
            "processes:",
            "slots:",
            "plugins:",
        )
        columns = (" process", " slot ", " plugin ")
        return [
            line.split() if line.startswith(columns) else [line.split(" ")[0]]
            for line in text.splitlines()
            if line.startswith(heads + columns)
        ]

    assert form(world.daemon.aqd("status").stdout) == form(PAGE.block("Operations", "text").text)


# --- what is not run ----------------------------------------------------------------------------------


def words_of(*keys: tuple[str, str, int]) -> list[str]:
    return [word for key in keys for word in PAGE.block(*key).text.split()]


def test_the_files_and_commands_of_blocks_that_are_not_run() -> None:
    words = words_of(*(key for key in NOT_RUN if key[1] == "sh"))
    paths = [word for word in words if re.match(r"(packaging|systemd|etc|tests|\.ci)/", word)]
    assert len(paths) >= 9
    for path in paths:
        assert (ROOT / path).exists(), path
    known = readme_code.commands()
    for key in NOT_RUN:
        for command in re.findall(r"^(?:sudo -u aqd )?(aqd [a-z ]+)$", PAGE.block(*key).text, re.MULTILINE):
            assert command in known
    variables = {f"{name}_FILE" for o in config.OPTIONS.values() for name in o.env if o.key in config.SECRETS}
    assert re.search(r"Environment=(\w+)=", PAGE.block("On a server", "ini").text)[1] in variables  # type: ignore[index]


def test_the_units_are_as_the_page_says() -> None:
    unit = (ROOT / "systemd/aqd.service").read_text()
    assert "ExecStart=/usr/bin/aqd run" in unit
    assert "RestartSec=2\n" in unit
    for folder in ("StateDirectory", "LogsDirectory", "RuntimeDirectory"):
        assert f"{folder}=aqd\n" in unit
    assert "PrivateTmp=yes" in unit


# --- tables -------------------------------------------------------------------------------------------


def test_the_options() -> None:
    rows = {only(row[0]): row for row in PAGE.table("option", "Configuration").rows}
    assert list(rows) == list(config.OPTIONS)
    for key, option in config.OPTIONS.items():
        bounds = "" if option.low is None else f"{option.low}..{option.high}"
        assert rows[key][1:3] == [f"`{config.shown(key, option.default)}`", bounds], key
        assert code(rows[key][3]) == list(option.env), key
        assert rows[key][4], key


def test_other_names_of_options() -> None:
    """Whatever the text calls an option is one."""
    sections = "|".join(config.Config.__struct_fields__)
    for named in set(re.findall(rf"`((?:{sections})\.[a-z_]+)`", PAGE.text)):
        assert named in config.OPTIONS, named
    for named in ("DATABASE_URL_FILE", "AQD_DATABASE_URL_FILE", "PDF_OUTPUT_DIR", "AQD_DEBUG", "AQD_CONFIG"):
        assert f"`{named}" in PAGE.text


def test_the_exit_codes() -> None:
    rows = [(int(row[0]), only(row[1])) for row in PAGE.table("code").rows]
    assert rows == [(int(each), each.name) for each in Exit]


def test_the_log() -> None:
    rows = {only(row[0]): set(row[1].split(", ")) for row in PAGE.table("event").rows}
    assert len(rows) == len(PAGE.table("event").rows), "an event stands twice"
    events = readme_code.log_events()
    assert len(events) > 50
    assert {e: levels for e, levels in events.items() if e not in rows} == {}, "not on the page"
    assert set(rows) - set(events) == set(), "not in the code"
    assert {event: events[event] for event in rows} == rows


def test_the_hooks() -> None:
    rows = {only(row[0]): only(row[1]).split(", ") for row in PAGE.table("hook").rows}
    assert list(rows) == list(HOOK_NAMES)
    for name, arguments in rows.items():
        assert arguments == list(inspect.signature(getattr(Hooks, name)).parameters)[1:], name


def test_the_options_of_handlers() -> None:
    options = list(HandlerOptions.__annotations__)
    assert [only(row[0]) for row in PAGE.table("option", "Handlers").rows] == options
    bounds = {only(row[0]): row[2] for row in PAGE.table("option", "Handlers").rows}
    implied = {
        only(row[0]) for row in PAGE.table("option", "Handlers").rows if "implies `one_shot`" in row[1]
    }
    for name, bound in bounds.items():
        add(name, good := ACCEPTED[name])
        if found := re.fullmatch(r"(-?\d+)\.\.(\d+)", bound):
            low, high = map(int, found.groups())
            add(name, low)
            add(name, high)
            for value in (low - 1, high + 1, 1.5, True):
                with pytest.raises(ValueError, match=name):
                    add(name, value)
        elif bound == "`True`, `False`":
            with pytest.raises(ValueError, match=name):
                add(name, 1)
        assert add(name, good).one_shot == (name in implied or name == "one_shot"), name
    names = re.search(r"Limits go by the names (.*?), such as", PAGE.text, re.DOTALL)
    assert names is not None
    assert tuple(code(names[1])) == hookspecs.RLIMITS


# A good value for each option.
ACCEPTED: dict[str, Any] = {
    "timeout_s": 0.5,
    "max_attempts": 2,
    "max_crashes": 2,
    "backoff": hookspecs.Backoff(),
    "queue": "mail",
    "memory_limit_mb": 64,
    "detach": True,
    "keep_output": True,
    "one_shot": True,
    "oom_score_adj": 500,
    "rlimits": {"NOFILE": 64},
    "hard_rlimits": {"NOFILE": 64, "CORE": "unlimited"},
    "nice": 5,
    "no_new_privs": True,
    "user": "nobody",
    "group": "nogroup",
}


def add(option: str, value: object) -> hookspecs.HandlerInfo:
    """What the option makes of a handler."""
    handlers = hookspecs.Handlers("readme", {})
    handlers.add("type", lambda payload: payload, **{option: value})  # type: ignore[arg-type]
    return handlers.collected["type"][0]


def test_the_job() -> None:
    names = {name for name in dir(JobContext) if not name.startswith("_")}
    named = [only(row[0]) for row in PAGE.table("attribute of `job`").rows]
    assert {name.partition("(")[0] for name in named} == names
    for name, _, arguments in (each.rstrip(")").partition("(") for each in named):
        if arguments:
            assert list(inspect.signature(getattr(JobContext, name)).parameters)[1:] == arguments.split(", ")


def test_reserved_signals() -> None:
    row = next(row for row in PAGE.table("thing").rows if row[0] == "signals")
    number = process.DUMP_SIGNAL - signal.SIGRTMIN
    assert code(row[1])[:2] == [process.STOP_SIGNAL.name, f"SIGRTMIN+{number}"]


def test_the_exceptions() -> None:
    named = {found[1] for row in PAGE.table("exception").rows if (found := re.match(r"`aqd\.(\w+)", row[0]))}
    exceptions = {
        n for n in aqd.__all__ if inspect.isclass(e := getattr(aqd, n)) and issubclass(e, BaseException)
    }
    assert named == exceptions
    for row in PAGE.table("exception").rows:
        if found := re.match(r"`aqd\.(\w+)\(([^)]+)\)", row[0]):
            assert list(inspect.signature(getattr(aqd, found[1])).parameters) == found[2].split(", ")


def test_the_routes() -> None:
    rows = PAGE.table("route").rows
    scopes = {f"{each.method} {each.path}": each.scope for each in ENDPOINTS}
    assert {only(row[0]): row[3] for row in rows} == {
        route: str(scope) if scope is not None else "–" for route, scope in scopes.items()
    }
    by_route = {only(row[0]): row for row in rows}
    for each in ENDPOINTS:
        successes = {str(status) for status in each.answers if status < 300}
        assert set(re.findall(r"\b2\d\d\b", by_route[f"{each.method} {each.path}"][2])) == successes, (
            each.path
        )
    assert f"1..{query.LIMIT_MAX}, default {query.LIMIT_DEFAULT}" in by_route["GET /jobs"][1]


def test_the_filters() -> None:
    rows = PAGE.table("filter").rows
    assert sorted(name for row in rows for name in code(row[0])) == sorted(FilterBody.__struct_fields__)
    options = {o for parameter in readme_code.commands()["aqd jobs list"].params for o in parameter.opts}
    for row in rows:
        assert code(row[2]) == [f"--{name.replace('_', '-')}" for name in code(row[0])]
        assert set(code(row[2])) <= options


def test_the_window() -> None:
    assert f"last {listing.WINDOW.days} days" in PAGE.text
    assert f"{listing.MAX_PAGE_BYTES >> 20} MiB" in PAGE.text


def test_the_scopes_of_keys() -> None:
    """The example of a named key is one."""
    table = tomllib.loads(PAGE.block("Keys", "toml").text)["keys"]["billing"]
    assert set(table) == {"sha256", "scopes"}
    assert re.fullmatch("[0-9a-f]{64}", table["sha256"])
    assert set(table["scopes"]) <= set(keys.Scope)


def test_the_proxy() -> None:
    block = PAGE.block("A proxy in front", "nginx").text
    (wait,) = WaitParams.__annotations__["wait_s"].__metadata__
    assert int(re.search(r"proxy_read_timeout (\d+)s", block)[1]) > wait.le  # type: ignore[index]
    assert body.limit(config.Config()) == 1 << 20
    assert "client_max_body_size 1m" in block
    assert re.search(r"proxy_pass http://[\d.]+:\d+;", block)  # with a path it would decode %2F
    assert "rewrite" not in block


def test_the_names_of_the_clients() -> None:
    for row in PAGE.table("`aqd.client`").rows:
        for name in code(row[0]):
            assert name in client.__all__
            assert f"{name}_async" in client.__all__
    for row in PAGE.table("what", "Changing jobs and queues").rows:
        for name in code(row[3]):
            module, _, function = name.rpartition(".")
            assert function in (client if module else admin).__all__
        assert [method for method in code(row[1]) if method.startswith(("POST", "PATCH", "DELETE"))]


def test_the_metrics() -> None:
    named = {name for row in PAGE.table("metric").rows for name in code(row[0])}
    known = {each.name + ("" if each.scale or each.gauge else "_total") for each in figures.METRICS.values()}
    assert named == known | readme_code.API_METRICS | {"aqd_jobs_total", "aqd_build_info"}
    for metric in figures.METRICS.values():
        row = next(row for row in PAGE.table("metric").rows if metric.name in row[0])
        if metric.name != "aqd_attempts":  # the row before has them
            assert set(metric.labels) <= set(code(row[1])), metric.name


def test_the_fields_of_a_job() -> None:
    rows = {only(row[0]): row[2] for row in PAGE.table("field").rows}
    assert sorted(rows) == sorted(JobRequest.__struct_fields__)
    options = {o for parameter in readme_code.commands()["aqd submit"].params for o in parameter.opts}
    for row in PAGE.table("field").rows:
        assert all(flag in options for flag in code(row[4]) if flag.startswith("-")), row[0]
    schema = (ROOT / "sql/migrations/0003_applications.sql").read_text()
    arguments = re.search(r"create function aqd\.enqueue\((.*?)\) returns", schema, re.DOTALL)
    assert arguments is not None
    in_sql = re.findall(r"^    (\w+)", arguments[1], re.MULTILINE)
    named = re.search(r"`aqd\.enqueue\(([^)]*)\)`", PAGE.text)
    assert named is not None
    assert named[1].replace(",", " ").split() == [name for name in in_sql if name != "key_scope"]
    assert set(rows) <= set(in_sql)
    assert rows["tags"].startswith(f"{job.MAX_TAGS} ")
    assert rows["meta"] == f"{job.MAX_META_BYTES >> 10} KiB"
    assert rows["idempotency_key"].startswith(f"1..{job.MAX_KEY_CHARS} ")
    assert rows["priority"] == f"{job.MIN_PRIORITY}..{job.MAX_PRIORITY}"
    assert rows["run_at"] == f"{job.MIN_RUN_AT:%Y-%m-%d}..{job.MAX_RUN_AT:%Y-%m-%d}"
    assert rows["delay_s"] == f"0..{job.MAX_DELAY_S}"
    assert rows["max_attempts"] == f"1..{job.MAX_ATTEMPTS}"
    assert rows["timeout_s"] == f"0.1..{job.MAX_TIMEOUT_S}"
    assert rows["payload"] == f"{strict_json.MAX_JSON_BYTES >> 20} MiB, {strict_json.MAX_DEPTH} levels"
    assert rows["type"].startswith(f"1..{job.MAX_NAME_CHARS} ")


def test_the_errors() -> None:
    rows = [(int(row[0]), only(row[1])) for row in PAGE.table("status").rows]
    assert rows == sorted(rows, key=lambda row: row[0])
    assert sorted((kind, status) for status, kind in rows) == sorted(
        (f"urn:aqd:{kind}", status) for kind, (status, _) in problems.KINDS.items()
    )


def test_the_commands() -> None:
    known = readme_code.commands()
    rows = {only(row[0]): row[1] for row in PAGE.table("command").rows}
    assert set(rows) == set(known)
    for name, text in rows.items():
        options = {o for parameter in known[name].params for o in parameter.opts}
        for option in code(text):
            if option.startswith("-") and len(option) > 1:
                assert option.split()[0] in options, f"{name} {option}"


def test_the_status() -> None:
    known = readme_code.strings("status.py", "master.py", "cli/daemon.py")
    words = [word for row in PAGE.table("in the status").rows for word in code(row[0])]
    for word in words:
        assert any(word in text for text in known), word
    master = readme_code.strings("master.py")
    assert {"starting", "waiting for database", "running", "reloading", "draining"} <= master & set(words)


def test_the_states() -> None:
    drawing = PAGE.block("The life of a job", "text").text
    shown = set(re.findall(r"\b[A-Z]{4,}\b", drawing))
    assert shown == {str(state) for state in State}


def test_the_answer_about_a_job() -> None:
    rows = PAGE.table("in the answer").rows
    named = [name for row in rows for name in code(row[0])]
    assert sorted(named) == sorted(documents.JobInFull.__struct_fields__)
    in_full = [name for row in rows for name in re.findall(r"`(\w+)`\\\*", row[0])]
    assert set(in_full) == set(documents.JobInFull.__struct_fields__) - set(documents.Job.__struct_fields__)
    states = next(row[1] for row in rows if "`status`" in row[0])
    assert states.split(", ") == [str(state) for state in State]


def test_kinds_and_reasons() -> None:
    kinds = [only(row[0]) for row in PAGE.table("kind").rows]
    schema = (ROOT / "sql/migrations/0001_schema.sql").read_text()
    allowed = re.search(r"constraint job_attempts_kind check \(kind in \((.*?)\)\)", schema, re.DOTALL)
    assert allowed is not None
    assert sorted(kinds) == sorted(re.findall(r"'(\w+)'", allowed[1]))
    reasons = {only(row[0]): only(row[1]) for row in PAGE.table("reason").rows}
    assert list(reasons) == list(outcomes.REASONS)
    for kind, reason in readme_code.kinds_and_reasons():
        assert reasons[reason] == ("failed" if kind == "discarded" else kind), reason


def test_the_limits() -> None:
    limit = {row[0]: row[1] for row in PAGE.table("what", "Limits").rows}
    slots = config.OPTIONS["daemon.slots"].high
    mib = f"{strict_json.MAX_JSON_BYTES >> 20} MiB"
    assert limit["payload"].startswith(mib)
    assert "67108864" in (ROOT / "sql/migrations/0001_schema.sql").read_text()
    assert "64 MiB by SQL" in limit["payload"]
    assert body.limit(config.Config()) == strict_json.MAX_JSON_BYTES
    assert limit["body of a request"].startswith(mib)
    assert config.Config().jobs.max_result_bytes == strict_json.MAX_JSON_BYTES
    assert limit["result of a handler"] == f"{mib} (`jobs.max_result_bytes`)"
    assert limit["nesting of JSON"] == f"{strict_json.MAX_DEPTH} levels"
    assert limit["one number in JSON"] == f"{strict_json.MAX_NUMBER_CHARS} characters"
    assert limit["tags of a job"] == str(job.MAX_TAGS)
    assert limit["`meta` of a job"].startswith(f"{job.MAX_META_BYTES >> 10} KiB, as PostgreSQL writes it")
    years = int(job.MAX_KEY_TTL_HOURS / 24 / 365)
    assert limit["idempotency key"] == f"{job.MAX_KEY_CHARS} characters; it lives up to {years} years"
    assert limit["batch over HTTP"].startswith(f"{job.MAX_BATCH} jobs")
    many = f"{job.MAX_IDS} by `ids`; {change.MAX_JOBS:,} by filter"
    assert limit["jobs that one request changes"].startswith(many)
    assert limit["reason of a discard"] == f"{change.MAX_REASON_CHARS} characters"
    assert limit["names of types, queues and tags"] == f"{job.MAX_NAME_CHARS} characters"
    assert limit["slots of a daemon"] == str(slots)
    assert limit["attempts, and crashes, of a job"] == str(job.MAX_ATTEMPTS)
    assert limit["time limit of an attempt"] == f"{job.MAX_TIMEOUT_S // 86400} days"
    assert limit["delay of a job"] == f"{job.MAX_DELAY_S // 86400} days"
    texts = f"{listing.MAX_PAGE_BYTES >> 20} MiB of texts"
    assert limit["page of a list"] == f"{query.LIMIT_MAX} jobs, {texts}"
    errors = f"{failures.MAX_ERROR_CHARS} and {failures.MAX_TRACEBACK_CHARS} characters"
    assert limit["stored error, traceback"].startswith(errors)
    assert limit["stored output of an attempt"].startswith(f"{output.LIMIT >> 10} KiB;")
    assert limit["message of `job.progress`"] == f"{page.NOTE_BYTES} bytes"
    assert limit["a log line"] == f"{log.MAX_LINE} bytes"


def test_the_layers() -> None:
    layers = PAGE.block("Working on the code", "text").text
    modules = {path.stem for path in (ROOT / "aqd").iterdir()}
    named = [
        word for line in layers.splitlines() for word in re.split(r"[ ,|…]+", re.sub(r"\s{2,}.*", "", line))
    ]
    assert len(named) > 30
    for name in filter(None, named):
        assert name in modules, name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    order = [
        [name.strip("() ") for name in re.split(r"[|:]", layer)]
        for layer in project["tool"]["importlinter"]["contracts"][0]["layers"]
    ]
    level = {name: number for number, names in enumerate(order) for name in names}
    levels = [level[name] for name in filter(None, named)]
    assert levels == sorted(levels), "the drawing is not in the order of pyproject.toml"


def test_the_folders() -> None:
    for row in PAGE.table("folder").rows:
        for name in code(row[0]):
            assert (ROOT / name).is_dir()
    entry_point = tomllib.loads(PAGE.block("Handlers", "toml", 1).text)
    assert list(entry_point["project"]["entry-points"]) == [plugin_files.ENTRY_POINT_GROUP]


def test_links_and_version() -> None:
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in PAGE.headings}
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGE.text):
        assert target.removeprefix("#") in anchors if target.startswith("#") else (ROOT / target).exists()
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text()


def blocks_of(language: str) -> list[Block]:
    return [block for block in PAGE.blocks if block.language == language]


def test_the_handler_has_ten_lines() -> None:
    lines = [
        line for line in PAGE.block("A handler in ten lines", "python").text.splitlines() if line.strip()
    ]
    assert len([line for line in lines if not line.startswith("#")]) <= 10
    for block in blocks_of("python"):
        compile(block.text, f"README line {block.line}", "exec")
