"""Out to the world: ONNX, torch.export and other libraries' formats, each run and compared before it is called done.

from vitrail import export

done = export.to_onnx("mine.safetensors", "mine.onnx")
done.report.worst  # the largest relative difference to the network
"""

from vitrail.export.int8 import Pictures
from vitrail.export.onnx_file import OnnxOptions, to_onnx
from vitrail.export.other_libraries import to_library
from vitrail.export.output import Written
from vitrail.export.torch_export import to_torch_export
from vitrail.export.verify import Case, Pace, Report, Scores

__all__ = [
    "Case",
    "OnnxOptions",
    "Pace",
    "Pictures",
    "Report",
    "Scores",
    "Written",
    "to_library",
    "to_onnx",
    "to_torch_export",
]
