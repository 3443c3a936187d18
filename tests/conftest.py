"""What all tests need before anything is imported."""

import atexit
import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" not in os.environ:  # those have the folder of the process above them
    # Killed processes and torchrun leave folders in that of the machine; pytest's own are to stay.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="dmuon-tests-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
    # else matplotlib leaves its list of fonts in the home folder
    os.environ.setdefault("MPLCONFIGDIR", tempfile.mkdtemp(prefix="matplotlib-"))

# How long an example takes says nothing on a machine that other tests keep busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
