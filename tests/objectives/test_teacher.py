"""A teacher is a copy that learns nothing and follows."""

import math

import pytest
import torch

from tests.objectives.taught import MODEL, contrast, distil, network
from vitrail.models.build import build_on_meta
from vitrail.models.vit import ViT
from vitrail.objectives.projection_heads import PrototypeHead, Teacher, momentum_at


def head() -> PrototypeHead:
    return PrototypeHead(16, hidden=8, bottleneck=4, outputs=6)


def test_follows_by_the_formula() -> None:
    model, top = network(), head()
    teacher = Teacher(model, top)
    expected = {name: parameter.double().clone() for name, parameter in teacher.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for momentum in (0.9, 0.99, 0.0, 0.996, 1.0):
        with torch.no_grad():
            for parameter in (*model.parameters(), *top.parameters()):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        teacher.follow(model, top, momentum)
        students = {f"network.{n}": p for n, p in model.named_parameters()}
        students |= {f"head.{n}": p for n, p in top.named_parameters()}
        for name, parameter in teacher.named_parameters():
            expected[name] = momentum * expected[name] + (1 - momentum) * students[name].double()
            assert torch.allclose(parameter.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_is_never_trained_and_never_in_training_mode() -> None:
    teacher = Teacher(network(dropout=0.5), head())
    teacher.train()
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert not any(part.training for part in teacher.modules())
    images = torch.randn(2, 3, *MODEL.image)
    assert torch.equal(teacher.network(images), teacher.network(images))


def test_an_objective_in_training_mode_leaves_its_teacher_alone() -> None:
    for objective in (contrast(), distil()):
        objective.eval()
        objective.train()
        assert objective.network.training
        assert not objective.teacher.network.training


@pytest.mark.parametrize("position", ["learned", "sincos2d"])
def test_starts_as_the_learner_also_where_that_had_no_storage_when_it_was_made(position: str) -> None:
    hollow = build_on_meta(network(position=position).config)
    assert isinstance(hollow, ViT)
    top = head()
    teacher = Teacher(hollow, top)
    for part in (hollow, teacher):
        part.to_empty(device="cpu")
        for tensor in (*part.parameters(), *part.buffers()):
            tensor.data.fill_(torch.nan)
    full = network(position=position)
    hollow.load_state_dict(full.state_dict())
    for table, other in zip(hollow.buffers(), full.buffers(), strict=True):
        table.copy_(other)
    teacher.copy_from(hollow, top)
    images = torch.randn(2, 3, *MODEL.image)
    assert torch.equal(teacher.network(images), full.eval()(images))


def test_momentum_goes_from_its_start_to_one_along_a_cosine() -> None:
    assert momentum_at(0, start=0.99, steps=100) == pytest.approx(0.99)
    assert momentum_at(100, start=0.99, steps=100) == 1.0
    assert momentum_at(50, start=0.99, steps=100) == pytest.approx(0.995)
    values = [momentum_at(step, start=0.9, steps=40) for step in range(41)]
    assert values == sorted(values)
    assert values[10] == pytest.approx(1 - 0.1 * (math.cos(math.pi / 4) + 1) / 2)
