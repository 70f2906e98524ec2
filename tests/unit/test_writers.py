"""Rows of metrics for TensorBoard and others: flat numbers, no step twice, and no run that ends by them."""

import json
import logging
import os
import subprocess
import sys
import threading
import time

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manege.config import parse_config
from manege.trainer.writers import TensorBoardWriter, Tracked, flat
from tests.wandb_file import offline_runs

STEP = {
    "kind": "step",
    "step": 3,
    "time_s": 1000.5,
    "loss": -0.25,
    "trained_tokens": 12,
    "groups": ["g1", "g2"],
    "gap_by_distance": {"0": {"mean": 1e-6, "max": 1e-5}},
    "samples_histogram": {"1": 4},
}
EVALUATION = {"kind": "evaluation", "step": 3, "time_s": 1001.0, "temperature": 1.0, "success_rate": 0.5}


class Seen:
    """An Observer that keeps what it is shown."""

    def __init__(self):
        self.rows, self.phases = [], []

    def on_row(self, row):
        self.rows.append(row)

    def on_phase(self, phase):
        self.phases.append(phase)


class Failing:
    """A writer that fails at its second row."""

    def __init__(self):
        self.rows = []

    def write(self, row):
        self.rows.append(row)
        if len(self.rows) == 2:
            raise OSError(28, "No space left on device")

    def close(self):
        raise AssertionError("it has failed already")


def steps_in(folder, name):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_rows_become_flat_numbers():
    assert flat(STEP) == {
        "step/loss": -0.25,
        "step/trained_tokens": 12,
        "step/gap_by_distance/0/mean": 1e-6,
        "step/gap_by_distance/0/max": 1e-5,
        "step/samples_histogram/1": 4,
    }
    assert flat(EVALUATION) == {"evaluation/T=1/success_rate": 0.5}


def test_event_files_hold_the_rows(tmp_path):
    seen = Seen()
    tracked = Tracked(seen, {"tensorboard": TensorBoardWriter(tmp_path)})
    tracked.on_phase("training")
    for row in (STEP, EVALUATION):
        tracked.on_row(row)
    tracked.close()
    assert (seen.rows, seen.phases) == ([STEP, EVALUATION], ["training"])
    assert steps_in(tmp_path, "step/loss") == [(3, -0.25)]
    assert steps_in(tmp_path, "evaluation/T=1/success_rate") == [(3, 0.5)]


def test_a_later_life_of_the_run_replaces_what_an_earlier_one_wrote(tmp_path):
    for losses in ((1.0, 2.0, 3.0), (1.0, 20.0)):
        writer = TensorBoardWriter(tmp_path)
        for step, loss in enumerate(losses, 1):
            writer.write(STEP | {"step": step, "loss": loss})
        writer.close()
    assert steps_in(tmp_path, "step/loss") == [(1, 1.0), (2, 20.0)]


def test_a_writer_that_fails_is_dropped_with_one_warning_and_the_others_go_on(tmp_path, caplog):
    seen, failing = Seen(), Failing()
    tracked = Tracked(seen, {"failing": failing, "tensorboard": TensorBoardWriter(tmp_path)})
    with caplog.at_level(logging.WARNING, "manege"):
        for step in range(1, 5):
            tracked.on_row(STEP | {"step": step})
        tracked.close()
    assert len(failing.rows) == 2
    assert [step for step, _ in steps_in(tmp_path, "step/loss")] == [1, 2, 3, 4]
    assert len(seen.rows) == 4
    [warning] = caplog.messages
    assert "writer=failing" in warning
    assert "No space left on device" in warning


def test_a_writer_that_hangs_holds_nobody_up():
    release = threading.Event()

    class Hanging:
        def write(self, row):
            release.wait()

        def close(self):
            pass

    seen = Seen()
    tracked = Tracked(seen, {"hanging": Hanging()})
    started = time.monotonic()
    for _ in range(100):
        tracked.on_row(STEP)
    assert time.monotonic() - started < 1
    assert len(seen.rows) == 100
    release.set()
    tracked.close()


def test_what_was_sent_already_is_not_sent_again_and_what_was_not_is_told_anew(tmp_path):
    """Three lives of a run without a network, of which the user has sent the first."""
    config = parse_config(
        {
            "name": "watched",
            "folder": str(tmp_path),
            "tasks": {"train": "t.jsonl"},
            "agent": {"run": ["a"]},
            "scorer": {"run": ["s"]},
        }
    )
    for number, steps in enumerate(((1, 2), (1, 2, 3, 4), (1, 2, 3, 5))):
        program = (
            "import json, sys\n"
            "from manege.config import parse_config\n"
            "from manege.trainer.writers import WandbWriter\n"
            "config, rows = json.loads(sys.stdin.read())\n"
            "writer = WandbWriter('manege-tests', parse_config(config))\n"
            "for row in rows: writer.write(row)\n"
            "writer.close()\n"
        )
        rows = [STEP | {"step": step} for step in steps]
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps([config.model_dump(mode="json"), rows]),
            env={**os.environ, "WANDB_MODE": "offline"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        if number == 0:
            [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
            file.with_name(f"{file.name}.synced").touch()
    lives = list(offline_runs(tmp_path))
    assert [[row["step"] for row in life] for _, _, life in lives] == [[1, 2], [3, 5]]
    assert len({run_id for run_id, _, _ in lives}) == 1
