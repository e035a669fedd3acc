"""Devices: which one a process computes on, and what differs between them."""

import torch

from vitrail.core.errors import ConfigError


def find_device(name: str, local_rank: int = 0, world_size: int = 1) -> torch.device:
    """The device of this process: its own GPU on a node with several processes. "auto" is a CUDA GPU, else Apple's
    (mps), else the CPU; several processes cannot talk from mps, so that there "auto" is the CPU."""
    mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps and world_size == 1 else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is none that torch knows; use auto, cpu, cuda or mps") from None
    if device.type == "mps":
        if not mps:
            raise ConfigError(f"device {name!r}: torch sees no GPU of Apple's here; use device cpu")
        if world_size > 1:
            raise ConfigError(f"device {name!r} is for one process, and there are {world_size}; use device cpu")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(f"device {name!r}: torch sees no GPU here; use device cpu")
    index = local_rank if device.index is None else device.index
    if index >= count:
        raise ConfigError(
            f"device {name!r} asks for GPU {index}, but there are {count} here; start one process for each GPU "
            f"(--nproc-per-node {count}), or use device cpu"
        )
    return torch.device("cuda", index)


def name_device(device: torch.device) -> str:
    """As a person would call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "Apple GPU (mps)" if device.type == "mps" else "CPU"


def widest_float(device: torch.device) -> torch.dtype:
    """float64; on Apple's GPUs, which have none, float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def synchronise(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
