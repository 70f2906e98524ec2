"""What verl loads of manege, by its entry point `verl.plugins`, in every process that imports verl.

verl is half imported meanwhile: a module that imports verl itself may be imported here only if it is needed now.
"""

import os

from manege.verl import registering

__all__: list[str] = []

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from manege.trainer.engines.verl import cpu

    cpu.register()

registering.register()
