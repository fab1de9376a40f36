"""The folder of the tests is importable, so that they can share what they build."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# tiny models gain nothing from a second thread, and lose much to a busy neighbour
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent))

# a busy machine is no reason to fail
settings.register_profile("turnwise", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("turnwise")
