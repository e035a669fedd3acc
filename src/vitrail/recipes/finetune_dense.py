"""What `vitrail finetune WEIGHTS DATA` does for classes of pixels, instances and panoptic maps: queries that read the
encoder's patches (EoMT), or an encoder that stays as it is (PMT).

run = choose_dense_defaults(config, preprocessing, dense, weights="dinov3.safetensors", source="photos/")

The settings are those that EoMT's authors publish, fitted to small sets and to short runs.
"""

from dataclasses import dataclass, replace
from typing import Final

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair, format_size, pair, pluralise
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.crop import ScaleJitter
from vitrail.data.transforms.policy import Distort
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import QueryKind
from vitrail.optim.config import Optim, Schedule
from vitrail.recipes import DENSE_STEPS
from vitrail.recipes.decoders import with_queries
from vitrail.recipes.run_overrides import start_from
from vitrail.recipes.warmup import choose_dense_warmup
from vitrail.train.config import Data, Run, RunRequest

BATCH: Final = 16
LEAST_BATCH: Final = 4
EPOCHS: Final = 31  # EoMT's on ADE20k
MOST_STEPS: Final = 90_000  # 12 epochs of COCO
DEV: Final = 0.1
FEW: Final = 20
SCALES: Final = {"segmentation": (0.5, 2.0), "instances": (0.1, 2.0), "panoptic": (0.1, 2.0)}
JITTER: Final = Distort(jitter=(0.125, 0.5, 0.5, 0.05), jitter_probability=0.5, grey=0.0, blur=0.0)
OPTIM: Final = Optim(kind="adamw", lr=1e-4, weight_decay=0.05, clip=0.01, layer_decay=0.8)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseData:
    """What the choices follow from: how many images and classes there are, the most segments of an image, and whether
    a split for choosing the best weights exists."""

    task: str
    samples: int
    classes: int
    segments: int
    has_val: bool = False


def choose_dense_defaults(
    config: ModelConfig,
    preprocessing: Preprocessing,
    dense: DenseData,
    *,
    decoder: QueryKind,
    weights: str,
    source: str,
    image_size: int | Pair | None = None,
) -> Run:
    """The run for weights of a config and preprocessing, and data with masks; the decoder is eomt or pmt.

    - Image size: the weights' own, unless one is given.
    - Held out: as for classification, 10 % of train without a val split, and nothing below 20 images.
    - Batch: EoMT's 16; on few images the power of two that leaves 16 steps to an epoch, at least 4.
    - Length: EoMT's 31 epochs, at most 90,000 steps (12 epochs of COCO) and at least 2,000: queries learn slowly.
    - Optimiser: EoMT's AdamW at 1e-4, weight decay 0.05, layer decay 0.8, clipping at 0.01 (with AdamW that evens out
      the steps, whose size it does not change), polynomial decay with power 0.9.
    - Warm-up: EoMT's 500 steps of the head and then 1,000 of the encoder, at most 5 and 10 % of the run.
    - Queries: five for each segment of the image that has the most, 20 to 200; of semantic masks five for each class,
      20 to 100.
    - Augmentation: flips, the image at 0.1 to 2 times its size, padded or cut; for semantic masks 0.5 to 2 times, and
      the jitter of colours. Scored are whole images, padded; for semantic masks as the weights were."""
    if dense.samples < 2 or dense.classes < 1:
        raise ConfigError(f"{dense.samples} images of {dense.classes} classes: there must be 2 images and a class")
    image = config.image if image_size is None else pair(image_size)
    dev = 0.0 if dense.has_val or dense.samples < FEW else DEV
    count = dense.samples - round(dense.samples * dev)
    batch = choose_dense_batch(count)
    steps = min(max(DENSE_STEPS, round(EPOCHS * count / batch)), MOST_STEPS)
    interpolation = "bicubic" if preprocessing.interpolation == "bicubic" else "bilinear"
    is_semantic = dense.task == "segmentation"
    crop = ScaleJitter(size=image, scale=SCALES[dense.task], interpolation=interpolation)
    frozen = decoder == "pmt"
    request = RunRequest(
        name="finetune",
        augmentation=Augmentation(crop=crop, policy=JITTER if is_semantic else None),
        data=Data(source=source, dev=dev),
        optim=replace(OPTIM, layer_decay=1.0) if frozen else OPTIM,
        schedule=choose_dense_schedule(steps, frozen=frozen),
        batch=batch,
        steps=steps,
    )
    run = start_from(request, weights, config, preprocessing)
    run = with_queries(run, decoder, dense.task, dense.classes, dense.segments)
    scored = run.preprocessing or Preprocessing(image=image)
    scored = replace(scored, resize=None) if is_semantic else fit_whole(scored)
    return replace(run, preprocessing=scored)


