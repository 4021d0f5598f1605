"""Hidden Transfer maps, over the whole vocabulary; prompt tokens show the reduced one."""

from dataclasses import replace

from draftsmith.modules import HiddenTransferConfig
from draftsmith.trainers.drafters.hidden_transfer import HiddenTransferModule, HiddenTransferTrainConfig
from support.cases import case

CASES = {
    # The cycle is not the target's own text: its distributions do not help.
    "hidden-transfer": replace(case(HiddenTransferModule, HiddenTransferTrainConfig, HiddenTransferConfig(),
                                    objective="hard"), steps=180),
}
