"""The page of an evaluation: which images count, the numbers, what the task shows of them, and what they are of."""

from collections.abc import Sequence

from vitrail.evaluation.comparison import data_of, flat, parts_of
from vitrail.evaluation.result import Measure, Result, shown, spanned
from vitrail.evaluation.scoring import Evaluated
from vitrail.report.page import Notes, Section, page
from vitrail.report.panels import Facts, Tile, Tiles
from vitrail.report.strips import Strips


def evaluation_page(result: Result, found: Evaluated, notes: Sequence[str], seen: Sequence[str]) -> str:
    """One HTML file, images included. `seen` says which images the weights were trained on."""
    sections: list[Section] = [
        Notes(title="Seen in training", lines=list(seen)),
        Tiles(tiles=[tile(measure, found.captions.get(measure.name, "")) for measure in result.measures]),
        *found.sections(),
        facts(result),
    ]
    if notes:
        sections.append(Notes(title="Notes", lines=list(notes)))
    intervals = "; with 95 % intervals" if any(spanned(measure) for measure in result.measures) else ""
    lead = f"{data_of(result)}: {found.lead}{intervals}"
    style = "strips.css" if any(isinstance(section, Strips) for section in sections) else ""
    return page(parts_of(str(result.weights["name"]))[-1], sections, lead=lead, style=style)


def tile(measure: Measure, caption: str) -> Tile:
    note = "; ".join(part for part in (spanned(measure), caption) if part)
    return Tile(value=shown(measure), label=measure.name, note=note)


def facts(result: Result) -> Facts:
    """What the numbers are of."""
    weights, data, config = result.weights, result.data, result.config
    known = {True: "yes", False: "no", None: "not known"}[data["deduplicated"]]
    rows = [
        ("weights", f"{weights['hash'][:16]}, {weights['parameters']:,} parameters"),
        ("pictures", f"{data['name']}@{data['split']}, {data['pictures']:,}, {data['fingerprint'][:16]}"),
        ("copies left out of training", known),
        *((name.removeprefix("preprocessing."), value) for name, value in flat(config).items() if name != "image"),
        ("vitrail, torch", f"{result.environment['vitrail']}, {result.environment['torch']}"),
        ("made", result.made),
    ]
    return Facts(title="What this is of", rows=rows)
