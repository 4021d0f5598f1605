"""The command `draftsmith`. Torch and everything above it are imported only once a command has been chosen."""

import difflib
import errno
import os
import platform
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Any

from .terminal import Stopped, one_sentence, stopped_by_signals

COMMANDS = {
    "run": ("pipeline", "from a recipe to a report: distill, train, evaluate; finished stages are skipped"),
    "distill": ("pipeline", "prompts -> answers by the target -> token shards and feature shards"),
    "train": ("pipeline", "token shards -> trained drafter and its draft tree: an artifact"),
    "families": ("compare_families", "several families under equal conditions -> one table"),
    "specdec": ("acceptance_head", "artifact and data -> acceptance heads, by which its drafts end: policy specdec"),
    "trim": ("trim", "artifact and data -> the draft with fewer entries, the target's commonest tokens, untrained"),
    "plan": ("memory_plan", "recipe -> its parameters and memory, without running anything"),
    "evaluate": ("artifact_commands", "artifact and prompts -> acceptance, speed, losslessness: JSON, Markdown, HTML"),
    "choose": ("choose", "target and device -> the draft that pays there, or none, with a table"),
    "layers": ("layers", "target -> its layers that draft for it best, the others skipped, or none; no training"),
    "doctor": ("doctor", "artifact and its data -> what lowers acceptance, each with a remedy"),
    "export": ("artifact_commands", "artifact -> files in the layout of another project or a serving engine"),
    "import": ("exchange", "published checkpoint -> artifact, which the other commands take like a trained one"),
    "push": ("exchange", "artifact or exported folder -> a model on the Hugging Face Hub, with its card"),
    "generate": ("answer_commands", "prompt -> answer, drafted and verified, printed as it grows"),
    "chat": ("answer_commands", "messages -> answers in one conversation, with the model loaded once"),
}
"""Each command: the file of `commands` whose COMMANDS defines it, and its line in `draftsmith --help`."""

TOGETHER = ("run", "train")  # Commands that several processes of torchrun may run; each says what it needs
USER_MISTAKE = 2
REMEDIES = {
    "free some space or choose another --out": (errno.ENOSPC, errno.EDQUOT),
    "change its permissions or choose another path": (errno.EACCES, errno.EPERM),
    "choose another --out": (errno.EROFS, errno.EEXIST, errno.EFBIG, errno.ENOTEMPTY, errno.EBUSY, errno.ETXTBSY),
    "check the path": (errno.ENOENT, errno.ENOTDIR),
    "name a file, not a folder": (errno.EISDIR,),
    "check the disk": (errno.EIO, errno.ESTALE),
    "give a shorter name": (errno.ENAMETOOLONG,),
    "remove the link that leads to itself": (errno.ELOOP,),
    "raise the limit of open files (ulimit -n)": (errno.EMFILE,),
    "close other programs": (errno.ENFILE,),
    "free some memory or choose a smaller model": (errno.ENOMEM,),
    "raise the limit of processes (ulimit -u)": (errno.EAGAIN,),
}
SPINS = "30000"  # Turns of a waiting thread's loop before it sleeps, some 0.3 ms
ELSEWHERE = "check the path and the disk"  # Remedy for any other error of the system
# Parts of torch's messages about memory, in lower case: it has no exception of its own for them.
NO_MEMORY = ("can't allocate memory", "out of memory", "storage size calculation overflowed", "can't start new thread")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for a mistake of the user, 128 + n after signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # In a process of its own: one more Ctrl-C, on the way out, ends it at once instead of showing where Python was.
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(overview(), file=sys.stdout if arguments else sys.stderr, flush=True)
            return 0 if arguments else USER_MISTAKE
        if arguments[0] == "--version":
            show_versions()
            return 0
        if arguments[0] not in COMMANDS:
            close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}"
            return complain(f"unknown command {arguments[0]!r}: {hint}")
        # Of the processes of torchrun each would do the whole work of such a command, and write the same files.
        world = os.environ.get("WORLD_SIZE")
        if "TORCHELASTIC_RUN_ID" in os.environ and world != "1" and arguments[0] not in TOGETHER:
            return complain(f"torchrun has started {world} processes, but draftsmith {arguments[0]} works in one; "
                            "start it without torchrun")
        with stopped_by_signals():
            return run_command(arguments[0], arguments[1:])
    except Stopped as stop:
        print(f"\ndraftsmith: {stop.sentence(arguments[0])}", file=sys.stderr)
        return stop.code
    # Imports can fail too, those of the errors that `run_command` knows among them: no file is left to open.
    except OSError as error:
        if argv is None:
            # What could not be written Python would write again at its end, and show that error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # The reader of our output has gone, as `head` does: nothing is wrong.
        return 0 if isinstance(error, BrokenPipeError) else complain(system_error(error))
    except (MemoryError, RuntimeError) as error:
        return complain(out_of_memory(error))


