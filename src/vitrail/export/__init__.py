"""Out to the world: ONNX, torch.export and other libraries' formats, each run and compared before it is called done.

from vitrail import export

done = export.to_onnx("mine.safetensors", "mine.onnx")
done.report.worst  # the largest relative difference to the network
"""

from vitrail.export.check import Case, Report
from vitrail.export.library import to_library
from vitrail.export.onnx_file import OnnxOptions, to_onnx
from vitrail.export.pace import Pace
from vitrail.export.pictures import Pictures
from vitrail.export.program import to_torch_export
from vitrail.export.scores import Scores
from vitrail.export.written import Written

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
