"""Masked autoencoders: the encoder sees the visible patches alone, the decoder tells the hidden ones."""

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
    stirred,
)
from vitrail.core.errors import ConfigError
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Mix, cifar
from vitrail.distributed.parallel import PrecisionWrapper, shard_units
from vitrail.models.blocks import Block
from vitrail.models.positions.embeddings import SineTable
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.objectives.mae import MAE, MAEObjective
from vitrail.objectives.objective import ObjectiveContext, ObjectiveOutput

N, HIDDEN, VISIBLE, PIXELS = 12, 9, 3, 6 * 5 * 3
NORMALISE = pytest.mark.parametrize("normalise", [True, False])


def small(**changes: Any) -> MAE:
    return MAE(**{"decoder_width": 8, "decoder_depth": 2, "decoder_heads": 2, **changes})


def objective_of(config: ViTConfig = VIT, **changes: Any) -> MAEObjective:
    with seeded(1):
        return MAEObjective(network(config), small(**changes), ObjectiveContext(0, PLAIN, Mix(), 10, WORLD))


def restless(config: ViTConfig = VIT, **changes: Any) -> MAEObjective:
    objective = objective_of(config, **changes)
    stirred(objective)
    return objective


def inputs_of(objective: MAEObjective, pixels: Tensor, **changes: Any) -> tuple[Tensor, ...]:
    return objective.inputs(batch_of(pixels, **changes), seed=SEED, step=STEP)


def opposed(pixels: Tensor, patch: int) -> Tensor:
    """The first image with the negative of one patch."""
    rows, columns = place(patch)
    changed = pixels.clone()
    changed[0, :, rows, columns] = 255 - changed[0, :, rows, columns]
    return changed


# What is hidden


def test_every_picture_shows_a_quarter_and_every_patch_as_often() -> None:
    objective, sample = objective_of(), torch.arange(20_000)
    visible, masked, restore = objective.draw(seed=SEED, step=STEP, epoch=sample * 0, sample=sample)
    assert visible.shape == (20_000, VISIBLE)
    assert masked.shape == (20_000, HIDDEN)
    both = torch.cat([visible, masked], 1)
    assert (both.sort(1).values == torch.arange(N)).all()
    shares = torch.bincount(visible.flatten(), minlength=N) / 20_000
    assert float((shares - 0.25).abs().max()) < 4.5 * math.sqrt(0.25 * 0.75 / 20_000)
    for row in range(50):
        for patch in range(N):
            assert int(both[row, int(restore[row, patch])]) == patch


def test_draws_do_not_depend_on_what_comes_with_a_sample() -> None:
    objective, pixels = objective_of(), noise(8)
    whole = inputs_of(objective, pixels)
    parts = [inputs_of(objective, pixels[:4]), inputs_of(objective, pixels[4:], first=4)]
    for all_of_it, a, b in zip(whole, *parts, strict=True):
        assert torch.equal(all_of_it, torch.cat([a, b]))
    for seed, step in ((SEED + 1, STEP), (SEED, STEP + 1)):
        assert not torch.equal(whole[1], objective.inputs(batch_of(pixels), seed=seed, step=step)[1])


# What the encoder sees


@pytest.mark.parametrize("changes", [{}, {"registers": 0}, {"class_token": False, "registers": 0, "pool": "mean"}])
def test_the_encoder_is_the_network_on_some_of_its_tokens(changes: dict[str, Any]) -> None:
    """Against tokens that are taken one by one, and what a hidden patch holds makes no difference."""
    objective = restless(model(**changes))
    vit = cast(ViT, objective.network)
    pixels, visible, masked, _, _ = inputs_of(objective, noise(2))
    found = objective.encode(objective.normalise(pixels), visible)
    assert found.shape == (2, vit.config.prefix + VISIBLE, 16)
    for picture in range(2):
        tokens = vit.position(vit.tokens(objective.normalise(pixels)), 0)[picture]
        some = [tokens[at] for at in range(vit.config.prefix)]
        some += [tokens[vit.config.prefix + patch] for patch in visible[picture].tolist()]
        slow = vit.norm(vit.forward_blocks(torch.stack(some)[None]))[0]
        assert torch.allclose(found[picture], slow, atol=1e-5)
    for patch in range(N):
        after = objective.encode(objective.normalise(opposed(pixels, patch)), visible)
        assert torch.equal(after[1], found[1])
        assert torch.equal(after[0], found[0]) == (patch in masked[0].tolist())


