"""Conversion to OpenVINO's format, in an environment of its own: `python openvino_conversion.py JOB.json RESULT.json`.

The job has `source` (a Hugging Face folder, or an EAGLE-3 or DFlash drafter in its official layout), `out` (a folder),
`own_code`, true for such a drafter, and `layers`, the tapped layers of an EAGLE-3 drafter by their outputs, from 0, or
null. OpenVINO GenAI reads these layers from the model; without them it takes the official ones of another numbering.
Those of DFlash are in its configuration. The result names the version.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__)
MODEL = "openvino_model.xml"  # The file of the converted model's graph; its weights are in the .bin next to it
LAYERS = "hidden_layers_list"  # Key of the tapped layers


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    source, out, third = Path(job["source"]), Path(job["out"]), job["layers"] is not None
    # EAGLE-3 and DFlash are models of optimum-intel's own code, which counts as remote.
    main_export(str(source), out, task="text-generation-with-past", library_name="transformers",
                trust_remote_code=job["own_code"], ov_config=OVConfig(dtype="fp32"),
                convert_tokenizer=(source / "tokenizer_config.json").exists())
    if third:
        import openvino

        file, written = out / MODEL, out / f"with_layers_{MODEL}"
        model = openvino.Core().read_model(file)
        model.set_rt_info(job["layers"], [LAYERS])
        # Under another name first: the weights are still read from the former files.
        openvino.save_model(model, written, compress_to_fp16=False)
        for suffix in (".xml", ".bin"):
            written.with_suffix(suffix).replace(file.with_suffix(suffix))
    return {"version": version("optimum-intel")}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
