"""The page that goes with weights that are handed on: what they are, what images they take, where they come from.

Everything that the file knows of itself is filled in. What only a person can say is asked for at the end, and a blank
card (docs/model-card.md) has the same questions.
"""

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Final, TypeAlias

from vitrail.checkpoint.bundle import Bundle
from vitrail.core.text import format_size
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.training_record import KEY
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import network_name

Row: TypeAlias = tuple[str, str]

TEMPLATE: Final = "model-card.md.jinja"
NAMED: Final = 100  # classes that are named on the page; the file has them all
QUESTIONS: Final = (
    "Licence of the weights, and of the images they were trained on:",
    "What it is meant for, and what it must not be used for:",
    "Where it was seen to fail, and on which groups of images it was scored by themselves:",
    "Whom to write to:",
)
ASKED: Final = "*to be filled in*"


def model_card(bundle: Bundle, *, name: str | None = None) -> str:
    """The card of a network as Markdown, with the header that a hub reads. `name` is owner/name of its repository."""
    config, card = bundle.config, bundle.card
    title = network_name(config)
    about = f"of {config.classes:,} classes" if config.classes else "without a head, for features"
    about += " per pixel" if config.has_patch_head else ""
    about += ", several of which may apply to an image (sigmoid)" if card.multi_label else ""
    return rendered(
        blank=False,
        task=hub_task(config),
        title=plain(name or title),
        summary=f"{title} {about}, {config.parameters:,} parameters, for images of {format_size(config.image)} pixels.",
        place=json.dumps(name or "."),
        file=json.dumps("model.safetensors"),
        network=network_rows(config),
        pictures=picture_rows(card.preprocessing),
        classes=class_names(config.classes, card.labels),
        origin=origin_rows(card.abridged().provenance) or [("origin", "not recorded in the file")],
        questions=[f"{question} {ASKED}" for question in QUESTIONS],
    )


def hub_task(config: ModelConfig) -> str:
    """What a hub files it under."""
    if not config.classes:
        return "image-feature-extraction"
    return "image-segmentation" if config.has_patch_head else "image-classification"


def blank_card() -> str:
    """The same page with nothing filled in."""
    network = ("network", "parameters", "multiply-accumulates an image", "patches", "layers", "heads", "width")
    pictures = ("size", "resized to", "interpolation", "mean", "standard deviation")
    origin = ("recipe", "data", "score", "cost", "seed", "command", "from")
    return rendered(
        blank=True,
        task="image-classification",
        title="Name of the model",
        summary="Which network it is, how many classes it knows, how large it is, for what size of images.",
        place=json.dumps("owner/name"),
        file=json.dumps("model.safetensors"),
        network=[(name, "") for name in network],
        pictures=[(name, "") for name in pictures],
        classes="Their names, in the order of the network's outputs.",
        origin=[(name, "") for name in origin],
        questions=list(QUESTIONS),
    )


def rendered(**parts: object) -> str:
    from jinja2 import Environment, StrictUndefined  # loaded when a card is made

    text = resources.files("vitrail").joinpath("assets", TEMPLATE).read_text("utf-8")
    made = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    return made.from_string(text).render(**parts)


def network_rows(config: ModelConfig) -> list[Row]:
    return [
        ("network", network_name(config)),
        ("parameters", f"{config.parameters:,}"),
        ("multiply-accumulates an image", f"{config.macs / 1e9:.3g} G"),
        *config.table,
    ]


def picture_rows(preprocessing: Preprocessing) -> list[Row]:
    resize = preprocessing.resize
    return [
        ("size", f"{format_size(preprocessing.image)} pixels, RGB"),
        ("resized to", "that size, whatever the aspect" if resize is None else f"{resize} on the shorter side, centre"),
        ("interpolation", preprocessing.interpolation + ("" if preprocessing.antialias else ", not antialiased")),
        ("mean", ", ".join(f"{value:g}" for value in preprocessing.mean)),
        ("standard deviation", ", ".join(f"{value:g}" for value in preprocessing.std)),
    ]


def class_names(classes: int, labels: Iterable[str] | None) -> str:
    if not classes:
        return "None: it gives features."
    if labels is None:
        return f"{classes:,}, whose names the file does not know."
    names = [plain(label) for label in labels]
    more = f", and {len(names) - NAMED:,} more in the file" if len(names) > NAMED else ""
    return f"{classes:,}: {', '.join(names[:NAMED])}{more}."


def origin_rows(provenance: Mapping[str, Any], prefix: str = "") -> list[Row]:
    """What the file says of its making, one fact a row; weights that it started from stand behind it."""
    words = {"run": "recipe", "from": "started from", "imported_from": "format it came in", "file": "file it came in"}
    rows: list[Row] = []
    for key, value in provenance.items():
        name = f"{prefix}{words.get(key, key.replace('_', ' '))}"
        if isinstance(value, Mapping):
            rows += origin_rows(value, f"{name}: ")
        elif isinstance(value, float):
            rows.append((plain(name), f"{value:.4g}"))
        elif key == KEY:
            rows += [row for record in value for row in origin_rows(record, f"{name}: ")]
        elif isinstance(value, list | tuple):
            rows.append((plain(name), plain(", ".join(map(str, value)))))
        else:
            rows.append((plain(name), plain(str(value))))
    return rows


def plain(text: str) -> str:
    """Text from a file in one line of Markdown, with nothing in it that Markdown or HTML would act on."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return "".join(f"\\{sign}" if sign in "\\`*_[]|#" else {"<": "&lt;", "&": "&amp;"}.get(sign, sign) for sign in line)