def test_no_gradient_reaches_hidden_pixels_through_the_encoder() -> None:
    objective = restless()
    pixels, visible, _, _, _ = inputs_of(objective, noise(1))
    images = objective.normalise(pixels).requires_grad_()
    objective.encode(images, visible).square().sum().backward()
    assert images.grad is not None
    for patch in range(N):
        touched = bool(images.grad[0][:, *place(patch)].abs().sum() > 0)
        assert touched == (patch in visible[0].tolist())


# What the decoder tells


@torch.no_grad()
def slow_loss(objective: MAEObjective, inputs: tuple[Tensor, ...]) -> float:
    """Image by image in float64; every token is laid in its own place, every patch compared by itself."""
    pixels, visible, masked, _, _ = inputs
    vit, decoder, prefix = cast(ViT, objective.network), objective.decoder, VIT.prefix
    total = 0.0
    for picture in range(len(pixels)):
        images = (pixels[picture : picture + 1].double() / 255 - objective.mean.double()) / objective.std.double()
        tokens = vit.position(vit.tokens(images), 0)[0]
        seen = [*range(prefix), *(prefix + patch for patch in visible[picture].tolist())]
        narrow = decoder.narrow(vit.norm(vit.forward_blocks(tokens[seen][None]))[0])
        grid = decoder.mask[0].expand(prefix + N, -1).clone()
        for token, at in zip(narrow, seen, strict=True):
            grid[at] = token
        y = (grid + decoder.position()[0])[None]
        for block in decoder.blocks:
            y = block(y, decoder.places)
        for patch in masked[picture].tolist():
            told = decoder.predict(decoder.norm(y[0, prefix + patch]))
            wanted = images[0][:, *place(patch)].permute(1, 2, 0).flatten()
            if objective.config.normalise:
                mean = sum(wanted) / PIXELS
                variance = sum((value - mean) ** 2 for value in wanted) / (PIXELS - 1)
                wanted = (wanted - mean) / (variance + 1e-6) ** 0.5
            total += float(((told - wanted) ** 2).sum()) / PIXELS / HIDDEN
    return total


@NORMALISE
def test_the_loss_is_that_of_a_slow_reference(normalise: bool) -> None:
    objective = restless(normalise=normalise)
    inputs = inputs_of(objective, noise(4))
    outcome: ObjectiveOutput = objective(*inputs)
    assert (outcome.total.dtype, outcome.count.item(), outcome.tallies) == (torch.float32, 4, {})
    assert float(outcome.total.detach()) == pytest.approx(slow_loss(objective.double(), inputs), rel=2e-5)


def test_shuffling_and_back_restores_the_order() -> None:
    """Tokens that carry their own number come to lie at that number; the hidden places hold the mask token."""
    objective = objective_of(decoder_depth=1)
    decoder = objective.decoder
    visible, masked, restore = inputs_of(objective, noise(5))[1:4]
    laid = list[Tensor]()
    decoder.blocks[0].register_forward_pre_hook(lambda _, tensors: laid.append(tensors[0]))
    with torch.no_grad():
        decoder.narrow.weight.zero_().fill_diagonal_(1.0)
        decoder.mask.fill_(-1.0)
        cast(Tensor, decoder.position.table).zero_()
        tokens = torch.cat([torch.tensor([100.0, 101, 102]).expand(5, 3), visible.float()], 1)
        decoder(tokens[:, :, None].expand(-1, -1, 16), masked, restore)
    (found,) = laid
    for picture in range(5):
        expected = [100, 101, 102] + [patch if patch in visible[picture].tolist() else -1 for patch in range(N)]
        assert found[picture, :, 0].tolist() == expected


