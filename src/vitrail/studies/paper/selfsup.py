"""4.6: what pre-training from images alone is worth, by how many labels there are to fine-tune with.

From scratch; masked patches with each of the three targets (B.1.2); MAE; MoCo v3; DINO; and supervised pre-training,
which has seen every label and is there as a mark to reach. On a GPU all of them have the same compute before
fine-tuning; fine-tuning has one recipe for all, scratch included; a seed draws the labelled images once for all
methods. Scratch has a second row with three times the steps, so that nobody has to wonder whether it was stopped too
early. On a GPU scratch, masked patches and MAE, whose difference is asked for, have three seeds and the others one, so
that pre-training can be long instead. Frozen features are compared by closed-form 5-shot accuracy, those without labels
by their nearest neighbours as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.data.transforms.augmentation import Augmentation
from vitrail.models.vit_config import vit_config
from vitrail.models.zoo import adapt_config
from vitrail.objectives.masked_patches import MaskedPatches, Target
from vitrail.recipes import selfsup
from vitrail.recipes.run_overrides import resized
from vitrail.recipes.table3 import vit_b16_imagenet, vit_b16_jft
from vitrail.recipes.table4 import finetune_imagenet
from vitrail.studies.framework.base_runs import for_card, for_cores, given, shortened
from vitrail.studies.framework.definition import Findings, Scale, Study, Table
from vitrail.studies.framework.plots import Line, Panel, Point, Stroke, plot
from vitrail.studies.framework.results import NOTHING, Gap, Group, Spread, group_at, groups, percent
from vitrail.studies.framework.verdicts import FEWSHOT, apart, missing
from vitrail.train.config import Evaluation, Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BEFORE: Final = "pre-training"
AFTER: Final = "fine-tuning"
SCRATCH: Final = "scratch"
LONGER: Final = "scratch-longer"
SUPERVISED: Final = "supervised"
UNTAUGHT: Final = (SCRATCH, LONGER)  # that start from no weights
REPEATED: Final = (*UNTAUGHT, "masked-colour", "mae")
AS_LONG: Final = 3
MASKED: Final[Mapping[str, Target]] = {
    "masked-colour": "mean-colour",
    "masked-small": "small-patch",
    "masked-pixels": "pixels",
}
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
OURS: Final = tuple(name for name in NAMES if name not in (*UNTAUGHT, SUPERVISED))
LOOKS: Final[Mapping[str, tuple[str, Stroke]]] = {  # family, and stroke, of a line
    SCRATCH: ("from scratch", "dashed"),
    LONGER: ("from scratch", "dotted"),
    "masked-colour": ("masked", "solid"),
    "masked-small": ("masked", "dashed"),
    "masked-pixels": ("masked", "dotted"),
}
# ImageNet after fine-tuning with all labels: Table 5 from scratch and from JFT-300M, and 4.6.
PAPER: Final[Mapping[str, str]] = {SCRATCH: "77.91", "masked-colour": "79.9", SUPERVISED: "84.15"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A pre-training a method (from scratch there is none), the fine-tuning, its steps for each share of labels, and
    the seeds of those that have more than one."""

    before: Mapping[str, Run]
    tuning: Run
    steps: Mapping[float, int]
    seeds: int


def plan(scale: Scale, source: str) -> Plan:
    if scale == "tiny":
        base = for_cores(source, steps=60)
        recipes = (selfsup.masked_digits, selfsup.mae_digits, selfsup.moco_digits, selfsup.dino_digits)
        length, steps, seeds = for_steps, {0.1: 60, 1.0: 100}, 1
    else:
        base = for_card(source, steps=10_000)
        recipes = (selfsup.masked_cifar10, selfsup.mae_cifar10, selfsup.moco_cifar10, selfsup.dino_cifar10)
        length, steps, seeds = for_compute, {0.01: 1200, 0.1: 2000, 1.0: 3000}, 3
    own = vit_config(recipes[0]().model)
    base = replace(base, model=replace(vit_config(base.model), position=own.position, pool="mean", class_token=False))
    tuning = replace(base, optim=replace(base.optim, lr=base.optim.lr / 2), batch=min(base.batch, 128))
    before = {
        name: replace(run, evaluation=Evaluation(every=run.steps, fewshot=run.data.source))
        for name, run in ((name, length(run, base)) for name, run in pretrainings(base, recipes))
    }
    return Plan(before=before, tuning=tuning, steps=steps, seeds=seeds)


def pretrainings(base: Run, recipes: Sequence[Callable[[], Run]]) -> Iterator[tuple[str, Run]]:
    """Every method on the base's source and with its shape of network."""
    masked, mae, moco, dino = (on_base(recipe(), base) for recipe in recipes)
    for name, target in MASKED.items():
        yield name, replace(masked, objective=MaskedPatches(target=target))
    yield from (("mae", mae), ("moco", moco), ("dino", dino), (SUPERVISED, base))


