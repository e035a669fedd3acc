"""What a study leaves to be looked at: a table, a figure, and a page that holds both and needs nothing else.

write(study, outcomes, Path("runs/positions"), scale="tiny", data="")

table.md  table.csv  figure.png  figure.svg  report.html
"""

import base64
import csv
import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from vitrail.core.atomic_files import write_file
from vitrail.core.errors import ConfigError
from vitrail.inspection.page import FigureSection, ThemedFigure
from vitrail.report.axis import short
from vitrail.report.figure_style import DARK, LIGHT, encoded, toolkit
from vitrail.report.page import Notes, Section, page
from vitrail.report.page import Table as Rows
from vitrail.report.sections import State, Status, Tile, Tiles
from vitrail.studies.framework.definition import Findings, Scale, Study, Table
from vitrail.studies.framework.results import NOTHING, STUDY, folder_of, seeds
from vitrail.train.grid.plan import CellOutcome
from vitrail.train.report.page import REPORT
from vitrail.train.run_folder.files import read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LEFT: Final = 2  # columns of text in a page's tables
ACCURACIES: Final = {"accuracy": "accuracy [%]", "watch": "held out [%]", "fewshot-5": "5-shot [%]"}


def write(study: Study, outcomes: Sequence[CellOutcome], out: Path, *, scale: Scale, data: str) -> None:
    """Writes what there is so far, each file whole or not at all. Without matplotlib there is no figure, and the page
    says so."""
    findings = found(study, outcomes)
    write_file(out / "table.md", markdown(study, findings, scale).encode())
    write_file(out / "table.csv", comma_separated(findings.table).encode())
    pictures = drawn(findings)
    for name, content in pictures.items():
        write_file(out / f"figure.{name}", content)
    held = read_json(out / STUDY) if (out / STUDY).exists() else {}
    text = report(study, outcomes, findings, pictures.get("svg"), held, scale=scale, data=data, out=out)
    write_file(out / "report.html", text.encode())


def found(study: Study, outcomes: Sequence[CellOutcome]) -> Findings:
    """What a study says, without columns in which nothing stands: at a small scale the paper has no such network."""
    findings = study.conclude(outcomes)
    columns, rows = findings.table.columns, findings.table.rows
    kept = [at for at in range(len(columns)) if not rows or any(row[at] != NOTHING for row in rows)]
    table = Table(columns=tuple(columns[at] for at in kept), rows=tuple(tuple(row[at] for at in kept) for row in rows))
    return replace(findings, table=table)


def drawn(findings: Findings) -> dict[str, bytes]:
    """The figure by the ending of its file; none without matplotlib."""
    try:
        toolkit()
    except ConfigError:
        return {}
    figure: Figure = findings.figure()
    return {"png": encoded(figure, LIGHT, "png"), "svg": encoded(figure, LIGHT, "svg")}


def caution(scale: Scale) -> list[str]:
    """What must be known before anything is read out of the numbers."""
    if scale != "tiny":
        return []
    return [
        "Scale tiny: these numbers decide nothing. The networks, the data and the runs are so small that differences "
        "here are chance; the scale shows that the study works. --scale small gives a first answer."
    ]


def link(out: Path, cell: str) -> str:
    """The way from the study's page to that of a cell, where there is one."""
    path = folder_of(out, cell) / REPORT
    return quote(path.relative_to(out).as_posix()) if path.exists() else ""


