"""verl's platform for machines without a GPU, which verl itself does not have: gloo, and torch on the CPU.

It is chosen by VERL_PLATFORM=cpu, in every process. A rank takes a GPU of Ray's books, which Ray keeps as mere numbers
(`ray.init(num_gpus=...)`): verl counts nothing else. verl's engines are registered for `cuda`; they compute with what
the platform says, so that VERL_ENGINE_DEVICE=cuda finds the same ones here.
"""

# pyright: reportMissingImports=false
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import distributed

from manege.trainer.engines.verl.environment import ENVIRONMENT

__all__ = ["ENVIRONMENT", "CpuPlatform", "register"]


class _CpuDevice(ModuleType):
    """What verl asks of `torch.cuda`, answered for the CPU; the rest is that of `torch.cpu`."""

    def __getattr__(self, name: str) -> Any:
        if name in ("get_rng_state", "set_rng_state", "manual_seed"):
            return lambda *args: getattr(torch, name)(*args[:1])
        if name.startswith(("max_memory_", "memory_")):
            return lambda *_: 0
        if name == "mem_get_info":
            return lambda *_: (0, 0)
        if name in ("empty_cache", "ipc_collect", "set_per_process_memory_fraction", "reset_peak_memory_stats"):
            return lambda *_: None
        if name == "get_device_name":
            return lambda *_: "cpu"
        return getattr(torch.cpu, name)


class CpuPlatform(PlatformBase):
    """As verl asks for it; see PlatformBase."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDevice("manege_cpu_device")

    def is_available(self) -> bool:
        """Always."""
        return True

    def current_device(self) -> Any:
        """Goes into `.to(...)`."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One per process."""
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs beside the process."""

    def manual_seed(self, seed: int) -> None:
        """torch's."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """torch's."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """There are none."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """None."""
        return None, None

    def communication_backend_name(self) -> str:
        """The only one of torch for the CPU."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Which Ray sets for every rank; nobody reads it here."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler."""
        yield

    def profiler_start(self) -> None:
        """No profiler."""

    def profiler_stop(self) -> None:
        """No profiler."""

    def ray_resource_name(self) -> str:
        """The one that verl counts."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """As of GPUs."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """Tensors are copied between processes."""
        return False

    def cudart(self) -> None:
        """None."""


def register() -> None:
    """Called by the plugin, in every process that imports verl."""
    PlatformRegistry.register("cpu")(CpuPlatform)
    # verl asks for "cpu:gloo,cpu:gloo", which torch refuses.
    distributed.initialize_global_process_group_ray = functools.partial(
        distributed.initialize_global_process_group_ray, backend="gloo"
    )
