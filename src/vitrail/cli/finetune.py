"""What `vitrail finetune` does."""

from dataclasses import replace

from vitrail.cli import training
from vitrail.cli.options.finetune import FinetuneOptions
from vitrail.core.errors import ConfigError


def run_finetune(options: FinetuneOptions) -> int:
    options = merge_weight_words(options)
    if not options.weights:
        if options.resume is not None:
            return training.run_training(options, None)
        raise ConfigError("which weights? vitrail finetune WEIGHTS DATA: a file, a folder, a run, or NAME:TAG")
    if not options.data and not options.recipe:
        raise ConfigError(
            "which images? vitrail finetune WEIGHTS DATA: a folder with one subfolder per class, or another source"
        )
    return training.run_training(options, training.build_request(options, "finetune", options.weights))


def merge_weight_words(options: FinetuneOptions) -> FinetuneOptions:
    """WEIGHTS DATA, or --from WEIGHTS and DATA in either form."""
    if not options.start:
        return options
    if options.weights and options.data:
        raise ConfigError(f"--from {options.start} and {options.weights} both name weights; leave one out")
    return replace(options, weights=options.start, data=options.data or options.weights)
