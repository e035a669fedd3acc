"""The files of a study: a table, a figure, and a self-contained page with both.

write_report(study, outcomes, Path("runs/positions"), scale="tiny", data="")

table.md  table.csv  figure.png  figure.svg  report.html
"""

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from vitrail.core.atomic_files import write_file
from vitrail.core.errors import ConfigError
from vitrail.inspection.page import InspectionSection, SectionFigure
from vitrail.report.axis import format_short
from vitrail.report.figure_style import DARK, LIGHT, encode_figure, load_matplotlib
from vitrail.report.page import Notes, Section, Table, render_page
from vitrail.report.sections import State, Status, Tile, Tiles
from vitrail.studies.definition import Findings, Scale, Study
from vitrail.studies.run_study import STUDY, cell_folder
from vitrail.studies.statistics import NOTHING, group_by_seed
from vitrail.train.grid.plan import CellOutcome
from vitrail.train.report.page import REPORT
from vitrail.train.run_folder.files import read_json

TEXT_COLUMNS: Final = 2  # of a page's tables
CELL_VALUES: Final = {
    "accuracy": ("accuracy [%]", "{:.2%}"),
    "watch": ("held out [%]", "{:.2%}"),
    "fewshot-5": ("5-shot [%]", "{:.2%}"),
    "exaflops": ("exaFLOPs", "{:.3g}"),
    "device_hours": ("device-hours", "{:.3g}"),
}
CAUTION: Final = (
    "Scale tiny: these numbers decide nothing. The networks, the data and the runs are so small that differences are "
    "chance; the scale shows that the study works. --scale small gives a first answer."
)


def write_report(study: Study, outcomes: Sequence[CellOutcome], out: Path, *, scale: Scale, data: str) -> None:
    """Writes the results so far, each file atomically. Without matplotlib there is no figure, and the page says so."""
    findings = study.findings(outcomes)
    write_file(out / "table.md", format_markdown(study, findings, scale).encode())
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([findings.table.columns, *findings.table.rows])
    write_file(out / "table.csv", table.getvalue().encode())
    images = draw_figure(findings)
    for name, content in images.items():
        write_file(out / f"figure.{name}", content)
    command = shlex.join(["vitrail", "study", study.name, *([data] if data else []), "--scale", scale])
    record: dict[str, Any] = {"go_on": command, **(read_json(out / STUDY) if (out / STUDY).exists() else {})}
    cells = record.get("cells") or {cell.name: {} for cell in study.cells(scale, data)}
    states = {str(name): str(cell.get("state", "waiting")) for name, cell in cells.items()}
    ended = {one.cell: "failed" if one.fault else "done" for one in outcomes}
    states |= {name: state for name, state in ended.items() if states.get(name) != "left out"}
    failed = [f"{one.cell}: {one.fault}" for one in outcomes if one.fault]
    again = "The same command tries them again."
    comparison = [findings.paper, *(f"Here: {claim.text} ({claim.verdict.value})." for claim in findings.claims)]
    sections: list[Section] = [
        describe_status(states, record),
        *([Notes(title="Caution", lines=[CAUTION])] if scale == "tiny" else []),
        sum_up(outcomes, len(states)),
        Notes(title=f"Next to the paper: {findings.verdict.value}", lines=comparison),
        show_figure(study, images.get("svg")),
        Table(title="Table", columns=findings.table.columns, rows=findings.table.rows, left=TEXT_COLUMNS),
        *([Notes(title="Cells that failed", lines=failed, more=again)] if failed else []),
        list_cells(outcomes, states, cells, out),
    ]
    text = render_page(f"{study.title} ({study.anchor})", sections, lead=findings.summary, style="explorer.css")
    write_file(out / "report.html", text.encode())


