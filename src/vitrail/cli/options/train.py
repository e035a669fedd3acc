"""Options of the commands that train and that look at runs."""

from pathlib import Path

from vitrail.cli.options import groups
from vitrail.cli.options.grammar import command_options, option, word
from vitrail.cli.options.groups import SOURCE, DeviceOptions, TrainingOptions, data_word, length_option
from vitrail.recipes import BATCH, EPOCHS, LEAST_STEPS, RATE


@command_options
class PretrainOptions(TrainingOptions):
    """Train a network from scratch following a recipe. The same command with the same --out resumes where it
    stopped.

    examples:
      vitrail pretrain digits --out runs/first
      vitrail pretrain vit-b16-imagenet21k DATA --batch 1024 --dry-run
      vitrail pretrain --resume runs/first
    """

    recipe: str = word("", "`vitrail recipes` lists them", "RECIPE", order=0, completes="recipe")
    data: str | None = data_word(f"{SOURCE}; by default the recipe's", None)


@command_options
class FinetuneOptions(TrainingOptions):
    """Fine-tune weights on your images (Section 3.2): a new head that starts at zero, positions resized to
    --image-size.

    Weights and data are enough: image size, batch size, length and learning rate are chosen from them and printed
    before the start. For comparison, a linear classifier on the frozen features is scored first: what `vitrail fit`
    would give.

    examples:
      vitrail finetune vitrail-cifar10 photos --out runs/photos
      vitrail finetune WEIGHTS photos --epochs 10 --lr 0.003 --image-size 384
      vitrail finetune --resume runs/photos
    """

    weights: str | None = word(None, groups.WEIGHTS, "WEIGHTS", order=0, completes="weights")
    start: str = option("", "", "WEIGHTS", flag="--from", hidden=True)  # the older form
    data: str | None = data_word(SOURCE, None)
    recipe: str = option("", "a recipe of Table 4 instead of settings chosen from the data", completes="recipe")
    epochs: float | None = length_option("E", groups.EPOCHS_HELP, f"{EPOCHS}, fewer on very large sets")
    steps: int | None = length_option("N", groups.STEPS_HELP, f"by the epochs, at least {LEAST_STEPS}")
    batch: int | None = length_option("N", groups.BATCH_HELP, f"a sixteenth of the images, at most {BATCH}")
    lr: float | None = length_option("R", groups.LR_HELP, f"{RATE:g}; --sweep tries others")


@command_options
class RecipesOptions:
    """List the recipes, or show one: its purpose, what the paper reached with it, and every setting it resolves to.

    examples:
      vitrail recipes
      vitrail recipes vit-l16-jft --set optim.lr=3e-4
    """

    name: str | None = word(None, "a recipe to show; without one, all are listed", completes="recipe")
    set: tuple[str, ...] = option((), "show the recipe with this change. Can be repeated", "FIELD=VALUE", repeated=True)
    json: bool = option(False, "print the resolved config as JSON")


@command_options
class ReportOptions:
    """Show a run's status: how far it got, what happened to it, and what to type next.

    examples:
      vitrail report runs/first
    """

    run: Path = word(..., "the run's folder", "RUN", completes="file")


@command_options
class ReplayOptions(DeviceOptions):
    """Repeat one training step of a run with its latest weights: which images it had, and the loss of each.

    A run that stopped because of a non-finite loss names the step; this command shows the batch.

    examples:
      vitrail replay runs/first --step 120
    """

    run: Path = word(..., "the run's folder", "RUN", completes="file")
    step: int = option(..., "the step, counted from 0")


@command_options
class DemoOptions(DeviceOptions):
    """Train a small ViT on data included in the package, in a minute or two, and show what it has learned.

    classification: pre-training on 8x8 digits at 16 px, then fine-tuning at 32 px with resized positions, the paper's
    path from 224 to 384 px. segmentation: every shape in generated scenes, and the sky and the ground behind them. Ends
    with what to type next: to open the report, serve the network and predict with it.

    examples:
      vitrail demo
      vitrail demo segmentation
      vitrail demo --out runs/again --seed 1
    """

    kind: str = word("classification", "classification or segmentation", "KIND", order=0)
    out: Path | None = option(None, "the folder to write", "FOLDER", usually="runs/demo, or runs/demo-segmentation")
    seed: int = option(0, "random seed")
