"""Servers in a thread, right or wrong, that answer prompts or give states in the layouts of engines."""

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from draftsmith.modules import DecodeSettings, Request, Target, decode
from draftsmith.modules.features import Features
from draftsmith.modules.target.loading.tiny_model import tiny_model
from safetensors.torch import load_file, save_file
from support.documents import blocks
from torch import Tensor

Change = Callable[[dict[str, Any]], dict[str, Any] | None]
"""A wrong server's changes to a right response; None closes the connection without one."""


@dataclass
class Server:
    """A running server."""

    target: Target  # Answers
    change: Change = dict  # Of every response to a prompt
    failures: int = 0  # So many requests are answered with the status `status` first
    status: int = 500  # Of these
    seconds: float = 0.0  # Wait before each response
    address: str = ""  # http://host:port, without a path
    received: list[dict[str, Any]] = field(default_factory=list)
    """All prompts' requests, with the header of the key as `authorization`."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    """Whether the target is no longer the server's: a client that gave up leaves a request that is still open."""

    def respond(self, path: str, sent: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
        """(status, response) to a prompt; a response of None closes the connection."""
        time.sleep(self.seconds)
        with self.lock:
            if self.closed:
                return self.status, None
            self.received.append(sent)
            if self.failures:
                self.failures -= 1
                return self.status, {"error": "out of order"}
            if path == "/v1/completions":
                return 200, self.change(self._completion(sent))
            return 200, self.change(self._generated(sent)) if path == "/generate" else {}

    def _tokens(self, prompt: list[int], limit: int, temperature: float, seed: int) -> list[int]:
        return decode(self.target, [Request(tuple(prompt), 0, limit, temperature)],
                      DecodeSettings(seed=seed)).generations[0].tokens

    def _completion(self, sent: dict[str, Any]) -> dict[str, Any]:
        tokens = self._tokens(sent["prompt"], sent["max_tokens"], sent["temperature"], sent["seed"])
        ended = tokens[-1] in sent["stop_token_ids"]
        return {"choices": [{"text": "...", "token_ids": tokens, "prompt_token_ids": sent["prompt"],
                             "finish_reason": "stop" if ended else "length", "stop_reason": None}]}

    def _generated(self, sent: dict[str, Any]) -> dict[str, Any]:
        given = sent["sampling_params"]
        tokens = self._tokens(sent["input_ids"], given["max_new_tokens"], given["temperature"], given["sampling_seed"])
        ended = tokens[-1] in given["stop_token_ids"]
        reason = {"type": "stop", "matched": tokens[-1]} if ended else {"type": "length", "length": len(tokens)}
        return {"text": "...", "output_ids": tokens, "meta_info": {"finish_reason": reason}}


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Context in which a server answers at its `address`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "the-target"}]})

        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = server.respond(self.path, {**sent, "authorization": self.headers["Authorization"]})
            if content is None:
                self.close_connection = True
            else:
                self._send(status, content)

        def _send(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.address = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        with server.lock:
            server.closed = True
        thread.join()


States = dict[str, Tensor]


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

    [guide] = [one for one in blocks("recipes/guides/large-targets-and-clusters.md") if one.language == "python"]
    lines = [line for line in guide.text.splitlines() if not line.startswith(("from safetensors", "name,", "model ="))]
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
