"""Looking inside: taps on chosen values, units that tell what comes next, and rules that decide while text is made."""

from .monitors import NeuronMonitor
from .observe import Observe
from .path_deviation import PathDeviation
from .separation import Separation, separation
from .taps import Unit

__all__ = ["NeuronMonitor", "Observe", "PathDeviation", "Separation", "Unit", "separation"]
