"""Peak memory in MiB of one training step on one long row, beyond what the process has before it.

Arguments: family (eagle3, kangaroo), tokens of the row, and optionally tokens of each packed conversation. It is a
process of its own because the peak of a process never falls.
"""

import resource
import sys
from pathlib import Path

import torch
from draftsmith.modules import Eagle3, Kangaroo
from draftsmith.trainers import draft_module, train_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.data.store.feature_shards import Piece, packed
from draftsmith.modules import Eagle3Config, KangarooConfig, Target
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

WAYS = {"eagle3": lambda target: draft_module(Eagle3)(target, train_config(Eagle3)(drafter=Eagle3Config(steps=2))),
        "kangaroo": lambda target: draft_module(Kangaroo)(target, train_config(Kangaroo)(drafter=KangarooConfig()))}


def peak() -> float:
    """Largest resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print the peak."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    family, length = sys.argv[1], int(sys.argv[2])
    size = int(sys.argv[3]) if len(sys.argv) > 3 else length
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tiny_tokenizer()), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=length,
        pad_token_id=0, bos_token_id=1, eos_token_id=2))
    module = WAYS[family](Target(model, tiny_tokenizer(), name="tiny-long"))
    module.configure_model()
    module.train()
    pieces = [Piece(tokens_N=torch.randint(4, 100, (size,)), supervised_N=torch.ones(size, dtype=torch.bool))
              for _ in range(length // size)]
    # A short row first: what a step takes once, whatever its length.
    short = Piece(tokens_N=pieces[0].tokens_N[:64], supervised_N=pieces[0].supervised_N[:64])
    module.loss(packed([[short]]).to("cpu")).total.backward()
    before = peak()
    module.loss(packed([pieces]).to("cpu")).total.backward()
    print(f"{peak() - before:.0f}")


if __name__ == "__main__":
    main()
