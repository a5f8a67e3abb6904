"""Process entry of a rank: `python -m ppbench.run.worker`."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # until all is imported
    from ppbench.run.worker.rank import main

    main(sys.argv[1:])
