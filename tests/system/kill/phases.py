"""How a training is brought into each phase, for certain: nothing here depends on being fast."""

import signal
import time

from tests.system.kill.processes import until

ATTEMPTS = 4
"""Rollouts of a step."""


def queued(site):
    """With one slot: an agent is being set up, and the others wait."""
    site.hold("setup")
    site.start()
    until(lambda: _running(site) == 1 and site.state()["rollouts"]["queuing"] == ATTEMPTS - 1, "queued")


def starting(site):
    site.hold("setup")
    site.start()
    until(lambda: _running(site) == ATTEMPTS and len(_workspaces(site)) == ATTEMPTS, "starting")


def idle(site):
    """The agents run, and have asked nothing yet."""
    site.order("idle")
    site.start()
    until(lambda: site.process_of("agent"), "idle")


def in_flight(site):
    site.order("busy")
    site.start()
    until(lambda: _caught(site), "in flight")


def streaming(site):
    site.order("busy", "stream")
    site.start()
    until(lambda: _caught(site) and (_with_file(site, "streaming") or site.post("/proxy/resume", {})), "streaming")


def held(site):
    site.order("busy")
    site.start()
    until(lambda: site.state()["inflight"], "a call")
    site.pause(20)
    until(lambda: site.state()["held"], "held")


def updating(site):
    """The trainer has paused the gateway, and is frozen."""
    site.start()
    trainer = site.parts["trainer"]

    def is_frozen():
        if not site.state()["paused"]:
            return trainer.is_alive() and False
        trainer.send(signal.SIGSTOP)
        if site.state()["paused"]:
            return True
        trainer.send(signal.SIGCONT)
        return False

    until(is_frozen, "updating", every_s=0.001)


def scoring(site):
    site.hold("score")
    site.start()
    until(lambda: site.process_of("scorer"), "scoring")


def saving(site):
    """A checkpoint is half written, and its trainer frozen."""
    site.start()
    trainer = site.parts["trainer"]

    def is_frozen():
        if not _partial(site):
            return trainer.is_alive() and False
        trainer.send(signal.SIGSTOP)
        time.sleep(0.01)
        if _partial(site):
            return True
        trainer.send(signal.SIGCONT)
        return False

    until(is_frozen, "saving", every_s=0.0005)


def _running(site):
    return site.state()["rollouts"]["running"]


def _workspaces(site):
    return list((site.agents / "workspaces").glob("*/workspace"))


def _with_file(site, name):
    return [path for path in _workspaces(site) if (path / name).exists()]


def _caught(site):
    """A pause that ends nothing leaves the calls that it finds in the middle."""
    until(lambda: site.state()["inflight"], "a call")
    site.pause(0)
    if site.state()["inflight"]:
        return True
    site.post("/proxy/resume", {})
    return False


def _partial(site):
    return list((site.run / "checkpoints").glob(".step-*.partial"))
