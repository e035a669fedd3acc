"""Tests that need what this machine has not are skipped, and say so. None of them touches the user's own cache."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever is kept between commands, as features are by every fine-tuning, is kept here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needy = [item for item in items if "gpu" in item.keywords]
    if not needy:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))