def markdown(study: Study, findings: Findings, scale: Scale = "paper") -> str:
    """The table with what it says, as a part of a larger text."""
    rows = [findings.table.columns, ("---",) * len(findings.table.columns), *findings.table.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    said = [text for line in (*caution(scale), findings.sentence, findings.beside) for text in (line, "")]
    return "\n".join([f"## {study.title} ({study.anchor})", "", *lines, "", *said])


def comma_separated(table: Table) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([table.columns, *table.rows])
    return out.getvalue()


def report(
    study: Study,
    outcomes: Sequence[CellOutcome],
    findings: Findings,
    figure: bytes | None,
    held: Mapping[str, Any],
    *,
    scale: Scale,
    data: str,
    out: Path,
) -> str:
    """The page: how far it is, the figure, the table, how it stands next to the paper, every cell, and the command."""
    states = states_of(study, outcomes, held, scale, data)
    failed = [one for one in outcomes if one.fault]
    stands = status(states, held, command(study, held, scale, data), caution(scale))
    sections: list[Section] = [stands, facts(outcomes, states)]
    sections.append(Notes(title="Next to the paper", lines=paragraphs(findings.beside)))
    sections.append(figure_section(study, figure))
    sections.append(Rows(title="Table", columns=findings.table.columns, rows=findings.table.rows, left=LEFT))
    if failed:
        lines = [f"{one.cell}: {one.fault}" for one in failed]
        sections.append(Notes(title="Cells that failed", lines=lines, more="The same command again tries them again."))
    sections.append(cells_section(outcomes, states, held, out))
    title = f"{study.title} ({study.anchor})"
    return page(title, sections, lead=findings.sentence, style="explorer.css")


def paragraphs(text: str) -> list[str]:
    """What the paper found, and what was found here."""
    return re.split(r"(?<=[.!?]) (?=Here\b)", text)


def states_of(
    study: Study, outcomes: Sequence[CellOutcome], held: Mapping[str, Any], scale: Scale, data: str
) -> dict[str, str]:
    """How each cell stands: as the study's folder says, else by what came of it."""
    ended = {one.cell: "failed" if one.fault else "done" for one in outcomes}
    noted = held.get("cells")
    if isinstance(noted, Mapping):
        known = {str(name): str(cell.get("state", "waiting")) for name, cell in noted.items()}
    else:
        known = {cell.name: "waiting" for cell in study.cells(scale, data)}
    return {**known, **{name: state for name, state in ended.items() if known.get(name) != "left out"}}


def command(study: Study, held: Mapping[str, Any], scale: Scale, data: str) -> str:
    words = ["vitrail", "study", study.name, *([data] if data else []), "--scale", scale]
    return str(held.get("go_on") or shlex.join(words))


def status(states: Mapping[str, str], held: Mapping[str, Any], made_by: str, lines: Sequence[str]) -> Status:
    done = sum(state == "done" for state in states.values())
    over = sum(state in ("done", "failed", "left out") for state in states.values())
    failed = over - done
    state: State = "running" if over < len(states) else "failed" if failed else "done"
    if over < len(states) and held.get("state") == "stopped":
        state = "interrupted"
    told = f"{done} of {len(states)} cells are done" + (f", {failed} failed" if failed else "")
    return Status(
        state=state,
        text=told,
        lines=lines,
        asks="The command that makes this page:" if over == len(states) else "To go on:",
        command=made_by,
        progress=None if over == len(states) else over / max(len(states), 1),
    )


def facts(outcomes: Sequence[CellOutcome], states: Mapping[str, str]) -> Tiles:
    """Numbers of the whole study."""

    def total(name: str) -> float:
        return sum(one.values.get(name, 0.0) for one in outcomes)

    tiles = [
        Tile(value=f"{len(states):,}", label="cells"),
        Tile(value=str(seeds(outcomes)), label="seeds at most"),
        Tile(value=f"{total('exaflops'):.3g}", label="exaFLOPs", note="6 a multiply-accumulate and image"),
        Tile(value=f"{total('device_hours'):.3g}", label="device-hours"),
        Tile(value=short(total("images")), label="images seen"),
    ]
    return Tiles(tiles=tiles)


def figure_section(study: Study, figure: bytes | None) -> Section:
    if figure is None:
        return Notes(title="Figure", lines=["There is none: it needs matplotlib. pip install 'vitrail[figures]'"])
    light, dark = (uri(content) for content in (figure, darkened(figure)))
    note = "Bars reach one standard deviation over the seeds to either side."
    one = ThemedFigure(light=light, dark=dark, text=f"{study.title}, drawn", note=note, narrow=False)
    return FigureSection(anchor="figure", title="Figure", reading="", drawn=[one])


def uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def darkened(svg: bytes) -> bytes:
    """A drawing in the colours of a dark screen: each colour of the light theme has its own in the dark one."""
    text = svg.decode()
    for at, light in enumerate(astuple(LIGHT)):
        text = text.replace(light, f"#theme-{at}#")  # in two steps: one theme's colour may be another of the other's
    for at, dark in enumerate(astuple(DARK)):
        text = text.replace(f"#theme-{at}#", dark)
    return text.encode()


def cells_section(
    outcomes: Sequence[CellOutcome], states: Mapping[str, str], held: Mapping[str, Any], out: Path
) -> Rows:
    """Every cell with its state, what it scored and what it cost; its name leads to its own report."""
    by_name = {one.cell: one for one in outcomes}
    noted = held.get("cells")
    rows = [
        (name, state, *scores(by_name.get(name)), *costs(by_name.get(name)), seconds(noted, name))
        for name, state in states.items()
    ]
    columns = ("cell", "state", *ACCURACIES.values(), "exaFLOPs", "device-hours", "seconds")
    return Rows(title="Cells", columns=columns, rows=rows, left=LEFT, links=[link(out, name) for name in states])


def scores(one: CellOutcome | None) -> list[str]:
    values = {} if one is None else one.values
    return [f"{100 * values[name]:.2f}" if name in values else NOTHING for name in ACCURACIES]


def costs(one: CellOutcome | None) -> list[str]:
    values = {} if one is None else one.values
    return [f"{values[name]:.3g}" if name in values else NOTHING for name in ("exaflops", "device_hours")]


def seconds(noted: Any, name: str) -> str:
    """How long a cell took in this start, where the folder says so."""
    taken = noted.get(name, {}).get("seconds") if isinstance(noted, Mapping) else None
    return NOTHING if taken is None else f"{taken:.0f}"
