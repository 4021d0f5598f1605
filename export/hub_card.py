"""Model card for the Hugging Face Hub: the card of a folder with the Hub's fields before it, and measurements and
training data after it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..modules import UserError
from ..modules.files.json_records import read_object
from ..modules.target.loading.loading import DEFAULT_HUB_ID, DEFAULT_NAME, is_local
from ..modules.target.loading.tiny_model import TINY_NAME

_GIVE = "give the evaluation.json that draftsmith evaluate wrote"


def hub_card(card: str, config: Mapping[str, Any], licence: str, evaluation: Path | None) -> str:
    """README.md for the Hub.

    Args:
        card: the folder's README.md.
        config: config.json of the artifact.
        licence: of the target, by the Hub's name of it: drafts are learnt from its answers.
        evaluation: evaluation.json of the artifact; None for none.

    Raises:
        UserError: if the evaluation cannot be read or is that of another family.
    """
    measured = [] if evaluation is None else _measured(evaluation, config["family"])
    parts = [_fields(config, licence), card.rstrip("\n"), *measured, *_data(config["provenance"]),
             *_recipe(config["provenance"])]
    return "\n\n".join(parts) + "\n"


def _fields(config: Mapping[str, Any], licence: str) -> str:
    """The Hub's fields. A target in a folder, or a random one, has no name there."""
    name = config["target"]["name"]
    base = DEFAULT_HUB_ID if name == DEFAULT_NAME else name
    fields = {"license": licence, "library_name": "draftsmith",
              "tags": ["speculative-decoding", config["family"].replace("_", "-")]}
    if not is_local(base) and base != TINY_NAME:
        fields["base_model"] = base
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _measured(file: Path, family: str) -> list[str]:
    found = read_object(file, _GIVE)
    if found.get("family", family) != family:
        raise UserError(f"{file} is the evaluation of a {found['family']} drafter, this one is {family}; give its own")
    try:
        groups = {"all": found, **found["by_category"]}
        rows = [f"| {name} | {one['prompts']} | {one['accepted_length']:.2f} |" for name, one in groups.items()]
        machine = found["header"]["machine"]["processor"]
        speed = f"{found['speedup']:.2f} times as fast as without drafts" if found["speedup"] else "not timed"
        text = (f"{found['method']} at temperature {found['temperature']:g}, batch {found['batch_size']}, "
                f"{found['header']['dtype']} on {machine}: {speed}. The accepted length counts the tokens of a pass of "
                "the target, its own included.")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is no evaluation of draftsmith; {_GIVE}") from error
    return ["## Measured", text, "\n".join(["| kind of prompt | prompts | accepted length |", "|---|---|---|", *rows])]


def _data(provenance: Mapping[str, Any]) -> list[str]:
    recipe = provenance.get("recipe") or {}
    if "distill" not in recipe:
        return []
    prompts, writer = recipe.get("prompts") or {}, recipe["distill"].get("answered_by", "target")
    named = {key: prompts[key] for key in ("name", "revision", "split", "path") if prompts.get(key)}
    source = ", ".join([str(prompts.get("origin", "unknown")), *(f"{key} {value}" for key, value in named.items())])
    manifest = f" Manifest `{provenance['data_manifest']}`." if "data_manifest" in provenance else ""
    return ["## Training data", f"Prompts: {source}. Answers written by: {writer}.{manifest}"]


def _recipe(provenance: Mapping[str, Any]) -> list[str]:
    recipe = provenance.get("recipe")
    if not recipe:
        return []
    # By way of JSON: plain values alone, each written out where it stands.
    return ["## Recipe", f"```yaml\n{yaml.safe_dump(json.loads(json.dumps(recipe)), sort_keys=False)}```"]
