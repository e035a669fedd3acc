"""`vitrail export` and `vitrail convert`: networks for other runtimes and libraries."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitrail import export
from vitrail.checkpoint.bundle import Bundle, rename_classes
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.weights import replace_head_and_resize
from vitrail.cli.inputs import resolve_class_names
from vitrail.cli.open_data import open_data
from vitrail.cli.options.grammar import pass_options
from vitrail.cli.options.use import ConvertOptions, ExportOptions
from vitrail.cli.progress import bars, on_interrupt, reading
from vitrail.core.console import format_millions, print_table
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_bytes, format_size
from vitrail.evaluation.scoring import choose_split, choose_workers
from vitrail.models.zoo import network_name
from vitrail.tasks.registry import find_task

LIBRARY_ENDINGS = {"hf": "-hf", "timm": "-timm.safetensors", "npz": ".npz", "torchvision": "-torchvision.pth"}
ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2", **LIBRARY_ENDINGS}
NAMED = 3  # unreadable images that are named


def run_export(options: ExportOptions) -> int:
    check_arguments(options)
    out = output_path(options)
    if out.exists() and Path(options.weights).exists() and out.samefile(options.weights):
        raise ConfigError(f"{out} holds the weights themselves; give another --out")
    with reading(options.weights):
        bundle = find_weights(options.weights)
    names = resolve_class_names(options.labels, options.rename, bundle.card.labels, bundle.config.classes)
    if names is not None:
        bundle = rename_classes(bundle, names)
    sizes: dict[str, Any] = {"image_size": options.image_size, "patch": options.patch, "channels": options.channels}
    bundle = replace_head_and_resize(bundle, **sizes)
    size, count = format_size(bundle.config.image), f"{format_millions(bundle.config.parameters)} parameters"
    print(f"{options.weights}: {network_name(bundle.config)}, {count}, {size} px")
    with bars() as progress, on_interrupt(f"{out} was not written; run the same command again"):
        progress(f"exporting to {options.to}, and checking it", 0, None)
        done = export_bundle(options, bundle, out)
    show_export(done)
    return 0


def check_arguments(options: ExportOptions) -> None:
    """Refuses options of one format given with another."""
    given = {"--int8": options.int8, "--with-preprocessing": options.with_preprocessing}
    given |= {"DATA": options.data is not None, "--opset": options.opset != 20}
    strange = [option for option, there in given.items() if there]
    if options.to != "onnx" and strange:
        raise ConfigError(f"{', '.join(strange)} goes with --to onnx, not with --to {options.to}")
    if options.to not in ("onnx", "torch-export") and options.fixed_size:
        raise ConfigError(f"--fixed-size goes with --to onnx or torch-export, not with --to {options.to}")


def output_path(options: ExportOptions) -> Path:
    """--out, or the name of the weights with the format's suffix, in the current folder."""
    if options.out is not None:
        return options.out
    name = Path(options.weights.replace(":", "-")).resolve().name if options.weights else "model"
    for suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin"):
        name = name.removesuffix(suffix)
    return Path(name + (".int8" if options.int8 else "") + ENDINGS[options.to])


def export_bundle(options: ExportOptions, bundle: Bundle, out: Path) -> export.ExportResult:
    match options.to:
        case "onnx":
            checks = {"preprocessing": options.with_preprocessing, "least_agreement": options.agreement}
            how = pass_options(options, export.OnnxOptions, **checks)
            with bars() as progress:
                return export.to_onnx(bundle, out, how, scoring_images=open_images(options, bundle, progress))
        case "torch-export":
            return export.to_torch_export(bundle, out, fixed_size=options.fixed_size)
        case library:
            return export.to_library(bundle, out, library)


