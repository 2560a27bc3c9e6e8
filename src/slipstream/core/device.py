"""What a device is called, by which measurements on it are told apart."""

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The model of a GPU or a CPU as its maker names it; of a CPU that says none, the kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "cpu"
