"""Weights pass from a trainer's memory to the worker processes of engine servers, over real sockets."""

import json
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from manege.config import TrainConfig
from manege.engine.weight_sender import WeightSender
from manege.engine.weight_wire import Receiver
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.engines.torch import TorchEngine
from tests.conftest import TINY_MODEL
from tests.system.test_training import ROOT

pytestmark = pytest.mark.timeout(120)

WEIGHTS = {
    "whole": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4) / 7,
    "half": torch.tensor([[1.5, -2.25]], dtype=torch.bfloat16),
    "one": torch.tensor(3.5),
    "last": torch.full((5,), 2.0, dtype=torch.float16),
}
TOLD = {
    key: [str(tensor.dtype), list(tensor.shape), tensor.double().flatten().tolist()] for key, tensor in WEIGHTS.items()
}


@pytest.fixture
def sender():
    made = WeightSender()
    yield made
    made.close()


def workers(address, name, *, count=1, stops=None):
    """All workers of a server; some stop after as many tensors."""
    words = [sys.executable, "-m", "tests.system.transfer_worker", address, name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    last = [str(1 + count)] + ([str(stops)] if stops else [])
    return [subprocess.Popen([*words, str(rank), *last], cwd=ROOT, **pipes) for rank in range(1, 1 + count)]


def ends(processes):
    return [(process.communicate(timeout=100)[0], process.returncode) for process in processes]


def got(processes):
    outs = ends(processes)
    assert [code for _, code in outs] == [0] * len(outs)
    return [json.loads(out) for out, _ in outs]


def reason(processes):
    ((out, code),) = ends(processes)
    assert code == 3
    return json.loads(out)["error"]


def test_all_workers_of_all_servers_get_every_byte(sender):
    address = sender.publish(WEIGHTS.items()).address
    servers = [workers(address, "a", count=2), workers(address, "b")]
    assert [each for server in servers for each in got(server)] == [TOLD] * 3


def test_the_weights_are_those_of_the_moment_and_can_be_fetched_again(sender):
    changing = {key: tensor.clone() for key, tensor in WEIGHTS.items()}
    address = sender.publish(changing.items()).address
    changing["whole"].zero_()
    assert got(workers(address, "a")) == got(workers(address, "again")) == [TOLD]


def test_the_last_weights_are_kept_until_somebody_has_the_next(sender):
    first = sender.publish(WEIGHTS.items()).address
    second = sender.publish([("new", torch.ones(2))]).address
    assert got(workers(first, "a")) == [TOLD]
    assert list(got(workers(second, "b"))[0]) == ["new"]
    assert reason(workers(first, "c")) == (
        "the trainer refuses to send its weights: publication 1 is gone, the last one is 2"
    )


def test_a_worker_that_dies_takes_nobody_with_it(sender, caplog):
    address = sender.publish(WEIGHTS.items()).address
    (dying,) = workers(address, "a", stops=2)
    assert dying.stdout.readline() == "stops\n"
    dying.kill()
    ends([dying])
    assert got(workers(address, "b")) == [TOLD]
    until_s = time.monotonic() + 10
    while "weights did not reach an engine server" not in caplog.text:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_trainer_that_dies_is_an_error_of_the_worker():
    code = """
import time, torch
from manege.engine.weight_sender import WeightSender
sender = WeightSender()
print(sender.publish([(name, torch.ones(1 << 22)) for name in "abc"]).address, flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        (worker,) = workers(trainer.stdout.readline().strip(), "a", stops=1)
        assert worker.stdout.readline() == "stops\n"
        trainer.kill()
    began_s = time.monotonic()
    assert "refuse" not in reason([worker])
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["all weights", "adapters"])
def test_what_a_train_engine_publishes_is_what_it_exports(sender, tmp_path, lora_rank):
    folder = open_folder(str(TINY_MODEL))
    engine = TorchEngine(load_model(folder), folder, TrainConfig(lora_rank=lora_rank), sender=sender)
    for name, parameter in engine._model.module.named_parameters():
        if "lora" in name:
            torch.nn.init.ones_(parameter)
    weights = engine.publish()
    assert (engine.capabilities.publishes, weights.kind) == ("transfer", "transfer")
    receiver = Receiver(weights.address, "a", rank=1, size=2, device=torch.device("cpu"))
    received = dict(receiver.tensors())
    receiver.close()
    engine.export(tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert received.keys() == exported.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in exported.items())


def test_a_sender_that_is_closed_listens_no_more():
    sender = WeightSender()
    host, _, port = sender.publish(WEIGHTS.items()).address.partition("/")[0].partition(":")
    socket.create_connection((host, int(port))).close()
    sender.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
