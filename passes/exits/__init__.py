"""Early exits: the pass, fitting, calibrating and costing what it inserted, losses, and running it in pieces."""

from .calibrate import Calibration, calibrate, set_thresholds
from .compact import Compact
from .costs import Costs, exit_costs
from .exits import Exits
from .fit import Fit, fit
from .runtime import Decoder, Generated, Step, sampler
from .skipping import Skipping
from .speculate import Speculated, speculate
from .split import split
from .trials import Trials, measure, token_batches

__all__ = [
    "Calibration",
    "Compact",
    "Costs",
    "Decoder",
    "Exits",
    "Fit",
    "Generated",
    "Skipping",
    "Speculated",
    "Step",
    "Trials",
    "calibrate",
    "exit_costs",
    "fit",
    "measure",
    "sampler",
    "set_thresholds",
    "speculate",
    "split",
    "token_batches",
]
