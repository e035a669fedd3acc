"""4.6: what pre-training from images alone is worth, depending on the number of labels for fine-tuning.

From scratch; masked patches with each of the three targets (B.1.2); MAE; MoCo v3; DINO; and supervised pre-training,
which has seen every label and serves as the upper reference. On a GPU all of them have the same compute before
fine-tuning; all, scratch included, share one fine-tuning recipe; a seed draws the same labelled images for all methods.
Scratch has a second row with three times the steps, in case it was stopped too early. On a GPU, scratch, masked patches
and MAE, the methods in question, have three seeds and the others one, so that there is time for long pre-training.
Frozen features are compared by closed-form 5-shot accuracy, those without labels by their nearest neighbours as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vitrail.models.vit_config import vit_config
from vitrail.models.zoo import adapt_config
from vitrail.objectives.masked_patches import MaskedPatches, Target
from vitrail.recipes import selfsup
from vitrail.recipes.run_overrides import with_image_size
from vitrail.recipes.table3 import vit_b16_imagenet, vit_b16_jft
from vitrail.recipes.table4 import finetune_imagenet
from vitrail.studies import statistics as stats
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, with_source, with_steps
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, judge_gaps
from vitrail.studies.plots import Panel, SeedLine, Stroke
from vitrail.studies.statistics import FEWSHOT, NOTHING, Gap, SeedGroup, Spread
from vitrail.train.config import Run, RunRequest, Scoring
from vitrail.train.grid.plan import Cell, CellOutcome

PRETRAINING, FINETUNING = "pre-training", "fine-tuning"
SCRATCH, LONGER, SUPERVISED = "scratch", "scratch-longer", "supervised"
UNTRAINED: Final = (SCRATCH, LONGER)  # methods without pre-training
REPEATED: Final = (*UNTRAINED, "masked-colour", "mae")
LONGER_BY: Final = 3
MASKED: dict[str, Target] = {"masked-colour": "mean-colour", "masked-small": "small-patch", "masked-pixels": "pixels"}
NAMES: Final[Mapping[str, str]] = {
    SCRATCH: "from scratch",
    LONGER: "from scratch, 3x as long",
    "masked-colour": "masked, mean colour",
    "masked-small": "masked, 4x4 colours",
    "masked-pixels": "masked, pixels",
    "mae": "MAE",
    "moco": "MoCo v3",
    "dino": "DINO",
    SUPERVISED: "supervised, all labels",
}
UNLABELLED: Final = tuple(name for name in NAMES if name not in (*UNTRAINED, SUPERVISED))
STROKES: dict[str, Stroke] = {SCRATCH: "dashed", LONGER: "dotted", "masked-small": "dashed", "masked-pixels": "dotted"}
# ImageNet after fine-tuning with all labels: Table 5 from scratch and from JFT-300M, and 4.6.
PAPER: Final[Mapping[str, str]] = {SCRATCH: "77.91", "masked-colour": "79.9", SUPERVISED: "84.15"}


def build_stages(scale: Scale, source: str) -> tuple[dict[str, Run], Run, Mapping[float, int], int]:
    """One pre-training per method (none from scratch), the fine-tuning, its steps for each share of labels, and the
    number of seeds of the methods that are repeated."""
    if scale == "tiny":
        base = build_cpu_run(source, steps=60)
        recipes = (selfsup.masked_digits, selfsup.mae_digits, selfsup.moco_digits, selfsup.dino_digits)
        steps, seeds = {0.1: 60, 1.0: 100}, 1
    else:
        base = build_gpu_run(source, steps=10_000)
        recipes = (selfsup.masked_cifar10, selfsup.mae_cifar10, selfsup.moco_cifar10, selfsup.dino_cifar10)
        steps, seeds = {0.01: 1200, 0.1: 2000, 1.0: 3000}, 3
    position = vit_config(recipes[0]().model).position
    base = replace(base, model=replace(vit_config(base.model), position=position, pool="mean", class_token=False))
    finetuning = replace(base, optim=replace(base.optim, lr=base.optim.lr / 2), batch=min(base.batch, 128))
    masked, mae, moco, dino = (with_shape(recipe(), base) for recipe in recipes)
    pretrainings = {**with_targets(masked), "mae": mae, "moco": moco, "dino": dino, SUPERVISED: base}
    total = base.steps * base.batch * base.objective.macs_per_image(base.model)
    for name, run in pretrainings.items():
        equal = max(round(total / (run.batch * run.objective.macs_per_image(run.model))), 1)  # of the base's compute
        run = with_steps(run, base.steps if scale == "tiny" else equal, scorings=1)
        pretrainings[name] = replace(run, evaluation=Scoring(every=run.steps, fewshot=run.data.source))
    return pretrainings, finetuning, steps, seeds


def with_targets(masked: Run) -> dict[str, Run]:
    return {name: replace(masked, objective=MaskedPatches(target=target)) for name, target in MASKED.items()}


def with_shape(run: Run, base: Run) -> Run:
    """The recipe with the shape of the base's network and its source; the rest of the network is its own."""
    own, model = vit_config(run.model), vit_config(base.model)
    fields = {name: getattr(model, name) for name in ("width", "depth", "mlp_width", "heads", "patch")}
    run = replace(run, model=replace(own, image=run.augmentation.size, **fields))
    run = with_image_size(run, base.augmentation.size)
    return replace(run, augmentation=replace(run.augmentation, flip=base.augmentation.flip), data=base.data)


