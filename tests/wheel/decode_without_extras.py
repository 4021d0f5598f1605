"""Import every module of two rooms and decode an artifact where none of the extras is installed, and check that the
words are the target's own.

    python tests/wheel/decode_without_extras.py runs/tiny/artifact

`.ci/run` calls it in a clean environment that holds the wheel alone.
"""

import importlib.util
import pkgutil
import sys
from pathlib import Path

from draftsmith.export import load_artifact, read_description
from draftsmith.modules import DecodeSettings, Request, TargetConfig, decode, load_target

ROOMS = ("draftsmith.modules", "draftsmith.export")  # That work without extras
EXTRAS = ("lightning", "datasets", "peft", "tensorboard", "matplotlib", "deepspeed")


def main() -> int:
    """Decode three prompts with and without drafts; returns 0 when they agree."""
    present = [name for name in EXTRAS if importlib.util.find_spec(name) is not None]
    if present:
        print(f"this environment holds extras ({', '.join(present)}): nothing would be shown", file=sys.stderr)
        return 2
    names = [info.name for room in ROOMS
             for info in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}.")]
    for name in names:
        importlib.import_module(name)
    print(f"{len(names)} modules of {', '.join(ROOMS)} import without extras")
    folder = Path(sys.argv[1])
    target = load_target(TargetConfig(name=read_description(folder)["target"]["name"]))
    artifact = load_artifact(folder, target)
    requests = [Request(tuple(target.tokenizer(text).input_ids), index, 32)
                for index, text in enumerate(("one", "two words", "and three more"))]
    drafted = decode(artifact.target, requests, DecodeSettings(batch_size=2), drafter=artifact.drafter,
                     policy=artifact.policy())
    plain = decode(artifact.target, requests, DecodeSettings(batch_size=2))
    same = [a.tokens for a in drafted.generations] == [b.tokens for b in plain.generations]
    print(f"{sum(len(g.tokens) for g in drafted.generations)} tokens, {drafted.accepted_length:.2f} a pass, "
          f"{'identical' if same else 'DIFFERENT'}; no extra installed")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
