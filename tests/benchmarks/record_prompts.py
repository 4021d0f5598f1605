"""Prompts of the embedded target, written once with the settings of the embedded recipes, for the file in the package.

    python tests/benchmarks/record_prompts.py [--usable N]

Run it where the target, its tokens, the kinds, the openings or the settings of `recipes/targets/embedded.yaml` have
changed: until then runs write their prompts themselves, which a test notices. Batches are written until so many are
usable. A prompt that nobody should read is left out by hand: its line becomes "", as of one that cannot be used.
"""

import argparse
import json
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from draftsmith.data.prompts.sources import RECORDED, OwnPrompts
from draftsmith.modules.files.atomic_files import write_atomically
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.stages.workspace import Workspace


def source(out: str) -> OwnPrompts:
    """The prompts' writer of the embedded recipes, in their fastest number format, which is measured in a folder."""
    parsed = COMMANDS["run"].parse(["--config", "quickstart", "--out", out])
    workspace, recipe = Workspace(parsed), parsed.values
    return OwnPrompts(workspace.train_target() or workspace.target, workspace.template, recipe.prompts,
                      seed=recipe.distill.seed, slots=recipe.distill.slots)


def record(own: OwnPrompts, usable: int) -> None:
    """Write the file anew, batch after batch, until so many of its prompts are usable."""
    own.texts = {}
    while sum(map(bool, own.texts.values())) < usable:
        own.take(len(own.texts), own.settings.batch_size)
        rows = [own.origin, *own.texts.values()]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(RECORDED, lambda partial, text=text: partial.write_text(text, encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--usable", type=int, default=800)
    given = parser.parse_args(arguments)
    with TemporaryDirectory() as out:
        record(source(out), given.usable)


if __name__ == "__main__":
    main()
