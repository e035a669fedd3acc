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
    """Whether one call can do both: float32 inference with plain, unmodified layers that nothing traces or observes."""
    if not (ONEDNN and z.device.type == "cpu" and z.dtype == torch.float32) or torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or not (_is_unmodified(layer, nn.Linear) and _is_unmodified(gelu, nn.GELU)):
        return False
    if torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.enabled or _is_transformed():
        return False
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight, layer.bias
    # oneDNN reads a bias as if it were contiguous; other shapes are left to torch, whose errors name them.
    dense = _is_dense(weight) and (bias is None or (_is_dense(bias) and bias.is_contiguous()))
    return dense and z.shape[-1] == weight.shape[1]


def _is_unmodified(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the layer does nothing but what its class says."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
    return type(layer) is kind and not hooks and "forward" not in vars(layer)


def _is_dense(parameter: object) -> bool:
    """Whether a layer's weight or bias is an ordinary float32 parameter on the CPU."""
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        return False
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu"


def _is_transformed() -> bool:
    """Whether a tracer, an operation counter, a function transform or a global hook is active."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    transforms = functorch.peek_interpreter_stack() is not None
    forward_mode = torch.autograd.forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
    hooked = bool(nn.modules.module._has_any_global_hook())  # pyright: ignore[reportPrivateUsage]
    traced = torch.jit.is_tracing() or is_in_torch_dispatch_mode()  # pyright: ignore[reportPrivateImportUsage]
    return transforms or forward_mode or hooked or traced


def gelu_linear(z: Tensor, layer: nn.Linear, approximate: str) -> Tensor:
    """GELU(z Wᵀ + b): [..., D] -> [..., N]."""
    one_pass: Any = torch.ops.mkldnn._linear_pointwise
    return one_pass(z, layer.weight, layer.bias, "gelu", [], approximate)
