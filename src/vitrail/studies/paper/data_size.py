"""4.3, Figures 3 and 4: how much data a ViT needs next to a BiT ResNet and a hybrid.

Nested subsets, the same hyper-parameters and number of steps for all of them, and early stopping: the score of the
weights that were best on a held-out part counts. Further cells search over weight decay, dropout and label smoothing,
which are also selected on the held-out part.

At the paper's scale there are two series. Figure 3: pre-training on ImageNet, ImageNet-21k and JFT, then fine-tuning on
ImageNet at 384 px. Figure 4: subsets of JFT, and 5-shot accuracy on ImageNet.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from vitrail.core.paper_tables import JFT_CLASSES, JFT_IMAGES, TABLE_5
from vitrail.core.text import join_words
from vitrail.models.vit_config import vit_config
from vitrail.models.zoo import model_config, slug, with_known_fields
from vitrail.recipes.table3 import IMAGENET21K_CLASSES
from vitrail.studies import base_runs as base
from vitrail.studies import statistics as stats
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, judge_gaps
from vitrail.studies.paper.scaling import STROKES, build_finetuning, with_network
from vitrail.studies.plots import Panel, SeedLine
from vitrail.studies.statistics import FEWSHOT, NOTHING, VALUE_NAMES, WATCHED, Gap, SeedGroup, Spread, Verdict
from vitrail.tasks.classification.objective import Classification
from vitrail.train.config import Scoring
from vitrail.train.grid.plan import Cell, CellOutcome, Coordinate

PLAIN, SEARCHED, TUNED = "plain", "searched", "tuned"
VALUES: Final = ("accuracy", FEWSHOT)
# A ViT and the ResNet it is compared with: the paper's two pairs. A small grid has one of each family.
PAIRS: Final = (("ViT-B/32", "BiT-R50x1"), ("ViT-L/16", "BiT-R152x2"))


class Regularisers(NamedTuple):
    """What the search varies."""

    decay: float = 0.05
    dropout: float = 0.0
    smoothing: float = 0.0

    def __str__(self) -> str:
        return f"wd{self.decay:g}-do{self.dropout:g}-ls{self.smoothing:g}"


@dataclass(frozen=True, slots=True)
class DataSizeGrid:
    """By family, the name of a network and the arguments of its builder in base_runs; shares of the training split, how
    often a run is scored, and the settings that are searched for the ViT with a tenth of the images."""

    networks: Mapping[str, tuple[str, tuple[Any, ...]]]
    parts: tuple[float, ...]
    seeds: int
    scorings: int
    patience: int
    dev: float
    tried: tuple[Regularisers, ...]


SEARCHED_FAMILY, SEARCHED_PART = "ViT", 0.1
TINY_NETWORKS: Final = {
    "ViT": ("ViT 32x2", (32, 2)),
    "slim ViT": ("ViT 16x2", (16, 2)),
    "BiT": ("ResNet 11 x0.125", ((1, 1, 1), 0.125)),
    "hybrid": ("hybrid 32x1", ((1, 1), 0.0625, 32, 1)),
}
SMALL_NETWORKS: Final = {  # ViT and ResNet of about the same compute
    "ViT": ("ViT 192x6", (192, 6)),
    "slim ViT": ("ViT 96x6", (96, 6)),
    "BiT": ("ResNet 14 x0.5", ((1, 1, 1, 1), 0.5)),
    "hybrid": ("hybrid 128x5", ((1, 1, 1), 0.25, 128, 5)),
}
SEARCH: Final = (Regularisers(0.3), Regularisers(0.05, 0.1), Regularisers(0.05, 0.0, 0.1), Regularisers(0.3, 0.1, 0.1))
TINY: Final = DataSizeGrid(TINY_NETWORKS, (0.1, 0.3, 1.0), 2, scorings=2, patience=2, dev=0.2, tried=SEARCH[-1:])
SMALL: Final = DataSizeGrid(  # shares as far apart as Figure 4's
    SMALL_NETWORKS, (0.03, 0.1, 0.3, 1.0), 3, scorings=6, patience=3, dev=0.1, tried=SEARCH
)
# Figure 4: 9M, 30M, 90M and all of JFT-300M.
JFT_PARTS: Final = (9e6 / JFT_IMAGES, 30e6 / JFT_IMAGES, 90e6 / JFT_IMAGES, 1.0)
JFT_STEPS: Final = round(7 * JFT_IMAGES / 4096)
JFT_DEV: Final = 0.001
FIGURE_4: Final = ("ViT-B/32", "ViT-b/32", "ViT-L/32", "ViT-L/16", "BiT-R50x1", "BiT-R152x2")
# Figure 3's pre-training sets as recipes call them; Table 3's values are the result of the search there.
UPSTREAM: Final = {"ImageNet": "imagenet", "I21k": "imagenet21k", "JFT": "jft"}


def cells(scale: Scale, source: str) -> Iterator[Cell]:
    if scale == "paper":
        yield from iter_jft_subsets(source)
        yield from iter_three_sets(source)
        return
    if scale == "tiny":
        run, grid = base.shrink_to_8_px(base.build_cpu_run(source, steps=60)), TINY
    else:  # a plain ViT needs many updates, so the batch is small
        run, grid = replace(base.build_gpu_run(source, steps=10_000), batch=128), SMALL
    plain = [(family, part, Regularisers(), PLAIN) for family in grid.networks for part in grid.parts]
    search = [(SEARCHED_FAMILY, SEARCHED_PART, tried, SEARCHED) for tried in grid.tried]
    for family, part, tried, series in (*plain, *search):
        name, shape = grid.networks[family]
        model = with_known_fields(base.BUILDERS[family](vit_config(run.model), *shape), dropout=tried.dropout)
        cell = with_network(base.with_dev(run, grid.dev), model)
        every = -(-run.steps // grid.scorings)
        cell = replace(
            cell,
            name=f"data-size {name} {part:g}",
            objective=Classification(smoothing=tried.smoothing),
            optim=replace(cell.optim, weight_decay=tried.decay),
            evaluation=Scoring(every=every, patience=grid.patience, fewshot=run.data.source),
        )
        at = {"series": series, "family": family, "network": name, "part": part, "regularisers": str(tried)}
        for seed in range(grid.seeds):
            cell = replace(cell, seed=seed, data=replace(cell.data, part=part, part_seed=seed))
            place = f"{slug(name)}-{100 * part:g}pc-{tried}-seed{seed}"
            yield Cell(name=place, at={**at, "seed": seed}, run=cell)


def iter_jft_subsets(source: str) -> Iterator[Cell]:
    """Figure 4: one setting for all sizes, as many steps as 7 epochs of the whole set, no other regularisation."""
    for name in FIGURE_4:
        run = base.with_source(base.load_pretraining(name), source)
        run = replace(
            run,
            model=with_known_fields(model_config(name, classes=JFT_CLASSES), head="tanh"),
            steps=JFT_STEPS,
            epochs=0.0,
            # Scored twenty times without early stopping: the best score counts.
            evaluation=Scoring(fewshot="imagenet", patience=20),
        )
        family = "BiT" if name.startswith("BiT") else "slim ViT" if name == "ViT-b/32" else "ViT"
        for part in JFT_PARTS:
            data = replace(run.data, part=part, dev=JFT_DEV, watch="dev", test="none")
            at = {"series": PLAIN, "family": family, "network": name, "part": part, "regularisers": "", "seed": 0}
            run = replace(run, name=f"data-size {name} {part:.2g}", data=data)
            yield Cell(name=f"{slug(name)}-jft-{part * JFT_IMAGES / 1e6:.0f}m", at=at, run=run)


def iter_three_sets(source: str) -> Iterator[Cell]:
    """Figure 3: pre-trained on each of the three sets, then fine-tuned on ImageNet at 384 px. Table 3 has no row for
    H/14 on ImageNet-21k, which takes that of L/16 here."""
    for upstream, recipes in UPSTREAM.items():
        for name in TABLE_5[upstream]["imagenet"]:
            if name == "ViT-H/14" and upstream == "I21k":
                model = model_config(name, classes=IMAGENET21K_CLASSES, head="tanh", dropout=0.1)
                run = replace(base.load_pretraining("ViT-L/16", recipes), name="vit-h14-imagenet21k", model=model)
            else:
                longer = "-14ep" if name == "ViT-L/16" and upstream == "JFT" else ""
                run = base.load_pretraining(name, recipes + longer)
            run = base.with_source(run, source if upstream == "JFT" else "")
            first, tuned = f"{slug(name)}-{upstream.lower()}", build_finetuning("imagenet", name)
            at = {"family": "ViT", "network": name, "upstream": upstream, "seed": 0}
            yield Cell(name=first, at={**at, "series": "pre-training"}, run=run)
            yield Cell(name=f"{first}-tuned", at={**at, "series": TUNED}, run=tuned, after=first)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairGaps:
    """How far a ViT is ahead of a ResNet, by share of the data; below 0 it is behind."""

    vit: str
    resnet: str
    value: str
    gaps: Mapping[float, Gap]
    moved: Gap  # from the smallest share to the largest
    errors: tuple[float, float]  # those of the ViT over those of the ResNet, at both ends


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups = stats.group_by_seed(outcomes)
    pairs = compare_pairs(groups)
    parts = [
        f"with {format_part(min(one.gaps))} {one.vit} is {one.gaps[min(one.gaps)]} from {one.resnet} in "
        f"{VALUE_NAMES[one.value]}, with {format_part(max(one.gaps))} {one.gaps[max(one.gaps)]}"
        for one in pairs
    ]
    for network, searched in select_searched(outcomes, "accuracy").items():  # at the smallest share
        plain = stats.find_spread(groups, "accuracy", series=PLAIN, network=network, part=min(searched))
        if gain := stats.compare(searched[min(searched)], plain):
            text = f"the search changes {network} by {gain} with {format_part(min(searched))}"
            parts.append(f"{text} ({gain.reading})")
    return Findings(
        table=build_table(outcomes, groups),
        panels=build_panels(outcomes, groups),
        summary=f"{'; '.join(parts)}." if parts else "",
        paper="4.3: ViTs are far behind ResNets of about their compute with the smallest subset of JFT (9M images), "
        "ahead from 90M on, and gain more the larger the set is.",
        claims=[*(claim for pair in pairs for claim in judge_pair(pair)), *judge_figure_3(groups)],
    )


def select_searched(outcomes: Iterable[CellOutcome], value: str) -> dict[str, dict[float, Spread]]:
    """By network and share, the value of the setting that was best on the held-out part, selected for each seed among
    all settings, the plain one included. Only where there was a search."""
    runs: dict[tuple[str, float], dict[Coordinate, list[CellOutcome]]] = {}
    for one in outcomes:
        if not one.fault and one.at.get("series") in (PLAIN, SEARCHED) and WATCHED in one.values:
            place = (str(one.at["network"]), float(one.at["part"]))
            runs.setdefault(place, {}).setdefault(one.at["seed"], []).append(one)
    out: dict[str, dict[float, Spread]] = {}
    for (network, part), by_seed in sorted(runs.items()):
        if any(one.at["series"] == SEARCHED for tried in by_seed.values() for one in tried):
            best = [max(tried, key=lambda one: one.values[WATCHED]) for tried in by_seed.values()]
            if values := tuple(one.values[value] for one in best if value in one.values):
                out.setdefault(network, {})[part] = Spread(values)
    return out


def compare_pairs(groups: Sequence[SeedGroup]) -> list[PairGaps]:
    """Each ViT next to its ResNet, at the shares that both have."""
    out: list[PairGaps] = []
    parts = sorted({float(group.at["part"]) for group in groups if group.at.get("series") == PLAIN})
    names = {str(group.at.get("family")): str(group.at.get("network")) for group in reversed(groups)}
    for vit, resnet in dict.fromkeys((*PAIRS, (names.get("ViT", ""), names.get("BiT", "")))):
        value = FEWSHOT if (vit, resnet) in PAIRS else "accuracy"
        both = {
            part: [stats.find_spread(groups, value, series=PLAIN, network=at, part=part) for at in (vit, resnet)]
            for part in parts
        }
        spreads = {part: (ours, theirs) for part, (ours, theirs) in both.items() if ours and theirs}
        if len(spreads) < 2:
            continue
        every = [spread for both in spreads.values() for spread in both]
        gaps = {part: stats.compare(ours, theirs, every) for part, (ours, theirs) in spreads.items()}
        low, high = min(spreads), max(spreads)
        shares = sum(1 / spread.count for part in (low, high) for spread in spreads[part])  # four means
        moved = stats.gap_of(gaps[high].difference - gaps[low].difference, shares, every)
        first, last = ((1 - ours.mean) / max(1 - theirs.mean, 1e-12) for ours, theirs in (spreads[low], spreads[high]))
        out.append(PairGaps(vit=vit, resnet=resnet, value=value, gaps=gaps, moved=moved, errors=(first, last)))
    return out


def format_part(part: float) -> str:
    return "all of the images" if part == 1 else f"{100 * part:.3g} % of the images"


def judge_pair(pair: PairGaps) -> list[JudgedClaim]:
    """Behind with little data, gaining with more, ahead in the end."""
    name, last = f"{pair.vit} over {pair.resnet}", pair.gaps[max(pair.gaps)]
    errors = "makes {:.1f} times the errors of the ResNet with the least and {:.1f} with all".format(*pair.errors)
    ahead = [part for part, gap in pair.gaps.items() if gap.is_above]
    if ahead:
        verdict = Verdict.AGREES if last.is_above else Verdict.PARTLY
        where = f"ahead from {format_part(min(ahead))} on{'' if last.is_above else ', but not with all'}"
    else:
        verdict = Verdict.DISAGREES if last.is_below else Verdict.UNDECIDED
        where = "never ahead, so no crossing was seen"
    return [
        *judge_gaps([(f"{name} with the least data", pair.gaps[min(pair.gaps)])], upward=False),
        *judge_gaps([(f"{name} {errors}, and gains with more data", pair.moved)]),
        JudgedClaim(f"{name}: {where}", verdict),
    ]


def judge_figure_3(groups: Sequence[SeedGroup]) -> list[JudgedClaim]:
    """Large against Base after fine-tuning: below on ImageNet, about equal on ImageNet-21k, above on JFT."""
    parts: list[str] = []
    signs: list[bool] = []
    for upstream, printed in TABLE_5.items():
        large, small = (
            stats.find_spread(groups, "accuracy", series=TUNED, upstream=upstream, network=network)
            for network in ("ViT-L/16", "ViT-B/16")
        )
        if large and small:
            ours = 100 * (large.mean - small.mean)
            theirs = printed["imagenet"]["ViT-L/16"] - printed["imagenet"]["ViT-B/16"]
            parts.append(f"{upstream} {ours:+.2f} points (there {theirs:+.2f})")
            signs.append(ours * theirs > 0)
    verdict = Verdict.AGREES if all(signs) else Verdict.PARTLY if any(signs) else Verdict.DISAGREES
    return [JudgedClaim(f"ViT-L/16 against ViT-B/16 pre-trained on {join_words(parts)}", verdict)] if parts else []


def build_table(outcomes: Sequence[CellOutcome], groups: Sequence[SeedGroup]) -> ResultTable:
    """Figure 4 has no printed numbers; those of Figure 3 are the ImageNet rows of Table 5."""
    rows: list[tuple[str, ...]] = []
    best = {value: select_searched(outcomes, value) for value in VALUES}
    for group in groups:
        network, count = str(group.at["network"]), str(len(group.outcomes))
        if group.at.get("series") == PLAIN:
            part = float(group.at["part"])
            plain = (stats.format_spread(group.spread(value)) for value in VALUES)
            searched = (stats.format_spread(best[value].get(network, {}).get(part)) for value in VALUES)
            rows.append((network, f"{100 * part:.3g} %", *plain, *searched, count, NOTHING))
        elif group.at.get("series") == TUNED:
            upstream = str(group.at["upstream"])
            printed = TABLE_5[upstream]["imagenet"].get(network)
            tuned = (stats.format_spread(group.spread("accuracy"), 2), *(NOTHING,) * 3)
            paper = NOTHING if printed is None else f"{printed:.2f}"
            rows.append((network, f"{upstream}, tuned", *tuned, count, paper))
    columns = ("network", "data", "accuracy [%]", "5-shot accuracy [%]", "accuracy, searched [%]")
    return ResultTable((*columns, "5-shot, searched [%]", "seeds", "paper: Table 5 [%]"), rows)


def build_panels(outcomes: Sequence[CellOutcome], groups: Sequence[SeedGroup]) -> list[Panel]:
    """Accuracy and few-shot accuracy over the share of the data; the result of a search is hollow."""
    panels: list[Panel] = []
    for value in VALUES:
        lines = build_lines(outcomes, groups, value)
        ticks = {x: f"{x:.3g}" for x in sorted({x for line in lines for x, _ in line.points})}
        if ticks or value == "accuracy":
            along, up = "share of the training images [%]", f"{VALUE_NAMES[value]} [%]"
            panels.append(Panel(lines=lines, along=along, up=up, log=bool(ticks), ticks=ticks))
    return panels


def build_lines(outcomes: Sequence[CellOutcome], groups: Sequence[SeedGroup], value: str) -> list[SeedLine]:
    """One line per network, with another stroke for a second network of a family."""
    lines: list[SeedLine] = []
    searched, seen = select_searched(outcomes, value), list[str]()
    plain = [group for group in groups if group.at.get("series") == PLAIN and group.outcomes]
    for network, family in dict.fromkeys((str(group.at["network"]), str(group.at["family"])) for group in plain):
        ours = [(100 * float(one.at["part"]), one.spread(value)) for one in plain if one.at["network"] == network]
        if points := [(x, spread) for x, spread in ours if spread is not None]:
            lines.append(SeedLine(name=network, family=family, points=points, stroke=STROKES[seen.count(family) % 3]))
            seen.append(family)
        if network in searched:
            points = [(100 * part, spread) for part, spread in searched[network].items()]
            name = f"{network}, searched"
            lines.append(SeedLine(name=name, family=family, points=points, stroke="dashed", hollow=True))
    return lines
