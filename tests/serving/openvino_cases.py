"""Cases of OpenVINO GenAI: `make test-openvino`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftsmith.export.engine_jobs import OPENVINO_MODEL
from draftsmith.export.engine_process import run_job
from serving.overfitted import ANSWER_TOKENS, HEAD_DIM, ROPE_BASE, STEPS, Texts
from serving.proof import Case, blocks, command, ran

TARGET = "target-openvino"


def frequencies(base: float) -> bytes:
    """Rotary frequencies of the tiny draft model, as they are in its file of weights."""
    shares = torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM
    return (1.0 / base ** shares).numpy().tobytes()


def slower(folder: Path) -> None:
    """Give it the rotary base that a configuration without one would have."""
    path = (folder / OPENVINO_MODEL).with_suffix(".bin")
    held = path.read_bytes()
    if frequencies(ROPE_BASE) not in held:
        raise RuntimeError(f"{path} does not hold the frequencies of the base {ROPE_BASE:g}")
    path.write_bytes(held.replace(frequencies(ROPE_BASE), frequencies(10000.0)))


def shifted(folder: Path) -> None:
    """Name the layer after each tapped one, as if the numbers counted the states before a layer."""
    path = folder / OPENVINO_MODEL
    text, right, wrong = path.read_text(), 'hidden_layers_list value="1 2 4"', 'hidden_layers_list value="2 3 5"'
    if "dflash_mode" in text:
        right, wrong = 'target_layer_ids value="1,2,4"', 'target_layer_ids value="2,3,5"'
    if right not in text:
        raise RuntimeError(f"{path} does not hold {right}")
    path.write_text(text.replace(right, wrong))


BUT_ENDS = 160 / 168  # Share of the tokens of whole drafts that an answer has room for, with as few drafts as can be
OPENVINO_CASES = (
    Case(name="draft_lm", layout="openvino", printed=True),
    Case(name="draft_lm", layout="openvino", wrong="another rotary base", change=slower),
    Case(name="eagle3", layout="openvino", printed=True),
    Case(name="eagle3", layout="openvino", wrong="layers shifted by one", change=shifted),
    Case(name="eagle3, borrowed output", layout="openvino"),
    Case(name="block, DFlash", layout="openvino", printed=True, least=BUT_ENDS),
    Case(name="block, DFlash", layout="openvino", wrong="layers shifted by one", change=shifted, least=BUT_ENDS),
    Case(name="block, DFlash, reduced", layout="openvino", least=BUT_ENDS))


@dataclass(frozen=True)
class OpenVino:
    """OpenVINO GenAI in an environment of its own."""

    python: Path
    work: Path

    def prepare(self, texts: Texts) -> None:
        """Convert the target."""
        job = {"engine": "optimum-intel", "source": "target", "out": TARGET, "layers": None, "own_code": False}
        run_job(job, self.python, self.work, "the target")

    def plain(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Answers without drafts."""
        return self._run(None, prompts)

    def drafted(self, case: Case, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same with drafts."""
        return self._run(str(folder), prompts)

    def printed(self, case: Case, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same with the target that the command in the folder's README.md converts, after its Python has run."""
        place, converted = self.work / folder, folder.parent / "target-openvino"
        if not (self.work / converted).exists():
            ran(command(place, "optimum-cli"), place, self.python)
        example, = blocks((place / "README.md").read_text(), "python")
        ran(["python", "-c", example], place, self.python)
        return self._run(str(folder), prompts, str(converted))

    def _run(self, draft: str | None, prompts: Sequence[Sequence[int]], target: str = TARGET) -> dict[str, Any]:
        job = {"engine": "OpenVINO", "model": target, "draft": draft, "prompts": [list(prompt) for prompt in prompts],
               "draft_tokens": STEPS, "max_tokens": ANSWER_TOKENS}
        return run_job(job, self.python, self.work, f"draft {draft}")