def overview() -> str:
    """The text of `draftsmith --help`."""
    lines = [f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join([
        "usage: draftsmith COMMAND [--config FILE] [--KEY VALUE ...]",
        "",
        "Train, verify and export drafts that make a language model answer faster without changing a word.",
        "",
        *lines,
        "",
        "  draftsmith COMMAND --help lists the keys that most people set, --help=all all of them;",
        "  draftsmith COMMAND --config FILE --print_config prints the whole recipe in force.",
        "  FILE is a path, or the name of a recipe in the package: --config quickstart.",
    ])


def show_versions() -> None:
    """Print what a report of a bug needs; versions first, since an installation may be broken."""
    for name in ("draftsmith", "torch", "transformers", "lightning"):
        print(f"{name:<13}{version(name) if find_spec(name) else 'not installed'}")
    print(f"{'python':<13}{platform.python_version()}, {platform.platform()}", flush=True)
    import torch
    from torch.utils import collect_env

    from ..export.evaluation.contention import processor

    driver: Any = collect_env.get_nvidia_driver_version
    devices = [f"{torch.cuda.get_device_name(number)}, CUDA {torch.version.cuda}, driver {driver(collect_env.run)}"
               for number in range(torch.cuda.device_count())]
    for device in devices or ["mps" if torch.backends.mps.is_available() else "none"]:
        print(f"{'device':<13}{device}")
    known = [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "sve", "bf16")
             if torch.cpu.get_capabilities().get(name)]
    print(f"{'processor':<13}{processor()}, {os.cpu_count()} cores, {' '.join(known) or 'no AVX2 or wider'}")


def complain(message: str) -> int:
    """Print a user's mistake as one line on stderr and return its exit code."""
    print(f"draftsmith: error: {one_sentence(message)}", file=sys.stderr)
    return USER_MISTAKE


def run_command(name: str, arguments: list[str]) -> int:
    """Check the words, import what the command needs, run, and turn every mistake of the user into one sentence."""
    prepare_process()
    # Not before: a misspelt command is reported without them.
    from ..modules.errors import UserError
    from .reading.command_line import CommandLine

    try:
        # Help, and a misspelt key, need neither torch nor anything else that the command imports.
        line = CommandLine(name, arguments)
        line.check()
        command = import_module(f".commands.{COMMANDS[name][0]}", __package__).COMMANDS[name]
        command.run(command.parsed(line))
    except UserError as error:
        return complain(f"{error}")
    except ModuleNotFoundError as error:
        # A module of this package that is missing is our mistake, not an extra that the user can install.
        if error.name is None or error.name.startswith("draftsmith"):
            raise
        return complain(f"this command needs {error.name}, which is not installed: "
                        "pip install 'draftsmith[train,report,gguf]'")
    return 0


def prepare_process() -> None:
    """Set what libraries read when they are imported: other libraries' banners and warnings stay out of the progress
    lines, tensors come from huge pages, waiting threads soon sleep, nothing is imported from the working folder."""
    # Tokenizers would warn once a process is forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Torch reads this when it allocates first. Pages of 4 KiB, instead of 2 MiB, the system would hand out one by one,
    # in every step again.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # GNU's OpenMP, which torch brings, reads this when torch is loaded. By default a thread that waits for another one
    # spins for milliseconds, on the core on which another program runs that one: a pass took 20 times as long. Threads
    # that sleep at once (OMP_WAIT_POLICY=PASSIVE) cost a quiet machine 1.4 times. Less than a time slice is between.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    # No process that is started from here, such as Lightning's for other devices, imports from the working folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    for category in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.formatwarning = one_line
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It was closed: the next file that is opened would take its number, and get what libraries print.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows few characters shows the others as escapes instead of ending the command.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        # Input that is not UTF-8 is refused in a sentence by what reads it.
        sys.stdin.reconfigure(errors="surrogateescape")


def one_line(message: Warning | str, *_: object, **__: object) -> str:
    """A warning without the file and the source line that raised it."""
    return f"draftsmith: warning: {one_sentence(str(message))}\n"


def system_error(error: OSError) -> str:
    """One sentence about a full disk, a missing file, a missing permission or another refusal of the system."""
    if error.errno is None:
        return f"{error}; {ELSEWHERE}"
    remedy = next((one for one, numbers in REMEDIES.items() if error.errno in numbers), ELSEWHERE)
    place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return f"{place}{error.strerror or os.strerror(error.errno)}: {remedy}"


def out_of_memory(error: MemoryError | RuntimeError) -> str:
    """One sentence about memory that is not there. Raises the error again when it is about something else."""
    if isinstance(error, RuntimeError) and not any(part in str(error).lower() for part in NO_MEMORY):
        raise error
    return ("this needs more memory or threads than the machine gives; choose a smaller target or drafter, or lower "
            "distill.slots, batch.rows_per_batch and batch.row_length (draftsmith plan counts the bytes)")


if __name__ == "__main__":
    sys.exit(main())
