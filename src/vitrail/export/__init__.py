"""Exports to ONNX, torch.export and other libraries' formats. Every file is run and compared with the network first.

from vitrail import export

done = export.to_onnx("mine.safetensors", "mine.onnx")
done.report.worst  # the largest relative difference from the network
"""

from vitrail.export.int8 import ExportImages
from vitrail.export.onnx_file import OnnxOptions, to_onnx
from vitrail.export.other_libraries import to_library
from vitrail.export.output import ExportResult
from vitrail.export.torch_export import to_torch_export
from vitrail.export.verify import CheckedBatch, ExportReport, ExportScores, ExportSpeed

__all__ = [
    "CheckedBatch", "ExportImages", "ExportReport", "ExportResult", "ExportScores", "ExportSpeed", "OnnxOptions",
    "to_library", "to_onnx", "to_torch_export",
]  # fmt: skip
