"""Proof that serving engines load what is exported here: `make test-serving` (vLLM),
`make test-llamacpp` and `make test-openvino`.

Every family and layout is overfitted on a few greedy answers of a tiny random target, exported, and loaded by the
engine in another environment: its answers must be its own without drafts, and it must accept every drafted token.
Controls, in whose folder one number is wrong or of which the engine drops a part, must be accepted less. Prints a
table; `--record` keeps it in figures.json, and what runs in export/README.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from serving.engine_table import record
from serving.llama_cpp_cases import LLAMA_CPP_CASES, LlamaCpp
from serving.openvino_cases import OPENVINO_CASES, OpenVino
from serving.proof import Case, Engine, prove
from serving.vllm_cases import ADAPTER, NAME, VLLM_CASES, Vllm, prove_adapter, prove_states

ENGINES: dict[str, tuple[Callable[[Path, Path], Engine], tuple[Case, ...]]] = {
    "vllm": (Vllm, VLLM_CASES),
    "llama.cpp": (LlamaCpp, LLAMA_CPP_CASES),
    "openvino genai": (OpenVino, OPENVINO_CASES),
}
"""Engines and their cases."""


def main() -> int:
    """Exit code: 0 if every case is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the engine's environment")
    parser.add_argument("--only", default="", help="part of name, format or number format of the cases")
    parser.add_argument("--record", action="store_true", help="write figures.json and the table of export/README.md")
    parser.add_argument("--work", type=Path, help="empty folder that is kept")
    parser.add_argument("--drafters", type=Path, help="folder of overfitted drafters that the engines share; it is "
                        "filled by the first that needs one, and has to be emptied when a drafter changes")
    given = parser.parse_args()
    made, all_cases = ENGINES[given.engine]
    cases = [case for case in all_cases if given.only in f"{case.name} {case.layout} {case.weights}"]
    with tempfile.TemporaryDirectory() as scratch:
        work = given.work or Path(scratch)
        found = prove(made(given.python, work), cases, work, given.drafters or work / "drafters") if cases else []
        states = given.engine == "vllm" and given.only in NAME
        adapter, drafters = given.engine == "vllm" and given.only in ADAPTER, given.drafters or work / "drafters"
        sound = not states or prove_states(given.python.absolute(), work)
        sound = (not adapter or prove_adapter(given.python.absolute(), work, drafters)) and sound
    wrong = [one for one in found if not one.holds]
    if given.record and not wrong:
        record([asdict(one) for one in found])
    print(f"\n{len(found) - len(wrong)} of {len(found)} cases are as they must be")
    return 1 if wrong or not sound or not (found or states or adapter) else 0


if __name__ == "__main__":
    sys.exit(main())
