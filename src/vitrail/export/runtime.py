"""ONNX Runtime, as it comes: the CPU, all of its default optimisations."""

import importlib.util
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vitrail.core.errors import ExportRefused

LIBRARIES: Final = ("onnx", "onnxscript", "onnxruntime")


def need_libraries() -> None:
    """Refuses where ONNX is not installed, before the work."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportRefused(f"--to onnx needs {', '.join(missing)}: pip install 'vitrail[export]'")


class Session:
    """A loaded file: [B, C, H, W] -> [B, K], or [B, K, H, W]. `threads=0` leaves their number to the runtime."""

    def __init__(self, path: Path, *, threads: int = 0):
        import onnxruntime

        options: Any = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 3  # what is wrong comes as an exception; its remarks are not for the user
        options.intra_op_num_threads = threads
        self.inner: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.input = str(self.inner.get_inputs()[0].name)
        self.version = f"onnxruntime {onnxruntime.__version__}"

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.inner.get_modelmeta().custom_metadata_map)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.inner.run(None, {self.input: images.contiguous().numpy()})[0])
