"""Each part in a process of its own, talking through the client only; and the engine on the token wire."""

import os
import re
import signal
import socket
import time
from contextlib import contextmanager

import pytest

from tests.system.test_training import ROOT, RUN_FILE, finish, manege, rows

TINY = ROOT / "tests" / "tiny"


@contextmanager
def serving(*arguments, ready, log):
    """A verb that serves until it is stopped; gives the address that it printed."""
    with log.open("w") as file:
        process = manege(*arguments, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(TINY)})
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(ready, log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield found[1] if found.groups() else None
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130, log.read_text()


@pytest.mark.timeout(240)
def test_gateway_controller_engine_and_trainer_each_alone(tmp_path):
    folder, data = tmp_path / "run", tmp_path / "gateway"
    model, logs = TINY / "model", tmp_path
    engine_words = ["engine", "--model", model, "--port", 0]
    gateway_words = ["gateway", "--model", model, "--port", 0, "--folder", data]
    with (
        serving(*engine_words, ready=r"engine (http://\S+),", log=logs / "e.txt") as engine,
        serving(*gateway_words, "--engine", engine, ready=r"gateway (http://\S+),", log=logs / "g.txt") as gateway,
        serving(
            *["controller", "--gateway", gateway, "--key-file", data / "operator.key", "--folder", tmp_path / "agents"],
            ready="controller for",
            log=logs / "c.txt",
        ),
    ):
        overrides = [f"folder={folder}", "train.steps=3", "train.groups=2", "tasks.num_heldout=4"]
        key = ["--gateway", gateway, "--key-file", data / "operator.key"]
        code, _, err = finish(manege("train", RUN_FILE, *overrides, *key))
        assert code == 0, err
    steps = rows(folder, "step")
    # Version 1 are the weights that the trainer began with: an engine apart may have had others.
    assert [row["policy_version"] for row in steps] == [2, 3, 4]
    assert all(row["gap_max"] < 1e-3 for row in steps)
    assert (folder / "model" / "model.safetensors").exists()


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = finish(manege("gateway", "--model", TINY / "model", "--port", port, "--folder", tmp_path))
    assert code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["controller"], "--gateway URL is missing"),
        (["controller", "--gateway", "http://127.0.0.1:9"], "--key-file"),
        (["gateway", "--model", "nothing-there"], "nothing-there"),
        (["gateway", "--model", TINY / "model", "--host", "0.0.0.0", "--port", 0], "choose a key"),
        (["engine", "--model", TINY / "model", "--host", "0.0.0.0", "--port", 0], "no key"),
        (["run", RUN_FILE, "--task", "none"], "no such task"),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_clear_line(tmp_path, arguments, message):
    if arguments[0] in ("gateway", "controller"):
        arguments = [*arguments, "--folder", tmp_path]
    code, _, err = finish(manege(*arguments))
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert message in err


def test_the_doctor_says_what_this_machine_has():
    code, out, _ = finish(manege("doctor"))
    assert "agents can be isolated" in out
    assert code == (0 if "missing" not in out else 1)
    code, out, _ = finish(manege("doctor", "--model", "nothing-there"))
    assert code == 1
    assert "missing  model nothing-there" in out
