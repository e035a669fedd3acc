"""Tests that need what this machine has not are skipped, and say so."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needy = [item for item in items if "gpu" in item.keywords]
    if not needy:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))
