"""What the cells of the small studies are derived from: a recipe each for two cores and for a share of one GPU.

Both are counted in steps, so that a grid costs the same on any source.

The three families of 4.3 and 4.4 for small images, each made of a ViT's image and classes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from vitrail.data.transforms.augmentation import Mix, cifar
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.zoo import hybrid_backbone, mini_bit
from vitrail.optim.config import Schedule
from vitrail.recipes import small_images as small
from vitrail.recipes.digits import digits
from vitrail.recipes.run_overrides import on_data, resized
from vitrail.tasks.classification.objective import Classification
from vitrail.train.config import AnyRun, Evaluation, Run

RECIPES: Final[Mapping[str, Callable[[], Run]]] = {
    "cifar10": small.cifar10,
    "cifar100": small.cifar100,
    "svhn": small.svhn,
    "fashion-mnist": small.fashion_mnist,
    "mnist": small.mnist,
}
LOOKS: Final = 4  # scorings along the way


def for_cores(source: str = "", *, steps: int, width: int = 32, depth: int = 2) -> Run:
    """Digits at 16 px on two cores: a ViT of 16 patches, a second or two a hundred steps."""
    run = digits()
    model = replace(vit_config(run.model), width=width, depth=depth, mlp_width=2 * width, heads=2, head="linear")
    run = replace(run, model=model, batch=64, optim=replace(run.optim, lr=5e-3))
    return shortened(given(run, source), steps, looks=1)


def for_card(source: str = "", *, steps: int) -> Run:
    """CIFAR-10, or another source of small images, on a share of a GPU: the ViT-Mini/4 of its recipe, with learned
    positions as in the paper.

    For the few epochs of a study: crop and flip alone, no stochastic depth, no averaged weights. In so few a network
    sees hardly an image too often, and what keeps it from learning them by heart would cost more than it brings."""
    name = re.split("[:@]", source)[0] or "cifar10"  # without the folder or the split
    run = RECIPES.get(name, small.cifar10)()
    model = vit_config(run.model)
    size = model.image
    run = replace(
        run,
        model=replace(model, stochastic_depth=0.0, position="learned"),
        augmentation=replace(cifar(size, padding=min(size) // 8), flip=run.augmentation.flip),
        objective=Classification(smoothing=0.1),
        mix=Mix(),
        batch=256,
        average=0.0,
        log=50,
    )
    return shortened(given(run, source), steps, looks=LOOKS)


def given(run: AnyRun, source: str) -> AnyRun:
    """The run on a source; "" leaves it its own."""
    return on_data(run, source) if source else run


def shortened(run: AnyRun, steps: int, *, looks: int = LOOKS) -> AnyRun:
    """The run for so many steps, a tenth of them warm-up, scored a few times, without a closed form next to it: other
    cells are there to compare with."""
    return replace(
        run,
        steps=steps,
        epochs=0.0,
        schedule=Schedule(decay=run.schedule.decay, warmup=steps // 10),
        data=replace(run.data, watch="none"),
        evaluation=Evaluation(every=-(-steps // looks)),
        baseline="off",
    )


def with_dev(run: AnyRun, share: float) -> AnyRun:
    """With a part of the training split held out to choose by, so that nothing is chosen on the test split (4.1)."""
    return replace(run, data=replace(run.data, dev=share, watch="dev"))


def vit_of(model: ViTConfig, width: int, depth: int) -> ViTConfig:
    """The same ViT in another shape, with an MLP of twice its width as all small ones have."""
    heads = width // 64 if width % 64 == 0 else max(width // 32, 2)
    return replace(model, width=width, depth=depth, mlp_width=2 * width, heads=heads)


def resnet_of(model: ViTConfig, blocks: tuple[int, ...], factor: float) -> ResNetConfig:
    """A BiT ResNet with a 3x3 root."""
    small = replace(mini_bit("mini-R14"), image=model.image, classes=model.classes)
    return replace(small, blocks=blocks, factor=factor, groups=groups_at(factor))


def hybrid_of(model: ViTConfig, blocks: tuple[int, ...], factor: float, width: int, depth: int) -> ViTConfig:
    """A ViT on the feature map of a small ResNet, a patch a position."""
    small = replace(hybrid_backbone(blocks, model.image), root="3x3", factor=factor, groups=groups_at(factor))
    return replace(vit_of(model, width, depth), patch=(1, 1), backbone=small)


def groups_at(factor: float) -> int:
    """As many as divide the narrowest layer, up to the 8 of the small ResNets."""
    return min(8, round(64 * factor))


def at_8_px(run: Run) -> Run:
    """A run on 16 px brought down to 8 and patches of 2: as many tokens, and a quarter of the time for a ResNet."""
    return resized(replace(run, model=replace(vit_config(run.model), patch=(2, 2))), 8)
