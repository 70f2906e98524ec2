"""The services of a run that the run itself starts: each ready before any agent, kept alive, and gone with the run.

The ports are chosen when the run file is read, since the gateway is told of them by the run's config.
"""

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from manege.config import RunConfig, ServiceConfig
from manege.engine.kept import KeptServer, free_ports, keeping
from manege.errors import ConfigError, ServiceError
from manege.sandbox.launcher import search_path

__all__ = ["refuse_services", "service_command", "services_started", "with_ports"]


def with_ports(config: RunConfig) -> RunConfig:
    """The same, with a port for each service that the run starts."""
    unplaced = [name for name, service in config.services.items() if service.run and not service.port]
    ports = dict(zip(unplaced, free_ports(len(unplaced)), strict=True))
    placed = {
        name: service.model_copy(update={"port": ports.get(name, service.port)})
        for name, service in config.services.items()
    }
    return config.model_copy(update={"services": placed})


@asynccontextmanager
async def services_started(config: RunConfig) -> AsyncIterator[RunConfig]:
    """With the ports where they listen. Raises ServiceError for one that does not start, or not again."""
    config, logs = with_ports(config), config.run_folder / "services"
    servers = [
        KeptServer(
            name=f"service {name}",
            command=service_command(config, service),
            environment={**os.environ, "PATH": search_path()},
            url=service.address,
            health="/healthz",
            log=logs / f"{name}.log",
            start_s=service.start_s,
            setting=f"services.{name}.start_s",
            error=ServiceError,
        )
        for name, service in config.services.items()
        if service.run
    ]
    if servers:
        logs.mkdir(parents=True, exist_ok=True)
    async with keeping(servers):
        yield config


def service_command(config: RunConfig, service: ServiceConfig) -> list[str]:
    """The words of `run`, filled in."""
    fields = {"{port}": str(service.port), "{folder}": str(config.run_folder)}
    return [re.sub("{port}|{folder}", lambda found: fields[found[0]], word) for word in service.run or ()]


def refuse_services(config: RunConfig) -> None:
    """Raises ConfigError for services to be started where the gateway is elsewhere."""
    for name, service in config.services.items():
        if service.run is not None:
            raise ConfigError(
                f"services.{name}.run does nothing with a gateway elsewhere: start the service where the gateway "
                f"reaches it, and name it by services.{name}.url"
            )
