"""`vitrail models` and `vitrail trace`: networks by name and their shapes."""

import json
import re
from collections.abc import Sequence
from typing import Final

from vitrail.checkpoint.known_weights import PUBLIC, PublicWeights, find_public_weights
from vitrail.cli.options.look import ModelsOptions, TraceOptions
from vitrail.core.console import format_giga, format_millions, print_table
from vitrail.core.errors import ConfigError, UnknownName, unknown_name
from vitrail.core.text import format_size
from vitrail.models.families import WEIGHT_FAMILIES
from vitrail.models.family import CostStep, ModelConfig, sum_steps
from vitrail.models.zoo import SLUGS, ZOO, list_models, matches, model_config, resolve_name, slug

FAMILY_OF: Final = {name: family.name for family in WEIGHT_FAMILIES.values() for name in family.networks}


def run_models(options: ModelsOptions) -> int:
    if options.pin:
        return pin_weights(options.pin)
    if options.verify:
        return verify_weights(as_json=options.json)
    if options.weights:
        return list_weights(options.pattern, as_json=options.json)
    names = list_models(options.pattern)
    if not names:
        raise unknown_name("model", options.pattern, [*ZOO, *SLUGS])
    if options.json:
        for name in names:
            print(json.dumps(model_record(name, options.classes)))
        return 0
    for sizes in ((224, 384), (32, 64)):
        rows = [model_row(name, sizes, options.classes) for name in names if table_sizes(name) == sizes]
        if rows:
            small, large = sizes
            heads = [f"tokens {small}", f"GMACs {small}", f"tokens {large}", f"GMACs {large}"]
            print_table(["network", "name", "parameters", *heads], rows, left=2)
    if any("/14" in name and name not in FAMILY_OF for name in names):
        print("Patch 14 does not divide 384: those columns are at 378.")
    if rows := group_rows(names, options.classes):
        print_table(["network", "name", "parameters", "image", "tokens", "GMACs"], rows, left=2)
    print(f"{len(names)} networks; parameters with {options.classes} classes at the smaller size.")
    return 0


def group_rows(names: Sequence[str], classes: int) -> list[list[str]]:
    """Rows for the networks of weight families, each at its own size, with an empty row between families."""
    rows: list[list[str]] = []
    for family in WEIGHT_FAMILIES.values():
        group = [model_row(name, (ZOO[name].image[0],), classes) for name in names if name in family.networks]
        rows += [[""], *group] if rows and group else group
    return rows


def list_weights(pattern: str, *, as_json: bool) -> int:
    """Lists the public weights whose name, network or family matches, in one table per family and licence."""
    known = [entry for entry in PUBLIC if matches(pattern, entry.name, entry.network, entry.family)]
    if not known and (names := list_models(pattern)):
        raise UnknownName(f"there are no public weights of {', '.join(names)}")
    if not known:
        raise unknown_name("network or family", pattern, [*SLUGS, *WEIGHT_FAMILIES])
    if as_json:
        keys = ("family", "repo", "also", "image", "classes", "parameters", "licence", "access", "terms", "unsure")
        for entry in known:
            print(json.dumps({"weights": entry.name, **{key: getattr(entry, key) for key in keys}}))
        return 0
    groups: dict[tuple[str, str, str], list[PublicWeights]] = {}
    for entry in known:
        groups.setdefault((entry.family, entry.licence, entry.access), []).append(entry)
    for (family, licence, access), group in groups.items():
        heads = ["weights", "image", "classes", "parameters"]
        heads += ["unsure"] if any(entry.unsure for entry in group) else []
        rows = [weights_row(entry)[: len(heads)] for entry in group]
        print_table(heads, rows, title=f"{family} ({WEIGHT_FAMILIES[family].year}), {licence}: {access}")
    for licence, terms in {entry.licence: entry.terms for entry in known if entry.terms}.items():
        print(f"{licence}: {terms}")
    if any(entry.unsure for entry in known):
        print("unsure: values of a row that could not be checked against its hub page.")
    print(f"{len(known)} public weights; a name works wherever weights are expected.")
    return 0


def weights_row(entry: PublicWeights) -> list[str]:
    classes = f"{entry.classes:,}" if entry.classes else "-"
    return [entry.name, str(entry.image), classes, format_millions(entry.parameters), entry.unsure]


