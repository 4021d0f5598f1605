"""Model cards: README.md of an artifact, made from config.json alone, and the longer one for the Hugging Face Hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from ..modules import UserError
from ..modules.files.json_records import read_object
from ..modules.target.loading.loading import DEFAULT_HUB_ID, DEFAULT_NAME, is_local
from ..modules.target.loading.stored_weights import Quantization
from ..modules.target.loading.tiny_model import TINY_NAME
from .stored_drafter import WEIGHTS

_GIVE = "give the evaluation.json that draftsmith evaluate wrote"


def model_card(config: Mapping[str, Any], parameters: int) -> str:
    """The artifact's README.md."""
    provenance, target, form = config["provenance"], config["target"], config["target"]["quantization"]
    rounded = f", quantised ({form}): the draft is distilled from these" if form else ""
    setting = f", quantization={form!r}" if form in get_args(Quantization) else ""
    if target.get("adapter"):
        setting += ", adapter='/path/to/its/adapter'"
        rounded += f", with the adapter `{target['adapter']}` merged into them"
    adapter: list[str] = []
    if "adapter" in config:
        adapter = ["**It changes the target.** The artifact holds a low-rank adapter of "
                   f"{len(config['adapter']['layers'])} of the target's layers; the sentence above is true of the "
                   "adapted", "target, a copy that loading makes of the original one.", ""]
    any_target = ("Loading it for a target of another tokenizer or vocabulary is refused." if
                  config["family"] == "draft_lm" and config["drafter"].get("taps") is None else
                  "Loading it for any other target is refused.")
    lines = [
        f"# {config['family'].capitalize()} drafter for {target['name']}", "",
        f"Drafts the next tokens of {target['name']}, which verifies several of them in one pass. Greedy output equals",
        "the target's own, token by token; sampled output has the target's distribution.", "",
        *adapter,
        "| | |", "|---|---|",
        f"| family | {config['family']} |",
        f"| own weights | {parameters:,} parameters, {WEIGHTS} |",
        f"| target | {target['name']}, vocabulary {target['vocab_size']:,}, width {target['hidden_size']} |",
        f"| target weights | `{target['weights_hash']}`{rounded} |",
        f"| tree | {len(config['tree']['parents'])} nodes, best first |",
        *facts(provenance),
        f"| written by | draftsmith {config['versions']['draftsmith']} |", "",
        "In this folder:", "", "```python", "from pathlib import Path", "",
        "from draftsmith.export import load_artifact", "from draftsmith.modules import TargetConfig, load_target", "",
        f"target = load_target(TargetConfig(name={target['name']!r}{setting}))",
        'artifact = load_artifact(Path("."), target)', "drafter, policy = artifact.drafting()", "```", "",
        f"{any_target} `config.json` holds the recipe and the tree; no file is a pickle."]
    return "\n".join(lines) + "\n"


def facts(provenance: Mapping[str, Any]) -> list[str]:
    """Rows of the card's table on how the draft was made and what it accepted."""
    rows: list[str] = []
    # An imported drafter has no measured acceptance, and a whole vocabulary no coverage.
    if acceptance := provenance.get("acceptance"):
        # Validation has a tree of its own, which is neither the whole one of the row above nor the one in use.
        nodes = provenance.get("recipe", {}).get("train", {}).get("validation_nodes")
        tree = f"a tree of at most {nodes} nodes" if nodes else "the tree of validation"
        rows.append(f"| accepted length in validation | {acceptance['accepted_length']:.2f} tokens per target pass, "
                    f"the bonus included, on held-out answers with {tree}, without copies |")
        if acceptance.get("by_position"):
            shares = ", ".join(f"{share:.0%}" for share in acceptance["by_position"])
            rows.append(f"| accepted by position | {shares} of passes in validation |")
    if start := provenance.get("start"):
        former = start.get("target")
        made = f" for {former['name']} (`{former['weights_hash'][:12]}`)" if former else ""
        rows.append(f"| continues | the drafter with weights `{start['weights_sha256']}`{made}, "
                    f"{start['accepted_length']:.2f} tokens per target pass in this validation |")
    if expected := provenance.get("expected_accepted_length"):
        rows.append(f"| expected accepted length | {expected[-1]:.2f} tokens per target pass with a tree of "
                    f"{len(expected)} nodes, without copies, estimated on the held-out answers that chose it: others "
                    "accept less |")
    if found := provenance.get("draft_vocabulary"):
        rows.append(f"| draft vocabulary | {found['tokens']:,} tokens, {found['held_out_coverage']:.1%} of those in "
                    "held-out answers |")
    if found := provenance.get("trimmed"):
        rows.append(f"| trimmed from | the drafter with weights `{found['weights_sha256']}`, {found['entries']:,} "
                    "entries, without training |")
    if found := provenance.get("imported"):
        files = ", ".join(f"{name} `{digest}`" for name, digest in found["files"].items())
        rows.append(f"| imported | format {found['format']}, folder {found['folder']}: {files} |")
    if "data_manifest" in provenance:
        rows.append(f"| training data | manifest `{provenance['data_manifest']}` |")
    return rows