def cells(scale: Scale, source: str) -> Iterator[Cell]:
    if scale == "paper":
        yield from iter_paper_cells(source)
        return
    pretrainings, finetuning, lengths, seeds = build_stages(scale, source)
    for method in NAMES:
        before = pretrainings.get(method)
        for seed in range(seeds if method in REPEATED else 1):
            if before is not None:
                yield build_pretraining(method, before, seed)
            for budget, steps in lengths.items():
                if method == LONGER and budget == 1:  # with all labels that is supervised pre-training, another row
                    continue
                run = with_steps(finetuning, LONGER_BY * steps if method == LONGER else steps, scorings=1)
                if before is not None:
                    run = replace(run, model=adapt_config(before.model, classes=run.model.classes, head="linear"))
                run = replace(run, data=replace(run.data, part=budget, part_seed=seed))
                after = "" if before is None else f"{method}-seed{seed}"
                yield build_finetuning(method, run, budget, seed, after)


def build_pretraining(method: str, run: Run, seed: int) -> Cell:
    run = replace(run, name=f"selfsup {method}", seed=seed)
    return Cell(name=f"{method}-seed{seed}", at={"stage": PRETRAINING, "method": method, "seed": seed}, run=run)


def build_finetuning(method: str, run: RunRequest, budget: float, seed: int, after: str) -> Cell:
    at = {"stage": FINETUNING, "method": method, "budget": budget, "seed": seed}
    run = replace(run, name=f"selfsup {method} {budget:.0%}", seed=seed)
    return Cell(name=f"{method}-{100 * budget:g}pc-seed{seed}", at=at, run=run, after=after)


