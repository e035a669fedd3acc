"""`vitrail cost`: shows what a network costs, and measures its speed on this machine."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.weights import build_network
from vitrail.cli.inputs import single_process
from vitrail.cli.options.look import CostOptions
from vitrail.cli.progress import bars
from vitrail.core.atomic_files import check_writable
from vitrail.core.console import format_giga, format_millions, print_table
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.core.paper_tables import JFT_CLASSES, JFT_IMAGES, jft_epochs, printed_exaflops
from vitrail.core.text import Pair, format_size, pluralise
from vitrail.data.collection import open_collection
from vitrail.data.datasets.catalogue import SETS
from vitrail.distributed.process_group import name_device
from vitrail.evaluation.result import Measure, Result, describe_weights
from vitrail.evaluation.speed import count_paper_macs, tpuv3_core_days, training_flops
from vitrail.models.family import ModelConfig, to_dict
from vitrail.models.inference import choose_precision
from vitrail.models.zoo import SLUGS, ZOO, adapt_config, network_name, resolve_name, slug
from vitrail.optim.config import Optim
from vitrail.recipes.launch import RUNS
from vitrail.report.figure_style import save_figure
from vitrail.studies.paper import inference_speed
from vitrail.studies.paper.inference_speed import NetworkSpeeds, measure_speeds
from vitrail.train import resolve as memory
from vitrail.train.data import find_split

CARDS = (16, 24, 48, 80)  # GB of common GPUs
SECONDS = {"cuda": 120.0, "cpu": 60.0}
EPOCHS = {"imagenet": (300,), "imagenet21k": (90,)}  # Table 3


class CostedNetwork(NamedTuple):
    """A network: the name it was given by, its name in the zoo if it has one, its config, and its weights if any."""

    text: str
    name: str
    config: ModelConfig
    bundle: Bundle | None


class CostedTraining(NamedTuple):
    """A named training: its images and epochs, and the network with its image size and number of classes."""

    name: str
    images: int
    epochs: float
    classes: int | None  # of the data, if known
    config: ModelConfig

    @property
    def exaflops(self) -> float:
        return training_flops(count_paper_macs(self.config), self.images * self.epochs) / 1e18


def run_cost(options: CostOptions) -> int:
    # 0 stands for "not given".
    for option, value in (("--images", options.images), ("--epochs", options.epochs), ("--seconds", options.seconds)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{option} {value:g} must be above 0 and finite")
    if options.batch and min(options.batch) < 1:
        raise ConfigError(f"--batch {min(options.batch)} must be at least 1")
    networks = [find_network(text) for text in options.models]
    trainings = [plan_trainings(one, options) for one in networks]
    show_size(networks, options)
    show_training(networks, trainings, options)
    show_memory(networks, options)
    found, how = list[NetworkSpeeds](), dict[str, Any]()
    names = [slug(one.name) for one in networks]
    out = options.out
    if options.measure:
        out = out or RUNS / f"cost-{names[0]}"
        check_writable(out / "speed.png")
        found, how = measure_speed(networks, options)
        try:
            png, svg = save_figure(inference_speed.draw_figure(found, how["device"]), out / "speed")
            print(f"figure: {png}, {svg.name}")
        except ConfigError as error:  # without matplotlib
            print(f"no figure: {error}")
    if out is None:
        return 0
    for at, name in enumerate(names):
        number = f"-{names[: at + 1].count(name)}" if names.count(name) > 1 else ""
        path = out / f"{name}{number}.json"
        cost_result(networks[at], trainings[at], options, found[at] if found else None, how).write(path)
        print(f"result: {path}")
    return 0


def find_network(text: str) -> CostedNetwork:
    """Finds a network by its name in the zoo, else weights by path or NAME:TAG."""
    if not Path(text).exists() and ":" not in text:
        try:
            name = resolve_name(text)
        except UnknownName as error:
            raise UnknownName(f"{error}; and there is no weight file {text}") from None
        return CostedNetwork(text, name, ZOO[name], None)
    if text in ZOO or text in SLUGS:
        raise ConfigError(f"{text!r} is both a network and a path; write ./{text} for the path")
    bundle = find_weights(text)
    title = network_name(bundle.config)
    return CostedNetwork(text, title if title in ZOO else Path(text).stem, bundle.config, bundle)


def plan_trainings(one: CostedNetwork, options: CostOptions) -> list[CostedTraining]:
    """The requested trainings, by default the paper's."""
    size = options.image_size[0] if options.image_size else None

    def plan(name: str, images: int, epochs: float, classes: int | None) -> CostedTraining:
        outputs = options.classes if options.classes is not None else classes or one.config.classes
        config = adapt_config(one.config, image_size=size, classes=outputs)
        return CostedTraining(name, images, epochs, classes, config)

    if options.images and options.data:
        raise ConfigError("--images and --data both set the number of images; give one of them")
    if options.images:
        if not options.epochs:
            raise ConfigError(f"--images {options.images:,} needs a number of passes over them; give --epochs E")
        return [plan("yours", options.images, options.epochs, None)]
    if options.epochs and not options.data:
        raise ConfigError(f"--epochs {options.epochs:g} needs training data; give --data NAME or --images N")
    found: list[CostedTraining] = []
    for name in (options.data,) if options.data else ("imagenet", "imagenet21k", "jft"):
        images, classes = count_training_images(name)
        usual = jft_epochs(one.name) if name == "jft" else EPOCHS.get(name, ())
        if not options.epochs and not usual:
            raise ConfigError(f"--data {name} needs a number of epochs; give --epochs E")
        lengths = (options.epochs,) if options.epochs else usual
        found += [plan(name, images, epochs, classes) for epochs in lengths]
    return found


