"""The process of an agent: its program, environment, limits and what it may touch.

In: a claim, its run, the attempt's folders. Out: a request to the launcher.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from manege.client import Claim, Client
from manege.config import AgentConfig, LimitsConfig, RunConfig
from manege.controller.environment import agent_environment
from manege.controller.folders import AttemptFolders
from manege.controller.launch import Launch, harness_launch, program_launch, task_text
from manege.controller.sockets import AGENT_PORT, AGENT_URL
from manege.sandbox.layers import Layers
from manege.sandbox.policy import Policy
from manege.sandbox.spec import Limits, Overlay, ProcessSpec

__all__ = ["agent_process", "limits_of"]

NO_KEY = "manege"
"""SDKs insist on one."""


async def agent_process(
    claim: Claim,
    config: RunConfig,
    folders: AttemptFolders,
    *,
    client: Client,
    layers: Layers,
    private: Sequence[Path],
    overlay: Overlay | None,
) -> ProcessSpec:
    """Writes the files of a harness into the attempt's home. Raises HarnessError."""
    agent, tasks = config.agent, config.tasks
    # In a network of its own it is known by the socket that it calls (`sockets.py`), and needs no key.
    apart = layers.namespaces or layers.bubblewrap
    gateway_url, agent_key = (AGENT_URL, NO_KEY) if apart else (client.url, claim.agent_key)
    launch = await _launch(claim, agent, folders, client, gateway_url, agent_key)
    policy = Policy(
        layers=layers,
        writable=[str(path) for path in (folders.workspace, folders.home, folders.scratch)],
        readable=[str(folders.task_file), *config.sandbox.readable, *launch.readable],
        private=[*map(str, private), *(path for path in (tasks.train, tasks.heldout) if path)],
        tcp_ports=[_port(gateway_url)],
        protected_pids=[os.getpid()],
        terminals=launch.terminals,
        folders=launch.folders,
        listen_port=AGENT_PORT if apart else None,
        uid=folders.uid,
    )
    return ProcessSpec(
        program=launch.program,
        role="agent",
        env=agent_environment(
            claim.rollout,
            gateway_url=gateway_url,
            agent_key=agent_key,
            folders=folders,
            given=launch.env,
            mapped=agent.env,
            services=config.services,
        ),
        cwd=str(folders.workspace),
        stdout=str(folders.logs / "stdout.txt"),
        stderr=str(folders.logs / "stderr.txt"),
        limits=limits_of(agent.limits, javascript=launch.javascript),
        policy=policy,
        overlay=overlay,
    )


async def _launch(
    claim: Claim, agent: AgentConfig, folders: AttemptFolders, client: Client, gateway_url: str, agent_key: str
) -> Launch:
    if agent.harness is None:
        return program_launch(agent)
    return harness_launch(
        agent.harness,
        task=task_text(agent, claim.rollout.spec.task.input),
        gateway_url=gateway_url,
        agent_key=agent_key,
        context_limit=await client.context_limit(claim.rollout),
        folders=folders,
    )


def limits_of(config: LimitsConfig, *, javascript: bool) -> Limits:
    """`javascript`: its engines reserve address space without end."""
    memory_bytes = config.memory_mb << 20
    return Limits(
        memory_bytes=None if javascript else memory_bytes,
        resident_bytes=memory_bytes if javascript else None,
        file_bytes=config.file_mb << 20,
        num_files=config.num_files,
        num_processes=config.num_processes,
        cpus=config.cpus,
        output_bytes=config.output_mb << 20,
    )


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
