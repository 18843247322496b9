"""Launchers, which start the processes of a group as Ray actors (`ray`) or in this process (`inline`).

Ray puts the driver's current directory before the standard library on its workers' import path. This module moves the
directory to the end of the path, so that a user's file never hides a module of the standard library or of a package.
"""

import os
import sys

if os.path.basename(sys.argv[0]) == "default_worker.py" and os.getcwd() in sys.path:
    sys.path.append(sys.path.pop(sys.path.index(os.getcwd())))