def iter_paper_cells(source: str) -> Iterator[Cell]:
    """ViT-B/16 as in 4.6: on JFT-300M with masked patches and with its labels, on ImageNet from scratch; each then
    fine-tuned on ImageNet at 384 px, at one rate where the paper takes the best of four."""
    masked = with_targets(with_source(selfsup.masked_b16_jft(), source))
    for method, run in {SCRATCH: vit_b16_imagenet(), **masked, SUPERVISED: with_source(vit_b16_jft(), source)}.items():
        if method != SCRATCH:
            run = replace(run, evaluation=Scoring(fewshot="imagenet"))
        yield build_pretraining(method, run, 0)
        tuned = finetune_imagenet()
        model = adapt_config(run.model, image_size=tuned.augmentation.size, classes=1000, head="linear")
        yield build_finetuning(method, replace(tuned, model=model), 1.0, 0, after=f"{method}-seed0")


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodScores:
    """The outcomes by method and share of labels."""

    groups: tuple[SeedGroup, ...]

    @property
    def methods(self) -> list[str]:
        known = {str(group.at["method"]) for group in self.groups}
        return [name for name in NAMES if name in known]

    @property
    def budgets(self) -> list[float]:
        return sorted({float(group.at["budget"]) for group in self.groups if "budget" in group.at})

    def find_finetuned(self, method: str, budget: float) -> Spread | None:
        return stats.find_spread(self.groups, "accuracy", stage=FINETUNING, method=method, budget=budget)

    def frozen(self, method: str, value: str) -> Spread | None:
        return stats.find_spread(self.groups, value, stage=PRETRAINING, method=method)

    def over_scratch(self, method: str, budget: float) -> Spread | None:
        """Seed by seed."""
        at = {"stage": FINETUNING, "budget": budget}
        one, scratch = (stats.find_group(self.groups, method=name, **at) for name in (method, SCRATCH))
        return stats.pair_by_seed(one, scratch, "accuracy")

    def compare(self, method: str, other: str, budget: float) -> Gap | None:
        """A method minus another at a share of labels; the spread is pooled over all methods there."""
        every = {name: self.find_finetuned(name, budget) for name in NAMES}
        return stats.compare(every[method], every[other], every.values())


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    scores = MethodScores(groups=stats.group_by_seed(outcomes))
    ticks = {100 * budget: f"{budget:.0%}" for budget in scores.budgets}
    tuned = [build_line(scores, method, scores.find_finetuned) for method in scores.methods]
    gains = [build_line(scores, method, scores.over_scratch) for method in scores.methods if method != SCRATCH]
    claims: list[JudgedClaim] = []
    for budget in scores.budgets:
        for other, name in ((SCRATCH, "scratch"), (SUPERVISED, "supervised"), ("masked-pixels", "pixels")):
            text = f"with {budget:.0%} of the labels colours minus {name}:"
            gap = scores.compare("masked-colour", other, budget)
            claims += judge_gaps([(text, gap)], upward=other != SUPERVISED)
    return Findings(
        table=build_table(scores),
        panels=[
            Panel(lines=lines, along="labels to fine-tune with", up=up, log=True, ticks=ticks)
            for lines, up in ((tuned, "test accuracy [%]"), (gains, "over training from scratch [points]"))
        ],
        summary=summarise(scores),
        paper="4.6: masked patches are 2 points above training from scratch and 4 below supervised pre-training, and "
        "pixels are a slightly worse target than colours.",
        claims=claims,
    )


def summarise(scores: MethodScores) -> str:
    """Which method is best with how many labels, whether beyond the seeds, and what more steps from scratch bring."""
    lines: list[tuple[str, str, str]] = []
    for budget in scores.budgets:
        gaps = {name: gap for name in UNLABELLED if (gap := scores.compare(name, SCRATCH, budget)) is not None}
        if gaps:
            leader, share = max(gaps, key=lambda name: gaps[name].difference), f"with {budget:.0%}"
            above = f"{sum(gap.is_above for gap in gaps.values())} of {len(gaps)} {share}"
            more = scores.compare(LONGER, SCRATCH, budget)
            best = f"{NAMES[leader]} {gaps[leader]} {share}"
            known = gaps[leader].margin is not None
            lines.append((best, above if known else "", "" if more is None else f"{more} {share}"))
    if not lines:
        return ""
    best, above, longer = (", ".join(filter(None, texts)) for texts in zip(*lines, strict=True))
    decided = f"beyond the spread over seeds are {above}" if above else "one seed decides nothing"
    steps = f"; {LONGER_BY} times the steps from scratch bring {longer}" if longer else ""
    return f"The best methods by share of labels, over training from scratch: {best}; {decided}{steps}."


def build_table(scores: MethodScores) -> ResultTable:
    rows: list[tuple[str, ...]] = []
    for method in scores.methods:
        # The accuracy of a pre-training without labels is that of its nearest neighbours.
        neighbours = scores.frozen(method, "accuracy") if method in UNLABELLED else None
        frozen = (stats.format_spread(scores.frozen(method, FEWSHOT)), stats.format_spread(neighbours))
        tuned = (stats.format_spread(scores.find_finetuned(method, budget)) for budget in scores.budgets)
        rows.append((NAMES[method], *frozen, *tuned, PAPER.get(method, NOTHING)))
    shares = (f"{budget:.0%} of labels [%]" for budget in scores.budgets)
    columns = ("pre-training", "frozen, 5-shot [%]", "frozen, k-NN [%]", *shares, "paper, ImageNet")
    return ResultTable(columns, rows)


def build_line(scores: MethodScores, method: str, value: Callable[[str, float], Spread | None]) -> SeedLine:
    family = "masked" if method in MASKED else NAMES[SCRATCH if method in UNTRAINED else method]
    points = [(100 * budget, value(method, budget)) for budget in scores.budgets]
    stroke, hollow = STROKES.get(method, "solid"), method in ("masked-small", "masked-pixels")
    return SeedLine(name=NAMES[method], family=family, points=points, stroke=stroke, hollow=hollow)
