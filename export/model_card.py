"""Model card of an artifact: its README.md, made from config.json alone."""

from collections.abc import Mapping
from typing import Any

from .artifact_files import WEIGHTS


def model_card(config: Mapping[str, Any], parameters: int) -> str:
    """The artifact's README.md."""
    provenance, target = config["provenance"], config["target"]
    lines = [
        f"# {config['family'].capitalize()} drafter for {target['name']}", "",
        f"Drafts the next tokens of {target['name']}, which verifies several of them in one pass. Greedy output equals",
        "the target's own, token by token; sampled output has the target's distribution.", "",
        *_adapter_lines(config),
        "| | |", "|---|---|",
        f"| family | {config['family']} |",
        f"| own weights | {parameters:,} parameters, {WEIGHTS} |",
        f"| target | {target['name']}, vocabulary {target['vocab_size']:,}, width {target['hidden_size']} |",
        f"| target weights | `{target['weights_hash']}` |",
        f"| tree | {len(config['tree']['parents'])} nodes, best first |",
        *_acceptance_rows(provenance),
        *_vocabulary_rows(provenance),
        *([f"| training data | manifest `{provenance['data_manifest']}` |"] if "data_manifest" in provenance else []),
        f"| written by | draftsmith {config['versions']['draftsmith']} |", "",
        "```python", "from pathlib import Path", "",
        "from draftsmith.export import load_artifact", "from draftsmith.modules import TargetConfig, load_target", "",
        f"target = load_target(TargetConfig(name={target['name']!r}))",
        'artifact = load_artifact(Path("this folder"), target)', "drafter, policy = artifact.drafting()", "```", "",
        "Loading it for any other target is refused. `config.json` holds the recipe and the tree; no file is a pickle.",
    ]
    return "\n".join(lines) + "\n"


def _adapter_lines(config: Mapping[str, Any]) -> list[str]:
    if "adapter" not in config:
        return []
    return ["**It changes the target.** The artifact holds a low-rank adapter of "
            f"{len(config['adapter']['layers'])} of the target's layers; the sentence above is true of the adapted",
            "target, a copy that loading makes of the original one.", ""]


def _acceptance_rows(provenance: Mapping[str, Any]) -> list[str]:
    acceptance = provenance.get("acceptance")
    if not acceptance:
        return []
    rows = [f"| accepted length | {acceptance['accepted_length']:.2f} tokens per target pass, the bonus included |"]
    if acceptance.get("by_position"):
        shares = ", ".join(f"{share:.0%}" for share in acceptance["by_position"])
        rows.append(f"| accepted by position | {shares} of passes |")
    return rows


def _vocabulary_rows(provenance: Mapping[str, Any]) -> list[str]:
    found = provenance.get("draft_vocabulary")
    if not found:
        return []
    return [f"| draft vocabulary | {found['tokens']:,} tokens, {found['held_out_coverage']:.1%} of those in held-out "
            "answers |"]
