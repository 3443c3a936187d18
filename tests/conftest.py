"""What all tests need before anything is imported."""

import atexit
import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

if "MPLCONFIGDIR" not in os.environ:  # else matplotlib leaves its list of fonts in the home folder
    os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="dmuon-matplotlib-")
    atexit.register(shutil.rmtree, os.environ["MPLCONFIGDIR"], ignore_errors=True)

# How long an example takes says nothing on a machine that other tests keep busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
