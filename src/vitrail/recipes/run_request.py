"""Turns a command into a run: the recipe, or what fits the data; the weights, the size and the settings."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.find_weights import find_weights
from vitrail.core.errors import ConfigError, DataError, VitrailError
from vitrail.core.text import Pair, pair
from vitrail.data.collection import Collection, open_collection
from vitrail.data.dataset import ImageDataset
from vitrail.models.query_configs import QueryKind
from vitrail.recipes import run_overrides as change
from vitrail.recipes.decoders import OBJECTIVES, choose_decoder, count_segments, with_queries
from vitrail.recipes.finetune import choose_defaults, explain_choices
from vitrail.recipes.finetune_dense import DenseData, choose_dense_defaults, explain_dense_choices
from vitrail.recipes.registry import load_recipe
from vitrail.recipes.warmup import fit_warmup
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import find_task, recognise_task, task_of
from vitrail.tasks.task import Task
from vitrail.train.config import Run, RunRequest, configure
from vitrail.train.data import find_split, select_training_images

LOOKED_AT = 32  # images whose headers are read for the usual size


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCommand:
    """A command as it was typed; kept in the run folder."""

    verb: str = "pretrain"
    recipe: str = ""
    weights: str = ""
    data: str = ""
    image_size: int = 0
    patch: int = 0
    seed: int | None = None
    settings: tuple[str, ...] = ()
    sweep: tuple[str, ...] | None = None
    task: str = ""  # empty: the recipe's, or that of the data's annotations
    decoder: str = ""  # empty: the recipe's, or what the task needs
    minutes: float | None = None  # 0 for no time budget, None for the default


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The run, the recipe before any changes, and a line for each choice made on the user's behalf. `explain` gives
    those lines for a run that is changed later."""

    run: Run
    base: RunRequest | None
    why: tuple[str, ...] = ()
    explain: Callable[[Run], tuple[str, ...]] | None = None


def read_run_command(command: Mapping[str, Any]) -> RunCommand:
    """The command as a run folder records it."""
    known = {field.name for field in fields(RunCommand)}
    values: dict[str, Any] = {name: value for name, value in command.items() if name in known}
    values |= {name: tuple(values[name]) for name in ("settings", "sweep") if values.get(name) is not None}
    return RunCommand(**values)


def build_plan(asked: RunCommand) -> RunPlan:
    """The run that a command requests; its data are opened if choices depend on them."""
    if asked.verb == "finetune" and not asked.recipe:
        return plan_finetune(asked)
    base = load_recipe(asked.recipe)
    request = base
    if asked.data:
        request = change.with_data(request, asked.data)
    if asked.image_size or asked.patch:
        size = asked.image_size or request.augmentation.size
        request = change.with_image_size(request, size, patch=asked.patch)
    if asked.verb == "finetune":
        bundle = find_weights(asked.weights)
        run = change.start_from(request, asked.weights, bundle.config, bundle.card.preprocessing, asked.patch)
    elif request.model is not None:
        run = configure(request)
    else:
        raise ConfigError(f"{asked.recipe} is a fine-tuning recipe: vitrail finetune WEIGHTS --recipe {asked.recipe}")
    task = asked.task
    if not task and asked.data and task_of(run.objective) is CLASSIFICATION:
        with contextlib.suppress(VitrailError):  # data that cannot be opened are reported when the run starts
            task = recognise_task(open_collection(asked.data)).name  # the task of data without labels
    run = with_decoder(change.with_task(run, task) if task else run, asked)
    run = apply_command(run, asked)
    check_classes(run, asked.settings)
    return RunPlan(run=run, base=base)


def has_decoder(run: Run, task: Task) -> bool:
    """Whether a run has a network with queries that learns the task."""
    return run.model.has_queries and isinstance(run.objective, OBJECTIVES[task.name])


def with_decoder(run: Run, asked: RunCommand) -> Run:
    """The run of a recipe with the requested decoder, or the one that its task needs."""
    task = task_of(run.objective)
    if task is not None and run.model.has_queries and task.name not in OBJECTIVES:
        raise ConfigError(f"{asked.recipe} trains queries, which find segments; {task.name} needs another recipe")
    if task is None or (not asked.decoder and (task.name not in OBJECTIVES or has_decoder(run, task))):
        return run
    decoder = choose_decoder(asked.decoder, task, run.model, asked.settings)
    if decoder == "linear":
        if run.model.has_queries:
            raise ConfigError(f"--decoder linear: {asked.recipe} trains a network with queries; use another recipe")
        return run
    source = run.data.source  # errors in opening it are reported when the run starts
    segments = count_segments(find_split(open_collection(source), "train")) if source and asked.data else 0
    return with_queries(run, decoder, task.name, run.model.classes, segments)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetunePlan:
    """How a fine-tuning without a recipe is chosen: the run for a number of images, and a line for each choice."""

    choose: Callable[[int], Run]
    explain: Callable[[Run, int], tuple[str, ...]]


