"""Features are what the last layer reads, in the order of the images."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.tiny import RESNET, VIT
from vitrail.core.errors import BadImage, DataError
from vitrail.data.dataset import ArrayDataset, Encoded, Labels
from vitrail.data.decode.image import EncodedImage
from vitrail.data.loader import eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.frozen import features as module
from vitrail.evaluation.frozen.features import SquareView, extract_features
from vitrail.models.build import build
from vitrail.models.family import ModelConfig


def pictures(image: tuple[int, int], labels: Labels) -> ArrayDataset:
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), *image, 3), dtype=np.uint8)
    return ArrayDataset(pixels, labels, tuple("abcde"), called="set")


@pytest.mark.parametrize("config", [VIT, replace(VIT, head="tanh"), replace(VIT, pool="mean"), RESNET])
def test_the_last_layer_of_them_gives_the_logits(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD", 2)
    torch.manual_seed(0)
    network = build(config).train()
    last = getattr(network.head, "classifier", network.head)
    torch.nn.init.normal_(last.weight)
    source, plain = pictures(config.image, Labels(np.arange(11) % 5)), Preprocessing(image=config.image)
    found = extract_features(network, eval_batches(source, plain, batch=3), plain, "cpu")
    read, labels = found.features, found.labels
    assert network.training
    network.eval()
    images = torch.stack([plain(source.open_image(at).rgb()) for at in range(11)])
    assert read.dtype == torch.float32
    torch.testing.assert_close(last(read), network(images), rtol=1e-4, atol=1e-5)
    assert labels.tolist() == [at % 5 for at in range(11)]


def test_several_labels_are_filled_up_to_the_widest() -> None:
    rows = [[0], [1], [2], [3, 4, 0], []]
    source, plain = pictures(VIT.image, Labels.several(rows)), Preprocessing(image=VIT.image)
    found = extract_features(build(VIT), eval_batches(source, plain, batch=2), plain, "cpu")
    labels = found.labels
    assert labels.tolist() == [[0, -1, -1], [1, -1, -1], [2, -1, -1], [3, 4, 0], [-1, -1, -1]]


def test_an_unreadable_picture_has_no_features() -> None:
    class Torn(ArrayDataset):
        def read(self, index: int) -> Encoded:
            if index == 1:
                raise BadImage("torn")
            return super().read(index)

    whole = pictures(VIT.image, Labels(np.arange(5)))
    torn, plain = Torn(whole.pictures, whole.labels, whole.classes), Preprocessing(image=VIT.image)
    found = extract_features(build(VIT), eval_batches(torn, plain, batch=2), plain, "cpu")
    read, labels = found.features, found.labels
    assert labels.tolist() == [0, 2, 3, 4]
    assert len(read) == 4


def test_no_pictures_is_an_error() -> None:
    with pytest.raises(DataError):
        extract_features(build(VIT), [], Preprocessing(image=VIT.image), "cpu")

    class Gone(ArrayDataset):
        def read(self, index: int) -> Encoded:
            raise BadImage("gone")

    whole, plain = pictures(VIT.image, Labels(np.arange(5))), Preprocessing(image=VIT.image)
    gone = Gone(whole.pictures, whole.labels, whole.classes)
    with pytest.raises(DataError):
        extract_features(build(VIT), eval_batches(gone, plain, batch=2), plain, "cpu")


def test_places_in_the_source_come_along() -> None:
    source, plain = pictures(VIT.image, Labels(np.arange(5))), Preprocessing(image=VIT.image)
    found = extract_features(build(VIT), eval_batches(source, plain, batch=2), plain, "cpu")
    assert found.samples.tolist() == [0, 1, 2, 3, 4]


def test_the_references_view_is_the_centre_of_a_larger_square() -> None:
    """An image of 512 x 256 with a gradient each way: resized to 256 x 256, and 16 pixels cut off on every side."""
    down, across = np.meshgrid(np.arange(256), np.arange(512) / 2, indexing="ij")
    pixels = np.stack([down, across, 0 * down], 2).astype(np.uint8)
    (seen,) = SquareView((224, 224))(EncodedImage(pixels), [])
    assert seen.shape == (3, 224, 224)
    assert seen[0, :, 0].tolist() == list(range(16, 240))
    np.testing.assert_allclose(seen[1, 0].numpy(), np.arange(16, 240), atol=1)
    assert SquareView((32, 48)).sizes == ((32, 48),)


def test_the_references_view_cuts_levels_off() -> None:
    """big_vision casts what tf.image.resize gives to bytes, which truncates: bilinear from half-pixel centres."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (11, 23, 3), dtype=np.uint8)
    (seen,) = SquareView((14, 14))(EncodedImage(pixels), [])

    def shares(old: int, new: int) -> np.ndarray:
        out = np.zeros((new, old))
        for i in range(new):
            at = (i + 0.5) * old / new - 0.5
            low = int(np.floor(at))
            out[i, max(low, 0)] += 1 - (at - low)
            out[i, min(low + 1, old - 1)] += at - low
        return out

    levels = np.einsum("hy,yxc,wx->chw", shares(11, 16), pixels.astype(np.float64), shares(23, 16))[:, 1:15, 1:15]
    sure = np.abs(levels - np.rint(levels)) > 1e-3
    assert np.array_equal(seen.numpy()[sure], np.floor(levels)[sure])
    assert sure.mean() > 0.9
