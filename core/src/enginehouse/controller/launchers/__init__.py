"""Ways to bring the processes of a group up: as Ray actors (`ray`), or in this process (`inline`).

Ray puts the driver's current directory before the standard library on its workers' import path. It is put last before
a worker imports anything else of ours, so that a file of the user's never stands in for a module that is not.
"""

import os
import sys

if os.path.basename(sys.argv[0]) == "default_worker.py" and os.getcwd() in sys.path:
    sys.path.append(sys.path.pop(sys.path.index(os.getcwd())))
