"""TLS: what libpq knows passes through, to a real server with certificates made here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqd.binaries import server_account
from tests.fixtures.postgres import LocalPostgres

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def authority(folder: Path, name: str) -> None:
    openssl(
        folder,
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
        *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt"),
    )


def certificate(folder: Path, name: str, subject: str, extension: str) -> None:
    (folder / f"{name}.ext").write_text(extension)
    openssl(
        folder,
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={subject}", "-keyout", f"{name}.key", "-out", f"{name}.csr"),
    )
    openssl(
        folder,
        *("x509", "-req", "-in", f"{name}.csr", "-CA", "ours.crt", "-CAkey", "ours.key", "-CAcreateserial"),
        *("-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.crt"),
    )
    (folder / f"{name}.key").chmod(0o600)


@pytest.fixture
def certificates(open_dir: Path) -> Path:
    """Two authorities, ``ours`` and ``other``; ``server`` and ``client`` are of ours."""
    authority(open_dir, "ours")
    authority(open_dir, "other")
    certificate(open_dir, "server", "localhost", "subjectAltName=DNS:localhost\n")
    certificate(open_dir, "client", "postgres", "extendedKeyUsage=clientAuth\n")
    if (account := server_account()) is not None:
        os.chown(open_dir / "server.key", account.pw_uid, account.pw_gid)
    (open_dir / "hba.conf").write_text(
        "local all all trust\nhostssl all all 127.0.0.1/32 cert\nhostssl all all ::1/128 cert\n"
    )
    (open_dir / "hba.conf").chmod(0o644)
    return open_dir


def test_certificates_are_checked(
    private_pg: Callable[..., LocalPostgres], certificates: Path, start_daemon: Callable[..., Any]
) -> None:
    """verify-full with a client's certificate: a daemon works; a wrong authority, a wrong name, no certificate, no TLS
    are refused in words."""
    server = private_pg(
        ssl="on",
        ssl_cert_file=str(certificates / "server.crt"),
        ssl_key_file=str(certificates / "server.key"),
        ssl_ca_file=str(certificates / "ours.crt"),
        hba_file=str(certificates / "hba.conf"),
    )
    name = server.create_database(template=server.template)
    good = {
        "host": "localhost",
        "hostaddr": "127.0.0.1",
        "port": server.port,
        "user": "postgres",
        "dbname": name,
        "sslmode": "verify-full",
        "sslrootcert": certificates / "ours.crt",
        "sslcert": certificates / "client.crt",
        "sslkey": certificates / "client.key",
    }

    def url(**changes: Any) -> str:
        return psycopg.conninfo.make_conninfo(**{key: str(value) for key, value in (good | changes).items()})

    daemon = start_daemon(database=url())
    with psycopg.connect(url(), autocommit=True) as conn:
        (job,) = conn.execute("select aqd.enqueue('fate')").fetchone() or (0,)
        encrypted = """select bool_and(s.ssl) from pg_stat_ssl s join pg_stat_activity a using (pid)
                       where a.application_name like 'aqd %'"""
        assert conn.execute(encrypted).fetchone() == (True,)
    assert daemon.aqd("jobs", "wait", str(job), "--timeout", "20").returncode == 0
    for changes, word in (
        ({"sslrootcert": certificates / "other.crt"}, "certificate verify failed"),
        ({"sslrootcert": certificates / "missing.crt"}, "does not exist"),
        ({"host": "elsewhere.example"}, 'does not match host name "elsewhere.example"'),
        ({"sslcert": "", "sslkey": ""}, "certificate"),
        ({"sslmode": "disable"}, "no encryption"),
    ):
        daemon.configure({"database": {"url": url(**changes)}})
        done = daemon.aqd("db", "status")
        assert done.returncode == 4, (changes, done)
        assert word in done.stderr, (changes, done.stderr)
        assert "Traceback" not in done.stderr
    daemon.configure({"database": {"url": url()}})
