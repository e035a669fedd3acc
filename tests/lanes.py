"""Which cases of a parametrisation run in the fast lane."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """The cases, all but the `fast` ones (by value, or by number) marked slow; the first alone is fast by default."""
    quick = fast or (0,)
    return [
        case if any(case == one or (type(one) is int and at == one) for one in quick) else mark_slow(case)
        for at, case in enumerate(cases)
    ]


def mark_slow(case: Any) -> Any:
    if isinstance(case, tuple) and hasattr(case, "marks"):  # a pytest.param
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
