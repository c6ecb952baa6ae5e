"""Early exits: the pass, fitting, calibrating and costing what it inserted, losses, and running it in pieces."""

from .exits import Exits
from .fitting import losses
from .fitting.calibrate import Calibration, calibrate, set_thresholds
from .fitting.costs import Costs, exit_costs
from .fitting.drift import Drift, drift, within_budget
from .fitting.fit import Fit, fit
from .fitting.hypotheses import error_rate, hypothesis_posterior, spelled
from .fitting.trials import Trials, measure, token_batches
from .run.compact import Compact
from .run.river import RIVER, River
from .run.runtime import Decoder, Generated, Step, sampler
from .run.saved import save_pieces
from .run.seq2seq import Decoded, EncoderExits
from .run.speculate import Speculated, speculate
from .run.split import split
from .skipping import Skipping

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
    "losses",
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
