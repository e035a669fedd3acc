"""Encoder layers for inference on a CPU, where oneDNN computes two steps in one pass.

Results match torch's separate steps up to rounding. oneDNN's fused pointwise functions are used on x86 processors;
elsewhere, and under a compiler, an export or an operation counter, the plain layers run.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# The operator is not public; on a torch without it, the plain layers run.
ONEDNN: Final = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def can_fuse_gelu_linear(z: Tensor, layer: nn.Module, gelu: nn.Module) -> bool:
    """Whether one call can do both: float32 inference with plain layers and no hooks."""
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
