"""Commands, options and the words that may follow them, written down as a completion script of bash, zsh or fish."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from vitrail import __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """What may stand in one place: words that are known, and perhaps a path."""

    words: tuple[str, ...] = ()
    files: bool = False
    many: bool = False  # more than one may follow
    name: str = "value"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    flags: tuple[str, ...]
    help: str
    value: Value | None  # none where nothing follows
    again: bool = False  # may be given several times


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """A command as a shell has to know it."""

    name: str
    help: str
    options: tuple[Option, ...]
    values: tuple[Value, ...]  # those without a flag, in their order

    @property
    def flags(self) -> list[str]:
        return [flag for option in self.options for flag in option.flags]


def heading(shell: str) -> str:
    return f"# Completion of vitrail {__version__}, made by: vitrail completion {shell}\n"


def firsts(commands: Sequence[Completed]) -> list[Completed]:
    """The commands of one word."""
    return [command for command in commands if " " not in command.name]


def seconds(commands: Sequence[Completed]) -> dict[str, list[Completed]]:
    """The commands of two words, by the first: "data pack"."""
    found: dict[str, list[Completed]] = {}
    for command in commands:
        first, _, second = command.name.partition(" ")
        if second:
            found.setdefault(first, []).append(command)
    return found


def merged(values: Iterable[Value]) -> Value:
    """What may stand in any of several places."""
    values = list(values)
    words = dict.fromkeys(word for value in values for word in value.words)
    return Value(words=tuple(words), files=any(value.files for value in values))


# bash

BASH: Final = """
# Offers the words in $1 that go on as $cur does, and with $2 paths as well. Where nothing is found, readline looks for
# paths by itself, which knows all about quoting; where no path is wanted it is told not to.
_vitrail_offer() {
    local word
    for word in $1; do
        [[ $word == "$cur"* ]] && COMPREPLY+=("$word")
    done
    if [[ -z $2 ]]; then
        compopt +o default 2>/dev/null
    elif (( ${#COMPREPLY[@]} )); then
        compopt -o filenames 2>/dev/null
        while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$cur")
    fi
    return 0
}

_vitrail() {
    local IFS=$' \\t\\n' cur=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} option="" behind=0 many="" i
    local words="" files="" flags=""
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        _vitrail_offer "@commands@ --help --version"
        return
    fi
    if (( COMP_CWORD > 2 )); then
        case "$command ${COMP_WORDS[2]}" in
        @pairs@) command="$command ${COMP_WORDS[2]}" ;;
        esac
    fi
    # bash makes a word of the = in --option=value. The option that a word belongs to may stand further off, where it
    # takes several.
    [[ $cur == "=" ]] && cur=""
    for (( i = COMP_CWORD - 1; i > 1; i-- )); do
        [[ ${COMP_WORDS[i]} == "=" ]] && continue
        [[ ${COMP_WORDS[i]} == -?* ]] && { option=${COMP_WORDS[i]}; break; }
        behind=$(( behind + 1 ))
    done
    case "$command $option" in
@options@
    *) option="" ;;
    esac
    if [[ -n $option && $cur != -* ]] && (( behind == 0 )) || [[ -n $option && -n $many && $cur != -* ]]; then
        _vitrail_offer "$words" "$files"
        return
    fi
    words="" files=""
    case $command in
@cases@
    esac
    if [[ $cur == -* ]]; then
        _vitrail_offer "$flags"
    else
        _vitrail_offer "$words" "$files"
    fi
}

complete -o default -F _vitrail vitrail
"""


def bash(commands: Sequence[Completed]) -> str:
    options: list[str] = []
    cases: list[str] = []
    after = seconds(commands)
    for command in commands:
        for option in command.options:
            if option.value is not None:
                pattern = "|".join(f'"{command.name} {flag}"' for flag in option.flags)
                options.append(f"    {pattern}) {settings(option.value)} ;;")
        more = " ".join(other.name.split()[1] for other in after.get(command.name, []))
        steps = [f'flags="{" ".join(command.flags)}" {settings(merged(command.values))}']
        if more:
            steps.append(f'(( COMP_CWORD == 2 )) && words="{more} $words"')
        cases.append(f'    "{command.name}") {"; ".join(steps)} ;;')
    return heading("bash") + filled(
        BASH,
        commands=" ".join(command.name for command in firsts(commands)),
        pairs=paired(after),
        options="\n".join(options),
        cases="\n".join(cases),
    )


def paired(after: dict[str, list[Completed]]) -> str:
    """A pattern of bash and zsh for the commands of two words."""
    return "|".join(f'"{command.name}"' for pair in after.values() for command in pair)


def filled(template: str, *, commands: str, pairs: str, options: str = "", cases: str) -> str:
    for mark, text in {"commands": commands, "pairs": pairs, "options": options, "cases": cases}.items():
        template = template.replace(f"@{mark}@", text)
    return template


def settings(value: Value) -> str:
    return f'words="{" ".join(value.words)}" files={1 if value.files else ""} many={1 if value.many else ""}'


# zsh

ZSH: Final = """
_vitrail() {
    local -a commands
    if (( CURRENT == 2 )); then
        commands=(
@commands@
        )
        _describe -t commands 'command of vitrail' commands
        _arguments '--help[show this help]' '--version[show the version]'
        return
    fi
    shift words
    (( CURRENT-- ))
    local command=$words[1]
    if (( CURRENT > 2 )); then
        case "$command $words[2]" in
        @pairs@)
            command="$command $words[2]"
            shift words
            (( CURRENT-- ))
            ;;
        esac
    fi
    case $command in
