"""Options of the commands about the installation and the shell."""

from typing import ClassVar, Literal

from vitrail.cli.options.grammar import command_options, option, word


@command_options
class DoctorOptions:
    """Check the installation: versions, devices, threads, extras, caches and the bundled weights.

    Ends with one line: everything is fine, or what to do first. Exit status 1: something that vitrail needs is broken.
    For a bug report use --json; secrets and the name of your home folder are removed."""

    EXAMPLES: ClassVar = ("doctor", "doctor --json > doctor.json")
    json: bool = option(False, help="print everything as one JSON object, for a bug report")


@command_options
class CompletionOptions:
    """Print a script that completes commands, options, recipes, networks, data sets and files as you type.

    The script is self-contained: vitrail does not run while you type. Print it again after an update, and open a new
    shell afterwards; for zsh the folder has to be in fpath before compinit is called."""

    EXAMPLES: ClassVar = (
        "completion bash > ~/.local/share/bash-completion/completions/vitrail",
        "completion zsh > ~/.zfunc/_vitrail",
        "completion fish > ~/.config/fish/completions/vitrail.fish",
    )
    shell: Literal["bash", "zsh", "tcsh", "fish"] = word(help="the shell")
