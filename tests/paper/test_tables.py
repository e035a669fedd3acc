"""The printed tables hang together: averages and means come out, and tables that show the same run say the same."""

import pytest

from vitrail.core.paper_tables import (
    AVERAGE_5,
    CORE_DAYS,
    TABLE_2,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    TABLE_8,
    TABLE_9,
    TABLE_9_MEANS,
    TASKS,
    VTAB_TASKS,
    Compute,
    average_5,
)
from vitrail.models.zoo import ZOO

# The mean of ImageNet, CIFAR-10, CIFAR-100, Pets and Flowers, row by row of Table 6: Figure 5's Average-5.
FIGURE_5 = [
    *(92.50, 94.08, 94.27, 95.12, 95.44, 95.82),
    *(89.33, 92.01, 91.67, 92.41, 94.01, 94.24, 95.09),
    *(94.27, 94.68, 94.85, 95.17, 95.36),
]
ROWS = list(zip(TABLE_6, FIGURE_5, strict=True))


@pytest.mark.parametrize(("row", "average"), ROWS, ids=lambda one: getattr(one, "network", ""))
def test_average_5_of_table_6(row: Compute, average: float) -> None:
    assert row.average_5 == pytest.approx(average, abs=0.0051)


def test_table_6_has_the_three_families() -> None:
    names = [row.network for row in TABLE_6]
    assert [sum(name.startswith(kind) for name in names) for kind in ("ViT", "BiT", "R50+ViT")] == [6, 7, 5]
    assert all(set(row.accuracy) == set(TASKS) for row in TABLE_6)


# Table 5's column of JFT shows these runs of Table 6. H/14's is another run of the same length, so it is not here.
SAME_RUN = {"ViT-B/16": 7, "ViT-B/32": 7, "ViT-L/32": 7, "ViT-L/16": 14}


@pytest.mark.parametrize("network", SAME_RUN)
def test_tables_5_and_6_agree_where_they_show_the_same_run(network: str) -> None:
    row = next(row for row in TABLE_6 if (row.network, row.epochs) == (network, SAME_RUN[network]))
    assert row.accuracy == {task: TABLE_5["JFT"][task][network] for task in TASKS}


def test_tables_5_and_6_have_two_runs_of_the_largest() -> None:
    row = next(row for row in TABLE_6 if row.network == "ViT-H/14")
    printed = {task: TABLE_5["JFT"][task]["ViT-H/14"] for task in TASKS}
    assert [task for task in TASKS if printed[task] == row.accuracy[task]] == ["cifar10"]
    assert all(abs(printed[task] - row.accuracy[task]) < 0.5 for task in TASKS)


def test_table_5_has_six_tasks_and_no_huge_network_on_imagenet_alone() -> None:
    for upstream, tasks in TABLE_5.items():
        assert set(tasks) == set(TASKS)
        for networks in tasks.values():
            assert set(networks) <= set(ZOO)
            assert ("ViT-H/14" in networks) == (upstream != "ImageNet")


def test_table_5_says_what_section_4_3_says() -> None:
    """Large is below Base on ImageNet, about equal on ImageNet-21k, above on JFT."""
    small, medium, large = (TABLE_5[upstream]["imagenet"] for upstream in ("ImageNet", "I21k", "JFT"))
    for patch in (16, 32):
        assert small[f"ViT-L/{patch}"] < small[f"ViT-B/{patch}"]
        assert abs(medium[f"ViT-L/{patch}"] - medium[f"ViT-B/{patch}"]) < 1.5
        assert large[f"ViT-L/{patch}"] > large[f"ViT-B/{patch}"] + 2


def test_table_2_is_above_table_5_where_the_resolution_is_higher() -> None:
    for name in ("ViT-H/14, JFT", "ViT-L/16, JFT", "ViT-L/16, I21k"):
        network, upstream = name.split(", ")
        assert TABLE_2[name]["imagenet"][0] > TABLE_5[upstream]["imagenet"][network]
    same = ("cifar10", "cifar100", "pets", "flowers102")  # of H/14, both tables show the same runs here
    assert [TABLE_2["ViT-H/14, JFT"][task][0] for task in same] == [TABLE_5["JFT"][task]["ViT-H/14"] for task in same]


def test_table_2_has_what_was_printed() -> None:
    assert set(CORE_DAYS) == set(TABLE_2)
    assert all(set(row) == {*TASKS, "vtab"} for name, row in TABLE_2.items() if "Noisy" not in name)
    student = TABLE_2["Noisy Student (EfficientNet-L2)"]
    assert list(student) == ["imagenet", "real"]
    assert student["imagenet"][::2] == [88.4, 88.5]
    assert TABLE_2["BiT-L (R152x4)"]["real"] == [90.54]


@pytest.mark.parametrize("network", TABLE_7)
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_average_of_table_7(network: str, optimiser: str) -> None:
    row = TABLE_7[network][optimiser]
    assert average_5(row) == pytest.approx(row["average"], abs=0.0051)


@pytest.mark.parametrize("network", TABLE_7)
def test_table_7s_adam_is_table_6s_run_of_7_epochs(network: str) -> None:
    row = next(row for row in TABLE_6 if (row.network, row.epochs) == (network, 7))
    assert {task: row.accuracy[task] for task in AVERAGE_5} == {
        task: value for task, value in TABLE_7[network]["adam"].items() if task != "average"
    }


def test_table_8_says_what_d_4_says() -> None:
    """Encodings are within 0.35 points of each other; none at all costs 2.8 against the best of them, about."""
    others = [value for (kind, _), value in TABLE_8.items() if kind != "none"]
    assert len(TABLE_8) == 8
    assert 100 * (max(others) - min(others)) < 0.35
    assert 100 * (sum(others) / len(others) - TABLE_8["none", "stem"]) == pytest.approx(2.7, abs=0.05)
    assert 100 * (TABLE_8["learned", "stem"] - TABLE_8["none", "stem"]) == pytest.approx(2.8, abs=0.05)


@pytest.mark.parametrize("network", TABLE_9)
def test_means_of_table_9(network: str) -> None:
    """Rows are rounded to 0.1, so their mean may be off by 0.05 before it is rounded itself; Table 2 has two digits."""
    mean = sum(TABLE_9[network].values()) / len(VTAB_TASKS)
    assert mean == pytest.approx(TABLE_9_MEANS[network], abs=0.1)
    assert mean == pytest.approx(TABLE_2[network]["vtab"][0], abs=0.051)


# Natural, Specialized, Structured.
FIGURE_2 = {
    "ViT-H/14, JFT": (86.69, 87.00, 65.03),
    "ViT-L/16, JFT": (85.56, 86.72, 62.96),
    "ViT-L/16, I21k": (83.27, 84.65, 57.50),
}


@pytest.mark.parametrize("network", FIGURE_2)
def test_groups_of_figure_2(network: str) -> None:
    values = [TABLE_9[network][task] for task in VTAB_TASKS]
    means = [sum(part) / len(part) for part in (values[:7], values[7:11], values[11:])]
    assert means == pytest.approx(FIGURE_2[network], abs=0.0051)
