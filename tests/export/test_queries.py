"""Networks with queries leave PyTorch with two outputs, at any size and batch, and are compared in both."""

import json
from pathlib import Path

import pytest
import torch

from tests.tasks.mask_queries.tiny_queries import NAMES, THINGS, make_network
from vitrail.core.errors import ExportFailed
from vitrail.export import OnnxOptions, to_onnx, to_torch_export
from vitrail.export.exportable import to_exportable
from vitrail.export.onnx_file import OnnxSession
from vitrail.export.verify import compare_outputs, read_output
from vitrail.models.query_output import QueryOutput
from vitrail.tasks.registry import find_task

SIZES = ((16, 24), (24, 28))  # what an export is checked at: its own, and a larger one


def shifted(output: QueryOutput, classes: float = 0.0, masks: float = 0.0) -> QueryOutput:
    return QueryOutput(output.classes + classes, output.masks + masks)


class TestComparison:
    output = QueryOutput(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.full((1, 2, 3, 4), -4.0))

    def test_the_tensor_that_differs_most_counts(self) -> None:
        case = compare_outputs((6, 8), self.output, shifted(self.output, classes=0.5, masks=0.1), 1)
        assert case.relative == pytest.approx(0.25)
        case = compare_outputs((6, 8), self.output, shifted(self.output, classes=0.02, masks=0.4), 1)
        assert case.relative == pytest.approx(0.1)
        assert (case.agree, case.places, case.batch) == (2, 2, 1)

    def test_a_tensor_that_is_no_number_is_the_worst(self) -> None:
        case = compare_outputs((6, 8), self.output, shifted(self.output, classes=9.0, masks=float("nan")), 1)
        assert case.relative != case.relative

    def test_another_shape_fails(self) -> None:
        other = QueryOutput(self.output.classes, self.output.masks[..., :2])
        with pytest.raises(ExportFailed):
            compare_outputs((6, 8), self.output, other, 1)

    def test_a_runtime_gives_tensors_in_order(self) -> None:
        assert isinstance(read_output([*self.output]), QueryOutput)
        assert isinstance(read_output(self.output.classes), torch.Tensor)


def test_what_is_exported_gives_a_plain_pair() -> None:
    model = make_network("panoptic")
    images = torch.randn(2, 3, 16, 24)
    found = to_exportable(model)(images)
    assert type(found) is tuple
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, model(images), strict=True))


def test_agreement_counts_pixels() -> None:
    task = find_task("segmentation")
    classes = torch.full((1, 2, 3), -9.0)
    classes[0, 0, 0] = classes[0, 1, 1] = 9.0
    masks = torch.full((1, 2, 2, 4), -9.0)
    masks[0, 0, :, :2] = masks[0, 1, :, 2:] = 9.0
    moved = masks.clone()
    moved[0, 0, :, 1], moved[0, 1, :, 1] = -9.0, 9.0
    shares = task.agreement(QueryOutput(classes, masks), QueryOutput(classes, moved))
    assert shares is not None
    assert shares.tolist() == [0.75]


@pytest.mark.slow
class TestFiles:
    def test_onnx_equals_torch_at_two_sizes_and_three_batches(self, tmp_path: Path) -> None:
        pytest.importorskip("onnxruntime")
        model = make_network("panoptic")
        done = to_onnx(model, tmp_path / "w.onnx")
        assert {(case.image, case.batch) for case in done.report.cases} >= {(s, b) for s in SIZES for b in (1, 3, 16)}
        assert done.report.worst < 1e-4
        session = OnnxSession(tmp_path / "w.onnx")
        assert [one.name for one in session.inner.get_outputs()] == ["classes", "masks"]
        classes, masks = (one.shape for one in session.inner.get_outputs())
        assert classes == ["batch", 12, len(NAMES) + 1]
        assert masks == ["batch", 12, "mask_rows", "mask_columns"]
        assert json.loads(session.metadata["things"]) == list(THINGS)
        images = torch.randn(2, 3, 32, 20)
        found = session(images)
        assert isinstance(found, QueryOutput)
        assert found.masks.shape == (2, 12, 16, 10)

    def test_torch_export(self, tmp_path: Path) -> None:
        done = to_torch_export(make_network("instances"), tmp_path / "w.pt2")
        assert done.report.worst < 1e-4
        classes, masks = torch.export.load(tmp_path / "w.pt2").module()(torch.zeros(5, 3, 16, 24))
        assert (classes.shape, masks.shape) == ((5, 12, 4), (5, 12, 8, 12))

    def test_int8(self, tmp_path: Path) -> None:
        pytest.importorskip("onnxruntime")
        done = to_onnx(make_network("segmentation"), tmp_path / "w.onnx", OnnxOptions(int8=True, preprocessing=True))
        assert 1e-4 < done.report.worst < 0.5
        assert done.plain is not None
        assert done.plain.worst < 1e-4
