"""What of the machine and its settings can change bits: recorded in each manifest, compared at restore.

Not restorable: a replaced node may have another instruction set, a new image another library. A difference is one
warning that names it (HIDDEN_STATE.md, "The machine").
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch


def describe_environment() -> dict[str, Any]:
    """Settings by name; plain JSON values."""
    described: dict[str, Any] = {
        "unbroken": _version("unbroken"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": _version("numpy"),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_available():
        described["cuda"] = torch.version.cuda
        described["gpu"] = torch.cuda.get_device_name()
        described["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's is untyped
        described["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        described["cudnn_deterministic"] = torch.backends.cudnn.deterministic
    return described


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One phrase for each setting that differs; `unbroken`'s own version does not change bits and is left out."""
    names = [name for name in {**saved, **now} if name != "unbroken"]
    return [
        f"{name} was {saved.get(name)!r} and is {now.get(name)!r}" for name in names if saved.get(name) != now.get(name)
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
