"""A GGUF file with a vocabulary of numbered tokens and nothing else."""

from pathlib import Path

import gguf

SPECIAL = (gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL)  # Kinds of the first tokens


def write_vocabulary(file: Path, size: int) -> Path:
    """Write the tokens <0>, <1> and so on, as SentencePiece has them; returns the file."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{token}>" for token in range(size)])
    writer.add_token_scores([-float(token) for token in range(size)])
    writer.add_token_types([*SPECIAL, *[gguf.TokenType.NORMAL] * (size - len(SPECIAL))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