def count_training_images(name: str) -> tuple[int, int | None]:
    """The number of training images and classes; for a named set as published, so its files are not needed."""
    if name == "jft":
        return JFT_IMAGES, JFT_CLASSES
    if name in SETS:
        return SETS[name].splits["train"], SETS[name].classes
    collection = open_collection(name)
    few = name.startswith("vtab/") and "trainval1000" in collection.splits
    return len(find_split(collection, "trainval1000" if few else "train")), len(collection.classes) or None


def sizes_to_cost(one: CostedNetwork, options: CostOptions) -> list[Pair | int]:
    """The requested sizes; by default the network's own and, for one of the zoo, the paper's size for fine-tuning."""
    if options.image_size:
        return list(options.image_size)
    if one.bundle is not None or one.config.image != (224, 224):
        return [one.config.image]
    return [224, 384 - 384 % one.config.size_step[0]]


def show_size(networks: list[CostedNetwork], options: CostOptions) -> None:
    rows: list[list[str]] = []
    for one in networks:
        for size in sizes_to_cost(one, options):
            config = adapt_config(one.config, image_size=size, classes=options.classes)
            tokens = f"{config.tokens:,}" if config.tokens else "-"
            cells = [format_size(config.image), f"{config.classes:,}", tokens]
            cells += [format_millions(config.parameters), format_giga(config.macs)]
            rows.append([one.name if one.bundle is None else f"{one.name} ({one.text})", *cells])
    print_table(("network", "image", "classes", "tokens", "parameters", "GMACs"), rows, left=2)


def show_training(networks: list[CostedNetwork], trainings: list[list[CostedTraining]], options: CostOptions) -> None:
    """Prints exaFLOPs and core-days, next to the value of Table 6 for the same network, data, size and head."""
    rows: list[list[str]] = []
    for one, each in zip(networks, trainings, strict=True):
        for training in each:
            config, flops = training.config, training.exaflops
            same = training.name == "jft" and config.image == (224, 224) and options.classes in (None, JFT_CLASSES)
            printed = printed_exaflops(one.name, training.epochs) if same else None
            cells = [f"{training.images:,}", f"{training.epochs:g}", f"{config.classes:,}", format_amount(flops)]
            cells += ["" if printed is None else f"{printed:,g}", format_amount(tpuv3_core_days(flops * 1e18))]
            rows.append([one.name, format_size(config.image), training.name, *cells])
    heads = ("network", "image", "data", "images", "epochs", "classes", "exaFLOPs", "Table 6", "TPUv3 core-days")
    print_table(heads, rows, left=3, title="Training")
    print("exaFLOPs are 6 x MACs x images x epochs, as in the paper; core-days assume the speed of its ViT-L/16.")
    if any(one.config.padding_macs for one in networks):
        print("As in the paper, exaFLOPs leave out what a convolution multiplies with its padding; GMACs count it.")


