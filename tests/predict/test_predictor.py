"""`predictor` gives what loading and preparing by hand give, for every kind of network, one at a time or many."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.models.tiny import RESNET, VIT
from tests.predict.pictures import CLASSES, NETWORKS, drawn, folder_of, network, weights
from vitrail.core.errors import BadImage, ConfigError, UnknownName, WeightsNotFound
from vitrail.evaluation.frozen.features import compute_features
from vitrail.inspection.weights_and_features import patch_features
from vitrail.predict.predictor import Predictor
from vitrail.tasks.classification.prediction import ClassProbability, Prediction


@pytest.fixture(params=NETWORKS)
def asker(request: pytest.FixtureRequest) -> Predictor:
    return Predictor(network(NETWORKS[request.param]), device="cpu", batch=4)


def by_hand(asker: Predictor, pictures: list[Image.Image]) -> torch.Tensor:
    return torch.stack([asker.network.card.preprocessing(picture) for picture in pictures])


def alike(some: list[Prediction], others: list[Prediction]) -> bool:
    """The same but for rounding, which is another in batches of another size."""
    near = [[(answer.index, pytest.approx(answer.probability, abs=1e-6)) for answer in one.top] for one in some]
    return near == [[(answer.index, answer.probability) for answer in one.top] for one in others]


def test_it_answers_what_doing_it_by_hand_gives(asker: Predictor) -> None:
    pictures = drawn(3)
    with torch.no_grad():
        expected = asker.network(by_hand(asker, pictures)).softmax(-1)
    for prediction, row in zip(asker(pictures, topk=5), expected, strict=True):
        assert [answer.index for answer in prediction.top] == row.argsort(descending=True).tolist()
        assert [answer.label for answer in prediction.top] == [CLASSES[answer.index] for answer in prediction.top]
        found = torch.tensor([answer.probability for answer in prediction.top])
        torch.testing.assert_close(found, row.sort(descending=True).values)


def test_alone_or_in_a_batch_the_answer_is_the_same(asker: Predictor) -> None:
    pictures = drawn(11)
    for prediction, picture in zip(asker(pictures), pictures, strict=True):
        alone = asker(picture)
        assert isinstance(alone, Prediction)
        assert alike([alone], [prediction])


def test_features_are_what_the_head_reads(asker: Predictor) -> None:
    pictures = drawn(6)
    with torch.no_grad():
        expected = compute_features(asker.network, by_hand(asker, pictures))
    found = asker.features(pictures)
    assert found.shape == (6, asker.network.num_features)
    torch.testing.assert_close(found, expected)
    logits = asker.network.get_classifier()(found)
    torch.testing.assert_close(logits, asker.logits(torch.stack([asker.prepare(p) for p in pictures])))


def test_tokens_lie_on_their_grid(asker: Predictor) -> None:
    pictures = drawn(5)
    images = by_hand(asker, pictures)
    found = asker.tokens(pictures)
    config = asker.network.config
    assert found.shape == (5, *config.grid, asker.network.num_features)
    with torch.no_grad():
        if config == RESNET:
            expected = asker.network.forward_features(images).permute(0, 2, 3, 1)
        else:
            expected = patch_features(asker.network, images)
    torch.testing.assert_close(found, expected)


def test_what_comes_out_can_be_trained_on(tmp_path: Path) -> None:
    asker = vitrail.predictor(weights(tmp_path), device="cpu")
    pixels = torch.stack([asker.prepare(picture) for picture in drawn(2)])
    for found in (
        asker.features(drawn(2)),
        asker.logits(pixels),
        asker.probabilities(pixels),
        asker.embed_batch(pixels),
    ):
        assert not found.is_inference()
        torch.nn.Linear(found.shape[-1], 2)(found).sum().backward()


def test_every_way_to_give_a_picture_gives_one_answer(tmp_path: Path) -> None:
    asker = Predictor(network(VIT), device="cpu")
    picture = drawn(1)[0]
    path = tmp_path / "an image.png"
    picture.save(path)
    array = np.asarray(picture).copy()
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    given = [path, str(path), path.read_bytes(), bytearray(path.read_bytes()), Image.open(path), array, array / 255]
    given += [(array / 255).astype(np.float16), tensor, tensor / 255, (tensor / 255).double(), memoryview(b"")]
    given[-1] = memoryview(path.read_bytes())
    expected = asker(picture)
    for one in given:
        assert asker(one) == expected, type(one)
    assert {str(prediction) for prediction in asker(given)} == {str(expected)}


def test_grey_pictures_are_three_times_the_same(tmp_path: Path) -> None:
    asker = Predictor(network(VIT), device="cpu")
    grey = np.asarray(drawn(1)[0].convert("L")).copy()
    expected = asker(np.stack([grey] * 3, axis=2))
    for one in (grey, grey[..., None], torch.from_numpy(grey), torch.from_numpy(grey)[None], Image.fromarray(grey)):
        assert asker(one) == expected


def test_four_axes_are_several_pictures() -> None:
    asker = Predictor(network(VIT), device="cpu")
    draw = np.random.default_rng(0)
    arrays = draw.integers(0, 256, (3, 20, 30, 3), dtype=np.uint8)
    expected = asker(list(arrays))
    assert len(expected) == 3
    assert asker(arrays) == expected
    assert asker(torch.from_numpy(arrays).permute(0, 3, 1, 2)) == expected


def test_lists_iterators_and_nothing_at_all() -> None:
    asker = Predictor(network(VIT), device="cpu", batch=2)
    pictures = drawn(5)
    expected = asker(pictures)
    assert asker(tuple(pictures)) == expected
    assert asker(picture for picture in pictures) == expected
    assert alike(asker(pictures[:1]), expected[:1])
    assert asker([]) == []
    assert asker.features([]).shape == (0, 16)
    assert asker.tokens([]).shape == (0, *VIT.grid, 16)


def test_a_stream_reads_no_further_than_it_must(tmp_path: Path) -> None:
    asker = Predictor(network(VIT), device="cpu", batch=2)
    names, taken = folder_of(tmp_path, 12), list[str]()

    def given() -> Iterator[str]:
        for name in names:
            taken.append(name)
            yield name

    answers = asker.stream(given())
    first = next(answers)
    assert alike([first], [asker(names[0])])
    assert len(taken) <= 3 * asker.batch
    answers.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prepare")]


def test_threads_share_a_predictor(tmp_path: Path) -> None:
    asker = Predictor(network(NETWORKS["hybrid"]), device="cpu", batch=3)
    names = folder_of(tmp_path, 8)
    expected, found = asker(names), dict[int, list[Prediction]]()
    threads = [threading.Thread(target=lambda at=at: found.__setitem__(at, asker(names))) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[at] for at in range(4)] == [expected] * 4


def test_an_opened_picture_may_be_given_twice(tmp_path: Path) -> None:
    asker = Predictor(network(VIT), device="cpu", batch=8)
    path = folder_of(tmp_path, 1, "jpg")[0]
    with Image.open(path) as lazy:
        assert alike(asker([lazy] * 16), [asker(path)] * 16)


def test_top_classes(tmp_path: Path) -> None:
    asker = Predictor(network(VIT), device="cpu")
    picture = drawn(1)[0]
    assert len(asker(picture).top) == 5
    assert len(asker(picture, topk=2).top) == 2
    assert len(asker(picture, topk=99).top) == 5  # all there are
    assert sum(answer.probability for answer in asker(picture).top) == pytest.approx(1)
    with pytest.raises(ConfigError, match="topk=0 must be at least 1"):
        asker(picture, topk=0)


def test_equally_likely_classes_stand_in_their_order() -> None:
    model = network(VIT)
    model.reset_classifier(5)  # all zero: it says nothing
    asker = Predictor(model, device="cpu")
    assert [answer.index for answer in asker(drawn(1)[0], topk=3).top] == [0, 1, 2]


def test_a_prediction_as_words_and_as_data() -> None:
    prediction = Prediction((ClassProbability("cat", 3, 0.875), ClassProbability("dog", 5, 0.125)))
    assert (prediction.label, prediction.index, prediction.probability) == ("cat", 3, 0.875)
    assert str(prediction) == "cat 87.5 %, dog 12.5 %"
    assert prediction.to_dict()["top"][1] == {"label": "dog", "index": 5, "probability": 0.125}


def test_classes_without_names_are_numbered(tmp_path: Path) -> None:
    asker = vitrail.predictor(weights(tmp_path, labels=None), device="cpu")
    assert asker.labels == tuple(f"class {index}" for index in range(5))
    named = vitrail.predictor(weights(tmp_path), device="cpu", labels="vwxyz")
    assert named.labels == tuple("vwxyz")
    with pytest.raises(ConfigError, match="2 labels for 5 classes"):
        vitrail.predictor(weights(tmp_path), labels=["a", "b"])


@pytest.mark.parametrize("config", [replace(VIT, classes=0, head="none"), replace(RESNET, classes=0)])
def test_a_network_without_a_head_gives_features_only(tmp_path: Path, config: vitrail.ViTConfig) -> None:
    asker = vitrail.predictor(weights(tmp_path, config), device="cpu")
    assert asker.labels == ()
    assert asker.features(drawn(2)).shape[0] == 2
    with pytest.raises(ConfigError, match=r"no classes to name; .*vitrail fit"):
        asker(drawn(1)[0])


def test_the_folder_of_a_run_stands_for_its_best_weights(tmp_path: Path) -> None:
    picture = drawn(1)[0]
    weights(tmp_path, VIT, "last.safetensors")
    last = vitrail.predictor(tmp_path, device="cpu")(picture)
    weights(tmp_path, replace(VIT, pool="mean"), "best.safetensors")
    best = vitrail.predictor(tmp_path, device="cpu")(picture)
    assert best == vitrail.predictor(tmp_path / "best.safetensors", device="cpu")(picture) != last


def test_another_image_size_and_precision(tmp_path: Path) -> None:
    path, picture = weights(tmp_path), drawn(1)[0]
    larger = vitrail.predictor(path, device="cpu", image_size=(12, 24))
    assert larger.prepare(picture).shape == (3, 12, 24)
    assert larger.tokens(picture).shape == (1, 6, 8, 16)
    half = vitrail.predictor(path, device="cpu", precision="bfloat16")
    whole = vitrail.predictor(path, device="cpu")
    assert next(half.network.parameters()).dtype == torch.bfloat16
    found, exact = half.features(picture), whole.features(picture)
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.1 * exact.abs().max()
    with pytest.raises(UnknownName, match="unknown precision 'half'"):
        vitrail.predictor(path, precision="half")  # type: ignore[arg-type]


def test_what_is_no_prepared_batch_is_refused() -> None:
    asker = Predictor(network(VIT), device="cpu")
    pixels = asker.prepare(drawn(1)[0])
    assert pixels.dtype == torch.uint8
    for wrong in (pixels, pixels[None].float(), pixels[None, :, :-1]):
        with pytest.raises(ConfigError, match=r"prepared images are torch.uint8 \[N, 3, 6, 12\]: stack"):
            asker.probabilities(wrong)


def test_a_bad_picture_in_a_list_is_named(tmp_path: Path) -> None:
    asker = Predictor(network(VIT), device="cpu", batch=2)
    names = folder_of(tmp_path, 5)
    Path(names[3]).write_text("<html>")
    with pytest.raises(BadImage, match=r"03\.png: not an image: starts with '<html>'"):
        asker(names)


def test_networks_and_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes 5 channels; images are prepared in 3, or grey"):
        Predictor(network(replace(VIT, channels=5)), device="cpu")
    with pytest.raises(ConfigError, match="batch=0 must be at least 1"):
        vitrail.predictor(weights(tmp_path), batch=0)
    with pytest.raises(ConfigError, match="device 'nonsense' is not known to torch"):
        vitrail.predictor(weights(tmp_path), device="nonsense")
    with pytest.raises(vitrail.VitrailError, match="no such weight file or folder"):
        vitrail.predictor(tmp_path / "nothing.safetensors")


def test_a_network_without_a_card_takes_pixels_from_minus_one_to_one() -> None:
    model = network(VIT)
    model.card = None
    asker = Predictor(model, device="cpu")
    assert asker.preprocessing.image == VIT.image
    assert asker.preprocessing.mean == (0.5, 0.5, 0.5)
    assert repr(asker) == "Predictor(ViT, 6x12 px, 5 classes, cpu)"


def test_the_class_takes_weights_by_name_and_networks(tmp_path: Path) -> None:
    path, picture = weights(tmp_path), drawn(1)[0]
    asker = vitrail.Predictor(path, device="cpu")
    assert asker(picture) == vitrail.predictor(path, device="cpu")(picture)
    assert vitrail.Predictor(vitrail.load(path), device="cpu")(picture) == asker(picture)
    larger = vitrail.Predictor(vitrail.load(path), device="cpu", image_size=(12, 24))
    assert larger(picture) == vitrail.predictor(path, device="cpu", image_size=(12, 24))(picture)
    assert next(vitrail.Predictor(path, precision="bfloat16").network.parameters()).dtype == torch.bfloat16
    half = vitrail.load(path, dtype=torch.bfloat16)
    assert next(vitrail.predictor(half, device="cpu").network.parameters()).dtype == torch.bfloat16
    with pytest.raises(WeightsNotFound):
        vitrail.Predictor(tmp_path / "nothing.safetensors")
