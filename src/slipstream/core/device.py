"""A device: what it is called, by which measurements are told apart; its room; waiting for it."""

import platform
from pathlib import Path

import torch


def has_room_for(size: int, device: torch.device, share: float = 0.1) -> bool:
    """Whether `size` bytes are at most this share of what is free on a GPU, what the allocator
    keeps for later included; true elsewhere."""
    if device.type != "cuda":
        return True
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size <= share * (torch.cuda.mem_get_info(device)[0] + kept)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
