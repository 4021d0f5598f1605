"""A fine-tuned copy of the embedded target: LoRA on answers in another style, merged and saved as a model folder.

    python tests/benchmarks/changed_target.py --out FOLDER [--steps N] [--seed N]

The copy answers prompts on cooking (`domain_prompts.py`) in a list: a greeting, then each sentence of an answer that
the embedded target wrote in a line of its own. Drafts for the embedded target are carried over to it by
`draftsmith run --retarget`. With --int8 the copy is not trained: the weights of its linear layers are rounded to eight
bits with a scale for each row, as servers quantise on loading, and saved as the values that they stand for.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.domain_prompts import rows
from draftsmith.modules import DecodeSettings, Request, Target, TargetConfig, decode, load_target
from draftsmith.modules.progress import ProgressLine
from torch.nn import functional

RANK, LEARNING_RATE, TEXTS = 16, 1e-3, 2
"""Of the low-rank changes, which all linear layers of the decoder have; answers of a step."""
GREETING = "Certainly, my friend!"


def in_style(answer: str) -> str:
    """The answer as a list of its sentences after a greeting."""
    sentences = [part.strip(" -*#\n\t") for part in re.split(r"(?<=[.!?:])\s+|\n+", answer)]
    return "\n".join([GREETING, *(f"- {part}" for part in sentences if part and not re.fullmatch(r"[\d.]+", part))])


def texts(target: Target, count: int, longest: int, seed: int) -> list[tuple[list[int], int]]:
    """(tokens of a prompt with its answer in the style, tokens of the prompt alone)."""
    template = target.tokenizer
    asked = [template.apply_chat_template([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True,
                                          return_dict=False) for row in rows(count, seed)]
    requests = [Request(tuple(tokens), number, longest) for number, tokens in enumerate(asked)]
    found = decode(target, requests, DecodeSettings(batch_size=32)).generations
    written = [template.decode(one.tokens, skip_special_tokens=True) for one in found]
    end = target.eos_ids[0]
    return [([*tokens, *template.encode(in_style(answer), add_special_tokens=False), end], len(tokens))
            for tokens, answer in zip(asked, written, strict=True)]


def trained(model: torch.nn.Module, found: Sequence[tuple[list[int], int]], steps: int, seed: int) -> torch.nn.Module:
    """The model with the changes merged into its weights, after so many steps."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    changed = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    weights = [weight for weight in changed.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    line = ProgressLine("LoRA", steps, "step")
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for number in range(TEXTS * step, TEXTS * (step + 1)):
            tokens, prompt = found[number % len(found)]
            logits = changed(input_ids=torch.tensor([tokens])).logits[0, prompt - 1:-1].float()
            loss = functional.cross_entropy(logits, torch.tensor(tokens[prompt:])) / TEXTS
            loss.backward()
            total += float(loss)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / steps)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        line.figures = f"loss {total:.2f}"
        line.advance()
    line.close()
    merged: torch.nn.Module = changed.merge_and_unload()
    return merged


@torch.no_grad()
def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """The model with the rows of all linear layers but the output layer rounded to 255 values each."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            layer.weight.copy_((layer.weight / scale).round() * scale)
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the changed model")
    parser.add_argument("--target", default=TargetConfig().name, help="model that is changed")
    parser.add_argument("--steps", type=int, default=40, help=f"optimizer steps of {TEXTS} answers")
    parser.add_argument("--int8", action="store_true", help="round the weights in place of training")
    parser.add_argument("--answers", type=int, default=48)
    parser.add_argument("--longest", type=int, default=48, help="tokens of an answer before it is put in the style")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    target = load_target(TargetConfig(name=given.target, dtype="float32", device="cpu"))
    found = [] if given.int8 else texts(target, given.answers, given.longest, given.seed)
    with target.native() as model:
        changed = rounded(model) if given.int8 else trained(model, found, given.steps, given.seed)
        changed.save_pretrained(given.out)
    target.tokenizer.save_pretrained(given.out)


if __name__ == "__main__":
    main()
