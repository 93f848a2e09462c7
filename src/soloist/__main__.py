"""`python -m soloist` is the command `soloist`."""

import sys

from soloist.cli import main

sys.exit(main())
