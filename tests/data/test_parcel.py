"""Arrays that travel together come out as they went in."""

from typing import Any

import numpy as np
import pytest
import torch

from vitrail.data.transforms.batched import PackedArrays

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUMBERS = np.random.default_rng(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [np.arange(7)],
        [np.array([True, False, True]), np.arange(3, dtype=np.float32), np.arange(5), np.array([7], np.uint8)],
        [np.zeros((0, 3, 2), np.float32), np.arange(6).reshape(2, 3).T, np.arange(20, dtype=np.float32)[::3]],
        [np.broadcast_to(np.array([1, 2]), (4, 2)), np.array(3.5, np.float32), NUMBERS.integers(0, 9, (3, 1, 1, 1))],
    ],
)
def test_they_come_out_as_they_went_in(arrays: list[Any], device: str) -> None:
    sent = PackedArrays(arrays).to_device(torch.device(device))
    assert len(sent) == len(arrays)
    for tensor, array in zip(sent, arrays, strict=True):
        assert tensor.device.type == device
        assert tuple(tensor.shape) == array.shape
        assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_they_share_one_piece_of_memory() -> None:
    sent = PackedArrays([np.arange(3), np.ones(2, np.float32), np.array([True])]).to_device(torch.device("cpu"))
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1
