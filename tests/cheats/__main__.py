"""Measure the table and write it into its page."""

import asyncio
import tempfile
from pathlib import Path

from manege.client import Client
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.gateway.server import GatewayServer
from manege.store.sql import SqlStore
from tests.cheats.place import a_place
from tests.cheats.table import measured, write
from tests.conftest import OPERATOR_KEY, gateway_app


async def main():
    with tempfile.TemporaryDirectory() as folder:
        store = await SqlStore.open(Path(folder, "store.db"))
        engine = ScriptedEngine(hashed_reply(num_tokens=4, first_id=97, last_id=122))
        try:
            async with (
                GatewayServer(gateway_app(store, engine)) as server,
                Client(server.url, OPERATOR_KEY) as client,
            ):
                with a_place(Path(folder)) as place:
                    write(await measured(client, place))
        finally:
            await engine.close()
            await store.close()


asyncio.run(main())
