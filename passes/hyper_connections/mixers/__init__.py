"""Mixers: one small file a system."""

from .base import Coefficients as Coefficients
from .base import Mixer as Mixer
from .base import Site as Site
from .ddl import DDL
from .hc import HC
from .ihc import IHC
from .jpmhc import JPMHC
from .kromhc import KromHC
from .mhc import MHC
from .mhc_lite import MHCLite
from .ohc import OHC
from .shc import SHC

MIXERS: dict[str, Mixer] = {m.name: m for m in (HC(), IHC(), MHC(), MHCLite(), OHC(), SHC(), JPMHC(), KromHC(), DDL())}