def hub_card(card: str, config: Mapping[str, Any], licence: str, evaluation: Path | None, base_model: str | None = None
             ) -> str:
    """README.md for the Hub: a folder's `card` with the Hub's fields before it, and measurements (of evaluation.json),
    training data and recipe after it. Licence, by the Hub's name of it, and base model are the target's, by default the
    artifact's. Raises UserError if the evaluation cannot be read or is that of another artifact."""
    name, provenance = config["target"]["name"], config["provenance"]
    base = DEFAULT_HUB_ID if name == DEFAULT_NAME else name
    fields = {"license": licence, "library_name": "draftsmith",
              "tags": ["speculative-decoding", config["family"].replace("_", "-")]}
    # A target in a folder, or a random one, has no name on the Hub.
    if base_model is not None or (not is_local(base) and base != TINY_NAME):
        fields["base_model"] = base_model or base
    parts = [f"---\n{yaml.safe_dump(fields, sort_keys=False)}---", card.rstrip("\n")]
    if evaluation is not None:
        parts += _measured(evaluation, config["weights_sha256"], name)
    recipe = provenance.get("recipe") or {}
    if "distill" in recipe:
        prompts, writer = recipe.get("prompts") or {}, recipe["distill"].get("answered_by", "target")
        if isinstance(writer, Mapping):
            writer = ", ".join(f"{name} {share:.0%}" for name, share in writer.items())
        named = {key: prompts[key] for key in ("name", "revision", "split", "path") if prompts.get(key)}
        source = ", ".join([str(prompts.get("origin", "unknown")),
                            *(f"{key} {value}" for key, value in named.items())])
        manifest = f" Manifest `{provenance['data_manifest']}`." if "data_manifest" in provenance else ""
        parts += ["## Training data", f"Prompts: {source}. Answers written by: {writer}.{manifest}"]
    if recipe:
        # By way of JSON: plain values alone, each written out where it stands.
        plain = json.loads(json.dumps(recipe))
        parts += ["## Recipe", f"```yaml\n{yaml.safe_dump(plain, sort_keys=False)}```"]
    return "\n\n".join(parts) + "\n"


def counted_in_words(facts: Mapping[str, Any]) -> str:
    """Facts by their names, such as source and revision, without those that are not known or zero."""
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def _measured(file: Path, weights: str, target: str) -> list[str]:
    found = read_object(file, _GIVE)
    try:
        header, sets = found["header"], found["header"].get("sets", {})
        groups = {"all": found, **(found["by_prompt_set"] if sets else {}), **found["by_category"]}
        rows = [f"| {name} | {one['prompts']} | {one['accepted_length']:.2f} |" for name, one in groups.items()]
        machine = header["machine"]["processor"]
        speed = f"{found['speedup']:.2f} times as fast as without drafts" if found["speedup"] else "not timed"
        if found["speedup"] and found["contended"]:
            speed += " (other programs used the machine meanwhile, so that this speed is not reliable)"
        copies = f", next to guesses of {' and '.join(found['partners'])}" if found.get("partners") else ""
        text = (f"{found['method']} in passes of at most {found['nodes']} nodes{copies}, at temperature "
                f"{found['temperature']:g}, batch {found['batch_size']}, "
                f"{header['dtype']} on {machine}: {speed}. The accepted length counts the tokens of a pass of "
                "the target, its own included.")
        if found.get("lossy"):
            compared = found["lossless"]
            text += (f" **LOSSY ({found['lossy']}): {compared['prompts'] - compared['identical']} of "
                     f"{compared['prompts']} answers differ from those of exact verification.**")
        measured = header.get("artifacts", {}).get(found["method"])
        # A path may be another one on each machine.
        other = Path(found["target"]).name != Path(target).name
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is no evaluation of draftsmith; {_GIVE}") from error
    if measured != weights:
        whose = f"of an artifact with the weights {measured[:12]}..." if measured else "that does not name its artifact"
        raise UserError(f"{file} is an evaluation {whose}, this one has the weights {weights[:12]}...; give its own, "
                        "which draftsmith evaluate writes")
    # Heads without an output layer of their own may have the same weights for two targets.
    if other:
        raise UserError(f"{file} is an evaluation with the target {found['target']}, this artifact is for {target}; "
                        "give its own, which draftsmith evaluate writes")
    said = [*(f"- {name}: {counted_in_words(one)}." for name, one in sets.items()),
            *(f"- {one}." for one in found.get("differences", []))]
    return ["## Measured", text, "\n".join(["| kind of prompt | prompts | accepted length |", "|---|---|---|", *rows]),
            *(["\n".join(said)] if said else [])]
