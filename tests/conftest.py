"""Tests that need what this machine has not are skipped, and say so. None of them touches the user's own cache."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Examples are the same everywhere and may take as long as a loaded machine needs.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever is kept between commands, as features are by every fine-tuning, is kept here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_width() -> Iterator[None]:
    """Tables are as wide as they like, also where whatever runs the tests says how wide its own terminal is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _forks_may_train() -> None:
    """Some tests fork children that train. Autograd looks for devices in its first backward pass; one that comes after
    torch.compile or torch.export finds some, starts threads for them, and no child may go backward any more."""
    import torch

    torch.ones(1, requires_grad=True).sum().backward()


def pytest_configure() -> None:
    """A shell starts what runs in the background with interrupts ignored, and whatever tests start would inherit that:
    those that interrupt it would wait in vain."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of later families, a few stand for all in the fast lane. A GPU comes with a torch of its own, and what that one's
    compiler warns of is not a fault of ours."""
    from tests.models.tiny import FAMILIES, STANDING_FOR_ALL

    for item in items:
        values = getattr(item, "callspec", None)
        named = [] if values is None else [value for value in values.params.values() if isinstance(value, str)]
        if any(name in FAMILIES and name not in STANDING_FOR_ALL for name in named):
            item.add_marker(pytest.mark.slow)
    needy = [item for item in items if "gpu" in item.keywords]
    if not needy:
        return
    import torch

    mark = pytest.mark.filterwarnings("default")
    if not torch.cuda.is_available():
        mark = pytest.mark.skip(reason="no accelerator here")
    for item in needy:
        item.add_marker(mark)