def open_images(
    options: ExportOptions, bundle: Bundle, progress: Callable[[str, int, int | None], None]
) -> export.ExportImages | None:
    """Opens the images of DATA. The test split is scored; the training split calibrates int8."""
    if options.data is None:
        return None
    collection = open_data(options.data, download=options.download)
    split, source = choose_split(collection, "test", "val")
    task = find_task(bundle.card.task)
    matched, notes = task.match_targets(collection, split, bundle, by_number=options.by_number)
    for note in notes:
        print(f"note: {note}")
    print(f"{collection.name}@{split}: {len(source):,} images")
    return export.ExportImages(
        source=source if matched is None else matched,
        has_targets=matched is not None,
        calibration=None if split == "train" else collection.splits.get("train"),
        workers=choose_workers() if options.workers < 0 else options.workers,
        progress=progress,
    )


def show_export(done: export.ExportResult) -> None:
    """Prints the path of the export, how it differs from the network, its speed and scores, and how to load it."""
    size = format_bytes(done.bytes)
    if done.plain is not None:
        size += f", {done.bytes / done.plain_bytes:.0%} of the {format_bytes(done.plain_bytes)} in float32"
    print(f"{done.target}: {size}{'; overwrote an existing file' if done.replaced else ''}")
    heads = ["image", "batch", "largest difference", "relative", "same answer"]
    title = f"in {done.report.against}" if done.plain is None else f"int8 in {done.report.against}"
    print_table(heads, done.report.rows(), title=f"{title}, compared with the network")
    if done.plain is not None:
        print(f"the float32 file that it was made from: largest relative difference {done.plain.worst:.1e}")
        if done.scores is None:
            print("these images are synthetic; give DATA to measure what int8 costs on real ones")
    if done.scores is not None:
        show_scores(done)
    if done.pace is not None:
        rates = ", ".join(f"{name} {rate:,.1f}" for name, rate in done.pace.images_per_s.items())
        print(f"images per second at batch {done.pace.batch}, run in turn: {rates}")
    for note in done.notes:
        print(f"note: {note}")
    print(f"load it: {done.use}")


def show_scores(done: export.ExportResult) -> None:
    scores = done.scores
    assert scores is not None
    if scores.agree is not None and scores.agreement is not None:
        whole = scores.agree == int(scores.agree)
        count = f"{scores.agree:,.0f} of {scores.count:,} images" if whole else f"{scores.count:,} images, in part"
        print(f"same answer on {count} ({scores.agreement:.2%})")
    if scores.labelled:
        title, form = scores.criterion.title or scores.criterion.name, ".2%" if scores.criterion.share else ".4f"
        points = f"{100 * scores.difference:+.2f} points" if scores.criterion.share else f"{scores.difference:+.4f}"
        print(f"{title}: network {scores.network:{form}}, export {scores.export:{form}}, difference {points}")
    for line in scores.unread[:NAMED]:
        print(f"note: unreadable: {line}")
    if len(scores.unread) > NAMED:
        print(f"note: and {len(scores.unread) - NAMED:,} more unreadable images")


def run_convert(options: ConvertOptions) -> int:
    given = {"heads": options.heads, "position": options.position, "image": options.image_size}
    facts = {name: value for name, value in given.items() if value is not None}
    dtype = None if options.type is None else getattr(torch, options.type)
    name = lambda bundle: resolve_class_names(options.labels, options.rename, bundle.card.labels, bundle.config.classes)  # noqa: E731
    source, target, force = options.source, options.target, options.unofficial
    done = convert(source, target, options.to, dtype=dtype, unofficial=force, name=name, **facts)
    seal = done.parity
    print(f"{done.source} -> {done.target} ({done.format}), {done.config.parameters:,} parameters")
    if done.inferred is not None:
        print(done.inferred)
    if done.sidecar is not None:
        lost = ", ".join(done.lost_fields)
        print(f"{done.format} cannot hold {lost}: written to {done.sidecar}, keep it with the weights")
    print(f"read back: {seal.identical} of {seal.tensors} tensors identical")
    if seal.reference is None:
        print(f"parity: {seal.why_not}")
    else:
        rows = [[row.place, f"{row.absolute:.2e}", f"{row.relative:.2e}"] for row in seal.rows]
        title = f"against {seal.reference}, one seeded batch of 2"
        print_table(["place", "largest difference", "relative"], rows, title=title)
    return 0 if seal.identical == seal.tensors else 1
