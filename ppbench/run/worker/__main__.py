"""Process entry of a rank: `python -m ppbench.run.worker`."""

import gc
import os
import sys

from engine import device_variables

if __name__ == "__main__":
    gc.disable()  # until all is imported
    device_variables.prepare(os.environ)  # whoever started this rank
    from ppbench.run.worker.rank import main

    main(sys.argv[1:])
