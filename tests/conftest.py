"""What all tests need before anything is imported."""

import atexit
import os
import shutil
import tempfile

if "MPLCONFIGDIR" not in os.environ:  # else matplotlib leaves its list of fonts in the home folder
    os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="dmuon-matplotlib-")
    atexit.register(shutil.rmtree, os.environ["MPLCONFIGDIR"], ignore_errors=True)