def pin_weights(texts: Sequence[str]) -> int:
    from vitrail.checkpoint import download_weights as pins

    for text in texts:
        name, _, tag = text.partition(":")
        if not tag:
            raise ConfigError(f"--pin {text}: public weights are written NAME:TAG, as in vit_b_16:augreg_in21k")
        entry = find_public_weights(slug(resolve_name(name)), tag)
        print(f"{text}  sha256 {pins.pin(entry)}")
    print(f"pinned in {pins.pins_file()}")
    return 0


def verify_weights(*, as_json: bool) -> int:
    """Checks cached weights against their checksums; returns 1 if a file has changed."""
    from vitrail.checkpoint import download_weights as pins

    found = pins.verify()
    if as_json:
        for each in found:
            named = {"weights": f"{each.entry.model}:{each.entry.tag}", "file": str(each.path)}
            print(json.dumps({**named, "sha256": each.sha256, "state": each.state}))
    elif found:
        rows = [[f"{each.entry.model}:{each.entry.tag}", each.state, each.sha256[:16]] for each in found]
        print_table(["weights", "state", "sha256 begins"], rows, left=3)
    if not as_json:
        print(f"{len(found)} public weight files in the cache; pins are in {pins.pins_file()}")
    return int(any(each.state == "changed" for each in found))


def table_sizes(name: str) -> tuple[int, ...]:
    """The image sizes in a network's row: its own if it belongs to a weight family, small ones if it is made for small
    images, else the paper's two."""
    if name in FAMILY_OF:
        return (ZOO[name].image[0],)
    return (32, 64) if ZOO[name].image == (32, 32) else (224, 384)


def config_at(name: str, size: int, classes: int) -> ModelConfig:
    """The config at an image size, rounded down to a multiple of the patch."""
    side = ZOO[name].size_step[0]
    return model_config(name, image_size=size - size % side, classes=classes)


def model_row(name: str, sizes: tuple[int, ...], classes: int) -> list[str]:
    configs = [config_at(name, size, classes) for size in sizes]
    pairs = [(f"{config.tokens:,}" if config.tokens else "-", format_giga(config.macs)) for config in configs]
    own = [str(sizes[0])] if len(sizes) == 1 else []
    return [
        name,
        slug(name),
        format_millions(configs[0].parameters),
        *own,
        *(cell for cells in pairs for cell in cells),
    ]


def model_record(name: str, classes: int) -> dict[str, object]:
    configs = {str(size): config_at(name, size, classes) for size in table_sizes(name)}
    keys = ("image", "parameters", "tokens", "macs")
    sizes = {size: {key: getattr(config, key) for key in keys} for size, config in configs.items()}
    family = {"family": FAMILY_OF[name]} if name in FAMILY_OF else {}
    return {"network": name, "name": slug(name), **family, **sizes}


def run_trace(options: TraceOptions) -> int:
    config = model_config(options.model, image_size=options.image_size, classes=options.classes)
    steps = list(config.walk())
    shown = steps if options.all else fold_blocks(steps)
    rows = [
        [step.name, "x".join(map(str, step.shape)), *(f"{n:,}" if n else "" for n in (step.params, step.macs))]
        for step in [*shown, sum_steps(steps)]
    ]
    title = f"{resolve_name(options.model)} at {format_size(config.image)}"
    print_table(["step", "shape", "parameters", "MACs"], rows, title=title, left=2)
    return 0


def fold_blocks(steps: list[CostStep]) -> list[CostStep]:
    """Shows the first block of each kind in full, and the other blocks of its kind in one line."""
    blocks: dict[str, list[CostStep]] = {}
    for step in steps:
        if found := re.match(r"block (\d+): ", step.name):
            blocks.setdefault(found[1], []).append(step)
    kinds: dict[object, list[str]] = {}
    for number, found in blocks.items():
        alike = tuple((step.name.partition(": ")[2], step.shape, step.params, step.macs) for step in found)
        kinds.setdefault(alike, []).append(number)
    if len(blocks) < 3 or len(kinds) == len(blocks):
        return steps
    shown = [step for numbers in kinds.values() for step in blocks[numbers[0]]]
    for first, *others in kinds.values():
        if others:
            total = sum_steps(step for number in others for step in blocks[number])
            name = f"blocks 2-{others[-1]}: the same" if len(kinds) == 1 else f"{len(others)} more like block {first}"
            shown.append(CostStep(name, total.shape, total.params, total.macs))
    of_blocks = [step for found in blocks.values() for step in found]
    start, end = steps.index(of_blocks[0]), steps.index(of_blocks[-1])
    return [*steps[:start], *shown, *steps[end + 1 :]]