def on_base(run: Run, base: Run) -> Run:
    """The recipe with the network and the source of the base; what is its own in the network stays."""
    own, common = vit_config(run.model), vit_config(base.model)
    shape = replace(
        own, width=common.width, depth=common.depth, mlp_width=common.mlp_width, heads=common.heads, patch=common.patch
    )
    run = resized(replace(run, model=replace(shape, image=run.augmentation.size)), base.augmentation.size)
    augmentation: Augmentation = replace(run.augmentation, flip=base.augmentation.flip)
    return replace(run, augmentation=augmentation, data=base.data)


def for_steps(run: Run, base: Run) -> Run:
    return shortened(run, base.steps, looks=1)


def for_compute(run: Run, base: Run) -> Run:
    """For as many steps as come to the base's compute."""
    whole = base.steps * base.batch * base.objective.macs_per_image(base.model)
    return shortened(run, max(round(whole / (run.batch * run.objective.macs_per_image(run.model))), 1), looks=1)


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    return tuple(paper_cells(source) if scale == "paper" else own_cells(plan(scale, source)))


def own_cells(made: Plan) -> Iterator[Cell]:
    for method in NAMES:
        for seed in range(made.seeds if method in REPEATED else 1):
            if (run := made.before.get(method)) is not None:
                yield Cell(
                    name=f"{method}-seed{seed}",
                    at={"stage": BEFORE, "method": method, "seed": seed},
                    run=replace(run, name=f"selfsup {method}", seed=seed),
                )
            for budget, steps in made.steps.items():
                if method != LONGER:
                    yield tuned(made, method, budget, steps, seed)
                elif budget < 1:  # with all labels supervised pre-training is that, and has its row
                    yield tuned(made, method, budget, AS_LONG * steps, seed)


def tuned(made: Plan, method: str, budget: float, steps: int, seed: int) -> Cell:
    """Fine-tuning with a share of the labels, from a method's weights or from scratch."""
    run = shortened(made.tuning, steps, looks=1)
    before = made.before.get(method)
    if before is not None:
        run = replace(run, model=adapt_config(before.model, classes=run.model.classes, head="linear"))
    return Cell(
        name=f"{method}-{100 * budget:g}pc-seed{seed}",
        at={"stage": AFTER, "method": method, "budget": budget, "seed": seed},
        run=replace(
            run,
            name=f"selfsup {method} {budget:.0%}",
            data=replace(run.data, part=budget, part_seed=seed),
            seed=seed,
        ),
        after="" if before is None else f"{method}-seed{seed}",
    )


