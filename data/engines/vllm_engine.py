"""vLLM's OpenAI-style server with the method `extract_hidden_states`: a prompt is read, and the states of chosen layers
are left in a file whose path comes with the answer. The last layer's are those before the last norm.

Shapes: T tokens of a prompt, K layers, D hidden size.
"""

import fcntl
import time
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...modules import Target, UserError
from ...modules.files.json_records import shortened
from ..answers.answer_server import ANSWER_SECONDS, AnswerServer
from ..store.feature_shards import FINAL
from .folder_engine import POLL_SECONDS
from .state_engine import AGAIN, StateEngine


class VllmEngine(StateEngine):
    """A server by its address, http://host:port/v1, and the folder in which it leaves files, under one name on both
    machines. Raises UserError if it is no address."""

    # A prompt is a request, and the server batches them.
    width = 8
    request_tokens = 0

    def __init__(self, place: str, target: Target) -> None:
        super().__init__(place, target)
        self.server = AnswerServer(place)

    def _asked(self, rows: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        [tokens_T], last = rows, self.target.num_layers
        # It numbers what enters a layer: the output of layer i is that which enters layer i + 1.
        layers = {name: last if name == FINAL else int(name.removeprefix("tap_")) + 1 for name in names}
        ids = sorted(set(layers.values()))
        start = ("start vLLM with the method extract_hidden_states and eagle_aux_hidden_state_layer_ids "
                 f"{ids} as the guide to clusters shows")
        answer = self.server.response(f"{self.server.address}/completions", {
            "model": self.server.model, "prompt": tokens_T.tolist(), "max_tokens": 1, "temperature": 0.0})
        file = ((answer if isinstance(answer, dict) else {}).get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise UserError(f"{self.place} names no file of states ({shortened(answer)}); {start}")
        found = self._read(Path(file))
        states_TKD, said_T = found.get("hidden_states"), found.get("token_ids")
        if states_TKD is None or said_T is None or said_T.tolist() != tokens_T.tolist():
            raise UserError(f"{file} does not hold the states of the prompt that was sent; {start}")
        if states_TKD.dim() != 3 or states_TKD.shape[1] != len(ids):
            raise UserError(f"{self.place} gives states of shape {tuple(states_TKD.shape)}, and {len(ids)} of each "
                            f"token are asked for; {start}")
        states = {name: states_TKD[:, ids.index(layer)] for name, layer in layers.items() if name != FINAL}
        return {FINAL: self.target.normed(states_TKD[:, ids.index(last)]), **states}

    def _read(self, file: Path) -> dict[str, Tensor]:
        """The tensors of a file, which then goes; its writer holds a lock until it is whole."""
        lock, until = Path(f"{file}.lock"), time.monotonic() + ANSWER_SECONDS
        try:
            with lock.open() as held:
                while True:
                    try:
                        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() > until:
                            raise UserError(f"{self.place} does not finish {file}; {AGAIN}") from None
                        time.sleep(POLL_SECONDS)
                found: dict[str, Tensor] = load_file(file)
            for one in (file, lock):
                one.unlink()
        except (OSError, SafetensorError) as error:
            raise UserError(f"the states that {self.place} has written cannot be read and removed ({file}: "
                            f"{error}); its shared_storage_path must be a folder that this machine sees under the same "
                            f"name, with room: {AGAIN}") from error
        return found
