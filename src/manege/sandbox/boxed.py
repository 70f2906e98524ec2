"""The first process of namespaces that bubblewrap made: `init`, begun by a new interpreter.

It hands out the socket that listens inside, forks the program, and is the end of the namespaces. A function is imported
anew here, since nothing of the warm parent crosses bubblewrap.
"""

import os
import pickle
from typing import NoReturn

from manege.programs import import_function
from manege.sandbox.bubblewrap import Boxed
from manege.sandbox.child import become
from manege.sandbox.init import await_end, hand_out
from manege.sandbox.supervisor import report
from manege.sandbox.syscalls import PR_SET_DUMPABLE, prctl

__all__ = ["main"]


def main(request: int) -> NoReturn:
    """`request`: the descriptor of a pickled Boxed."""
    with os.fdopen(request, "rb") as file:
        boxed: Boxed = pickle.load(file)
    spec, pipe = boxed.spec, boxed.pipe
    try:
        policy = spec.policy
        assert policy is not None
        for descriptor in (pipe, boxed.reply, boxed.channel):
            if descriptor is not None:
                os.set_inheritable(descriptor, False)  # not for the program
        function = import_function(spec.program, what=spec.role) if isinstance(spec.program, str) else None
        if policy.own_network and policy.listen_port is not None:
            hand_out(policy.listen_port, boxed.lifeline)
        os.close(boxed.lifeline)
        program = os.fork()
    except BaseException as error:  # as in `child.run_child`
        report(pipe, error=f"{type(error).__name__}: {error}")
        os._exit(1)
    if program == 0:
        os.setsid()
        become(
            spec, function, boxed.code, boxed.listable, -1 if boxed.reply is None else boxed.reply, pipe, boxed.channel
        )
    prctl(PR_SET_DUMPABLE, 0)
    await_end(program, pipe)
