"""What a network is, as a hash: of its config and its numbers, whatever file and format they came from."""

import json
from hashlib import sha256

import torch

from vitrail.checkpoint.weights import bundle_of
from vitrail.models.family import to_dict


def network_hash(network: torch.nn.Module) -> str:
    """Equal for equal networks: a file converted there and back, on whatever device, has the same."""
    bundle = bundle_of(network)
    found = sha256(json.dumps(to_dict(bundle.config), sort_keys=True).encode())
    for name, tensor in sorted(bundle.tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
