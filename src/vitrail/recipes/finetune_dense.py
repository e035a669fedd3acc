"""Defaults of `vitrail finetune WEIGHTS DATA` for segmentation with queries: in the encoder's last blocks (EoMT), or on
a frozen encoder (PMT).

run = choose_dense_defaults(config, preprocessing, dense, weights="dinov3.safetensors", source="photos/")

The settings are those published by EoMT's authors, adapted to small sets and short runs.
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
    """The facts that the defaults depend on: the numbers of images and classes, the most segments in an image, and
    whether there is a val split."""

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
    """Chooses the run for weights with this config and preprocessing on data with masks; the decoder is eomt or pmt.

    - Image size: the weights' own, unless one is given.
    - Held out: as for classification, 10 % of train without a val split, and nothing below 20 images.
    - Batch: EoMT's 16; for few images a power of two that leaves about 16 steps per epoch, at least 4.
    - Length: EoMT's 31 epochs, at most 90,000 steps (12 epochs of COCO) and at least 2,000: queries learn slowly.
    - Optimiser: EoMT's AdamW at 1e-4, weight decay 0.05, layer decay 0.8, polynomial decay with power 0.9, and clipping
      at 0.01; since AdamW is invariant to the scale of gradients, clipping only equalises the steps.
    - Warm-up: EoMT's 500 steps for the head, then 1,000 for the encoder, at most 5 and 10 % of the run.
    - Queries: five per segment of the image with the most segments, 20 to 200; for semantic masks five per class, 20 to
      100.
    - Augmentation: flips, and the image at 0.1 to 2 times its size, padded or cropped; for semantic masks 0.5 to 2
      times, and colour jitter.
    - Scores: on whole images, padded; for semantic masks with the weights' own preprocessing, without a crop."""
    if dense.samples < 2 or dense.classes < 1:
        raise ConfigError(f"{dense.samples} images of {dense.classes} classes; give at least 2 images and 1 class")
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
    """Keeps images whole and pads them, because the aspect ratio of an object helps to recognise it."""
    return replace(preprocessing, resize=None, fit="pad")


def choose_dense_batch(count: int) -> int:
    """16, or fewer for fewer than 256 images; a power of two that is not above `count`."""
    wanted = min(max(count // 16, LEAST_BATCH), BATCH, count)
    return 1 << (wanted.bit_length() - 1)


def choose_dense_schedule(steps: int, *, frozen: bool) -> Schedule:
    """Warms up the head, then the encoder unless it is frozen, and decays as EoMT does."""
    head, encoder = choose_dense_warmup(steps)
    return Schedule(decay="poly", warmup=head, encoder_warmup=0 if frozen else encoder)


def explain_dense_choices(
    run: Run, config: ModelConfig, dense: DenseData, picture: Pair | None, *, count: int, given: bool
) -> tuple[str, ...]:
    """Explains the choices of `choose_dense_defaults`: one line each, with the reason and how to change it."""
    image, steps, model = run.augmentation.size, run.steps or round(run.epochs * count / run.batch), run.model
    size = "as requested" if given else "the weights' own; change it with --image-size"
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
    most = f" (up to {dense.segments} segments per image)" if known else ""
    warmup = f"{pluralise(schedule.warmup, 'step')} of warm-up"
    if schedule.encoder_warmup:
        warmup = f"warm-up of {schedule.warmup} steps for the head, then {schedule.encoder_warmup} for the encoder"
    decay = f", layer decay {optim.layer_decay:g}" if optim.layer_decay < 1 else ""
    rule = f"learning rate {optim.lr:g}, {optim.kind}{decay}, {schedule.decay} decay, clipping at {optim.clip:g}"
    crop = run.augmentation.crop
    seen = f"images at {crop.scale[0]:g} to {crop.scale[1]:g} times their size" if isinstance(crop, ScaleJitter) else ""
    flip = "flips; --set augmentation.flip=0 if left and right differ" if run.augmentation.flip else "no flips"
    colours = ", colour jitter" if run.augmentation.policy is not None else ""
    return (
        f"{how.get(model.family, model.title)}{most}; change it with --decoder or --set model.queries=N",
        f"image size {format_size(image)}: {size}",
        held,
        f"batch {run.batch} for {count:,} training images; change it with --batch",
        f"{steps:,} steps ({steps * run.batch / count:,.1f} epochs, {warmup}); change it with --epochs or --steps",
        f"{rule}, as in EoMT; change it with --lr, or try several with --sweep",
        f"{seen or type(crop).__name__}{colours}, {flip}",
    )
