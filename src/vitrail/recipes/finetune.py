"""The defaults of `vitrail finetune WEIGHTS DATA`.

run = choose_defaults(config, preprocessing, weights="deit.safetensors", source="pets/", samples=3680, classes=37)
"""

from dataclasses import replace
from typing import Final

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair, format_size, pair, pluralise
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.crop import InceptionCrop
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import adapt_config
from vitrail.optim.config import Optim, Schedule
from vitrail.recipes import BATCH, EPOCHS, LEAST_STEPS, RATE
from vitrail.recipes.run_overrides import start_from
from vitrail.recipes.warmup import choose_warmup
from vitrail.tasks.classification.objective import Classification
from vitrail.train.config import Data, Run, RunRequest

LARGE: Final = 20_000  # images: BiT's boundary between small and medium sets
HUGE: Final = 500_000  # and between medium and large
SEEN: Final = 10_000 * BATCH  # images seen at most on a medium set: the paper's 10,000 steps
DEV: Final = 0.1
FEW: Final = 20
MILD: Final = (0.25, 1.0)  # area of the crop on small sets
PAPER: Final = (0.05, 1.0)
OPTIM: Final = Optim(kind="sgd", lr=RATE, momentum=0.9, clip=1.0)


def choose_defaults(
    config: ModelConfig,
    preprocessing: Preprocessing,
    *,
    weights: str,
    source: str,
    samples: int,
    classes: int,
    image_size: int | Pair | None = None,
    has_val: bool = False,
    multi_label: bool = False,
    has_classes: bool = True,
) -> Run:
    """The run for weights with a config and preprocessing, and a training split of `samples` images and `classes`
    classes, or outputs for a task that does not choose between classes (`has_classes`).

    - Image size: the weights' own, unless one is given.
    - Held out: 10 % of train if there is no val split; this part selects the best weights. Fewer than 20
      images are too few for that, and the last weights count.
    - Batch: the paper's 512 for 8,192 images or more, below that the power of two that gives at
      least 16 steps per epoch; at least 16, but never more than there are images. If memory is short, gradients are
      accumulated.
    - Length: 30 epochs, but no more images than in the paper's 10,000 steps (20,000 for sets of 500,000 or more),
      and at least 200 steps. A few hundred images take minutes, and no set takes days.
    - Optimiser: the paper's SGD with momentum 0.9, clipping at norm 1, cosine decay and no weight decay, at 0.01, the
      learning rate that every grid of Table 4 contains. A tenth of the run is warm-up, at most 500 steps.
    - Augmentation: Inception crop and flip; on fewer than 20,000 images, crops cover at least a quarter, since
      5 % of an image seldom shows its subject, and small sets do not average that out.
    - Loss: softmax; sigmoid if images may have several labels, so that each class is decided independently.
    - Pixels: normalised and scored as for the weights, but antialiased, as the training crops are."""
    if samples < 2 or classes < (2 if has_classes else 1):  # nothing to distinguish
        raise ConfigError(f"{samples} images of {classes} classes are too few to train on; give at least two of each")
    image = config.image if image_size is None else pair(image_size)
    adapt_config(config, classes=classes, image_size=image)  # a size that leaves pixels over is refused here
    dev = 0.0 if has_val or samples < FEW else DEV
    count = samples - round(samples * dev)
    batch = choose_batch(count)
    steps = max(LEAST_STEPS, round(min(EPOCHS * count, SEEN if count < HUGE else 2 * SEEN) / batch))
    interpolation = "bicubic" if preprocessing.interpolation == "bicubic" else "bilinear"
    crop = InceptionCrop(size=image, area=MILD if count < LARGE else PAPER, interpolation=interpolation)
    request = RunRequest(
        name="finetune",
        augmentation=Augmentation(crop=crop),
        objective=Classification(loss="sigmoid" if multi_label else "softmax"),
        data=Data(source=source, dev=dev),
        optim=OPTIM,
        schedule=Schedule(decay="cosine", warmup=choose_warmup(steps)),
        batch=batch,
        steps=steps,
    )
    run = start_from(request, weights, config, preprocessing)
    return replace(run, model=adapt_config(run.model, classes=classes))


def choose_batch(count: int) -> int:
    """512, or fewer for fewer than 8,192 images; a power of two that is not above `count`."""
    wanted = min(max(count // 16, 16), BATCH, count)
    return 1 << (wanted.bit_length() - 1)


def explain_choices(
    run: Run, config: ModelConfig, count: int, picture: Pair | None, *, given: bool, has_val: bool
) -> tuple[str, ...]:
    """Explains the choices of `choose_defaults`, one line each: what they follow from, and how to change them.
    `picture` is the typical size of the images."""
    image, steps = run.augmentation.size, run.steps or round(run.epochs * count / run.batch)
    size = "as requested" if given else "the weights' own; change it with --image-size"
    if image != config.image:
        size += f", positions resized from {format_size(config.image)}"
    if picture is not None and max(picture) < min(image):
        size += f"; the images, typically {format_size(picture)}, are enlarged"
    held = "the val split chooses the best weights" if has_val else "no images held out: there are too few"
    if run.data.dev:
        held = f"{100 * run.data.dev:g} % of the training images held out to choose the best weights"
    optim, crop = run.optim, run.augmentation.crop
    warmup, epochs = pluralise(run.schedule.warmup, "step"), steps * run.batch / count
    rule = f"learning rate {optim.lr:g}, {optim.kind}, {run.schedule.decay} decay, gradients clipped at {optim.clip:g}"
    if (optim, run.schedule.decay) == (OPTIM, "cosine"):
        rule += ", as in the paper; change it with --lr, or try several with --sweep"
    cut = f"crops of {100 * crop.area[0]:g} to 100 % of an image" if isinstance(crop, InceptionCrop) else str(crop)
    flip = " and flips; --set augmentation.flip=0 if left and right differ" if run.augmentation.flip else ", no flips"
    several = isinstance(run.objective, Classification) and run.objective.loss == "sigmoid"
    return (
        f"image size {format_size(image)}: {size}",
        held,
        f"batch {run.batch} for {count:,} training images; change it with --batch"
        + ("" if run.batch < BATCH else "; gradients are accumulated if memory is short"),
        f"{steps:,} steps ({epochs:,.1f} epochs, {warmup} of warm-up); change it with --epochs or --steps",
        rule,
        f"{cut}{flip}",
        *(["several labels per image: each class is scored independently (sigmoid)"] if several else []),
    )