@NORMALISE
def test_only_hidden_patches_are_scored(normalise: bool) -> None:
    objective = restless(normalise=normalise)
    inputs = inputs_of(objective, noise(2))
    pixels, visible, masked, _, _ = inputs
    frozen = objective.encode(objective.normalise(pixels), visible).detach()
    objective.encode = lambda *_: frozen  # type: ignore[method-assign]
    before = objective(*inputs).total
    for patch in range(N):
        rows, columns = place(patch)
        changed = pixels.clone()
        changed[0, :, rows, columns.start] = 255 - changed[0, :, rows, columns.start]
        after = objective(changed, *inputs[1:]).total
        assert bool(after == before) == (patch in visible[0].tolist())
    assert masked.shape[1] == HIDDEN


def test_a_normalised_patch_is_told_whatever_its_brightness() -> None:
    """Half the contrast and another level leave the target as it was, and a flat patch asks for zeros."""
    objective = objective_of()
    images = objective.normalise(noise(1))
    patches = images.reshape(1, 12, -1)
    mean, std = objective.patch_moments(patches)
    other = objective.patch_moments(patches * 0.5 + 3)
    assert torch.allclose((patches - mean) / std, (patches * 0.5 + 3 - other[0]) / other[1], atol=1e-4)
    flat = torch.full((1, 1, PIXELS), 0.7)
    mean, std = objective.patch_moments(flat)
    assert float(((flat - mean) / std).abs().max()) < 1e-3
    assert float(std) == pytest.approx(1e-3)


def test_a_place_without_a_picture_counts_for_nothing() -> None:
    objective = restless()
    valid = torch.tensor([True, False, True, False])
    inputs = inputs_of(objective, noise(4), valid=valid)
    other = inputs[0].clone()
    other[~valid] = noise(2, seed=9)
    results = list[tuple[ObjectiveOutput, list[Tensor]]]()
    for pixels in (inputs[0], other):
        objective.zero_grad()
        outcome = objective(pixels, *inputs[1:])
        outcome.total.backward()
        results.append((outcome, [p.grad.clone() for p in objective.parameters() if p.grad is not None]))
    (a, before), (b, after) = results
    assert a.count == b.count == 2
    assert torch.equal(a.total, b.total)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    alone = [float(objective(*(tensor[at : at + 1] for tensor in inputs)).total.detach()) for at in (0, 2)]
    assert float(a.total.detach()) == pytest.approx(sum(alone), rel=1e-5)
    frozen = objective.encode(objective.normalise(inputs[0]), inputs[1]).detach()
    frozen[1] = torch.nan
    objective.encode = lambda *_: frozen  # type: ignore[method-assign]
    assert torch.isfinite(objective(*inputs).total)


# Where gradients go


def gradients(objective: MAEObjective) -> dict[str, Tensor]:
    objective(*inputs_of(objective, noise(2))).total.backward()
    return {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}


def test_every_parameter_learns_the_class_token_too_and_there_is_no_class_head() -> None:
    objective = restless()
    found = gradients(objective)
    assert set(found) == {name for name, _ in objective.named_parameters()}
    assert all(bool(gradient.abs().sum() > 0) for gradient in found.values())
    assert {"network.class_token", "network.registers", "decoder.mask"} <= set(found)
    assert not [name for name in found if name.startswith("network.head")]


def test_positions_of_hidden_patches_learn_nothing_in_the_encoder() -> None:
    objective = restless()
    inputs = inputs_of(objective, noise(1))
    objective(*inputs).total.backward()
    gradient = cast(Tensor, cast(ViT, objective.network).position.tables[0].table.grad)[0]
    for patch in range(N):
        learns = bool(gradient[1 + patch].abs().sum() > 0)  # the class token's row comes first; registers have none
        assert learns == (patch in inputs[1][0].tolist())


