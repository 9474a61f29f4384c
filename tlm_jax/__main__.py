"""`python -m tlm_jax` is `tlm`."""

import sys

from tlm_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
