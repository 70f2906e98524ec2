"""Variables of the driver and of its ranks. Ray and verl read theirs when they are imported: `prepare` comes first.

A Ray that we start lets in only who has the key that is made here, so that no one else on this machine can use it.
"""

import os
import secrets
import warnings

from manege.config import BackendConfig

__all__ = ["ENVIRONMENT", "prepare"]

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    # Where this package's entry points are not installed, too; and an error in it is heard.
    "VERL_USE_EXTERNAL_MODULES": "manege.verl.plugin",
}
"""Of all processes of verl on a machine without a GPU."""


def prepare(backend: BackendConfig, *, cpu: bool) -> dict[str, str]:
    """Sets this process's variables, and returns those that every rank needs."""
    ranks = dict(ENVIRONMENT) if cpu else {}
    if backend.ray_address is None:
        if cpu:
            ranks["GLOO_SOCKET_IFNAME"] = "lo"
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Workers that are started in advance have none of the ranks' variables, and are never used.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ |= ranks
    # Of each of verl's engines that is not installed.
    warnings.filterwarnings("ignore", r"\w+ engine is not available", UserWarning)
    return ranks
