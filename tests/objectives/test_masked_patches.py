"""Masked patch prediction (B.1.2): what is corrupted, what must be told, and where gradients go."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.models.tiny import HYBRID, POSITIONS
from tests.objectives.masked import (
    PLAIN,
    SEED,
    STEP,
    VIT,
    WORLD,
    batch_of,
    digits,
    model,
    network,
    noise,
    place,
    seeded,
    slow_classes,
    stirred,
)
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Mix, cifar
from vitrail.distributed.parallel import PrecisionWrapper
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.objectives.masked_patches import MaskedPatches, MaskedPatchesObjective, Target
from vitrail.objectives.objective import ObjectiveContext, ObjectiveOutput

TARGETS: list[Target] = ["mean-colour", "small-patch", "pixels"]
N = VIT.patches


def objective_of(config: ViTConfig = VIT, **changes: Any) -> MaskedPatchesObjective:
    with seeded(1):
        return MaskedPatchesObjective(
            network(config), MaskedPatches(**changes), ObjectiveContext(0, PLAIN, Mix(), 10, WORLD)
        )


def restless(config: ViTConfig = VIT, **changes: Any) -> MaskedPatchesObjective:
    objective = objective_of(config, **changes)
    stirred(objective)
    return objective


def drawn(objective: MaskedPatchesObjective, count: int, step: int = STEP) -> tuple[Tensor, Tensor]:
    sample = torch.arange(count)
    return objective.draw(seed=SEED, step=step, epoch=torch.zeros_like(sample), sample=sample)


# What is corrupted


def test_of_each_picture_half_is_corrupted_and_of_that_the_shares_are_as_said() -> None:
    count = 20_000
    source, corrupted = drawn(objective_of(), count)
    assert corrupted.shape == (count, 6)
    assert (corrupted.sort(1).values.diff(dim=1) > 0).all()  # no patch twice
    assert all(int(row.min()) >= 0 and int(row.max()) < N for row in corrupted[:100])
    itself = torch.arange(N).expand(count, -1)
    chosen = torch.zeros(count, N, dtype=torch.bool).scatter(1, corrupted, True)
    assert (source == itself)[~chosen].all()  # the others stay
    among, own = source[chosen], itself[chosen]
    total = count * 6
    for found, nominal in (
        (among == N, 0.8),
        ((among != N) & (among != own), 0.1),
        (among == own, 0.1),
    ):
        assert abs(float(found.float().mean()) - nominal) < 4 * math.sqrt(nominal * (1 - nominal) / total)
    each = chosen.float().mean(0)  # every patch of the grid is corrupted as often
    assert float((each - 0.5).abs().max()) < 4.5 * math.sqrt(0.25 / count)


def test_shares_are_independent_draws_not_quotas() -> None:
    masked = (drawn(objective_of(), 5_000)[0] == N).sum(1)
    shares = torch.bincount(masked, minlength=7) / 5_000
    for number in range(7):
        nominal = math.comb(6, number) * 0.8**number * 0.2 ** (6 - number)
        assert abs(float(shares[number]) - nominal) < 4.5 * math.sqrt(nominal * (1 - nominal) / 5_000) + 1e-9


def test_a_swap_takes_each_other_patch_as_often_and_never_the_same() -> None:
    source, corrupted = drawn(objective_of(mask=0.0, swap=1.0, rate=1.0), 10_000)
    itself = torch.arange(N).expand_as(source)
    assert (source != itself).all()
    assert (source < N).all()
    assert corrupted.shape == (10_000, N)
    further = (source - itself) % N
    shares = torch.bincount(further.flatten(), minlength=N) / further.numel()
    assert shares[0] == 0
    share = 1 / (N - 1)
    assert float((shares[1:] - share).abs().max()) < 4.5 * math.sqrt(share * (1 - share) / further.numel())


@pytest.mark.parametrize(("rate", "number"), [(0.15, 2), (0.5, 6), (1.0, 12), (0.04, 0)])
def test_the_rate_is_a_knob(rate: float, number: int) -> None:
    if not number:
        with pytest.raises(ConfigError, match=r"objective.rate=0.04 hides 0 of 12 patches, which must be 1 to 12"):
            objective_of(rate=rate)
    else:
        assert drawn(objective_of(rate=rate), 3)[1].shape == (3, number)


def test_draws_do_not_depend_on_what_comes_with_a_sample() -> None:
    objective, pixels = objective_of(), noise(8)
    whole = objective.inputs(batch_of(pixels), seed=SEED, step=STEP)
    first = objective.inputs(batch_of(pixels[:4]), seed=SEED, step=STEP)
    second = objective.inputs(batch_of(pixels[4:], first=4), seed=SEED, step=STEP)
    for all_of_it, a, b in zip(whole, first, second, strict=True):
        assert torch.equal(all_of_it, torch.cat([a, b]))
    for seed, step in ((SEED + 1, STEP), (SEED, STEP + 1)):
        other = objective.inputs(batch_of(pixels), seed=seed, step=step)
        assert not torch.equal(whole[1], other[1])
        assert not torch.equal(whole[2], other[2])


# What must be told


@torch.no_grad()
def slow_loss(objective: MaskedPatchesObjective, inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """Loss and hits of some images, one at a time and in float64, with embeddings that are corrupted one by one."""
    pixels, source, corrupted, _ = inputs
    vit, target, head = objective.network, objective.config.target, objective.head
    assert isinstance(vit, ViT)
    total = hits = 0.0
    for picture in range(len(pixels)):
        images = (pixels[picture : picture + 1].double() / 255 - objective.mean.double()) / objective.std.double()
        tokens = vit.tokens(images)[0]
        changed = tokens.clone()
        for patch in range(N):
            stands = int(source[picture, patch])
            changed[VIT.prefix + patch] = head.mask[0, 0] if stands == N else tokens[VIT.prefix + stands]
        z = vit.norm(vit.forward_blocks(vit.position(changed[None], 0)))[0]
        for patch in corrupted[picture].tolist():
            told = head.predict(z[VIT.prefix + patch])
            rows, columns = place(patch)
            truth = pixels[picture, :, rows, columns].permute(1, 2, 0)  # [P, P, 3]
            if target == "pixels":
                wanted = truth.double().flatten() / 255
                total += float(sum((a - b) ** 2 for a, b in zip(told, wanted, strict=True)) / len(wanted)) / 6
                continue
            classes = slow_classes(truth, 1 if target == "mean-colour" else 4)
            for cell, wanted in enumerate(classes):
                logits = told[512 * cell : 512 * (cell + 1)]
                total += float(logits.logsumexp(0) - logits[wanted]) / len(classes) / 6
                hits += float(logits.argmax() == wanted) / len(classes) / 6
    return total, hits


@pytest.mark.parametrize("target", TARGETS)
def test_the_loss_is_that_of_a_slow_reference(target: Target) -> None:
    objective = restless(target=target)
    batch = batch_of(noise(4))
    inputs = objective.inputs(batch, seed=SEED, step=STEP)
    kinds = {int(kind) for kind in (inputs[1] == N).int().flatten()}
    assert kinds == {0, 1}
    outcome: ObjectiveOutput = objective(*inputs)
    assert (outcome.total.dtype, outcome.count.item()) == (torch.float32, 4)
    total, hits = slow_loss(objective.double(), inputs)
    assert float(outcome.total.detach()) == pytest.approx(total, rel=2e-5)
    if target == "pixels":
        assert outcome.tallies == {}
    else:
        assert float(outcome.tallies["hits"]) == pytest.approx(hits, abs=1e-6)


def test_a_swapped_patch_is_what_the_reference_swaps() -> None:
    """With swaps alone, so that they cannot hide behind masks."""
    objective = restless(mask=0.0, swap=1.0)
    inputs = objective.inputs(batch_of(noise(3)), seed=SEED, step=STEP)
    fast = float(objective(*inputs).total.detach())
    assert fast == pytest.approx(slow_loss(objective.double(), inputs)[0], rel=2e-5)


def test_hits_are_counted() -> None:
    objective = objective_of()
    with torch.no_grad():
        objective.head.predict.bias[511] = 5.0
    white = torch.full((3, 3, *VIT.image), 255, dtype=torch.uint8)
    half = torch.cat([white[:2], torch.zeros_like(white[:2])])
    outcome = objective(*objective.inputs(batch_of(half), seed=SEED, step=STEP))
    assert float(outcome.tallies["hits"]) == 2.0


@pytest.mark.parametrize("target", TARGETS)
def test_only_corrupted_patches_are_scored(target: Target) -> None:
    """Other pixels where nothing is corrupted, which the network is kept from seeing: the same loss."""
    objective = restless(target=target)
    inputs = objective.inputs(batch_of(noise(2)), seed=SEED, step=STEP)
    pixels, source, corrupted, valid = inputs
    frozen = objective.predict(pixels, source, corrupted)
    objective.predict = lambda *_: frozen  # type: ignore[method-assign]
    before = objective(*inputs).total
    for patch in range(N):
        rows, columns = place(patch)
        changed = pixels.clone()
        changed[0, :, rows, columns] = 255 - changed[0, :, rows, columns]
        after = objective(changed, source, corrupted, valid).total
        assert bool(after == before) == (patch not in corrupted[0].tolist())


@pytest.mark.parametrize("target", TARGETS)
def test_a_place_without_a_picture_counts_for_nothing(target: Target) -> None:
    objective = restless(target=target)
    valid = torch.tensor([True, False, True, False])
    pixels = noise(4)
    with_rest = objective.inputs(batch_of(pixels, valid=valid), seed=SEED, step=STEP)
    other = pixels.clone()
    other[~valid] = noise(2, seed=9)
    results = list[tuple[ObjectiveOutput, list[Tensor]]]()
    for some in (pixels, other):
        objective.zero_grad()
        outcome = objective(some, *with_rest[1:])
        outcome.total.backward()
        results.append((outcome, [p.grad.clone() for p in objective.parameters() if p.grad is not None]))
    (a, before), (b, after) = results
    assert a.count == b.count == 2
    assert torch.equal(a.total, b.total)
    assert a.tallies == b.tallies
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    alone = [float(objective(*(tensor[at : at + 1] for tensor in with_rest)).total.detach()) for at in (0, 2)]
    assert float(a.total.detach()) == pytest.approx(sum(alone), rel=1e-5)
    # Not even where the network says nothing sensible there.
    frozen = objective.predict(*with_rest[:3]).detach()
    frozen[1] = torch.nan
    objective.predict = lambda *_: frozen  # type: ignore[method-assign]
    assert torch.isfinite(objective(*with_rest).total)


# Where gradients go


def gradients(objective: MaskedPatchesObjective) -> dict[str, Tensor]:
    objective(*objective.inputs(batch_of(noise(2)), seed=SEED, step=STEP)).total.backward()
    return {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}


def test_every_parameter_learns_and_there_is_no_class_head() -> None:
    objective = restless()
    found = gradients(objective)
    assert set(found) == {name for name, _ in objective.named_parameters()}
    assert all(bool(gradient.abs().sum() > 0) for gradient in found.values())
    assert {name for name, _ in objective.named_parameters() if not name.startswith("network.")} == {
        "head.mask",
        "head.predict.weight",
        "head.predict.bias",
    }
    assert not [name for name in found if name.startswith("network.head")]


def test_the_mask_embedding_learns_only_where_something_is_masked() -> None:
    assert float(gradients(restless(mask=0.0))["head.mask"].abs().sum()) == 0
    assert float(gradients(restless(mask=1.0, swap=0.0))["head.mask"].abs().sum()) > 0


def test_a_masked_patch_is_not_seen_and_a_kept_one_is() -> None:
    objective = restless()
    pixels, source, corrupted, _ = objective.inputs(batch_of(noise(1)), seed=SEED, step=STEP)
    before = objective.predict(pixels, source, corrupted)
    shown = set(source[0].tolist())
    for patch in range(N):
        rows, columns = place(patch)
        changed = pixels.clone()
        changed[0, :, rows, columns] = 255 - changed[0, :, rows, columns]
        same = torch.equal(objective.predict(changed, source, corrupted), before)
        assert same == (patch not in shown)


# How it runs


@pytest.mark.parametrize("position", POSITIONS, ids=str)
def test_all_positions_will_do(position: dict[str, Any]) -> None:
    gradient = gradients(restless(model(**position)))
    assert all(bool(value.isfinite().all()) for value in gradient.values())


def test_axial_attention_will_do() -> None:
    config = model(attention="axial", class_token=False, registers=0, pool="mean", position="learned2d")
    assert all(bool(value.abs().sum() > 0) for value in gradients(restless(config)).values())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("position", ["learned", "sincos2d"])
def test_bfloat16_weights(target: Target, position: str) -> None:
    objective = restless(model(position=position), target=target)
    inputs = objective.inputs(batch_of(noise(4)), seed=SEED, step=STEP)
    exact = objective(*inputs)
    reached = list[torch.dtype]()
    for block in cast(ViT, objective.network).blocks:
        block.register_forward_pre_hook(lambda _, given: reached.append(given[0].dtype))
    low = PrecisionWrapper(objective, WORLD.device, "bfloat16", cast_weights=True)(*inputs)
    low.total.backward()
    assert reached == [torch.bfloat16] * 2
    assert low.total.dtype == low.count.dtype == torch.float32
    assert float(low.total.detach()) == pytest.approx(float(exact.total.detach()), rel=0.03)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in objective.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["small-patch", "pixels"])
def test_forward_is_one_graph(target: Target) -> None:
    torch._dynamo.reset()
    objective = restless(model(depth=1), target=target)
    inputs = objective.inputs(batch_of(noise(2)), seed=SEED, step=STEP)
    compiled = torch.compile(objective, fullgraph=True, dynamic=False, backend="aot_eager")
    outcome = compiled(*inputs)
    outcome.total.backward()
    assert float(outcome.total.detach()) == pytest.approx(float(objective(*inputs).total.detach()), rel=1e-6)


def test_nothing_is_told_at_first() -> None:
    objective = objective_of()
    outcome = objective(*objective.inputs(batch_of(noise(2)), seed=SEED, step=STEP))
    assert float(outcome.total.detach()) == pytest.approx(2 * math.log(512))
    assert 0.005 < float(objective.head.mask.detach().std()) < 0.05


@pytest.mark.parametrize(
    ("target", "outputs"), [("mean-colour", 512), ("small-patch", 16 * 512), ("pixels", 6 * 5 * 3)]
)
def test_work_by_hand(target: Target, outputs: int) -> None:
    tokens, width = 12 + 3, 16
    layer = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * 24
    by_hand = 12 * (6 * 5 * 3) * width + 2 * layer + 6 * width * outputs
    assert MaskedPatches(target=target).macs_per_image(VIT) == by_hand
    assert MaskedPatches(target=target).macs_per_image(model(head="linear", classes=9)) == by_hand


def test_one_view_and_no_labels() -> None:
    augmentation = cifar(8, padding=1)
    assert MaskedPatches().views(augmentation) == (augmentation,)
    assert not MaskedPatches.task
    assert not MaskedPatches.needs_whole_batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0.0}, "rate=0.0 must be above 0"),
        ({"rate": 1.5}, "rate=1.5 must be above 0 and at most 1"),
        ({"mask": 0.95}, "mask=0.95 and swap=0.1 are shares"),
        ({"swap": -0.1}, "neither below 0"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaskedPatches(**changes)


def test_targets_and_networks_that_do_not_go_together() -> None:
    with pytest.raises(UnknownName, match="mean-colour"):
        MaskedPatches(target="mean-color")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="makes 4x4 of a patch, and patch=3x5 is smaller"):
        MaskedPatches(target="small-patch").check_model(model(patch=(3, 5)))
    MaskedPatches().check_model(model(patch=(3, 5)))
    with pytest.raises(ConfigError, match="feature map"):
        MaskedPatches().macs_per_image(HYBRID)
    with pytest.raises(ConfigError, match="the image has only one"):
        MaskedPatches(rate=1.0).check_model(model(patch=VIT.image))


# For the eye


@pytest.mark.parametrize("target", TARGETS)
def test_pictures_show_what_is_seen_and_told(target: Target) -> None:
    objective = restless(target=target)
    objective.train()
    pixels = noise(3)
    original, seen, told = objective.pictures(pixels, seed=4)
    assert objective.training
    assert torch.equal(original, pixels)
    assert seen.dtype == told.dtype == torch.uint8
    sample = torch.arange(3)
    source, corrupted = objective.draw(seed=4, step=0, epoch=torch.zeros_like(sample), sample=sample)
    answers = objective.predict(pixels, source, corrupted)
    for picture in range(3):
        for patch in range(N):
            rows, columns = place(patch)
            stands = int(source[picture, patch])
            shown = torch.full((3, 6, 5), 128) if stands == N else pixels[picture][:, *place(stands)]
            assert torch.equal(seen[picture][:, rows, columns], shown.byte())
            drawing = told[picture][:, rows, columns]
            if stands == patch:
                assert torch.equal(drawing, pixels[picture][:, rows, columns])
                continue
            answer = answers[picture, corrupted[picture].tolist().index(patch)]
            assert torch.equal(drawing, slow_drawing(answer, target))


def slow_drawing(answer: Tensor, target: Target) -> Tensor:
    if target == "pixels":
        return (answer.view(6, 5, 3).permute(2, 0, 1) * 255).round().clamp(0, 255).byte()
    side = 1 if target == "mean-colour" else 4
    drawing = torch.empty(3, 6, 5, dtype=torch.uint8)
    for y in range(6):
        for x in range(5):
            cell = y * side // 6 * side + x * side // 5
            number = int(answer[512 * cell : 512 * (cell + 1)].argmax())
            for channel, level in enumerate((number // 64, number // 8 % 8, number % 8)):
                drawing[channel, y, x] = round((level + 0.5) * 255 / 8)
    return drawing


@pytest.mark.parametrize(
    ("target", "factor"),
    [
        ("mean-colour", 0.5),
        pytest.param("small-patch", 0.5, marks=pytest.mark.slow),
        pytest.param("pixels", 0.5, marks=pytest.mark.slow),
    ],
)
def test_it_learns_eight_digits(target: Target, factor: float) -> None:
    config = ViTConfig(
        width=32, depth=2, mlp_width=64, heads=4, image=(16, 16), patch=(4, 4), classes=0, head="none", pool="token"
    )
    plain = Preprocessing(image=(16, 16))
    with seeded(1):
        objective = MaskedPatchesObjective(
            network(config), MaskedPatches(target=target), ObjectiveContext(0, plain, Mix(), 30, WORLD)
        )
    adam = torch.optim.Adam(objective.parameters(), lr=5e-3)
    batch = batch_of(digits(8))
    losses = list[float]()
    for step in range(30):
        outcome = objective(*objective.inputs(batch, seed=SEED, step=step))
        adam.zero_grad()
        (outcome.total / outcome.count).backward()
        adam.step()
        losses.append(float(outcome.total.detach() / outcome.count))
    assert sum(losses[-5:]) / 5 < factor * losses[0]
