"""Hidden Transfer maps, over the whole vocabulary; prompt tokens show the reduced one."""

from dataclasses import replace

from draftsmith.modules import HiddenTransfer, HiddenTransferConfig
from support.cases import case

CASES = {
    # The cycle is not the target's own text: its distributions do not help.
    "hidden-transfer": replace(case(HiddenTransfer, HiddenTransferConfig(),
                                    objective="hard"), steps=180),
}
