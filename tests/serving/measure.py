"""A trained artifact in vLLM: `make test-serving ARTIFACT=DIR`.

The artifact is exported and served with its own target, greedy. vLLM's answers with drafts must be those without, and
its accepted length that of this project's own chain of the same number of tokens, within a tenth.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from draftsmith.export import Artifact, TrialSettings, export_artifact, load_artifact, try_export
from draftsmith.export.layouts.registry import formats_of
from draftsmith.modules import TargetConfig, UserError
from draftsmith.recipes.chat_settings import ARTIFACT_TARGET, TemplateConfig, artifact_target
from draftsmith.recipes.commands.artifact_commands import trial_prompts


def layout_of(artifact: Artifact) -> str:
    """The format in which vLLM reads the artifact's drafter best."""
    able = [one.name for one in formats_of(artifact) if one.vllm(artifact.drafter)]
    return "medusa-vllm" if "medusa-vllm" in able else next(iter(able), "none")


def main() -> int:
    """Exit code: 0 if answers and accepted lengths are as they must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the environment with vLLM")
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--target", default=ARTIFACT_TARGET, help="the target; the artifact's by default")
    parser.add_argument("--draft_tokens", type=int, default=3)
    given = parser.parse_args()
    try:
        target = artifact_target(given.artifact, TargetConfig(name=given.target))
        artifact = load_artifact(given.artifact, target)
        layout, prompts = layout_of(artifact), trial_prompts(TemplateConfig().build(target))
        settings = TrialSettings(draft_tokens=(given.draft_tokens,))
        with tempfile.TemporaryDirectory() as scratch:
            folder = export_artifact(artifact, target, layout, Path(scratch, "draft"))
            trial = try_export(artifact, layout, folder, given.python, prompts, settings)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{artifact.drafter.family} for {target.identity.name} as {layout} in {trial.engine}: drafts of "
          f"{given.draft_tokens} tokens, {len(prompts)} prompts, {settings.max_new_tokens} tokens each\n")
    held = "in float32 answers and accepted lengths are as they must be"
    print(f"{trial.table()}\n\n{trial.fault or held}\n{trial.note}")
    return 1 if trial.fault else 0


if __name__ == "__main__":
    sys.exit(main())
