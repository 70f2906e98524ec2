"""A PostgreSQL server of the tests' own, from Debian's package `postgresql`.

`python -m tests.postgres FOLDER` starts one, prints its URL and serves until its input ends; `.ci/run` does that and
sets MANEGE_TEST_POSTGRES. Without the variable, the first test that needs a server starts one.
"""

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psycopg

USER = "manege"


def program(name):
    """Debian keeps the server's programs out of the path."""
    found = shutil.which(name) or next(
        iter(sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)), None
    )
    return None if found is None else str(Path(found).resolve())


class Server:
    """One cluster in a folder; it refuses to run as root, so it then runs as the user `postgres`."""

    def __init__(self, folder):
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"
        data = ["--pgdata", str(folder / "data")]
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        self._run("initdb", *data, "--username", USER, "--auth=trust", "--encoding=UTF8", "--no-sync")
        self._options = f"-c port={self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"
        self.start()

    def start(self):
        log = ["--log", str(self.folder / "log.txt")]
        self._run("pg_ctl", "start", "--wait", *log, "--pgdata", str(self.folder / "data"), "-o", self._options)

    def stop(self, mode="fast"):
        """`immediate` is a crash."""
        self._run("pg_ctl", "stop", "--wait", "--mode", mode, "--pgdata", str(self.folder / "data"))

    def _run(self, name, *arguments):
        user = {}
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        ended = subprocess.run(
            [program(name), *arguments], cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **user
        )
        assert ended.returncode == 0, f"{name}: {ended.stderr.decode()}"


@contextmanager
def server():
    """Yields a Server; it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="manege-postgres-"))
    folder.chmod(0o755)
    made = Server(folder)
    try:
        yield made
    finally:
        made.stop("immediate")
        shutil.rmtree(folder)


@contextmanager
def schema(url):
    """Yields a URL for an empty place of one's own in a server's database."""
    name = f"t{time.time_ns()}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        yield f"{url}?options=-csearch_path%3D{name}"
        connection.execute(f"DROP SCHEMA {name} CASCADE")


if __name__ == "__main__":
    with server() as running:
        print(running.url, flush=True)
        sys.stdin.read()
