"""Run the command line as ``python -m restride``."""

import sys

from restride.cli import main

sys.exit(main())