def paper_cells(source: str) -> Iterator[Cell]:
    """ViT-B/16 as in 4.6: on JFT-300M with masked patches and with its labels, on ImageNet from scratch; each then
    fine-tuned on ImageNet at 384 px, at one rate where the paper takes the best of four."""
    masked = given(selfsup.masked_b16_jft(), source)
    before = {
        SCRATCH: vit_b16_imagenet(),
        **{name: replace(masked, objective=MaskedPatches(target=target)) for name, target in MASKED.items()},
        SUPERVISED: given(vit_b16_jft(), source),
    }
    for method, run in before.items():
        if method != SCRATCH:
            run = replace(run, evaluation=Evaluation(fewshot="imagenet"))
        yield Cell(
            name=f"{method}-seed0",
            at={"stage": BEFORE, "method": method, "seed": 0},
            run=replace(run, name=f"selfsup {method}"),
        )
        tuning = finetune_imagenet()
        model = adapt_config(run.model, image_size=tuning.augmentation.size, classes=1000, head="linear")
        yield Cell(
            name=f"{method}-100pc-seed0",
            at={"stage": AFTER, "method": method, "budget": 1.0, "seed": 0},
            run=replace(tuning, name=f"selfsup {method} 100%", model=model),
            after=f"{method}-seed0",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What came of the cells, by method and share of labels."""

    groups: tuple[Group, ...]

    @property
    def methods(self) -> list[str]:
        there = {str(group.at["method"]) for group in self.groups}
        return [name for name in NAMES if name in there]

    @property
    def budgets(self) -> list[float]:
        return sorted({float(group.at["budget"]) for group in self.groups if "budget" in group.at})

    def tuned(self, method: str, budget: float) -> Spread | None:
        group = group_at(self.groups, {"stage": AFTER, "method": method, "budget": budget})
        return None if group is None else group.spread("accuracy")

    def gained(self, method: str, budget: float) -> Spread | None:
        """Over training from scratch, of the seeds that both have."""
        one, scratch = (
            group_at(self.groups, {"stage": AFTER, "method": name, "budget": budget}) for name in (method, SCRATCH)
        )
        if one is None or scratch is None or method == SCRATCH:
            return None
        marks = {each.at["seed"]: each.values["accuracy"] for each in scratch.outcomes if "accuracy" in each.values}
        gains = [
            each.values["accuracy"] - marks[each.at["seed"]]
            for each in one.outcomes
            if "accuracy" in each.values and each.at["seed"] in marks
        ]
        return Spread(tuple(gains)) if gains else None

    def frozen(self, method: str, value: str) -> Spread | None:
        group = group_at(self.groups, {"stage": BEFORE, "method": method})
        return None if group is None else group.spread(value)

    def over(self, method: str, other: str, budget: float) -> Gap | None:
        """A method less another at a share of labels; the spread is pooled over the methods there."""
        everything = [self.tuned(name, budget) for name in self.methods]
        return apart(self.tuned(method, budget), self.tuned(other, budget), everything)


def conclude(outcomes: Sequence[CellOutcome]) -> Findings:
    found = Found(groups=groups(outcomes))
    return Findings(
        table=table(found),
        figure=partial(figure, found),
        sentence=sentence(found) + missing(outcomes),
        beside=beside(found),
    )


def table(found: Found) -> Table:
    rows: list[tuple[str, ...]] = []
    for method in found.methods:
        near = found.frozen(method, "accuracy") if method in OURS else None  # another's accuracy is its classifier's
        tuned = (percent(found.tuned(method, budget)) for budget in found.budgets)
        frozen = (percent(found.frozen(method, FEWSHOT)), percent(near))
        rows.append((NAMES[method], *frozen, *tuned, PAPER.get(method, NOTHING)))
    shares = (f"{budget:.0%} of labels [%]" for budget in found.budgets)
    columns = ("pre-training", "frozen, 5-shot [%]", "frozen, k-NN [%]", *shares, "paper, ImageNet")
    return Table(columns=columns, rows=tuple(rows))


def sentence(found: Found) -> str:
    """Which method is highest with how many labels, whether it is beyond the seeds, and what more steps would do."""
    leads: dict[str, list[str]] = {}
    above: list[str] = []
    longer: list[str] = []
    for budget in found.budgets:
        gaps = {name: each for name in OURS if (each := found.over(name, SCRATCH, budget)) is not None}
        if not gaps:
            continue
        with_labels = f"with {budget:.0%}"
        leader = max(gaps, key=lambda name: gaps[name].difference)
        leads.setdefault(NAMES[leader], []).append(f"{gaps[leader]} {with_labels}")
        if gaps[leader].margin is not None:
            above.append(f"{sum(each.above for each in gaps.values())} of {len(gaps)} {with_labels}")
        if (other := found.over(LONGER, SCRATCH, budget)) is not None:
            longer.append(f"{other} {with_labels}")
    if not leads:
        return "No method has finished next to training from scratch, so that nothing can be compared yet."
    told = "; ".join(f"{name} is highest, {', '.join(where)}" for name, where in leads.items())
    decided = f"beyond the spread over seeds are {', '.join(above)}" if above else "one seed decides nothing"
    steps = f"; {AS_LONG} times the steps from scratch are {', '.join(longer)}" if longer else ""
    return f"By the labels to fine-tune with, over training from scratch: {told}; {decided}{steps}."


def beside(found: Found) -> str:
    said = (
        "4.6: masked patches are 2 points above training from scratch and 4 below supervised pre-training, and pixels "
        "are a slightly worse target than colours."
    )
    parts: list[str] = []
    for budget in found.budgets:
        scratch = found.over("masked-colour", SCRATCH, budget)
        supervised = found.over("masked-colour", SUPERVISED, budget)
        pixels = found.over("masked-colour", "masked-pixels", budget)
        told = [
            f"{each} {words} ({verdict(each, upward=upward)})"
            for words, each, upward in (
                ("against scratch", scratch, True),
                ("against supervised", supervised, False),
                ("against pixels", pixels, True),
            )
            if each is not None
        ]
        if told:
            parts.append(f"with {budget:.0%} of the labels {', '.join(told)}")
    return f"{said} Here colours are: {'; '.join(parts)}." if parts else f"{said} Not decided here: cells are missing."


def verdict(found: Gap, *, upward: bool) -> str:
    """Whether a difference has the paper's sign."""
    if found.margin is None:
        return "one seed"
    return "open" if found.open else "agrees" if found.above == upward else "does not agree"


def figure(found: Found) -> "Figure":
    """Accuracy by the share of labels, and what each method is above scratch, seed by seed."""
    ticks = {100 * budget: f"{budget:.0%}" for budget in found.budgets}
    along = "labels to fine-tune with"
    over = [line for method in found.methods if (line := line_of(found, method, found.gained)).points]
    return plot(
        [
            Panel(
                lines=[line_of(found, method, found.tuned) for method in found.methods],
                along=along,
                up="test accuracy [%]",
                log=True,
                ticks=ticks,
            ),
            Panel(lines=over, along=along, up="over training from scratch [points]", log=True, ticks=ticks),
        ]
    )


def line_of(found: Found, method: str, value: Callable[[str, float], Spread | None]) -> Line:
    family, stroke = LOOKS.get(method, (NAMES[method], "solid"))
    points = [
        Point(x=100 * budget, y=spread) for budget in found.budgets if (spread := value(method, budget)) is not None
    ]
    hollow = method in ("masked-small", "masked-pixels")
    return Line(name=NAMES[method], family=family, points=points, stroke=stroke, hollow=hollow)


STUDY: Final = Study(
    name="selfsup",
    title="Pre-training from images alone, by the labels that there are",
    anchor="4.6, B.1.2",
    cells=cells,
    conclude=conclude,
)