def plan_finetune(asked: RunCommand) -> RunPlan:
    """Plans fine-tuning without a recipe, from the weights and the data."""
    bundle, collection = find_weights(asked.weights), open_collection(asked.data)
    whole = find_split(collection, "train")
    task = find_task(asked.task) if asked.task else recognise_task(collection)
    decoder = choose_decoder(asked.decoder, task, bundle.config, asked.settings)
    if decoder == "linear":
        plan = plan_linear(asked, bundle, collection, task)
    else:
        plan = plan_queries(asked, bundle, collection, task, decoder)
    train, _ = select_training_images(collection, apply_command(plan.choose(len(whole)), asked).data)
    base = plan.choose(len(train))
    run = apply_command(change.with_data(replace(base, name=f"finetune-{collection.title}"), asked.data), asked)
    count = len(train) - round(len(train) * run.data.dev)
    steps = run.steps or max(round(run.epochs * count / run.batch), 1)
    run = change.with_changes(run, fit_warmup(run, steps, change.setting_names(asked.settings)))
    check_classes(run, asked.settings)

    def explain(run: Run) -> tuple[str, ...]:
        return plan.explain(run, count)

    return RunPlan(run=run, base=base, why=explain(run), explain=explain)


def plan_linear(asked: RunCommand, bundle: Bundle, collection: Collection, task: Task) -> FinetunePlan:
    """Plans a linear head, for whole images or for every patch."""
    config = change.with_sizes(bundle.config, pair(asked.image_size or bundle.config.image), asked.patch)
    whole, outputs = find_split(collection, "train"), len(task.output_names(collection))
    picture, has_val = find_usual_size(whole), "val" in collection.splits

    def choose(samples: int) -> Run:
        run = choose_defaults(
            config,
            bundle.card.preprocessing,
            weights=asked.weights,
            source=asked.data,
            samples=samples,
            classes=outputs,
            image_size=asked.image_size or None,
            has_val=has_val,
            multi_label=whole.labels.multi_label,
            has_classes=task.has_classes,
        )
        return change.with_task(run, task.name)

    def explain(run: Run, count: int) -> tuple[str, ...]:
        return explain_choices(run, bundle.config, count, picture, given=asked.image_size > 0, has_val=has_val)

    return FinetunePlan(choose=choose, explain=explain)


def plan_queries(
    asked: RunCommand, bundle: Bundle, collection: Collection, task: Task, decoder: QueryKind
) -> FinetunePlan:
    """Plans a head of queries, for classes of pixels or for segments."""
    config = change.with_sizes(bundle.config, pair(asked.image_size or bundle.config.image), asked.patch)
    whole, outputs = find_split(collection, "train"), len(task.output_names(collection))
    segments, picture = count_segments(whole), find_usual_size(whole)

    def describe(samples: int) -> DenseData:
        has_val = "val" in collection.splits
        return DenseData(task=task.name, samples=samples, classes=outputs, segments=segments, has_val=has_val)

    def choose(samples: int) -> Run:
        return choose_dense_defaults(
            config,
            bundle.card.preprocessing,
            describe(samples),
            decoder=decoder,
            weights=asked.weights,
            source=asked.data,
            image_size=asked.image_size or None,
        )

    def explain(run: Run, count: int) -> tuple[str, ...]:
        dense, given = describe(count), asked.image_size > 0
        return explain_dense_choices(run, bundle.config, dense, picture, count=count, given=given)

    return FinetunePlan(choose=choose, explain=explain)


def apply_command(run: Run, asked: RunCommand) -> Run:
    run = run if asked.seed is None else replace(run, seed=asked.seed)
    return change.with_changes(run, asked.settings)


def check_classes(run: Run, settings: Iterable[str]) -> None:
    """Raises ConfigError if a requested number of classes differs from the data's: the head has one output for each of
    those."""
    if "model.classes" not in change.setting_names(settings) or not run.data.source:
        return
    asked = f"model.classes={run.model.classes}"
    if not run.objective.labelled:
        raise ConfigError(f"{asked}, but objective={type(run.objective).__name__} trains no classifier; leave it out")
    task = task_of(run.objective)
    classes = 0 if task is None else len(task.output_names(open_collection(run.data.source)))
    if classes and run.model.classes != classes:
        fault = f"{asked}, but {run.data.source} has {classes:,} classes, and the network gets an output for each"
        raise ConfigError(f"{fault}; leave model.classes out, or give data with other classes")


def find_usual_size(source: ImageDataset) -> Pair | None:
    """The median height and width of some images; None if they cannot be read."""
    sizes: list[Pair] = []
    for index in np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source))).astype(int).tolist():
        try:
            sizes.append(source.open_image(index).size)
        except DataError:  # the run will report it
            continue
    return pair(np.median(np.array(sizes), axis=0).astype(int).tolist()) if sizes else None


def build_sweep_grid(asked: RunCommand, plan: RunPlan) -> dict[str, tuple[Any, ...]]:
    """The grid of --sweep: as typed, FIELD=V,V each, or the recipe's own."""
    if not asked.sweep:
        return dict(change.find_sweep_grid(asked.recipe) if asked.recipe else change.RATES)
    typed: dict[str, tuple[Any, ...]] = {}
    for text in asked.sweep:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"--sweep {text!r}: write FIELD=VALUE,VALUE, as in optim.lr=0.001,0.003")
        typed[name] = tuple(values.split(","))
        for value in typed[name]:
            setting = [f"{name}={value}"]
            check_classes(change.with_changes(plan.run, setting), setting)  # mistakes are refused before the first run
    return typed
