"""Shell completion: prints the script that installs it, and answers what may come next.

The script calls the hidden verb `--complete` with the words so far. Candidates come from the verbs,
the options of the verb, run ids, and the config (`config.complete`, which imports no Hydra).
"""

from __future__ import annotations

from collections.abc import Sequence

from air_hpc.cli.main import VERBS
from air_hpc.cli.options import Option
from air_hpc.cli.output import say
from air_hpc.errors import EXIT_OK, BadInput

_BASH = r"""
# Completion of air_hpc for bash. Keep it: add this line to ~/.bashrc
#   eval "$(air_hpc --shell-completion install=bash)"
_air_hpc_complete() {
    local words=("${COMP_WORDS[@]:1:COMP_CWORD}") line="${COMP_LINE:0:COMP_POINT}" program=(air_hpc)
    # bash splits words at '=' and ':': take the words of the line itself.
    read -ra words <<< "$line"
    if [[ "$line" == *[[:space:]] ]]; then words+=(""); fi
    if [[ "${words[1]:-}" == "-m" && "${words[2]:-}" == "air_hpc" ]]; then
        program=("${words[0]}" -m air_hpc)
        words=("${words[@]:3}")
    elif [[ "${words[0]##*/}" == python* ]]; then
        compopt -o default
        return
    else
        program=("${words[0]}")
        words=("${words[@]:1}")
    fi
    local word="${words[-1]:-}" candidate cut=""
    case "$word" in *=*) cut="${word%"${word##*=}"}" ;; esac
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$cut"}")
    done < <("${program[@]}" --complete "${words[@]}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.,] ]]; then compopt -o nospace; fi
}
complete -F _air_hpc_complete air_hpc python python3
"""

_OF_RUNS = ("status", "why", "logs", "cancel", "verify", "sync")


def main(arguments: Sequence[str]) -> int:
    """`--shell-completion install=bash`, or the hidden `--complete WORDS`."""
    if arguments[0] == "--complete":
        say("\n".join(candidates(list(arguments[1:]))))
        return EXIT_OK
    name, _, attached = arguments[0].partition("=")
    wish = attached or (arguments[1] if len(arguments) > 1 else "")
    action, _, shell = wish.partition("=")
    if action != "install" or shell != "bash":
        raise BadInput.single(
            name,
            wish,
            "no such completion",
            allowed="install=bash",
            hint='Use it so: eval "$(python -m air_hpc --shell-completion install=bash)"',
        )
    say(_BASH.strip())
    return EXIT_OK


def candidates(words: Sequence[str]) -> list[str]:
    """What the last of `words` may become."""
    from air_hpc.config.complete import complete

    word = words[-1] if words else ""
    before = words[:-1]
    verb = before[0] if before and before[0] in VERBS else "run"
    found: list[str] = []
    if not before:
        found += [name for name in VERBS if name.startswith(word)]
    if word.startswith("-"):
        return found + _option_names(verb, word)
    if verb == "nodes":
        return found + _nodes(list(before[1:]), word)
    if verb in _OF_RUNS:
        return found + _run_ids(word)
    return found + complete([word], _config_dir(before))


def _option_names(verb: str, word: str) -> list[str]:
    import importlib

    options: tuple[Option, ...] = importlib.import_module(f"air_hpc.cli.{verb}").OPTIONS
    return [name for option in options for name in option.names if name.startswith(word)]


def _run_ids(word: str) -> list[str]:
    from air_hpc.rundir.layout import list_runs
    from air_hpc.runs.find import LATEST, default_runs_dir

    names = [LATEST, *(run.run_id for run in list_runs(default_runs_dir()))]
    return [name for name in names if name.startswith(word)]


def _nodes(before: list[str], word: str) -> list[str]:
    """The actions, then for a release the nodes that are excluded."""
    from air_hpc.cli.nodes import ACTIONS

    if not before:
        return [action for action in ACTIONS if action.startswith(word)]
    if before[0] != "release":
        return []
    import time

    from air_hpc.recovery.exclusions import active
    from air_hpc.rundir.exclusions import read_exclusions
    from air_hpc.runs.find import default_runs_dir

    standing = active(read_exclusions(default_runs_dir()).entries, time.time())
    return sorted(each.node for each in standing if each.node.startswith(word))


def _config_dir(words: Sequence[str]) -> str | None:
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("-cd", "--config-dir"):
            return value if equals else next(iter(words[position + 1 :]), None)
    return None
