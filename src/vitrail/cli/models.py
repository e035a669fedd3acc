"""What `vitrail models` does."""

import json
from collections.abc import Sequence

from vitrail.cli.options.models import ModelsOptions
from vitrail.core.console import giga, millions, print_table
from vitrail.core.errors import ConfigError, UnknownName, unknown
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import SLUGS, ZOO, list_models, model_config, resolve, slug


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
    from vitrail.checkpoint.public import download_weights as pins
    from vitrail.checkpoint.public import registry

    for text in texts:
        name, _, tag = text.partition(":")
        if not tag:
            raise ConfigError(f"--pin {text}: public weights are written NAME:TAG, as in vit_b_16:augreg_in21k")
        entry = registry.find(slug(resolve(name)), tag)
        print(f"{text}  sha256 {pins.pin(entry)}")
    print(f"pinned in {pins.pins_file()}")
    return 0


def verify_weights(*, as_json: bool) -> int:
    """1 where a file is not what it was pinned or recorded as."""
    from vitrail.checkpoint.public import download_weights as pins

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
    return unknown("model", pattern, [*ZOO, *SLUGS])


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
        millions(small.parameters),
        *(cell for config in (small, large) for cell in (format_tokens(config), giga(config.macs))),
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