@cases@
    esac
}
"""


Helpers = dict[tuple[tuple[str, ...], bool], str]  # functions that offer words and perhaps paths, by these


def zsh(commands: Sequence[Completed]) -> str:
    after = seconds(commands)
    helpers: Helpers = {}
    cases: list[str] = []
    for command in commands:
        specs = [spec for option in command.options for spec in zsh_option(option, helpers)]
        specs += zsh_values(command.values, helpers)
        lines = ["        _arguments -S \\\n            " + " \\\n            ".join(specs)]
        if command.name in after:
            names = " ".join(described(other.name.split()[1], other.help) for other in after[command.name])
            lines.insert(0, f"        (( CURRENT == 2 )) && commands=({names}) && _describe command commands")
        cases.append("\n".join([f'    "{command.name}")', *lines, "        ;;"]))
    listed = "\n".join(f"            {described(command.name, command.help)}" for command in firsts(commands))
    body = filled(ZSH, commands=listed, pairs=paired(after), cases="\n".join(cases))
    functions = [f"\n{name}() {{ {zsh_action(words, files)} }}" for (words, files), name in helpers.items()]
    # In a folder of fpath the file is the body of the function, read when that is first called; it may be sourced, too.
    last = 'if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _vitrail "$@"; else compdef _vitrail vitrail; fi\n'
    return "#compdef vitrail\n" + heading("zsh") + "\n".join(functions) + "\n" + body + "\n" + last


def described(name: str, text: str) -> str:
    text = text.replace(":", "\\:")
    return zsh_quoted(f"{name}:{text}")


def zsh_action(words: tuple[str, ...], files: bool) -> str:
    names = f"'names:name:({' '.join(words)})'"
    if words and files:
        return f"_alternative {names} 'files:file:_files'"
    return f"_alternative {names}" if words else "_files" if files else "_message -e value"


def zsh_function(value: Value, helpers: Helpers) -> str:
    """The function that offers such a value, the same for the same ones."""
    return helpers.setdefault((value.words, value.files), f"_vitrail_value_{len(helpers) + 1}")


def zsh_option(option: Option, helpers: Helpers) -> list[str]:
    text = option.help.replace("\\", "").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    specs: list[str] = []
    for flag in option.flags:
        again = "*" if option.again else "(" + " ".join(option.flags) + ")"
        if option.value is None:
            specs.append(zsh_quoted(f"{again}{flag}[{text}]"))
            continue
        name = option.value.name.replace(":", "").replace("[", "").replace("]", "")
        several = "*-*:" if option.value.many else ""
        equals = "" if option.value.many or not flag.startswith("--") else "="
        specs.append(zsh_quoted(f"{again}{flag}{equals}[{text}]:{several}{name}:{zsh_function(option.value, helpers)}"))
    return specs


def zsh_values(values: Sequence[Value], helpers: Helpers) -> list[str]:
    return [
        zsh_quoted(f"{'*' if value.many else at}:{value.name.replace(':', '')}:{zsh_function(value, helpers)}")
        for at, value in enumerate(values, start=1)
    ]


def zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# fish

FISH: Final = """
# Whether the command of the line is $argv; without it, whether there is none yet.
function __vitrail_is
    set -l words (commandline -opc)
    set -e words[1]
    if contains -- "$words[1..2]" @pairs@
        test "$words[1..2]" = "$argv"
    else
        test "$words[1]" = "$argv"
    end
end

# Whether the word that is typed comes right behind the first of a pair of words.
function __vitrail_after
    set -l words (commandline -opc)
    test (count $words) -eq 2 -a "$words[2]" = "$argv"
end

complete -c vitrail -f
complete -c vitrail -n '__vitrail_is ""' -l version -d 'show the version'
complete -c vitrail -n '__vitrail_is ""' -s h -l help -d 'show this help'
"""


def fish(commands: Sequence[Completed]) -> str:
    after = seconds(commands)
    pairs = " ".join(fish_quoted(command.name) for pair in after.values() for command in pair)
    lines = [
        f"complete -c vitrail -n '__vitrail_is \"\"' -a {command.name} -d {fish_quoted(command.help)}"
        for command in firsts(commands)
    ]
    for first, pair in after.items():
        start = f"complete -c vitrail -n '__vitrail_after {first}'"
        lines += [f"{start} -a {command.name.split()[1]} -d {fish_quoted(command.help)}" for command in pair]
    for command in commands:
        start = f"complete -c vitrail -n '__vitrail_is {command.name}'"
        for option in command.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            lines.append(f"{start} {flags}{fish_value(option.value)} -d {fish_quoted(option.help)}")
        value = merged(command.values)
        if value.words:
            lines.append(f"{start} -a {fish_quoted(' '.join(value.words))}")
        if value.files:
            lines.append(f"{start} -F")
    return heading("fish") + FISH.replace("@pairs@", pairs) + "\n".join(lines) + "\n"


def fish_value(value: Value | None) -> str:
    if value is None:
        return ""
    words = f" -a {fish_quoted(' '.join(value.words))}" if value.words else ""
    return f" -r -F{words}" if value.files else f" -x{words}"


def fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: Final[dict[str, Callable[[Sequence[Completed]], str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
