"""aqd.config: what is read from where, what is refused and with which words, what is masked."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqd import config
from aqd.errors import ConfigError, Exit


@pytest.fixture
def write(tmp_path: Path):
    """Write a configuration file, return its path."""

    def write(text: str, name: str = "aqd.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def refusal(path: str | None, environ: dict[str, str] | None = None) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        config.load(path, environ or {})
    assert caught.value.exit_code == Exit.CONFIG
    return str(caught.value)


# --- where values come from -----------------------------------------------------------------------


def test_defaults_are_complete_and_possible(write) -> None:
    cfg = config.load(write(""), {})
    assert cfg == config.Config()
    assert (cfg.daemon.slots, cfg.api.host, cfg.api.port) == (4, "127.0.0.1", 4000)


def test_the_environment_wins_over_the_file_and_the_own_name_over_the_common_one(write) -> None:
    path = write("[daemon]\nslots = 2\npoll_ms = 500\n[api]\nport = 5000\n")
    loaded = config.load_with_sources(
        path, {"WORKER_CONCURRENCY": "3", "PORT": "6000", "AQD_API_PORT": "7000", "AQD_DAEMON_DRAIN_S": "9"}
    )
    cfg = loaded.config
    assert (cfg.daemon.slots, cfg.daemon.poll_ms, cfg.api.port, cfg.daemon.drain_s) == (3, 500, 7000, 9.0)
    assert loaded.source_of("daemon.slots") == "WORKER_CONCURRENCY"
    assert loaded.source_of("daemon.poll_ms") == path
    assert loaded.source_of("api.port") == "AQD_API_PORT"
    assert loaded.source_of("jobs.timeout_s") == "default"


def test_every_common_name_reaches_its_option(tmp_path: Path) -> None:
    cfg = config.load(
        None,
        {
            "AQD_CONFIG": str(_touch(tmp_path / "empty.toml")),
            "DATABASE_URL": "postgresql://h/d",
            "PORT": "8080",
            "WORKER_POLL_MS": "250",
            "WORKER_CONCURRENCY": "16",
            "MAX_ATTEMPTS": "7",
            "LOG_LEVEL": "DEBUG",
            "ADMIN_API_KEY": "k",
            "PDF_OUTPUT_DIR": "/srv/pdf",
        },
    )
    assert cfg.database.url == "postgresql://h/d"
    assert (cfg.api.port, cfg.daemon.poll_ms, cfg.daemon.slots, cfg.jobs.max_attempts) == (8080, 250, 16, 7)
    assert (cfg.log.level, cfg.api.admin_api_key) == ("debug", "k")
    assert cfg.plugins.settings == {"generate_pdf": {"output_dir": "/srv/pdf"}}


def _touch(path: Path) -> Path:
    path.touch()
    return path


SAMPLES = {
    "database.url": ("postgresql://u@h/d", "postgresql://u@h/d"),
    "daemon.queues": ("mail, pdf", ["mail", "pdf"]),
    "daemon.runtime_dir": ("/run/x", "/run/x"),
    "daemon.node_name": ("n1", "n1"),
    "daemon.reserved": ("mail=1, reports = 2", {"mail": 1, "reports": 2}),
    "plugins.dir": ("/srv/plugins", "/srv/plugins"),
    "plugins.venv": ("/somewhere/venv", "/somewhere/venv"),
    "plugins.settings": ('{ shell = { allow = ["/bin/ls"] } }', {"shell": {"allow": ["/bin/ls"]}}),
    "api.host": ("0.0.0.0", "0.0.0.0"),
    "daemon.metrics_host": ("0.0.0.0", "0.0.0.0"),
    "api.admin_api_key": ("key", "key"),
    "api.keys": ("a:read:sixteen-characters", "a:read:sixteen-characters"),
    "api.keys_file": ("/etc/aqd/keys.toml", "/etc/aqd/keys.toml"),
    "api.cors_origins": ("https://a.example, http://[::1]:8080", ["https://a.example", "http://[::1]:8080"]),
    "database.listen_url": ("postgresql://h/d", "postgresql://h/d"),
    "database.pooler": ("session", "session"),
    "log.level": ("Error", "error"),
    "log.format": ("json", "json"),
    "daemon.renew_s": ("2.5", 2.5),
    "daemon.lease_s": ("77", 77.0),
    "jobs.backoff_base_s": ("4", 4.0),
}


@pytest.mark.parametrize("key", sorted(set(config.OPTIONS) - {"api.admin_api_key_file"}))
def test_every_option_has_a_variable(write, key: str) -> None:
    option = config.OPTIONS[key]
    if key in SAMPLES:
        text, wanted = SAMPLES[key]
    elif option.kind == "bool":
        wanted = not option.default
        text = str(wanted)
    else:
        wanted = option.default + 1
        text = str(wanted)
    assert wanted != option.default
    name = f"AQD_{option.section}_{option.name}".upper()
    cfg = config.load(write(""), {name: text})
    assert getattr(getattr(cfg, option.section), option.name) == wanted


def test_limits_that_look_odd_together_are_taken(write) -> None:
    """A handler may have a limit of its own, above the threshold that replaces idle workers or below it;
    and a job with one attempt has fewer than it may have crashes."""
    path = write("[daemon]\nrecycle_memory_mb = 512\n[jobs]\nmemory_limit_mb = 256\nmax_attempts = 1\n")
    cfg = config.load(path, {})
    assert (cfg.daemon.recycle_memory_mb, cfg.jobs.memory_limit_mb) == (512, 256)
    assert (cfg.daemon.max_jobs_per_worker, cfg.jobs.max_crashes) == (0, 3)


@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_an_empty_variable_counts_as_not_set(write, empty: str) -> None:
    path = write('[daemon]\nslots = 9\n[api]\nadmin_api_key = "from file"\n')
    cfg = config.load(path, {"WORKER_CONCURRENCY": empty, "ADMIN_API_KEY": empty, "DATABASE_URL": empty})
    assert (cfg.daemon.slots, cfg.api.admin_api_key) == (9, "from file")
    assert cfg.database.url == config.Config().database.url


def test_lists_by_commas_or_as_toml(write) -> None:
    path = write('[daemon]\nqueues = ["a"]')
    assert config.load(path, {"AQD_DAEMON_QUEUES": "a,b , c"}).daemon.queues == ["a", "b", "c"]
    assert config.load(path, {"AQD_DAEMON_QUEUES": '["x", "y"]'}).daemon.queues == ["x", "y"]
    assert config.load(path, {"AQD_DAEMON_QUEUES": "[]"}).daemon.queues == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1", True), ("Yes", True), ("on", True), ("0", False), ("FALSE", False), ("off", False)],
)
def test_booleans_from_the_environment(write, text: str, wanted: bool) -> None:
    assert config.load(write(""), {"AQD_DATABASE_NOTIFY": text}).database.notify is wanted


def test_plugin_settings_are_merged_key_by_key(write) -> None:
    path = write(
        '[plugins.settings.a]\nx = 1\ny = 2\n[plugins.settings.generate_pdf]\noutput_dir = "o"\nfont = "f"\n'
    )
    cfg = config.load(path, {"AQD_PLUGINS_SETTINGS": "{a = {y = 3}, b = {z = 4}}", "PDF_OUTPUT_DIR": "/p"})
    assert cfg.plugins.settings == {
        "a": {"x": 1, "y": 3},
        "b": {"z": 4},
        "generate_pdf": {"output_dir": "/p", "font": "f"},
    }


def test_paths_are_relative_to_the_file_or_the_working_directory(write, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir("/")
    path = write('[plugins]\ndir = "plugins"\n')
    assert config.load(path, {}).plugins.dir == str(tmp_path / "plugins")
    assert config.load(path, {"AQD_PLUGINS_DIR": "usr/../x"}).plugins.dir == "/x"
    monkeypatch.setenv("HOME", "/home/somebody")
    assert config.load(path, {"AQD_PLUGINS_DIR": "~/p"}).plugins.dir == "/home/somebody/p"


def test_the_file_is_found_by_argument_then_variable(write) -> None:
    first, second = write("[daemon]\nslots = 1", "1.toml"), write("[daemon]\nslots = 2", "2.toml")
    assert config.load(first, {"AQD_CONFIG": second}).daemon.slots == 1
    assert config.load(None, {"AQD_CONFIG": second}).daemon.slots == 2


def test_a_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    assert refusal(missing) == f"{missing}: cannot be read: No such file or directory"
    assert refusal(None, {"AQD_CONFIG": missing}).startswith(missing)


def test_the_default_file_is_optional_but_not_ignored_when_unreadable(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(config, "DEFAULT_PATH", str(tmp_path / "etc" / "aqd.toml"))
    assert config.load(None, {}) == config.Config()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "aqd.toml").write_text("[daemon]\nslots = 3\n")
    assert config.load(None, {}).daemon.slots == 3
    (tmp_path / "etc" / "aqd.toml").unlink()
    (tmp_path / "etc" / "aqd.toml").mkdir()
    assert "cannot be read: Is a directory" in refusal(None)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[daemon]\nslot = 4", "daemon.slot: there is no such option; did you mean slots?"),
        ("[demon]\nslots = 4", "[demon]: there is no such section; did you mean daemon?"),
        ("slots = 4", "slots: options stand in sections; slots belongs to [daemon]"),
        ("[jobs]\nslots = 4", "jobs.slots: there is no such option; slots belongs to [daemon]"),
        ("daemon = 4", "daemon = 4: must be a table, written [daemon]"),
        ("[daemon]\nslots = 0", "daemon.slots = 0: must be a whole number between 1 and 512"),
        ("[daemon]\nslots = 513", "daemon.slots = 513: must be a whole number between 1 and 512"),
        ("[daemon]\nslots = 4.0", "daemon.slots = 4.0: must be a whole number between 1 and 512"),
        ("[daemon]\nslots = true", "daemon.slots = true: must be a whole number"),
        ('[daemon]\nslots = "4"', "daemon.slots = 4: must be a whole number"),
        ("[daemon]\nmax_jobs_per_worker = -1", "must be a whole number between 0 and 1000000000"),
        ("[daemon]\nrecycle_memory_mb = 0.5", "must be a whole number between 0 and 1048576"),
        ("[jobs]\nmemory_limit_mb = 1048577", "must be a whole number between 0 and 1048576"),
        ("[jobs]\nmax_crashes = 0", "jobs.max_crashes = 0: must be a whole number between 1 and 1000"),
        ("[jobs]\nmax_crashes = 1001", "must be a whole number between 1 and 1000"),
        ("[jobs]\nrecycle_memory_mb = 1", "recycle_memory_mb belongs to [daemon]"),
        ("[daemon]\nlease_s = nan", "daemon.lease_s = nan: must be a number between 1 and 86400"),
        ("[daemon]\nlease_s = inf", "daemon.lease_s = inf: must be a number between 1 and 86400"),
        ("[database]\nnotify = 1", "database.notify = 1: must be true or false"),
        ("[log]\nlevel = 3", "log.level = 3: must be a string in quotes"),
        (
            '[log]\nlevel = "inof"',
            "log.level = inof: must be one of debug, info, warning, error; did you mean info?",
        ),
        ('[database]\npooler = "sesion"', "must be one of auto, session, transaction; did you mean session?"),
        ('[database]\nlisten_url = "host"', "must be postgresql://user@host:port/database"),
        ('[log]\nformat = "xml"', "log.format = xml: must be one of auto, human, json"),
        ("[api]\nport = 65536", "api.port = 65536: must be a whole number between 1 and 65535"),
        ('[api]\nhost = "http://x"', "api.host = http://x: must be an address or a host name"),
        ('[daemon]\nqueues = "a"', "daemon.queues = a: must be a list of strings"),
        ('[daemon]\nqueues = ["a b"]', "'a b' must be 1 to 128 of the characters"),
        ('[daemon]\nqueues = ["a", "a"]', "names the same queue twice"),
        ('[daemon]\nnode_name = "a\\u0000b"', "must not contain control characters"),
        ('[database]\nurl = ""', "database.url = : must not be empty"),
        ('[database]\nurl = "mysql://h/d"', "must be postgresql://user@host:port/database or"),
        ('[database]\nurl = "postgresql+psycopg://h/d"', "must be a libpq URL, without a driver name"),
        ("[plugins.settings]\na = 1", "a must be a table, written [plugins.settings.a]"),
        (
            "[plugins.settings.a]\nx = [2026-11-29]",
            "a.x[0] must be a string, number, boolean, list or table, not a date",
        ),
        ("[plugins.settings.a]\nx = 99999999999999999999", "a.x must fit into 64 bits"),
        ("[daemon\nslots = 4", "is not valid TOML: "),
    ],
)
def test_refused_in_the_file(write, text: str, wanted: str) -> None:
    path = write(text)
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert wanted in message
    assert "\n" not in message, "one problem, one line"


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "aqd.toml"
    path.write_bytes(b'[daemon]\nnode_name = "\xff"\n')
    assert refusal(str(path)).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("lease_s = 30\nrenew_s = 10.1", "renew_s must be at most a third of lease_s"),
        ("lease_s = 10\nkill_grace_s = 5\nrenew_s = 3", "lease_s must be more than twice kill_grace_s"),
        (f'runtime_dir = "/{"d" * 100}"', "would be longer than 107 bytes"),
    ],
)
def test_impossible_combinations(write, text: str, wanted: str) -> None:
    path = write(f"[daemon]\n{text}\n")
    message = refusal(path)
    assert message.startswith(f"{path}: daemon.")
    assert wanted in message


def test_an_impossible_combination_names_every_source(write) -> None:
    path = write("[jobs]\nbackoff_base_s = 60\n")
    message = refusal(path, {"AQD_JOBS_BACKOFF_MAX_S": "30"})
    assert message == (
        f"AQD_JOBS_BACKOFF_MAX_S, {path}: jobs.backoff_max_s = 30.0, jobs.backoff_base_s = 60.0: "
        "backoff_max_s must not be below backoff_base_s"
    )


def test_the_bounds_of_combinations_themselves_are_accepted(write) -> None:
    path = write(
        "[daemon]\nlease_s = 30\nrenew_s = 10\nkill_grace_s = 14.9\n[jobs]\nbackoff_base_s = 5\nbackoff_max_s = 5"
    )
    assert config.load(path, {}).daemon.renew_s == 10.0


def test_all_problems_are_listed_at_once(write) -> None:
    path = write("[daemon]\nslots = 0\nleas_s = 3\n[log]\nlevel = 1\n")
    lines = refusal(path, {"PORT": "x", "AQD_DAEMON_SLOT": "3"}).splitlines()
    assert len(lines) == 5
    assert lines[3] == "environment: PORT = x: must be a whole number between 1 and 65535"
    assert lines[4] == "environment: AQD_DAEMON_SLOT: there is no such option; did you mean AQD_DAEMON_SLOTS?"


def test_other_variables_of_ours_and_of_kubernetes_pass(write) -> None:
    kubernetes = {
        "AQD_PORT": "tcp://10.0.0.1:80",
        "AQD_SERVICE_HOST": "10.0.0.1",
        "AQD_SERVICE_PORT": "80",
        "AQD_PORT_80_TCP": "tcp://10.0.0.1:80",
        "AQD_PORT_80_TCP_ADDR": "10.0.0.1",
        "AQD_API_PORT": "tcp://10.0.0.1:4000",
        "AQD_API_SERVICE_PORT_HTTP": "4000",
    }
    ours = {
        "AQD_DEBUG": "1",
        "AQD_VENV": "/v",
        "AQD_TEST_DATABASE_URL": "x",
        "AQD_JOB_ID": "4",
        "AQD_INTERNAL_MARK": "7",
    }
    assert config.load(write(""), kubernetes | ours) == config.Config()


# --- secrets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DATABASE_URL", "AQD_DATABASE_URL"])
def test_the_database_url_from_a_file(write, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "url"
    secret.write_text("postgresql://u:pw@h/d\n")
    loaded = config.load_with_sources(write(""), {f"{name}_FILE": str(secret)})
    assert loaded.config.database.url == "postgresql://u:pw@h/d"
    assert loaded.source_of("database.url") == f"{name}_FILE"


def test_the_url_to_listen_at_may_stand_in_a_file(write, tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text("postgresql://u:hunter2@h/d\n")
    loaded = config.load_with_sources(write(""), {"AQD_DATABASE_LISTEN_URL_FILE": str(secret)})
    assert loaded.config.database.listen_url == "postgresql://u:hunter2@h/d"


@pytest.mark.parametrize("name", ["ADMIN_API_KEY_FILE", "AQD_API_ADMIN_API_KEY_FILE"])
@pytest.mark.parametrize(
    ("content", "key"), [("s3cret\n", "s3cret"), ("s3cret\r\n\n", "s3cret"), ("", ""), (" \n", "")]
)
def test_the_admin_key_from_a_file(write, tmp_path: Path, name: str, content: str, key: str) -> None:
    secret = tmp_path / "key"
    secret.write_bytes(content.encode())
    assert config.load(write(""), {name: str(secret)}).api.admin_api_key == key


def test_the_admin_key_from_the_file_that_the_configuration_names(write, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k1\n")
    path = write('[api]\nadmin_api_key_file = "key"\n')
    loaded = config.load_with_sources(path, {})
    assert loaded.config.api.admin_api_key == "k1"
    assert loaded.source_of("api.admin_api_key") == f"{tmp_path / 'key'} ({path})"
    assert config.load(path, {"ADMIN_API_KEY": "k2"}).api.admin_api_key == "k2"


@pytest.mark.parametrize("blank", ["", "  ", "\t"])
def test_a_blank_admin_key_is_no_key(write, blank: str) -> None:
    assert config.load(write(f'[api]\nadmin_api_key = "{blank}"\n'), {}).api.admin_api_key == ""


@pytest.mark.parametrize("name", ["DATABASE_URL_FILE", "ADMIN_API_KEY_FILE", "AQD_DATABASE_URL_FILE"])
def test_an_unreadable_secret_is_refused_and_named(write, tmp_path: Path, name: str) -> None:
    missing = tmp_path / "missing"
    message = refusal(write(""), {name: str(missing)})
    assert str(missing) in message
    assert name in message
    assert "cannot be read: No such file or directory" in message


def test_an_empty_database_url_file_is_refused(write, tmp_path: Path) -> None:
    (tmp_path / "url").write_text("\n")
    assert "the file is empty" in refusal(write(""), {"DATABASE_URL_FILE": str(tmp_path / "url")})


def test_a_secret_and_its_file_together_are_refused(write, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("postgresql:///x")
    both = {"DATABASE_URL": "postgresql:///y", "DATABASE_URL_FILE": str(tmp_path / "s")}
    assert "DATABASE_URL and DATABASE_URL_FILE are both set" in refusal(write(""), both)
    both = {"ADMIN_API_KEY": "y", "ADMIN_API_KEY_FILE": str(tmp_path / "s")}
    assert "are both set" in refusal(write(""), both)
    path = write('[api]\nadmin_api_key = "a"\nadmin_api_key_file = "s"\n')
    assert "are both set" in refusal(path)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:hunter2@h/d",
        "postgres://u:hunter2@h1:5432,h2:5432/d?sslmode=require",
        "postgresql://u:hunter2/with@sign@h/d",
        "postgresql:///d?user=u&password=hunter2",
        "host=h password=hunter2 dbname=d",
        "host=h password = 'hunter2 \\' with quote' dbname=d",
        "host=h PASSWORD='hunter2",
        "connection to postgresql://u:hunter2@h/d failed",
        "redis://:hunter2@h:6379/0",
        "mysql://root:hunter2@h/d",
    ],
)
def test_passwords_are_masked(text: str) -> None:
    masked = config.mask(text)
    assert "hunter2" not in masked
    assert "sign" not in masked
    assert "quote" not in masked
    assert "***" in masked


@pytest.mark.parametrize(
    "text",
    [
        "postgresql:///aqd",
        "http://localhost:4000/jobs?mail=a@b",
        "12:30 a@b",
        "user:pw@host",
        "passwords = none?",
    ],
)
def test_what_is_no_password_is_not_masked(text: str) -> None:
    assert config.mask(text) == text


@pytest.mark.parametrize(
    ("key", "value"),
    [("database.url", "mysql://u:hunter2@h"), ("api.admin_api_key", "hunter2\x01")],
)
def test_refusals_do_not_show_secrets(write, key: str, value: str) -> None:
    name = "AQD_" + key.replace(".", "_").upper()
    message = refusal(write(""), {name: value})
    assert name in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "name",
    [
        *("ADMIN_API_KEY", "AQD_API_KEYS", "DATABASE_URL", "DATABASE_URL_FILE", "AQD_API_KEYS_FILE"),
        *("AQD_DAEMON_QUEUES", "AQD_PLUGINS_SETTINGS", "PDF_OUTPUT_DIR", "LOG_LEVEL"),
    ],
)
def test_bytes_that_are_not_utf8_are_refused(write, name: str) -> None:
    """As Python hands them over: each such byte as a lone surrogate, which nothing later could encode."""
    text = {"DATABASE_URL": "postgresql://u:hunter2@h/", "AQD_PLUGINS_SETTINGS": "{ a = { b = 'hunter2"}
    message = refusal(write(""), {name: text.get(name, "hunter2") + "\udcff'}}"})
    assert f"environment: {name} = " in message
    assert "is not UTF-8" in message
    message.encode()
    assert "hunter2" not in message or name not in ("ADMIN_API_KEY", "AQD_API_KEYS", "DATABASE_URL")


def test_shown_values_hide_secrets_and_are_toml() -> None:
    import tomllib

    settings = {"mail": {"host": "h", "smtp_password": "hunter2", "nested": [{"api_key": "hunter2"}]}}
    shown = config.shown("plugins.settings", settings)
    assert "hunter2" not in shown
    assert tomllib.loads(f"x = {shown}")["x"]["mail"]["host"] == "h"
    assert config.shown("api.admin_api_key", "hunter2") == '"***"'
    assert config.shown("api.admin_api_key", "") == '""'
    assert config.shown("database.url", "postgresql://u:hunter2@h/d") == '"postgresql://u:***@h/d"'


def test_no_secret_is_left_in_what_handlers_get() -> None:
    api = config.Api(admin_api_key="a" * 40, keys="k:read:x", keys_file="/k", admin_api_key_file="/a", port=5)
    cfg = config.Config(database=config.Database(url="postgresql://u:pw@h/d", notify=False), api=api)
    public = config.without_secrets(cfg)
    assert public.database == config.Database(url="", notify=False)
    assert public.api == config.Api(port=5)
    for key in config.SECRETS:
        section, _, name = key.partition(".")
        assert getattr(getattr(public, section), name) == ""


def test_all_variables_of_secrets_are_known() -> None:
    assert config.secret_variables() >= {
        *("DATABASE_URL", "AQD_DATABASE_URL_FILE", "PGPASSWORD", "AQD_API_KEYS", "AQD_API_KEYS_FILE"),
        *("AQD_DATABASE_LISTEN_URL", "AQD_DATABASE_LISTEN_URL_FILE"),
        *("ADMIN_API_KEY", "ADMIN_API_KEY_FILE", "AQD_API_ADMIN_API_KEY"),
    }


# --- for other processes --------------------------------------------------------------------------

_settings = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(
        st.text(max_size=5), st.dictionaries(st.text(max_size=5), _settings, max_size=3), max_size=3
    )
)
def test_a_configuration_survives_the_trip_to_a_child(settings) -> None:
    cfg = config.Config(plugins=config.Plugins(settings=settings))
    assert config.decode(config.encode(cfg)) == cfg


@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), _settings, max_size=3))
def test_shown_settings_read_back_as_toml(table) -> None:
    import tomllib

    text = config.shown("daemon.x", table)
    if "***" not in text:
        assert tomllib.loads(f"x = {text}")["x"] == table


def test_lenient_reading_finds_what_it_can(write, tmp_path: Path) -> None:
    path = write(f'[daemon]\nruntime_dir = "{tmp_path}"\nslots = 0\nbogus = 1\n')
    assert config.load_leniently(path, {"PORT": "x"}).daemon.runtime_dir == str(tmp_path)
    broken = write("[daemon\n", "broken.toml")
    assert config.load_leniently(broken, {"AQD_DAEMON_RUNTIME_DIR": "/run/y"}).daemon.runtime_dir == "/run/y"
    assert config.load_leniently(str(tmp_path / "missing"), {}) == config.Config()


def test_the_runtime_directory(tmp_path: Path) -> None:
    cfg = config.Config()
    assert config.runtime_dir(cfg, {"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/x"}) == Path(
        "/run/a"
    )
    given_dir = config.Config(daemon=config.Daemon(runtime_dir=str(tmp_path)))
    assert config.runtime_dir(given_dir, {"RUNTIME_DIRECTORY": "/run/a"}) == tmp_path
    assert config.pid_file(given_dir, {}) == tmp_path / "aqd.pid"
    assert config.control_socket(given_dir, {}) == tmp_path / "control.sock"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_the_runtime_directory_of_an_ordinary_user() -> None:
    """In a child that has given up root."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(64_999)
            cfg = config.Config()
            found = [config.runtime_dir(cfg, {"XDG_RUNTIME_DIR": "/run/user/9"}), config.runtime_dir(cfg, {})]
            os.write(writer, " ".join(map(str, found)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as stream:
        assert stream.read() == "/run/user/9/aqd /tmp/aqd-64999"


def test_importing_it_stays_cheap() -> None:
    """The master imports these three; what they drag in delays every start."""
    import subprocess
    import sys

    code = "import sys, aqd.config, aqd.log, aqd.systemd; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"click", "rich", "psycopg", "falcon", "gunicorn", "difflib", "asyncio"} & set(modules)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("mail", "whole numbers by queue, { mail = 2, reports = 1 }; in the environment mail=2,reports=1"),
        ("mail=", "whole numbers by queue"),
        ("mail=x", "whole numbers by queue"),
        ("mail=-1", "whole numbers by queue"),
        ("mail=1.5", "whole numbers by queue"),
        ("mail=513", "mail must be between 0 and 512"),
        ("ma il=1", "must be 1 to 128"),
        ("{ mail = true }", "whole numbers by queue"),
        ("{ mail = ", "TOML"),
        ("mail=3,reports=1", "fewer than all"),
    ],
)
def test_reserved_slots_that_cannot_be(write, text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config.load(write(""), {"AQD_DAEMON_RESERVED": text})


def test_reserved_slots_in_both_notations(write) -> None:
    for text in ("mail=1,reports=2", "{ mail = 1, reports = 2 }"):
        assert config.load(write(""), {"AQD_DAEMON_RESERVED": text}).daemon.reserved == {
            "mail": 1,
            "reports": 2,
        }
    assert config.load(write("[daemon.reserved]\nmail = 1\n"), {}).daemon.reserved == {"mail": 1}