def format_amount(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def show_memory(networks: list[CostedNetwork], options: CostOptions) -> None:
    """Prints the memory of training, from the formulas that choose a run's micro-batch."""
    rows: list[list[str]] = []
    for one in networks:
        size = options.image_size[0] if options.image_size else None
        config = adapt_config(one.config, image_size=size, classes=options.classes)
        state = memory.state_bytes(config.parameters, Optim(), low=True, average=False)
        for recompute in (False, True) if config.can_recompute else (False,):
            each = memory.image_bytes(config, low=True, recompute=recompute)
            room = [card * 1e9 - memory.CUDA_OWN - state for card in CARDS]
            fits = [max(int(left * memory.USED) // each, 0) for left in room]
            cells = [f"{state / 1e9:,.2f} GB", f"{each / 1e6:,.1f} MB", *(f"{count:,}" for count in fits)]
            rows.append([one.name, format_size(config.image), "recomputed" if recompute else "kept", *cells])
    heads = ("network", "image", "activations", "weights, moments", "an image", *(f"in {card} GB" for card in CARDS))
    title = "Training memory, and how many images fit at once (estimated for AdamW, bfloat16 with float32 masters)"
    print_table(heads, rows, left=3, title=title)


def measure_speed(networks: list[CostedNetwork], options: CostOptions) -> tuple[list[NetworkSpeeds], dict[str, Any]]:
    """Runs every network at every size, and prints a line for each. Also returns the settings, for the results."""
    found: list[NetworkSpeeds] = []
    with single_process(options.device) as place, bars() as progress:
        seconds = options.seconds or SECONDS.get(place.type, SECONDS["cpu"])
        precision = choose_precision(options.precision, place)
        threads = f" ({pluralise(torch.get_num_threads(), 'thread')})" if place.type == "cpu" else ""
        device = f"{name_device(place)}{threads}"
        how: dict[str, Any] = {"precision": precision, "seconds": seconds, "device": device}
        for at, one in enumerate(networks):
            config, room = adapt_config(one.config, classes=options.classes), memory.free_bytes(place)
            bundle = one.bundle if one.bundle is not None else inference_speed.draw_random_weights(config)
            sizes = options.image_size or inference_speed.choose_sizes(config, place)
            tell = lambda text, at=at: progress(text, at, len(networks))  # noqa: E731
            settings: dict[str, Any] = {**how, "device": place, "batches": options.batch, "room": room, "tell": tell}
            found.append(measure_speeds(one.name, bundle, sizes, **settings))
    show_speed(found, networks, f"Inference on {device}, {precision}")
    return found, how


def show_speed(found: list[NetworkSpeeds], networks: list[CostedNetwork], title: str) -> None:
    rows: list[list[str]] = []
    for one, network in zip(found, networks, strict=True):
        for size, speed in one.speeds.items():
            best, first = speed.best, speed.points[0]
            work = 2 * adapt_config(network.config, image_size=size).macs * best.images_per_s / 1e12
            held = "?" if best.memory is None else f"{best.memory / 1e6:,.0f} MB"
            largest = "?" if speed.largest is None else f"{'' if speed.tried else 'about '}{speed.largest:,}"
            latency = f"{format_amount(first.seconds * 1e3)} ms at {first.batch}"
            cells = [f"{best.images_per_s:,.4g}", str(best.batch), latency, held, f"{work:,.3g}", largest]
            rows.append([one.name, format_size(size), *cells, speed.stopped])
    speeds = ("img/s", "at batch", "latency", "memory", "TFLOP/s", "largest batch", "ended by")
    print_table(("network", "image", *speeds), rows, left=2, title=title)


def cost_result(
    one: CostedNetwork,
    trainings: list[CostedTraining],
    options: CostOptions,
    found: NetworkSpeeds | None,
    how: dict[str, Any],
) -> Result:
    """All costs as a result; `how` are the settings of the measurement. A network by name has no weights, so no
    hash."""
    config = adapt_config(one.config, classes=options.classes)
    facts = {"name": one.text, "hash": None, "image": list(config.image), "parameters": config.parameters}
    measures = [Measure(name="parameters", value=config.parameters, unit="count")]
    for size in sizes_to_cost(one, options):
        sized = adapt_config(config, image_size=size)
        measures.append(Measure(name=f"MACs {format_size(sized.image)}", value=sized.macs, unit="count"))
    for training in trainings:
        name = f"exaFLOPs {training.name}, {training.epochs:g} epochs"
        measures.append(Measure(name=name, value=training.exaflops, unit="number"))
    details: dict[str, Any] = {}
    for pair, speed in found.speeds.items() if found else ():
        size, best = format_size(pair), speed.best
        measures.append(Measure(name=f"img/s {size}", value=best.images_per_s, count=best.batch, unit="img/s"))
        if best.memory is not None:
            measures.append(Measure(name=f"memory {size}", value=best.memory, count=best.batch, unit="bytes"))
        if speed.largest is not None:
            measures.append(Measure(name=f"largest batch {size}", value=speed.largest, unit="count"))
        keys = ("batch", "seconds", "passes", "memory")
        points = [{key: getattr(point, key) for key in keys} for point in speed.points]
        details[size] = {"points": points, "tried": speed.tried, "ended by": speed.stopped}
    facts = facts if one.bundle is None else describe_weights(one.text, build_network(one.bundle))
    data = {"trainings": [dict(zip(training._fields[:4], training, strict=False)) for training in trainings]}
    config, measures = {"network": to_dict(config), **how}, tuple(measures)
    return Result(kind="cost", weights=facts, data=data, measures=measures, config=config, details=details)
