"""One of several ranks of a run, in a process of its own: `python -m manege.cli.rank FD PARENT`, started by rank 0.

The event loop serves the replica as an inference engine; a thread beside it answers the questions of rank 0 and trains.
The process dies with the run's, whatever that dies of.
"""

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from manege import logs
from manege.cli.parts import load, served
from manege.cli.ranks import RankOrder
from manege.engine.server import engine_app
from manege.errors import ManegeError
from manege.gateway.server import Server
from manege.model.base import LanguageModel
from manege.model.folder import ModelFolder, open_folder
from manege.rendering.select import renderer_for
from manege.sandbox.syscalls import PR_SET_PDEATHSIG, is_linux, prctl
from manege.trainer.engines.rank_engine import RankEngine
from manege.trainer.engines.rank_group import RankGroup
from manege.trainer.engines.rank_work import answer_questions


def main() -> None:
    """Until rank 0 closes the pipe."""
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    if is_linux():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    _, (order,) = pipe.recv()
    logs.setup(verbose=order.verbose)
    asyncio.run(_work(pipe, order))


async def _work(pipe: Connection, order: RankOrder) -> None:
    async with AsyncExitStack() as stack:
        try:
            folder = open_folder(order.config.model.path)
            model = load(order.config.model, folder, rank=order.rank)
            url = await _serve(stack, model, folder, order) if order.serves else ""
        except ManegeError as error:
            pipe.send(error)
            return
        pipe.send(url)
        await asyncio.to_thread(_train, pipe, model, folder, order)


async def _serve(stack: AsyncExitStack, model: LanguageModel, folder: ModelFolder, order: RankOrder) -> str:
    config = order.config
    # Of its own: the same prompt must not get the same answers from every rank.
    engine = served(model, folder, config.model, config.engine, seed=config.seed + order.rank)
    stack.push_async_callback(engine.close)
    renderer = renderer_for(folder)
    app = engine_app(engine, encode=renderer.encode, decode=renderer.decode, shares_weights=True)
    return (await stack.enter_async_context(Server(app))).url


def _train(pipe: Connection, model: LanguageModel, folder: ModelFolder, order: RankOrder) -> None:
    config, device = order.config, next(model.module.parameters()).device
    try:
        pipe.recv()  # all ranks have loaded
    except EOFError:
        return
    try:
        group = RankGroup(
            order.rank, config.backend.num_ranks, order.meeting, device=device, timeout_s=config.backend.timeout_s
        )
        engine = RankEngine(model, folder, config.train, group=group, reference=config.credit.kl > 0)
    except ManegeError as error:
        pipe.send(error)
        return
    pipe.send(None)
    answer_questions(pipe, engine)


if __name__ == "__main__":
    main()
