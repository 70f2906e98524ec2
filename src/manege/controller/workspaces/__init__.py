"""What a workspace holds when an agent begins: made once for equal contents, seen or copied cheaply by each rollout.

`sources` reads a folder, an archive or a Git commit; `cache` keeps what was prepared and lends it out; `layers` is the
view of one attempt over it. Everything that touches many files runs in a process tree of its own (`disk`), so that it
can be killed and that nothing else waits for it.
"""
