"""When a prediction is right: one label, several of which one counts, or none."""

import pytest
import torch

from vitrail.evaluation.metrics import count_right, cross_entropies, has_label, is_right, judge_predictions

ONE = torch.tensor([2, 0, -1, 1])
SEVERAL = torch.tensor([[2, 0], [1, -1], [-1, -1], [0, 1]])


def test_one_label_is_right_where_it_is_predicted() -> None:
    assert is_right(torch.tensor([2, 1, 0, 1]), ONE).tolist() == [True, False, False, True]
    assert count_right(torch.tensor([2, 1, 0, 1]), ONE) == (2, 3)


def test_any_of_several_labels_is_right() -> None:
    assert is_right(torch.tensor([0, 0, 0, 1]), SEVERAL).tolist() == [True, False, False, True]
    assert has_label(SEVERAL).tolist() == [True, True, False, True]


def test_any_of_several_guesses_may_be_right() -> None:
    guesses = torch.tensor([[1, 2], [2, 1], [0, 1], [0, 2]])
    assert is_right(guesses, ONE).tolist() == [True, False, False, False]
    assert is_right(guesses, SEVERAL).tolist() == [True, True, False, True]


@pytest.mark.parametrize("labels", [ONE, SEVERAL])
def test_no_answer_is_never_right_not_even_without_a_label(labels: torch.Tensor) -> None:
    assert not is_right(torch.full((4,), -1), labels).any()
    assert not is_right(torch.full((4, 5), -1), labels).any()


def test_the_true_class_is_the_label_that_was_predicted_else_the_first() -> None:
    predicted = torch.tensor([0, 2, 1, 2])
    right, among, truth = judge_predictions(torch.stack([predicted, torch.tensor([1, 1, 2, 0])], 1), SEVERAL)
    assert truth.tolist() == [0, 1, -1, 0]
    assert right.tolist() == [True, False, False, False]
    assert among.tolist() == [True, True, False, True]


def test_several_labels_have_their_probability_together() -> None:
    logs = torch.tensor([[0.2, 0.3, 0.5]]).log().expand(4, 3)
    wanted = -torch.tensor([0.7, 0.3, 0.0, 0.5]).log()
    assert torch.allclose(cross_entropies(logs, SEVERAL), wanted)
    alone = torch.tensor([[1, -1], [2, -1]])
    assert torch.equal(cross_entropies(logs[:2], alone), cross_entropies(logs[:2], alone[:, 0]))