def test_the_mask_token_learns_from_hidden_places_alone() -> None:
    """A decoder that is told that nothing is hidden never reads it."""
    objective = restless()
    tokens = torch.randn(1, VIT.prefix + N, 16, generator=torch.Generator().manual_seed(0))
    order, none = torch.arange(N)[None], torch.empty(1, 0, dtype=torch.int64)
    laid = list[Tensor]()
    objective.decoder.blocks[-1].register_forward_hook(lambda _module, _given, out: laid.append(out))
    objective.decoder(tokens, none, order)
    laid[0].square().sum().backward()
    assert objective.decoder.mask.grad is None or not objective.decoder.mask.grad.any()
    assert bool(cast(Tensor, objective.decoder.narrow.weight.grad).any())


# How it runs


@pytest.mark.parametrize("position", POSITIONS, ids=str)
def test_positions_that_enter_at_the_stem_will_do(position: dict[str, Any]) -> None:
    config = model(**position)
    if config.position == "relative" or config.entry != "stem":
        with pytest.raises(ConfigError, match=f"position='{config.position}' enters at '{config.entry}'; use another"):
            objective_of(config)
    else:
        assert all(bool(value.isfinite().all()) for value in gradients(restless(config)).values())


@pytest.mark.parametrize("position", ["learned", "sincos2d"])
def test_bfloat16_weights(position: str) -> None:
    objective = restless(model(position=position))
    inputs = inputs_of(objective, noise(4))
    exact = objective(*inputs)
    reached = list[torch.dtype]()
    for block in (cast(ViT, objective.network).blocks[0], *objective.decoder.blocks):
        block.register_forward_pre_hook(lambda _, given: reached.append(given[0].dtype))
    low = PrecisionWrapper(objective, WORLD.device, "bfloat16", cast_weights=True)(*inputs)
    low.total.backward()
    assert reached == [torch.bfloat16] * 3  # nothing on the way, a fixed table least of all, made it float32 again
    assert low.total.dtype == low.count.dtype == torch.float32
    assert float(low.total.detach()) == pytest.approx(float(exact.total.detach()), rel=0.03)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in objective.parameters())


@pytest.mark.slow
def test_forward_is_one_graph() -> None:
    torch._dynamo.reset()
    objective = restless(model(depth=1), decoder_depth=1)
    inputs = inputs_of(objective, noise(2))
    compiled = torch.compile(objective, fullgraph=True, dynamic=False, backend="aot_eager")
    outcome = compiled(*inputs)
    outcome.total.backward()
    assert float(outcome.total.detach()) == pytest.approx(float(objective(*inputs).total.detach()), rel=1e-6)


def test_the_decoder_has_the_encoders_numerics_and_no_regularisers() -> None:
    config = model(gelu="erf", norm_eps=1e-3, qkv_bias=False, dropout=0.5, stochastic_depth=0.5)
    decoder = objective_of(config).decoder
    block = cast(Block, decoder.blocks[1])
    assert (block.norm_mlp.eps, decoder.norm.eps, block.mlp.tanh) == (1e-3, 1e-3, False)
    assert (block.dropout.p, block.skip.p) == (0, 0)
    assert (block.mlp.expand.in_features, block.mlp.expand.out_features) == (8, 32)
    assert isinstance(decoder.position, SineTable)
    assert not [name for name, _ in decoder.named_parameters() if "position" in name]
    assert not decoder.position()[0, : VIT.prefix].any()
    assert decoder.position()[0, VIT.prefix :].unique(dim=0).shape[0] == N


def test_layers_of_encoder_and_decoder_are_sharded_one_by_one() -> None:
    objective = objective_of()
    assert shard_units(objective) == [*cast(ViT, objective.network).blocks, *objective.decoder.blocks]


