"""Engines that give states: the one of the guide in a thread, right or wrong, and vLLM's layout by HTTP and files."""

import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from draftsmith.modules.features import Features
from draftsmith.modules.target.loading.tiny_model import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from .answer_servers import Server
from .documents import blocks

States = dict[str, Tensor]


def guide() -> str:
    """The engine that the guide to large targets shows."""
    [block] = [one for one in blocks("recipes/guides/large-targets-and-clusters.md") if one.language == "python"]
    return block.text


@contextmanager
def working(folder: Path, change: Callable[[States], States] = dict, seed: int = 0) -> Iterator[list[Path]]:
    """Context in which the guide's engine works in a folder with the tiny model of a seed; gives the files of the
    requests that it has answered. A wrong engine changes what it saves."""
    answered: list[Path] = []

    def saved(states: States, file: Path) -> None:
        answered.append(file)
        if changed := change(states):
            apart = {name: state.clone(memory_format=torch.contiguous_format) for name, state in changed.items()}
            save_file(apart, file)
        else:
            file.write_bytes(b"half of a file")

    lines = [line for line in guide().splitlines() if not line.startswith(("from safetensors", "name,", "model ="))]
    names: dict[str, Any] = {"model": tiny_model(seed=seed), "folder": folder, "load_file": load_file,
                             "save_file": saved}
    folder.mkdir(exist_ok=True)
    thread = threading.Thread(target=exec, args=("\n".join(lines), names), daemon=True)
    thread.start()
    try:
        yield answered
    finally:
        (folder / "stop").touch()
        thread.join()
        (folder / "stop").unlink()


@dataclass
class StatesServer(Server):
    """vLLM's server with the method `extract_hidden_states`."""

    ids: tuple[int, ...] = ()
    """Numbers of what enters the layers; that of all layers stands for what leaves the last one."""
    folder: Path = field(default_factory=Path)  # Where it leaves files

    def _completion(self, sent: dict[str, Any]) -> dict[str, Any]:
        if "seed" in sent:
            return super()._completion(sent)
        tokens = sent["prompt"]
        text = Features.from_rows([(tokens, [True] * len(tokens))])
        encoded = self.target.encode(text, tuple(number - 1 for number in self.ids))
        file = self.folder / f"cmpl-{len(self.received)}.safetensors"
        with Path(f"{file}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save_file({"hidden_states": torch.stack([encoded.taps[number - 1][0] for number in self.ids], 1),
                       "token_ids": torch.tensor(tokens)}, file)
        return {"choices": [], "kv_transfer_params": {"hidden_states_path": str(file)}}
