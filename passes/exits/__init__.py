"""Early exits: the pass, fitting and calibrating what it inserted, what each way through the model costs, losses."""

from .calibrate import Calibration, calibrate, set_thresholds
from .costs import Costs, exit_costs
from .exits import Exits
from .fit import Fit, fit
from .skipping import Skipping
from .trials import Trials, measure, token_batches

__all__ = [
    "Calibration",
    "Costs",
    "Exits",
    "Fit",
    "Skipping",
    "Trials",
    "calibrate",
    "exit_costs",
    "fit",
    "measure",
    "set_thresholds",
    "token_batches",
]
