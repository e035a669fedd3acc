"""What `vitrail pretrain` does."""

from vitrail.cli import training
from vitrail.cli.options.pretrain import PretrainOptions
from vitrail.core.errors import ConfigError


def run_pretrain(options: PretrainOptions) -> int:
    if not options.recipe:
        if options.resume is not None:
            return training.run_training(options, None)
        raise ConfigError("which recipe? `vitrail recipes` lists them")
    return training.run_training(options, training.build_request(options, "pretrain"))
