"""Early exits: the pass, fitting, calibrating and costing what it inserted, losses, and running it in pieces."""

from .calibrate import Calibration, calibrate, set_thresholds
from .compact import Compact
from .costs import Costs, exit_costs
from .exits import Exits
from .fit import Fit, fit
from .hypotheses import error_rate, hypothesis_posterior, spelled
from .runtime import Decoder, Generated, Step, sampler
from .seq2seq import Decoded, EncoderExits
from .skipping import Skipping
from .speculate import Speculated, speculate
from .split import split
from .trials import Trials, measure, token_batches

__all__ = [
    "Calibration",
    "Compact",
    "Costs",
    "Decoded",
    "Decoder",
    "EncoderExits",
    "Exits",
    "Fit",
    "Generated",
    "Skipping",
    "Speculated",
    "Step",
    "Trials",
    "calibrate",
    "error_rate",
    "exit_costs",
    "fit",
    "hypothesis_posterior",
    "measure",
    "sampler",
    "set_thresholds",
    "speculate",
    "spelled",
    "split",
    "token_batches",
]