def format_markdown(study: Study, findings: Findings, scale: Scale = "paper") -> str:
    """The table with its summary, as part of a larger text."""
    rows = [findings.table.columns, ("---",) * len(findings.table.columns), *findings.table.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    texts = [*([CAUTION] if scale == "tiny" else []), findings.summary, findings.comparison]
    return "\n\n".join([f"## {study.title} ({study.anchor})", "\n".join(lines), *texts]) + "\n"


def draw_figure(findings: Findings) -> dict[str, bytes]:
    """The figure by file ending; empty without matplotlib."""
    try:
        load_matplotlib()
    except ConfigError:
        return {}
    figure = findings.figure()
    return {"png": encode_figure(figure, LIGHT, "png"), "svg": encode_figure(figure, LIGHT, "svg")}


def describe_status(states: Mapping[str, str], record: Mapping[str, Any]) -> Status:
    done = sum(state == "done" for state in states.values())
    ended = sum(state in ("done", "failed", "left out") for state in states.values())
    complete, failed = ended == len(states), ended - done
    state: State = "failed" if failed else "done"
    if not complete:
        state = "interrupted" if record.get("state") == "stopped" else "running"
    return Status(
        state=state,
        text=f"{done} of {len(states)} cells are done" + (f", {failed} failed" if failed else ""),
        asks="The command that makes this page:" if complete else "To resume:",
        command=str(record["go_on"]),
        progress=None if complete else ended / max(len(states), 1),
    )


def sum_up(outcomes: Sequence[CellOutcome], cells: int) -> Tiles:
    """Totals of the whole study."""
    exaflops, hours, images = (
        sum(one.values.get(name, 0.0) for one in outcomes) for name in ("exaflops", "device_hours", "images")
    )
    seeds = max((len(group.outcomes) for group in group_by_seed(outcomes)), default=0)
    tiles = [
        Tile(value=f"{cells:,}", label="cells"),
        Tile(value=str(seeds), label="seeds at most"),
        Tile(value=f"{exaflops:.3g}", label="exaFLOPs", note="6 per multiply-accumulate and image"),
        Tile(value=f"{hours:.3g}", label="device-hours"),
        Tile(value=format_short(images), label="images seen"),
    ]
    return Tiles(tiles=tiles)


def show_figure(study: Study, figure: bytes | None) -> Section:
    if figure is None:
        return Notes(title="Figure", lines=["None: figures need matplotlib. pip install 'vitrail[figures]'"])
    note, text = "Error bars are one standard deviation over the seeds.", f"Figure: {study.title}"
    draw = {LIGHT: figure, DARK: to_dark(figure)}.__getitem__
    one = SectionFigure(name="figure", text=text, note=note, lines=True, draw=draw)
    return InspectionSection(kind="figure", title="Figure", reading="", drawings=[one])


def to_dark(svg: bytes) -> bytes:
    """A figure of the light theme in the colours of the dark one."""
    text = svg.decode()
    for at, light in enumerate(astuple(LIGHT)):
        text = text.replace(light, f"#theme-{at}#")  # in two steps: the themes may share colours
    for at, dark in enumerate(astuple(DARK)):
        text = text.replace(f"#theme-{at}#", dark)
    return text.encode()


def list_cells(
    outcomes: Sequence[CellOutcome], states: Mapping[str, str], record: Mapping[str, Any], out: Path
) -> Table:
    """Every cell with its state, scores, cost and seconds; its name links to its own report."""
    values = {one.cell: one.values for one in outcomes}
    rows: list[tuple[str, ...]] = []
    links: list[str] = []
    for name, state in states.items():
        known, seconds = values.get(name, {}), record.get(name, {}).get("seconds")
        cells = (
            form.format(known[key]).rstrip("%") if key in known else NOTHING for key, (_, form) in CELL_VALUES.items()
        )
        rows.append((name, state, *cells, NOTHING if seconds is None else f"{seconds:.0f}"))
        path = cell_folder(out, name) / REPORT
        links.append(quote(path.relative_to(out).as_posix()) if path.exists() else "")
    columns = ("cell", "state", *(title for title, _ in CELL_VALUES.values()), "seconds")
    return Table(title="Cells", columns=columns, rows=rows, left=TEXT_COLUMNS, links=links)
