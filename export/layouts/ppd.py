"""Prompt tokens in the layout of the official code (hmarkc/parallel-prompt-decoding), written and read back.

A prompt-tuning adapter of the PEFT library: `prompt_embeddings` [K C, D], row k C + c for copy c of token k, and
adapter_config.json. Trees are not part of the layout: in the official code they are Python source.
"""

from pathlib import Path

from torch import Tensor

from ...modules import PromptTokens, PromptTokensConfig, Target, UserError
from ..artifact import portable
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings
from .parts.layout_folder import Contents, stored, write_layout
from .parts.safetensors_reader import Checkpoint

PPD_FILE, PPD_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PROMPTS = "prompt_embeddings"
_PLAIN = {"vt_attention_type": "ensemble", "aggregation_type": "mean", "num_exits": 1, "use_custom_lm_head": False,
          "use_prefix_tuning": False}
"""Settings of the official code that are the only ones here."""


def export_ppd(drafter: PromptTokens, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write prompt tokens as the official code reads them; a reduced draft vocabulary becomes the whole one."""
    config = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": portable(target.identity.name),
        "inference_mode": True,
        "num_special_tokens": drafter.config.num_tokens,
        "virtual_tokens_per_special_token": drafter.copies,
        "num_virtual_tokens": drafter.virtual_nodes,
        "token_dim": drafter.hidden_size,
        **_PLAIN,
    }
    table = write_layout(folder, PPD_FILE, stored({_PROMPTS: drafter.prompts}), config, config_file=PPD_CONFIG)
    return Contents(title="Prompt tokens", table=table)


def read_ppd(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[PromptTokens, dict[str, Tensor]]:
    """Prompt tokens in the official layout. Raises UserError if their number is missing."""
    steps, copies = given.said.get("num_special_tokens"), given.said.get("virtual_tokens_per_special_token")
    if not (isinstance(steps, int) and isinstance(copies, int) and min(steps, copies) > 0):
        raise UserError(f"{given.config} must hold num_special_tokens and virtual_tokens_per_special_token, whole "
                        f"numbers of at least 1, got {steps} and {copies}; copy it again")
    drafter = PromptTokens(PromptTokensConfig(num_tokens=steps, copies=copies), target)
    own = {("prompts" if name == _PROMPTS else name): tensor for name, tensor in given.tensors().items()}
    # The layout counts no guesses.
    return drafter, {**own, "rank_chances_KR": drafter.rank_chances_KR}


PPD = ExportFormat(name="ppd", content="prompt tokens", readers={"the official code": ""}, families=(PromptTokens,),
                   write=export_ppd, read=read_ppd, known={name: (value,) for name, value in _PLAIN.items()},
                   file=PPD_FILE, config_file=PPD_CONFIG, lost=lambda drafter: "" if drafter.copies == 1 else (
                       f"The official code decodes with one copy of each token; these have {drafter.copies}."))
