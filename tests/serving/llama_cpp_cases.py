"""Cases of llama.cpp: `make test-llamacpp`."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.export.engine_process import run_job
from draftsmith.export.layouts.llama_cpp import GGUF_FILE, write_model
from gguf import GGUFReader
from serving.overfitted import ANSWER_TOKENS, PROMPT_TOKENS, STEPS, VOCABULARY, Texts, tiny_llama
from serving.proof import Case, command

TARGET = "target.gguf"


def held(folder: Path, key: str) -> Any:
    """The value of a key in a folder's file."""
    return GGUFReader(folder / GGUF_FILE).fields[key].contents()


def changed(folder: Path, key: str, values: list[float]) -> None:
    """Overwrite a number or a list of numbers in place."""
    field = GGUFReader(folder / GGUF_FILE, "r+").fields[key]
    for place, value in zip(field.data, values, strict=True):
        field.parts[place][0] = value


def shifted(kind: str) -> Callable[[Path], None]:
    """Name the layer before each tapped one, as if the numbers counted outputs."""
    key = f"{kind}.target_layers"
    return lambda folder: changed(folder, key, [layer - 1 for layer in held(folder, key)])


def flipped(key: str) -> Callable[[Path], None]:
    """Turn a truth value over."""
    return lambda folder: changed(folder, key, [not held(folder, key)])


def scaled(tensor: str) -> Callable[[Path], None]:
    """Multiply a weight by a number that turns every choice over."""
    def change(folder: Path) -> None:
        found = {one.name: one for one in GGUFReader(folder / GGUF_FILE, "r+").tensors}
        found[tensor].data[:] *= -30
    return change


SIMPLE, THIRD = (("method", "draft-simple"),), (("method", "draft-eagle3"),)
FLASH, SPARK = (("method", "draft-dflash"),), (("method", "draft-dspark"),)
CAUSAL, ANCHOR = flipped("dflash.attention.causal"), flipped("dflash.sample_from_anchor")
OTHER_BASE = partial(changed, key="llama.rope.freq_base", values=[10000.0])  # That of a file without the key
SHORTER = partial(changed, key="llama.rope.scaling.attn_factor", values=[1.0])
"""Without the factor by which YaRN lengthens queries and keys."""
SHIFTED, OTHER_SIGHT = "layers shifted by one", "slots see the other part of their block"
LLAMA_CPP_CASES = (
    Case(name="draft_lm", layout="gguf", asked=SIMPLE, printed=True),
    Case(name="draft_lm", layout="gguf", asked=SIMPLE, wrong="another rotary base", change=OTHER_BASE),
    Case(name="draft_lm, Qwen 2", layout="gguf", asked=SIMPLE),
    Case(name="draft_lm, Qwen 3", layout="gguf", asked=SIMPLE),
    Case(name="draft_lm, YaRN", layout="gguf", asked=SIMPLE),
    Case(name="draft_lm, YaRN", layout="gguf", asked=SIMPLE, wrong="another attention factor", change=SHORTER),
    Case(name="draft_lm, Qwen 3, YaRN", layout="gguf", asked=SIMPLE),
    Case(name="eagle3", layout="gguf", asked=THIRD, printed=True),
    Case(name="eagle3", layout="gguf", asked=THIRD, wrong=SHIFTED, change=shifted("eagle3")),
    Case(name="eagle3, other norms", layout="gguf", asked=THIRD),
    Case(name="eagle3, narrow", layout="gguf", asked=THIRD),
    Case(name="eagle3, borrowed output", layout="gguf", asked=THIRD),
    Case(name="eagle3, YaRN", layout="gguf", asked=THIRD),
    Case(name="block, DFlash", layout="gguf", asked=FLASH, printed=True),
    Case(name="block, DFlash", layout="gguf", asked=FLASH, wrong=SHIFTED, change=shifted("dflash")),
    Case(name="block, DFlash, reduced", layout="gguf", asked=FLASH),
    Case(name="block, JetSpec", layout="gguf", asked=FLASH),
    Case(name="block, DSpark", layout="gguf", asked=SPARK, printed=True),
    Case(name="block, DSpark", layout="gguf", asked=SPARK, wrong=SHIFTED, change=shifted("dflash")),
    Case(name="block, DSpark", layout="gguf", asked=SPARK, wrong=OTHER_SIGHT, change=CAUSAL),
    Case(name="block, DSpark", layout="gguf", asked=SPARK, wrong="slots predict the token before", change=ANCHOR),
    Case(name="block, DSpark, reduced", layout="gguf", asked=SPARK),
    Case(name="block, DSpark, same", layout="gguf", asked=SPARK),
    Case(name="block, DFlash 2", layout="gguf", asked=FLASH, printed=True),
    Case(name="block, DFlash 2", layout="gguf", asked=FLASH, wrong=SHIFTED, change=shifted("dflash")),
    Case(name="block, DFlash 2", layout="gguf", asked=FLASH, wrong="another selector",
         change=scaled("selector_hidden.weight")),
    Case(name="block, DFlash 2", layout="gguf", asked=FLASH, wrong="another convolution",
         change=scaled("blk.0.attn_conv_proj.weight")),
    Case(name="block, DFlash 2, causal", layout="gguf", asked=FLASH),
)


def options(words: Sequence[str]) -> argparse.Namespace:
    """The options of a printed `llama-server`; the last three are what the script of the proof sets."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for option, name in (("-m", "model"), ("-md", "draft"), ("--spec-type", "method")):
        parser.add_argument(option, dest=name, required=True)
    parser.add_argument("--spec-draft-n-max", dest="tokens", type=int, required=True)
    for option, value in (("-ctk", "f32"), ("-ctv", "f32"), ("-fa", "off")):
        parser.add_argument(option, choices=[value], required=True)
    return parser.parse_args(list(words[1:]))


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's server in an environment of its own."""

    python: Path
    work: Path

    def prepare(self, texts: Texts) -> None:
        """Write the target as GGUF."""
        write_model(self.work / TARGET, tiny_llama(), self.work / VOCABULARY)

    def plain(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Answers without drafts."""
        return self._run({"draft": None}, prompts)

    def drafted(self, case: Case, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same with drafts. The server counts no drafts: it emits their accepted tokens, one more for each, and one
        before the first."""
        found = self._run({"draft": str(folder / GGUF_FILE), **dict(case.asked)}, prompts)
        emitted = sum(map(len, found["answers"])) - len(prompts)
        return {**found, "drafts": emitted - found["accepted"]}

    def printed(self, case: Case, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same with the options of the server that the folder's README.md prints. The Python package has that
        server's code and not its command."""
        given = options(command(self.work / folder, "llama-server"))
        known = next(self.python.absolute().parents[1].rglob("xllamacpp*.so")).read_bytes()
        if unknown := [word for word in command(self.work / folder, "llama-server")
                       if word.startswith("--") and word.encode() + b"\0" not in known]:
            raise RuntimeError(f"llama.cpp has no option {', '.join(unknown)}")
        found = self._run({"model": str(self.work / folder / given.model), "method": given.method,
                           "draft": str(self.work / folder / given.draft), "draft_tokens": given.tokens}, prompts)
        return {**found, "drafts": sum(map(len, found["answers"])) - len(prompts) - found["accepted"]}

    def _run(self, job: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        whole = {"engine": "llama.cpp", "model": TARGET, "prompts": [list(prompt) for prompt in prompts],
                 "draft_tokens": STEPS, "max_tokens": ANSWER_TOKENS, "context": PROMPT_TOKENS + ANSWER_TOKENS + 24,
                 **job}
        return run_job(whole, self.python, self.work, f"draft {job['draft']}")
