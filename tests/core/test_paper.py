"""The paper's tables hang together: group means are Figure 2's, tasks are VTAB's."""

import pytest

from vitrail.core.paper_tables import TABLE_6, TABLE_9, jft_epochs, printed_exaflops
from vitrail.data.datasets.catalogue import VTAB_TASKS
from vitrail.models.zoo import ZOO

# Natural, Specialized, Structured as Figure 2 shows them, and the mean of all 19 as Tables 2 and 9 print it.
FIGURE_2 = {
    "ViT-H/14, JFT": (86.69, 87.00, 65.03, 77.6),
    "ViT-L/16, JFT": (85.56, 86.72, 62.96, 76.3),
    "ViT-L/16, I21k": (83.27, 84.65, 57.50, 72.7),
}


@pytest.mark.parametrize("network", FIGURE_2)
def test_means_of_table_9_are_figure_2s(network: str) -> None:
    table = TABLE_9[network]
    assert list(table) == list(VTAB_TASKS)
    for group, mean in zip(("natural", "specialized", "structured"), FIGURE_2[network], strict=False):
        values = [table[name] for name, task in VTAB_TASKS.items() if task.group == group]
        assert sum(values) / len(values) == pytest.approx(mean, abs=0.006)
    assert sum(table.values()) / 19 == pytest.approx(FIGURE_2[network][3], abs=0.06)


def test_table_6_is_of_networks_that_have_a_name() -> None:
    assert {row.network for row in TABLE_6} <= set(ZOO)
    assert len(TABLE_6) == 18
    assert [row.network for row in TABLE_6 if row.misprint] == ["R50+ViT-L/16"]


def test_table_6_by_network() -> None:
    assert printed_exaflops("ViT-L/16", 14) == 1567
    assert printed_exaflops("ViT-L/16", 8) is None
    assert jft_epochs("ViT-L/16") == (7, 14)
    assert jft_epochs("ViT-Ti/16") == (7,)
