"""`vitrail study` runs a grid and shows its result; `vitrail compare` puts results into one table."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options.evaluate import CompareOptions, StudyOptions
from vitrail.cli.options.grammar import format_command, pass_options
from vitrail.cli.progress import exit_after
from vitrail.core.atomic_files import write_file
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_duration
from vitrail.data.collection import open_collection
from vitrail.evaluation.compare import Comparison, compare_results, describe_deduplication, gather_results
from vitrail.report.page import Notes, Section, Table, render_page
from vitrail.studies import STUDIES, find_study

if TYPE_CHECKING:  # without torch a list and a comparison are quick
    from vitrail.studies.cost_estimate import CellCost, DeviceSpeed
    from vitrail.studies.run_study import StudyPlan
    from vitrail.train.grid.plan import CellOutcome, GridReport

WIDE = 6  # beyond so many columns a terminal gets one table per data set, then one metric per line
FORMATS = (".md", ".csv", ".html")


def run_study(options: StudyOptions) -> int:
    if not options.name:
        if not options.list:
            raise ConfigError("which study? `vitrail study --list` lists them")
        rows = [(name, entry.anchor, entry.title) for name, entry in STUDIES.items()]
        print_table(("study", "paper", "what it asks"), rows, left=3)
        print("vitrail study NAME --list shows the cells of one, and what they cost; --scale tiny, small or paper.")
        return 0
    if options.seeds < 0:
        raise ConfigError(f"--seeds {options.seeds} must be at least 1")
    from vitrail.cli.train.display import make_watcher
    from vitrail.studies.cost_estimate import estimate_costs, estimate_speed
    from vitrail.studies.run_study import StudyPlan, run_study
    from vitrail.studies.study_report import write_report
    from vitrail.train.grid.engine import device_slots

    study, scale, data = find_study(options.name), options.scale, options.data or ""
    cells = study.grid(scale, data, seeds=options.seeds)
    places = device_slots(options.device, options.jobs)
    speed = estimate_speed(places[0].device, for_gpu=scale != "tiny")
    costs = estimate_costs(cells, speed)
    work = {name: price.hours for name, price in costs.items() if price.hours}
    out, resume = options.out or Path("runs", f"study-{study.name}-{scale}"), format_command("study", options)
    plan = pass_options(options, StudyPlan, study=study, cells=cells, out=out, data=data, work=work, go_on=resume)
    if options.list:
        return list_cells(plan, costs, speed)

    def present(outcomes: "Sequence[CellOutcome]") -> None:
        write_report(study, outcomes, plan.out, scale=scale, data=data)

    if data:
        open_collection(data)  # reports a misspelt name once instead of in every cell

    def start() -> int:
        with make_watcher() as watching:
            report = run_study(plan, places=places, watcher=watching, present=present)
        return show_study(plan, report)

    return exit_after(start, f"stopped immediately; resume with: {plan.go_on}")


def list_cells(plan: "StudyPlan", costs: "dict[str, CellCost]", speed: "DeviceSpeed") -> int:
    """Every cell and its cost, and the total. Nothing is trained."""
    from vitrail.studies.run_study import read_finished

    done = read_finished(plan.out, plan.cells)
    rows: list[tuple[str, ...]] = []
    for cell in plan.cells:
        price = costs[cell.name]
        state = "finished" if cell.name in done else f"after {cell.after}" if cell.after else ""
        images, steps = ("?" if count is None else f"{count:,}" for count in (price.images, price.steps))
        time = "?" if price.hours is None else format_duration(3600 * price.hours)
        work = (images, steps, str(cell.run.batch), format_amount(price.exaflops))
        rows.append((cell.name, price.network, state, *work, time))
    heads = ("cell", "network", "state", "images", "steps", "batch", "exaFLOPs", "time")
    print_table(heads, rows, left=3, title=f"{plan.study.title} ({plan.study.anchor}), scale {plan.scale}")
    left = [costs[cell.name] for cell in plan.cells if cell.name not in done]
    unknown = sum(price.hours is None for price in left)
    flops, hours = sum(price.exaflops or 0.0 for price in left), sum(price.hours or 0.0 for price in left)
    work = f"{format_amount(flops)} exaFLOPs, about {format_duration(3600 * hours)} on {speed.device}"
    more = f", and {unknown} cells whose images are not available" if unknown else ""
    print(f"{len(plan.cells)} cells, {len(done)} finished in {plan.out}; left: {work}, one cell after the other{more}.")
    print("Times are estimates: 40% of the device's peak, and a few ms per step; scoring takes extra time.")
    return 0


def format_amount(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def show_study(plan: "StudyPlan", report: "GridReport") -> int:
    """Prints the table, the summary, what failed, and where the files are."""
    from vitrail.studies.study_report import CAUTION

    if report.outcomes:
        findings = plan.study.findings(report.outcomes)
        print_table(findings.table.columns, findings.table.rows, title=f"{plan.study.title} ({plan.study.anchor})")
        if plan.scale == "tiny":
            print(CAUTION)
        print(findings.summary)
        print(findings.comparison)
    reasons: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        if outcome.fault:
            reasons.setdefault(outcome.fault, []).append(outcome.cell)
    for fault, failed in reasons.items():
        print(f"failed: {', '.join(failed)}: {fault}")
    if reasons:
        print("Run the same command to try them again.")
    if report.outcomes:
        files = {"table": "table.md", "figure": "figure.png", "page": "report.html"}  # no figure without matplotlib
        there = [f"{what}: {plan.out / name}" for what, name in files.items() if (plan.out / name).exists()]
        print("   ".join(there))
    if report.stopped:
        left = len(report.in_state("waiting", "running", "stopped"))
        print(f"stopped and saved, {left} of {len(plan.cells)} cells are left; resume with: {plan.go_on}")
    return 1 if report.in_state("failed", "left out") else 0


def run_compare(options: CompareOptions) -> int:
    out = options.out
    if out is not None and out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out {out}: the suffix sets the format; use one of {', '.join(FORMATS)}")
    found, skipped = gather_results(options.results)
    table = compare_results(found, options.measures)
    notes = [*table.notes, *(f"skipped: {why}" for why in skipped)]
    show_comparison(table)
    for note in notes:
        print(f"note: {note}")
    if out is not None:
        text = {".md": to_markdown, ".csv": to_csv, ".html": to_html}[out.suffix.lower()](table, notes)
        write_file(out, text.encode("utf-8", "backslashreplace"))
        print(f"table: {out}")
    return 0


def show_comparison(table: Comparison) -> None:
    """Prints one table if it fits, else one per data set."""
    if len(table.columns) <= WIDE and len({column.data for column in table.columns}) > 1:
        print_table(["weights", *(table.title(column) for column in table.columns)], make_cells(table))
        return
    for name, part in table.groups():
        heads = [part.title(column, whole=False) for column in part.columns]
        if len(heads) > WIDE:  # one metric per line
            names, *numbers = zip(*make_cells(part), strict=True)
            rows = [[head, *row] for head, row in zip(heads, numbers, strict=True)]
            print_table(["measure", *names], rows, title=name)
        else:
            print_table(["weights", *heads], make_cells(part), title=name)


def make_cells(table: Comparison) -> list[list[str]]:
    return [[row.name, *(table.text(row, column) or "–" for column in table.columns)] for row in table.rows]


def to_markdown(table: Comparison, notes: Sequence[str]) -> str:
    """One table, and the notes below it."""
    names = list(dict.fromkeys(column.data for column in table.columns))
    heads = ["weights", *(escape_cell(table.title(column, whole=len(names) > 1)) for column in table.columns)]
    rule = ["---", *("---:" for _ in table.columns)]
    lines = [heads, rule, *([escape_cell(cell) for cell in row] for row in make_cells(table))]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    below = "\n".join(f"- {escape_cell(note)}" for note in notes)
    above = f"{escape_cell(names[0])}, with 95 % intervals:\n\n" if len(names) == 1 and names[0] else ""
    return f"{above}{text}\n" + (f"\n{below}\n" if below else "")


def escape_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def to_csv(table: Comparison, notes: Sequence[str]) -> str:
    """One line per number, with all digits and its origin, for a spreadsheet or pandas."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    heads = ("weights", "hash", "kind", "data", "fingerprint", "deduplicated", "measure", "value", "low", "high")
    writer.writerow([*heads, "count", "unit", "made", "file"])
    for row in table.rows:
        for column in (column for column in table.columns if column in row.cells):
            measure, file = row.cells[column]
            result, images = file.result, file.result.data.get("fingerprint", "")
            source = (result.weights.get("hash", ""), result.kind, column.data, images, describe_deduplication(result))
            number = (measure.name, measure.value, measure.low, measure.high, measure.count, measure.unit)
            writer.writerow([row.name, *source, *number, result.made, file.path])
    return text.getvalue()


def to_html(table: Comparison, notes: Sequence[str]) -> str:
    """A page with one table per data set, the notes, and the origin of each number."""
    sections: list[Section] = []
    for name, part in table.groups():
        heads = [part.title(column, whole=False) for column in part.columns]
        sections.append(Table(title=name or "Results", columns=["weights", *heads], rows=make_cells(part)))
    if notes:
        sections.append(Notes(title="Notes", lines=list(notes)))
    files = {one.path: (row.name, one) for row in table.rows for _, one in row.cells.values()}
    rows = [
        (name, str(one.result.weights.get("hash", ""))[:16], one.result.kind, one.result.made, str(path))
        for path, (name, one) in files.items()
    ]
    heads = ["weights", "hash", "by", "made", "file"]
    sections.append(Table(title="Sources", columns=heads, rows=rows, left=5))
    return render_page("Results", sections, lead=f"{len(table.rows)} weights, 95 % intervals")
