"""Chooses the decoder that turns an encoder's features into masks: one linear layer, queries in the encoder's last
blocks (EoMT), or queries in blocks of their own on a frozen encoder (PMT).

decoder = choose_decoder("", task, bundle.config)
run = with_queries(run, decoder, "panoptic", classes=133, segments=40)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from vitrail.core.errors import ConfigError, DataError, unknown_name
from vitrail.data.dataset import ImageDataset
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import QueryKind, query_config
from vitrail.models.zoo import adapt_config
from vitrail.tasks.mask_queries.objective import InstanceQueries, MaskQueries, PanopticQueries, SemanticQueries
from vitrail.tasks.task import Task
from vitrail.train.config import Run

Decoder: TypeAlias = Literal["linear", "eomt", "pmt"]
OBJECTIVES: Final[dict[str, type[MaskQueries]]] = {
    kind.task: kind for kind in (SemanticQueries, InstanceQueries, PanopticQueries)
}

LEAST_QUERIES: Final = 20
MOST_QUERIES: Final = {"segmentation": 100, "instances": 200, "panoptic": 200}
QUERIES_EACH: Final = 5  # per segment of the image with the most segments
LOOKED_AT: Final = 256  # most images whose segments are counted


def choose_decoder(asked: str, task: Task, config: ModelConfig, settings: Sequence[str] = ()) -> Decoder:
    """Chooses a decoder: the one `asked` for; else that of the weights, if they have queries; else linear for semantic
    segmentation and eomt for instances and panoptic maps. ConfigError if the request contradicts itself."""
    if asked not in ("", *get_args(Decoder)):
        raise unknown_name("--decoder", asked, get_args(Decoder))
    if task.name not in OBJECTIVES:
        if asked:
            raise ConfigError(f"--decoder {asked} is for segmentation; the task of these data is {task.name}")
        return "linear"
    if asked == "linear" and task.name != "segmentation":
        raise ConfigError(f"--decoder linear gives one class per pixel; {task.name} needs queries: use eomt or pmt")
    named = [text for text in settings if text.partition("=")[0].strip() == "objective"]
    if asked and named:
        raise ConfigError(f"--decoder {asked} and --set {named[0]} both choose what is learnt; leave one out")
    frozen = [text for text in settings if text.partition("=")[0].strip() == "optim.freeze"]
    if asked == "pmt" and frozen and frozen[0].partition("=")[2].strip() != "all":
        raise ConfigError(f"--decoder pmt freezes the encoder, but --set {frozen[0]} trains it; use eomt")
    if asked:
        return find_decoder(asked)
    if config.has_queries:
        return find_decoder(config.family)
    return "linear" if task.name == "segmentation" else "eomt"


def find_decoder(name: str) -> Decoder:
    return next(kind for kind in get_args(Decoder) if kind == name)


def count_segments(source: ImageDataset, limit: int = LOOKED_AT) -> int:
    """The most segments in one image, among `limit` evenly spaced ones; 0 if none can be read."""
    most = 0
    for index in np.linspace(0, len(source) - 1, min(limit, len(source))).astype(int).tolist():
        try:
            most = max(most, len(source.segments(index)))
        except (DataError, OSError):  # the run reports it
            continue
    return most


def with_queries(run: Run, decoder: QueryKind, task: str, classes: int, segments: int) -> Run:
    """Gives a run the network and the objective of a decoder, eomt or pmt. A network with this decoder already is kept,
    except for its classes. The encoder of PMT is frozen."""
    model = run.model
    if model.family != decoder:
        most = classes if task == "segmentation" else segments  # at most one segment per class
        model = query_config(model, decoder, classes, queries=choose_queries(task, most))
    objective = run.objective if isinstance(run.objective, OBJECTIVES[task]) else OBJECTIVES[task]()
    run = replace(run, model=adapt_config(model, classes=classes), objective=objective)
    return replace(run, optim=replace(run.optim, freeze="all")) if decoder == "pmt" else run


def choose_queries(task: str, segments: int) -> int:
    """Five queries per segment of the image with the most segments, within bounds; the upper bound if that number is
    unknown."""
    most = MOST_QUERIES[task]
    return most if segments < 1 else min(max(QUERIES_EACH * segments, LEAST_QUERIES), most)