def fit_whole(preprocessing: Preprocessing) -> Preprocessing:
    """Whole images at their own aspect, padded: what things are is told by their shape."""
    return replace(preprocessing, resize=None, fit="pad")


def choose_dense_batch(count: int) -> int:
    """16, or fewer for fewer than 256 images; a power of two that is not above `count`."""
    wanted = min(max(count // 16, LEAST_BATCH), BATCH, count)
    return 1 << (wanted.bit_length() - 1)


def choose_dense_schedule(steps: int, *, frozen: bool) -> Schedule:
    """Both warm-ups, one after the other, and EoMT's decay; a frozen encoder needs none."""
    head, encoder = choose_dense_warmup(steps)
    return Schedule(decay="poly", warmup=head, encoder_warmup=0 if frozen else encoder)


def explain_dense_choices(
    run: Run, config: ModelConfig, dense: DenseData, picture: Pair | None, *, count: int, given: bool
) -> tuple[str, ...]:
    """The choices of `choose_dense_defaults`, a line each, with what they follow from and how to have it otherwise."""
    image, steps, model = run.augmentation.size, run.steps or round(run.epochs * count / run.batch), run.model
    size = "as asked for" if given else "the weights' own; change it with --image-size"
    if image != config.image:
        size += f", positions resized from {format_size(config.image)}"
    if picture is not None and max(picture) < min(image):
        size += f"; the images, typically {format_size(picture)}, are enlarged"
    held = "the val split chooses the best weights" if dense.has_val else "no images held out: there are too few"
    if run.data.dev:
        held = f"{100 * run.data.dev:g} % of the training images held out to choose the best weights"
    optim, schedule = run.optim, run.schedule
    queries: int = getattr(model, "queries", 0)
    blocks: int = getattr(model, "query_blocks", 0)
    how = {
        "eomt": f"decoder eomt: {queries} queries join the last {pluralise(blocks, 'block')} of the encoder",
        "pmt": f"decoder pmt: {queries} queries with {pluralise(blocks, 'block')} of their own, on a frozen encoder",
    }
    known = dense.segments and dense.task != "segmentation"
    most = f" (up to {dense.segments} segments an image)" if known else ""
    warmup = f"{pluralise(schedule.warmup, 'step')} of warm-up"
    if schedule.encoder_warmup:
        warmup = f"warm-up of {schedule.warmup} steps for the head, then {schedule.encoder_warmup} for the encoder"
    decay = f", layer decay {optim.layer_decay:g}" if optim.layer_decay < 1 else ""
    rule = f"learning rate {optim.lr:g}, {optim.kind}{decay}, {schedule.decay} decay, clipping at {optim.clip:g}"
    crop = run.augmentation.crop
    seen = f"images at {crop.scale[0]:g} to {crop.scale[1]:g} times their size" if isinstance(crop, ScaleJitter) else ""
    flip = "flips; --set augmentation.flip=0 if left and right differ" if run.augmentation.flip else "no flips"
    colours = ", jitter of colours" if run.augmentation.policy is not None else ""
    return (
        f"{how.get(model.family, model.title)}{most}; change it with --decoder or --set model.queries=N",
        f"image size {format_size(image)}: {size}",
        held,
        f"batch {run.batch} for {count:,} training images; change it with --batch",
        f"{steps:,} steps ({steps * run.batch / count:,.1f} epochs, {warmup}); change it with --epochs or --steps",
        f"{rule}, as in EoMT; change it with --lr, or try several with --sweep",
        f"{seen or type(crop).__name__}{colours}, {flip}",
    )
