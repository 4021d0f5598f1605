"""Planned and measured peak memory of the stages of a recipe, as JSON: a script for a process of its own.

    python tests/support/stage_peaks.py --config NAME --out FOLDER [--stages distill,train] [--KEY VALUE ...]

The stages run one after the other. Between them garbage is collected and free memory given back, so that each starts as
in a process of its own; nothing is deducted from what the system counts as resident.
"""

import ctypes
import gc
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.recipes.commands.memory_plan import plan_recipe
from draftsmith.recipes.commands.pipeline import ALL, COMMANDS, perform_stages
from draftsmith.recipes.stages.workspace import Workspace
from transformers import LlamaConfig, LlamaForCausalLM


def wide_model(folder: Path) -> Path:
    """Write a model of two wide layers with random weights, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=384, intermediate_size=768, num_hidden_layers=2,
                                 num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048,
                                 pad_token_id=0, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def peak_bytes() -> int:
    """Largest resident memory since the last `restart`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def restart() -> None:
    """Give back what is free, and count the peak from here on."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def main(words: list[str]) -> None:
    """Plan, run, print."""
    chosen = list(ALL)
    if "--stages" in words:
        place = words.index("--stages")
        chosen, words = words[place + 1].split(","), words[:place] + words[place + 2 :]
    parsed = COMMANDS["run"].parse(words)
    planned = {stage.name: stage.peak for stage in plan_recipe(parsed.values).stages}
    workspace = Workspace(parsed)
    found = {}
    with redirect_stdout(sys.stderr):
        for stage in chosen:
            restart()
            perform_stages(workspace, [stage])
            found[stage] = (planned[stage], peak_bytes())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
