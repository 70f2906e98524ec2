"""A training that can be stopped in the middle of anything: all parts in one process, or each in one of its own.

What agents and their setup and scorer do is ordered through files (`programs/`); calls are caught in the middle by
pausing the gateway as its operator, the trainer by freezing its process.
"""

import json
import os
import signal
import socket

import httpx

from tests.system.kill.processes import (
    PROGRAMS,
    ROOT,
    Part,
    below,
    children,
    number_inside,
    until,
    working_in,
)

RUN_FILE = PROGRAMS / "run.toml"
MODEL = ROOT / "tests" / "tiny" / "model"
PARTS = ("engine", "gateway", "controller", "trainer", "all")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Site:
    """`with Site(...) as site`: nothing is left, however the test goes."""

    def __init__(self, folder, *, apart, slots=4, steps=2, store=None, changes=()):
        """`changes`: overrides of the run."""
        self.apart, self.folder = apart, folder
        self.run = folder / "run"
        self.data, self.agents = (folder / "gateway", folder / "agents") if apart else (self.run, self.run)
        self.store = store or self.data / "manege.db"
        self.stage = folder / "stage"
        (self.stage / "agents").mkdir(parents=True)
        self.port, self.engine_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = httpx.Client(base_url=self.url, trust_env=False, timeout=30)
        self._seen = set()
        self._has_paused = False
        self._changes = [
            *(f"folder={self.run}", f"train.steps={steps}"),
            *(f"tasks.options.stage={self.stage}", f'scorer.readable=["{self.stage}"]'),
            *changes,
        ]
        self.parts = self._apart(slots) if apart else self._together(slots)

    def _together(self, slots):
        changes = [*self._changes, f"gateway.port={self.port}", f"controller.slots={slots}"]
        return {"trainer": self._part("trainer", "train", RUN_FILE, *changes, ready="run folder")}

    def _apart(self, slots):
        engine = f"http://127.0.0.1:{self.engine_port}"
        gateway = ["--gateway", self.url, "--key-file", self.data / "operator.key"]
        place = ["--port", self.port, "--folder", self.data, "--engine", engine, "--store", self.store]
        agents = ["--folder", self.agents, "--slots", slots]
        return {
            "engine": self._part("engine", "engine", "--model", MODEL, "--port", self.engine_port, ready="engine http"),
            "gateway": self._part("gateway", "gateway", "--model", MODEL, *place, ready="gateway http"),
            "controller": self._part("controller", "controller", *gateway, *agents, ready="controller for"),
            "trainer": self._part("trainer", "train", RUN_FILE, *self._changes, *gateway, ready="run folder"),
        }

    def _part(self, name, *words, ready):
        return Part(words, self.folder / f"{name}.txt", ready=ready)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._look()
        for part in self.parts.values():
            part.end()
        self._http.close()

    def start(self):
        """The engine takes the longest, and is waited for by its first call."""
        for names in (("engine", "gateway"), ("controller", "trainer")):
            started = [self.parts[name] for name in names if name in self.parts]
            for part in started:
                part.start()
            if started:
                started[-1].wait_until_ready()

    def part(self, victim):
        return self.parts[victim if self.apart else "trainer"]

    def kill(self, victim, number):
        """A part, which is started again, or one process of an agent or scorer."""
        self._look()
        if victim not in PARTS:
            os.kill(self.process_of(victim), number)
            return
        part = self.part(victim)
        part.kill(number)
        part.start(*(["--resume"] if part is self.parts["trainer"] else []))
        part.wait_until_ready()

    def process_of(self, victim):
        """The pid of an agent that has come to its code, or of a scorer; None: there is none."""
        workspaces = self.agents / "workspaces"
        running = working_in(workspaces)
        for path, pids in running.items():
            if victim == "scorer" and path.parent.name == "scorer":
                return pids[0]
            said = path / "agent.pid"
            if victim == "agent" and said.exists() and (text := said.read_text()):
                for pid in pids:
                    if number_inside(pid) == int(text):
                        return pid
        return None

    def state(self):
        """Of the gateway, also while it restarts."""

        def ask():
            try:
                answer = self._http.get("/proxy/state", headers=self._key())
            except (httpx.TransportError, OSError):
                return None
            return answer.json() if answer.is_success else None

        return until(ask, "the gateway's state")

    def pause(self, drain_s):
        self._has_paused = True
        self.post("/proxy/pause", {"drain_s": drain_s})

    def post(self, path, body):
        answer = self._http.post(path, json=body, headers=self._key())
        assert answer.is_success, answer.text

    def _key(self):
        return {"authorization": f"Bearer {(self.data / 'operator.key').read_text().strip()}"}

    def order(self, *names):
        """Files for the workspaces of agents that are set up from now on."""
        for name in names:
            (self.stage / "agents" / name).touch()

    def hold(self, what):
        (self.stage / f"hold-{what}").touch()

    def release(self):
        """Let all go on."""
        for part in self.parts.values():
            part.send(signal.SIGCONT)
        for path in (self.stage / "agents").iterdir():
            path.unlink()
        for path in self.stage.glob("hold-*"):
            path.unlink()
        self._free_agents()
        if self._has_paused:
            until(self._resume, "the gateway resumes")

    def _free_agents(self):
        for order in ("idle", "busy"):
            for path in (self.agents / "workspaces").glob(f"*/workspace/{order}"):
                path.unlink(missing_ok=True)

    def _resume(self):
        try:
            return self._http.post("/proxy/resume", json={}, headers=self._key()).is_success
        except httpx.TransportError:
            return False

    def finish(self):
        """The training ends well, then all others are stopped."""
        trainer = self.parts["trainer"]

        def is_done():
            self._free_agents()
            return trainer.has_ended()

        until(is_done, "the run ends", timeout_s=60)
        self._look()
        assert trainer.code == 0, self.logs()
        for name in ("controller", "gateway", "engine") if self.apart else ():
            self.parts[name].kill(signal.SIGTERM)

    def logs(self):
        return "\n".join(
            f"--- {name}\n{part.log.read_text()}" for name, part in self.parts.items() if part.log.exists()
        )

    def _look(self):
        """Remember what runs below the parts: it must be gone at the end."""
        pids = [part.pid for part in self.parts.values() if part._process is not None]
        self._seen |= below(pids)

    def left_over(self):
        """Processes that should be gone."""
        alive = {child for found in children().values() for child in found}
        return self._seen & alive

    def rows(self):
        """Steps of metrics.jsonl."""
        rows = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [row for row in rows if row["kind"] == "step"]
