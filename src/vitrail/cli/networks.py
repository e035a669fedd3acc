"""`vitrail models` and `vitrail trace`: networks by name and their shapes."""

import json
from collections.abc import Sequence

from vitrail.cli.options.look import ModelsOptions, TraceOptions
from vitrail.core.console import format_giga, format_millions, print_table
from vitrail.core.errors import ConfigError, UnknownName, unknown_name
from vitrail.models.family import CostStep, ModelConfig, list_steps, sum_steps
from vitrail.models.zoo import SLUGS, ZOO, list_models, model_config, resolve_name, slug


def run_models(options: ModelsOptions) -> int:
    if options.pin:
        return pin_weights(options.pin)
    if options.verify:
        return verify_weights(as_json=options.json)
    names = list_models(options.pattern)
    if not names:
        raise no_such_model(options.pattern)
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
    if any("/14" in name for name in names):
        print("Patch 14 does not divide 384: those columns are at 378.")
    print(f"{len(names)} networks; parameters with {options.classes} classes at the smaller size.")
    return 0


def pin_weights(texts: Sequence[str]) -> int:
    from vitrail.checkpoint import download_weights as pins
    from vitrail.checkpoint import known_weights as registry

    for text in texts:
        name, _, tag = text.partition(":")
        if not tag:
            raise ConfigError(f"--pin {text}: public weights are written NAME:TAG, as in vit_b_16:augreg_in21k")
        entry = registry.find_public_weights(slug(resolve_name(name)), tag)
        print(f"{text}  sha256 {pins.pin(entry)}")
    print(f"pinned in {pins.pins_file()}")
    return 0


def verify_weights(*, as_json: bool) -> int:
    """1 where a file is not what it was pinned or recorded as."""
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


def no_such_model(pattern: str) -> UnknownName:
    return unknown_name("model", pattern, [*ZOO, *SLUGS])


def table_sizes(name: str) -> tuple[int, int]:
    """The two image sizes of a network's row: the paper's, or small ones for networks made for small images."""
    return (32, 64) if ZOO[name].image == (32, 32) else (224, 384)


def config_at(name: str, size: int, classes: int) -> ModelConfig:
    """The config at an image size, or at the next smaller one that the patch divides."""
    side = ZOO[name].size_step[0]
    return model_config(name, image_size=size - size % side, classes=classes)


def model_row(name: str, sizes: tuple[int, int], classes: int) -> list[str]:
    small, large = (config_at(name, size, classes) for size in sizes)
    return [
        name,
        slug(name),
        format_millions(small.parameters),
        *(cell for config in (small, large) for cell in (format_tokens(config), format_giga(config.macs))),
    ]


def format_tokens(config: ModelConfig) -> str:
    """A convolutional network has no sequence."""
    return f"{config.tokens:,}" if config.tokens else "-"


def model_record(name: str, classes: int) -> dict[str, object]:
    out: dict[str, object] = {"network": name, "name": slug(name)}
    for size in table_sizes(name):
        config = config_at(name, size, classes)
        out[str(size)] = {
            "image": config.image,
            "parameters": config.parameters,
            "tokens": config.tokens,
            "macs": config.macs,
        }
    return out


def run_trace(options: TraceOptions) -> int:
    config = model_config(options.model, image_size=options.image_size, classes=options.classes)
    steps = list_steps(config)
    shown = steps if options.all else fold_blocks(steps)
    rows = [step_row(step) for step in [*shown, sum_steps(steps)]]
    height, width = config.image
    print_table(
        ["step", "shape", "parameters", "MACs"],
        rows,
        title=f"{resolve_name(options.model)} at {height}x{width}",
        left=2,
    )
    return 0


def step_row(step: CostStep) -> list[str]:
    shape = "x".join(str(n) for n in step.shape)
    return [step.name, shape, f"{step.params:,}" if step.params else "", f"{step.macs:,}" if step.macs else ""]


def fold_blocks(steps: list[CostStep]) -> list[CostStep]:
    """The walk with blocks 2 to L-1 of an encoder in one line, where they are alike."""
    first = [step for step in steps if step.name.startswith("block 1:")]
    middle = [step for step in steps if step.name.startswith("block ") and not step.name.startswith("block 1:")]
    if len(middle) <= len(first):
        return steps
    start, end = steps.index(middle[0]), steps.index(middle[-1])
    last = middle[-1].name.split(":")[0].removeprefix("block ")
    total = sum_steps(middle)
    return [
        *steps[:start],
        CostStep(f"blocks 2-{last}: the same", total.shape, total.params, total.macs),
        *steps[end + 1 :],
    ]
