"""An agent that searches itself for what is not its own."""

import json
import os
import re
import signal
from pathlib import Path

PATTERN = rb"zygote-secret-[0-9a-f]{32}"


def search():
    """All that looks like a secret, in environment, memory and open files; waits first, if it is told to."""
    if "WAIT" in os.environ:
        Path("waiting").touch()
        signal.pause()
    found = {"environ": Path("/proc/self/environ").read_bytes(), "variables": repr(dict(os.environ)).encode()}
    found["memory"] = b"".join(_regions())
    found["files"] = b"".join(_contents())
    # Not all at once: a match must not be found again in the text that is being written.
    secrets = {place: sorted({match.decode() for match in re.findall(PATTERN, text)}) for place, text in found.items()}
    print(json.dumps(secrets))


def keep_and_search():
    """The search finds what is there."""
    kept = "-".join(["zygote", "secret", "ab" * 16])
    search()
    return kept


def _regions():
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            start, end = (int(address, 16) for address in span.split("-"))
            if rights.startswith("r") and not line.endswith(("[vvar]", "[vvar_vclock]", "[vsyscall]")):
                memory.seek(start)
                yield memory.read(end - start) or b""


def _contents():
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.isfile(link):
            yield Path(link).read_bytes()
