"""README.md of an exported folder: what it holds, the commands that serve it, and the formats that hold the same."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ....modules import DRAFTERS
from ....modules.target.loading.loading import DEFAULT_NAME, is_local
from ....modules.target.loading.tiny_model import TINY_NAME
from ...acceptance_profile import acceptance_lines
from ...artifact import Artifact, portable
from .export_format import ON_CPU, WRONG_SAMPLES, ExportFormat, Places
from .layout_folder import Contents
from .tensor_table import table_text

CLIENT = """The server answers clients of OpenAI's interface:

```python
from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id
answer = client.{asked}, max_tokens=64, temperature=0)
print(answer.choices[0].{text})
```"""
QUESTION = '[{"role": "user", "content": "What is a draft horse?"}]'
CHAT = {"asked": f"chat.completions.create(model=model, messages={QUESTION}", "text": "message.content"}
PLAIN_TEXT = {"asked": 'completions.create(model=model, prompt="A draft horse is"', "text": "text"}
"""Calls for a target with a chat template, and for one without."""
LLAMA_CPP = """`llama-server` is a program of llama.cpp, which you install apart. llama.cpp's own
`convert_hf_to_gguf.py FOLDER --outfile FILE` makes the GGUF file of a target in a folder."""
REMOTE = "transformers_modules."
"""Start of the names of modules that transformers has read next to a model."""
HALF = """With `--dtype float32` a draft changes no word of an answer, but for rare ties within rounding. Without it
vLLM takes bfloat16 or float16, which is faster on most machines and rounds more: a pass over several tokens then rounds
differently from a pass over one, so an answer with drafts can leave the one without where two tokens are almost equally
likely. `draftsmith export` with `--try_with PYTHON`, the interpreter of an environment with vLLM, counts such
answers and measures both speeds."""


def folder_readme(chosen: ExportFormat[Any], artifact: Artifact, contents: Contents,
                  fitting: Sequence[ExportFormat[Any]]) -> str:
    """README.md of an export.

    Args:
        chosen: its format.
        artifact: what was exported.
        contents: what the writer says of the folder.
        fitting: the formats that hold this drafter.
    """
    name = artifact.identity.name
    parts = [f"# {contents.title} for {portable(name)}", *contents.paragraphs]
    places = Places(target=hub_name(name) or Places.target, on_hub=hub_name(name) is not None)
    # A folder with the adapted target and drafts in one is none that `commands` is about.
    if (artifact.adapter is None or chosen.write is None) and (
            commands := chosen.commands(artifact.drafter, places)):
        parts.append("## Serve it")
        # An export keeps no path of this machine.
        given = f"/path/to/{portable(name)}" if is_local(name) else None
        if hub_name(name) is None and (writing := target_command(artifact, commands, places, "../artifact", given)):
            where = f"; replace `{given}` by the path of its folder or file" if given else ""
            parts.append(f"`{places.target}` is the target as a folder, which this command writes from the artifact"
                         f"{where}:\n\n```bash\n{writing}\n```")
        for engine, command in commands.items():
            parts.append(f"{engine}, in this folder:\n\n```bash\n{command}\n```")
            parts += [WRONG_SAMPLES] if engine == ON_CPU and chosen.write is not None else []
        parts += [LLAMA_CPP] if "llama.cpp" in commands else []
        parts += [contents.example] if contents.example else []
        if "vLLM" in commands:
            spoken = getattr(artifact.target.tokenizer, "chat_template", None)
            parts += [CLIENT.format_map(CHAT if spoken else PLAIN_TEXT), HALF]
    others = [f"* `--format {one.name}`: {one.read_by(artifact.drafter)}" for one in fitting if one.name != chosen.name]
    if others and chosen.write is not None:
        parts += ["## Other formats of this drafter", "\n".join(others)]
    if contents.table is not None:
        parts += [f"## Tensors of {chosen.file}", table_text(contents.table)]
    if chosen.write_target is None:
        parts += acceptance_lines(artifact.acceptance)
    return "\n\n".join(parts) + "\n"


def hub_name(name: str) -> str | None:
    """The name of a target on the Hub; None where its folder is written by the format `target`. The embedded one is not
    the Hub's of that name, whose weights are not rounded."""
    return None if is_local(name) or name in (DEFAULT_NAME, TINY_NAME) else name


def target_command(artifact: Artifact, commands: Mapping[str, str], places: Places, folder: str,
                   name: str | None) -> str:
    """The command that writes the target's folder, which one of `commands` reads; empty where none does. `folder` is
    the artifact's, `name` the target's path, None where the artifact names it."""
    if all(places.target not in shlex.split(command) for command in commands.values()):
        return ""
    words = ["--artifact", folder, *([] if name is None else ["--target.name", name]), "--format", "target",
             "--out", places.target]
    # Code of others runs only where the command line says so.
    if all(artifact.drafter.family != one.family for one in DRAFTERS):
        words += ["--trust", "true"]
    if any(type(one).__module__.startswith(REMOTE) for one in (artifact.target.model, artifact.target.tokenizer)):
        words += ["--target.trust_remote_code", "true"]
    return shlex.join(["draftsmith", "export", *words])
