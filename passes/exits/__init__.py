"""Early exits: the pass, fitting, calibrating and costing what it inserted, losses, and running it in pieces."""

from .calibrate import Calibration, calibrate, set_thresholds
from .compact import Compact
from .costs import Costs, exit_costs
from .drift import Drift, drift, within_budget
from .exits import Exits
from .fit import Fit, fit
from .hypotheses import error_rate, hypothesis_posterior, spelled
from .river import RIVER, River
from .runtime import Decoder, Generated, Step, sampler
from .saved import save_pieces
from .seq2seq import Decoded, EncoderExits
from .skipping import Skipping
from .speculate import Speculated, speculate
from .split import split
from .trials import Trials, measure, token_batches

__all__ = [
    "RIVER",
    "Calibration",
    "Compact",
    "Costs",
    "Decoded",
    "Decoder",
    "Drift",
    "EncoderExits",
    "Exits",
    "Fit",
    "Generated",
    "River",
    "Skipping",
    "Speculated",
    "Step",
    "Trials",
    "calibrate",
    "drift",
    "error_rate",
    "exit_costs",
    "fit",
    "hypothesis_posterior",
    "measure",
    "sampler",
    "save_pieces",
    "set_thresholds",
    "speculate",
    "spelled",
    "split",
    "token_batches",
    "within_budget",
]
