"""From a config to a network, fresh or around given tensors."""

import pytest
import torch

from tests.models.tiny import SOME, VARIANTS, VIT, awake, images
from vitrail.models.build import build, build_from, tensor_shapes


@pytest.mark.parametrize("name", SOME)
def test_skeleton_is_the_state_dict_without_storage(name: str) -> None:
    config = VARIANTS[name]
    assert tensor_shapes(config) == {key: tuple(tensor.shape) for key, tensor in build(config).state_dict().items()}


@pytest.mark.parametrize("name", SOME)
def test_built_around_tensors_it_is_the_same_network(name: str) -> None:
    config = VARIANTS[name]
    model, x = awake(config), images(config)
    again = build_from(config, model.state_dict()).eval()
    torch.testing.assert_close(again(x), model(x), atol=1e-6 if "sincos" in name else 1e-12, rtol=0)
    assert not any(tensor.is_meta for tensor in (*again.parameters(), *again.buffers()))


def test_tensors_are_neither_copied_nor_drawn() -> None:
    tensors = build(VIT).state_dict()
    before = torch.get_rng_state()
    again = build_from(VIT, tensors)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.data_ptr() == tensors[name].data_ptr() for name, p in again.named_parameters())
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_names_and_shapes_must_fit() -> None:
    tensors = build(VIT).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.weight"):
        build_from(VIT, {name: tensor for name, tensor in tensors.items() if name != "norm.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight"):
        build_from(VIT, {**tensors, "norm.weight": torch.zeros(17)})


def test_tensor_names_follow_the_paper() -> None:
    names = {name.replace("blocks.1.", "blocks.0.") for name in tensor_shapes(VIT)}
    assert names == {
        "class_token",
        "embedding.projection.weight",
        "embedding.projection.bias",
        "position.tables.0.table",
        *(
            f"blocks.0.{part}.{kind}"
            for part in ("norm_attention", "attention.qkv", "attention.out", "norm_mlp", "mlp.expand", "mlp.contract")
            for kind in ("weight", "bias")
        ),
        "norm.weight",
        "norm.bias",
        "head.classifier.weight",
        "head.classifier.bias",
    }