def test_work_by_hand() -> None:
    prefix, width, inner = 3, 16, 8
    seen, tokens = prefix + VISIBLE, prefix + N
    encoder = 2 * (4 * seen * width**2 + 2 * seen**2 * width + 2 * seen * width * 24)
    decoder = 2 * (4 * tokens * inner**2 + 2 * tokens**2 * inner + 2 * tokens * inner * 32)
    by_hand = N * PIXELS * width + encoder + seen * width * inner + decoder + HIDDEN * inner * PIXELS
    assert small().macs_per_image(VIT) == by_hand
    assert small().macs_per_image(model(head="linear", classes=9)) == by_hand


def test_defaults_are_the_published_ones() -> None:
    config = MAE()
    assert (config.mask, config.decoder_width, config.decoder_depth, config.decoder_heads) == (0.75, 512, 8, 16)
    assert config.normalise
    base = ViTConfig(width=768, depth=12, mlp_width=3072, heads=12, classes=0, head="none")
    assert base.patches - config.num_masked(base) == 49
    augmentation = cifar(8, padding=1)
    assert config.views(augmentation) == (augmentation,)
    assert not MAE.task
    assert not MAE.needs_whole_batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": 1.0}, "mask=1.0 must lie between 0 and 1"),
        ({"mask": 0.0}, "mask=0.0 must lie between"),
        ({"decoder_depth": 0}, "decoder_depth=0 must be at least 1"),
        ({"decoder_heads": 3}, "decoder_heads=3 does not divide decoder_width=8"),
        ({"decoder_width": 6}, "decoder_width=6 must be divisible by 4"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**changes)


def test_networks_that_will_not_do() -> None:
    with pytest.raises(ConfigError, match="feature map"):
        small().macs_per_image(HYBRID)
    with pytest.raises(ConfigError, match="attention='axial' needs the whole grid; use 'full'"):
        small().check_model(model(attention="axial", class_token=False, registers=0, pool="mean"))
    with pytest.raises(ConfigError, match=r"mask=0.99 hides 12 of 12 patches, which must be 1 to 11"):
        small(mask=0.99).check_model(VIT)


# For the eye


@NORMALISE
def test_pictures_show_what_is_seen_and_told(normalise: bool) -> None:
    objective = restless(normalise=normalise)
    pixels = noise(2)
    original, seen, told = objective.pictures(pixels, seed=4)
    assert objective.training
    assert torch.equal(original, pixels)
    assert seen.dtype == told.dtype == torch.uint8
    sample = torch.arange(2)
    visible, masked, restore = objective.draw(seed=4, step=0, epoch=sample * 0, sample=sample)
    images = objective.normalise(pixels)
    answers = objective.decoder(objective.encode(images, visible), masked, restore).detach()
    for picture in range(2):
        for patch in range(N):
            where = place(patch)
            if patch in visible[picture].tolist():
                assert torch.equal(seen[picture][:, *where], pixels[picture][:, *where])
                assert torch.equal(told[picture][:, *where], pixels[picture][:, *where])
                continue
            assert bool((seen[picture][:, *where] == 128).all())
            answer = answers[picture, masked[picture].tolist().index(patch)].view(6, 5, 3).permute(2, 0, 1)
            if normalise:
                own = images[picture][:, *where]
                answer = answer * (own.var() + 1e-6).sqrt() + own.mean()
            levels = ((answer * objective.std + objective.mean) * 255).clamp(0, 255)
            assert float((told[picture][:, *where].float() - levels).abs().max()) <= 0.501


@pytest.mark.parametrize("normalise", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_learns_eight_digits(normalise: bool) -> None:
    config = ViTConfig(width=32, depth=2, mlp_width=64, heads=4, image=(16, 16), patch=(4, 4), classes=0, head="none")
    with seeded(1):
        objective = MAEObjective(
            network(config),
            MAE(mask=0.5, decoder_width=32, decoder_depth=1, decoder_heads=4, normalise=normalise),
            ObjectiveContext(0, Preprocessing(image=(16, 16)), Mix(), 30, WORLD),
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
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
