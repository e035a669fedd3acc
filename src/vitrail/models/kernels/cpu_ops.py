"""Layers of the encoder on a CPU without gradients, where oneDNN computes two steps in one pass.

Numbers are those of torch's own steps, to the last digits. oneDNN's pointwise functions are used on x86 processors;
elsewhere, and where a compiler, an export or a counter of operations looks on, the plain layers run.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Its operator is not public; a torch without it runs the plain layers.
ONEDNN: Final = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def can_fuse_gelu_linear(z: Tensor, layer: nn.Module, gelu: nn.Module) -> bool:
    """Whether one call can be both: inference in float32 with plain layers that nobody looks into."""
    if not (ONEDNN and z.device.type == "cpu" and z.dtype == torch.float32) or torch.is_grad_enabled():
        return False
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or layer.weight.dtype != z.dtype:
        return False
    hooks = (part._forward_hooks or part._forward_pre_hooks for part in (layer, gelu))  # pyright: ignore[reportPrivateUsage]
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode()  # pyright: ignore[reportPrivateImportUsage]
    return not (any(hooks) or traced) and torch.backends.mkldnn.enabled and not torch.is_autocast_enabled("cpu")


def gelu_linear(z: Tensor, layer: nn.Linear, tanh: bool) -> Tensor:
    """GELU(z Wᵀ + b): [..., D] -> [..., N]."""
    one_pass: Any = torch.ops.mkldnn._linear_pointwise
    return one_pass(z, layer.weight, layer.bias, "gelu", [], "tanh" if tanh else "none")
